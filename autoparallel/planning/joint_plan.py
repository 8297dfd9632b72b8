"""The joint search's plan of a captured model, with as few blocks recomputed as the time left allows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from autoparallel import clock
from autoparallel.capture import OpGraph
from autoparallel.errors import InfeasibleError, SearchError
from autoparallel.partition import Splits, stages_of
from autoparallel.planning.bounding import Bounding
from autoparallel.planning.candidates import Candidate, First, Fixed
from autoparallel.planning.joint_candidates import JointSearch, kept_of
from autoparallel.planning.joint_search import search_jointly
from autoparallel.planning.offloading import tier_limits
from autoparallel.planning.one_mesh import RECOMPUTE_TRIES, ROUGH_S, plan_on, prices_of
from autoparallel.planning.options import Options
from autoparallel.planning.recompute import less_recomputed
from autoparallel.planning.stage_replicas import is_uneven, on_several_ranks
from autoparallel.planning.study import JointStudy, Study
from autoparallel.plans import Combinations, Hybrid, Plan
from autoparallel.plans.record import Alternative, Record, Trial
from autoparallel.plans.reports.asked import alternative_of
from autoparallel.pricing import Prices
from autoparallel.schedule.schedules import SCHEDULES
from autoparallel.search import INTERRUPTED
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster

_LOG = logging.getLogger("autoparallel")
#: Share of a step by which sums of its parts may differ.
ROUNDING = 1e-9
#: Most seconds of the last trials with fewer recomputed blocks.
FEWER_S = 5.0


class _Whole:
    """Plans of the whole model, of combinations. ``stages``: those that are fixed, if they are."""

    def __init__(self, split: Splits, cluster: Cluster, options: Options, stages: int | None) -> None:
        self.split, self.cluster, self.options = split, cluster, options
        several = options.schedule is not None and SCHEDULES[options.schedule].several_stages
        self.has_fixed_stages = stages is not None or several
        #: Of the last combination only, of which several plans are made.
        self._prices = dict[tuple[object, ...], Prices]()

    def prices(self, hybrid: Hybrid, shape: tuple[int, ...]) -> Prices:
        """The unit costs of a combination's strategy graph."""
        key = hybrid.micro_batches, hybrid.pipeline_ranks, shape
        if key not in self._prices:
            self._prices.clear()
            space = StrategySpace(self.split(hybrid.micro_batches).body, shape)
            self._prices[key] = prices_of(space, self.cluster, self.options, hybrid.pipeline_ranks)
        return self._prices[key]

    def plan(self, candidate: Candidate, seconds: float, search: str | None = None) -> Plan:
        """A combination's plan, as `InFull` says; of an uneven pipeline, fewer stages on several ranks if that is
        faster."""
        shape, micro, end = candidate.mesh_shape, self.split(candidate.hybrid.micro_batches), clock.now() + seconds

        def plan_as(hybrid: Hybrid, first: First | None, seconds: float) -> Plan:
            within = replace(self.options, time_limit_s=seconds, search=search or self.options.search, progress=None)
            return plan_on(micro, self.cluster, shape, None, within, hybrid, first, self.prices(hybrid, shape))

        made = plan_as(candidate.hybrid, candidate.first, seconds)
        if self.has_fixed_stages or candidate.hybrid.cuts or not is_uneven(made):
            return made
        other = on_several_ranks(made, self.prices(made.hybrid, made.mesh_shape), micro.loss)
        with suppress(InfeasibleError, SearchError):
            if other is not None:
                again = plan_as(other, made.strategies_on, max(ROUGH_S, end - clock.now()))
                made = min(made, again, key=lambda p: p.prediction.step_s)
        return made

    def recompute_less(self, plan: Plan, deadline: float, seconds: float, search: str | None = None) -> Plan:
        """As `RecomputeLess` says."""
        def made(hybrid: Hybrid) -> Plan:
            candidate = Candidate(hybrid, plan.mesh_shape, first=plan.strategies_on)
            return self.plan(candidate, min(seconds, deadline - clock.now()), search)

        space, loss = self.prices(plan.hybrid, plan.mesh_shape).space, self.split(plan.hybrid.micro_batches).loss
        blocks = stages_of(space, loss, plan.hybrid).blocks(space)
        return less_recomputed(plan, blocks, made, deadline, self.options.saved_tiers)

    def without_idle_recompute(self, plan: Plan) -> Plan:
        """The plan; where its recompute takes no time, without it, if that fits and takes no longer."""
        h = plan.hybrid
        if h.recompute == "none" or h.saved_on != "device" or plan.prediction.recompute_s > 0:
            return plan
        bare = Candidate(replace(h, recompute="none", recompute_blocks=None), plan.mesh_shape, first=plan.strategies_on)
        with suppress(InfeasibleError, SearchError):
            made = self.plan(bare, ROUGH_S, "local")
            return min(made, plan, key=lambda one: one.prediction.step_s)
        return plan


