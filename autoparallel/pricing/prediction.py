"""The predicted cost of a plan by part: the costs that the search summed, itemised for the report."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from autoparallel import clock
from autoparallel.layout import COLLECTIVES
from autoparallel.plans import CollectiveUse, Hybrid, Prediction
from autoparallel.plans.record import StageSeconds
from autoparallel.pricing.counts import ExecutionCounts
from autoparallel.pricing.equal_blocks import with_equals
from autoparallel.pricing.hidden import hidden as simulated_hidden
from autoparallel.pricing.overlap_simulation import Hidden
from autoparallel.pricing.parts import (
    Found,
    Parts,
    add_decisions,
    add_host_bytes,
    add_live_bytes,
    add_uses,
    together,
)
from autoparallel.pricing.problem import SpacePricer
from autoparallel.pricing.stage_devices import along_pipeline, paces_of, seconds_by_rank
from autoparallel.pricing.unit_costs import Prices
from autoparallel.schedule.pipeline_tasks import StageTimes, simulated_s
from autoparallel.search.model.problem import Problem
from autoparallel.strategies.space import Strategy
from cost_models import Cluster, collectives
from cost_models.accuracy import error_bar
from cost_models.pipeline import pipeline_s
from cost_models.profile import Profile

#: Bytes of activations that a rank exchanges in a step, above which its plan counts as tensor or context parallel.
EXCHANGED = 2**20
#: By cut: bytes of one micro-batch that a rank sends in one direction, and of its part of values that several have.
Sends = Sequence[tuple[float, float]]


def predict(pricer: SpacePricer, problem: Problem, strategies: Sequence[Strategy], peak_bytes: float,
            sends: Sends = ()) -> Prediction:
    """The predicted seconds and bytes of a plan with ``strategies``.

    ``sends``: what goes over each cut. Without a pipeline the parts sum to the
    search's objective. With one they are means over the ranks, and ``waiting_s`` is the rest of the schedule's step
    time. In both cases ``hidden_s`` is the time saved by overlap, and by launches ahead of the device.
    """
    clock.did("decisions read", len(strategies))
    hybrid, decisions, nodes = pricer.counts.hybrid, pricer.space.decisions, pricer.space.graph.nodes
    stages = [Parts(ranks=len(hybrid.ranks_of(stage))) for stage in range(hybrid.stages)]
    found: Found = {}
    add_decisions(pricer, strategies, stages, found)
    add_uses(pricer, strategies, stages, found)
    add_live_bytes(pricer, problem, strategies, stages)
    add_host_bytes(pricer, strategies, stages)
    ranks = hybrid.pipeline_ranks if hybrid.stages > 1 else 1
    by_rank = [together([stages[stage] for stage in hybrid.stages_of(rank)]) for rank in range(ranks)]
    fullest = max(by_rank, key=lambda s: s.live_bytes)
    mean = together(by_rank)
    profile = pricer.prices.cluster.profile
    if hybrid.stages > 1:
        step = _pipelined_s(pricer, stages, sends, strategies)
        ahead = sum(stages[stage].beside_s(profile, hybrid.micro_batches_on(stage))
                    for rank in range(ranks) for stage in hybrid.stages_of(rank)) / ranks
        overlap = sum(stages[stage].hidden_s(profile, hybrid.micro_batches_on(stage), one) + one.once
                      for rank in range(ranks) for stage in hybrid.stages_of(rank)
                      for one in [_hidden(pricer, strategies, (stage,))]) / ranks
        bubbles = max(0.0, step + ahead + overlap - mean.total / ranks)
        hidden = mean.total / ranks + bubbles - step
    else:
        count, found_hidden = pricer.counts.micro_batches_on(0), _hidden(pricer, strategies)
        ahead, bubbles = mean.beside_s(profile, count), 0.0
        hidden = mean.hidden_s(profile, count, found_hidden) + found_hidden.once + ahead
    saved = hidden - ahead    # below 0: the latency of buckets that are not full is more than overlap saves
    waited = max(0.0, -ahead) + max(0.0, -saved)    # the former: ranks that wait for one another's hosts
    trains = pricer.prices.training and any(m.requires_grad for s in pricer.space.strategy_sets for m in s.output_metas)
    slower_s = mean.ahead_forward.slower_host_s + mean.ahead_backward.slower_host_s
    slower_host = slower_s / mean.total if mean.total else 0.0
    bar = max((error_bar(one.profile, None, list(_kinds(pricer, found)), pricer.prices.cluster.num_devices, trains,
                         slower_host) for one in pricer.prices.kinds), key=lambda found: found.p90)
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
        hidden_s=max(0.0, ahead) + max(0.0, saved),
        ahead_s=max(0.0, ahead),
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
    filling = hybrid.copies * (hybrid.pipeline_ranks - 1) / _virtual(hybrid) if hybrid.stages > 1 else 0.0
    return cluster.correction.fixed_s + profile.step_of(cluster.num_devices) + profile.micro_s * (
        max(hybrid.by_rank, default=hybrid.micro_batches) + filling)


def _hidden(pricer: SpacePricer, strategies: Sequence[Strategy] | None, stages: Sequence[int] = (0,)) -> Hidden:
    """Seconds of parameters' communication that overlaps with compute. (Of no strategies: none.)"""
    if strategies is None:
        return Hidden()
    return _as_software(pricer, simulated_hidden(pricer, strategies, stages))


