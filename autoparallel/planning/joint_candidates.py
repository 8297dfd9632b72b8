"""Candidates of the joint search: combinations of pipeline, mesh, micro-batches, ZeRO stage and recompute.

Each candidate is estimated on a reduced-depth model, in a fraction of a second, the most promising ones first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from autoparallel.capture import OpGraph
from autoparallel.errors import PlanError
from autoparallel.partition.microbatch import MicroBatches, batch_size, split_batch
from autoparallel.planning.reduced_model import ReducedModel, reduced_model
from autoparallel.plans import Hybrid
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer, equal_stages_s
from autoparallel.pricing.overlap_simulation import least_exposed
from autoparallel.pricing.prediction import estimate
from autoparallel.schedule.in_flight import in_flight
from autoparallel.schedule.step_config import RECOMPUTE
from autoparallel.search import clock, plan_within
from autoparallel.search.low_width.solve import Outcome
from autoparallel.search.model.problem import Problem
from autoparallel.strategies.space import Strategy, StrategySpace
from cost_models import Cluster

#: Time limit and gap of one estimate's search.
SOLVE_S, SOLVE_GAP = 3.0, 0.02
#: Share of the remaining time for the candidates of the first round.
SHARE_OF_FIRST = 0.7
#: Largest change of log(estimate / bound) per step between candidates; the ratio of candidates that do not fit.
SPREAD, UNFIT = 0.25, 4.0
#: Steps between ZeRO-3 and other stages, whose ratios say little about each other.
FAR = 3.0
#: Above this multiple of the best estimate a lower bound suffices.
WORTH = 1.35
#: Limits: pipeline ranks, inner mesh axis, micro-batches, rounds of micro-batches over a pipeline, stages per rank.
MOST_PIPELINE, MOST_INNER, MOST_TURNS, MOST_ROUNDS, MOST_CHUNKS = 64, 64, 64, 8, 4


@dataclass(frozen=True)
class Fixed:
    """The user's choices; None is searched."""

    micro_batches: int | None = None
    pipeline_stages: int | None = None
    schedule: str | None = None
    recompute: str | None = None
    zero_stage: int | None = None
    mesh_shape: tuple[int, ...] | None = None
    reduce_dtype: str | None = None
    replicas: tuple[int, ...] = ()


#: Makes the strategies with which a search on the whole model's strategy graph begins.
First = Callable[[StrategySpace], Sequence[Strategy]]


@dataclass(frozen=True)
class Candidate:
    """One combination of step configuration and stage mesh.

    ``estimate_s``: estimated seconds of a step, or a lower bound (inf: no plan that fits). ``first``: the strategies of
    the estimate's plan (None: there is none). ``room``: the share of the memory limit that the estimate was given.
    """

    hybrid: Hybrid
    mesh_shape: tuple[int, ...]
    estimate_s: float = math.inf
    first: First | None = field(default=None, compare=False, repr=False)
    room: float = 1.0

    @property
    def key(self) -> tuple[Hybrid, tuple[int, ...]]:
        """The combination, without its estimate."""
        return self.hybrid, self.mesh_shape

    def __str__(self) -> str:
        h, mesh = self.hybrid, "x".join(map(str, self.mesh_shape))
        pipeline = f"{h.stages} stages on pipeline {h.pipeline_ranks} ({h.schedule}), " if h.stages > 1 else ""
        return f"{pipeline}mesh {mesh}, micro-batches {h.micro_batches}, ZeRO {h.zero_stage}, recompute {h.recompute}"

    @property
    def is_bound(self) -> bool:
        """Whether ``estimate_s`` is a lower bound, without a plan."""
        return self.first is None and self.estimate_s < math.inf


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
        return sum(c.estimate_s == math.inf for c in self.candidates)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


