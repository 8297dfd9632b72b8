"""Seconds and bytes of a parameter's training state, whose optimizer states may live outside of the device."""

from __future__ import annotations

import numpy as np

from autoparallel.pricing.counts import ExecutionCounts
from autoparallel.pricing.host_parameters import HostParameters
from autoparallel.pricing.unit_costs import Prices
from autoparallel.schedule.tiers import buffer_bytes
from cost_models import memory, offload


class StatePrices:
    """Prices of states in the tiers of their parameters, on the fullest rank; arrays by strategy of a parameter."""

    def __init__(self, prices: Prices, counts: ExecutionCounts, parameters: HostParameters) -> None:
        self.prices, self.counts, self.space, self.parameters = prices, counts, prices.space, parameters

    def device_bytes(self, index: int) -> np.ndarray:
        """Bytes of the parameter, unless it is in another tier, of its gradient and the optimizer states that stay."""
        s, rows = self.space.strategy_sets[index], self._rows(index)
        whole = self.prices.parameter_bytes(s) - self.tier_bytes(index) - self.parameters.away_bytes(index)
        if rows < 1:
            kept = self.prices.kept(s.output_metas[0])
            state = memory.training_state(self.prices.elements(s), kept, self.prices.optimizer)
            whole = whole - (1 - rows) * state.gradients
        return whole

    def _rows(self, index: int) -> float:
        """The share of a parameter's rows that have a gradient and are stepped."""
        return self.counts.sparse.share(index, self.counts.hybrid.micro_batches)

    def tier_bytes(self, index: int) -> np.ndarray:
        """Bytes of optimizer states in the parameter's tier, if that is not the device."""
        kept = self.prices.kept(self.space.strategy_sets[index].output_metas[0])
        return memory.training_state(self._moved(index), kept, self.prices.optimizer).optimizer

    def update_s(self, index: int, prices: Prices) -> np.ndarray:
        """Seconds of the optimizer's update, at the ``prices`` of the parameter's devices: of what stays on them, then
        of what is stepped on the host. Of a table with sparse gradients, of the rows that were looked up."""
        s, away = self.space.strategy_sets[index], self.counts.away[index]
        rows, whole_s = self._rows(index), prices.parameter_s(s)
        by_row = offload.SPARSE_ELEMENT_S if rows < 1 else 0.0
        if not away.is_away or not whole_s.any():
            by_row *= self.prices.cluster.host.shared_memory
            return rows * (whole_s + by_row * (whole_s > 0) * self.prices.elements(s))
        moved, elements = self._moved(index), self.prices.elements(s)
        found = offload.host_step(moved, self.prices.kept(s.output_metas[0]), self.prices.optimizer,
                                  self.prices.cluster, away.states == "disk", away.moves_gradients,
                                  away.moves_parameters, away.in_tier("disk"))
        return rows * (whole_s * (1 - moved / np.maximum(elements, 1)) + found.total_s + by_row * moved)

    def _moved(self, index: int) -> np.ndarray:
        """Elements whose states are in the tier."""
        s = self.space.strategy_sets[index]
        meta = s.output_metas[0]
        if not (meta.requires_grad and self.prices.training):
            return np.zeros(len(s.strategies))
        return self.counts.away[index].moved(self.prices.elements(s), meta.dtype.itemsize)

    def tiles_bytes(self, disk_bytes: float) -> float:
        """Bytes of host memory for tiles of a rank that has so many bytes of states on disk."""
        states = memory.recipe(self.prices.optimizer).num_states
        return states * buffer_bytes(disk_bytes / states, self.counts.hybrid.offload.tile_bytes) if states else 0.0


__all__ = ["StatePrices"]
