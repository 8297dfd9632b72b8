"""The joint search's estimates: step seconds of candidates on the reduced-depth model, the most promising first."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from autoparallel import clock
from autoparallel.capture import OpGraph
from autoparallel.errors import InfeasibleError
from autoparallel.partition.microbatch import Splits, batch_size
from autoparallel.planning.bounding import Bounding
from autoparallel.planning.candidate_bounds import CandidateBounds, dense_parameter_bytes, paces_by_device
from autoparallel.planning.candidates import Candidate, CandidateSpace, Combination, Fixed, Mesh
from autoparallel.planning.estimate_order import BY_HAND, HALF_FULL, SLOWER, EstimateOrder, inner_ranks, oddity
from autoparallel.planning.options import Options
from autoparallel.planning.reduced_model import ReducedModel, reduced_model
from autoparallel.planning.step_bounds import StepBounds
from autoparallel.plans import Hybrid, Prediction
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer, equal_stages_s
from autoparallel.pricing.hidden import COUNTED, least_exposed
from autoparallel.pricing.prediction import estimate, estimated_saved, evened
from autoparallel.schedule.table_caches import TableCache
from autoparallel.schedule.tiers import ON_DEVICE, Offload
from autoparallel.search import plan_within
from autoparallel.search.low_width.solve import Outcome
from autoparallel.search.model.problem import Problem, evaluate
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster

#: Time limit and gap of one estimate's search.
SOLVE_S, SOLVE_GAP = 1.5, 0.02
#: The least part of a plan's seconds that one whose blocks differ is estimated to take. (A lower bound is lower only
#: where there was no time to raise it; of two jobs bounds were 0.965 to 1 of the plans.)
MOST_MIXED = 0.9
#: Share of the remaining time for the candidates of the first round.
SHARE_OF_FIRST = 0.7
#: Share of a round's time that is kept for bounds of the candidates that were not estimated.
SHARE_OF_BOUNDS = 0.3
#: How much longer a pipeline takes than one of equal stages, for each block that its largest stage has more than an
#: equal share, as a part of that share. (Of 96 and 80 blocks, 64 stages took 1.13 and 1.26 times their estimates with
#: equal stages, with 1.33 and 1.6 times an equal share in the largest; 48 and 32 of 96 took 1.05 to 1.07.)
UNEVEN = 0.25
#: Above this multiple of the best estimate a lower bound suffices.
WORTH = 1.35
#: Two micro-batches at a time are tried in a pipeline's best plan where they could take less than this share of it.
WORTH_PAIRS = 0.85


@dataclass(frozen=True)
class Survey:
    """The result of a joint search's estimates.

    ``candidates``: those estimated, best first. ``pruned``: the number of others that cannot fit, or whose bound
    exceeds the best estimate. ``left``: the number for which there was no time. ``bound_s``: a lower bound of the step
    over all candidates that may fit. ``least_bytes``: the smallest memory that any candidate needs.
    """

    candidates: tuple[Candidate, ...]
    pruned: int
    left: int
    bound_s: float
    least_bytes: float = math.inf

    @property
    def without_plan(self) -> int:
        """The number of candidates without a plan that fits (none exists, or the estimate's search ran out of time)."""
        return sum(math.isinf(c.estimate_s) for c in self.candidates)


class Kept:
    """What searches of one program on one cluster, for one optimizer, share: the reduced-depth model, its
    micro-batches, and its prices by micro-batches, pipeline ranks and stage mesh, which step configurations share."""

    def __init__(self, graph: OpGraph, offload: Offload = ON_DEVICE, tables: Collection[str] = (),
                 cached: Collection[TableCache] = ()) -> None:
        self.reduced_model: ReducedModel = reduced_model(graph, offload, tables, cached)
        self.split = Splits(self.reduced_model.graph)
        self.prices, self.of_device = dict[object, Prices](), dict[object, Prices]()


def kept_of(split: Splits, cluster: Cluster, options: Options) -> Kept:
    """What joint searches of a program share, with the same groups of parameters in tiers of their own and the same
    tables on the host."""
    away, tables = options.tier if options.tier.groups else ON_DEVICE, frozenset(options.on_host)
    return split.once(("joint search", id(cluster), options.optimizer, away, tables, options.cached),
                      lambda: Kept(split.graph, away, tables, options.cached))


def bounding_of(graph: OpGraph, cluster: Cluster, fixed: Fixed, options: Options) -> Bounding:
    """Bounds beside a joint search of a program."""
    def begin() -> tuple[CandidateSpace, StepBounds]:
        away, tables = options.tier if options.tier.groups else ON_DEVICE, frozenset(options.on_host)
        search = JointSearch(graph, cluster, fixed, options.optimizer, options.limit_bytes(cluster),
                             wider_limits=options.wider_limits(cluster),
                             kept=Kept(graph, away, tables, options.cached))
        return search.space, search.step_bounds

    return Bounding(begin)


class JointSearch:
    """Estimates the candidates for one program on one cluster.

    ``known``: the candidates estimated so far, by combination; ``may_fit``: all of the last `run` that memory does not
    rule out; ``starts``: combinations of plans that fit, with their steps; ``known_s``: seconds of the best plan of the
    whole model that is known, beyond which no candidate is of use; ``by_hand``: combinations of plans by hand, with
    their steps; ``tell`` is called with the number of estimates after each.
    ``space`` enumerates candidates, ``bounds`` has their lower bounds, ``split`` the micro-batches of the reduced-depth
    model. ``kept``: of earlier searches. ``bounding``: where bounds are raised beside the search; else it raises them
    itself.
    """

    def __init__(self, graph: OpGraph, cluster: Cluster, fixed: Fixed, optimizer: str, limit_bytes: float,
                 tell: Callable[[int], None] = lambda count: None, starts: Sequence[Candidate] = (),
                 wider_limits: tuple[float, float] | None = None, by_hand: Sequence[Candidate] = (),
                 kept: Kept | None = None, bounding: Bounding | None = None) -> None:
        self.tell, self.starts, self.by_hand, self.bounding = tell, starts, by_hand, bounding
        self.known_s = min((c.estimate_s for c in starts), default=math.inf)
        self.known: dict[Combination, Candidate] = {}
        self._least_known_s = math.inf
        self.may_fit: Sequence[Candidate] = ()
        self.cluster, self.optimizer, self.limit = cluster, optimizer, limit_bytes
        kept = kept or Kept(graph, fixed.offload, fixed.on_host, fixed.cached)
        self.reduced_model, self.split = kept.reduced_model, kept.split
        self._prices, self._of_device = kept.prices, kept.of_device
        batch = batch_size(graph)
        self.mean_limit, most = wider_limits or (limit_bytes, limit_bytes)
        self.bounds = CandidateBounds(self.reduced_model, cluster, optimizer, limit_bytes, batch, most,
                                      fixed.tier_limits)
        self.space = CandidateSpace(cluster, fixed, self.reduced_model.num_blocks, batch,
                                    paces_by_device(self.bounds))
        self.step_bounds = StepBounds(self.reduced_model, cluster, self.bounds, self._prices_of_device,
                                      self.space.micro_batches)

    def _prices_of(self, micro_batches: int, ranks: int, shape: tuple[int, ...]) -> Prices:
        key = (micro_batches, ranks, shape)
        if key not in self._prices:
            space = StrategySpace(self.split(micro_batches).body, shape)
            self._prices[key] = Prices(space, self.cluster, self.optimizer, stages=ranks)
        return self._prices[key]

    def _prices_of_device(self, micro_batches: int, ranks: int, shape: tuple[int, ...], cache: float) -> Prices:
        """The same, of the device alone, with ``cache`` times its cache."""
        key = (micro_batches, ranks, shape, cache)
        if key not in self._of_device:
            self._of_device[key] = self._prices_of(micro_batches, ranks, shape).of_device(cache)
        return self._of_device[key]

    def estimate(self, candidate: Candidate, best_s: float = math.inf) -> Candidate:
        """The candidate with its estimate; above `WORTH` times ``best_s`` with a lower bound only (`first` is None).
        Infinite where nothing fits, or the batch cannot be split into its micro-batches."""
        h = candidate.hybrid
        clock.did("combinations judged")
        try:
            self.split(h.micro_batches)
        except InfeasibleError:
            return replace(candidate, estimate_s=math.inf)
        if self.bounds.fullness(candidate) > 1.0:
            return replace(candidate, estimate_s=math.inf)
        limit = candidate.room * (self.mean_limit if h.pipeline_ranks > 1 else self.limit)
        prices = self._prices_of(h.micro_batches, h.pipeline_ranks, candidate.mesh_shape)
        counts, held = self.reduced_model.counts(prices.space), self.reduced_model.held(prices.space, h)
        pricer = SpacePricer(prices, limit, counts=ExecutionCounts(prices.space, h, multiplicities=counts, held=held,
                                                                   recomputing=prices.recomputing))
        problem = pricer.full()
        if least_live_bytes(problem, len(prices.space)) > limit:
            return replace(candidate, estimate_s=math.inf)
        # step seconds per second of work on one rank
        least = evened(prices, h) * min(equal_stages_s(h, 1.0), 1.0 / h.pipeline_ranks)
        pricers = [pricer]  # first with all overlap that may be, then (of a plain step) a part of it, then without
        if (share := least_exposed(pricer)) != pricer.costs.exposed:
            parts = COUNTED if h.is_plain else COUNTED[:1]
            pricers[:0] = [pricer.exposing(share.with_more(part)) for part in parts]
        made = []
        for priced in pricers:
            found = plan_within(priced.full_like(problem), SOLVE_GAP, SOLVE_S, priced, WORTH * best_s / least)
            if found is not None and found.choice is not None:
                filled = evaluate(problem, found.choice).peak_bytes / self.bounds.limit_of(candidate)
                made.append(self._judged(replace(candidate, filled=min(1.0, filled)), pricer, found))
                if WORTH * best_s < made[-1].estimate_s < math.inf:    # with other overlap it is hardly faster
                    break
            elif not made:
                return replace(candidate, estimate_s=least * found.lower_bound if found is not None else math.inf)
        return min(made, key=lambda c: c.estimate_s)

    def _judged(self, candidate: Candidate, pricer: SpacePricer, found: Outcome) -> Candidate:
        """The candidate with a plan of the reduced-depth model, and the step seconds of that (by `UNEVEN` more where
        stages do not divide the blocks); infinite where what blocks save in another tier exceeds its limit, which
        the search for the plan leaves out."""
        assert found.choice is not None
        strategies = pricer.strategies_of(found.choice)
        saved, limits = estimated_saved(pricer, strategies), self.bounds.tier_limits
        if any(saved[tier] > limit for tier, limit in limits.items()):
            return replace(candidate, estimate_s=math.inf)
        first = partial(self.reduced_model.strategies, small=pricer.space, strategies=strategies)
        # Many blocks with different strategies can come near the bound; the few of the reduced-depth model cannot.
        share = max(MOST_MIXED, found.lower_bound / found.objective) if self.reduced_model.twins else 1.0
        uneven = self._uneven(candidate.hybrid)
        sends_s = equal_stages_s(candidate.hybrid, self.bounds.sends_s(candidate))
        return replace(candidate, estimate_s=uneven * share * estimate(pricer, strategies) + sends_s, first=first)

    def _uneven(self, hybrid: Hybrid) -> float:
        """How many times as long a pipeline is expected to take as one of equal stages."""
        return 1 + UNEVEN * (self.space.unevenness(hybrid.stages) - 1)

    def in_other_stages(self, start: Candidate) -> Iterator[Candidate]:
        """The combination of a whole plan with other numbers of stages on each rank, as far as these may fit. They are
        estimated by its seconds, for they differ in the bubble and in how equal their stages are."""
        def longer(hybrid: Hybrid) -> float:
            return self._uneven(hybrid) * equal_stages_s(hybrid, 1.0)

        for other in self.space.in_other_stages(start):
            if self.bounds.may_fit(other):
                yield replace(other, estimate_s=start.estimate_s * longer(other.hybrid) / longer(start.hybrid))

    def in_pairs(self, start: Candidate, found: Prediction) -> Iterator[Candidate]:
        """The combination of a whole plan with two micro-batches at a time on each stage, as far as these may fit and
        pay: at the most they hide the communication that the plan exposes, and half as many rounds of as many
        micro-batches wait twice as long."""
        for other in self.space.in_pairs(start):
            rounds = 2 * start.hybrid.micro_batches // other.hybrid.micro_batches
            least_s = found.step_s - found.exposed_s + (rounds - 1) * found.waiting_s
            if least_s < WORTH_PAIRS * found.step_s and self.bounds.may_fit(other):
                yield replace(other, estimate_s=least_s) if other.first is not None else self.estimate(
                    other, found.step_s)

    def run(self, deadline: float = math.inf) -> Survey:
        """Estimate the promising candidates, but for known ones, and raise the bounds of the others, until ``deadline``
        (of `clock`). First comes one candidate with the mesh and micro-batches of each of the ``starts``, if it is
        expected to be better, then, without plans ``by_hand``, one of each pipeline length, the most promising length
        first."""
        bounds_end, now = deadline, clock.now()
        if deadline < math.inf and self.bounding is None:
            deadline -= SHARE_OF_BOUNDS * (deadline - now)
        first = self.space.first_round()
        tried = {c.key: c for c in first}
        for start in self.starts if not self.known else ():
            near = [c for c in first if c.mesh == start.mesh and c.hybrid.micro_batches == start.hybrid.micro_batches]
            self._estimate_all(near, deadline, 1.0, one_a_length=True)
        if not self.by_hand:
            seen = {c.hybrid.pipeline_ranks for c in self.known.values()}
            self._estimate_all([c for c in first if c.hybrid.pipeline_ranks not in seen], deadline, math.inf,
                               one_a_length=True)
        for patience in (1.0, math.inf):  # first those expected to be better, then those that may be
            now = clock.now()
            bounded = patience > 1.0    # their bounds may take as long as estimates
            self._estimate_all(first, now + SHARE_OF_FIRST * (deadline - now), patience, bounded)
            expanded: set[object] = set()
            while (best := self._best_outside(expanded)) is not None:
                expanded.add(best.key)
                if self.bounding is not None:
                    self.bounding.around(best)
                second = {c.key: c for c in self.space.around(best)}
                self._estimate_all(list(second.values()), deadline, patience, bounded)
                tried.update(second)
        best_s = self.best_s
        tried |= self.known
        self.may_fit = may_fit = [c for c in tried.values() if self.bounds.may_fit(c)]
        if self.bounding is not None:
            self.bounding.others(c for c in self.known.values() if not c.is_bound)
        bound_s = self._least_bound_s(may_fit, best_s, bounds_end)
        left = sum(c.key not in self.known and bool(self.step_bounds.estimate_s(c) < best_s) for c in may_fit)
        estimated = [c for c in self.known.values() if not c.is_bound]
        return Survey(tuple(sorted(estimated, key=lambda c: c.estimate_s)), len(tried) - left - len(estimated), left,
                      bound_s, min(map(self.bounds.least_bytes, tried.values()), default=math.inf))

    def bounded(self, survey: Survey, deadline: float) -> Survey:
        """The last survey with its bound as high as it can be made until ``deadline`` (of `clock`)."""
        if self.bounding is not None:
            self.step_bounds.found.take(self.bounding.last(self.best_s, deadline))
        return replace(survey, bound_s=self._least_bound_s(self.may_fit, self.best_s, deadline))

    @property
    def sparing(self) -> list[Candidate]:
        """All combinations that memory does not rule out, by lower bounds of bytes, the least first. Ties: the higher
        ZeRO stage first, then the fewest pipeline ranks, ranks of the inner axis and micro-batches."""
        def order(candidate: Candidate) -> tuple[float, ...]:
            h, shape = candidate.hybrid, candidate.mesh_shape
            return (self.bounds.least_bytes(candidate), -h.zero_stage, h.pipeline_ranks,
                    shape[-1] if len(shape) > 1 else 1, h.micro_batches)

        return sorted(self.may_fit, key=order)

    def _least_bound_s(self, candidates: Sequence[Candidate], best_s: float, deadline: float) -> float:
        """The least bound of all, each as high as it can be made until ``deadline``, or is beside the search."""
        self.hear()
        bounds = [self.step_bounds.step_s(c) for c in candidates]
        while self.bounding is None and bounds and min(bounds) < best_s and clock.now() < deadline:
            least = candidates[bounds.index(min(bounds))]
            if not self.step_bounds.tighten(least, best_s):
                break
            bounds = [self.step_bounds.step_s(c) if c.mesh == least.mesh else bound
                      for c, bound in zip(candidates, bounds, strict=True)]
        return min(bounds, default=math.inf)

    def hear(self) -> set[Mesh]:
        """Take over the bounds that were found beside the search; returns the meshes whose combinations they bound."""
        if self.bounding is None:
            return set()
        self.bounding.best(self.best_s)
        return self.step_bounds.found.take(self.bounding.hear())

    def floor_s(self, candidate: Candidate) -> float:
        """Seconds that no plan of the combination is below, by all that is known now."""
        self.hear()
        return self.step_bounds.step_s(candidate)

    @property
    def best_s(self) -> float:
        """Seconds of the best estimate, or of the best plan that is known."""
        return min(self.known_s, self._least_known_s)

    def know(self, candidates: Iterable[Candidate]) -> None:
        """Take over estimates, or steps of whole plans, of combinations; they replace what was known of these."""
        self.known.update({c.key: c for c in candidates})
        self._least_known_s = min((c.estimate_s for c in self.known.values()), default=math.inf)

    def _best_outside(self, seen: set[object]) -> Candidate | None:
        """One of the three best candidates that fit whose key is not in ``seen``, or None. On an unequal cluster also
        the best pipeline without its bubble, if that is below the best: other schedules may have less of it."""
        fit = sorted((c for c in self.known.values() if c.estimate_s < math.inf), key=lambda c: c.estimate_s)
        piped = [c for c in fit if c.hybrid.stages > 1] if self.cluster.is_unequal else []
        full = [c for c in sorted(piped, key=_without_bubble_s)[:1] if _without_bubble_s(c) < self.best_s]
        return next((c for c in (*fit[:3], *full) if c.key not in seen), None)

    def _fullness(self, candidate: Candidate) -> float:
        """The bound of a candidate's memory as a share of its limit, or, if that is more, `HALF_FULL` times the share
        that parameters and gradients, without experts, take where only the inner axis and the pipeline divide them."""
        h, shape = candidate.hybrid, candidate.mesh_shape
        if h.zero_stage == 3 or h.offload.moves_parameters:
            return self.bounds.fullness(candidate)
        ranks = h.pipeline_ranks * inner_ranks(shape, self.cluster.devices_per_host)
        usual = (2 - (h.zero_stage == 2)) * self._dense_bytes / ranks / self.bounds.limit_of(candidate)
        return max(self.bounds.fullness(candidate), HALF_FULL * usual)

    @cached_property
    def _dense_bytes(self) -> float:
        return dense_parameter_bytes(self.bounds)

    def _estimate_all(self, candidates: Sequence[Candidate], deadline: float, patience: float, bounded: bool = False,
                      one_a_length: bool = False) -> None:
        """Estimate those that may fit and whose bound is below the best estimate, the most promising first, while their
        expected seconds are below ``patience`` times the best. ``bounded``: bound each one's decision graph before,
        which may rule it out. ``one_a_length``: no more than one of each pipeline length."""
        best = self.best_s
        new = [c for c in candidates if c.key not in self.known and self.bounds.may_fit(c)]

        def tighten(candidate: Candidate) -> bool:
            if not (bounded and self.step_bounds.tighten(candidate, best, fully=False)):    # an estimate says more
                return False
            if self.bounding is not None:
                self.bounding.found(self.step_bounds.found.new())
            return True

        def odd(candidate: Candidate) -> float:
            return oddity(candidate, self.bounds.cluster.devices_per_host, self.bounds.batch)

        order = EstimateOrder(new, self.step_bounds.estimate_s, odd, self._fullness, tighten)
        fitting = {start.key for start in self.starts}
        for by_hand in self.by_hand:
            faster = replace(by_hand, estimate_s=by_hand.estimate_s / SLOWER)
            order.learn(faster, BY_HAND, by_hand.key in fitting)
        for estimated in self.known.values():
            order.learn(estimated, fits=not estimated.is_bound)
        while (candidate := order.next(best, patience, deadline, self.hear)) is not None:
            self.know([made := self.estimate(candidate, best)])
            self.tell(sum(not one.is_bound for one in self.known.values()))
            order.learn(made, fits=not made.is_bound)
            if one_a_length:
                order.leave_length(candidate.hybrid.pipeline_ranks)
            best = min(best, made.estimate_s)


def _without_bubble_s(candidate: Candidate) -> float:
    """The estimate of a pipeline, were all of its ranks busy all the time."""
    return candidate.estimate_s / (candidate.hybrid.pipeline_ranks * equal_stages_s(candidate.hybrid, 1.0))


def least_live_bytes(problem: Problem, micro_batch: int) -> float:
    """A lower bound of peak bytes: each node's smallest strategy, of those live between forward and backward."""
    count = len(problem.nodes)
    begin, end = problem.intervals[:count].T
    return float(problem.usages[:count].each(np.min)[(begin <= micro_batch) & (micro_batch < end)].sum())
