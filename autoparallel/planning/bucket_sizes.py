"""The sizes of buckets with which a plan is predicted fastest; buckets by name that cannot be joined."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autoparallel.errors import PlanError
from autoparallel.partition import Stages
from autoparallel.planning.options import Options
from autoparallel.plans import Hybrid
from autoparallel.pricing import SpacePricer, predict
from autoparallel.pricing.alike_stages import alike_stages
from autoparallel.pricing.hidden import hidden_s
from autoparallel.pricing.rank_reads import RankReads
from autoparallel.schedule.async_windows import AsyncWindows
from autoparallel.schedule.fusion import AUTO_SIZE, Fusion
from autoparallel.search.model.problem import Problem, Solution, evaluate
from autoparallel.strategies.space import Strategy

_LOG = logging.getLogger("autoparallel")
#: The sizes that "auto" tries, in bytes.
TRIED = tuple(size * 2**20 for size in (1, 5, 25, 100, 400))
#: Another size, or gathers by size, are taken where they make the step shorter by more than this share.
LEAST_GAIN = 0.002
#: The sizes that are compared where the user gives none; the smallest is taken whose step exceeds the shortest by no
#: more than this share.
USUAL, MOST_LONGER = tuple(size * 2**20 for size in (25, 50, 100, 200)), 0.03
#: The largest bucket that is ever chosen.
LARGEST_BYTES = max(*TRIED, *USUAL)
#: Most parameters that an error lists.
MOST_LISTED = 6


def in_fastest_buckets(pricer: SpacePricer, problem: Problem, solution: Solution, strategies: Sequence[Strategy],
                       options: Options, stages: Stages) -> tuple[SpacePricer, Problem, Solution]:
    """The pricer of a plan with buckets of the sizes that the options ask for, and the problem and its solution with
    their costs and memory. "auto": the sizes that make the step shortest and fit into memory, of all mesh axes, then of
    each. None: gathers by block or by size, and the smallest of the `USUAL` sizes that takes hardly longer than the
    best of them; of a trial plan (search "local") as it is. ``problem``: the one in which the plan was found."""
    found = pricer
    if options.bucket_bytes == AUTO_SIZE:
        found = _Sizes(pricer, problem, strategies, options, stages).fastest()
    elif options.bucket_bytes is None and options.search != "local":
        found = _by_block_or_size(pricer, problem, strategies)
        if _may_gain(found, problem, strategies):
            found = _Sizes(found, problem, strategies, options, stages).smallest()
    if found.costs is pricer.costs:    # the same sizes
        return found, problem, solution
    return (found, *_judged(found, problem, solution, strategies))


def _judged(pricer: SpacePricer, before: Problem, solution: Solution, strategies: Sequence[Strategy]
            ) -> tuple[Problem, Solution]:
    """The problem of a pricer with other sizes than that ``before``, and the solution as it is there. Its lower bound
    is that of before, less the most that each decision and each use may cost less."""
    problem = pricer.full()
    found = evaluate(problem, pricer.choice_of(strategies))
    owners, uses = len(before.nodes) + len(pricer.space.uses), [one.costs for one in (before, problem)]
    pairs = np.stack([one.numbers[:owners] for one in uses])
    kinds, counts = np.unique(pairs, axis=1, return_counts=True)
    less = (count * _most_less(uses[0].distinct[old], uses[1].distinct[new])
            for (old, new), count in zip(kinds.T.tolist(), counts.tolist(), strict=True))
    return problem, replace(solution, objective=found.objective, peak_bytes=found.peak_bytes,
                            lower_bound=min(found.objective, solution.lower_bound - math.fsum(less)))


def _most_less(before: np.ndarray, after: np.ndarray) -> float:
    """The most by which a cost is less than it was; what was, or is, impossible does not count."""
    known = np.isfinite(before) & np.isfinite(after)
    return float(np.max(before[known] - after[known], initial=0.0))


def _by_block_or_size(pricer: SpacePricer, problem: Problem, strategies: Sequence[Strategy]) -> SpacePricer:
    """The faster of gathers of whole blocks, which have least latency, and of parts of them, which are sent over one
    axis while others are over another."""
    hybrid = pricer.counts.hybrid
    if hybrid.reads_alone or pricer.prices.redistribution.single.block_bytes <= hybrid.bucket_bytes:
        return pricer
    other = pricer.overlapping(fusion=replace(hybrid.fusion, blocks=False))
    whole_s, parts_s = (hidden_s(one, strategies) for one in (pricer, other))
    step_s = evaluate(problem, pricer.choice_of(strategies)).objective - whole_s
    return other if parts_s - whole_s > LEAST_GAIN * step_s else pricer


def _may_gain(pricer: SpacePricer, problem: Problem, strategies: Sequence[Strategy]) -> bool:
    """Whether a larger size of `USUAL` may make the step shorter by more than `MOST_LONGER`: no step is shorter by more
    than its buckets are sent faster. Memory of steps during backward is counted by the smallest."""
    hybrid = pricer.counts.hybrid
    if hybrid.reads_alone or hybrid.offload.in_backward or not pricer.prices.training:
        return False
    if hybrid.bucket_bytes != USUAL[0]:    # chosen by a plan with which this one began
        return True
    step_s = evaluate(problem, pricer.choice_of(strategies)).objective - hidden_s(pricer, strategies)
    largest, saved_s = replace(hybrid, bucket_bytes=USUAL[-1]), 0.0
    for stage, count in Counter(alike_stages(pricer, strategies)).items():
        reads = RankReads(pricer, strategies, stage)
        saved_s += count * (_latency_s(reads, reads.windows) - _latency_s(reads, AsyncWindows.of(reads.reads, largest)))
    return saved_s * hybrid.pipeline_ranks > MOST_LONGER / (1 + MOST_LONGER) * step_s


def _latency_s(reads: RankReads, windows: AsyncWindows) -> float:
    """Seconds by which the collectives of all buckets take longer in a step than the shares as which they are
    priced."""
    steps = ([reads.parameter_steps[number] for number in pair.steps] for pair in (*windows.gathered, *windows.reduced))
    return math.fsum(reads.latency_s(way) for bucket in steps for way in zip(*(
        (one.forward, one.again, one.backward) for one in bucket), strict=True))


def _sized(hybrid: Hybrid, axis: str | None, size: float) -> Hybrid:
    """The step configuration with buckets of one size, on all axes (None) or on one."""
    if axis is None:
        return replace(hybrid, bucket_bytes=size, fusion=replace(hybrid.fusion, axis_bytes=(), blocks=False))
    known = {name: known for name, known in {**dict(hybrid.fusion.axis_bytes), axis: size}.items()
             if known != hybrid.bucket_bytes}
    return replace(hybrid, fusion=replace(hybrid.fusion, axis_bytes=tuple(sorted(known.items())), blocks=False))


class _Sizes:
    """Trials of sizes for one plan; ``best``: the pricer of the fastest so far, and its step."""

    def __init__(self, pricer: SpacePricer, problem: Problem, strategies: Sequence[Strategy], options: Options,
                 stages: Stages) -> None:
        self.first, self.problem, self.strategies = pricer, problem, strategies
        self.choice = pricer.choice_of(strategies)
        self.sends = stages.sent_bytes(pricer.space, strategies)
        self.reads = [RankReads(pricer, strategies, stage) for stage in range(pricer.counts.hybrid.stages)]
        self.limit_bytes = min(pricer.limit_bytes, replace(options, by_hand=None).limit_bytes(pricer.prices.cluster))
        self.peak_bytes = evaluate(problem, self.choice).peak_bytes
        self.best, self.step_s = pricer, self._step_s(pricer)
        windows = self._windows(pricer.counts.hybrid)
        self.tried, self.largest_bytes = {_steps_of(windows)}, self._largest_bytes(windows)

    def fastest(self) -> SpacePricer:
        """The pricer with the sizes, of those of `TRIED`, that make the step shortest."""
        axes = sorted({axis for reads in self.reads for read in reads.reads if read.kind
                       for axis in read.axis.split("+")})
        for axis in (None, *(axes if len(axes) > 1 else ())):
            for size in TRIED:
                found = self._attempt(_sized(self.best.counts.hybrid, axis, size))
                if found is not None and found[1] < (1 - LEAST_GAIN) * self.step_s:
                    self.best, self.step_s = found
        return self.best

    def smallest(self) -> SpacePricer:
        """The pricer with the smallest size of `USUAL` whose step exceeds the shortest by `MOST_LONGER` at most."""
        found, hybrid = {self.first.counts.hybrid.bucket_bytes: (self.first, self.step_s)}, self.first.counts.hybrid
        for size in USUAL:
            one = self._attempt(replace(hybrid, bucket_bytes=size)) if size not in found else None
            if one is not None:
                found[size] = one
        most_s = (1 + MOST_LONGER) * min(step_s for _, step_s in found.values())
        return found[min(size for size, (_, step_s) in found.items() if step_s <= most_s)][0]

    def _attempt(self, hybrid: Hybrid) -> tuple[SpacePricer, float] | None:
        """The pricer of the plan with other buckets, and its step; None where they are those of a trial before, or do
        not fit."""
        windows = self._windows(hybrid)
        if (steps := _steps_of(windows)) in self.tried:
            return None
        self.tried.add(steps)
        other = self.first.bucketed(hybrid)
        return (other, self._step_s(other)) if self._fits(other, windows) else None

    def _windows(self, hybrid: Hybrid) -> list[AsyncWindows]:
        return [AsyncWindows.of([] if reads.synchronous else reads.reads, hybrid) for reads in self.reads]

    def _step_s(self, pricer: SpacePricer) -> float:
        return predict(pricer, self.problem, self.strategies, self.peak_bytes, self.sends).step_s

    def _fits(self, other: SpacePricer, windows: Sequence[AsyncWindows]) -> bool:
        """Whether the plan fits into memory with these buckets, of which each is a copy of its gradients."""
        away = other.counts.hybrid.offload
        if away.in_backward or away.is_away:
            peak_bytes = evaluate(other.full(), self.choice).peak_bytes
        else:
            peak_bytes = self.peak_bytes + max(0.0, self._largest_bytes(windows) - self.largest_bytes)
        return peak_bytes <= self.limit_bytes

    @staticmethod
    def _largest_bytes(windows: Sequence[AsyncWindows]) -> float:
        """Bytes of the largest bucket."""
        return max((sum(one.reads[n].num_bytes for n in pair.steps) for one in windows
                    for pair in (*one.reduced, *one.gathered) if len(pair.steps) > 1), default=0.0)


def _steps_of(windows: Sequence[AsyncWindows]) -> tuple[object, ...]:
    """Equal where buckets and their windows are."""
    return tuple((*one.gathered, *one.reduced) for one in windows)


def check_named(pricer: SpacePricer, strategies: Sequence[Strategy]) -> None:
    """Raises PlanError where parameters that the options put in one bucket cannot be joined in this plan."""
    hybrid = pricer.counts.hybrid
    hybrid.fusion.check_axes(pricer.space.axis_names)
    if not hybrid.fusion.names:
        return
    used = set[int]()
    for stage in range(hybrid.stages):
        reads = RankReads(pricer, strategies, stage)
        used |= {read.named for read in reads.reads if read.named is not None and read.kind}
        for (number, _), ways in _ways(reads, hybrid).items():
            if len(ways) > 1:
                raise PlanError(_not_joined(hybrid.fusion, number, ways))
    for number, pattern in enumerate(hybrid.fusion.names):
        if number not in used:
            _LOG.warning("buckets: %r changes nothing: parameters of such names are neither gathered nor reduced in "
                         "this plan, or patterns before it have them", pattern)


def _ways(reads: RankReads, hybrid: Hybrid) -> Mapping[tuple[int, int], Mapping[str, list[str]]]:
    """By named bucket and place on the parameters' paths: in which ways its parameters travel, with their names."""
    found = defaultdict[tuple[int, int], dict[str, list[str]]](dict)
    windows = AsyncWindows.of(reads.reads, hybrid)
    for number, (read, name) in enumerate(zip(reads.reads, reads.names, strict=True)):
        if read.named is None or not read.kind:
            continue
        how = "gathered" if read.kind == "gather" else "reduced"
        way = f"{how} over {read.axis!r} in {read.dtype.removeprefix('torch.')}"
        if read.kind == "gather" and hybrid.zero_stage == 3:
            way += f", with the other parameters of {read.block or 'no block'}"
        found[read.named, windows.sent_after(number)].setdefault(way, []).append(name)
    return found


def _not_joined(fusion: Fusion, number: int, ways: Mapping[str, list[str]]) -> str:
    told = "; ".join(f"{way}: {', '.join(names[:MOST_LISTED])}{', ...' * (len(names) > MOST_LISTED)}"
                     for way, names in ways.items())
    return (f"buckets: {fusion.names[number]!r} has parameters that do not travel together\n  {told}\n  Write a "
            "pattern for each of these, or leave it out.")


__all__ = ["LARGEST_BYTES", "USUAL", "check_named", "in_fastest_buckets"]