class JointSearch:
    """Enumerates and estimates candidates for one program on one cluster."""

    def __init__(self, graph: OpGraph, cluster: Cluster, fixed: Fixed, optimizer: str, limit_bytes: float) -> None:
        self.known: dict[tuple[Hybrid, tuple[int, ...]], Candidate] = {}
        self.cluster, self.fixed, self.optimizer, self.limit = cluster, fixed, optimizer, limit_bytes
        self.reduced_model: ReducedModel = reduced_model(graph)
        self.batch = batch_size(graph)
        self._split: dict[int, MicroBatches] = {}
        self._prices: dict[object, Prices] = {}
        self._live: dict[str, Mapping[tuple[str, bool], float]] = {}
        self._least: dict[int, tuple[float, float]] = {}

    # --- enumeration ------------------------------------------------------------------------------------------------

    def shapes(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """All (pipeline ranks, mesh of a stage): pipelines of all lengths, stages of one or two axes, the inner axis of
        at most `MOST_INNER` ranks."""
        count, fixed = self.cluster.num_devices, self.fixed
        if fixed.mesh_shape is not None:
            whole = fixed.pipeline_stages in (None, 1)
            yield (1, fixed.mesh_shape) if whole else (fixed.mesh_shape[0], fixed.mesh_shape[1:] or (1,))
            return
        for ranks in divisors(count):
            if ranks > min(MOST_PIPELINE, max(1, self.reduced_model.num_blocks)) or not self._pipeline_allowed(ranks):
                continue
            rest = count // ranks
            for inner in divisors(rest):
                if inner == rest > 1:  # the same mesh as with inner == 1
                    continue
                if inner <= MOST_INNER and (rest <= 8 or inner in (1, 2, 4, 8, 16, 32, 64)):
                    yield ranks, (rest,) if inner == 1 else (rest // inner, inner)

    def _pipeline_allowed(self, ranks: int) -> bool:
        stages = self.fixed.pipeline_stages
        if self.fixed.replicas:
            return ranks == sum(self.fixed.replicas)
        return stages is None or (stages % ranks == 0 and (ranks > 1) == (stages > 1))

    def micro_batches(self, ranks: int) -> list[int]:
        """Possible numbers of micro-batches; for a pipeline multiples of its ranks, if the batch has such divisors."""
        if self.fixed.micro_batches is not None:
            return [self.fixed.micro_batches]
        found = [m for m in divisors(self.batch) if m <= max(MOST_TURNS, MOST_ROUNDS * ranks)]
        if ranks == 1:
            return [m for m in found if m & (m - 1) == 0]
        if self.fixed.replicas:
            return [m for m in found if m % math.lcm(*self.fixed.replicas) == 0]
        return [m for m in found if m % ranks == 0] or [m for m in found if m >= ranks][:3] or found[-1:]

    def hybrids(self, ranks: int, micro_batches: int) -> Iterator[Hybrid]:
        """The first round's step configurations: 1F1B, and interleaved with several stages per rank (for long pipelines
        with few micro-batches per rank); parameters gathered per step or per use."""
        fixed = self.fixed
        for (schedule, stages), recompute, zero in itertools.product(
            self._schedules(ranks),
            [fixed.recompute] if fixed.recompute else ["none", "selective", "full"],
            [fixed.zero_stage] if fixed.zero_stage is not None else [2 if micro_batches == 1 else 1, 3],
        ):
            yield from self._valid(micro_batches, stages, ranks, schedule, zero, recompute)

    def _valid(
        self, micro_batches: int, stages: int, ranks: int, schedule: str, zero: int, recompute: str
    ) -> Iterator[Hybrid]:
        """The step configuration, if it is valid; else nothing."""
        with suppress(PlanError):
            yield Hybrid(micro_batches, stages, ranks, schedule, zero_stage=zero, recompute=recompute,
                         reduce_dtype=self.fixed.reduce_dtype, replicas=self.fixed.replicas)

    def _schedules(self, ranks: int) -> list[tuple[str, int]]:
        """The first round's schedules and their numbers of stages."""
        fixed = self.fixed
        several = self._chunks(ranks)
        even = [c for c in several if self.reduced_model.num_blocks % (c * ranks) == 0]
        chunks = max(even or several, default=1)
        counts = [fixed.pipeline_stages] if fixed.pipeline_stages else sorted({ranks, chunks * ranks})
        if ranks == 1 or fixed.replicas:
            return [(fixed.schedule or "1f1b", fixed.pipeline_stages or 1)]
        return [(fixed.schedule or ("1f1b" if n == ranks else "interleaved"), n) for n in counts]

    def around(self, best: Candidate) -> Iterator[Candidate]:
        """Neighbours of a candidate that the first round leaves out: other schedules, ZeRO stages and recompute; and
        half or twice the micro-batches and the inner axis, with all possible numbers of stages per rank."""
        h, fixed, ranks = best.hybrid, self.fixed, best.hybrid.pipeline_ranks
        recompute = [fixed.recompute] if fixed.recompute else ["none", "selective", "full"]
        counts = [fixed.pipeline_stages] if fixed.pipeline_stages else [c * ranks for c in self._chunks(ranks)]
        for schedule, again, zero, count in itertools.product(
            [fixed.schedule] if fixed.schedule else ["1f1b", "zero_bubble", "interleaved"], recompute,
            [fixed.zero_stage] if fixed.zero_stage is not None else [1, 2, 3], counts,
        ):
            if h.stages > 1 or schedule == h.schedule:
                for hybrid in self._valid(h.micro_batches, count, ranks, schedule, zero, again):
                    yield Candidate(hybrid, best.mesh_shape)
        for micro_batches, shape, again, count in itertools.product(
            _neighbours(h.micro_batches, self.micro_batches(ranks)),
            [shape for count, shape in self.shapes() if count == ranks and _near(shape, best.mesh_shape)],
            recompute, counts,
        ):
            schedule = fixed.schedule or ("interleaved" if count > ranks else "1f1b")
            for hybrid in self._valid(micro_batches, count, ranks, schedule, h.zero_stage, again):
                yield Candidate(hybrid, shape)

    def _chunks(self, ranks: int) -> list[int]:
        """The possible numbers of stages per rank."""
        most = MOST_CHUNKS if ranks > 1 else 1
        return [c for c in range(1, most + 1) if c * ranks <= max(1, self.reduced_model.num_blocks)]

    # --- estimates --------------------------------------------------------------------------------------------------

    def _micro(self, count: int) -> MicroBatches:
        if count not in self._split:
            self._split[count] = split_batch(self.reduced_model.graph, count)
        return self._split[count]

    def _prices_of(self, micro_batches: int, ranks: int, shape: tuple[int, ...]) -> Prices:
        key = (micro_batches, ranks, shape)
        if key not in self._prices:
            space = StrategySpace(self._micro(micro_batches).body, shape)
            self._prices[key] = Prices(space, self.cluster, self.optimizer, stages=ranks)
        return self._prices[key]

    def estimate(self, candidate: Candidate, best_s: float = math.inf) -> Candidate:
        """The candidate with its estimate; above `WORTH` times ``best_s`` with a lower bound only (`first` is None)."""
        h, limit = candidate.hybrid, candidate.room * self.limit
        prices = self._prices_of(h.micro_batches, h.pipeline_ranks, candidate.mesh_shape)
        counts, held = self.reduced_model.counts(prices.space), self.reduced_model.held(prices.space, h)
        pricer = SpacePricer(prices, limit, counts=ExecutionCounts(prices.space, h, multiplicities=counts, held=held))
        problem = pricer.full()
        if least_live_bytes(problem, len(prices.space)) > limit:
            return replace(candidate, estimate_s=math.inf)
        least = min(equal_stages_s(h, 1.0), 1.0 / h.pipeline_ranks)  # step seconds per second of work on one rank
        pricers = [pricer]  # first with overlap counted as far as possible, then without
        if (share := least_exposed(pricer)) != pricer.costs.exposed:
            pricers.insert(0, pricer.exposing(share))
        made = []
        for priced in pricers:
            found = plan_within(priced.full_like(problem), SOLVE_GAP, SOLVE_S, priced, WORTH * best_s / least)
            if found is not None and found.choice is not None:
                made.append(self._judged(candidate, pricer, found))
            elif not made:
                return replace(candidate, estimate_s=least * found.lower_bound if found is not None else math.inf)
        return min(made, key=lambda c: c.estimate_s)

    def _judged(self, candidate: Candidate, pricer: SpacePricer, found: Outcome) -> Candidate:
        """The candidate with a plan of the reduced-depth model, and the step seconds of that."""
        assert found.choice is not None
        strategies = pricer.strategies_of(found.choice)
        first = partial(self.reduced_model.strategies, small=pricer.space, strategies=strategies)
        # Many blocks with different strategies can come near the bound; the few of the reduced-depth model cannot.
        share = found.lower_bound / found.objective if self.reduced_model.twins else 1.0
        return replace(candidate, estimate_s=share * estimate(pricer, strategies), first=first)

    def least_bytes(self, candidate: Candidate) -> float:
        """A lower bound of peak bytes: state and tensors live between forward and backward, divided evenly over all
        devices."""
        h = candidate.hybrid
        kept = self._kept(h.recompute)
        chunks = range(0, h.stages, h.pipeline_ranks)
        copies = sum(in_flight(h, stage) for stage in chunks) / len(chunks)
        always = kept["state", True] / h.pipeline_ranks + kept["state", False]
        copies = 0.0 if h.recompute == "offload" else copies  # they are in the host's memory
        micro_batches = (
            kept["micro_batch", True] * copies / h.pipeline_ranks + kept["micro_batch", False]
        ) / h.micro_batches
        return (always + micro_batches) / math.prod(candidate.mesh_shape)

    def _kept(self, recompute: str) -> Mapping[tuple[str, bool], float]:
        """Bytes of the whole program that live between forward and backward, by ("state" or "micro_batch", whether
        inside blocks)."""
        if recompute not in self._live:
            space = self._whole
            inside = self.reduced_model.inside(space)
            pricer = SpacePricer(self._whole_prices(1), counts=ExecutionCounts(
                space, Hybrid(recompute=recompute), multiplicities=self.reduced_model.counts(space)))
            found = dict.fromkeys(itertools.product(("state", "micro_batch"), (True, False)), 0.0)
            for decision, node in zip(space.decisions, pricer.full().nodes, strict=True):
                if node.interval[0] <= len(space) < node.interval[1]:
                    state = decision.kind in ("parameter", "buffer")
                    count = pricer.counts.multiplicities[decision.index]
                    found["state" if state else "micro_batch", inside[decision.index]] += count * float(
                        node.usages.min()
                    )
            self._live[recompute] = found
        return self._live[recompute]

    @cached_property
    def _whole(self) -> StrategySpace:
        """The strategy graph of the whole batch on one device."""
        return StrategySpace(self.reduced_model.graph, (1,))

    def _whole_prices(self, spread: int) -> Prices:
        return Prices(self._whole, self.cluster, self.optimizer, stages=self.cluster.num_devices, spread=spread)

    def oddity(self, candidate: Candidate) -> float:
        """How unusual a candidate is, in factors of two: an inner axis that is not a host, fewer samples per
        micro-batch than shards of them, and (weight 4) a memory bound above half the limit. It only sets the initial
        order."""
        shape, host = candidate.mesh_shape, self.cluster.links[0].num_devices
        inner = shape[-1] if len(shape) > 1 or shape[0] <= host else 1
        samples, shards = self.batch / candidate.hybrid.micro_batches, math.prod(shape) / inner
        factors = (2 * self.least_bytes(candidate) / self.limit, shards / samples)
        full, few = (math.log2(max(1.0, factor)) for factor in factors)
        return abs(math.log2(inner / min(host, math.prod(shape)))) + few + 4 * full

    def floor(self, candidate: Candidate) -> float:
        """A lower bound of the estimate, in seconds: each op of the batch divided evenly over the devices of its stage,
        without communication."""
        h = candidate.hybrid
        forward, backward = self._least_compute(h.micro_batches * math.prod(candidate.mesh_shape))
        again = 2.0 if h.recompute == "full" else 1.0
        return equal_stages_s(h, h.micro_batches * (again * forward + backward))

    def _least_compute(self, shards: int) -> tuple[float, float]:
        """Seconds (forward, backward) of the program's ops, each divided evenly into ``shards``."""
        if shards not in self._least:
            space, found, prices = self._whole, [0.0, 0.0], self._whole_prices(shards)
            for decision in space.decisions:
                if decision.kind == "op":
                    count, price = self.reduced_model.stands_for.get(decision.name, 1), prices.op_of(decision.index)
                    found[0] += count * float(price.forward_s.min())
                    found[1] += count * float(price.backward_s.min())
            self._least[shards] = (found[0], found[1])
        return self._least[shards]

    def run(self, deadline: float = math.inf) -> Survey:
        """Estimate the promising candidates, until ``deadline`` (of `search.clock`); known ones are not estimated
        again. One candidate of each pipeline length comes first."""
        first = [
            Candidate(hybrid, shape)
            for ranks, shape in self.shapes()
            for micro_batches in self.micro_batches(ranks)
            for hybrid in self.hybrids(ranks, micro_batches)
        ]
        tried = {c.key: c for c in first}
        seen = {c.hybrid.pipeline_ranks for c in self.known.values()}
        for ranks in sorted({c.hybrid.pipeline_ranks for c in first} - seen):
            self._estimate_all([c for c in first if c.hybrid.pipeline_ranks == ranks], deadline, math.inf, most=1)
        for patience in (1.0, math.inf):  # first those expected to be better, then those that may be
            now = clock.now()
            self._estimate_all(first, now + SHARE_OF_FIRST * (deadline - now), patience)
            expanded: set[object] = set()
            while (best := self._best_outside(expanded)) is not None:
                expanded.add(best.key)
                second = {c.key: c for c in self.around(best)}
                self._estimate_all(list(second.values()), deadline, patience)
                tried.update(second)
        best_s = min((c.estimate_s for c in self.known.values()), default=math.inf)
        tried |= self.known
        may_fit = [c for c in tried.values() if self.least_bytes(c) <= self.limit]
        left = sum(c.key not in self.known and self.floor(c) < best_s for c in may_fit)
        estimated = [c for c in self.known.values() if not c.is_bound]
        bound_s = min((self.floor(_keeping_all(c)) for c in may_fit), default=math.inf)
        return Survey(tuple(sorted(estimated, key=lambda c: c.estimate_s)), len(tried) - left - len(estimated), left,
                      bound_s, min(map(self.least_bytes, tried.values()), default=math.inf))

    def _best_outside(self, seen: set[object]) -> Candidate | None:
        """One of the three best candidates that fit whose key is not in ``seen``, or None."""
        fit = [c for c in self.known.values() if c.estimate_s < math.inf]
        return next((c for c in sorted(fit, key=lambda c: c.estimate_s)[:3] if c.key not in seen), None)

    def _estimate_all(self, candidates: Sequence[Candidate], deadline: float, patience: float, most: float = math.inf
                      ) -> None:
        """Estimate at most ``most`` of those that may fit and whose bound is below the best estimate, the most
        promising first, while their expected seconds are below ``patience`` times the best."""
        best = min((c.estimate_s for c in self.known.values()), default=math.inf)
        new = [c for c in candidates if c.key not in self.known and self.least_bytes(c) <= self.limit]
        order = _Promise(new, self.floor, self.oddity, self.least_bytes)
        for estimated in self.known.values():
            order.learn(estimated)
        while most > 0 and clock.now() < deadline and (candidate := order.next(best, patience)) is not None:
            most -= 1
            made = self.known[candidate.key] = self.estimate(candidate, best)
            order.learn(made)
            best = min(best, made.estimate_s)


class _Promise:
    """The order of estimates: by expected seconds, bound times expected ratio of estimate to bound.

    The ratio (communication, uneven division) is similar for similar candidates. Each factor of two in ranks, axes or
    micro-batches, and each other difference, is one step; log(ratio) changes by at most `SPREAD` per step. Before any
    estimate, unusual candidates (`JointSearch.oddity`) are expected to be expensive.
    """

    def __init__(self, candidates: Sequence[Candidate], floor: Callable[[Candidate], float],
                 oddity: Callable[[Candidate], float], least_bytes: Callable[[Candidate], float]) -> None:
        self.candidates, self.floor, self.least_bytes = list(candidates), floor, least_bytes
        self.bytes = np.array([least_bytes(c) for c in self.candidates])
        self.floors = np.array([floor(c) for c in self.candidates])
        self.coordinates = np.array([_coordinates(c) for c in self.candidates])
        self.excess = SPREAD * np.array([oddity(c) for c in self.candidates])
        self.open = np.ones(len(self.candidates), bool)

    def next(self, best_s: float, patience: float) -> Candidate | None:
        """The open candidate with the least expected seconds; None if all bounds exceed ``best_s``, or all expected
        seconds ``patience`` times that."""
        expected = np.where(self.open & (self.floors < best_s), self.floors * np.exp(self.excess), math.inf)
        if min(expected, default=math.inf) >= patience * best_s:
            return None
        number = int(expected.argmin())
        self.open[number] = False
        return self.candidates[number]

    def learn(self, candidate: Candidate) -> None:
        """Update expected ratios by an estimate. One that does not fit counts as `UNFIT`, for candidates that need as
        much memory or more."""
        if not len(self.candidates):
            return
        steps = np.abs(self.coordinates - np.array(_coordinates(candidate))).sum(axis=1)
        excess = math.log(min(candidate.estimate_s / self.floor(candidate), UNFIT)) - SPREAD * steps
        equivalent = (candidate.estimate_s < math.inf) | (self.bytes >= self.least_bytes(candidate))
        self.excess = np.where(equivalent, np.maximum(self.excess, excess), self.excess)


def _keeping_all(candidate: Candidate) -> Candidate:
    """The candidate without recompute, for a bound: a plan may recompute some blocks only."""
    return replace(candidate, hybrid=replace(candidate.hybrid, recompute="none"))


def _coordinates(candidate: Candidate) -> tuple[float, ...]:
    """Coordinates in which each difference is one step (ZeRO-3 is `FAR` from other stages)."""
    h, shape = candidate.hybrid, candidate.mesh_shape
    inner = shape[-1] if len(shape) > 1 else 1
    sizes = (h.pipeline_ranks, h.stages / h.pipeline_ranks, h.micro_batches, inner)
    return (*(math.log2(n) for n in sizes), FAR * (h.zero_stage == 3), float(RECOMPUTE.index(h.recompute)),
            float(h.schedule == "zero_bubble"))


def _neighbours(count: int, counts: Sequence[int]) -> list[int]:
    """The neighbours of ``count`` in ``counts``, and itself."""
    place = counts.index(count) if count in counts else 0
    return list(counts[max(0, place - 1) : place + 2])


def _near(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether the inner axes are equal or differ by a factor of two."""
    inner, by = (s[-1] if len(s) > 1 else 1 for s in (shape, other))
    return max(inner, by) <= 2 * min(inner, by)


def least_live_bytes(problem: Problem, micro_batch: int) -> float:
    """A lower bound of peak bytes: each node's smallest strategy, of those live between forward and backward."""
    count = len(problem.nodes)
    begin, end = problem.intervals[:count].T
    return float(problem.usages[:count].each(np.min)[(begin <= micro_batch) & (micro_batch < end)].sum())
