"""Memory that async windows take. Of activations (`schedule.activation_windows`): results that are made ahead of their
reader, and gradients of layers' outputs that are kept until the gradient of their common input is on its way. Of
experts (`schedule.expert_windows`): rows, and their gradients, while other products run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch

from autoparallel.pricing.counts import ExecutionCounts
from autoparallel.pricing.expert_rows import rows_bytes, sends_rows
from autoparallel.pricing.live_intervals import Liveness
from autoparallel.pricing.step_cost import StepCosts
from autoparallel.schedule.activation_windows import PRODUCTS, overlaps_activations
from autoparallel.schedule.expert_windows import alternates_experts, overlaps_experts, products_between
from autoparallel.search.model.problem import Edge
from autoparallel.strategies.space import TensorUse


class Held(NamedTuple):
    """``what`` a window may hold: the "result" of a use's redistribution, the "gradient" of the output of the layer
    that reads it, or the "rows" of the mixture of experts that is its source; and the live interval."""

    use: TensorUse
    what: Literal["result", "gradient", "rows"]
    interval: tuple[int, int]


class WindowMemory:
    """``held``: what windows may hold, under some strategies."""

    def __init__(self, counts: ExecutionCounts, live: Liveness) -> None:
        self.counts, self.live, self.space = counts, live, counts.space

    @cached_property
    def held(self) -> Sequence[Held]:
        hybrid = self.counts.hybrid
        if alternates_experts(hybrid):
            return list(self._rows_of_others())
        rows = self._rows() if overlaps_experts(hybrid) else ()
        return [*self._ahead(), *self._gradients(), *rows] if overlaps_activations(hybrid) else ()

    def edges(self, costs: StepCosts, chosen: Sequence[np.ndarray]) -> Iterator[Edge]:
        """Zero-cost edges with these bytes, for the strategy numbers ``chosen`` by decision."""
        for use, what, interval in self.held:
            rows, columns = chosen[use.source], chosen[use.target]
            key = "window", what, costs.use_key(use)
            usages = costs.memo.once(key, lambda use=use, what=what: _BYTES[what](costs, use))  # type: ignore[misc]
            if usages.any():
                there = usages[rows[:, None], columns]
                yield Edge(use.source, use.target, np.zeros(there.shape), there, interval)

    def _ahead(self) -> Iterator[Held]:
        """Results that may be made right behind their source, with products of their block before the reader."""
        blocks, products = self.space.blocks, self._products()
        for use in self.space.uses:
            block, at = blocks[use.target], products.get(blocks[use.target], ())
            if (self.space.decisions[use.source].kind == "op" and blocks[use.source] == block
                    and not self.counts.hybrid.recomputed(block) and not self._of_parameter(use.source)
                    and any(use.source < product < use.target for product in at)):
                start = int(self.live.starts[use.target])
                yield Held(use, "result", (start + use.source + 1, start + use.target))

    def _gradients(self) -> Iterator[Held]:
        """Gradients of layers behind the first reader of a shared read."""
        for index, decision in enumerate(self.space.decisions):
            readers = self.space.readers_of.get(index, ()) if decision.kind == "shared_read" else ()
            for reader in readers:
                (x, *_), first = self.space.uses_by[reader], min(readers)
                if (reader > first and x.source == index and x.meta.requires_grad and self._is_layer(reader)
                        and self.space.blocks[reader] == self.space.blocks[index]):
                    turned = int(self.live.starts[reader]) + 2 * len(self.space)
                    yield Held(x, "gradient", (turned - reader + 1, turned - first + 1))

    def _rows_of_others(self) -> Iterator[Held]:
        """Rows of all but one of several micro-batches, and their gradients, while that one computes in the block."""
        blocks = self.space.blocks
        for use in self._of_mixtures():
            inside = [index for index, block in enumerate(blocks) if block == blocks[use.source]]
            start, last = int(self.live.starts[use.target]), inside[-1] if blocks[use.source] else use.source
            turned = start + 2 * len(self.space)
            for _ in range(self.counts.hybrid.copies - 1):
                yield Held(use, "rows", (start + use.source, start + last + 1))
                yield Held(use, "rows", (turned - last, turned - use.source + 1))

    def _of_mixtures(self) -> Iterator[TensorUse]:
        """The first use of the result of each mixture of experts that may send rows."""
        for index, decision in enumerate(self.space.decisions):
            if decision.kind == "op" and sends_rows(self.space.strategy_sets[index]):
                yield from sorted((use for use in self.space.uses if use.source == index),
                                  key=lambda use: use.target)[:1]

    def _rows(self) -> Iterator[Held]:
        """Rows that travel, and their gradients in backward, with products of their block before the reader."""
        blocks, products = self.space.blocks, self._products()
        for use in self._of_mixtures():
            index = use.source
            first = min(self.space.readers_of.get(use.target, ()), default=use.target) if (
                self.space.decisions[use.target].kind == "shared_read") else use.target
            if products_between(index, first, products.get(blocks[index], ()), blocks.__getitem__):
                start = int(self.live.starts[use.target])
                turned = start + 2 * len(self.space)
                yield Held(use, "rows", (start + index + 1, start + first))
                yield Held(use, "rows", (turned - first + 1, turned - index))

    def _of_parameter(self, index: int) -> bool:
        return self.counts.of_parameter[index] or self.counts.views[index]

    def _is_layer(self, index: int) -> bool:
        decision = self.space.decisions[index]
        return decision.kind == "op" and self.space.graph.nodes[decision.node].target is torch.ops.aten.linear.default

    def _products(self) -> Mapping[str | None, Sequence[int]]:
        """By block, the decisions that are products."""
        found = dict[str | None, list[int]]()
        for index, s in enumerate(self.space.strategy_sets):
            if s.rule is not None and s.rule.op_class in PRODUCTS:
                found.setdefault(self.space.blocks[index], []).append(index)
        return found


def _ahead_bytes(costs: StepCosts, use: TensorUse) -> np.ndarray:
    """Bytes of the redistributed copy, if it comes by communication."""
    prices = costs.prices.redistribution
    return np.where(prices.use_travels(use), prices.use_copies(use), 0.0)


def _gradient_bytes(costs: StepCosts, use: TensorUse) -> np.ndarray:
    """Bytes of the gradient of the target's output, if that of its input is a sum over ranks."""
    source, target = costs.space.strategy_sets[use.source], costs.space.strategy_sets[use.target]
    replicated = costs.space.spaces(use.meta).replicated[source.outputs[use.output]]
    held = costs.prices.local_bytes(target.output_metas[0], target.outputs[0])
    return np.where(replicated[:, None], held[None, :], 0.0)


def _rows_bytes(costs: StepCosts, use: TensorUse) -> np.ndarray:
    """Bytes of the rows of the mixture that is the source."""
    source, target = costs.space.strategy_sets[use.source], costs.space.strategy_sets[use.target]
    held = rows_bytes(costs.prices.op_of(use.source).inside, len(source.strategies))
    return np.broadcast_to(held[:, None], (len(source.strategies), len(target.strategies)))


_BYTES = {"result": _ahead_bytes, "gradient": _gradient_bytes, "rows": _rows_bytes}

__all__ = ["WindowMemory"]
