"""Seconds of lookups in the memory of the host (`Hybrid.on_host`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autoparallel.pricing.counts import ExecutionCounts
from autoparallel.pricing.op_costs import share_of_work
from autoparallel.pricing.unit_costs import Prices
from cost_models import offload


class LookupPrice(NamedTuple):
    """Seconds of one lookup, by strategy: on the host in ``forward`` and ``backward``, which makes the table's
    gradient; ``there``: of ids to the host and of results to the device; ``back``: of the results' gradients to the
    host, and of other operands' to the device."""

    forward: np.ndarray
    backward: np.ndarray
    there: np.ndarray
    back: np.ndarray


class HostLookupPrices:
    """Prices of lookups on the host, on the fullest rank; arrays by strategy. (Of their tables `TierCosts`.)

    The rows that are looked up and the results pass the host's memory, and of a dense gradient all rows: it is filled
    with zeros first. Nothing of it is counted as hidden: the device waits for the results, and backward's last
    ops are the host's.
    """

    def __init__(self, prices: Prices, counts: ExecutionCounts) -> None:
        self.prices, self.counts, self.space = prices, counts, prices.space

    def runs(self, index: int) -> bool:
        """Whether an op runs on the host."""
        return index in self.counts.lookups.ops

    def is_table(self, index: int) -> bool:
        """Whether a decision is a table on the host, or a shared read of one."""
        return index in self.counts.lookups.tables

    def touches(self, index: int) -> bool:
        """Whether a decision is either."""
        return self.runs(index) or self.is_table(index)

    def price(self, index: int) -> LookupPrice:
        """Of one execution of a lookup."""
        s, sparse = self.space.strategy_sets[index], self.space.uses_by[index][0].source in self.counts.sparse.density
        (result, *_), zeros = s.output_metas, np.zeros(len(s.strategies))
        results = self.prices.local_bytes(result, s.outputs[0])
        table, *others = (self.prices.local_bytes(m, n) for m, n in zip(s.input_metas, s.inputs, strict=True))
        flops = s.rule.flops if s.rule is not None else 0.0
        rows = np.maximum(flops * share_of_work(s) * result.dtype.itemsize, zeros)
        operands = sum(others, zeros)
        there = self._crossing_s(operands, False) + self._crossing_s(results, True)
        forward = self._work_s(rows + results + operands)
        if not (self.prices.training and result.requires_grad):
            return LookupPrice(forward, zeros, there, zeros)
        backward, back = results + operands, self._crossing_s(results, False)
        if s.input_metas[0].requires_grad:
            backward = backward + (0 if sparse else table) + 2 * rows
        for meta, num_bytes in zip(s.input_metas[1:], others, strict=True):
            if meta.requires_grad:    # weights of the rows of bags
                backward, back = backward + rows + num_bytes, back + self._crossing_s(num_bytes, True)
        return LookupPrice(forward, self._work_s(backward), there, back)

    def sums_s(self, num_bytes: np.ndarray) -> np.ndarray:
        """Seconds of adding up gradients, which move so many bytes of the host's memory."""
        return np.asarray(offload.traffic_s(num_bytes, self.prices.cluster))

    def _work_s(self, num_bytes: np.ndarray) -> np.ndarray:
        """Seconds of an op that moves so many bytes of the host's memory, no less than its call."""
        return self.sums_s(num_bytes) + max(kind.device.launch_s for kind in self.prices.kinds)

    def _crossing_s(self, num_bytes: np.ndarray, to_device: bool) -> np.ndarray:
        """Seconds between the two memories; none where they are one."""
        if self.prices.cluster.host.shared_memory:
            return np.zeros(len(num_bytes))
        return np.asarray(offload.host_copy_s(num_bytes, self.prices.cluster, to_device))


__all__ = ["HostLookupPrices", "LookupPrice"]