def plan_jointly(split: Splits, cluster: Cluster, mesh_shape: Sequence[int] | None, options: Options,
                 starts: Sequence[Plan] = (), by_hand: Sequence[Candidate] = (), bounding: Bounding | None = None
                 ) -> Plan:
    """The fastest plan found over pipelines, meshes, micro-batches, ZeRO stages and recompute; what ``options`` and
    ``mesh_shape`` fix stays. With time left, the best plan is tried with fewer recomputed blocks, unless recompute is
    fixed. ``split``: the program by number of micro-batches; ``starts``: plans of it to begin with, as the usual ones;
    ``by_hand``: combinations of others, whose steps tell which are promising. ``bounding``: bounds that are raised
    beside the search.

    Raises InfeasibleError if no plan fits into memory."""
    graph = split.graph
    started, open_ = clock.now(), options.recompute in (None, "auto")
    deadline = started + options.time_limit_s
    fixed = fixed_by(options, mesh_shape, cluster)
    options, stages = replace(options, recompute=fixed.recompute), fixed.pipeline_stages

    whole = _Whole(split, cluster, options, stages)
    limit_bytes = options.limit_bytes(cluster)
    found = search_jointly(graph, cluster, fixed, options.optimizer, limit_bytes, options.time_limit_s, whole.plan,
                           whole.recompute_less if open_ else None,
                           [_again(plan, fixed, limit_bytes) for plan in starts], options.progress,
                           options.wider_limits(cluster), [_with_pieces(one, fixed) for one in by_hand],
                           kept_of(split, cluster, options), bounding)
    best = found.plan
    if open_ and best.hybrid.recompute != "none" and not found.tried_less and not found.interrupted:
        ends = min(deadline, clock.now() + FEWER_S)
        best = whole.recompute_less(best, ends, options.time_limit_s / RECOMPUTE_TRIES)
    if open_ and not found.interrupted:
        best = whole.without_idle_recompute(best)
    if isinstance(best.study, Study) and best.study.answer is not None:
        best = best.study.answer()
    evidence, seen = best.evidence, found.survey
    other = open_ and best.hybrid.saved_on != "device"    # than the combinations that are bounded
    bound_s = None if other else bound_below(best, seen.bound_s)
    counts = Combinations(len(seen.candidates), seen.without_plan, found.planned, seen.pruned, seen.left)
    seconds = {**evidence.seconds, "joint": clock.now() - started}
    others = tuple(alternative_of(best, other) for other in found.runners_up)
    recorder = None if best.recorder is None else partial(_with_others, best.recorder, found.trials, others)
    study = None if best.study is None else JointStudy(best.study, found.runners_up)
    why = f"{INTERRUPTED}; {evidence.stop_reason}" if found.interrupted else evidence.stop_reason
    return replace(best, evidence=replace(evidence, seconds=seconds, step_bound_s=bound_s,
                                          combinations=counts, stop_reason=why),
                   recorder=recorder, study=study)


def bound_below(plan: Plan, bound_s: float) -> float | None:
    """The lower bound of all combinations' steps, no more than the plan's step: the plan may be none of them (stages on
    several ranks), or below by rounding. A larger bound is an error, of which a warning tells; then None."""
    step_s = plan.prediction.step_s
    if bound_s == math.inf:    # no combination is bounded
        return bound_s
    if bound_s <= step_s * (1 + ROUNDING) or plan.hybrid.replicas:
        return min(bound_s, step_s)
    _LOG.warning("the bound of %s s on the step of any plan is above this plan's, %s s: the bound is wrong, and left "
                 "out; please report the model", f"{bound_s:.6g}", f"{step_s:.6g}")
    return None


def times_that_may_fit(graph: OpGraph, cluster: Cluster, options: Options, most: float) -> int:
    """How many times the program's batch a step may have by the bounds of all combinations' memory, if activations
    grow with it: a power of two, at most ``most``; 0: not even the batch fits."""
    search = JointSearch(graph, cluster, fixed_by(options, None, cluster), options.optimizer,
                         options.limit_bytes(cluster), wider_limits=options.wider_limits(cluster))
    found, left = 0, search.space.first_round()
    while 2 * max(found, 0.5) <= most and (left := [c for c in left if search.bounds.may_fit(c, max(1, 2 * found))]):
        found = max(1, 2 * found)
    return found


def fixed_by(options: Options, mesh_shape: Sequence[int] | None, cluster: Cluster) -> Fixed:
    """What the options and a mesh leave no choice of. Raises PlanError for micro-batches by rank with options that
    exclude them."""
    if options.by_rank:
        options.hybrid(len(options.by_rank))
    stages = None if options.pipeline_stages is None and options.stage_replicas is None else options.stages
    return Fixed(options.step_micro_batches, stages, options.schedule,
                 None if options.recompute == "auto" else options.recompute, options.zero_stage,
                 tuple(mesh_shape) if mesh_shape is not None else None, options.replicas, options.by_rank,
                 copies=options.copies, pieces=options.pieces or 1, tier_limits=tier_limits(cluster, options)[:2],
                 **options.given)


def _again(plan: Plan, fixed: Fixed, limit_bytes: float) -> Candidate:
    """The combination of a plan, to begin with its strategies."""
    step_s, filled = plan.prediction.step_s, min(1.0, plan.prediction.peak_bytes / limit_bytes)
    return _with_pieces(Candidate(plan.hybrid, plan.mesh_shape, step_s, plan.strategies_on, filled=filled), fixed)


def _with_pieces(candidate: Candidate, fixed: Fixed) -> Candidate:
    return replace(candidate, hybrid=replace(
        candidate.hybrid, cuts=(), pieces=fixed.pieces, bucket_bytes=fixed.bucket_bytes, fusion=fixed.fusion))


def _with_others(recorder: Callable[[], Record], trials: tuple[Trial, ...], others: tuple[Alternative, ...]) -> Record:
    return replace(recorder(), trials=trials, alternatives=others)


__all__ = ["bound_below", "fixed_by", "plan_jointly", "times_that_may_fit"]