def _as_software(pricer: SpacePricer, found: Hidden) -> Hidden:
    """What this project's programs hide, less where the software hides less."""
    profile = pricer.prices.cluster.profile
    share = 1.0 if profile is None else profile.hide_data
    return Hidden(share * found.each, share * found.once, found.activations)


def step_s(pricer: SpacePricer, strategies: Sequence[Strategy], sends: Sends) -> float:
    """Seconds of a pipelined step without overlap, in closed form; memory is not checked."""
    clock.did("decisions read", len(strategies))
    stages = [Parts() for _ in range(pricer.counts.hybrid.stages)]
    add_decisions(pricer, strategies, stages, {})
    add_uses(pricer, strategies, stages, {})
    return _pipelined_s(pricer, stages, sends)


def estimate(pricer: SpacePricer, strategies: Sequence[Strategy]) -> float:
    """Seconds of a step with equal stages, for a reduced-depth model, which has no cuts; on unequal devices with stages
    that take equally long."""
    clock.did("decisions read", len(strategies))
    hybrid, stage = pricer.counts.hybrid, Parts()
    add_decisions(pricer, strategies, [stage], {})
    add_uses(pricer, strategies, [stage], {})
    hidden = _as_software(pricer, with_equals(pricer, strategies, simulated_hidden(pricer, strategies)))
    once = (stage.once - hidden.once) * max(hybrid.groups) / hybrid.pipeline_ranks
    fixed = fixed_s(pricer.prices.cluster, hybrid, pricer.prices.training)
    profile = pricer.prices.cluster.profile
    saved = stage.beside_s(profile, hybrid.micro_batches) + stage.hidden_s(profile, hybrid.micro_batches, hidden)
    return evened(pricer.prices, hybrid) * equal_stages_s(hybrid, stage.total - stage.once - saved) + once + fixed


def estimated_saved(pricer: SpacePricer, strategies: Sequence[Strategy]) -> dict[str, float]:
    """By tier, the bytes of what blocks save there for a rank with the most; of a reduced-depth model as `estimate`."""
    stage = Parts()
    add_host_bytes(pricer, strategies, [stage])
    return {"host": stage.host_bytes, "disk": stage.disk_bytes}


def evened(prices: Prices, hybrid: Hybrid) -> float:
    """The seconds of a micro-batch over those on the slowest devices, where each stage gets as much work as its devices
    do in the same time; with micro-batches by rank, where each rank runs its own."""
    if hybrid.by_rank:
        return hybrid.pipeline_ranks / hybrid.micro_batches * max(seconds_by_rank(prices, hybrid))
    paces = paces_of(prices, [hybrid.ranks_of(number) for number in range(len(hybrid.groups))])
    return hybrid.pipeline_ranks / sum(size * pace for size, pace in zip(hybrid.groups, paces, strict=True))


def decision_seconds(prices: Prices, hybrid: Hybrid, strategies: Sequence[Strategy], alike: np.ndarray) -> np.ndarray:
    """Seconds that each decision of a plan, with the uses of its inputs, adds to one micro-batch, on the slowest
    devices; shape (decisions,). ``alike``: numbers by decision; equal decisions with equal numbers are priced once, as
    their mean."""
    counts = ExecutionCounts(prices.space, hybrid, [(index,) for index in range(len(prices.space))], alike=alike)
    pricer, decisions = SpacePricer(prices.alike(), counts=counts), [Parts() for _ in prices.space.decisions]
    add_decisions(pricer, strategies, decisions, {})
    add_uses(pricer, strategies, decisions, {})
    each = [(decision.total - decision.once) / hybrid.micro_batches_on(index)
            for index, decision in enumerate(decisions)]
    which = np.unique(pricer.costs.kinds.decision_codes(strategies), return_inverse=True)[1].reshape(-1)
    return means(np.array(each), which)


