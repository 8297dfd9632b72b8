"""The sizes of buckets with which a plan is predicted fastest; buckets by name that cannot be joined."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoparallel.errors import PlanError
from autoparallel.partition import Stages
from autoparallel.planning.options import Options
from autoparallel.plans import Hybrid
from autoparallel.pricing import SpacePricer, predict
from autoparallel.pricing.hidden import hidden_s
from autoparallel.pricing.rank_reads import RankReads
from autoparallel.schedule.async_windows import AsyncWindows
from autoparallel.schedule.fusion import AUTO_SIZE, Fusion
from autoparallel.search.model.problem import Problem, evaluate
from autoparallel.strategies.space import Strategy

_LOG = logging.getLogger("autoparallel")
#: The sizes that are tried, in bytes.
TRIED = tuple(size * 2**20 for size in (1, 5, 25, 100, 400))
#: Another size is taken where it makes the step shorter by more than this share.
LEAST_GAIN = 0.002
#: Most parameters that an error lists.
MOST_LISTED = 6


def in_fastest_buckets(pricer: SpacePricer, problem: Problem, strategies: Sequence[Strategy], options: Options,
                       stages: Stages) -> SpacePricer:
    """The pricer of a plan with the sizes of buckets that make its step shortest and fit into memory: of all mesh axes,
    then of each; by default with gathers by block or by size; as it is where the options say a size. ``problem``: the
    one in which the plan was found."""
    if options.bucket_bytes is None:
        return _by_block_or_size(pricer, problem, strategies) if options.search != "local" else pricer
    if options.bucket_bytes != AUTO_SIZE:
        return pricer
    sizes = _Sizes(pricer, problem, strategies, stages)
    axes = sorted({axis for reads in sizes.reads for read in reads.reads if read.kind for axis in read.axis.split("+")})
    for axis in (None, *(axes if len(axes) > 1 else ())):
        for size in TRIED:
            sizes.attempt(_sized(sizes.best.counts.hybrid, axis, size))
    return sizes.best


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


def _sized(hybrid: Hybrid, axis: str | None, size: float) -> Hybrid:
    """The step configuration with buckets of one size, on all axes (None) or on one."""
    if axis is None:
        return replace(hybrid, bucket_bytes=size, fusion=replace(hybrid.fusion, axis_bytes=(), blocks=False))
    known = {name: known for name, known in {**dict(hybrid.fusion.axis_bytes), axis: size}.items()
             if known != hybrid.bucket_bytes}
    return replace(hybrid, fusion=replace(hybrid.fusion, axis_bytes=tuple(sorted(known.items())), blocks=False))


class _Sizes:
    """Trials of sizes for one plan; ``best``: the pricer of the fastest so far."""

    def __init__(self, pricer: SpacePricer, problem: Problem, strategies: Sequence[Strategy], stages: Stages) -> None:
        self.best, self.problem, self.strategies = pricer, problem, strategies
        self.choice = pricer.choice_of(strategies)
        self.sends = stages.sent_bytes(pricer.space, strategies)
        self.reads = [RankReads(pricer, strategies, stage) for stage in range(pricer.counts.hybrid.stages)]
        self.peak_bytes = evaluate(problem, self.choice).peak_bytes
        self.step_s = self._step_s(pricer)
        windows = self._windows(pricer.counts.hybrid)
        self.tried, self.largest_bytes = {_steps_of(windows)}, self._largest_bytes(windows)

    def attempt(self, hybrid: Hybrid) -> None:
        """Price the plan with other buckets, unless they are those of a trial before."""
        windows = self._windows(hybrid)
        if (steps := _steps_of(windows)) in self.tried:
            return
        self.tried.add(steps)
        other = self.best.bucketed(hybrid)
        step_s = self._step_s(other)
        if step_s < (1 - LEAST_GAIN) * self.step_s and self._fits(other, windows):
            self.best, self.step_s = other, step_s

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
        return peak_bytes <= other.limit_bytes

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


__all__ = ["check_named", "in_fastest_buckets"]
