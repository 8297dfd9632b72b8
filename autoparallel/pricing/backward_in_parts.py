"""A backward in two parts (zero bubble) on a rank: the second makes gradients of weights, and reduces them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

from autoparallel.pricing.activation_steps import runs
from autoparallel.pricing.backward_reads import BackwardReads
from autoparallel.pricing.backward_tasks import BackwardWork
from autoparallel.pricing.gradient_arrivals import GradientArrivals
from autoparallel.pricing.layer_overlap import OF_WEIGHT
from autoparallel.pricing.parameter_buckets import ParameterBuckets, Pending
from autoparallel.pricing.rank_reads import RankReads
from autoparallel.pricing.rank_seconds import RankSeconds
from autoparallel.pricing.split_backward import LeafValue, SplitBackward
from autoparallel.pricing.step_tasks import StepTasks, label_of
from autoparallel.schedule.activation_windows import PRODUCTS
from autoparallel.schedule.async_windows import TOP, Pair


class BackwardInParts:
    """The two parts on a stage that receives values; the first stage has all of its backward in the second."""

    def __init__(self, reads: RankReads, seconds: RankSeconds, buckets: ParameterBuckets, arrivals: GradientArrivals
                 ) -> None:
        self.reads, self.seconds, self.buckets, self.arrivals = reads, seconds, buckets, arrivals
        self.split = SplitBackward(reads)

    @cached_property
    def of_inputs(self) -> BackwardWork:
        """The first part."""
        each = [after - before for before, after in itertools.pairwise(self.seconds.backward_s)]
        for op, seconds in self._weights_s.items():
            each[op] -= seconds
        return BackwardWork([0.0, *itertools.accumulate(each)], runs(self.split.first), {}, {})

    def run_of_weights(self, step: StepTasks, pending: Pending, again: BackwardReads, count: float, completes: bool
                       ) -> None:
        """Run the second part of one of ``count`` rounds, which reads gathers ``again``. ``completes``: whether
        gradients are complete then; buckets of them are launched once they are there."""
        buckets = self._buckets_of if completes else {}
        self.buckets.launch_reductions(step, buckets.get(TOP, ()), pending, count)
        for part in self.split.put_off:
            for index in part.decisions:
                again.read(index)
                for timed in reversed(self.split.second.get(index, ())):
                    step.run(timed.backward.per(count), label_of("reduce", [timed]))
            step.compute(self._weights_s.get(part.op, 0.0) / count, ("backward", part.op, part.op))
            self.buckets.launch_reductions(step, buckets.get(part.op, ()), pending, count)
        again.settle()
        self.arrivals.reduce_leaves(step, count)

    @cached_property
    def _weights_s(self) -> Mapping[int, float]:
        """Seconds of the gradients of weights that the second part makes, by op."""
        found, backward_s = dict[int, float](), self.seconds.backward_s
        for op in (part.op for part in self.split.put_off):
            rule = self.reads.space.strategy_sets[op].rule
            if rule is not None and rule.op_class in PRODUCTS:
                found[op] = OF_WEIGHT * (backward_s[op + 1] - backward_s[op])
        return found

    @cached_property
    def _buckets_of(self) -> Mapping[int, Sequence[Pair]]:
        """By op, the buckets whose last gradient the second part of its backward completes; at `TOP` those that the
        first part has completed."""
        found = defaultdict[int, list[Pair]](list)
        order = {part.op: place for place, part in enumerate(self.split.put_off)}
        for pair in self.buckets.ended_together():
            ops = [op for number in pair.steps if (op := self.split.op_of.get(self._leaf(number))) in order]
            found[max(ops, key=order.__getitem__) if ops else TOP].append(pair)
        return found

    def _leaf(self, number: int) -> LeafValue:
        """What micro-batches read of the last step on a path."""
        target = self.reads.parameter_steps[number].target
        position = next(use.position for use in self.reads.space.uses_by[target]
                        if self.reads.last_step.get((target, use.position)) == number)
        return 1, target, position


__all__ = ["BackwardInParts"]
