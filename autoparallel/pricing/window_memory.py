"""Memory that async windows of activations take (`schedule.activation_windows`): results that are made ahead of their
reader, and gradients of layers' outputs that are kept until the gradient of their common input is on its way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from autoparallel.pricing.counts import ExecutionCounts
from autoparallel.pricing.live_intervals import Liveness
from autoparallel.pricing.step_cost import StepCosts
from autoparallel.schedule.activation_windows import PRODUCTS, overlaps_activations
from autoparallel.search.model.problem import Edge
from autoparallel.strategies.space import TensorUse


class Held(NamedTuple):
    """What a window may hold: the result of a use's redistribution, or (``gradient``) the gradient of the output of the
    layer that reads it; and its live interval."""

    use: TensorUse
    gradient: bool
    interval: tuple[int, int]


class WindowMemory:
    """``held``: what windows may hold, under some strategies."""

    def __init__(self, counts: ExecutionCounts, live: Liveness) -> None:
        self.counts, self.live, self.space = counts, live, counts.space

    @cached_property
    def held(self) -> Sequence[Held]:
        return [*self._ahead(), *self._gradients()] if overlaps_activations(self.counts.hybrid) else ()

    def edges(self, costs: StepCosts, chosen: Sequence[np.ndarray]) -> Iterator[Edge]:
        """Zero-cost edges with these bytes, for the strategy numbers ``chosen`` by decision."""
        for use, gradient, interval in self.held:
            rows, columns = chosen[use.source], chosen[use.target]
            key = "window", gradient, costs.use_key(use)
            usages = costs.memo.once(key, lambda use=use, gradient=gradient: (  # type: ignore[misc]
                _gradient_bytes if gradient else _ahead_bytes)(costs, use))
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
                yield Held(use, False, (start + use.source + 1, start + use.target))

    def _gradients(self) -> Iterator[Held]:
        """Gradients of layers behind the first reader of a shared read."""
        for index, decision in enumerate(self.space.decisions):
            readers = self.space.readers_of.get(index, ()) if decision.kind == "shared_read" else ()
            for reader in readers:
                (x, *_), first = self.space.uses_by[reader], min(readers)
                if (reader > first and x.source == index and x.meta.requires_grad and self._is_layer(reader)
                        and self.space.blocks[reader] == self.space.blocks[index]):
                    turned = int(self.live.starts[reader]) + 2 * len(self.space)
                    yield Held(x, True, (turned - reader + 1, turned - first + 1))

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


__all__ = ["WindowMemory"]
