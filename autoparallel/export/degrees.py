"""A plan as degrees of parallelism, which frameworks take as settings; and what those cannot say."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoparallel.axis_names import apart
from autoparallel.errors import PlanError, shown
from autoparallel.planning.by_hand import ByHand
from autoparallel.plans import Plan
from autoparallel.plans.reports.units import bytes_str
from autoparallel.plans.roles import AxisRole, Roles, roles_of
from autoparallel.schedule.schedules import usual
from autoparallel.schedule.tiers import listed
from cost_models.unequal import told

#: Roles from the slowest links to the fastest, as frameworks lay out their ranks.
_ORDER = ("data", "expert", "context", "tensor")
_SOME = 4


@dataclass(frozen=True)
class Lost:
    """Something of a plan that an export cannot say. ``instead``: what the export does. ``seconds``: what that adds to
    a step, by the plan's own prediction (None: the plan does not know)."""

    what: str
    instead: str
    seconds: float | None = None


@dataclass(frozen=True)
class Degrees:
    """``hand``: the plan's degrees, also as a plan by hand to price. ``layers``: repeated blocks, in order.
    ``layers_by_stage``: their number on each pipeline stage. ``batch``, ``sequence``: of the whole batch (0: not
    known). ``lost``: what the degrees leave out; of it ``changed``: roles that are data-parallel instead."""

    hand: ByHand
    roles: Roles
    layers: tuple[str, ...]
    layers_by_stage: tuple[int, ...]
    batch: int
    sequence: int
    lost: tuple[Lost, ...]
    changed: tuple[Lost, ...] = ()

    @property
    def dp(self) -> int:
        return self.hand.dp or 1

    @property
    def ranks(self) -> int:
        return self.dp * self.hand.tp * self.hand.cp * self.hand.pp

    @property
    def shards(self) -> int:
        return self.dp if self.hand.shards is None else self.hand.shards

    @property
    def experts_on_tensor(self) -> bool:
        """Whether tensor-parallel ranks have whole experts each."""
        return any(axis.experts and axis.role == "tensor" and axis.size > 1 for axis in self.roles.axes)

    @property
    def micro_batch(self) -> int:
        return self.batch // (self.dp * self.roles.micro_batches)

    def losing(self, lost: Sequence[Lost], **hand: Any) -> Degrees:
        """With more that is lost, and other values of the plan by hand."""
        return replace(self, lost=(*self.lost, *lost), hand=replace(self.hand, **hand))


def degrees_of(plan: Plan) -> Degrees:
    """The degrees of a plan. Axes on which all ranks compute the same, and stages on different numbers of ranks, are
    data-parallel instead, which is listed. Raises PlanError, with what is listed, for batches that the ranks cannot
    share evenly; and for a file without facts of the model."""
    if not plan.model.inputs:
        raise PlanError("the plan's file says nothing of the model's shapes (it is older than exports): plan again")
    _check_names(plan)
    roles, layers, changed = roles_of(plan), _layers(plan), tuple[Lost, ...]()
    if idle := [axis for axis in roles.axes if axis.role == "replicated" and axis.size > 1]:
        said = " and ".join(f"{axis.name} ({axis.size} ranks)" for axis in idle)
        roles, changed = _as_data(plan, roles, "replicated", f"the same work on all ranks of {said}", changed)
    if plan.hybrid.replicas:
        what = f"a pipeline whose stages have {list(plan.hybrid.replicas)} ranks"
        roles, changed = _as_data(plan, roles, "pipeline", what, changed)
    elif plan.hybrid.by_rank:
        what = f"micro-batches by rank, {list(plan.hybrid.by_rank)}"
        roles, changed = _as_data(plan, roles, "speed", what, changed)
    elif len(layers) < roles.pipeline_ranks * roles.virtual and roles.pipeline_ranks > 1:
        what = f"{roles.pipeline_ranks * roles.virtual} pipeline stages, of {len(layers)} layers"
        roles, changed = _as_data(plan, roles, "pipeline", what, changed)
    return _made(plan, roles, changed)


