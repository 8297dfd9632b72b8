"""A round of micro-batches on a rank, with its communication of parameters, as tasks of the simulator."""

from __future__ import annotations

from copy import copy
from functools import cached_property

from autoparallel.pricing.activation_steps import ActivationSteps
from autoparallel.pricing.backward_in_parts import BackwardInParts
from autoparallel.pricing.backward_reads import BackwardReads
from autoparallel.pricing.gradient_arrivals import GradientArrivals
from autoparallel.pricing.multi_copy import BackwardCalls
from autoparallel.pricing.parameter_buckets import ParameterBuckets, Pending
from autoparallel.pricing.rank_reads import RankReads
from autoparallel.pricing.rank_seconds import RankSeconds
from autoparallel.pricing.round_passes import RoundPasses
from autoparallel.pricing.step_tasks import StepTasks
from autoparallel.schedule.async_windows import TOP


class RankRound:
    """A round takes 1 / ``count`` of the step, and of the sums of gradients the share ``adds``."""

    def __init__(self, reads: RankReads, activations: ActivationSteps, seconds: RankSeconds, count: float, adds: float
                 ) -> None:
        self.reads, self.activations, self.seconds = reads, activations, seconds
        self.count, self.adds = count, adds
        self.passes = RoundPasses(reads, activations, seconds)
        self.buckets = ParameterBuckets(reads)
        self.arrivals = GradientArrivals(reads, activations.late)

    def of_share(self, count: float, adds: float) -> RankRound:
        """The same round of another length."""
        other = copy(self)
        other.count, other.adds = count, adds
        return other

    @cached_property
    def _in_parts(self) -> BackwardInParts:
        return BackwardInParts(self.reads, self.seconds, self.buckets, self.arrivals)

    def forward(self, step: StepTasks, pending: Pending, first: bool = True) -> None:
        """Forward of a round. With ZeRO-2 the ``first`` one reads parameters for all."""
        if self.reads.equivalent and (first or not self.reads.counts.hybrid.gathers_once):
            self.buckets.read(step, TOP, pending)
            self.passes.forward(step, self.count, self.buckets.places,
                                lambda index: self.buckets.read(step, index, pending))
        else:
            self.passes.forward(step, self.count)

    def backward(self, step: StepTasks, pending: Pending, last: bool) -> None:
        """Backward of a round. The ``last`` of several launches the reduction of a bucket once its last gradient
        arrives, if micro-batches read its result directly."""
        if self.reads.equivalent:
            again = self._reads_again(step)
            marked = {*self.buckets.places, *again.by_decision, *self.arrivals.places}
            self.passes.backward(step, self.count, marked, BackwardCalls(
                again.read, lambda index: self._arrived(step, index),
                lambda index: self.buckets.reduce(step, index, pending, self.count)))
            self.buckets.reduce(step, TOP, pending, self.count)
            again.settle()
            return

        completed = self.arrivals.completed if last else {}

        def arrived(index: int) -> None:
            self._arrived(step, index)
            self.buckets.launch_reductions(step, completed.get(index, ()), pending, self.count)

        self.passes.backward(step, self.count, {*completed, *self.arrivals.places}, BackwardCalls(arrived=arrived))

    def backward_of_inputs(self, step: StepTasks) -> BackwardReads | None:
        """The first part of a backward in two parts, of the first stage nothing; returns what the second part reads."""
        if not self.reads.stage:
            return None
        again = self._reads_again(step)
        marked = again.by_decision.keys() - self._in_parts.split.later
        self.passes.backward(step, self.count, marked, BackwardCalls(again.read), self._in_parts.of_inputs)
        return again

    def backward_of_weights(self, step: StepTasks, pending: Pending, again: BackwardReads | None, last: bool) -> None:
        """The second part, which reduces the gradients of weights; of the first stage all of backward. Reductions of
        gradients that it completes (``last``, or those of each micro-batch) are launched once they are there."""
        completes = last or self.buckets.reduces_each
        if again is None:
            self.backward(step, pending, last=completes)
        else:
            self._in_parts.run_of_weights(step, pending, again, self.count, completes)
        if self.buckets.reduces_each:
            self.buckets.reduce_all(step, pending, self.count)

    def _arrived(self, step: StepTasks, index: int) -> None:
        self.arrivals.arrived(step, index, self.count, self.adds)

    def _reads_again(self, step: StepTasks) -> BackwardReads:
        return BackwardReads(self.reads, lambda *steps: self.buckets.gather_again(step, *steps),
                             self.activations.experts_at)

    @property
    def alone_s(self) -> float:
        """Seconds of one round without overlap and without gradient accumulation."""
        sent = sum(timed.forward.seconds + timed.again.seconds + timed.backward.seconds
                   for steps in self.reads.sent.values() for timed in steps)
        backward_s = self.seconds.backward_s[-1] + sum(self.seconds.put_off_s.values()) + self.seconds.in_parts_s
        return (self.seconds.forward_s[-1] + sum(self.seconds.again_s) + backward_s + sent) / self.count


__all__ = ["RankRound"]
