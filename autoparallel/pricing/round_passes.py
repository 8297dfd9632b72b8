"""Forward and backward of the micro-batches of a round on a rank, as tasks of the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from functools import cached_property

from autoparallel.pricing.activation_steps import ActivationSteps
from autoparallel.pricing.backward_tasks import BackwardTasks, BackwardWork
from autoparallel.pricing.forward_tasks import ForwardTasks
from autoparallel.pricing.multi_copy import NO_CALLS, At, BackwardCalls, MultiCopyRound, block_ranges, nothing
from autoparallel.pricing.rank_reads import RankReads
from autoparallel.pricing.rank_seconds import RankSeconds
from autoparallel.pricing.step_tasks import StepTasks


class RoundPasses:
    """A round has `Hybrid.copies` micro-batches, which share its parameters: they alternate where activations travel
    (`MultiCopyRound`), or each runs a range of decisions before any of them runs the next."""

    def __init__(self, reads: RankReads, activations: ActivationSteps, seconds: RankSeconds) -> None:
        self.reads, self.seconds, self.copies = reads, seconds, reads.counts.hybrid.copies
        self._multi_copy = (MultiCopyRound(reads, len(reads.space), self.copies, activations.mixtures)
                            if reads.counts.hybrid.alternates else None)
        self._forward = ForwardTasks(reads, activations, seconds)
        self._backward = BackwardTasks(reads, activations, seconds)

    @cached_property
    def _ranges(self) -> Sequence[tuple[int, int]]:
        return block_ranges(self.reads)

    @cached_property
    def _again_s(self) -> Sequence[float]:
        """Seconds of recompute by decision, without mixtures that run again as they do forward."""
        sends_again, mixtures = self.reads.counts.blocks.sends_again, self._forward.activations.mixtures
        return [0.0 if sends_again and index in mixtures else again_s
                for index, again_s in enumerate(self.seconds.again_s)]

    def forward(self, step: StepTasks, count: float, marked: Collection[int] = (), before: At = nothing) -> None:
        """Forward of one of ``count`` rounds; calls ``before`` at the ``marked`` decisions, of the first micro-batch
        that comes there."""
        if self._multi_copy is not None:
            return self._multi_copy.forward(step, self.seconds.forward_s, count, marked, before)
        for part, number in itertools.product(self._ranges, range(self.copies)):
            self._forward.run(step, part, count, () if number else marked, before)

    def backward(self, step: StepTasks, count: float, marked: Collection[int] = (),
                 calls: BackwardCalls = NO_CALLS, work: BackwardWork | None = None) -> None:
        """Backward of one of ``count`` rounds, with the ``calls`` at the ``marked`` decisions: ``before`` of the first
        micro-batch that comes there, the others of the last. ``work``: what it runs (None: all of backward)."""
        if self._multi_copy is not None:
            return self._multi_copy.backward(step, self.seconds.backward_s, self._again_s, count, marked, calls)
        for part, number in reversed(list(itertools.product(self._ranges, range(self.copies)))):
            asked = calls.before if number == self.copies - 1 else nothing
            own = BackwardCalls(asked) if number else calls._replace(before=asked)
            self._backward.run(step, part, count, marked, own, work or self._backward.whole)


__all__ = ["RoundPasses"]
