"""Linear layers in pieces that overlap with a redistribution (`schedule.pieces`), as tasks of the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoparallel.layout import Step
from autoparallel.layout.shapes import largest_local_shape
from autoparallel.pricing.layer_overlap import OF_WEIGHT
from autoparallel.pricing.rank_reads import RankReads, Timed, TimedStep
from autoparallel.pricing.redistribution_costs import PricedStep
from autoparallel.pricing.step_cost import prices_of
from autoparallel.pricing.step_tasks import StepTasks
from autoparallel.schedule.pieces import Pieced
from autoparallel.strategies.space import TensorUse
from cost_models import collectives


@dataclass(frozen=True)
class PiecedStep:
    """Layers that run in ``pieces`` at decision ``place``; seconds are those of all micro-batches of a step.

    ``step``: the redistribution of one piece. ``forward_s``, ``operand_s``: the products of one piece, and those of its
    operand's gradient; ``weights_s``: the products of the weights' gradients; ``joined_s``: copies of pieces into whole
    tensors (forward, backward); ``parts_s``: what the search counts of all of this (forward, backward): layers and
    redistribution whole, one after the other.
    """

    place: int
    layers: Sequence[int]
    behind: bool
    pieces: int
    step: TimedStep
    forward_s: float
    operand_s: float
    weights_s: float
    joined_s: tuple[float, float]
    parts_s: tuple[float, float]

    def forward(self, step: StepTasks, count: float, what: str = "forward", counted: bool = True) -> None:
        """Run forward of one of ``count`` micro-batches; ``counted``: whether the search counts it."""
        run = self._made_and_sent if self.behind else self._awaited_and_read
        run(step, self.step.forward, count, what, self.forward_s)
        self._compute(step, what, self.joined_s[0] / count)
        seconds = self.pieces * (self.forward_s + self.step.forward.seconds) + self.joined_s[0]
        step.extra_s += (seconds - counted * self.parts_s[0]) / count

    def backward(self, step: StepTasks, count: float) -> None:
        """Run backward of one of ``count`` micro-batches."""
        sent = self.step.backward
        if self.behind:
            self._awaited_and_read(step, sent, count, "backward", self.operand_s)
            self._compute(step, "backward", self.weights_s / count)
        else:
            self._made_and_sent(step, sent, count, "backward", self.operand_s, self.weights_s)
        self._compute(step, "backward", self.joined_s[1] / count)
        seconds = self.pieces * (self.operand_s + sent.seconds) + self.weights_s + self.joined_s[1]
        step.extra_s += (seconds - self.parts_s[1]) / count

    def _awaited_and_read(self, step: StepTasks, sent: Timed, count: float, what: str, each_s: float) -> None:
        """The redistributions of all pieces start; the products of each wait for it."""
        for tasks in [self._issue(step, sent, count) for _ in range(self.pieces)]:
            step.wait(tasks)
            self._compute(step, what, each_s / count)

    def _made_and_sent(self, step: StepTasks, sent: Timed, count: float, what: str, each_s: float,
                       after_s: float = 0.0) -> None:
        """The redistribution of each piece starts when its products are made; ``after_s``: compute beside the last."""
        begun = list[int]()
        for _ in range(self.pieces):
            self._compute(step, what, each_s / count)
            begun += self._issue(step, sent, count)
        self._compute(step, what, after_s / count)
        step.wait(begun)

    def _compute(self, step: StepTasks, what: str, seconds: float) -> None:
        step.compute(seconds, (what, self.place, self.place))

    def _issue(self, step: StepTasks, timed: Timed, count: float) -> list[int]:
        label = ("activations in pieces", self.step.target, self.step.target)
        return [step.issue([timed.per(count)], label)] if timed.message is not None and timed.seconds else []


def pieced_step(reads: RankReads, use: TensorUse, priced: PricedStep, whole: TimedStep, pieced: Pieced, place: int
                ) -> PiecedStep:
    """The tasks of layers in pieces by the step ``priced`` of a use; ``whole``: the step of the whole tensor."""
    pieces, counts = reads.counts.hybrid.pieces, reads.counts
    forward_s = operand_s = weights_s = made = read = 0.0
    times = counts.op_times(pieced.layers[0], reads.stage)[1]
    parts = [whole.forward.seconds, whole.backward.seconds]
    for layer in pieced.layers:
        prices, number = prices_of(reads.pricer.prices, counts, layer, reads.stage), reads.numbers[layer]
        own, cost = prices.piece_of(layer, pieces), reads.pricer.costs.of(layer, reads.stage)
        forward_s += times * float(own.forward_s[number])
        operand_s += (1 - OF_WEIGHT) * times * float(own.backward_s[number])
        weights_s += OF_WEIGHT * float(cost.backward[number])
        parts[0] += float(cost.forward[number])
        parts[1] += float(cost.backward[number])
        s = reads.space.strategy_sets[layer]
        made += float(prices.local_bytes(s.output_metas[0], s.outputs[0][number : number + 1])[0])
        read = float(prices.local_bytes(s.input_metas[0], s.inputs[0][number : number + 1])[0])
    joined = [times * float(collectives.copy_s(num_bytes, reads.pricer.prices.device))
              for num_bytes in _copied(reads, use, priced.step, pieced, read, made)]
    return PiecedStep(place, pieced.layers, pieced.behind, pieces, reads.piece_of(use, priced, pieces), forward_s,
                      operand_s, weights_s, (joined[0], joined[1]), (parts[0], parts[1]))


def _copied(reads: RankReads, use: TensorUse, step: Step, pieced: Pieced, read: float, made: float
            ) -> tuple[float, float]:
    """Bytes that pieces copy (forward, backward) and whole layers do not. ``read``, ``made``: of the layers' operand,
    and of their results.

    What is received is put in its place: a copy, where the whole tensor needs none. Products are made in their place,
    from pieces as they lie, if these are contiguous.
    """
    meta, mesh_shape = use.meta, reads.space.mesh_shape
    before, after = (math.prod(largest_local_shape(meta.shape, layout, mesh_shape)) * meta.dtype.itemsize
                     for layout in (step.before, step.after))
    received = all(placement.in_order for placement in (step.source, step.target) if placement.is_shard)
    leading = largest_local_shape(meta.shape, step.before, mesh_shape)[: pieced.cut.dim]
    apart = pieced.cut.inside or math.prod(leading) > 1
    if pieced.behind:
        return received * after + apart * read, received * before + apart * read
    return received * after + apart * made, received * before + apart * made


__all__ = ["PiecedStep", "pieced_step"]
