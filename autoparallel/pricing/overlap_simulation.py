"""Seconds saved by communication of parameters overlapped with compute, by simulating one rank's step.

The additive cost assumes no overlap. The emitted program (`lower.overlap_pass`) launches gathers of parameters ahead of
their readers, and gradient reductions as soon as gradients exist; they run in order on the stream of the links that
they cross, while compute continues. This holds for a step of one micro-batch, and for each micro-batch with ZeRO-2,
whose first one gathers for all, and ZeRO-3, whose backward prefetches as well; in pipelines too. Otherwise only the
backward of the last micro-batch overlaps with gradient reductions, which run once per step. With multi-copy
communication of activations overlaps with compute as well (`pricing.multi_copy`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autoparallel.pricing.activation_steps import ActivationSteps
from autoparallel.pricing.parameter_buckets import Pending
from autoparallel.pricing.problem import SpacePricer
from autoparallel.pricing.rank_reads import RankReads
from autoparallel.pricing.rank_round import RankRound
from autoparallel.pricing.rank_seconds import RankSeconds
from autoparallel.pricing.step_tasks import Launch, Passed, StepTasks, Wait
from autoparallel.schedule.async_windows import TOP
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


class RankStep:
    """The simulated step of a plan on a rank of one stage, in ``rounds`` of `Hybrid.copies` micro-batches each.
    Equal rounds are simulated as one of their total length, ``round``. ``activations``: with the overlap of
    activations, as the program has."""

    def __init__(self, pricer: SpacePricer, strategies: Sequence[Strategy], stage: int = 0, activations: bool = True
                 ) -> None:
        self.pricer, self.hybrid = pricer, pricer.counts.hybrid
        self.reads = RankReads(pricer, strategies, stage)
        self.activations = ActivationSteps(self.reads, activations)
        self.seconds = RankSeconds(self.reads, strategies, self.activations)
        self.rounds = self.hybrid.micro_batches_on(stage) // self.hybrid.copies
        count = 1 if self.reads.equivalent and not self.hybrid.gathers_once else self.rounds
        adds = 1 / (max(1, count - 1) if self.hybrid.copies == 1 else count)
        self.round = RankRound(self.reads, self.activations, self.seconds, count, adds)

    def communication(self) -> list[Launch | Wait | Passed]:
        """The launches and waits of a whole step, in the order in which the rank makes them."""
        events = self.step(each=True).events
        return events * (self.rounds if self.reads.equivalent and not self.hybrid.gathers_once else 1)

    def hidden(self, slowdown: float) -> Hidden:
        """Seconds by which the simulated step is shorter than the sum of its tasks."""
        total = self.step().hidden_s(slowdown)
        if not self.reads.equivalent:
            early = self._hidden_early_s(slowdown)
            return Hidden(self.round.count * early, total - early)    # which may be less than 0: buckets not full
        if self.rounds == 1:    # all communication of parameters is once per step
            return Hidden(once=total)
        if not self.hybrid.gathers_once:
            return Hidden(total)
        later = StepTasks()
        self.round.forward(later, Pending(), first=False)
        self.round.backward(later, Pending(), last=False)
        later.flush()
        each = max(0.0, min(total, self.rounds * later.hidden_s(slowdown)))
        return Hidden(each, total - each)

    def _hidden_early_s(self, slowdown: float) -> float:
        """Seconds hidden in each round before the last, where reductions and gathers of parameters hide nothing."""
        step, one = StepTasks(), self.round
        if one.buckets.reduces_each and self.hybrid.puts_off_weights:
            pending = Pending()
            one.forward(step, pending)
            one.backward_of_weights(step, pending, one.backward_of_inputs(step), last=False)
        elif self.hybrid.copies == 1 and not self.activations.overlaps:
            return 0.0
        else:
            one.passes.forward(step, one.count)
            one.passes.backward(step, one.count)
        step.flush()
        return step.hidden_s(slowdown)

    def step(self, each: bool = False) -> StepTasks:
        """The tasks of a step: forward, backward in reverse order, optimizer. ``each``: micro-batches without overlap
        one by one, rather than as one task of their total length."""
        step, pending, whole = StepTasks(), Pending(), self.round.count == 1
        self.begin(step, pending)
        for number in range(self.rounds - 1 if each and not whole else 0):
            one = self.round if number else self._first()
            one.forward(step, pending, first=number == 0)
            one.backward(step, pending, last=False)
        last = self.round if each or whole else self._last_of_several(step, pending)
        last.forward(step, pending, first=whole)
        if self.hybrid.puts_off_weights:
            last.backward_of_weights(step, pending, last.backward_of_inputs(step), last=True)
        else:
            last.backward(step, pending, last=True)
        self.finish(step, pending)
        step.compute(self.seconds.updates_s, ("optimizer", TOP, TOP))
        step.flush()
        return step

    def _last_of_several(self, step: StepTasks, pending: Pending) -> RankRound:
        """Simulate what comes before the last of several simulated rounds, and return that: with ZeRO-2 the first round
        is simulated, and all others are one; else the last one is."""
        one = self.round
        if not self.hybrid.gathers_once:
            hidden = self._hidden_early_s(self.pricer.prices.device.overlap_slowdown)
            step.compute((one.count - 1) * (one.alone_s - hidden) + (1 - one.adds) * one.arrivals.sums_s,
                         ("micro-batches before the last", TOP, TOP))
            return one
        first = self._first()
        first.forward(step, pending)
        first.backward(step, pending, last=False)
        return one.of_share(self.rounds / (self.rounds - 1), 1 - first.adds)

    def _first(self) -> RankRound:
        """The first of several rounds, which adds to no earlier gradients."""
        return self.round.of_share(self.round.count, 0.0 if self.hybrid.copies == 1 else 1 / self.rounds)

    def begin(self, step: StepTasks, pending: Pending) -> None:
        """Before all micro-batches: read the parameters that these do not read themselves; launch the gathers of stored
        parameters that run once for all."""
        self.round.arrivals.make_leaves(step)
        self.round.buckets.begin(step, pending)

    def finish(self, step: StepTasks, pending: Pending) -> None:
        """After all micro-batches: reduce the gradients that these have not."""
        if not self.round.buckets.reduces_each:
            self.round.buckets.reduce_all(step, pending, self.round.count)