def as_data(plan: Plan, degrees: Degrees, role: str, what: str) -> Degrees:
    """With all ranks of a role ("tensor", ..., "pipeline") data-parallel instead: each takes rows of the batch, and a
    shard of what they had divided. ``what``: of the plan, that is lost. Raises PlanError, with what is lost, if the
    batch has no rows for them."""
    return _made(plan, *_as_data(plan, degrees.roles, role, what, degrees.changed))


def _as_data(plan: Plan, roles: Roles, role: str, what: str, changed: tuple[Lost, ...]
             ) -> tuple[Roles, tuple[Lost, ...]]:
    divided = role in ("tensor", "expert", "pipeline")  # parameters, too
    axes = tuple(AxisRole(axis.name, axis.size, "data", divided or axis.shards) if axis.role == role else axis
                 for axis in roles.axes)
    wanted = roles.micro_batches
    if role == "pipeline":
        axes = (AxisRole("pipeline", roles.pipeline_ranks, "data", True), *axes)
        wanted = max(1, wanted // roles.pipeline_ranks)
        roles = replace(roles, pipeline_ranks=1, virtual=1, schedule=usual())
    elif role == "speed":
        axes = (AxisRole("speed", roles.by_speed, "data"), *axes)
        wanted = max(1, wanted // roles.by_speed)
        roles = replace(roles, by_speed=1)
    roles = replace(roles, axes=axes, zero_stage=3 if divided else roles.zero_stage)
    batch = _batch(plan)
    if batch % roles.data:
        listed = "".join(f"; {one.what}" for one in changed)
        raise PlanError(f"not expressible: {what}{listed}. Nor can these ranks be data-parallel instead: {roles.data} "
                        f"do not divide a batch of {batch}. Plan for a batch of a multiple of {roles.data}, or for "
                        "fewer devices")
    roles = replace(roles, micro_batches=max(n for n in range(1, wanted + 1) if batch // roles.data % n == 0))
    kept = f", with parameters in shards (ZeRO {roles.zero_stage})" if divided else ""
    said = "the batch in one" if roles.micro_batches == 1 else f"{roles.micro_batches} micro-batches"
    count = f", {said}" if roles.micro_batches != plan.hybrid.micro_batches else ""
    return roles, (*changed, Lost(what, f"these ranks are data-parallel{kept}{count}"))


def _batch(plan: Plan) -> int:
    return next(iter(plan.model.inputs.values()))[0]


def _made(plan: Plan, roles: Roles, changed: tuple[Lost, ...]) -> Degrees:
    """Degrees of these roles, with what they leave out beside ``changed``. Raises PlanError for batches that are cut
    unevenly."""
    layers, batch = _layers(plan), _batch(plan)
    sequence = next((shape[1] for shape in plan.model.inputs.values() if len(shape) == 2), 0)
    lost = [*changed, *_lost(plan, roles, layers)]
    if batch % (roles.data * roles.micro_batches):
        listed = f"; not expressible either: {'; '.join(one.what for one in lost)}" if lost else ""
        raise PlanError(f"the plan cuts a batch of {batch} unevenly over {roles.data} data-parallel ranks and "
                        f"{roles.micro_batches} micro-batches: give a batch that they divide{listed}")
    by_stage: tuple[int, ...] = (len(layers),)
    if roles.pipeline_ranks > 1:
        by_stage, moved = _layers_by_stage(plan, layers)
        lost += moved
    shards = roles.shards if roles.zero_stage else 1
    if roles.degree("expert") > 1 and shards not in (1, roles.data):
        lost.append(Lost(f"parameters in shards among {shards} of {roles.data} data-parallel ranks", "among all"))
        shards = roles.data
    hand = ByHand(dp=roles.data, tp=roles.tensor, pp=roles.pipeline_ranks, cp=roles.context, ep=roles.degree("expert"),
                  zero=roles.zero_stage, shards=None if shards in (1, roles.data) else shards,
                  schedule=_schedule(roles), virtual=roles.virtual,
                  micro_batch=batch // (roles.data * roles.micro_batches),
                  recompute=roles.recompute, sequence_parallel=roles.sequence_parallel)
    return Degrees(hand, roles, layers, by_stage, batch, sequence, tuple(lost), changed)


def _check_names(plan: Plan) -> None:
    """Raises PlanError for names that no module or axis has: they are written into programs."""
    modules = [line[0].rpartition(" ")[0] for block in plan.blocks for line in block.lines]
    paths = [path for block in plan.blocks for path in block.paths]
    names = {*plan.axis_names, *modules, *paths, *plan.model.parameters, *(path for path, _ in plan.model.stage_starts)}
    if odd := sorted(name for name in names if not re.fullmatch(r"[\w. -]*", name)):
        raise PlanError(f"the plan has the name {shown(odd[0])}, which cannot be written into other frameworks' files: "
                        "letters, digits, '_', '-', '.' and blanks are possible")


def _schedule(roles: Roles) -> str | None:
    return None if roles.pipeline_ranks == 1 or roles.schedule == usual(roles.virtual) else roles.schedule


def _layers(plan: Plan) -> tuple[str, ...]:
    """The paths of the most numerous list of blocks, in order: ``model.layers.0``, ..."""
    lists: dict[str, list[str]] = {}
    for block in plan.blocks:
        for path in block.paths:
            if path.rpartition(".")[2].isdigit():
                lists.setdefault(path.rpartition(".")[0], []).append(path)
    longest = max(lists.values(), key=len, default=[])
    return tuple(sorted(longest, key=lambda path: int(path.rpartition(".")[2])))


def _layers_by_stage(plan: Plan, layers: tuple[str, ...]) -> tuple[tuple[int, ...], list[Lost]]:
    """Layers on each stage, of at least as many layers, with each cut at the nearest start of a layer; and the cuts
    that moved."""
    starts, moved = [0], dict[str, int]()
    for stage, (path, before) in enumerate(plan.model.stage_starts, 1):
        inside = [number for number, layer in enumerate(layers) if (path + ".").startswith(layer + ".")]
        wanted = inside[0] + round(before) if inside else len(layers) if stage > 1 else 1
        start = min(max(wanted, starts[-1] + 1), len(layers) - plan.hybrid.stages + stage)
        if not inside or start != inside[0] or before:
            moved[path or "no module"] = start
        starts.append(start)
    lost = [Lost(f"pipeline stages that begin in {some(list(moved))}",
                 f"they begin with the layers {some([str(start) for start in moved.values()])}")] if moved else []
    return tuple(end - start for start, end in zip(starts, [*starts[1:], len(layers)], strict=True)), lost


def some(names: Sequence[str]) -> str:
    """The first of them, and how many there are."""
    return ", ".join(names[:_SOME]) + (f", ... ({len(names)} in all)" if len(names) > _SOME else "")


def departing(axis: AxisRole, instead: str = "") -> Lost:
    """That products depart from the role of an axis; ``instead``: what they are then ("": as the others)."""
    return Lost(f"products on axis {axis.name} that are not {axis.role}-parallel ({some(axis.departures)})",
                instead or f"{axis.role}-parallel, as the others")


def _lost(plan: Plan, roles: Roles, layers: tuple[str, ...]) -> list[Lost]:
    found = []
    several = [axis.role for axis in roles.axes if axis.size > 1]    # those of one rank may be replicated
    if several != sorted(several, key=_ORDER.index):
        said = " x ".join(several)
        found.append(Lost(f"the order of axes, {said} (slowest links first)", "data x context x tensor"))
    for axis in roles.axes:
        if axis.departures:
            found.append(departing(axis))
    if (copies := plan.hybrid.copies) > 1:
        found.append(Lost(f"{copies} micro-batches at a time (multi-copy)", "one after the other",
                          plan.prediction.hidden_communication_s))
    if (pieces := plan.hybrid.pieces) > 1:
        found.append(Lost(f"linear layers in {pieces} pieces that overlap with communication", "whole layers"))
    if plan.devices:
        found.append(Lost("hosts in another order, so that equal ones share pipeline stages", "the hosts as they are "
                          f"listed: start the ranks on the cluster's devices {told(plan.devices)}"))
    again = plan.hybrid.recompute_blocks
    if again is not None and set(again) != set(layers):
        share = 1 - len(again) / max(1, len(layers))
        more = share * plan.prediction.forward_s if plan.hybrid.recompute == "full" else None
        found.append(Lost(f"recompute of {len(again)} of {len(layers)} layers", "recompute of all", more))
    tier = plan.hybrid.saved_on
    if tier == "disk" or (tier == "host" and plan.hybrid.recompute == "selective"):
        found.append(Lost(f"what blocks save, on the {tier}", "what they save where the framework has it"))
    return found


def more_reductions_s(plan: Plan, roles: Roles) -> float:
    """Seconds by which a step is longer, without overlap, if gradients are reduced after each micro-batch instead of
    once."""
    axes = {axis.name for axis in roles.axes if axis.role in ("data", "expert")}
    uses = plan.prediction.collectives_on_a_rank(plan.hybrid.pipeline_ranks)
    once = sum(use.seconds for use in uses if use.direction == "backward" and axes.issuperset(apart(use.axis))
               and use.kind in ("reduce_scatter", "all_reduce"))
    return once * (roles.micro_batches - 1)


def head_size(plan: Plan) -> int:
    """Columns of an attention head, by the first projection of queries (0: not known)."""
    rows = next((shape[0] for name, shape in plan.model.parameters.items() if name.endswith("q_proj.weight")), 0)
    return rows // plan.model.heads if plan.model.heads else 0


def experts_beside_tensor(hand: ByHand) -> list[Lost]:
    """Of frameworks whose expert-parallel ranks are neighbours, those of tensor parallelism first."""
    if hand.ep == 1 or hand.tp == 1:
        return []
    return [Lost(f"experts over {hand.ep} data-parallel ranks", f"over {hand.ep} neighbouring ranks, tensor-parallel "
                 "ones first")]


def ep_by_hand(experts: int, tp: int, dp: int | None) -> int:
    """The ``ep`` of a plan by hand where so many ranks, tensor-parallel ones first, have whole experts: over those of
    tensor parallelism alone it deals them of its own accord.

    >>> ep_by_hand(2, 2, 4), ep_by_hand(4, 2, 4), ep_by_hand(2, 1, 4)
    (1, 4, 2)
    """
    return 1 if tp % experts == 0 else experts if dp is None else math.gcd(experts, dp)


def sharded_by_context(hand: ByHand) -> list[Lost]:
    """Of frameworks that keep parameters in shards over context-parallel ranks, whatever a plan does."""
    if hand.cp == 1 or hand.zero:
        return []
    return [Lost("parameters whole on the context-parallel ranks", "in shards over them, gathered before use (FSDP)")]


def states_lost(plan: Plan) -> Lost:
    """Training state that leaves the device in the plan, and not in the export."""
    where = plan.hybrid.offload.told("in the host's memory", between=" and ")
    return Lost(where, "on the devices, in more of their memory")


def masters_added(plan: Plan) -> list[Lost]:
    """Training state without float32 master weights, which Megatron-LM, DeepSpeed, and mixed precision of accelerate
    and torchtitan keep beside parameters of 16 bits, with optimizer states in float32."""
    work, memory = (plan.known.workload, plan.known.memory) if plan.known is not None else (None, None)
    state = {} if work is None else work.state_bytes
    if plan.model.dtype not in ("bfloat16", "float16") or not state or any("master" in what for what in state):
        return []
    states = sum(num_bytes for what, num_bytes in state.items() if what.endswith(" states"))
    added, beyond = "", ""
    if memory is not None and memory.num_bytes and states and "optimizer state" in memory.kinds:
        held = max(memory.num_bytes, key=sum)[memory.kinds.index("optimizer state")]
        more = held / states * (states + 4)    # states of twice the bytes, and the master weights
        added = f", {bytes_str(more)} more a device"
        if plan.prediction.peak_bytes + more > plan.prediction.limit_bytes > 0:
            beyond = f": beyond the {bytes_str(plan.prediction.limit_bytes)} that tensors may take"
    return [Lost(f"training in {plan.model.dtype} without float32 master weights",
                 f"float32 master weights and optimizer states{added}{beyond}")]


def tables_lost(plan: Plan) -> Lost:
    """Tables that the plan looks up on the host, which no export does."""
    return Lost(f"{listed(plan.hybrid.on_host)} in the memory of the host",
                "on the devices, in more of their memory")


__all__ = ["Degrees", "Lost", "as_data", "degrees_of", "ep_by_hand", "experts_beside_tensor", "head_size",
           "masters_added", "more_reductions_s", "sharded_by_context", "some", "states_lost", "tables_lost"]
