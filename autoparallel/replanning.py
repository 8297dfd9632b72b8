"""`autoparallel.replan`: the plan to go on with after hosts were lost or gained.

Candidates are the plan as it was (on as many devices), plans by hand near it, and the joint search's. The one with the
least total counts: seconds to move the training state, and the seconds of the steps to come.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import nn

from autoparallel.api import plan as plan_of
from autoparallel.errors import AutoparallelError, InfeasibleError, PlanError, SearchError, shown
from autoparallel.export.degrees import degrees_of
from autoparallel.planning.bucket_sizes import USUAL
from autoparallel.planning.by_hand import ByHand
from autoparallel.planning.call_checks import check_call
from autoparallel.planning.state_moves import Move, moved, read_by
from autoparallel.plans import Hybrid, Plan
from autoparallel.plans.reports.text import ReportConsole, as_text
from autoparallel.plans.reports.units import bytes_str, duration_str, seconds_str
from autoparallel.plans.roles import roles_of
from autoparallel.schedule.fusion import AUTO_SIZE
from autoparallel.schedule.table_caches import Cached
from cost_models import Cluster
from cost_models.calibrate import told_apart
from cost_models.goodput import Failures

SCHEMA, VERSION = "autoparallel.replan", 1
#: The title of the joint search's plan, whose errors are the caller's.
SEARCH = "search"
_NO_MOVE = Move(math.inf)
#: The least share of the devices that a plan by hand uses, where more cannot share the batch evenly.
LEAST_SHARE = 0.5
#: Options that plans by hand take too.
_OF_ALL = ("optimizer", "memory_limit_bytes", "memory_confidence", "offload", "offload_fraction",
           "step_in_backward", "reduce_dtype", "bucket_bytes", "buckets", "host_memory_limit_bytes", "disk_limit_bytes")


@dataclass(frozen=True)
class Candidate:
    """A plan to go on with on ``devices`` devices, named by ``title``, and the move of the training state to it; or why
    there is none (``refused``)."""

    title: str
    devices: int
    plan: Plan | None = None
    move: Move = _NO_MOVE
    refused: str = ""

    @property
    def step_s(self) -> float:
        """Seconds of a step; inf without a plan."""
        return math.inf if self.plan is None else self.plan.prediction.step_s

    def total_s(self, steps: float) -> float:
        """Seconds of the move and of so many steps; inf without a plan."""
        return math.inf if self.plan is None else self.move.seconds + steps * self.step_s


@dataclass(frozen=True)
class Replan:
    """What was compared, for ``steps`` steps to come, after ``lost`` devices of ``before`` were gone. ``source``:
    "peers" (devices that have the state send it) or "checkpoint" (all devices read it). ``until``: which ``steps``
    these are."""

    cluster: Cluster
    before: int
    lost: tuple[int, ...]
    steps: float
    source: str
    candidates: tuple[Candidate, ...]
    until: str = "to come"

    @property
    def best(self) -> Candidate:
        """The candidate with the least total; of equal ones that with the shorter step."""
        return min(self.candidates, key=lambda one: (one.total_s(self.steps), one.step_s))

    @property
    def plan(self) -> Plan:
        """The plan of the best candidate."""
        found = self.best.plan
        assert found is not None  # `replan` raises where no candidate has one
        return found

    def report(self, width: int = 110) -> str:
        """The answer and a table of the candidates, as text of ``width`` columns."""
        return as_text(lambda console: print_replan(self, console), width)

    def to_json(self) -> str:
        """The answer without plans, for programs; seconds and bytes."""
        rows = [{"title": one.title, "devices": one.devices, "refused": one.refused,
                 **({} if one.plan is None else {
                     "step_s": one.step_s, "move_s": one.move.seconds, "sent_bytes": one.move.sent_bytes,
                     "read_bytes": one.move.read_bytes, "total_s": one.total_s(self.steps)})}
                for one in self.candidates]
        return json.dumps({"schema": SCHEMA, "version": VERSION, "cluster": self.cluster.name,
                           "devices": self.cluster.num_devices, "before": self.before, "lost": list(self.lost),
                           "steps": self.steps, "source": self.source,
                           "lost_bytes": self.best.move.lost_bytes, "best": self.candidates.index(self.best),
                           "candidates": rows}, indent=1, allow_nan=False)


def replan(
    plan: Plan,
    cluster: Cluster,
    model: nn.Module,
    *,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    lost: Sequence[int] | None = None,
    source: str = "peers",
    horizon_steps: float | None = None,
    horizon_s: float | None = None,
    time_limit_s: float = 10.0,
    all_devices: bool = False,
    told: Callable[[Candidate], None] = lambda candidate: None,
    **options: Any,
) -> Replan:
    """The plan with the least total of moving the training state and of the steps to come, on the devices left.

    plan: as the job ran, live or from a file.
    cluster: with the devices that there are now.
    model, example_inputs, example_kwargs: as `autoparallel.plan` takes them, with the plan's global batch.
    lost: numbers of the plan's devices that are gone; None: the last ones, by which the cluster is smaller. Others of
        the cluster are new, and have no state.
    source: where the state comes from: "peers", devices that still have it, by the cluster's links (all read a
        checkpoint where a part is on none of them); "checkpoint": all read one, as after a restart of all processes.
    horizon_steps: steps until the cluster is expected to change again. horizon_s: the same in seconds of the fastest
        candidate. None: the mean time between failures of so many devices (`cost_models.goodput.Failures`).
    time_limit_s: of the search.
    all_devices: only plans that use all devices of the cluster, as where its processes have been started.
    told: called with each candidate when it is known.
    options: of `autoparallel.plan`; the optimizer, its place and the dtype of gradients are the plan's.

    Raises PlanError for arguments that cannot be, another model, batch or optimizer than the plan's, and plans without
    training state; InfeasibleError where no candidate fits; ClusterError where a checkpoint is read and the cluster
    does not say how fast; and whatever `autoparallel.plan` raises of the model.
    """
    _check(plan, cluster, source, horizon_steps, horizon_s, told)
    check_call(model, example_inputs, example_kwargs)
    before = math.prod(plan.axes[0])
    gone = _lost(lost, before, cluster.num_devices)
    came_from = origins(before, gone, cluster.num_devices)
    items = _item_bytes(plan, model)
    found = list[Candidate]()
    for title, devices, make in _makers(plan, cluster, model, (example_inputs, example_kwargs), time_limit_s, options):
        if all_devices and devices < cluster.num_devices:
            continue
        try:
            made = make(replace(cluster, num_devices=devices))
        except AutoparallelError as error:
            if title == SEARCH and not isinstance(error, InfeasibleError | SearchError):
                raise
            found.append(Candidate(title, devices, refused=_why(error)))
        else:
            _check_same(plan, made)
            move = read_by(made, cluster, items) if source == "checkpoint" else moved(plan, made, cluster, came_from,
                                                                                      items)
            found.append(Candidate(title, devices, made, move))
        told(found[-1])
    if all(one.plan is None for one in found):
        raise InfeasibleError(f"no plan was found for {cluster.num_devices} devices of {cluster.name}: " + "; ".join(
            f"{one.title}: {one.refused}" for one in found))
    until = "to come"
    if horizon_steps is None:
        until = "between two failures, by the fastest plan" if horizon_s is None else "by the fastest plan"
        seconds = horizon_s if horizon_s is not None else 1 / Failures().per_s(cluster.num_devices)
        horizon_steps = max(1.0, seconds // min(one.step_s for one in found))
    reads = any(one.move.read_bytes for one in found)
    return Replan(cluster, before, gone, horizon_steps, "checkpoint" if reads else "peers", tuple(found),
                  until)


def origins(before: int, lost: Sequence[int], now: int) -> tuple[int | None, ...]:
    """Of each device now, its number before (None: it is new), followed by those left that are not used. With as many
    devices as before, or more, new ones take the places of lost ones; else those left move together.

    >>> origins(4, (1,), 4), origins(4, (1,), 3), origins(4, (1,), 2)
    ((0, None, 2, 3), (0, 2, 3), (0, 2, 3))
    """
    if now >= before:
        return (*(None if device in lost else device for device in range(before)), *[None] * (now - before))
    left = [device for device in range(before) if device not in lost]
    return (*left, *[None] * max(0, now - len(left)))


# ---------------------------------------------------------------------------------------------------------- candidates

_Maker = Callable[[Cluster], Plan]


def bucket_bytes_of(hybrid: Hybrid) -> float | str | None:
    """The sizes of buckets for other mesh axes: none, where the search chose them. (Older plan files do not say whose
    a size is: none but the `USUAL` ones is chosen by default.)"""
    if hybrid.fusion.axis_bytes:
        return AUTO_SIZE
    return hybrid.bucket_bytes if hybrid.fusion.given or hybrid.bucket_bytes not in USUAL else None


def _makers(plan: Plan, cluster: Cluster, model: nn.Module, example: tuple[Any, Any], time_limit_s: float,
            options: Mapping[str, Any]) -> Iterator[tuple[str, int, _Maker]]:
    """Title, devices and the way to make the plan of each candidate."""
    kept = {"optimizer": optimizer_of(plan), "reduce_dtype": plan.hybrid.reduce_dtype,
            "bucket_bytes": bucket_bytes_of(plan.hybrid),
            "buckets": plan.hybrid.fusion.names or plan.hybrid.fusion.most, **options}
    if plan.hybrid.offload.is_away and "offload" not in options:
        kept["offload"] = plan.hybrid.offload.place
        if plan.hybrid.offload.fraction != 1:
            kept["offload_fraction"] = plan.hybrid.offload.fraction
    if "step_in_backward" not in options and "offload" not in options:
        kept["step_in_backward"] = plan.hybrid.offload.in_backward or None
    if plan.hybrid.on_host and "pins" not in options:
        kept["pins"] = {**dict.fromkeys(plan.hybrid.on_host, "host"),
                        **{one.name: Cached(one.rows, one.hits) for one in plan.hybrid.cached}}
    args, kwargs = example
    call = {"example_inputs": args, "example_kwargs": kwargs, "time_limit_s": time_limit_s}

    def by_hand(hand: ByHand, machine: Cluster) -> Plan:
        given = {name: value for name, value in kept.items() if name in _OF_ALL}
        made = plan_of(model, machine, by_hand=hand, **call, **given)
        needed, limit = made.prediction.peak_bytes, made.prediction.limit_bytes
        if limit and needed > limit:
            raise InfeasibleError(f"needs {bytes_str(needed)} a device, and {bytes_str(limit)} are free")
        return made

    def refuse(said: str, machine: Cluster) -> Plan:
        raise InfeasibleError(said)

    if cluster.num_devices == math.prod(plan.axes[0]) and _is_of(plan, cluster):
        yield "as it was", cluster.num_devices, lambda machine: plan
    for title, devices, hand in near(plan, cluster.num_devices):
        yield title, devices, partial(refuse, hand) if isinstance(hand, str) else partial(by_hand, hand)
    yield SEARCH, cluster.num_devices, lambda machine: plan_of(model, machine, joint=True, **call, **kept)


def _is_of(plan: Plan, cluster: Cluster) -> bool:
    """Whether a plan was made for this cluster, as far as it says."""
    described = plan.known.workload.described if plan.known is not None else ""
    return cluster.name == plan.cluster and told_apart(cluster) == described


def near(plan: Plan, devices: int) -> Iterator[tuple[str, int, ByHand | str]]:
    """Plans by hand near a plan, on at most ``devices`` devices, by title: its degrees, then half and twice as many
    pipeline or tensor-parallel ranks, data-parallel ranks taking what is left; as many devices as share the batch
    evenly. A text says why all of them cannot."""
    try:
        degrees = degrees_of(plan)
    except PlanError as error:
        yield "by hand", devices, str(error)
        return
    hand, batch = replace(degrees.hand, saved_on=plan.hybrid.saved_on), degrees.batch
    for name, pp, tp in (("same degrees", hand.pp, hand.tp), ("half the pipeline", hand.pp // 2, hand.tp),
                         ("twice the pipeline", 2 * hand.pp, hand.tp), ("half the tensor ranks", hand.pp, hand.tp // 2),
                         ("twice the tensor ranks", hand.pp, 2 * hand.tp)):
        others = pp * tp * hand.cp
        if not others or others > devices or (pp > 1 and hand.pp == 1 and len(degrees.layers) < pp):
            continue
        most = devices // others
        ranks = next((n for n in range(most, 0, -1) if batch % n == 0 and n % hand.ep == 0), 0)
        if ranks * others != devices and name == "same degrees":
            rest = f"{others} x {most} ranks are not {devices} devices" if most * others != devices else (
                f"a global batch of {batch:,} is not divided by {most} data-parallel ranks")
            yield f"{name}, all devices", devices, rest
        if ranks and ranks * others >= LEAST_SHARE * devices:
            whole = degrees.roles.micro_batches == pp == 1
            yield name, ranks * others, _with(hand, pp, tp, ranks, batch, whole)
            if whole and name == "same degrees" and ranks < (hand.dp or 1):
                yield f"{name}, in micro-batches", ranks * others, _with(hand, pp, tp, ranks, batch, False)


def _with(hand: ByHand, pp: int, tp: int, dp: int, batch: int, whole: bool) -> ByHand:
    """A plan by hand with other degrees, the batch in one (``whole``), or in micro-batches as large as before, or the
    next smaller size that divides."""
    most = batch // dp if whole else min(hand.micro_batch or batch, batch // dp)
    size = max(n for n in range(1, most + 1) if batch // dp % n == 0)
    shards = hand.shards if hand.shards is not None and dp % hand.shards == 0 else None
    kept = hand if pp > 1 else replace(hand, pp=1, virtual=1, schedule=None, split="work")
    return replace(kept, pp=pp, tp=tp, dp=dp, micro_batch=size, shards=shards,
                   sequence_parallel=hand.sequence_parallel and tp > 1)


def _why(error: AutoparallelError) -> str:
    needed = getattr(error, "needed_bytes", None)
    return f"needs {bytes_str(needed)} a device" if needed else str(error).split("\n", maxsplit=1)[0].removeprefix(
        "by_hand: ")


# -------------------------------------------------------------------------------------------------------------- checks


def _check(plan: Any, cluster: Any, source: Any, horizon_steps: Any, horizon_s: Any, told: Any) -> None:
    if not isinstance(plan, Plan):
        raise PlanError(f"plan is {shown(plan)}: give a Plan, autoparallel.Plan.load(path) of a file")
    if not isinstance(cluster, Cluster):
        raise PlanError(f"cluster is {shown(cluster)}: give a Cluster with the devices that there are now, as "
                        "autoparallel.Cluster.load('h100-sxm', num_devices=56)")
    if not isinstance(source, str) or source not in ("peers", "checkpoint"):
        raise PlanError(f"source is {shown(source)}: give 'peers' or 'checkpoint'")
    for name, value in (("horizon_steps", horizon_steps), ("horizon_s", horizon_s)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)
                                  or not 0 < value < math.inf):
            raise PlanError(f"{name} is {shown(value)}: give a number above 0")
    if horizon_steps is not None and horizon_s is not None:
        raise PlanError("horizon_steps and horizon_s say the same: give one of them")
    if not callable(told):
        raise PlanError(f"told is {shown(told)}: give a function")


def _lost(lost: Any, before: int, now: int) -> tuple[int, ...]:
    """Numbers of lost devices; None: the last, by which there are fewer now. Raises PlanError for numbers that the plan
    has not."""
    if lost is None:
        return tuple(range(min(before, now), before))
    if isinstance(lost, str) or not isinstance(lost, Sequence) or not all(
            isinstance(one, int) and not isinstance(one, bool) and 0 <= one < before for one in lost):
        raise PlanError(f"lost is {shown(lost)}: give numbers of the plan's devices, from 0 to {before - 1}")
    return tuple(sorted(set(lost)))


def _item_bytes(plan: Plan, model: nn.Module) -> dict[str, float]:
    """Bytes of state of one element of each parameter: its own and, where it is trained, its optimizer states'. Raises
    PlanError for plans that train nothing."""
    state = plan.known.workload.state_bytes if plan.known is not None else {}
    if not state:
        raise PlanError("the plan says nothing of training state (it is of inference, or another version wrote its "
                        "file): plan a training step again")
    trained = sum(value for name, value in state.items() if name != "gradient")
    own = dict[str, torch.Tensor]([*model.named_parameters(remove_duplicate=False),
                                   *model.named_buffers(remove_duplicate=False)])
    return {name: trained if name not in own or own[name].requires_grad else float(own[name].element_size())
            for name in plan.model.parameters}


def optimizer_of(plan: Plan) -> str:
    """The name of the optimizer whose states a plan counts."""
    state = plan.known.workload.state_bytes if plan.known is not None else {}
    return next(name.partition(" states")[0] for name in state if " states" in name)


def _check_same(plan: Plan, made: Plan) -> None:
    """Raises PlanError unless two plans are of one model, global batch and optimizer."""
    if made.model.inputs != plan.model.inputs:
        raise PlanError(f"the global batch must stay as it is, for the loss to go on: the plan's inputs are "
                        f"{dict(plan.model.inputs)}, and the example's {dict(made.model.inputs)}: give an example with "
                        "the plan's shapes")
    if made.model.parameters != plan.model.parameters:
        raise PlanError("the model is not the plan's: its parameters have other names or shapes")
    mine, theirs = (one.known.workload.state_bytes if one.known is not None else {} for one in (plan, made))
    if mine != theirs:
        raise PlanError(f"the plan has {dict(mine)} bytes of state for an element, and now it would be {dict(theirs)}: "
                        "give the optimizer and dtype of the plan (optimizer=...)")


# --------------------------------------------------------------------------------------------------------------- report


def print_replan(found: Replan, console: ReportConsole) -> None:
    """Print the answer in one sentence, then a row for each candidate."""
    best, now = found.best, found.cluster.num_devices
    idle = f" ({now - best.devices} stay idle)" if best.devices < now else ""
    console.print(f"{found.before} devices before, {now} of {found.cluster.name} now: {best.title} on {best.devices}"
                  f"{idle}, {seconds_str(best.step_s)} a step after a move of {duration_str(best.move.seconds)}.")
    how = "is sent by the devices that have it" if found.source == "peers" else "is read from a checkpoint"
    lost = f", since {bytes_str(best.move.lost_bytes)} of it are on no device left" if best.move.lost_bytes else ""
    console.print(f"The training state {how}{lost}; totals are of {found.steps:,.0f} steps {found.until}.")
    table = Table("candidate", "devices", "step", "moves", "move", "total", "plan", box=None, pad_edge=False)
    for one in sorted(found.candidates, key=lambda one: one.total_s(found.steps)):
        if one.plan is None:
            table.add_row(one.title, str(one.devices), "-", "-", "-", "-", one.refused)
            continue
        table.add_row(one.title, str(one.devices), seconds_str(one.step_s),
                      bytes_str(one.move.sent_bytes + one.move.read_bytes), duration_str(one.move.seconds),
                      duration_str(one.total_s(found.steps)), str(roles_of(one.plan)))
    console.print(table)


__all__ = ["Candidate", "Replan", "near", "optimizer_of", "origins", "print_replan", "replan"]
