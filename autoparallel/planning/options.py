"""Options of `plan` and `compile`, and their checks."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from numbers import Integral, Real
from os import PathLike
from typing import Any, ParamSpec, TypeVar

from torch import nn

from autoparallel import clock
from autoparallel.capture import OpGraph
from autoparallel.errors import (
    AutoparallelError,
    PinError,
    PlanError,
    SearchError,
    shown,
)
from autoparallel.planning.baselines import NAMES, SHARDING
from autoparallel.planning.by_hand import EXAMPLE, ByHand
from autoparallel.plans import Hybrid, Plan
from autoparallel.schedule.fusion import AUTO_SIZE, Fusion
from autoparallel.schedule.schedules import SCHEDULES, names_of, usual
from autoparallel.schedule.step_config import BUCKET_BYTES, KEEPS, RECOMPUTE, REDUCE_DTYPES
from autoparallel.schedule.table_caches import TableCache
from autoparallel.schedule.tiers import (
    EARLY_TILE_BYTES,
    ON_DEVICE,
    PLACES,
    TIERS,
    TILE_BYTES,
    Offload,
    largest_tile,
    listed,
    offload_of,
)
from autoparallel.search import SEARCHES, Progress
from autoparallel.strategies.host_lookups import tables_pinned
from cost_models import Cluster, memory
from cost_models.accuracy import usable_bytes
from cost_models.unequal import only

#: A line for each option, in the docstrings of `plan` and `compile`.
OPTIONS = f"""
    search: the algorithm: "exact" (elimination), "recursive" (mesh axis by mesh axis), "ilp" (an integer program, by
        HiGHS), or "auto", by the size of the problem.
    pins: placements by name pattern, {{"*.q_proj.weight": (Replicate(), Shard(0)), "input_ids": {{"data": Shard(0)}}}};
        "host" for tables of Embedding and EmbeddingBag, which are then looked up in the host's memory
        ({{"tables*": "host"}}); `Cached(rows=100_000, hits=0.9)`: with their hot rows on the devices.
    baseline: a classical plan instead of the search's own ("ddp", "fsdp", "tensor_parallel", "sequence_parallel").
    memory_limit_bytes: the most that the tensors on each device may take; None: the device's memory less its context,
        communicators and fragmentation, and less the error of predictions (`memory_confidence`); inf: no limit.
    memory_confidence: the share of runs of such a plan that should fit in the devices' memory, judged by published
        runs; without ``memory_limit_bytes``.
    optimizer: the optimizer whose state is counted in memory, for example "adamw" or "sgd".
    time_limit_s: limit of the search's work in seconds, counted (about those of two idle cores), so that every machine
        finds the same plan, later where it is slow or busy; None: {clock.JOINT_LIMIT_S:g} of a joint search, else
        {clock.LIMIT_S:g}. After forty times as long by the wall clock the search ends, and says so.
        Ctrl-C ends the search with the best plan so far.
    micro_batches: the batch is run in so many parts, whose gradients add up; or for ranks of unequal speed along the
        mesh's first axis, how many parts each of them runs, (3, 3, 1, 1): it then has no pipeline, and parameters are
        whole along it; None: 1, and in `plan` more where the step does not fit.
    pipeline_stages: how many, over the mesh's first axis, of whose size they are a multiple; None: 1.
    stage_replicas: for each stage the number of ranks of that axis that share its micro-batches, (1, 3) for two stages;
        None: equally many.
    schedule: {names_of()}; None: {usual()!r}, or {usual(2)!r} with several stages a rank.
    recompute: activations that backward computes again: "none", "selective" (all but products, attention and
        collectives), "all_but_attention", "full" (whole blocks), "offload" (kept in host memory instead) or "auto" (of
        as few blocks as memory requires); None: "none" where the step fits.
    saved_on: where what recompute="selective" or "offload" saves of blocks waits for backward: "device", "host" or
        "disk"; None: "device", of "offload" "host".
    zero_stage: 0 stores parameters as ops read them, 1 to 3 in as many shards as possible; None: the search decides.
    reduce_dtype: the dtype in which gradients are summed ("float32", "bfloat16", "float16"); None: the parameter's.
    bucket_bytes: the largest bucket of parameter gathers and gradient reductions: a number, or one by mesh axis
        ({{"data": 100e6, "model": 5e6}}; 25 MiB for the others), or "auto": the sizes with which the plan is predicted
        fastest; None: the smallest of 25, 50, 100 and 200 MiB whose step is predicted to take at most 3 % longer than
        the best of them, and gathers of each block's parameters as one where that is predicted faster.
    buckets: parameters whose gathers and gradient reductions are joined: a number is the most of a bucket; patterns of
        names (["layers.0.*", "head.*"]) are one bucket each, of any size, and ``bucket_bytes`` divides the others;
        None: by size alone.
    copies: micro-batches that run at a time (multi-copy), on each stage of a pipeline too: one's activations are sent
        while another computes; with ZeRO-3 each block's parameters are gathered, or fetched from the host, once for all
        of them; None: 1.
    pieces: linear layers whose operand or result is sent run in so many pieces, one of which travels while the next is
        computed (asynchronous tensor parallelism); None: the search decides.
    offload: where training state lives between steps: "none" (on the device), "host" (optimizer states and gradients in
        host memory), "parameters" (these as well, by ZeRO-3, copied to the device for each use), "disk" (optimizer
        states), or the tiers of parameters, gradients and states, as "host/host/disk" and "disk/disk/disk"; by patterns
        of parameters' names {{"embed*": "disk", "layers.0.*": "host", "*": "none"}}, of which the first that matches
        holds (without a match: the device); or "auto": the fastest of the plans that fit into the devices' memory, also
        with tables on the host; None: "none". `ParallelModule.optimizer` makes the optimizer that steps such states.
    offload_fraction: with "host" or "disk", the share of each parameter's elements whose states are there; None: all
        ("auto": on the host, as few quarters as memory requires).
    step_in_backward: parameters are stepped while backward goes on: on the device each bucket of gradients
        (bucket_bytes) is let go when it has been stepped with, so that those of the whole model never live together;
        states on the host or disk are stepped there meanwhile. Each backward is followed by one optimizer.step(), and
        gradients are neither clipped nor added up between the two; None: False.
    host_memory_limit_bytes: limit, for each device, of the host memory for what leaves it, or for tiles of what is on
        disk; None: the device's share of the host's.
    disk_limit_bytes: limit, for each device, of the disk space for what leaves it; None: no limit in a plan, what is
        free in a run.
    progress: called during the search with its best cost and bound (`autoparallel.search.solve`).
