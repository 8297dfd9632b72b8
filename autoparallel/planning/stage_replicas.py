"""Replicated stages: if a pipeline cannot be cut evenly, fewer stages on several ranks each may be faster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from autoparallel.errors import PlanError
from autoparallel.partition.stages import place_cuts, stages_of
from autoparallel.plans import Hybrid, Plan
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer, equal_stages_s, step_s
from autoparallel.schedule.schedules import usual

#: A pipeline within this factor of one with equal stages counts as even.
EVEN = 1.05
#: Longer pipelines have too many ways to distribute their ranks.
MOST_RANKS = 4


def is_uneven(plan: Plan) -> bool:
    """Whether a pipeline without replicated stages takes longer than `EVEN` times one with equal stages, and is short
    enough to redistribute its ranks."""
    hybrid, step_s = plan.hybrid, plan.prediction.step_s
    short = not hybrid.replicas and 2 < hybrid.pipeline_ranks <= MOST_RANKS
    return short and step_s > EVEN * equal_stages_s(hybrid, _work_s(plan))


def _work_s(plan: Plan) -> float:
    """Seconds of a plan's step on all pipeline ranks together, without waiting."""
    return plan.hybrid.pipeline_ranks * (plan.prediction.step_s - plan.prediction.waiting_s)


def on_several_ranks(plan: Plan, prices: Prices, loss: int | None) -> Hybrid | None:
    """The fastest configuration with replicated stages for the strategies of ``plan``; None if none is faster than the
    plan. Those that would not be if their stages were equal are not cut."""
    strategies, best_s, best = plan.strategies_on(prices.space), plan.prediction.step_s, None
    for other in dealt_out(plan.hybrid):
        if equal_stages_s(other, _work_s(plan)) >= best_s:
            continue
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
    """All configurations with fewer stages on the same ranks that the number of micro-batches allows. (A common divisor
    of the stages' ranks could be a mesh axis instead, so it is skipped.)"""
    ranks, schedule = hybrid.pipeline_ranks, usual() if hybrid.pipelining.several_stages else hybrid.schedule
    for stages in range(2, ranks):
        for ends in itertools.combinations(range(1, ranks), stages - 1):
            replicas = tuple(end - begin for begin, end in itertools.pairwise((0, *ends, ranks)))
            if math.gcd(*replicas) == 1:
                try:
                    yield replace(hybrid, stages=stages, replicas=replicas, schedule=schedule, cuts=())
                except PlanError:
                    continue
