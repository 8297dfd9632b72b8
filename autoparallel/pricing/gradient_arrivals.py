"""The gradients of a rank's parameters as backward completes them, for the simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from autoparallel.pricing.leaves import Leaves
from autoparallel.pricing.rank_reads import RankReads
from autoparallel.pricing.step_tasks import StepTasks, label_of
from autoparallel.schedule.async_windows import Pair


class GradientArrivals:
    """``late``: decisions whose parameters' gradients backward makes elsewhere (`ActivationSteps.late`)."""

    def __init__(self, reads: RankReads, late: Mapping[int, int]) -> None:
        self.reads, self.late, self.leaves = reads, late, Leaves(reads)

    @property
    def places(self) -> Collection[int]:
        """The decisions whose backward completes gradients that are added up, or that go through steps of leaves."""
        return self._sums_s.keys() | self.leaves.reduced.keys()

    def make_leaves(self, step: StepTasks) -> None:
        """Make the leaves that micro-batches read."""
        for timed in self.leaves.steps:
            step.run(timed.forward, label_of("gather", [timed]))

    def arrived(self, step: StepTasks, index: int, count: float, adds: float) -> None:
        """Reduce the gradients of leaves that a decision completes in one of ``count`` rounds; accumulate those of the
        parameters that it reads (``adds``: the share of these sums)."""
        for timed in (timed for path in self.leaves.reduced.get(index, ()) for timed in reversed(path)):
            step.run(timed.backward.per(count), label_of("reduce", [timed]))
        step.compute(adds * self._sums_s.get(index, 0.0), ("backward", index, index))

    def reduce_leaves(self, step: StepTasks, count: float) -> None:
        """Reduce the gradients of all leaves."""
        for timed in self.leaves.backward:
            step.run(timed.backward.per(count), label_of("reduce", [timed]))

    @property
    def sums_s(self) -> float:
        """Seconds of a step in which gradients are accumulated."""
        return sum(self._sums_s.values())

    @cached_property
    def _sums_s(self) -> Mapping[int, float]:
        """By decision, seconds of accumulating the gradients of its parameters."""
        found, costs, numbers = defaultdict[int, float](float), self.reads.pricer.costs, self.reads.numbers
        for use in (move.use for move in self.reads.moves if self.reads.counts.sums(move.use)):
            found[use.target] += float(costs.sums_s(use)[numbers[use.source], numbers[use.target]])
        return found

    @cached_property
    def completed(self) -> Mapping[int, Sequence[Pair]]:
        """By decision, the buckets whose last gradient its backward completes, if their reduction is launched then."""
        hybrid, windows = self.reads.counts.hybrid, self.reads.windows
        pairs, found = dict[Pair, tuple[int, ...]](), defaultdict[int, list[Pair]](list)
        for pair in (*windows.reduced, *windows.gathered):
            if (hybrid.zero_stage < 2 or hybrid.puts_off_weights) and all(windows.is_last(n) for n in pair.steps):
                pairs[pair] = max(map(self._arrival, pair.steps))
        for pair in sorted(pairs, key=pairs.__getitem__):
            found[-pairs[pair][2]].append(pair)
        return found

    def _arrival(self, number: int) -> tuple[int, int, int, int]:
        """When backward completes the gradient of the result of a path's last step, as `RankReads.arrival`: after that
        of which decision (negated), and whether it was put off."""
        reader, order = self.reads.arrival(number)
        late = self.late.get(-reader)
        return (reader, 0, reader, order) if late is None else (-late, 1, reader, order)


__all__ = ["GradientArrivals"]
