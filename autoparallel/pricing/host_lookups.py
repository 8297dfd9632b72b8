"""Seconds of lookups in the memory of the host (`Hybrid.on_host`), and of what misses of caches (`Hybrid.cached`) move.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autoparallel.capture import TensorMeta
from autoparallel.layout import largest_local_shape
from autoparallel.pricing.counts import ExecutionCounts
from autoparallel.pricing.op_costs import kept_precision, share_of_work
from autoparallel.pricing.parameter_prices import elements_of
from autoparallel.pricing.unit_costs import Prices
from autoparallel.schedule.table_caches import TableCache
from cost_models import memory, offload

#: Bytes of a cache (`kernels.table_cache`): for each slot its row, its last use and whether it changed; for each row of
#: the table the number of its slot; for each row of a gradient its number.
SLOT_BYTES, SLOT_NUMBER_BYTES, ID_BYTES = 17, 4, 8
#: Kernels of a lookup with misses, and of its backward, beside those of the lookup (counted as torch dispatches them).
CACHE_KERNELS = 35


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
    ops are the host's. A cached table is looked up and stepped on the device; of each lookup's misses, the rows and
    those of the optimizer's states come up, and as many, which were stepped before, go down: none of it hidden.
    """

    def __init__(self, prices: Prices, counts: ExecutionCounts) -> None:
        self.prices, self.counts, self.space = prices, counts, prices.space

    def runs(self, index: int) -> bool:
        """Whether an op runs on the host."""
        return index in self.counts.lookups.ops

    def is_table(self, index: int) -> bool:
        """Whether a decision is a table on the host, or a shared read of one."""
        return index in self.counts.lookups.tables

    def sums_there(self, index: int) -> bool:
        """Whether a decision is a table, or a shared read of one, whose gradients are added up on the host."""
        return self.is_table(index) and index not in self.counts.lookups.cached

    def place(self, index: int) -> tuple[bool, bool, TableCache | None]:
        """Whether a decision is an op on the host, whether it is a table there, and its cache: decisions with different
        ones cost differently."""
        return self.runs(index), self.is_table(index), self.counts.lookups.cached.get(index)

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

    def misses(self, index: int) -> LookupPrice:
        """Of one execution of a lookup in a cache, beside the op on the device: what its misses move. Those of backward
        are counted in forward."""
        s, cache, parameter = self.space.strategy_sets[index], self.counts.lookups.cached[index], self._table_of(index)
        zeros, meta = np.zeros(len(s.strategies)), s.input_metas[0]
        table = self.prices.local_bytes(meta, s.inputs[0])
        flops = s.rule.flops if s.rule is not None else 0.0
        looked_up = np.minimum(flops * share_of_work(s) * meta.dtype.itemsize, table)
        trained = self.prices.training and meta.requires_grad
        up = (1 - cache.hits) * looked_up * (self._columns(parameter) if trained else 1.0)
        down = up * trained
        there = self._crossing_s(up, True) + (self._crossing_s(down, False) if trained else 0.0)
        return LookupPrice(self._work_s(2 * (up + down)), zeros, there, zeros)

    @property
    def calls_s(self) -> float:
        """Seconds of the kernels that find the rows of a lookup in a cache."""
        return CACHE_KERNELS * max(kind.device.launch_s for kind in self.prices.kinds)

    def cache_bytes(self, index: int) -> np.ndarray:
        """Bytes on the device of a cached table: the rows in its slots, with those of the states, its gradient's rows
        with their numbers, the slot of each row, and of each slot its row, last use and whether it changed."""
        s, cache = self.space.strategy_sets[index], self.counts.lookups.cached[index]
        (meta,), elements = s.output_metas, elements_of(self.prices, s)
        rows = self._rows(meta, s.outputs[0])
        slots = np.minimum(rows, np.ceil(cache.rows * rows / meta.shape[0]))
        found = slots * (elements / np.maximum(rows, 1) * meta.dtype.itemsize * self._columns(index) + SLOT_BYTES)
        if meta.requires_grad and self.prices.training:
            state = memory.training_state(elements, kept_precision(meta, self.prices.cluster), self.prices.optimizer)
            looked_up = self.counts.sparse.share(index, self.counts.hybrid.micro_batches)
            summed = state.gradients + self.counts.accumulator_bytes(meta) * elements
            found = found + looked_up * (summed + rows * ID_BYTES)
        return np.asarray(found + rows * SLOT_NUMBER_BYTES)

    def _rows(self, meta: TensorMeta, numbers: np.ndarray) -> np.ndarray:
        """Rows of a table on the fullest rank, by layout number in ``numbers``."""
        space = self.space.spaces(meta)
        by_layout = {number: largest_local_shape(meta.shape, space.layouts[number], self.space.mesh_shape)[0]
                     for number in np.unique(numbers).tolist()}
        return np.array([by_layout[number] for number in numbers.tolist()], float)

    def _columns(self, index: int) -> float:
        """How many times a cached table's bytes a row has with its optimizer states."""
        meta = self.space.strategy_sets[index].output_metas[0]
        if not (meta.requires_grad and self.prices.training):
            return 1.0
        state = memory.training_state(1.0, kept_precision(meta, self.prices.cluster), self.prices.optimizer)
        return float(state.parameters + state.optimizer) / meta.dtype.itemsize

    def _table_of(self, index: int) -> int:
        """The parameter that a lookup reads."""
        source = self.space.uses_by[index][0].source
        return source if self.space.decisions[source].kind == "parameter" else self._table_of(source)

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
