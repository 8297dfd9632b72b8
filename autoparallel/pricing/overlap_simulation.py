"""Seconds saved by communication of parameters overlapped with compute, by simulating one rank's step.

The additive cost assumes no overlap. The emitted program (`lower.overlap_pass`) launches gathers of parameters ahead of
their readers, and gradient reductions as soon as gradients exist; they run in order on the stream of the links that
they cross, while compute continues. This holds for a step of one micro-batch, and for each micro-batch with ZeRO-2,
whose first one gathers for all, and ZeRO-3, whose backward prefetches as well; in pipelines too. Otherwise only the
backward of the last micro-batch overlaps with gradient reductions, which run once per step. With multi-copy
communication of activations overlaps with compute as well (`pricing.multi_copy`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import NamedTuple

from autoparallel.pricing.activation_steps import Action, ActivationSteps, Running, runs
from autoparallel.pricing.backward_reads import BackwardReads
from autoparallel.pricing.expert_exchanges import MixtureAction
from autoparallel.pricing.layer_overlap import OF_WEIGHT
from autoparallel.pricing.leaves import Leaves
from autoparallel.pricing.multi_copy import At, MultiCopyRound, block_ranges
from autoparallel.pricing.problem import SpacePricer
from autoparallel.pricing.rank_reads import (
    RankReads,
    Timed,
    TimedStep,
)
from autoparallel.pricing.rank_seconds import RankSeconds
from autoparallel.pricing.split_backward import LeafValue, SplitBackward, StepsOf
from autoparallel.pricing.step_tasks import Label, Launch, Passed, StepTasks, Wait
from autoparallel.schedule.activation_windows import PRODUCTS
from autoparallel.schedule.async_windows import TOP, Pair
from autoparallel.schedule.backward_gathers import Finish
from autoparallel.strategies.space import Strategy


class Hidden(NamedTuple):
    """Seconds of a step saved by overlap: where all micro-batches save as much, and the rest. ``activations``: of
    communication of activations, with the constants of software; without them it is in the other two."""

    each: float = 0.0
    once: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        return self.each + self.once


def _nothing(index: int) -> None:
    """No action at a decision."""


def _of_mixtures(actions: Iterable[Action | MixtureAction], runs_again: bool) -> list[MixtureAction]:
    """The parts of mixtures, if they run again; what else is ahead is not in recomputed blocks."""
    return [action for action in actions if runs_again and isinstance(action, MixtureAction)]


#: Task numbers by the async window that launched them.
Pending = dict[Pair, list[int]]


def _targets(what: str, steps: Sequence[TimedStep]) -> Label:
    """The label of redistributions of parameters, or of activations, by the decisions that read them."""
    targets = [timed.target for timed in steps]
    return what, min(targets), max(targets)


class RankStep:
    """The simulated step of a plan on a rank of one stage, in ``rounds`` of `Hybrid.copies` micro-batches each.
    Equal rounds are simulated as one of their total length: a simulated round takes 1 / ``count`` of the step, and of
    the sums of gradients the share ``adds``. ``activations``: with the overlap of activations, as the program has."""

    def __init__(self, pricer: SpacePricer, strategies: Sequence[Strategy], stage: int = 0, activations: bool = True
                 ) -> None:
        self.pricer, self.space, self.counts = pricer, pricer.space, pricer.counts
        self.strategies, self.stage = strategies, stage
        self.reads = RankReads(pricer, strategies, stage)
        self.leaves = Leaves(self.reads)
        self.activations = ActivationSteps(self.reads, activations)
        self.seconds = RankSeconds(self.reads, strategies, self.activations)
        self.windows, self.numbers = self.reads.windows, self.reads.numbers
        self.copies = self.counts.hybrid.copies
        self.rounds = self.counts.micro_batches_on(stage) // self.copies
        self.gathers_once = self.counts.hybrid.gathers_once
        self.count: float = 1 if self.reads.equivalent and not self.gathers_once else self.rounds
        self.adds = 1 / (max(1, self.count - 1) if self.copies == 1 else self.count)
        self.multi_copy = (MultiCopyRound(self.reads, len(self.space), self.copies)
                           if self.counts.hybrid.alternates else None)

    def communication(self) -> list[Launch | Wait | Passed]:
        """The launches and waits of a whole step, in the order in which the rank makes them."""
        events = self.step(each=True).events
        return events * (self.rounds if self.reads.equivalent and not self.gathers_once else 1)

    def hidden(self, slowdown: float) -> Hidden:
        """Seconds by which the simulated step is shorter than the sum of its tasks."""
        total = self.step().hidden_s(slowdown)
        if not self.reads.equivalent:
            early = self._hidden_early_s(slowdown)
            each = self.count * max(0.0, min(early, total)) if self.copies == 1 else 0.0
            return Hidden(each, total + (self.count - 1) * early - each)
        if self.rounds == 1:    # all communication of parameters is once per step
            return Hidden(once=total)
        if not self.gathers_once:
            return Hidden(total)
        later = StepTasks()
        self.forward(later, Pending(), first=False)
        self.backward(later, Pending(), last=False)
        later.flush()
        each = max(0.0, min(total, self.rounds * later.hidden_s(slowdown)))
        return Hidden(each, total - each)

    def _hidden_early_s(self, slowdown: float) -> float:
        """Seconds hidden in each round before the last, where reductions and gathers of parameters hide nothing."""
        step = StepTasks()
        if self._reduces_each and self.counts.hybrid.puts_off_weights:
            pending = Pending()
            self.forward(step, pending)
            self.backward_of_weights(step, pending, self.backward_of_inputs(step), last=False)
        elif self.copies == 1 and not self.activations.overlaps:
            return 0.0
        else:
            self._forward(step)
            self._backward(step, ())
        step.flush()
        return step.hidden_s(slowdown)

    def step(self, each: bool = False) -> StepTasks:
        """The tasks of a step: forward, backward in reverse order, optimizer. ``each``: micro-batches without overlap
        one by one, rather than as one task of their total length."""
        step, pending = StepTasks(), Pending()
        self.begin(step, pending)
        for number in range(self.rounds - 1 if each and self.count > 1 else 0):
            one = self if number else self._first()
            one.forward(step, pending, first=number == 0)
            one.backward(step, pending, last=False)
        last = self if each or self.count == 1 else self._last_of_several(step, pending)
        last.forward(step, pending, first=self.count == 1)
        if self.counts.hybrid.puts_off_weights:
            last.backward_of_weights(step, pending, last.backward_of_inputs(step), last=True)
        else:
            last.backward(step, pending, last=True)
        self.finish(step, pending)
        step.compute(self.seconds.updates_s, ("optimizer", TOP, TOP))
        step.flush()
        return step

    def _last_of_several(self, step: StepTasks, pending: Pending) -> RankStep:
        """Simulate what comes before the last of several simulated rounds, and return that: with ZeRO-2 the first round
        is simulated, and all others are one; else the last one is."""
        if not self.gathers_once:
            hidden = self._hidden_early_s(self.pricer.prices.device.overlap_slowdown)
            step.compute((self.count - 1) * (self._round_s() - hidden) + (1 - self.adds) * sum(self._sums_s.values()),
                         ("micro-batches before the last", TOP, TOP))
            return self
        first, others = self._first(), copy(self)
        others.count = self.rounds / (self.rounds - 1)
        others.adds = 1 - first.adds
        first.forward(step, pending)
        first.backward(step, pending, last=False)
        return others

    def _first(self) -> RankStep:
        """The first of several rounds, which adds to no earlier gradients."""
        first = copy(self)
        first.adds = 0.0 if self.copies == 1 else 1 / self.rounds
        return first

    def begin(self, step: StepTasks, pending: Pending) -> None:
        """Before all micro-batches: read the parameters that these do not read themselves; launch the gathers of stored
        parameters that run once for all."""
        self._read_once(step)
        for action, pair in itertools.chain(*(events for _, events in sorted(self.windows.events.items()))):
            stored = all(self.reads.reads[n].after is None for n in pair.steps)
            if self.gathers_once and action == "launch" and stored and self.reads.reads[pair.steps[0]].kind == "gather":
                self._launch(step, pair, pending)
        for place in self._read_before:
            self._read(step, place, pending)

    def forward(self, step: StepTasks, pending: Pending, first: bool = True) -> None:
        """Forward of a round. With ZeRO-2 the ``first`` one reads parameters for all."""
        if self.reads.equivalent and (first or not self.gathers_once):
            self._read(step, TOP, pending)
            self._forward(step, self.windows.events.keys() - {TOP}, lambda index: self._read(step, index, pending))
        else:
            self._forward(step)

    def backward(self, step: StepTasks, pending: Pending, last: bool) -> None:
        """Backward of a round. The ``last`` of several launches the reduction of a bucket once its last gradient
        arrives, if micro-batches read its result directly."""
        if self.reads.equivalent:
            again = self._backward_reads(step)
            marked = {*self.windows.events.keys() - {TOP}, *again.by_decision, *self._sums_s, *self.leaves.reduced}
            self._backward(step, marked, again.read, lambda index: self._reduce(step, index, pending),
                           lambda index: self._arrived(step, index))
            self._reduce(step, TOP, pending)
            again.settle()
            return

        early = self._reduced_early if last else {}

        def arrived(index: int) -> None:
            self._arrived(step, index)
            for pair in early.get(index, ()):
                self._issue(step, pair, pending)

        self._backward(step, {*early, *self._sums_s, *self.leaves.reduced}, arrived=arrived)

    def backward_of_inputs(self, step: StepTasks) -> BackwardReads | None:
        """The first part of a backward in two parts, of the first stage nothing; returns what the second part reads."""
        if not self.stage:
            return None
        again, later = self._backward_reads(step), self.split.later
        self._backward(step, again.by_decision.keys() - later, again.read, sent=self.split.first)
        return again

    def _backward_reads(self, step: StepTasks) -> BackwardReads:
        return BackwardReads(self.reads, lambda *steps: self._begin_again(step, *steps), self.activations.experts_at)

    def backward_of_weights(self, step: StepTasks, pending: Pending, again: BackwardReads | None, last: bool) -> None:
        """The second part, which reduces the gradients of weights; of the first stage all of backward. Reductions of
        gradients that it completes (``last``, or those of each micro-batch) are launched once they are there."""
        completes = last or self._reduces_each
        if again is None:
            self.backward(step, pending, last=completes)
        else:
            early = self._reduced_in_parts if completes else {}
            self._issue_all(step, early.get(TOP, ()), pending)
            for part in self.split.put_off:
                for index in part.decisions:
                    again.read(index)
                    for timed in reversed(self.split.second.get(index, ())):
                        step.run(timed.backward.per(self.count), _targets("reduce", [timed]))
                step.compute(self._weights_s.get(part.op, 0.0) / self.count, ("backward", part.op, part.op))
                self._issue_all(step, early.get(part.op, ()), pending)
            again.settle()
            for timed in self.leaves.backward:
                step.run(timed.backward.per(self.count), _targets("reduce", [timed]))
        if self._reduces_each:
            self._reduce_all(step, pending)

    def _issue_all(self, step: StepTasks, pairs: Iterable[Pair], pending: Pending) -> None:
        for pair in pairs:
            self._issue(step, pair, pending)

    @cached_property
    def _weights_s(self) -> Mapping[int, float]:
        """Seconds of the gradients of weights that the second part of backward makes, by op."""
        found = dict[int, float]()
        for op in (part.op for part in self.split.put_off):
            rule = self.space.strategy_sets[op].rule
            if rule is not None and rule.op_class in PRODUCTS:
                found[op] = OF_WEIGHT * (self.seconds.backward_s[op + 1] - self.seconds.backward_s[op])
        return found

    @cached_property
    def _reduced_in_parts(self) -> Mapping[int, Sequence[Pair]]:
        """By op, the buckets of which the second part of its backward completes the last gradient; at `TOP` those that
        the first part has completed."""
        found = defaultdict[int, list[Pair]](list)
        order = {part.op: place for place, part in enumerate(self.split.put_off)}
        for pair in self._ended_together():
            ops = [op for number in pair.steps if (op := self.split.op_of.get(self._leaf(number))) in order]
            found[max(ops, key=order.__getitem__) if ops else TOP].append(pair)
        return found

    def _ended_together(self) -> Iterator[Pair]:
        """The buckets whose results micro-batches read directly, in the order of the program."""
        for _, events in sorted(self.windows.events.items()):
            yield from (pair for action, pair in events
                        if action == "wait" and all(self.windows.is_last(number) for number in pair.steps))

    def _leaf(self, number: int) -> LeafValue:
        """What micro-batches read of the last step on a path."""
        target = self.reads.parameter_steps[number].target
        position = next(use.position for use in self.space.uses_by[target]
                        if self.reads.last_step.get((target, use.position)) == number)
        return 1, target, position

    @cached_property
    def split(self) -> SplitBackward:
        return SplitBackward(self.reads)

    def finish(self, step: StepTasks, pending: Pending) -> None:
        """After all micro-batches: reduce the gradients that these have not."""
        if not self._reduces_each:
            self._reduce_all(step, pending)

    def _reduce_all(self, step: StepTasks, pending: Pending) -> None:
        """Reduce the gradients of parameters that are read before all micro-batches."""
        for place in reversed(self._read_before):
            self._reduce(step, place, pending)

    @property
    def _reduces_each(self) -> bool:
        """Whether gradients are reduced in each micro-batch."""
        return self.counts.hybrid.zero_stage >= 2

    @cached_property
    def _read_before(self) -> Sequence[int]:
        """The program points whose parameters are read before all micro-batches."""
        return () if self.reads.equivalent else sorted({TOP, *self.windows.events})

    @cached_property
    def _reduced_early(self) -> Mapping[int, Sequence[Pair]]:
        """By decision, the buckets whose last gradient its backward completes, if their reduction is launched then."""
        hybrid, pairs, early = self.counts.hybrid, dict[Pair, tuple[int, ...]](), defaultdict[int, list[Pair]](list)
        for pair in (*self.windows.reduced, *self.windows.gathered):
            if ((hybrid.zero_stage < 2 or hybrid.puts_off_weights)
                    and all(self.windows.is_last(n) for n in pair.steps)):
                pairs[pair] = max(map(self._arrival, pair.steps))
        for pair in sorted(pairs, key=pairs.__getitem__):
            early[-pairs[pair][2]].append(pair)
        return early

    def _arrival(self, number: int) -> tuple[int, int, int, int]:
        """When backward completes the gradient of the result of a path's last step, as `RankReads.arrival`: after that
        of which decision (negated), and whether it was put off."""
        reader, order = self.reads.arrival(number)
        late = self.activations.late.get(-reader)
        return (reader, 0, reader, order) if late is None else (-late, 1, reader, order)

    def _read_once(self, step: StepTasks) -> None:
        """Make the leaves that micro-batches read."""
        for timed in self.leaves.steps:
            step.run(timed.forward, _targets("gather", [timed]))

    def _arrived(self, step: StepTasks, index: int) -> None:
        """Reduce the gradients of leaves that a decision completes; accumulate those of the parameters that it
        reads."""
        for timed in (timed for path in self.leaves.reduced.get(index, ()) for timed in reversed(path)):
            step.run(timed.backward.per(self.count), _targets("reduce", [timed]))
        step.compute(self.adds * self._sums_s.get(index, 0.0), ("backward", index, index))

    @cached_property
    def _sums_s(self) -> Mapping[int, float]:
        """By decision, seconds of accumulating the gradients of its parameters."""
        found = defaultdict[int, float](float)
        for use in (move.use for move in self.reads.moves if self.counts.sums(move.use)):
            seconds = self.pricer.costs.sums_s(use)[self.numbers[use.source], self.numbers[use.target]]
            found[use.target] += float(seconds)
        return found

    def _read(self, step: StepTasks, place: int, pending: Pending) -> None:
        for action, pair in self.windows.events.get(place, ()):
            steps = self._of(pair)
            forward, label = [timed.forward for timed in steps], _targets("gather", steps)
            if action == "launch":
                if pair not in pending:
                    self._launch(step, pair, pending)
            elif action == "wait":
                step.wait(pending.pop(pair))
            else:
                step.run(forward[0], label)

    def _launch(self, step: StepTasks, pair: Pair, pending: Pending) -> None:
        """Launch a bucket's gather, or nothing, if forward sends nothing."""
        forward = [timed.forward for timed in self._of(pair)]
        sends = any(timed.seconds for timed in forward)
        more_s = self.reads.latency_s(forward)
        pending[pair] = [step.issue(forward, _targets("gather", self._of(pair)), more_s)] if sends else []

    def _reduce(self, step: StepTasks, place: int, pending: Pending) -> None:
        for action, pair in reversed(self.windows.events.get(place, ())):
            if action == "launch":
                step.wait(pending.pop(pair))
            elif action == "run":
                step.run(self._reduction(self._of(pair)[0]), _targets("reduce", self._of(pair)))
            elif pair not in pending:
                self._issue(step, pair, pending)

    def _recompute(self, step: StepTasks, members: Sequence[int]) -> None:
        """Run a block again."""
        share, full, sent = self.count * self.copies, self.counts.hybrid.recompute == "full", self.activations
        run = Running(step, lambda timed: timed.again.per(share), "activations again", "recompute", share)
        ahead = sorted(place for place in sent.ahead if members and members[0] <= place <= members[-1])
        for index in members:
            while ahead and ahead[0] <= index:
                run.forward(_of_mixtures(sent.ahead[ahead.pop(0)], full))
            run.forward(action for action in sent.before.get(index, ()) if full or isinstance(action, Action))
            pieced, again_s = sent.pieced.get(index), self.seconds.again_s[index]
            if pieced is not None and (again_s or index in self._saved_last):
                pieced.forward(step, self.count, "recompute", counted=bool(again_s))
            elif index not in sent.in_pieces and not (full and index in sent.mixtures):
                step.compute(again_s / share, ("recompute", index, index))

    @cached_property
    def _recomputed(self) -> Mapping[int, Sequence[int]]:
        """The decisions of each block that is run again, by the one whose backward starts it."""
        blocks, found = self.counts.blocks, defaultdict[int, list[int]](list)
        for index in self.reads.members:
            if (block := blocks.of[index]) is not None:
                found[blocks.starts.get(block, blocks.last[block])].append(index)
        return found

    @cached_property
    def _saved_last(self) -> Collection[int]:
        """The ops with which recompute of their blocks ends (in pieces they run again to save what they read)."""
        return self.counts.blocks.ends.values() if self.counts.hybrid.recompute == "full" else ()

    def _begin_again(self, step: StepTasks, steps: Sequence[TimedStep], at_once: bool) -> Finish[None]:
        """Launch steps of parameters again (``at_once``: and await them)."""
        label, nothing = _targets("gather again", steps), [None] * len(steps)
        if at_once:
            step.run(steps[0].again, label)
            return lambda: nothing
        again = [one.again for one in steps]
        task = step.issue(again, label, self.reads.latency_s(again))

        def finish() -> Sequence[None]:
            step.wait([task])
            return nothing

        return finish

    def _issue(self, step: StepTasks, pair: Pair, pending: Pending) -> None:
        steps = self._of(pair)  # one all_reduce for the bucket
        sums = list(map(self._reduction, steps))
        pending[pair] = [step.issue(sums, _targets("reduce", steps), self.reads.latency_s(sums))]

    def _reduction(self, timed: TimedStep) -> Timed:
        """The reduction of gradients, in a round if each does it."""
        return timed.backward.per(self.count) if self._reduces_each else timed.backward

    def _forward(self, step: StepTasks, marked: Collection[int] = (), before: Callable[[int], None] = _nothing) -> None:
        """One forward pass; calls ``before`` at the marked decisions."""
        if self.multi_copy is not None:
            return self.multi_copy.forward(step, self.seconds.forward_s, self.count, marked, before)
        for part, number in itertools.product(self._ranges, range(self.copies)):
            self._forward_of(step, part, () if number else marked, before)

    @cached_property
    def _ranges(self) -> Sequence[tuple[int, int]]:
        return block_ranges(self.reads)

    def _forward_of(self, step: StepTasks, part: tuple[int, int], marked: Collection[int],
                    before: Callable[[int], None]) -> None:
        """Forward of the decisions from the first to the second of ``part`` (excluded), of one micro-batch."""
        (done, stop), share = part, self.count * self.copies
        until, sent = self.seconds.forward_s, self.activations
        run = Running(step, lambda timed: timed.forward.per(share), "activations", "forward", share)
        at = {*marked, *sent.ahead, *sent.before, *sent.pieced}
        for index in sorted(index for index in at if done <= index < stop):
            step.compute((until[index] - until[done]) / share, ("forward", done, index))
            done = index
            run.forward(sent.ahead.get(index, ()))
            if index in marked:
                before(index)
            run.forward(sent.before.get(index, ()))
            if (pieced := sent.pieced.get(index)) is not None:
                pieced.forward(step, self.count)
        step.compute((until[stop] - until[done]) / share, ("forward", done, stop - 1))

    def _backward(self, step: StepTasks, marked: Collection[int], before: Callable[[int], None] = _nothing,
                  after: Callable[[int], None] = _nothing, arrived: Callable[[int], None] = _nothing,
                  sent: StepsOf | None = None) -> None:
        """One backward pass; calls ``before``, ``arrived`` (where an op has made its parameters' gradients) and
        ``after`` at the marked decisions. ``sent``: the steps that it runs (default: all of `RankReads.sent`)."""
        if self.multi_copy is not None:
            return self.multi_copy.backward(step, self.seconds.backward_s, self.count, marked, (before, after, arrived))
        for part, number in reversed(list(itertools.product(self._ranges, range(self.copies)))):
            asked = before if number == self.copies - 1 else _nothing
            made = (arrived, after) if number == 0 else (_nothing, _nothing)
            self._backward_of(step, part, marked, (asked, *made), sent)

    def _backward_of(self, step: StepTasks, part: tuple[int, int], marked: Collection[int], calls: tuple[At, At, At],
                     sent: StepsOf | None) -> None:
        """Backward of the decisions from the first to the second of ``part`` (excluded), of one micro-batch. ``calls``:
        ``before``, ``arrived`` and ``after`` of `_backward`."""
        (first, done), share, (before, arrived, after) = part, self.count * self.copies, calls
        late = self.activations.late
        until = self.seconds.backward_s if sent is None else self._until_weights
        steps, ahead = (self.activations.before, self.activations.ahead) if sent is None else (runs(sent), {})
        run = Running(step, lambda timed: timed.backward.per(share), "gradients of activations", "backward", share)
        again_at = self._again_at if sent is None else {}

        def launched(window: int) -> None:
            for layer in self.activations.layers_of(window):
                step.compute(self.seconds.put_off_s[layer] / self.count, ("backward", layer, layer))
                if layer in marked:
                    arrived(layer)

        def mixed(action: MixtureAction) -> None:
            index = action.mixture.index
            if action.part == "take" and (start := again_at.get(index)) is not None:
                begun(start)
            reads = index in marked and self.counts.blocks.of[index] is None
            run.mixtures.backward(action, before if reads else _nothing)
            if action.part == "run" and index in marked:
                arrived(index)

        def begun(index: int) -> None:
            """Backward of a decision, or of the recomputed block that it starts, begins."""
            if index in marked and (index not in self.activations.mixtures or self.counts.blocks.of[index] is not None):
                before(index)
            self._recompute(step, self._recomputed.get(index, ()))

        at = {*marked, *steps, *ahead, *self._recomputed, *self.activations.pieced}
        for index in sorted((index for index in at if first <= index < done), reverse=True):
            step.compute((until[done] - until[index + 1]) / share, ("backward", done - 1, index + 1))
            done = index
            if index not in again_at.values():
                begun(index)
            step.compute((until[index + 1] - until[index]) / share, ("backward", index, index))
            if (pieced := self.activations.pieced.get(index)) is not None:
                pieced.backward(step, self.count)
                for layer in (layer for layer in pieced.layers if layer in marked):
                    arrived(layer)
            if index in marked and index not in late:
                arrived(index)
            run.backward(steps.get(index, ()), launched, mixed)
            if index in marked:
                after(index)
            run.backward(ahead.get(index, ()), launched, mixed)
        step.compute((until[done] - until[first]) / share, ("backward", done - 1, first))

    @cached_property
    def _until_weights(self) -> Sequence[float]:
        """`RankSeconds.backward_s` of the first part of a backward in two parts."""
        each = [after - before for before, after in itertools.pairwise(self.seconds.backward_s)]
        for op, seconds in self._weights_s.items():
            each[op] -= seconds
        return [0.0, *itertools.accumulate(each)]

    @cached_property
    def _again_at(self) -> Mapping[int, int]:
        """By mixture whose result is taken after the decision whose backward would start the recompute of its block:
        that decision. Backward comes to the mixture's end first, which saves the order of its rows."""
        blocks, found = self.counts.blocks, dict[int, int]()
        for index, mixture in self.activations.mixtures.items():
            block = blocks.of[index]
            start = None if block is None else blocks.starts.get(block)
            if start is not None and mixture.window.is_open and index < start < mixture.window.reader:
                found[index] = start
        return found

    def _round_s(self) -> float:
        """Seconds of one round without overlap and without gradient accumulation."""
        sent = sum(timed.forward.seconds + timed.again.seconds + timed.backward.seconds
                   for steps in self.reads.sent.values() for timed in steps)
        backward_s = self.seconds.backward_s[-1] + sum(self.seconds.put_off_s.values()) + self.seconds.in_parts_s
        return (self.seconds.forward_s[-1] + sum(self.seconds.again_s) + backward_s + sent) / self.count

    def _of(self, pair: Pair) -> list[TimedStep]:
        return [self.reads.parameter_steps[number] for number in pair.steps]
