"""Backward of a micro-batch on a rank, as tasks of the simulator."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from autoparallel.pricing.activation_steps import Action, ActivationSteps, Running
from autoparallel.pricing.expert_exchanges import MixtureAction
from autoparallel.pricing.forward_tasks import RecomputeTasks
from autoparallel.pricing.multi_copy import BackwardCalls, nothing
from autoparallel.pricing.rank_reads import RankReads
from autoparallel.pricing.rank_seconds import RankSeconds
from autoparallel.pricing.step_tasks import StepTasks

#: Actions of activations by decision, in the order of forward.
Actions = Mapping[int, Sequence[Action | MixtureAction]]


class BackwardWork(NamedTuple):
    """What a backward runs. ``until``: cumulative seconds of its compute before each decision, and in total;
    ``before``, ``ahead``: as of `ActivationSteps`; ``start_of``: as of `RecomputeTasks`."""

    until: Sequence[float]
    before: Actions
    ahead: Actions
    start_of: Mapping[int, int]


class BackwardTasks:
    """Backward of one micro-batch of a round."""

    def __init__(self, reads: RankReads, activations: ActivationSteps, seconds: RankSeconds) -> None:
        self.activations, self.seconds, self.counts = activations, seconds, reads.counts
        self.recompute = RecomputeTasks(reads, activations, seconds)

    @cached_property
    def whole(self) -> BackwardWork:
        """A backward in one part."""
        return BackwardWork(self.seconds.backward_s, self.activations.before, self.activations.ahead,
                            self.recompute.start_of)

    def run(self, step: StepTasks, part: tuple[int, int], count: float, marked: Collection[int], calls: BackwardCalls,
            work: BackwardWork) -> None:
        """Run the decisions from the first to the second of ``part`` (excluded), last first, in one of ``count``
        rounds, with the ``calls`` at the ``marked`` ones."""
        (first, done), share, until = part, count * self.counts.hybrid.copies, work.until
        sent, late = _Sent(self, step, count, marked, calls, work), self.activations.late
        pieced = self.activations.pieced
        at = {*marked, *work.before, *work.ahead, *self.recompute.members_by_start, *pieced}
        for index in sorted((index for index in at if first <= index < done), reverse=True):
            step.compute((until[done] - until[index + 1]) / share, ("backward", done - 1, index + 1))
            done = index
            if index not in work.start_of.values():
                sent.begin(index)
            step.compute((until[index + 1] - until[index]) / share, ("backward", index, index))
            if index in pieced:
                sent.run_pieces(index)
            if index in marked and index not in late:
                calls.arrived(index)
            sent.run(work.before.get(index, ()))
            if index in marked:
                calls.after(index)
            sent.run(work.ahead.get(index, ()))
        step.compute((until[done] - until[first]) / share, ("backward", done - 1, first))


class _Sent:
    """The activations that a backward of one micro-batch sends, in one of ``count`` rounds, and the compute that comes
    with them: recomputed blocks, layers in pieces, gradients that are put off, experts."""

    def __init__(self, tasks: BackwardTasks, step: StepTasks, count: float, marked: Collection[int],
                 calls: BackwardCalls, work: BackwardWork) -> None:
        self.step, self.count, self.marked, self.calls, self.work = step, count, marked, calls, work
        self.activations, self.seconds, self.recompute = tasks.activations, tasks.seconds, tasks.recompute
        self.block_of = tasks.counts.blocks.of
        share = count * tasks.counts.hybrid.copies
        self._running = Running(step, lambda timed: timed.backward.per(share), "gradients of activations", "backward",
                                share)

    def begin(self, index: int) -> None:
        """Backward of a decision, or of the recomputed block that it starts, begins."""
        if index in self.marked and (index not in self.activations.mixtures or self.block_of[index] is not None):
            self.calls.before(index)
        self.recompute.run(self.step, index, self.count)

    def run(self, actions: Sequence[Action | MixtureAction]) -> None:
        self._running.backward(actions, self._launched, self._mixed)

    def run_pieces(self, index: int) -> None:
        """Backward of the layers in pieces that run at a decision."""
        pieced = self.activations.pieced[index]
        pieced.backward(self.step, self.count)
        for layer in (layer for layer in pieced.layers if layer in self.marked):
            self.calls.arrived(layer)

    def _launched(self, window: int) -> None:
        """Compute the gradients of weights that are put off until a window's launch."""
        for layer in self.activations.layers_of(window):
            self.step.compute(self.seconds.put_off_s[layer] / self.count, ("backward", layer, layer))
            if layer in self.marked:
                self.calls.arrived(layer)

    def _mixed(self, action: MixtureAction) -> None:
        """Backward of a part of a mixture."""
        index = action.mixture.index
        if action.part == "take" and (start := self.work.start_of.get(index)) is not None:
            self.begin(start)
        reads = index in self.marked and self.block_of[index] is None
        self._running.mixtures.backward(action, self.calls.before if reads else nothing)
        if action.part == "run" and index in self.marked:
            self.calls.arrived(index)


__all__ = ["BackwardTasks", "BackwardWork"]
