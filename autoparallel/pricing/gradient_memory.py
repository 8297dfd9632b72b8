"""Memory of the largest gradients of activations, such as those of logits. Each lives from the backward of its reader
to the backward of its own op. (Small ones are left out: saved tensors are freed as they come.)

Gradients of parameters are counted in the whole step, but for those that leave the device, or are let go, in backward.
In a step of one micro-batch none exists at the loss, if they were reset to None: so the bytes that are counted, in the
smallest shards, are subtracted from gradients that are made before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autoparallel.pricing.chains import FUSED_CLASSES, fuses, is_cast, passes_on
from autoparallel.pricing.counts import ExecutionCounts
from autoparallel.pricing.host_gradients import HostGradients
from autoparallel.pricing.live_intervals import Liveness
from autoparallel.pricing.unit_costs import Prices
from autoparallel.search.model.problem import Edge
from autoparallel.strategies.space import TensorUse

#: A gradient counts from this share of the bytes of all results on.
SHARE = 0.02
#: Element-wise ops and losses whose backward is one kernel.
ONE_KERNEL = ("aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax", "aten.nll_loss")


class Gradient(NamedTuple):
    """A gradient as large as the value of a use, and its live interval. ``inside``: made by backward of the use's
    target for itself, so laid out as its input; else the gradient of the source's result."""

    use: TensorUse
    inside: bool
    interval: tuple[int, int]


class GradientMemory:
    """``held``: the gradients that count. A compiler's kernels keep none of values that they fuse. ``of_parameters``:
    which of those leave, and their bytes."""

    def __init__(self, prices: Prices, counts: ExecutionCounts, live: Liveness, of_parameters: HostGradients) -> None:
        self.of_parameters = of_parameters
        self.prices, self.counts, self.live, self.space = prices, counts, live, prices.space

    @cached_property
    def held(self) -> Sequence[Gradient]:
        found = self._found() if self.prices.training else ()
        return sorted(found, key=lambda one: one.interval[0])    # from the loss on

    def edges(self, chosen: Sequence[np.ndarray]) -> Iterator[Edge]:
        """Zero-cost edges with these bytes, for the strategy numbers ``chosen`` by decision."""
        room, until = self._room(), self._first_parameter
        for use, inside, interval in self.held:
            room = room if interval[0] <= until else 0.0
            end, (rows, columns) = use.target if inside else use.source, (chosen[use.source], chosen[use.target])
            s, shape = self.space.strategy_sets[end], (len(rows), len(columns))
            if inside:
                num_bytes = self.prices.local_bytes(use.meta, s.inputs[use.position])[columns][None, :]
            else:
                num_bytes = self.prices.local_bytes(s.output_metas[use.output], s.outputs[use.output])[rows][:, None]
            copies = self.live.share(*self.counts.stages_of[end])    # of blocks, in backward, one at a time
            usages = np.broadcast_to(copies * np.maximum(num_bytes - room, 0.0), shape)
            room = max(0.0, room - float(num_bytes.max()))
            yield Edge(use.source, use.target, np.zeros(shape), usages, interval)

    @cached_property
    def _first_parameter(self) -> int:
        """The time at which backward makes the first gradient of a parameter."""
        readers = [use.target for use in self.space.uses if self.counts.of_parameter[use.source]]
        return 2 * len(self.space) - max(readers, default=0)

    def _room(self) -> float:
        """Bytes of the parameters' gradients that are counted and not there at the loss, each in its smallest shard: of
        a sparse one its rows, of a table on the host none."""
        if not self.counts.hybrid.is_plain:
            return 0.0
        found, sets = self.of_parameters, self.space.strategy_sets
        return sum(float(found.bytes_of(d.index).min()) for d in self.space.decisions
                   if d.kind == "parameter" and sets[d.index].output_metas[0].requires_grad
                   and found.is_here(d.index) and not found.leave(d.index))

    def _found(self) -> Iterator[Gradient]:
        sets, turning = self.space.strategy_sets, 2 * len(self.space)
        last, first = self._last_readers(), {use.source: use for use in reversed(self.space.uses)}
        made = [sum(m.num_bytes for m in s.output_metas if m.requires_grad)
                if decision.kind == "op" and not passes_on(self.space, decision.index) else 0
                for decision, s in zip(self.space.decisions, sets, strict=True)]
        least = SHARE * sum(count * size for count, size in zip(self.counts.multiplicities, made, strict=True))
        for index in range(len(made)):
            turned = int(self.live.starts[index]) + turning - index
            if (use := self._makes_inside(index, least)) is not None:
                yield from [Gradient(use, True, (turned, turned + 1))] * self._buffers(index)
            for use in self._added(index, least):
                yield Gradient(use, False, (turned, turned + 1))
        for index, num_bytes in enumerate(made):
            if num_bytes >= least and num_bytes and not self._is_fused(index) and index in first:
                turned = int(self.live.starts[index]) + turning
                yield Gradient(first[index], False, (turned - last.get(index, index), turned - index + 1))

    def _makes_inside(self, index: int, least: float) -> TensorUse | None:
        """The large input for whose gradient backward needs further buffers; None if no input is such. Element-wise ops
        and losses are assumed to have a backward of several kernels, but for casts and `ONE_KERNEL`."""
        rule = self.space.strategy_sets[index].rule
        decision = self.space.decisions[index]
        if rule is None or rule.op_class not in FUSED_CLASSES or passes_on(self.space, index) or self._is_fused(index) \
                or is_cast(self.space, index) or self.space.graph.nodes[decision.node].op_name.startswith(ONE_KERNEL):
            return None
        return next((use for use in self.space.uses_by.get(index, ())
                     if use.meta.requires_grad and use.meta.num_bytes >= least), None)

    def _buffers(self, index: int) -> int:
        """How many such buffers there are at once: one less than ops that make the gradient, of which the last one
        writes it."""
        rule = self.space.strategy_sets[index].rule
        return max(1, rule.gradient_ops - 1) if rule is not None else 1

    def _added(self, index: int, least: float) -> Iterator[TensorUse]:
        """The use of a value that several ops read: while their gradients are added, there are two."""
        if self.space.decisions[index].kind == "shared_read":
            for use in self.space.uses_by[index]:
                if use.meta.requires_grad and use.meta.num_bytes >= least and not self._is_fused(use.source):
                    yield use

    def _is_fused(self, index: int) -> bool:
        return fuses(self.prices.cluster) and self.prices.chains[index] is not None

    def _last_readers(self) -> dict[int, int]:
        """By decision, the last op of its stage that computes with its results: the first to make their gradient."""
        last: dict[int, int] = {}
        for use in reversed(self.space.uses):  # ordered by target
            if not self.counts.crosses(use) and use.meta.requires_grad:
                reader = last.get(use.target, use.target) if passes_on(self.space, use.target) else use.target
                last[use.source] = max(last.get(use.source, 0), reader)
        return last


__all__ = ["GradientMemory"]