"""


#: Share of the host's memory limit for tiles of states on disk, where gradients or parameters live on the host too.
TILES_SHARE = 0.25
#: What a function that makes a model returns, in the errors of `size`, `fit` and `study`.
MODEL_AND_CALL = "(model, example inputs, example keyword inputs)"
#: Options that a ready plan leaves no room for.
DECIDED_BY_A_PLAN = frozenset({"pins", "baseline", "micro_batches", "pipeline_stages", "stage_replicas", "schedule",
                               "recompute", "saved_on", "zero_stage", "reduce_dtype", "bucket_bytes", "buckets",
                               "copies", "pieces", "offload", "offload_fraction", "step_in_backward"})
#: Of these, those that a plan by hand leaves open.
_BESIDE_BY_HAND = {"reduce_dtype", "bucket_bytes", "buckets", "offload", "offload_fraction", "step_in_backward"}


@dataclass(frozen=True)
class Options:
    """Options that `plan` and `compile` share, as `OPTIONS` describes them."""

    search: str = "auto"
    pins: Mapping[str, Any] | None = None
    baseline: str | None = None
    memory_limit_bytes: float | None = None
    memory_confidence: float = 0.95
    optimizer: str = "adamw"
    time_limit_s: float = clock.LIMIT_S
    micro_batches: int | Sequence[int] | None = None
    pipeline_stages: int | None = None
    stage_replicas: Sequence[int] | None = None
    schedule: str | None = None
    recompute: str | None = None
    saved_on: str | None = None
    zero_stage: int | None = None
    reduce_dtype: str | None = None
    bucket_bytes: float | str | Mapping[str, float] | None = None
    buckets: int | Sequence[str] | None = None
    copies: int | None = None
    pieces: int | None = None
    offload: str | Mapping[str, str] | None = None
    offload_fraction: float | None = None
    step_in_backward: bool | None = None
    host_memory_limit_bytes: float | None = None
    disk_limit_bytes: float | None = None
    progress: Progress | None = None
    by_hand: ByHand | None = field(default=None, metadata={"internal": True})  # of `plan` alone, and the next
    compare_by_hand: ByHand | str | None = field(default=None, metadata={"internal": True})  # a str is "usual"
    tiers: Sequence[str] = field(default=PLACES[1:], metadata={"internal": True})  # that "auto" may take
    looks_up: bool = field(default=True, metadata={"internal": True})  # whether "auto" may put tables on the host
    saved_tiers: Sequence[str] = field(default=(), metadata={"internal": True})  # where "auto" may put saved tensors
    on_host: tuple[str, ...] = field(default=(), metadata={"internal": True})  # the tables that pins put there
    cached: tuple[TableCache, ...] = field(default=(), metadata={"internal": True})  # the caches of those

    @property
    def stages(self) -> int:
        return self.pipeline_stages or len(self.stage_replicas or ()) or 1

    @property
    def by_rank(self) -> tuple[int, ...]:
        """``micro_batches`` of each rank of the first axis; empty if each has as many."""
        return tuple(self.micro_batches) if isinstance(self.micro_batches, Sequence) else ()

    @property
    def step_micro_batches(self) -> int | None:
        """``micro_batches`` of all ranks of the first axis together."""
        return sum(self.micro_batches) if isinstance(self.micro_batches, Sequence) else self.micro_batches

    @property
    def has_first_axis(self) -> bool:
        """Whether the mesh's first axis has pipeline stages, or micro-batches by rank, and no strategies."""
        return self.stages > 1 or bool(self.by_rank)

    @property
    def replicas(self) -> tuple[int, ...]:
        """``stage_replicas`` as in `Hybrid`: empty if each stage has one rank."""
        found = tuple(self.stage_replicas or ())
        return found if any(ranks != 1 for ranks in found) or len(found) != self.stages else ()

    def hybrid(self, pipeline_ranks: int) -> Hybrid:
        """The step configuration on ``pipeline_ranks`` ranks of the pipeline axis. Raises PlanError for invalid
        combinations."""
        if self.schedule is not None and self.stages == 1:
            raise PlanError(f"schedule={self.schedule!r} is an order of pipeline stages, and there is one stage: give "
                            "pipeline_stages (--pipeline-stages), or joint=True (--joint), which finds their number; "
                            "or leave schedule out")
        micro_batches = 1 if self.step_micro_batches is None else self.step_micro_batches
        zero_stage = (2 if micro_batches == 1 else 1) if self.zero_stage is None else self.zero_stage
        return Hybrid(micro_batches, self.stages, pipeline_ranks, self.schedule or usual(self.stages // pipeline_ranks),
                      zero_stage=zero_stage,
                      recompute="none" if self.recompute in (None, "auto") else self.recompute,
                      replicas=self.replicas, by_rank=self.by_rank, copies=self.copies or 1,
                      pieces=self.pieces or 1, **self.given)

    @property
    def given(self) -> dict[str, Any]:
        """The fields of `Hybrid` that the search does not choose: how gradients are reduced, where states, tables and
        saved tensors live."""
        return {"reduce_dtype": self.reduce_dtype, "offload": self.tier, "on_host": self.on_host, "cached": self.cached,
                "saved_on": self.saved_on or "device",
                "bucket_bytes": self.bucket_bytes if _is_number(self.bucket_bytes) else BUCKET_BYTES,
                "fusion": self.fusion}

    @property
    def fusion(self) -> Fusion:
        """Sizes of buckets by axis, and buckets by number and name."""
        sizes = self.bucket_bytes if isinstance(self.bucket_bytes, Mapping) else {}
        given = self.bucket_bytes not in (None, AUTO_SIZE)
        blocks = not given and not self.step_in_backward    # which counts small buckets
        if self.buckets is None or isinstance(self.buckets, int):
            return Fusion(tuple(sizes.items()), self.buckets, blocks=blocks, given=given)
        return Fusion(tuple(sizes.items()), None, tuple(self.buckets), blocks, given)

    @property
    def tier(self) -> Offload:
        """The tier of optimizer states, and when they are stepped; of "auto" the first, the device."""
        if self.offload in (None, "none", "auto"):
            return replace(ON_DEVICE, in_backward=bool(self.step_in_backward))
        most = EARLY_TILE_BYTES if self.step_in_backward else TILE_BYTES
        found = replace(offload_of(self.offload, self.offload_fraction or 1.0, most),
                        in_backward=bool(self.step_in_backward))
        if self.host_memory_limit_bytes is None or not found.in_tier("disk"):
            return found
        share = TILES_SHARE if found.in_tier("host") else 1.0
        states = memory.recipe(self.optimizer).num_states
        return replace(found, tile_bytes=largest_tile(share * self.host_memory_limit_bytes, states, most))

    def without_decided(self) -> Options:
        """The options for calls of another form than a plan's: without those that the plan decides."""
        return Options(**{**vars(self), **dict.fromkeys(DECIDED_BY_A_PLAN), "on_host": (), "cached": ()})

    def with_tables(self, graph: OpGraph) -> Options:
        """The options with the tables of a program that pins put on the host. Raises PinError."""
        on_host, cached = tables_pinned(graph, self.pins)
        return replace(self, on_host=on_host, cached=cached)

    @property
    def is_open(self) -> bool:
        """Whether stages, schedule, recompute and ZeRO stage are left to the planner, and there are not to be several
        micro-batches."""
        said = (self.pipeline_stages, self.stage_replicas, self.schedule, self.recompute, self.zero_stage,
                self.baseline, self.by_hand, self.copies)
        return self.micro_batches in (None, 1) and all(value is None for value in said)

    def limit_bytes(self, cluster: Cluster) -> float:
        """The memory limit of a plan per device, in bytes; the layouts of a plan by hand do not depend on any."""
        if self.by_hand is not None:
            return math.inf
        if self.memory_limit_bytes is not None:
            return self.memory_limit_bytes
        return usable_bytes(cluster, self.memory_confidence)

    def wider_limits(self, cluster: Cluster) -> tuple[float, float]:
        """The memory limits of the mean device of a cluster, and of its largest, in bytes."""
        if self.by_hand is not None or self.memory_limit_bytes is not None or not cluster.is_unequal:
            return (self.limit_bytes(cluster),) * 2
        counts = Counter(cluster.kinds_by_device)
        usable = {kind: usable_bytes(only(cluster, kind), self.memory_confidence) for kind in counts}
        return sum(counts[kind] * usable[kind] for kind in counts) / cluster.num_devices, max(usable.values())


def check_joint(joint: Any, options: Options, axis_names: Sequence[str] | None) -> None:
    """Raises PlanError if ``joint`` is no bool, or options decide what a joint search decides."""
    if not isinstance(joint, bool):
        raise PlanError(f"joint is {shown(joint)}: give True or False")
    if joint and (axis_names or options.baseline):
        raise PlanError("joint=True picks the axes and the plan: leave out axis_names and baseline")


def check_disk_path(disk_path: Any, options: Options, plan: Plan | None) -> None:
    """Raises PlanError for a ``disk_path`` that is no path, or that is missing or given in vain."""
    if disk_path is not None and (not isinstance(disk_path, (str, PathLike)) or not str(disk_path)):
        raise PlanError(f"disk_path is {shown(disk_path)}: give the path of a folder, a str or a pathlib.Path")
    away = plan.hybrid.offload if plan else options.tier
    saved = (plan.hybrid.saved_on if plan else options.saved_on) == "disk"
    on_disk = (*away.in_tier("disk"), *["saved tensors of blocks"] * saved)
    if on_disk and disk_path is None:
        raise PlanError(f"{listed(on_disk)} go to disk, and disk_path is not given: give a folder of a local disk, "
                        "autoparallel.compile(..., disk_path='/local/disk')")
    if disk_path is not None and not on_disk and (plan or options.offload != "auto"):
        where = " and ".join(dict.fromkeys(one.states for one in away.each))
        raise PlanError(f"disk_path={str(disk_path)!r} is of training state on disk, and optimizer states stay on the "
                        f"{where}: leave it out, or give offload='disk' or 'auto', or saved_on='disk'")


def limits_in_vain(options: Options, plan: Plan | None = None) -> dict[str, str]:
    """The limits of host memory and disk that were given and that nothing comes under, and what would.

    ``plan``: a ready one, which says what leaves the device."""
    if options.offload == "auto":
        return {}
    said: Any = plan.hybrid if plan else options.by_hand or options
    away = plan.hybrid.offload if plan else options.tier
    if options.by_hand and options.by_hand.offload != "none":
        away = offload_of(options.by_hand.offload)
    on_disk = bool(away.in_tier("disk")) or said.saved_on == "disk"
    on_host = on_disk or away.is_away or said.saved_on == "host" or said.recompute == "offload" or bool(
        plan.hybrid.on_host if plan else any(place == "host" for place in (options.pins or {}).values()))
    vain = {"host_memory_limit_bytes": ("" if on_host else "offload='host' or 'disk', recompute='offload' or "
                                        "saved_on='host', or pins of tables to 'host'"),
            "disk_limit_bytes": "" if on_disk else "offload='disk' or saved_on='disk'"}
    return {name: instead for name, instead in vain.items() if instead and getattr(options, name) is not None}


def check_limits(options: Options, plan: Plan | None = None) -> None:
    """Raises PlanError for a limit of host memory or disk that nothing comes under."""
    for name, instead in limits_in_vain(options, plan).items():
        raise PlanError(f"{name}={getattr(options, name):g} (--{name.removesuffix('_bytes').replace('_', '-')}), and "
                        f"nothing goes there: leave it out, or give {instead}; or offload='auto'")


def check_groups(options: Options, model: nn.Module) -> None:
    """Raises PlanError for a pattern of the options ``offload`` and ``buckets`` by which no parameter of the model gets
    its tier, or is in its bucket."""
    for option, patterns in (("offload", options.offload), ("buckets", options.buckets)):
        if isinstance(patterns, (Mapping, Sequence)) and not isinstance(patterns, str):
            _check_patterns(option, patterns, model)


def _check_patterns(option: str, patterns: Iterable[str], model: nn.Module) -> None:
    first = {id(p): name for name, p in model.named_parameters()}
    names = left = list(first.values())
    shared = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    for pattern in patterns:
        if pattern == "*":
            continue
        mine = [name for name in left if fnmatchcase(name, pattern)]
        if not mine and any(fnmatchcase(name, pattern) for name in names):
            raise PlanError(f"{option}: patterns before {pattern!r} have all parameters that it matches, and the first "
                            "holds: give it before them, or leave it out")
        if tied := {known for name, known in shared.items() if fnmatchcase(name, pattern)} if not mine else ():
            raise PlanError(f"{option}: what {pattern!r} matches is known as {', '.join(sorted(tied))}, to which it is "
                            "tied: write that")
        if not mine:
            near = difflib.get_close_matches(pattern, names, 8, 0.3) or names[:8]
            raise PlanError(f"{option}: no parameter's name matches {pattern!r}; of {len(names)} there are {near}: "
                            "write '*' for any letters, as 'layers.0.*' for all of a block")
        left = [name for name in left if not fnmatchcase(name, pattern)]


def compared_by_hand(options: Options, given: Any, devices: int) -> Options:
    """The options with ``compare_by_hand``, for so many devices. Raises PlanError for what is no plan by hand."""
    usual = isinstance(given, str) and given == "usual"
    if not usual and not isinstance(given, (str, Mapping, ByHand)):
        raise PlanError(f"compare_by_hand is {shown(given)}: give a plan by hand as text such as {EXAMPLE}, or a "
                        "mapping with these keys; or 'usual'")
    return replace(options, compare_by_hand="usual" if usual else ByHand.of(given).on(devices))


def with_plan_by_hand(options: Options, by_hand: Any, num_devices: int, **given: Any) -> Options:
    """The options with a plan by hand for so many devices. Raises PlanError if it is none, or if something that it
    decides is ``given`` or among the options."""
    if options.tier.moves_parameters:    # whose ZeRO stage the plan by hand says
        options = replace(options, zero_stage=None)
    given |= {name: getattr(options, name) for name in DECIDED_BY_A_PLAN - _BESIDE_BY_HAND}
    given["search"] = options.search != Options.search
    if taken := sorted(name for name, value in given.items() if value):
        raise PlanError(f"by_hand decides {', '.join(taken)}: leave them out, or leave out by_hand and search")
    return replace(options, by_hand=ByHand.of(by_hand).on(num_devices))


P = ParamSpec("P")
T = TypeVar("T")


def with_options(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator: the docstring has `OPTIONS` in place of "OPTIONS", and an unknown keyword is a PlanError that says
    where it belongs, or the nearest known one."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in names and name in _ELSEWHERE:
                raise PlanError(f"{name} belongs to autoparallel.{_ELSEWHERE[name]}")
            if name not in names:
                near = difflib.get_close_matches(name, names) or [f.name for f in fields(Options)]
                raise PlanError(f"unknown option {name!r}; there are {near}")
        return function(*args, **kwargs)

    call.__doc__ = (function.__doc__ or "").replace("    OPTIONS\n", OPTIONS.strip("\n") + "\n")
    return call


def options_of(given: Mapping[str, Any]) -> Options:
    """The options among a function's arguments by name, checked.

    Raises PlanError that names an unknown or invalid option (SearchError for ``search``, PinError for ``pins``).
    """
    given = {f.name: given[f.name] for f in fields(Options) if f.name in given and not f.metadata}
    for name, value in given.items():
        if value is None and getattr(Options, name) is None:
            continue
        if name == "offload" and isinstance(value, Mapping):
            _check_places(value)
        elif isinstance(wanted := _WANTED[name], tuple):
            if isinstance(value, bool) or not isinstance(value, (str, Integral)) or value not in wanted:
                raise _ERRORS.get(name, PlanError)(f"unknown {name} {shown(value)}; there are {list(wanted)}")
        elif not wanted.holds(value):
            raise _ERRORS.get(name, PlanError)(f"{name} is {shown(value)}: give {wanted.text}")
    if given.get("offload_fraction") is not None and given.get("offload") not in ("host", "disk"):
        raise PlanError(f"offload_fraction={given['offload_fraction']} is of offload='host' or 'disk', and offload is "
                        f"{shown(given.get('offload'))}: give one of these, or leave offload_fraction out")
    if given.get("saved_on") and (given.get("recompute") not in KEEPS
                                  or (given["saved_on"], given["recompute"]) == ("device", "offload")):
        raise PlanError(f"saved_on={given['saved_on']!r} with recompute={given.get('recompute')!r}: it says where what "
                        "recompute='selective' or 'offload' saves of blocks waits for backward, 'offload' on the host "
                        "or disk: give one of these two, or leave saved_on out")
    fetches = given.get("zero_stage") is None and _moves_parameters(given.get("offload"))
    if fetches:
        given["zero_stage"] = 3    # which alone fetches for each use
    _check_storage(given.get("baseline"), given.get("zero_stage"), given["offload"] if fetches else None)
    return Options(**given)


def _check_storage(baseline: str | None, zero_stage: int | None, offload: Any) -> None:
    """Raises PlanError for a baseline that stores parameters otherwise than a ZeRO stage does. ``offload``: the option
    that asks for the stage, if no other does."""
    if baseline is None or zero_stage is None or (baseline in SHARDING) == (zero_stage > 0):
        return
    if offload is not None:
        raise PlanError(f"offload={offload!r} keeps parameters in shards (zero_stage=3), and baseline={baseline!r} "
                        "whole on all data-parallel ranks: take baseline='fsdp', or offload='host'")
    has = "in shards" if baseline in SHARDING else "whole on all data-parallel ranks"
    instead = "'ddp'" if baseline in SHARDING else "'fsdp', or a plan by hand, as by_hand='dp=4,tp=2,zero=1'"
    raise PlanError(f"baseline={baseline!r} has training state {has}, which zero_stage={zero_stage} has not: leave "
                    f"zero_stage out, or give {instead}")


def _moves_parameters(place: Any) -> bool:
    return place not in (None, "auto") and offload_of(place).moves_parameters


def _check_places(by_name: Mapping[Any, Any]) -> None:
    """Raises PlanError for an option ``offload`` that is no mapping from patterns of names to tiers."""
    example = "{'embed*': 'disk', 'layers.0.*': 'host', '*': 'none'}"
    if not by_name:
        raise PlanError(f"offload is an empty mapping: give tiers by patterns of names, as {example}, or leave it out")
    for number, (pattern, place) in enumerate(by_name.items(), 1):
        if not isinstance(pattern, str) or not pattern:
            raise PlanError(f"offload: {shown(pattern)} is no pattern of names: write {example}")
        if not isinstance(place, str) or place not in PLACES:
            raise PlanError(f"unknown offload {shown(place)} of {pattern!r}; there are {list(PLACES)}")
        if pattern == "*" and number < len(by_name):
            raise PlanError("offload: '*' matches all parameters, and the first pattern that matches holds: give it "
                            "last")


@dataclass(frozen=True)
class _Wanted:
    """The valid values of an option: a description, and a predicate."""

    text: str
    holds: Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_amount(value: Any) -> bool:
    return _is_number(value) and (0 <= value < 1e300 or value == math.inf)  # the range of a float


def are_counts(value: Any) -> bool:
    """Whether this is a sequence of integers, each 1 or more."""
    return (isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) > 0
            and all(map(_is_count, value)))


def _are_sizes(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) > 0 and all(
        isinstance(axis, str) and _is_amount(size) and size < math.inf for axis, size in value.items())


def _are_names(value: Any) -> bool:
    return (isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) > 0
            and all(isinstance(pattern, str) and pattern for pattern in value))


