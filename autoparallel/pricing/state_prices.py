"""Seconds and bytes of a parameter's training state, whose optimizer states may live outside of the device."""

from __future__ import annotations

import numpy as np

from autoparallel.pricing.host_parameters import HostParameters
from autoparallel.pricing.unit_costs import Prices
from autoparallel.schedule.tiers import Offload, buffer_bytes
from autoparallel.strategies.space import StrategySet
from cost_models import memory, offload


class StatePrices:
    """Prices of states in the tier of ``offload``, on the fullest rank; arrays by strategy of a parameter."""

    def __init__(self, prices: Prices, away: Offload, parameters: HostParameters) -> None:
        self.prices, self.away, self.parameters = prices, away, parameters

    def device_bytes(self, s: StrategySet) -> np.ndarray:
        """Bytes of the parameter, unless it is in another tier, of its gradient and the optimizer states that stay."""
        return self.prices.parameter_bytes(s) - self.tier_bytes(s) - self.parameters.away_bytes(s)

    def tier_bytes(self, s: StrategySet) -> np.ndarray:
        """Bytes of optimizer states in the tier."""
        kept = self.prices.kept(s.output_metas[0])
        return memory.training_state(self._moved(s), kept, self.prices.optimizer).optimizer

    def update_s(self, s: StrategySet, prices: Prices) -> np.ndarray:
        """Seconds of the optimizer's update, at the ``prices`` of the parameter's devices: of what stays on them, then
        of what is stepped on the host."""
        whole_s = prices.parameter_s(s)
        if not self.away.is_away or not whole_s.any():
            return whole_s
        moved, elements = self._moved(s), self.prices.elements(s)
        found = offload.host_step(moved, self.prices.kept(s.output_metas[0]), self.prices.optimizer,
                                  self.prices.cluster, self.away.states == "disk", self.away.moves_gradients,
                                  self.away.moves_parameters, self.away.in_tier("disk"))
        return whole_s * (1 - moved / np.maximum(elements, 1)) + found.total_s

    def _moved(self, s: StrategySet) -> np.ndarray:
        """Elements whose states are in the tier."""
        meta = s.output_metas[0]
        if not (meta.requires_grad and self.prices.training):
            return np.zeros(len(s.strategies))
        return self.away.moved(self.prices.elements(s), meta.dtype.itemsize)

    def host_bytes(self, tier_bytes: float) -> float:
        """Bytes of host memory of a rank that has so many in the tier: themselves, or tiles of those on disk."""
        if self.away.states != "disk":
            return tier_bytes
        states = memory.recipe(self.prices.optimizer).num_states
        return states * buffer_bytes(tier_bytes / states, self.away.tile_bytes) if states else 0.0


__all__ = ["StatePrices"]
