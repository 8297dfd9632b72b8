"""The gathers of parameters and the reductions of their gradients on a rank, in buckets, as tasks of the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property

from autoparallel.pricing.rank_reads import RankReads, Timed, TimedStep
from autoparallel.pricing.step_tasks import StepTasks, label_of
from autoparallel.schedule.async_windows import TOP, Pair
from autoparallel.schedule.backward_gathers import Finish

#: By async window, the numbers of the tasks that it has launched and not awaited.
Pending = dict[Pair, list[int]]


class ParameterBuckets:
    """Buckets are launched and awaited at program points (`AsyncWindows.events`): gathers in their order, reductions in
    reverse order, as one of ``count`` rounds if each reduces."""

    def __init__(self, reads: RankReads) -> None:
        self.reads, self.windows, self.hybrid = reads, reads.windows, reads.counts.hybrid

    @property
    def places(self) -> Collection[int]:
        """The decisions before which buckets are launched or awaited."""
        return self.windows.events.keys() - {TOP}

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are reduced in each micro-batch."""
        return self.hybrid.zero_stage >= 2

    @cached_property
    def _read_before(self) -> Sequence[int]:
        """The program points whose parameters are read before all micro-batches."""
        return () if self.reads.equivalent else sorted({TOP, *self.windows.events})

    def begin(self, step: StepTasks, pending: Pending) -> None:
        """Before all micro-batches: launch the gathers of stored parameters that run once for all; read the parameters
        that micro-batches do not read themselves."""
        for action, pair in itertools.chain(*(events for _, events in sorted(self.windows.events.items()))):
            stored = all(self.reads.reads[n].after is None for n in pair.steps)
            if (self.hybrid.gathers_once and action == "launch" and stored
                    and self.reads.reads[pair.steps[0]].kind == "gather"):
                self._launch(step, pair, pending)
        for place in self._read_before:
            self.read(step, place, pending)

    def read(self, step: StepTasks, place: int, pending: Pending) -> None:
        """Launch and await the gathers of a program point."""
        for action, pair in self.windows.events.get(place, ()):
            steps = self._steps_of(pair)
            if action == "launch":
                if pair not in pending:
                    self._launch(step, pair, pending)
            elif action == "wait":
                step.wait(pending.pop(pair))
            else:
                step.run(steps[0].forward, label_of("gather", steps))

    def _launch(self, step: StepTasks, pair: Pair, pending: Pending) -> None:
        """Launch a bucket's gather, or nothing, if forward sends nothing."""
        steps = self._steps_of(pair)
        forward = [timed.forward for timed in steps]
        sends = any(timed.seconds for timed in forward)
        more_s = self.reads.latency_s(forward)
        pending[pair] = [step.issue(forward, label_of("gather", steps), more_s)] if sends else []

    def gather_again(self, step: StepTasks, steps: Sequence[TimedStep], at_once: bool) -> Finish[None]:
        """Launch the gather of a bucket for backward (``at_once``: and await it); returns the wait."""
        label, nothing = label_of("gather again", steps), [None] * len(steps)
        if at_once:
            step.run(steps[0].again, label)
            return lambda: nothing
        again = [one.again for one in steps]
        task = step.issue(again, label, self.reads.latency_s(again))

        def finish() -> Sequence[None]:
            step.wait([task])
            return nothing

        return finish

    def reduce(self, step: StepTasks, place: int, pending: Pending, count: float) -> None:
        """Launch and await the reductions of a program point."""
        for action, pair in reversed(self.windows.events.get(place, ())):
            if action == "launch":
                step.wait(pending.pop(pair))
            elif action == "run":
                steps = self._steps_of(pair)
                step.run(self._reduction(steps[0], count), label_of("reduce", steps))
            elif pair not in pending:
                self.launch_reductions(step, [pair], pending, count)

    def launch_reductions(self, step: StepTasks, pairs: Iterable[Pair], pending: Pending, count: float) -> None:
        """Launch one reduction for each bucket."""
        for pair in pairs:
            steps = self._steps_of(pair)
            sums = [self._reduction(timed, count) for timed in steps]
            pending[pair] = [step.issue(sums, label_of("reduce", steps), self.reads.latency_s(sums))]

    def reduce_all(self, step: StepTasks, pending: Pending, count: float) -> None:
        """Reduce the gradients of parameters that are read before all micro-batches."""
        for place in reversed(self._read_before):
            self.reduce(step, place, pending, count)

    def _reduction(self, timed: TimedStep, count: float) -> Timed:
        return timed.backward.per(count) if self.reduces_each else timed.backward

    def ended_together(self) -> Iterator[Pair]:
        """The buckets whose results micro-batches read directly, in the order of the program."""
        for _, events in sorted(self.windows.events.items()):
            yield from (pair for action, pair in events
                        if action == "wait" and all(self.windows.is_last(number) for number in pair.steps))

    def _steps_of(self, pair: Pair) -> list[TimedStep]:
        return [self.reads.parameter_steps[number] for number in pair.steps]


__all__ = ["ParameterBuckets", "Pending"]