_COUNT = _Wanted("a whole number, 1 or more", _is_count)
_WANTED: Mapping[str, tuple[Any, ...] | _Wanted] = {
    "search": SEARCHES,
    "pins": _Wanted("placements by name pattern: {'*.weight': (Replicate(), Shard(0)), 'ids': {'data': Shard(0)}}, or "
                    "'host' or Cached(rows=...) of tables",
                    lambda value: isinstance(value, Mapping) and all(isinstance(k, str) for k in value)),
    "baseline": NAMES,
    "memory_limit_bytes": _Wanted("bytes per device as a number, 0 or more (70e9; inf: no limit)", _is_amount),
    "memory_confidence": _Wanted("a share, from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1),
    "optimizer": _Wanted("a name, for example 'adamw'", lambda value: isinstance(value, str)),
    "time_limit_s": _Wanted("seconds as a number, 0 or more", _is_amount),
    "micro_batches": _Wanted("a whole number, 1 or more, or how many each rank of the mesh's first axis runs, for "
                             "example (3, 3, 1, 1)", lambda value: _is_count(value) or are_counts(value)),
    "pipeline_stages": _COUNT,
    "stage_replicas": _Wanted("the number of ranks of each stage, for example (1, 3)", are_counts),
    "schedule": tuple(SCHEDULES),
    "recompute": (*RECOMPUTE, "auto"),
    "saved_on": TIERS,
    "zero_stage": (0, 1, 2, 3),
    "reduce_dtype": REDUCE_DTYPES,
    "bucket_bytes": _Wanted("bytes of a bucket as a number, 0 or more, or by mesh axis {'data': 100e6, 'model': 5e6}, "
                            "or 'auto'", lambda value: _is_amount(value) or value == AUTO_SIZE or _are_sizes(value)),
    "buckets": _Wanted("the most parameters of a bucket, 1 or more, or patterns of the names of each bucket's, "
                       "['layers.0.*', 'head.*']", lambda value: _is_count(value) or _are_names(value)),
    "copies": _COUNT,
    "pieces": _COUNT,
    "offload": (*PLACES, "auto"),
    "offload_fraction": _Wanted("a share above 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1),
    "step_in_backward": _Wanted("True or False", lambda value: isinstance(value, bool)),
    "host_memory_limit_bytes": _Wanted("bytes per device as a number, 0 or more", _is_amount),
    "disk_limit_bytes": _Wanted("bytes per device as a number, 0 or more", _is_amount),
    "progress": _Wanted("a function", callable),
}
#: Keywords of only one of `plan` and `compile`, when given to the other: the owner, and what to write.
_ELSEWHERE = {
    "by_hand": "plan: write plan = autoparallel.plan(model, cluster, example_inputs=..., by_hand=...), then "
               "autoparallel.compile(model, mesh, plan=plan)",
    "phase": "plan: write plan = autoparallel.plan(model, cluster, phase=..., context=...), then "
             "autoparallel.compile(model, mesh, plan=plan)",
    "joint": "plan: write plan = autoparallel.plan(model, cluster, example_inputs=..., joint=True), then "
             "autoparallel.compile(model, mesh, plan=plan)",
    "mesh_shape": "plan: a mesh has its axes, as init_device_mesh(device_type, (2, 4)) makes them; for a count of "
                  "devices the search finds them",
    "axis_names": "plan: a mesh names its own axes, init_device_mesh(..., mesh_dim_names=('data', 'model'))",
    "mesh": "compile: give plan a cluster, and mesh_shape=(2, 4) to fix its axes",
    "inputs": "compile: plan takes the examples of the whole batch",
    "outputs": "compile, whose module gives them",
    "max_forms": "compile, whose module keeps programs",
    "backend": "compile: a plan is for any of them",
    "check_inputs": "compile, whose module compares what its ranks are called with",
    "disk_path": "compile, on whose machines the folder is",
    "plan": "compile, which runs it: autoparallel.compile(model, mesh, plan=plan)",
}
_ERRORS: Mapping[str, type[AutoparallelError]] = {"search": SearchError, "pins": PinError}
