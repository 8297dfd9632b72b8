"""Several micro-batches at a time on a rank (multi-copy): their communication and compute as tasks of the simulator,
from the reads of one rank, in the order of `schedule/multi_copy.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from autoparallel.pricing.rank_reads import RankReads, Timed, TimedStep
from autoparallel.schedule.multi_copy import block_ends, ends_every_block, rounds_of, runs_by_block, segment_order

#: What happens at a decision.
At = Callable[[int], None]


def nothing(index: int) -> None:
    """No action at a decision."""


class BackwardCalls(NamedTuple):
    """What happens at the marked decisions of a backward: ``before`` an op, where it has made its parameters' gradients
    (``arrived``), and ``after`` what it sends."""

    before: At = nothing
    arrived: At = nothing
    after: At = nothing


NO_CALLS = BackwardCalls()
#: What redistributions of recomputed blocks are called.
AGAIN = "activations again"


class Tasks(Protocol):
    """`step_tasks.StepTasks`."""

    def issue(self, steps: Sequence[Timed], label: tuple[str, int, int]) -> int: ...

    def run(self, timed: Timed, label: tuple[str, int, int]) -> None: ...

    def wait(self, tasks: Sequence[int]) -> None: ...

    def compute(self, seconds: float, label: tuple[str, int, int]) -> None: ...


class _Segment(NamedTuple):
    """A segment of one copy's program: await ``awaited``, compute the decisions from ``start`` to ``stop`` (excluded)
    and the steps ``local``, begin ``begun``. ``reads``: the decisions whose parameters, or views of them, it reads
    (that before which its activations travel too). ``ends_range``: the last one of a range (`block_ranges`)."""

    awaited: Sequence[TimedStep]
    start: int
    stop: int
    local: Sequence[TimedStep]
    begun: Sequence[TimedStep]
    reads: range
    ends_range: bool = False


class MultiCopyRound:
    """A round of ``copies`` micro-batches at a time, whose programs have ``decisions`` decisions each.
    ``recomputed``: the segments of each block that is run again, by the decision whose backward starts it."""

    def __init__(self, reads: RankReads, decisions: int, copies: int) -> None:
        self.copies, self.segments, self.shared_views = copies, _segments(reads, decisions), reads.shared_views
        starts, ranges, first = set(reads.counts.blocks.starts.values()), list[range](), 0
        for number, segment in enumerate(self.segments):
            if segment.ends_range:
                ranges.append(range(first, number + 1))
                first = number + 1
        self.recomputed = {index: numbers for numbers in ranges for index in starts
                           if self.segments[numbers[0]].start <= index < self.segments[numbers[-1]].stop}

    def forward(self, step: Tasks, until: Sequence[float], count: float, marked: Collection[int], before: At) -> None:
        """Forward of one of ``count`` rounds. ``until``: cumulative seconds of all rounds before each decision;
        ``before`` is called for the ``marked`` decisions, which copies share."""
        share, pending = count * self.copies, [list[int]() for _ in range(self.copies)]
        for number, copy in segment_order(len(self.segments), self.copies):
            segment, done = self.segments[number], self.segments[number].start
            step.wait(pending[copy])
            for index in self._read_in(number, marked) if copy == 0 else ():
                step.compute((until[index] - until[done]) / share, ("forward", done, index))
                if index in marked:
                    before(index)
                for timed in self.shared_views.get(index, ()):
                    step.run(timed.forward.per(count), ("views of parameters", index, index))
                done = index
            step.compute((until[segment.stop] - until[done]) / share, ("forward", done, segment.stop))
            _run(step, [one.forward.per(share) for one in segment.local], segment.stop)
            pending[copy] = _begin(step, [one.forward.per(share) for one in segment.begun], segment.stop, "activations")

    def backward(self, step: Tasks, until: Sequence[float], again_s: Sequence[float], count: float,
                 marked: Collection[int], calls: BackwardCalls) -> None:
        """Backward of one of ``count`` rounds, in reverse order. The first copy to come needs a parameter, and starts
        the recompute of a block for all copies; the last one completes a parameter's gradient. ``again_s``: seconds of
        recompute, by decision."""
        before, arrived, after = calls
        share, pending = count * self.copies, [list[int]() for _ in range(self.copies)]

        def reduce(index: int) -> None:
            for timed in reversed(self.shared_views.get(index, ())):
                step.run(timed.backward.per(count), ("gradients of views", index, index))
            if index in marked:
                after(index)

        for number, copy in reversed(list(segment_order(len(self.segments), self.copies))):
            segment, read = self.segments[number], self._read_in(number, marked) if copy == 0 else ()
            done = segment.stop
            step.wait(pending[copy])
            _run(step, [one.backward.per(share) for one in reversed(segment.local)], segment.stop)
            if segment.stop in read:
                reduce(segment.stop)
            for index in reversed(range(segment.start, segment.stop)):
                if index in self.recomputed and copy == self.copies - 1:
                    step.compute((until[done] - until[index + 1]) / share, ("backward", done, index + 1))
                    done = index + 1
                    self._recompute(step, self.recomputed[index], again_s, count)
                if index in marked:
                    step.compute((until[done] - until[index + 1]) / share, ("backward", done, index + 1))
                    if copy == self.copies - 1:
                        before(index)
                    step.compute((until[index + 1] - until[index]) / share, ("backward", index, index))
                    done = index
                    if copy == 0:
                        arrived(index)
                if index in read:
                    step.compute((until[done] - until[index]) / share, ("backward", done, index))
                    done = index
                    reduce(index)
            step.compute((until[done] - until[segment.start]) / share, ("backward", done, segment.start))
            gradients = [one.backward.per(share) for one in reversed(segment.awaited)]
            pending[copy] = _begin(step, gradients, segment.start, "gradients of activations")

    def _recompute(self, step: Tasks, numbers: range, again_s: Sequence[float], count: float) -> None:
        """Run these segments again, for all copies."""
        share, pending = count * self.copies, [list[int]() for _ in range(self.copies)]
        for number, copy in itertools.product(numbers, range(self.copies)):
            segment, done = self.segments[number], self.segments[number].start
            step.wait(pending[copy])
            for index in self._read_in(number, ()) if copy == 0 else ():
                step.compute(sum(again_s[done:index]) / share, ("recompute", done, index))
                for timed in self.shared_views[index]:
                    step.run(timed.again.per(count), ("views of parameters", index, index))
                done = index
            step.compute(sum(again_s[done : segment.stop]) / share, ("recompute", done, segment.stop))
            _run(step, [one.again.per(share) for one in segment.local], segment.stop)
            pending[copy] = _begin(step, [one.again.per(share) for one in segment.begun], segment.stop, AGAIN)

    def _read_in(self, number: int, marked: Collection[int]) -> list[int]:
        """The decisions at which segment ``number`` reads parameters (``marked``) or views of them."""
        return [index for index in self.segments[number].reads if index in marked or index in self.shared_views]


def block_ranges(reads: RankReads) -> list[tuple[int, int]]:
    """The ranges (start, stop) of decisions that each micro-batch of a round runs before any of them runs the next
    (`runs_by_block`); without that one range, of all decisions."""
    space, hybrid = reads.space, reads.counts.hybrid
    if not runs_by_block(hybrid):
        return [(0, len(space))]
    ops = [decision.index for decision in space.decisions if decision.kind in ("op", "shared_read")]
    whole = not hybrid.alternates or ends_every_block(hybrid)
    sends = [not whole and any(begun for _, begun in rounds_of(reads.paths.get(index, ()), _communicates))
             for index in ops]
    ends = block_ends([space.blocks[index] for index in ops], sends)
    return list(itertools.pairwise([0, *(ops[number] for number in sorted(ends)), len(space)]))


def _segments(reads: RankReads, decisions: int) -> list[_Segment]:
    found, awaited, local, start, first = list[_Segment](), list[TimedStep](), list[TimedStep](), 0, 0
    ends = {stop for _, stop in block_ranges(reads)} - {decisions}
    for index in sorted({*reads.paths, *ends}):
        if index in ends:
            found.append(_Segment(awaited, start, index, local, (), range(first, index), ends_range=True))
            awaited, local, start, first = [], [], index, index
        for at_once, begun in rounds_of(reads.paths.get(index, ()), _communicates):
            local += at_once
            if begun:
                found.append(_Segment(awaited, start, index, local, begun, range(first, index + 1)))
                awaited, local, start, first = begun, [], index, index + 1
    return [*found, _Segment(awaited, start, decisions, local, (), range(first, decisions), ends_range=True)]


def _communicates(step: TimedStep) -> bool:
    return step.forward.message is not None or step.backward.message is not None


def _run(step: Tasks, steps: Sequence[Timed], at: int) -> None:
    """Steps that do not communicate."""
    for timed in steps:
        step.compute(timed.seconds, ("activations", at, at))


def _begin(step: Tasks, steps: Sequence[Timed], at: int, label: str) -> list[int]:
    found = list[int]()
    for timed in steps:
        if timed.message is None:
            step.compute(timed.seconds, (label, at, at))
        elif timed.seconds:
            found.append(step.issue([timed], (label, at, at)))
    return found
