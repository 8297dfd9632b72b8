"""The step configuration: pipeline stages, micro-batches, schedule, ZeRO stage, recompute, gradient dtype."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from autoparallel.errors import InfeasibleError, PlanError, shown
from autoparallel.schedule.fusion import BY_SIZE, Fusion
from autoparallel.schedule.schedules import SCHEDULES, Schedule, names_of, usual
from autoparallel.schedule.table_caches import TableCache
from autoparallel.schedule.tiers import ON_DEVICE, TIERS, Offload

if TYPE_CHECKING:
    import torch

RECOMPUTE = ("none", "selective", "all_but_attention", "full", "offload")
#: Of these, the kinds whose saved tensors can wait for backward outside of the device.
KEEPS = ("selective", "offload")
#: Micro-batches, stages and ranks of a pipeline, each.
MOST = 2**20
#: The largest bucket of torch's DistributedDataParallel.
BUCKET_BYTES = 25 * 2**20
#: Bytes of a whole tensor from which its shards, cut along the first dim, are gathered and reduced without a bucket.
#: (On a GPU of 3 TB/s, reading and writing so much takes 3 us, about as long as another message of a group.)
LARGE_BYTES = 4 * 2**20
REDUCE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Hybrid:
    """The configuration of one training step. Raises PlanError for combinations that cannot run.

    ``micro_batches``: their number. ``stages``: pipeline stages over the mesh's pipeline axis of ``pipeline_ranks``
    ranks, a multiple of it (each rank has ``stages / pipeline_ranks``). ``cuts``: the decisions at which stages 1, 2,
    ... begin. ``replicas``: stage s runs on ``replicas[s]`` ranks of that axis, which share its micro-batches (rank j
    of k runs those with m % k == j). ``by_rank``: without stages, so many of the micro-batches run on each rank of that
    axis, for ranks of unequal speed, which sum their gradients at the end of the step. ``zero_stage``: the lifetime of
    gathered parameters and the time of gradient reduction:

        0, 1   gathered once per step; unsharded gradients accumulate and are reduced at the end of the step
        2      gathered once per step; gradients are reduced in each micro-batch's backward, and only a shard is kept
        3      gathered for each use in each micro-batch, and again in backward, where gradients are reduced

    (Whether a parameter is sharded at all is decided by its layout.) ``recompute``: "none"; "selective", all ops of a
    block but products, attention and collectives; "all_but_attention", all but attention; "full", whole blocks;
    "offload", no recompute, but a block's saved tensors wait for backward outside of the device. ``recompute_blocks``:
    the paths of the blocks that this applies to (None: all). ``saved_on``: where what "selective" and "offload" save of
    blocks waits for backward: "device", "host" or "disk"; of "offload" not the first.
    ``reduce_dtype``: the dtype in which gradients are summed over ranks, and over micro-batches if it is more precise
    than the parameter's (None: the parameter's). ``bucket_bytes``: the largest bucket of parameter gathers and gradient
    reductions (a single larger parameter is allowed); ``fusion``: its size on single mesh axes, buckets by number and
    by name, and whether a block's gathers are one of any size. ``copies``: micro-batches that run at a time
    (multi-copy): one's activations are sent while another computes, and blocks' parameters are gathered once for all of
    them (ZeRO-3), for the activations of so many. ``offload``: where the optimizer's states live, and gradients and
    parameters. ``on_host``: tables whose lookups run on the host, with their gradients and optimizer states in its
    memory (states on disk, where ``offload`` puts states there). ``cached``: those of them whose hot rows the devices
    hold, with their states, and look up and step there. ``pieces``: linear layers whose operand or result is
    redistributed run in so many pieces, of which one travels while another is computed (`schedule.pieces`).
    ``experts_overlap``: rows of tokens travel to their experts and back while other products of the block run
    (`schedule.expert_windows`).
    """

    micro_batches: int = 1
    stages: int = 1
    pipeline_ranks: int = 1
    schedule: str = usual()
    cuts: tuple[str, ...] = ()
    zero_stage: int = 2
    recompute: str = "none"
    recompute_blocks: tuple[str, ...] | None = None
    reduce_dtype: str | None = None
    replicas: tuple[int, ...] = ()
    by_rank: tuple[int, ...] = ()
    bucket_bytes: float = BUCKET_BYTES
    copies: int = 1
    offload: Offload = ON_DEVICE
    on_host: tuple[str, ...] = ()
    pieces: int = 1
    saved_on: str = "device"
    cached: tuple[TableCache, ...] = ()
    experts_overlap: bool = True
    fusion: Fusion = BY_SIZE

    def __post_init__(self) -> None:
        if self.recompute == "offload" and self.saved_on == "device":
            object.__setattr__(self, "saved_on", "host")
        for name in ("micro_batches", "stages", "pipeline_ranks", "copies", "pieces"):
            if not 1 <= getattr(self, name) <= MOST:
                raise PlanError(f"{name} is {shown(getattr(self, name))}: give a number from 1 to {MOST:,}")
        if not 0 <= self.bucket_bytes < math.inf:
            raise PlanError(f"bucket_bytes is {shown(self.bucket_bytes)}: give a number, 0 or more")
        if self.schedule not in SCHEDULES:
            raise PlanError(f"unknown schedule {self.schedule!r}; there are {list(SCHEDULES)}")
        if self.recompute not in RECOMPUTE:
            raise PlanError(f"unknown recompute {self.recompute!r}; there are {list(RECOMPUTE)}")
        if self.reduce_dtype not in (None, *REDUCE_DTYPES):
            raise PlanError(f"unknown reduce_dtype {self.reduce_dtype!r}; there are {list(REDUCE_DTYPES)}, and None")
        if self.saved_on not in TIERS or (self.saved_on != "device" and self.recompute not in KEEPS):
            raise PlanError(f"saved_on={self.saved_on!r} with recompute={self.recompute!r}: one of {list(TIERS)}, for "
                            f"recompute={' or '.join(map(repr, KEEPS))}, which save tensors of blocks")
        if self.recompute_blocks is not None and (self.recompute == "none" or not self.recompute_blocks):
            raise PlanError(f"recompute={self.recompute!r} of the blocks {list(self.recompute_blocks)}: name some, and "
                            "say how ('selective' or 'full')")
        if self.zero_stage not in (0, 1, 2, 3):
            raise PlanError(f"unknown zero_stage {self.zero_stage!r}; there are 0, 1, 2 and 3")
        if self.offload.moves_parameters:
            _check_fetches(self)
        if self.on_host or self.cached:
            _check_lookups(self)
        if self.offload.in_backward and self.offload.is_away:
            _check_steps_in_backward(self)
        if self.by_rank:
            _check_by_rank(self)
        elif self.replicas:
            _check_replicas(self)
        elif self.stages % self.pipeline_ranks:
            raise PlanError(f"{self.stages} pipeline stages on {self.pipeline_ranks} ranks: each rank must have the "
                            f"same number; take a multiple of {self.pipeline_ranks}")
        if self.stages > 1 and self.pipeline_ranks == 1:
            raise PlanError(f"{self.stages} pipeline stages need a pipeline axis of at least two ranks")
        if self.copies > 1:
            _check_copies(self)
        _check_schedule(self)
        if self.reads_alone and replace(self.fusion, blocks=True, given=False) != BY_SIZE:
            raise PlanError(f"buckets with zero_stage=3 and schedule={self.schedule!r}, which moves each parameter by "
                            "itself: leave out buckets and sizes by axis, or take another schedule")
        if self.pieces > 1:
            _check_pieces(self)

    @property
    def pipelining(self) -> Schedule:
        """All that is known of the schedule."""
        return SCHEDULES[self.schedule]

    @property
    def is_plain(self) -> bool:
        """Whether a step is one forward and one backward of the whole program."""
        return self.micro_batches == 1 and self.stages == 1

    @property
    def reads_each(self) -> bool:
        """Whether each of several micro-batches reads parameters itself, and reduces their gradients in its backward.
        (With ZeRO-2 gathers run once for all.) Else they are read before all micro-batches."""
        return not self.is_plain and (self.zero_stage == 3 or (self.zero_stage == 2 and not self.puts_off_weights))

    @property
    def gathers_once(self) -> bool:
        """Whether micro-batches read parameters themselves of which each is gathered once for all (ZeRO-2)."""
        return self.reads_each and self.keeps_gathered

    @property
    def overlaps_each(self) -> bool:
        """Whether communication of parameters overlaps with compute in every micro-batch. (Zero bubble reduces
        in the second part of a backward, and gathers without overlap.)"""
        return self.is_plain or (self.zero_stage >= 2 and not self.puts_off_weights)

    @property
    def reads_alone(self) -> bool:
        """Whether micro-batches read each parameter by itself and wait for it (ZeRO-3 with zero bubble)."""
        return self.reads_each and not self.overlaps_each

    @property
    def prefetches(self) -> bool:
        """Whether ZeRO-3 prefetches gathered parameters: not where backward runs in two parts (zero bubble)."""
        return self.zero_stage == 3 and self.overlaps_each

    @property
    def gathers_blocks(self) -> bool:
        """Whether ZeRO-3 gathers a block's parameters together, a block ahead, as FSDP2 does; not from the host, since
        who keeps them there wants few on the device at a time (but several micro-batches, which all read them)."""
        return self.prefetches and (self.copies > 1 or not self.offload.moves_parameters)

    @property
    def alternates(self) -> bool:
        """Whether several micro-batches at a time alternate within blocks, where activations travel. Not where a block
        holds as little as can be: with ZeRO-3 and recompute, or saved tensors outside of the device, it runs for one of
        them after the other (`schedule.multi_copy.runs_by_block`)."""
        small = self.recompute != "none" and (self.zero_stage == 3 or self.saved_on != "device")
        return self.copies > 1 and not small

    @property
    def keeps_gathered(self) -> bool:
        """Whether gathered parameters are kept until backward."""
        return self.zero_stage < 3

    @property
    def puts_off_weights(self) -> bool:
        """Whether backward computes the gradients of weights after those of inputs, for several micro-batches (zero
        bubble)."""
        return self.pipelining.splits_backward and self.stages > 1

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """``reduce_dtype`` as a torch dtype."""
        import torch  # not above: plans are read and shown without it

        return getattr(torch, self.reduce_dtype) if self.reduce_dtype else None

    def recomputed(self, block: str | None) -> bool:
        """Whether the block at this path keeps only its inputs on the device: backward recomputes its other saved
        tensors, or fetches them from the host."""
        known = self.recompute_blocks is None or block in self.recompute_blocks
        return self.recompute != "none" and block is not None and known

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """Sizes of the groups of neighbouring ranks on the pipeline axis that have the same stages. Stage s belongs to
        group ``s % len(groups)``."""
        return (self.pipeline_ranks,) if self.by_rank else self.replicas or (1,) * self.pipeline_ranks

    def ranks_of(self, *stages: int) -> tuple[int, ...]:
        """The ranks of the pipeline axis that run any of these stages."""
        if not self.replicas and not self.by_rank:
            return tuple(sorted({stage % self.pipeline_ranks for stage in stages}))
        ends = list(itertools.accumulate(self.groups))
        numbers = sorted({stage % len(ends) for stage in stages})
        return tuple(rank for n in numbers for rank in range(ends[n] - self.groups[n], ends[n]))

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """The pipeline rank that runs a micro-batch of a stage."""
        if self.by_rank:
            return bisect.bisect_right(list(itertools.accumulate(self.by_rank)), micro_batch)
        ranks = self.ranks_of(stage)
        return ranks[micro_batch % len(ranks)]

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """The stages of one rank of the pipeline axis."""
        return tuple(stage for stage in range(self.stages) if pipeline_rank in self.ranks_of(stage))

    def micro_batches_of(self, pipeline_rank: int) -> Sequence[int]:
        """The micro-batches of one rank of the pipeline axis."""
        if self.by_rank:
            first = sum(self.by_rank[:pipeline_rank])
            return range(first, first + self.by_rank[pipeline_rank])
        ranks = self.ranks_of(*self.stages_of(pipeline_rank))
        return range(pipeline_rank - ranks[0], self.micro_batches, len(ranks))

    def micro_batches_on(self, stage: int) -> int:
        """The number of micro-batches per rank of a stage, at most."""
        return max(self.by_rank) if self.by_rank else self.micro_batches // self.groups[stage % len(self.groups)]


def first_axis_of(hybrid: Hybrid) -> str:
    """The name of the mesh's first axis, if that is the pipeline's, or one whose ranks run micro-batches by speed."""
    return "speed" if hybrid.by_rank else "pipeline"


def ranks_told(numbers: Sequence[int]) -> str:
    """Numbers by rank, equal neighbours together.

    >>> ranks_told((3, 1)), ranks_told((3, 3, 1, 1, 1))
    ('3 and 1', '3 on each of 2 ranks and 1 on each of 3 ranks')
    """
    runs = [(number, len(list(some))) for number, some in itertools.groupby(numbers)]
    return " and ".join(f"{number} on each of {count} ranks" if count > 1 else f"{number}" for number, count in runs)


def as_rounds(hybrid: Hybrid) -> Hybrid:
    """The step whose micro-batches are this one's rounds: `Hybrid.copies` of them, which run at a time. A pipeline runs
    and sends rounds.

        >>> as_rounds(Hybrid(micro_batches=8, stages=2, pipeline_ranks=2, copies=2)).micro_batches
        4
    """
    return hybrid if hybrid.copies == 1 else _as_rounds(hybrid)


@lru_cache(256)
def _as_rounds(hybrid: Hybrid) -> Hybrid:
    return replace(hybrid, micro_batches=hybrid.micro_batches // hybrid.copies, copies=1)


def without_recompute(hybrid: Hybrid) -> Hybrid:
    """The same step, with what all blocks save on the device."""
    return replace(hybrid, recompute="none", recompute_blocks=None, saved_on="device")


def _check_schedule(hybrid: Hybrid) -> None:
    how, per_rank = hybrid.pipelining, hybrid.stages // hybrid.pipeline_ranks
    if per_rank > 1 and not hybrid.replicas and not how.several_stages:
        raise PlanError(f"schedule {hybrid.schedule!r} runs one stage per rank, and {hybrid.stages} stages on "
                        f"{hybrid.pipeline_ranks} ranks are {per_rank}: take "
                        f"{names_of(lambda other: other.several_stages)}")
    count = hybrid.micro_batches // hybrid.copies
    units = f"groups of {hybrid.copies} micro-batches (copies)" if hybrid.copies > 1 else "micro-batches"
    if how.fills and hybrid.stages > 1 and not hybrid.replicas and count < hybrid.stages:
        raise PlanError(f"schedule {hybrid.schedule!r} needs at least as many {units} as its {hybrid.stages} "
                        f"stages, not {count}: take more micro-batches, or "
                        f"{names_of(lambda other: other.all_forwards)}")
    if hybrid.puts_off_weights and hybrid.recompute in ("selective", "all_but_attention"):
        raise PlanError(f"schedule {hybrid.schedule!r} runs backward in two parts, and recompute="
                        f"{hybrid.recompute!r} can run once only: take recompute='full' or another schedule")
    if how.in_rounds and count % max(1, count // hybrid.pipeline_ranks):
        raise PlanError(f"schedule {hybrid.schedule!r} needs {units} in rounds of {hybrid.pipeline_ranks}, and "
                        f"{count} are not: take a multiple of {hybrid.copies * hybrid.pipeline_ranks} micro-batches")


def _check_fetches(hybrid: Hybrid) -> None:
    for wrong, given in (
            (hybrid.zero_stage != 3, f"zero_stage={hybrid.zero_stage}: take zero_stage=3, which frees what was read"),
            (hybrid.puts_off_weights, f"schedule={hybrid.schedule!r}, whose backward runs in two parts: take "
                                      f"{names_of(lambda other: not other.splits_backward)}")):
        if wrong:
            raise PlanError(f"offload={hybrid.offload.place!r} fetches each parameter for each use, and does not go "
                            f"with {given}")


def _check_steps_in_backward(hybrid: Hybrid) -> None:
    away = hybrid.offload
    for wrong, given in (
            (away.fraction != 1, f"offload_fraction={away.fraction:g}: leave offload_fraction out"),
            (hybrid.micro_batches > 1, f"micro_batches={hybrid.micro_batches}, whose gradients add up: leave it out"),
            (hybrid.stages > 1, f"{hybrid.stages} pipeline stages: leave the pipeline out")):
        if wrong:
            raise PlanError("step_in_backward steps states on the host while one backward goes on, and does not go "
                            f"with {given}")


def _check_lookups(hybrid: Hybrid) -> None:
    for name in hybrid.on_host:
        away = hybrid.offload.of(name)
        for wrong, given in (
                (away.fraction != 1, f"offload_fraction={away.fraction:g}: leave offload_fraction out"),
                (bool({"parameters", "gradients"} & {*away.in_tier("disk")}),
                 f"offload={hybrid.offload.place!r}: take a tier with parameters and gradients in memory")):
            if wrong:
                raise PlanError(f"tables that are looked up on the host ({name!r}) live in its memory with their "
                                f"gradients, and do not go with {given}")
    _check_caches(hybrid)


def _check_caches(hybrid: Hybrid) -> None:
    names = [one.name for one in hybrid.cached]
    if len({*names}) < len(names) or not {*names} <= {*hybrid.on_host}:
        raise PlanError(f"cached tables {names}: name tables on the host, {list(hybrid.on_host)}, each once")
    for one in hybrid.cached:
        if one.rows < 1 or not 0 <= one.hits <= 1:
            raise PlanError(f"the cache of {one.name} has rows={one.rows}, hits={one.hits:g}: give 1 row or more, and "
                            "a share of hits from 0 to 1")
        if (away := hybrid.offload.of(one.name)).is_away:
            raise PlanError(f"the cache of {one.name} holds its optimizer states beside its rows, and offload="
                            f"{away.place!r} puts them elsewhere\n  Leave the table out of it: offload="
                            f"{{{one.name!r}: 'none', '*': {away.place!r}}}.")


def check_sparse_tables(tables: Iterable[str], hybrid: Hybrid) -> None:
    """Raises InfeasibleError for a step configuration that does not take tables with sparse gradients."""
    for name in tables:
        gradients = f"{name} has sparse gradients (sparse=True)"
        if (away := hybrid.offload.of(name)).is_away:
            raise InfeasibleError(f"{gradients}, and offload={away.place!r} steps dense ones\n  Let it stay where it "
                                  f"is looked up, offload={{{name!r}: 'none', '*': {away.place!r}}}, or write "
                                  "sparse=False.")


def _check_copies(hybrid: Hybrid) -> None:
    if hybrid.micro_batches % hybrid.copies:
        raise PlanError(f"{hybrid.micro_batches} micro-batches do not run {hybrid.copies} at a time: take a multiple "
                        f"of copies={hybrid.copies} as micro_batches")
    if hybrid.stages > 1 and hybrid.replicas:
        raise PlanError(f"copies={hybrid.copies} with stages on several ranks each ({list(hybrid.replicas)}), which "
                        "share micro-batches one by one; leave out one of the two")
    if hybrid.puts_off_weights:
        raise PlanError(f"copies={hybrid.copies} with schedule {hybrid.schedule!r}, which runs backward in two parts: "
                        f"take {names_of(lambda other: not other.splits_backward)}")


def _check_pieces(hybrid: Hybrid) -> None:
    if hybrid.copies > 1:
        raise PlanError(f"pieces={hybrid.pieces} with copies={hybrid.copies}: one hides communication of activations "
                        "beside products of the same micro-batch, the other beside another one's; leave out one of "
                        "the two")
    if hybrid.puts_off_weights:
        raise PlanError(f"pieces={hybrid.pieces} with schedule {hybrid.schedule!r}, which runs backward in two parts: "
                        "leave pieces out, or take another schedule")


def _check_by_rank(hybrid: Hybrid) -> None:
    of = f"micro_batches={list(hybrid.by_rank)}"
    if min(hybrid.by_rank) < 1 or sum(hybrid.by_rank) != hybrid.micro_batches:
        raise PlanError(f"{of} are not the {hybrid.micro_batches} micro-batches of a step: give each rank one or more")
    if len(hybrid.by_rank) != hybrid.pipeline_ranks:
        raise PlanError(f"{of} are for {len(hybrid.by_rank)} ranks, and the mesh's first axis has "
                        f"{hybrid.pipeline_ranks}: give a number for each")
    for wrong, given in (
            (hybrid.stages > 1 or bool(hybrid.replicas), f"{hybrid.stages} pipeline stages, whose ranks run equally "
                                                         "many: give one number"),
            (hybrid.pipeline_ranks == 1, "one rank: give one number"),
            (hybrid.copies > 1, f"copies={hybrid.copies}: leave copies out")):
        if wrong:
            raise PlanError(f"{of} do not go with {given}")


def _check_replicas(hybrid: Hybrid) -> None:
    of = f"replicas {list(hybrid.replicas)}"
    if hybrid.stages == 1:
        raise PlanError(f"{of} of one stage: a pipeline has two or more; without one, the mesh's axes do the same")
    if len(hybrid.replicas) != hybrid.stages or min(hybrid.replicas) < 1:
        raise PlanError(f"{of} for {hybrid.stages} pipeline stages: give each stage a number of ranks, 1 or more")
    if sum(hybrid.replicas) != hybrid.pipeline_ranks:
        raise PlanError(f"{of} are {sum(hybrid.replicas)} ranks together, and the pipeline axis has "
                        f"{hybrid.pipeline_ranks}: they must be the same")
    if hybrid.pipelining.several_stages:
        raise PlanError(f"schedule {hybrid.schedule!r} runs each stage on one rank: with {of} take "
                        f"{names_of(lambda other: not other.several_stages)}")
    if hybrid.micro_batches % (whole := math.lcm(*hybrid.replicas)):
        raise PlanError(f"{of} need micro-batches in multiples of {whole}, so that each rank of a stage runs as "
                        f"many, and {hybrid.micro_batches} are not")
