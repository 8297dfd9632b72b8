"""A plan as degrees of parallelism, which frameworks take as settings; and what those cannot say."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoparallel.errors import PlanError, shown
from autoparallel.planning.by_hand import ByHand
from autoparallel.plans import Plan
from autoparallel.plans.roles import Roles, roles_of

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
    known). ``lost``: what the degrees leave out."""

    hand: ByHand
    roles: Roles
    layers: tuple[str, ...]
    layers_by_stage: tuple[int, ...]
    batch: int
    sequence: int
    lost: tuple[Lost, ...]

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


def degrees_of(plan: Plan) -> Degrees:
    """The degrees of a plan. Raises PlanError for plans that have none: axes on which all ranks compute the same,
    stages on different numbers of ranks, several axes cut unlike any degree, or a file without facts of the model."""
    roles, hybrid = roles_of(plan), plan.hybrid
    if not plan.model.inputs:
        raise PlanError("the plan's file says nothing of the model's shapes (it is older than exports): plan again")
    _check_names(plan)
    if idle := [axis.name for axis in roles.axes if axis.role == "replicated" and axis.size > 1]:
        raise PlanError(f"all ranks of axis {idle[0]} compute the same in this plan, which is no degree of "
                        "parallelism: plan for fewer devices, or larger batches")
    if hybrid.replicas:
        raise PlanError(f"the plan's stages have {list(hybrid.replicas)} ranks, and frameworks give each the same "
                        "number: plan again without stage_replicas")
    batch = next(iter(plan.model.inputs.values()))[0]
    sequence = next((shape[1] for shape in plan.model.inputs.values() if len(shape) == 2), 0)
    if batch % (roles.data * roles.micro_batches):
        raise PlanError(f"the plan cuts a batch of {batch} unevenly over {roles.data} data-parallel ranks and "
                        f"{roles.micro_batches} micro-batches: give a batch that they divide")
    sharded = roles.shards if roles.zero_stage else 1
    hand = ByHand(dp=roles.data, tp=roles.tensor, pp=roles.pipeline_ranks, cp=roles.context, ep=roles.degree("expert"),
                  zero=roles.zero_stage, shards=None if sharded in (1, roles.data) else sharded,
                  schedule=_schedule(roles), virtual=roles.virtual,
                  micro_batch=batch // (roles.data * roles.micro_batches) if roles.micro_batches > 1 else None,
                  recompute=roles.recompute, sequence_parallel=roles.sequence_parallel)
    layers = _layers(plan)
    by_stage, moved = _layers_by_stage(plan, layers)
    return Degrees(hand, roles, layers, by_stage, batch, sequence, (*_lost(plan, roles, layers), *moved))


def _check_names(plan: Plan) -> None:
    """Raises PlanError for names that no module or axis has: they are written into programs."""
    modules = [line[0].rpartition(" ")[0] for block in plan.blocks for line in block.lines]
    paths = [path for block in plan.blocks for path in block.paths]
    names = {*plan.axis_names, *modules, *paths, *plan.model.parameters, *(path for path, _ in plan.model.stage_starts)}
    if odd := sorted(name for name in names if not re.fullmatch(r"[\w. -]*", name)):
        raise PlanError(f"the plan has the name {shown(odd[0])}, which cannot be written into other frameworks' files: "
                        "letters, digits, '_', '-', '.' and blanks are possible")


def _schedule(roles: Roles) -> str | None:
    usual = "interleaved" if roles.virtual > 1 else "1f1b"
    return None if roles.pipeline_ranks == 1 or roles.schedule == usual else roles.schedule


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
    """Layers on each stage, with each cut at the nearest start of a layer, and the cuts that moved. Raises PlanError
    if there are fewer layers than stages."""
    if len(layers) < plan.hybrid.stages:
        raise PlanError(f"the plan has {plan.hybrid.stages} pipeline stages and the model {len(layers)} layers: "
                        "frameworks cut between layers, so plan for at most as many stages")
    starts, moved = [0], []
    for stage, (path, before) in enumerate(plan.model.stage_starts, 1):
        inside = [number for number, layer in enumerate(layers) if (path + ".").startswith(layer + ".")]
        wanted = inside[0] + round(before) if inside else len(layers) if stage > 1 else 1
        start = min(max(wanted, starts[-1] + 1), len(layers) - plan.hybrid.stages + stage)
        if not inside or start != inside[0] or before:
            moved.append(Lost(f"stage {stage} begins in {path or 'no module'}", f"it begins with layer {start}"))
        starts.append(start)
    return tuple(end - start for start, end in zip(starts, [*starts[1:], len(layers)], strict=True)), moved


def _lost(plan: Plan, roles: Roles, layers: tuple[str, ...]) -> list[Lost]:
    found = []
    order = [_ORDER.index(axis.role) for axis in roles.axes]
    if order != sorted(order):
        said = " x ".join(axis.role for axis in roles.axes)
        found.append(Lost(f"the order of axes, {said} (slowest links first)", "data x context x tensor"))
    for axis in roles.axes:
        if axis.departures:
            some = ", ".join(axis.departures[:_SOME]) + (", ..." if len(axis.departures) > _SOME else "")
            found.append(Lost(f"{len(axis.departures)} products on axis {axis.name} that are not {axis.role}-parallel "
                              f"({some})", f"{axis.role}-parallel, as the others"))
    if (copies := plan.hybrid.copies) > 1:
        found.append(Lost(f"{copies} micro-batches interleaved at a time", "one after the other",
                          plan.prediction.hidden_communication_s))
    again = plan.hybrid.recompute_blocks
    if again is not None and set(again) != set(layers):
        share = 1 - len(again) / max(1, len(layers))
        more = share * plan.prediction.forward_s if plan.hybrid.recompute == "full" else None
        found.append(Lost(f"recompute of {len(again)} of {len(layers)} layers", "recompute of all", more))
    return found


def more_reductions_s(plan: Plan, roles: Roles) -> float:
    """Seconds by which a step is longer, without overlap, if gradients are reduced after each micro-batch instead of
    once."""
    axes = {axis.name for axis in roles.axes if axis.role in ("data", "expert")}
    uses = plan.prediction.collectives_on_a_rank(plan.hybrid.pipeline_ranks)
    once = sum(use.seconds for use in uses if use.direction == "backward" and use.axis in axes
               and use.kind in ("reduce_scatter", "all_reduce"))
    return once * (roles.micro_batches - 1)


def states_lost(plan: Plan) -> Lost:
    """Optimizer states that leave the device in the plan, and not in the export."""
    where = {"host": "in the host's memory", "disk": "on disk"}[plan.hybrid.offload.states]
    return Lost(f"optimizer states {where}", "on the devices, in more of their memory")


__all__ = ["Degrees", "Lost", "degrees_of", "more_reductions_s", "states_lost"]