def means(values: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Each value's mean with those that have its number in ``which``.

    >>> means(np.array([1.0, 3.0, 5.0]), np.array([0, 0, 1])).tolist()
    [2.0, 2.0, 5.0]
    """
    return np.asarray((np.bincount(which, values) / np.maximum(np.bincount(which), 1))[which])


def equal_stages_s(hybrid: Hybrid, micro_batches_s: float) -> float:
    """Seconds of all micro-batches in a pipeline with equal shares per rank; one rank alone needs
    ``micro_batches_s``."""
    rounds = hybrid.micro_batches // hybrid.copies
    share = micro_batches_s / rounds / hybrid.pipeline_ranks
    return float(pipeline_s([share * ranks for ranks in hybrid.groups], rounds, _virtual(hybrid), hybrid.groups))


def _virtual(hybrid: Hybrid) -> int:
    """The divisor of the pipeline bubble: stages per rank; three times that for zero bubble, which fills two thirds of
    the bubble with weight gradients (ZB-H1, Qi et al. 2023)."""
    return hybrid.stages // len(hybrid.groups) * hybrid.pipelining.bubble_parts


def _pipelined_s(pricer: SpacePricer, stages: Sequence[Parts], sends: Sends,
                 strategies: Sequence[Strategy] | None = None) -> float:
    """Seconds of a step under the schedule: the pipelined micro-batches, then the work done once per step.

    With ``strategies`` less the overlap: the micro-batches are simulated in their order on each rank; no fewer seconds
    count than with equal stages, for which the bounds of plans hold. Else without overlap, by the closed form of
    `pipeline_s`: of unequal stages an upper bound. In closed form both stages at a cut wait for one message of each
    micro-batch: a value in one direction while a gradient comes back.
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
    if strategies is None:
        rounds_s = [hybrid.copies * seconds for seconds in of_group]
        return float(pipeline_s(rounds_s, hybrid.micro_batches // hybrid.copies, _virtual(hybrid), groups)) + once
    clock.did("tasks simulated", 2 * len(stages) * hybrid.micro_batches)
    each = [_micro_batch(s, profile, count, less) for s, count, less in zip(stages, counts, each_s, strict=True)]
    times = [StageTimes(one.forward_s, one.backward_s, send_s) for one, send_s in
             zip(each, [*passed, 0.0], strict=True)]
    return max(equal_stages_s(hybrid, hybrid.micro_batches * sum(of_group)), simulated_s(hybrid, times)) + once


class _MicroBatch(NamedTuple):
    """Seconds of a micro-batch on a stage. ``recompute_s`` is of backward; the last two are of both, exposed."""

    forward_s: float
    backward_s: float
    recompute_s: float
    forward_communication_s: float
    backward_communication_s: float


def _micro_batch(s: Parts, profile: Profile | None, count: int, hidden_s: float) -> _MicroBatch:
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
    hybrid, prices, profile, found = pricer.counts.hybrid, pricer.prices, pricer.prices.cluster.profile, list[float]()
    scatters = profile is not None and profile.scatter_sends > 0
    for stage, (sent, part) in enumerate(sends):
        network = along_pipeline(prices, hybrid.ranks_of(stage, stage + 1))
        found.append(float(collectives.send_recv_s(part if scatters else sent, network)))
        if scatters:
            found[-1] += _regathered_s(prices.of_ranks(hybrid.ranks_of(stage + 1)), sent, part)
    return found or [0.0] * (hybrid.stages - 1)


def compute_seconds(pricer: SpacePricer, strategies: Sequence[Strategy]) -> dict[str, float]:
    """Seconds of a step's matrix products (and convolutions) and attention on a rank, the mean over a pipeline's."""
    hybrid = pricer.counts.hybrid
    stages = [Parts() for _ in range(hybrid.stages)]
    add_decisions(pricer, strategies, stages, {})
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
    stages = [Parts(ranks=len(hybrid.ranks_of(stage))) for stage in range(hybrid.stages)]
    add_decisions(pricer, strategies, stages, {})
    add_uses(pricer, strategies, stages, {})
    add_live_bytes(pricer, problem, strategies, stages)
    found, left = [], _left_of_once(pricer, stages, strategies)
    for number, (s, send_s) in enumerate(zip(stages, [*_passed_s(pricer, sends), 0.0], strict=True)):
        saved = max(0.0, s.live_bytes - s.always_bytes) / max(1, pricer.counts.in_flight[number])
        hidden_s, once_s = _hidden(pricer, strategies, (number,)).each, left[number] * s.once
        each = _micro_batch(s, profile, pricer.counts.micro_batches_on(number), hidden_s)
        found.append(StageSeconds(each.forward_s, each.backward_s, once_s, send_s, s.always_bytes, saved,
                                  each.forward_communication_s, each.backward_communication_s, each.recompute_s,
                                  max(0.0, once_s - s.optimizer)))
    return tuple(found)


def _left_of_once(pricer: SpacePricer, stages: Sequence[Parts], strategies: Sequence[Strategy]) -> list[float]:
    """By stage, the share of what is done once per step that does not overlap with compute, alike for all stages of a
    rank."""
    ranks, found = len(pricer.counts.hybrid.groups), [1.0] * len(stages)
    for rank in range(ranks):
        own = range(rank, len(stages), ranks)
        once = sum(stages[number].once for number in own)
        for number in own:
            found[number] = min(1.0, max(0.0, 1 - _hidden(pricer, strategies, own).once / once)) if once else 1.0
    return found


def _regathered_s(prices: Prices, whole: float, part: float) -> float:
    """Seconds in which ranks that each received a part gather the whole, along the innermost axis."""
    innermost = prices.groups[(len(prices.space.mesh_shape) - 1,)]
    return float(collectives.all_gather_s(whole, innermost)) if whole > 1.5 * part else 0.0


