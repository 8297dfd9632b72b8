"""Several micro-batches at a time on a rank (multi-copy): their communication and compute as tasks of the simulator,
from the reads of one rank, in the order of `schedule/multi_copy.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from autoparallel.pricing.expert_exchanges import Mixture, MixtureAction, RunningMixtures
from autoparallel.pricing.rank_reads import RankReads, Timed, TimedStep
from autoparallel.pricing.step_tasks import StepTasks
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


class _Segment(NamedTuple):
    """A segment of one copy's program: await ``awaited``, compute the decisions from ``start`` to ``stop`` (excluded)
    and the steps ``local``, begin ``begun``. ``reads``: the decisions whose parameters, or views of them, it reads
    (that before which its activations travel too). ``begins``, ``ends``: the parts of a mixture of experts with which
    it begins and ends. ``ends_range``: the last one of a range (`block_ranges`)."""

    awaited: Sequence[TimedStep]
    start: int
    stop: int
    local: Sequence[TimedStep]
    begun: Sequence[TimedStep]
    reads: range
    begins: MixtureAction | None = None
    ends: MixtureAction | None = None
    ends_range: bool = False

    @property
    def takes(self) -> int | None:
        """The mixture whose results it takes."""
        return self.begins.mixture.index if self.begins is not None and self.begins.part == "take" else None


class MultiCopyRound:
    """A round of ``copies`` micro-batches at a time, whose programs have ``decisions`` decisions each, some of them
    ``mixtures`` of experts whose rows travel. ``recomputed``: the segments of each block that is run again, by the
    decision whose backward starts it."""

    def __init__(self, reads: RankReads, decisions: int, copies: int, mixtures: Mapping[int, Mixture]) -> None:
        self.copies, self.mixtures, self.shared_views = copies, mixtures, reads.shared_views
        self.segments, self.sends_again = _segments(reads, decisions, mixtures), reads.counts.blocks.sends_again
        starts, ranges, first = set(reads.counts.blocks.starts.values()), list[range](), 0
        for number, segment in enumerate(self.segments):
            if segment.ends_range:
                ranges.append(range(first, number + 1))
                first = number + 1
        self.recomputed = {index: numbers for numbers in ranges for index in starts
                           if self.segments[numbers[0]].start <= index < self.segments[numbers[-1]].stop}

    def forward(self, step: StepTasks, until: Sequence[float], count: float, marked: Collection[int], before: At
                ) -> None:
        """Forward of one of ``count`` rounds. ``until``: cumulative seconds of all rounds before each decision;
        ``before`` is called for the ``marked`` decisions, which copies share."""
        share = count * self.copies
        travels = [_Travelling(step, share, "activations", "forward") for _ in range(self.copies)]
        for number, copy in segment_order(len(self.segments), self.copies):
            segment, done = self.segments[number], self.segments[number].start
            travels[copy].await_forward(segment)
            for index in self._read_in(number, marked) if copy == 0 else ():
                step.compute((until[index] - until[done]) / share, ("forward", done, index))
                if index in marked:
                    before(index)
                for timed in self.shared_views.get(index, ()):
                    step.run(timed.forward.per(count), ("views of parameters", index, index))
                done = index
            step.compute((until[segment.stop] - until[done]) / share, ("forward", done, segment.stop))
            travels[copy].begin_forward(segment, lambda one: one.forward)

    def backward(self, step: StepTasks, until: Sequence[float], again_s: Sequence[float], count: float,
                 marked: Collection[int], calls: BackwardCalls) -> None:
        """Backward of one of ``count`` rounds, in reverse order. The first copy to come needs a parameter, and starts
        the recompute of a block for all copies; the last one completes a parameter's gradient. ``again_s``: seconds of
        recompute, by decision."""
        share = count * self.copies
        travels = [_Travelling(step, share, "gradients of activations", "backward") for _ in range(self.copies)]

        def reduce(index: int) -> None:
            for timed in reversed(self.shared_views.get(index, ())):
                step.run(timed.backward.per(count), ("gradients of views", index, index))
            if index in marked:
                calls.after(index)

        for number, copy in reversed(list(segment_order(len(self.segments), self.copies))):
            segment, read = self.segments[number], self._read_in(number, marked) if copy == 0 else ()
            is_first, done = copy == self.copies - 1, segment.stop
            travels[copy].await_backward(segment)
            if segment.stop in read:
                reduce(segment.stop)
            for index in reversed(range(segment.start, segment.stop)):
                runs_again = is_first and index in self.recomputed and index not in self.mixtures
                if runs_again or index in marked or index in self.mixtures:
                    step.compute((until[done] - until[index + 1]) / share, ("backward", done, index + 1))
                    done = index + 1
                if runs_again:
                    self._recompute(step, self.recomputed[index], again_s, count)
                if index in marked or index in self.mixtures:
                    needs = calls.before if is_first and index in marked else nothing
                    if index in self.mixtures:
                        travels[copy].run_backward(segment, needs)
                    else:
                        needs(index)
                    step.compute((until[index + 1] - until[index]) / share, ("backward", index, index))
                    done = index
                    if copy == 0 and index in marked:
                        calls.arrived(index)
                if index in read:
                    step.compute((until[done] - until[index]) / share, ("backward", done, index))
                    done = index
                    reduce(index)
            step.compute((until[done] - until[segment.start]) / share, ("backward", done, segment.start))
            if is_first and segment.takes in self.recomputed:    # which saves the order of its rows
                self._recompute(step, self.recomputed[segment.takes], again_s, count)
            travels[copy].begin_backward(segment)

    def _recompute(self, step: StepTasks, numbers: range, again_s: Sequence[float], count: float) -> None:
        """Run these segments again, for all copies."""
        share = count * self.copies
        travels = [_Travelling(step, share, "activations again", "recompute", self.sends_again)
                   for _ in range(self.copies)]
        for number, copy in itertools.product(numbers, range(self.copies)):
            segment, done = self.segments[number], self.segments[number].start
            travels[copy].await_forward(segment)
            for index in self._read_in(number, ()) if copy == 0 else ():
                step.compute(sum(again_s[done:index]) / share, ("recompute", done, index))
                for timed in self.shared_views[index]:
                    step.run(timed.again.per(count), ("views of parameters", index, index))
                done = index
            step.compute(sum(again_s[done : segment.stop]) / share, ("recompute", done, segment.stop))
            travels[copy].begin_forward(segment, lambda one: one.again)

    def _read_in(self, number: int, marked: Collection[int]) -> list[int]:
        """The decisions at which segment ``number`` reads parameters (``marked``) or views of them."""
        return [index for index in self.segments[number].reads if index in marked or index in self.shared_views]


class _Travelling:
    """What one copy has on its way in a pass over its program, as tasks of ``step``; ``share``, ``label``, ``compute``:
    as of `RunningMixtures`. Not ``of_mixtures``: rows of experts do not travel in it."""

    def __init__(self, step: StepTasks, share: float, label: str, compute: str, of_mixtures: bool = True) -> None:
        self.step, self.share, self.label, self.of_mixtures = step, share, label, of_mixtures
        self.mixtures, self._pending = RunningMixtures(step, share, label, compute), list[int]()

    def await_forward(self, segment: _Segment) -> None:
        """A segment begins: await its activations; a part of a mixture may begin with it."""
        self.step.wait(self._pending)
        if segment.begins is not None and self.of_mixtures:
            self.mixtures.forward(segment.begins)

    def begin_forward(self, segment: _Segment, of: Callable[[TimedStep], Timed]) -> None:
        """A segment ends: run its local steps, begin its communication; ``of``: the times of a step."""
        self._run([of(one) for one in segment.local], segment.stop)
        if segment.ends is not None and self.of_mixtures:
            self.mixtures.forward(segment.ends)
        self._begin([of(one) for one in segment.begun], segment.stop)

    def await_backward(self, segment: _Segment) -> None:
        """Backward of a segment begins."""
        self.step.wait(self._pending)
        if segment.ends is not None:
            self.mixtures.backward(segment.ends, nothing)
        self._run([one.backward for one in reversed(segment.local)], segment.stop)

    def run_backward(self, segment: _Segment, needs: At) -> None:
        """Backward of the experts with which a segment begins; calls ``needs`` once their gradients are there."""
        if segment.begins is not None:
            self.mixtures.backward(segment.begins, needs)

    def begin_backward(self, segment: _Segment) -> None:
        """Backward of a segment ends."""
        if segment.begins is not None and segment.begins.part == "take":
            self.mixtures.backward(segment.begins, nothing)
        self._begin([one.backward for one in reversed(segment.awaited)], segment.start)

    def _run(self, steps: Sequence[Timed], at: int) -> None:
        """Steps that do not communicate."""
        for timed in steps:
            self.step.compute(timed.per(self.share).seconds, ("activations", at, at))

    def _begin(self, steps: Sequence[Timed], at: int) -> None:
        self._pending = []
        for timed in (one.per(self.share) for one in steps):
            if timed.message is None:
                self.step.compute(timed.seconds, (self.label, at, at))
            elif timed.seconds:
                self._pending.append(self.step.issue([timed], (self.label, at, at)))


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


def _segments(reads: RankReads, decisions: int, mixtures: Mapping[int, Mixture]) -> list[_Segment]:
    found, awaited, local, start, first = list[_Segment](), list[TimedStep](), list[TimedStep](), 0, 0
    ends = {stop for _, stop in block_ranges(reads)} - {decisions}
    begins: MixtureAction | None = None
    for index in sorted({*reads.paths, *ends, *mixtures}):
        if index in ends:
            found.append(_Segment(awaited, start, index, local, (), range(first, index), begins, ends_range=True))
            awaited, local, start, first, begins = [], [], index, index, None
        for at_once, begun in rounds_of(reads.paths.get(index, ()), _communicates):
            local += at_once
            if begun:
                found.append(_Segment(awaited, start, index, local, begun, range(first, index + 1), begins))
                awaited, local, start, first, begins = begun, [], index, index + 1, None
        if (mixture := mixtures.get(index)) is not None:
            send = MixtureAction("send", mixture)
            found.append(_Segment(awaited, start, index, local, (), range(first, index + 1), begins, send))
            found.append(_Segment((), index, index + 1, (), (), range(0), MixtureAction("run", mixture)))
            awaited, local, start, first, begins = [], [], index + 1, index + 1, MixtureAction("take", mixture)
    return [*found, _Segment(awaited, start, decisions, local, (), range(first, decisions), begins, ends_range=True)]


def _communicates(step: TimedStep) -> bool:
    return step.forward.message is not None or step.backward.message is not None
