"""Stages on several ranks: where a pipeline cannot be cut evenly, fewer stages whose ranks take turns may be faster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from autoparallel.errors import PlanError
from autoparallel.partition.stages import place_cuts, stages_of
from autoparallel.plans import Hybrid, Plan
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer, equal_stages_s, step_s

#: A pipeline that takes no more than so many times as long as one of equal stages is even enough.
EVEN = 1.05
#: Of longer pipelines there are too many ways to deal out the ranks.
MOST_RANKS = 4


def is_uneven(plan: Plan) -> bool:
    """Whether a pipeline with a rank for each stage, which may be dealt out anew, takes longer than equal stages."""
    hybrid, predicted = plan.hybrid, plan.prediction
    equal_s = equal_stages_s(hybrid, hybrid.pipeline_ranks * (predicted.step_s - predicted.waiting_s))
    return not hybrid.replicas and 2 < hybrid.pipeline_ranks <= MOST_RANKS and predicted.step_s > EVEN * equal_s


def on_several_ranks(plan: Plan, prices: Prices, loss: int | None) -> Hybrid | None:
    """The stages on several ranks with which the layouts of a plan, whose stages have a rank each, take least; None
    where that is no less."""
    strategies, best_s, best = plan.strategies_on(prices.space), plan.prediction.step_s, None
    for other in dealt_out(plan.hybrid):
        placed = replace(other, cuts=place_cuts(prices, loss, other, strategies))
        stages = stages_of(prices.space, loss, placed)
        pricer = SpacePricer(
            prices, counts=ExecutionCounts(prices.space, placed, stages.of_decisions(len(prices.space)))
        )
        seconds = step_s(pricer, strategies, stages.sent_bytes(prices.space, strategies))
        if seconds < best_s:
            best_s, best = seconds, placed
    return best


def dealt_out(hybrid: Hybrid) -> Iterator[Hybrid]:
    """Fewer stages on the same ranks, in all ways for which there are micro-batches. (What divides all stages' ranks
    could as well be an axis of the stages' mesh.)"""
    ranks, schedule = hybrid.pipeline_ranks, "gpipe" if hybrid.schedule == "gpipe" else "1f1b"
    for stages in range(2, ranks):
        for ends in itertools.combinations(range(1, ranks), stages - 1):
            replicas = tuple(end - begin for begin, end in itertools.pairwise((0, *ends, ranks)))
            if math.gcd(*replicas) == 1:
                try:
                    yield replace(hybrid, stages=stages, replicas=replicas, schedule=schedule, cuts=())
                except PlanError:
                    continue
