"""The predicted cost of a plan by part: the costs that the search summed, itemised for the report."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from autoparallel import clock
from autoparallel.layout import COLLECTIVES, SUMS
from autoparallel.plans import CollectiveUse, Hybrid, Prediction
from autoparallel.plans.record import StageSeconds
from autoparallel.pricing.counts import ExecutionCounts
from autoparallel.pricing.hidden import hidden as simulated_hidden
from autoparallel.pricing.overlap_simulation import Hidden
from autoparallel.pricing.problem import SpacePricer
from autoparallel.pricing.step_cost import Move, prices_of
from autoparallel.pricing.unit_costs import Inside, Prices
from autoparallel.schedule.pipeline_tasks import StageTimes, simulated_s
from autoparallel.search.model.problem import Problem
from autoparallel.strategies.space import Strategy
from cost_models import Cluster, collectives
from cost_models.accuracy import error_bar
from cost_models.compute import larger
from cost_models.pipeline import pipeline_s
from cost_models.profile import Profile

#: Bytes of activations that a rank exchanges in a step, above which its plan counts as tensor or context parallel.
EXCHANGED = 2**20
#: (kind of collective, axis, direction, purpose) -> [count, bytes, seconds].
Found = dict[tuple[str, str, str, str], list[float]]
#: By cut: bytes of one micro-batch that a rank sends in one direction, and of its part of values that several have.
Sends = Sequence[tuple[float, float]]


@dataclass
class _Ahead:
    """Seconds of the ops in blocks in one direction: ``summed`` over kernels, each no shorter than its launch; of the
    ``device`` and of the ``host`` alone; and of ``collectives`` of activations, with what the host does for them in
    ``host``."""

    summed: float = 0.0
    device: float = 0.0
    host: float = 0.0
    collectives: float = 0.0

    def saved_s(self, profile: Profile, hidden_s: float = 0.0) -> float:
        """How much less than the sum they take: the host launches ahead, collectives overlap with compute (by
        ``hidden_s``, or by the software's share). Ranks that wait for one another wait for one another's hosts
        (`Profile.tied`)."""
        hidden = hidden_s if profile.overlaps_activations else profile.hide_tensor * min(self.collectives, self.summed)
        taken = larger(self.device + self.collectives - hidden, self.host, profile.tied if self.collectives else 6.0)
        return self.summed + self.collectives - float(taken) if self.summed else hidden

    def add(self, other: _Ahead) -> None:
        for name in ("summed", "device", "host", "collectives"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class _Parts:
    """Seconds of one step and bytes, on each of the ``ranks`` ranks of a stage. ``host_bytes``, ``disk_bytes``: of
    activations and training state there; ``tiled_bytes``: of optimizer states on disk. ``once``: the seconds that do
    not depend on the number of micro-batches, ``once_forward`` those of them in forward. ``again``: compute of
    recompute. ``lookups_forward``, ``lookups_backward``, ``crossings``: of tables on the host. ``by_class``: compute of
    ops by their class. ``outside``: by how much launches prolong ops outside of blocks. All of these are in the others
    too, and so are ``ahead_forward`` and ``ahead_backward``."""

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    forward_communication: float = 0.0
    backward_communication: float = 0.0
    once: float = 0.0
    once_forward: float = 0.0
    again: float = 0.0
    ahead_forward: _Ahead = field(default_factory=_Ahead)
    ahead_backward: _Ahead = field(default_factory=_Ahead)
    outside: float = 0.0
    state_bytes: float = 0.0
    live_bytes: float = 0.0
    always_bytes: float = 0.0
    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    tiled_bytes: float = 0.0
    lookups_forward: float = 0.0
    lookups_backward: float = 0.0
    crossings: float = 0.0
    by_class: dict[str, float] = field(default_factory=dict)
    repeated: list[int] = field(default_factory=list)
    ranks: int = 1

    @property
    def total(self) -> float:
        return (self.forward + self.backward + self.optimizer + self.forward_communication
                + self.backward_communication)

    def beside_s(self, profile: Profile | None, micro_batches: int, hidden_s: float = 0.0) -> float:
        """Seconds saved as the host launches ahead, and ``hidden_s`` of communication of activations overlap with
        compute. Launches outside of blocks are counted in the fixed time of a micro-batch, as far as that goes."""
        if profile is None:
            return 0.0
        ways = self.ahead_forward, self.ahead_backward
        sent = sum(way.collectives for way in ways) or 1.0
        return (sum(way.saved_s(profile, hidden_s * way.collectives / sent) for way in ways)
                + min(self.outside, profile.micro_s * micro_batches))

    def hidden_s(self, profile: Profile | None, micro_batches: int, found: Hidden) -> float:
        """Seconds saved by overlap in all micro-batches alike. What hides communication of activations saves nothing
        where the host takes longer."""
        return found.each + (self.beside_s(profile, micro_batches, found.activations)
                             - self.beside_s(profile, micro_batches))


def predict(pricer: SpacePricer, problem: Problem, strategies: Sequence[Strategy], peak_bytes: float,
            sends: Sends = ()) -> Prediction:
    """The predicted seconds and bytes of a plan with ``strategies``.

    ``sends``: what goes over each cut. Without a pipeline the parts sum to the
    search's objective. With one they are means over the ranks, and ``waiting_s`` is the rest of the schedule's step
    time. In both cases ``hidden_s`` is the time saved by overlap, and by launches ahead of the device.
    """
    clock.did("decisions read", len(strategies))
    hybrid, decisions, nodes = pricer.counts.hybrid, pricer.space.decisions, pricer.space.graph.nodes
    stages = [_Parts(ranks=len(hybrid.ranks_of(stage))) for stage in range(hybrid.stages)]
    found: Found = {}
    _add_decisions(pricer, strategies, stages, found)
    _add_uses(pricer, strategies, stages, found)
    _add_live_bytes(pricer, problem, strategies, stages)
    _add_host_bytes(pricer, strategies, stages)
    ranks = hybrid.pipeline_ranks
    by_rank = [_together([stages[stage] for stage in hybrid.stages_of(rank)]) for rank in range(ranks)]
    fullest = max(by_rank, key=lambda s: s.live_bytes)
    mean = _together(by_rank)
    profile = pricer.prices.cluster.profile
    if hybrid.stages > 1:
        step = _pipelined_s(pricer, stages, sends, strategies, in_order=True)
        ahead = sum(stages[stage].beside_s(profile, hybrid.micro_batches_on(stage))
                    for rank in range(ranks) for stage in hybrid.stages_of(rank)) / ranks
        overlap = sum(stages[stage].hidden_s(profile, hybrid.micro_batches_on(stage), one) + one.once
                      for rank in range(ranks) for stage in hybrid.stages_of(rank)
                      for one in [_hidden(pricer, strategies, (stage,))]) / ranks
        bubbles = max(0.0, step + ahead + overlap - mean.total / ranks)
        hidden = mean.total / ranks + bubbles - step
    else:
        ahead, bubbles, found_hidden = mean.beside_s(profile, hybrid.micro_batches), 0.0, _hidden(pricer, strategies)
        hidden = mean.hidden_s(profile, hybrid.micro_batches, found_hidden) + found_hidden.once + ahead
    waited = max(0.0, -hidden)    # ranks that wait for one another's hosts
    bar = max((error_bar(one.profile, None, list(_kinds(pricer, found)), pricer.prices.cluster.num_devices)
               for one in pricer.prices.kinds), key=lambda found: found.p90)
    return Prediction(
        forward_s=mean.forward / ranks,
        recompute_s=mean.again / ranks,
        backward_s=mean.backward / ranks,
        optimizer_s=mean.optimizer / ranks,
        forward_communication_s=mean.forward_communication / ranks,
        backward_communication_s=mean.backward_communication / ranks,
        state_bytes=fullest.state_bytes,
        activation_bytes=max(0.0, fullest.live_bytes - fullest.state_bytes),
        peak_bytes=peak_bytes,
        collectives=tuple(CollectiveUse(k, a, d, int(n), b, s, p) for (k, a, d, p), (n, b, s) in sorted(found.items())
                          if k in COLLECTIVES or " in " in k),
        repeated_ops=tuple(str(nodes[decisions[index].node]) for index in sorted(set(mean.repeated))),
        host_bytes=max(s.host_bytes + pricer.costs.states.tiles_bytes(s.tiled_bytes) for s in by_rank),
        disk_bytes=max(s.disk_bytes for s in by_rank),
        waiting_s=bubbles + waited,
        hidden_s=max(0.0, hidden),
        ahead_s=min(max(0.0, ahead), max(0.0, hidden)),
        fixed_s=fixed_s(pricer.prices.cluster, hybrid, pricer.prices.training),
        p50=bar.p50,
        p90=bar.p90,
        basis=bar.basis,
        limit_bytes=pricer.limit_bytes if math.isfinite(pricer.limit_bytes) else 0.0,
        lookups_forward_s=mean.lookups_forward / ranks,
        lookups_backward_s=mean.lookups_backward / ranks,
        crossings_s=mean.crossings / ranks,
    )


def _kinds(pricer: SpacePricer, found: Found) -> Iterator[str]:
    """The kinds of parallelism (`cost_models.accuracy.KINDS`) of a plan with these collectives."""
    if pricer.counts.hybrid.stages > 1:
        yield "pipeline"
    if sum(num_bytes for (*_, purpose), (_, num_bytes, _) in found.items() if purpose == "activations") > EXCHANGED:
        yield "tensor or context"
    if any("routed_experts" in node.op_name or "grouped_mm" in node.op_name
           for node in pricer.space.graph.of_kind("op")):
        yield "expert"


def fixed_s(cluster: Cluster, hybrid: Hybrid, training: bool = True) -> float:
    """Seconds of a step, and of its micro-batches on each stage, that no op takes."""
    profile = cluster.profile
    if profile is None or not training:
        return cluster.correction.fixed_s
    filling = (hybrid.pipeline_ranks - 1) / _virtual(hybrid) if hybrid.stages > 1 else 0.0
    return cluster.correction.fixed_s + profile.step_of(cluster.num_devices) + profile.micro_s * (
        hybrid.micro_batches + filling)


def _hidden(pricer: SpacePricer, strategies: Sequence[Strategy] | None, stages: Sequence[int] = (0,)) -> Hidden:
    """Seconds of parameters' communication that overlaps with compute: as this project's programs do it, less where
    the software does it less. (Of no strategies: none.)"""
    if strategies is None:
        return Hidden()
    profile, found = pricer.prices.cluster.profile, simulated_hidden(pricer, strategies, stages)
    share = 1.0 if profile is None else profile.hide_data
    return Hidden(share * found.each, share * found.once, found.activations)


def step_s(pricer: SpacePricer, strategies: Sequence[Strategy], sends: Sends) -> float:
    """Seconds of a pipelined step without overlap, as in `predict`; memory is not checked."""
    clock.did("decisions read", len(strategies))
    stages = [_Parts() for _ in range(pricer.counts.hybrid.stages)]
    _add_decisions(pricer, strategies, stages, {})
    _add_uses(pricer, strategies, stages, {})
    return _pipelined_s(pricer, stages, sends)


def estimate(pricer: SpacePricer, strategies: Sequence[Strategy]) -> float:
    """Seconds of a step with equal stages, for a reduced-depth model, which has no cuts; on unequal devices with stages
    that take equally long."""
    clock.did("decisions read", len(strategies))
    hybrid, stage = pricer.counts.hybrid, _Parts()
    _add_decisions(pricer, strategies, [stage], {})
    _add_uses(pricer, strategies, [stage], {})
    hidden = _hidden(pricer, strategies)
    once = (stage.once - hidden.once) * max(hybrid.groups) / hybrid.pipeline_ranks
    fixed = fixed_s(pricer.prices.cluster, hybrid, pricer.prices.training)
    profile = pricer.prices.cluster.profile
    saved = stage.beside_s(profile, hybrid.micro_batches) + stage.hidden_s(profile, hybrid.micro_batches, hidden)
    return evened(pricer.prices, hybrid) * equal_stages_s(hybrid, stage.total - stage.once - saved) + once + fixed


def evened(prices: Prices, hybrid: Hybrid) -> float:
    """The seconds of a micro-batch over those on the slowest devices, where each stage gets as much work as its devices
    do in the same time."""
    paces = prices.paces([hybrid.ranks_of(number) for number in range(len(hybrid.groups))])
    return hybrid.pipeline_ranks / sum(size * pace for size, pace in zip(hybrid.groups, paces, strict=True))


def decision_seconds(prices: Prices, hybrid: Hybrid, strategies: Sequence[Strategy]) -> np.ndarray:
    """Seconds that each decision of a plan, with the uses of its inputs, adds to one micro-batch, on the slowest
    devices; shape (decisions,)."""
    counts = ExecutionCounts(prices.space, hybrid, [(index,) for index in range(len(prices.space))])
    pricer, decisions = SpacePricer(prices.alike(), counts=counts), [_Parts() for _ in prices.space.decisions]
    _add_decisions(pricer, strategies, decisions, {})
    _add_uses(pricer, strategies, decisions, {})
    return np.array(
        [(decision.total - decision.once) / hybrid.micro_batches_on(index) for index, decision in enumerate(decisions)]
    )


def equal_stages_s(hybrid: Hybrid, micro_batches_s: float) -> float:
    """Seconds of all micro-batches in a pipeline with equal shares per rank; one rank alone needs
    ``micro_batches_s``."""
    share = micro_batches_s / hybrid.micro_batches / hybrid.pipeline_ranks
    return float(pipeline_s([share * ranks for ranks in hybrid.groups], hybrid.micro_batches, _virtual(hybrid),
                            hybrid.groups))


def _virtual(hybrid: Hybrid) -> int:
    """The divisor of the pipeline bubble: stages per rank; three times that for zero bubble, which fills two thirds of
    the bubble with weight gradients (ZB-H1, Qi et al. 2023)."""
    return hybrid.stages // len(hybrid.groups) * hybrid.pipelining.bubble_parts


def _together(stages: Sequence[_Parts]) -> _Parts:
    made = _Parts(repeated=[index for s in stages for index in s.repeated])
    for name in ("forward", "backward", "optimizer", "forward_communication", "backward_communication", "once",
                 "once_forward", "again", "outside", "state_bytes", "live_bytes", "always_bytes", "host_bytes",
                 "disk_bytes", "tiled_bytes", "lookups_forward", "lookups_backward", "crossings"):
        setattr(made, name, sum(getattr(s, name) for s in stages))
    for stage in stages:
        made.ahead_forward.add(stage.ahead_forward)
        made.ahead_backward.add(stage.ahead_backward)
    return made


def _pipelined_s(pricer: SpacePricer, stages: Sequence[_Parts], sends: Sends,
                 strategies: Sequence[Strategy] | None = None, in_order: bool = False) -> float:
    """Seconds of a step under the schedule: the pipelined micro-batches, then the work done once per step, less the
    overlap (if ``strategies`` are given).

    Per micro-batch both stages at a cut wait for one message: a value in one direction while a gradient comes back.
    ``in_order``: several stages of a rank that are not equal wait for one another, so that no fewer seconds count than
    the micro-batches take in the order in which they run.
    """
    hybrid, cluster = pricer.counts.hybrid, pricer.prices.cluster
    groups, passed = hybrid.groups, _passed_s(pricer, sends)
    profile = cluster.profile if strategies is not None else None
    counts = [hybrid.micro_batches_on(number) for number in range(len(stages))]
    each_s = [s.hidden_s(profile, count, _hidden(pricer, strategies, (number,)))
              for number, (s, count) in enumerate(zip(stages, counts, strict=True))]
    micro_batch_s = [(s.total - s.once - s.beside_s(profile, count) - less) / count + before + after
                     for s, count, less, before, after in
                     zip(stages, counts, each_s, [0.0, *passed], [*passed, 0.0], strict=True)]
    of_group = [sum(micro_batch_s[g :: len(groups)]) for g in range(len(groups))]
    of_rank = [range(g, len(stages), len(groups)) for g in range(len(groups))]
    hidden = [_hidden(pricer, strategies, rank).once for rank in of_rank]
    once = max(sum(stages[n].once for n in rank) - less for rank, less in zip(of_rank, hidden, strict=True))
    closed = float(pipeline_s(of_group, hybrid.micro_batches, _virtual(hybrid), groups))
    if not in_order or len(stages) == len(groups):
        return closed + once
    clock.did("tasks simulated", 2 * len(stages) * hybrid.micro_batches)
    each = [_micro_batch(s, profile, count, less) for s, count, less in zip(stages, counts, each_s, strict=True)]
    times = [StageTimes(one.forward_s, one.backward_s, send_s) for one, send_s in
             zip(each, [*passed, 0.0], strict=True)]
    return max(closed, simulated_s(hybrid, times)) + once


class _MicroBatch(NamedTuple):
    """Seconds of a micro-batch on a stage. ``recompute_s`` is of backward; the last two are of both, exposed."""

    forward_s: float
    backward_s: float
    recompute_s: float
    forward_communication_s: float
    backward_communication_s: float


def _micro_batch(s: _Parts, profile: Profile | None, count: int, hidden_s: float) -> _MicroBatch:
    """One of ``count``; what hosts launch ahead makes its compute shorter, and what overlaps with compute
    (``hidden_s``, of all) its communication."""
    once_backward = max(0.0, s.once - s.once_forward - s.optimizer)
    forward_s = max(0.0, s.forward_communication - s.once_forward) / count
    backward_s = max(0.0, s.backward_communication - once_backward) / count
    compute_s = (s.forward + s.backward) / count
    left_s = (s.total - s.once - s.beside_s(profile, count)) / count - forward_s - backward_s
    share = max(0.0, left_s) / compute_s if compute_s else 0.0
    again_s = share * s.again / count
    exposed = max(0.0, 1 - hidden_s / count / (forward_s + backward_s)) if forward_s + backward_s else 1.0
    forward_s, backward_s = exposed * forward_s, exposed * backward_s
    return _MicroBatch(share * s.forward / count - again_s + forward_s,
                       share * s.backward / count + again_s + backward_s, again_s, forward_s, backward_s)


def _passed_s(pricer: SpacePricer, sends: Sends) -> list[float]:
    """Seconds of sending one micro-batch over each cut."""
    hybrid, cluster = pricer.counts.hybrid, pricer.prices.cluster
    network = cluster.group((hybrid.pipeline_ranks, *pricer.space.mesh_shape), 0)
    scatters = cluster.profile is not None and cluster.profile.scatter_sends > 0
    passed = [float(collectives.send_recv_s(part if scatters else sent, network))
              + (_regathered_s(pricer, sent, part) if scatters else 0.0) for sent, part in sends]
    return passed or [0.0] * (hybrid.stages - 1)


def compute_seconds(pricer: SpacePricer, strategies: Sequence[Strategy]) -> dict[str, float]:
    """Seconds of a step's matrix products (and convolutions) and attention on a rank, the mean over a pipeline's."""
    hybrid = pricer.counts.hybrid
    stages = [_Parts() for _ in range(hybrid.stages)]
    _add_decisions(pricer, strategies, stages, {})
    found, ranks = defaultdict[str, float](float), range(hybrid.pipeline_ranks)
    for stage in (stage for rank in ranks for stage in hybrid.stages_of(rank)):
        for op_class, seconds in stages[stage].by_class.items():
            found[op_class] += seconds / len(ranks)
    kinds = {"matmul": ("matmul", "conv"), "attention": ("attention",)}
    return {kind: max(0.0, sum(found[one] for one in some)) for kind, some in kinds.items()}


def stage_seconds(pricer: SpacePricer, problem: Problem, strategies: Sequence[Strategy], sends: Sends
                  ) -> tuple[StageSeconds, ...]:
    """Seconds and bytes of each stage of a pipeline, whose micro-batches and sends add up to those of `predict`."""
    hybrid, profile = pricer.counts.hybrid, pricer.prices.cluster.profile
    stages = [_Parts(ranks=len(hybrid.ranks_of(stage))) for stage in range(hybrid.stages)]
    _add_decisions(pricer, strategies, stages, {})
    _add_uses(pricer, strategies, stages, {})
    _add_live_bytes(pricer, problem, strategies, stages)
    found, left = [], _left_of_once(pricer, stages, strategies)
    for number, (s, send_s) in enumerate(zip(stages, [*_passed_s(pricer, sends), 0.0], strict=True)):
        saved = max(0.0, s.live_bytes - s.always_bytes) / max(1, pricer.counts.in_flight[number])
        hidden_s, once_s = _hidden(pricer, strategies, (number,)).each, left[number] * s.once
        each = _micro_batch(s, profile, hybrid.micro_batches_on(number), hidden_s)
        found.append(StageSeconds(each.forward_s, each.backward_s, once_s, send_s, s.always_bytes, saved,
                                  each.forward_communication_s, each.backward_communication_s, each.recompute_s,
                                  max(0.0, once_s - s.optimizer)))
    return tuple(found)


def _left_of_once(pricer: SpacePricer, stages: Sequence[_Parts], strategies: Sequence[Strategy]) -> list[float]:
    """By stage, the share of what is done once per step that does not overlap with compute, alike for all stages of a
    rank."""
    ranks, found = len(pricer.counts.hybrid.groups), [1.0] * len(stages)
    for rank in range(ranks):
        own = range(rank, len(stages), ranks)
        once = sum(stages[number].once for number in own)
        for number in own:
            found[number] = max(0.0, 1 - _hidden(pricer, strategies, own).once / once) if once else 1.0
    return found


def _called_s(pricer: SpacePricer, axis: int) -> float:
    """Seconds of the host for a collective on a mesh axis, and of its wait for the last rank."""
    profile = pricer.prices.cluster.profile
    return 0.0 if profile is None else profile.host_call_s + profile.late_s(pricer.prices.groups[axis].size)


def _regathered_s(pricer: SpacePricer, whole: float, part: float) -> float:
    """Seconds in which ranks that each received a part gather the whole, along the innermost axis."""
    return float(collectives.all_gather_s(whole, pricer.prices.groups[-1])) if whole > 1.5 * part else 0.0


def _add_decisions(pricer: SpacePricer, strategies: Sequence[Strategy], stages: Sequence[_Parts], found: Found) -> None:
    """Add the costs of decisions, once per equivalence class."""
    space, kinds = pricer.space, pricer.costs.kinds
    codes, numbers = kinds.decision_codes(strategies), kinds.numbers(strategies)
    _, first, which, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    for kind, (index, count) in enumerate(zip(first.tolist(), counts.tolist(), strict=True)):
        decision, strategy_set, number = space.decisions[index], space.strategy_sets[index], int(numbers[index])
        for place in pricer.counts.stages_of[index]:
            stage = stages[place]
            if decision.kind == "op":
                _add_op(pricer, index, number, count, place, stage, found)
                if not strategy_set.known and any(m.requires_grad for m in strategy_set.output_metas):
                    stage.repeated += np.flatnonzero(which == kind).tolist()
            elif decision.kind == "shared_read":
                stage.backward += count * float(pricer.costs.of(index, place).backward[number])
            elif decision.kind == "parameter":
                _add_parameter(pricer, index, number, count, stage, found)
                stage.state_bytes += count * float(pricer.costs.decision_bytes(index)[number])


def _add_op(pricer: SpacePricer, index: int, number: int, count: int, place: int, stage: _Parts, found: Found) -> None:
    cost, before_s = pricer.costs.of(index, place), stage.forward + stage.backward
    if pricer.costs.lookups.runs(index):
        _add_lookup(pricer, index, number, count, place, stage)
        return
    stage.forward += count * float(cost.forward[number] + cost.again[number])
    stage.again += count * float(cost.again[number])
    stage.backward += count * float(cost.backward[number])
    forward, backward = pricer.counts.op_times(index, place)
    prices = prices_of(pricer.prices, pricer.counts, index, place)
    _add_ahead(pricer, prices, index, number, (count * forward, count * backward), stage)
    for exchanged in prices.op_of(index).inside:
        again = forward - backward if pricer.prices.training else 0
        stage.again -= count * again * exchanged.exchange.forward * float(exchanged.seconds[number])
        _add_inside(pricer, exchanged, number, (count * forward, count * backward), stage, found)
    rule = pricer.space.strategy_sets[index].rule
    op_class = "" if rule is None else rule.op_class
    stage.by_class[op_class] = stage.by_class.get(op_class, 0.0) + stage.forward + stage.backward - before_s


def _add_lookup(pricer: SpacePricer, index: int, number: int, count: int, place: int, stage: _Parts) -> None:
    """Add an op that runs on the host: its work there, and what crosses between the two memories as communication."""
    forward, backward = pricer.counts.op_times(index, place)
    each = pricer.costs.lookups.price(pricer.space.strategy_sets[index])
    work_s, back_s, up_s, down_s = (count * times * float(seconds[number]) for times, seconds in zip(
        (forward, backward, forward, backward), each, strict=True))
    again = (forward - backward) / forward if forward else 0.0
    stage.forward, stage.backward, stage.again = (stage.forward + work_s, stage.backward + back_s,
                                                  stage.again + again * work_s)
    stage.forward_communication += up_s
    stage.backward_communication += down_s
    stage.lookups_forward += (1 - again) * work_s
    stage.lookups_backward += back_s
    stage.crossings += up_s + down_s


def _add_ahead(pricer: SpacePricer, prices: Prices, index: int, number: int, times: tuple[int, int], stage: _Parts
               ) -> None:
    """Add an op in a block to what the host launches ahead; exchanges inside are not launched so."""
    profile = pricer.prices.cluster.profile
    if profile is None or (apart := prices.host_and_device(index)) is None:
        return
    (host, device), price = apart, prices.op_of(index)
    inside_s = [sum(float(i.seconds[number]) * n for i, n in zip(price.inside, numbers, strict=True)) for numbers in (
        [i.exchange.forward for i in price.inside], [i.exchange.backward for i in price.inside])]
    summed_s = float(price.forward_s[number]) - inside_s[0], float(price.backward_s[number])
    backward_s = summed_s[1] - inside_s[1] if summed_s[1] else 0.0
    if not pricer.space.blocks[index]:
        stage.outside += (times[0] * (summed_s[0] - float(device.forward_s[number]))
                          + times[1] * (backward_s - float(device.backward_s[number])))
        return
    stage.ahead_forward.add(_Ahead(times[0] * summed_s[0], times[0] * float(device.forward_s[number]),
                                   times[0] * float(host.forward_s[number])))
    slower = profile.kernel_backward_s / profile.kernel_s
    stage.ahead_backward.add(_Ahead(times[1] * backward_s, times[1] * float(device.backward_s[number]),
                                    times[1] * float(host.backward_s[number]) * slower))


def _add_parameter(pricer: SpacePricer, index: int, number: int, count: int, stage: _Parts, found: Found) -> None:
    cost = pricer.costs.of(index)
    updated, shared, moved = float(cost.update[number]), float(cost.summed[number]), float(cost.moved[number])
    stage.optimizer += count * updated
    if shared:
        some = pricer.counts.multiplicities[index]
        _count_use(found, ("all_reduce", "pipeline", "backward", "gradients"), stage.ranks * count * some,
                   float(pricer.costs.shared_bytes(index)[number]), shared / some)
    stage.backward_communication += count * (shared + moved)
    stage.once += count * (updated + shared + (0.0 if pricer.costs.gradients.leave(index) else moved))
    tiers = pricer.costs.tiers
    stage.host_bytes += count * float(tiers.bytes_in(index, "host")[number])
    stage.disk_bytes += count * float(tiers.bytes_in(index, "disk")[number])
    stage.tiled_bytes += count * float(tiers.tiled_bytes(index)[number])


def _add_inside(pricer: SpacePricer, inside: Inside, number: int, times: tuple[int, int], stage: _Parts,
                found: Found) -> None:
    """Move the seconds of a variant's exchange from compute to communication."""
    seconds, exchange = float(inside.seconds[number]), inside.exchange
    if not seconds:
        return
    counts = (times[0] * exchange.forward, times[1] * exchange.backward if pricer.prices.training else 0)
    for direction, n in zip(("forward", "backward"), counts, strict=True):
        if n:
            axis = pricer.space.axis_names[inside.axis]
            key = (f"{exchange.action} in {inside.variant}", axis, direction, "activations")
            _count_use(found, key, n * stage.ranks, float(inside.num_bytes[number]), seconds)
            setattr(stage, direction, getattr(stage, direction) - n * seconds)
            name = f"{direction}_communication"
            setattr(stage, name, getattr(stage, name) + n * seconds)


def _count_use(found: Found, key: tuple[str, str, str, str], times: int, num_bytes: float, seconds: float) -> None:
    entry = found.setdefault(key, [0, 0.0, 0.0])
    for place, value in enumerate((1, num_bytes, seconds)):
        entry[place] += times * value


def _add_live_bytes(
    pricer: SpacePricer, problem: Problem, strategies: Sequence[Strategy], stages: Sequence[_Parts]
) -> None:
    """Add the bytes live at the end of each stage's forward pass, and those of them that live the whole step."""
    num_bytes = problem.usages.take(problem.cells(pricer.choice_of(strategies)))
    for holders, users in _holders(pricer, problem).items():
        moments = [pricer.live.turning_of(stage) for stage in holders]
        begin, end = problem.intervals[users].T
        live = float(num_bytes[users][(begin <= min(moments)) & (max(moments) < end)].sum())
        half = len(pricer.space)  # from the turn to the start, and to the end
        always = float(num_bytes[users][(begin <= min(moments) - half) & (max(moments) + half < end)].sum())
        counted = pricer.live.share(*holders)
        for stage in holders:
            stages[stage].live_bytes += live / counted
            stages[stage].always_bytes += always / counted


def _holders(pricer: SpacePricer, problem: Problem) -> Mapping[tuple[int, ...], Sequence[int]]:
    """The numbers of a problem's nodes and edges (nodes first), by the stages that hold their memory."""
    counts = pricer.counts
    if counts.hybrid.stages == 1:
        return {(0,): range(len(problem.intervals))}
    found, first = defaultdict[tuple[int, ...], list[int]](list), len(counts.stages_of) + len(pricer.space.uses)
    stages = [*counts.stages_of, *(counts.stages_of[edge.target] for edge in problem.edges)]
    stages[first : first + len(counts.buffers)] = [(buffer.stage,) for buffer in counts.buffers]
    for number, holders in enumerate(stages):
        found[holders].append(number)
    return found


def _add_host_bytes(pricer: SpacePricer, strategies: Sequence[Strategy], stages: Sequence[_Parts]) -> None:
    """Add the bytes offloaded to the host's memory."""
    space, counts, numbers = pricer.space, pricer.counts, pricer.costs.kinds.numbers(strategies)
    if counts.hybrid.recompute != "offload":
        return
    for decision in space.decisions:
        if counts.offloads(decision.index):
            num_bytes = float(pricer.costs.decision_bytes(decision.index)[numbers[decision.index]])
            _hold(counts, stages, counts.stages_of[decision.index], num_bytes * counts.held[decision.index])
    for use in space.uses:
        if counts.offloads_copy(use):
            num_bytes = float(pricer.prices.redistribution.use_copies(use)[numbers[use.source], numbers[use.target]])
            _hold(counts, stages, counts.stages_of[use.target], num_bytes * counts.held[use.target])


def _hold(counts: ExecutionCounts, stages: Sequence[_Parts], holders: Sequence[int], num_bytes: float) -> None:
    for holder in holders:
        stages[holder].host_bytes += num_bytes * counts.in_flight[holder]


def _add_uses(pricer: SpacePricer, strategies: Sequence[Strategy], stages: Sequence[_Parts], found: Found) -> None:
    """Add the costs of uses, once per equivalence class."""
    moves = pricer.costs.moves(strategies)
    counts, equivalent = Counter(move.kind for move in moves), {move.kind: move for move in reversed(moves)}
    for kind, move in equivalent.items():
        for place in pricer.counts.stages_of[move.use.target]:
            _add_use(pricer, strategies, move, counts[kind], place, stages[place], found)


def _add_use(pricer: SpacePricer, strategies: Sequence[Strategy], move: Move, count: int, place: int, stage: _Parts,
              found: Found) -> None:
    space, counts, use = pricer.space, pricer.counts, move.use
    ends = tuple(pricer.costs.kinds.numbers(strategies)[[use.source, use.target]].tolist())
    if counts.sums(use):
        summed_s = count * float(pricer.costs.sums_s(use)[ends])
        stage.backward += summed_s
        if pricer.costs.lookups.is_table(use.source):
            stage.lookups_backward += summed_s
        elif space.blocks[use.target]:
            stage.ahead_backward.add(_Ahead(summed_s, summed_s))
    if counts.offloads_copy(use):
        there, back = pricer.costs.offload_copy_s(use)
        stage.forward += count * float(there[ends])
        stage.backward += count * float(back[ends])
    if pricer.costs.parameters.fetches(use):
        there, back = pricer.costs.tiers.fetch_s(use, pricer.costs.of)
        stage.forward_communication += count * float(there[ends[0]])
        stage.backward_communication += count * float(back[ends[0]])
    summing, (forward, again, backward) = counts.summing(use), counts.use_times(use, place, ends[1])
    times = forward + again, backward
    for step, seconds, elements in move.path:
        axis = space.axis_names[step.axis]
        actions = zip(("forward", "backward"), (step.forward, step.backward), seconds, times, strict=True)
        for direction, kind, s, n in actions:
            if kind == "none" or (direction == "backward" and not (use.meta.requires_grad and pricer.prices.training)):
                continue
            scale = summing.scale if direction == "backward" and kind in SUMS else 1.0
            num_bytes = scale * float(elements) * use.meta.dtype.itemsize
            purpose = "activations"
            if counts.of_parameter[use.source]:
                purpose = "parameters" if direction == "forward" else "gradients"
            _count_use(found, (kind, axis, direction, purpose), count * n * stage.ranks, num_bytes, s)
            name = f"{direction}_communication" if kind in COLLECTIVES else direction
            setattr(stage, name, getattr(stage, name) + count * n * s)
            if kind in COLLECTIVES and not counts.of_parameter[use.source] and space.blocks[use.target]:
                ahead = stage.ahead_forward if direction == "forward" else stage.ahead_backward
                ahead.collectives += count * n * s
                ahead.host += count * n * _called_s(pricer, step.axis)
            if counts.of_parameter[use.source] and n == counts.multiplicities[use.target]:
                stage.once += count * s
                stage.once_forward += count * s if direction == "forward" else 0.0
