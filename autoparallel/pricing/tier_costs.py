"""What training state outside of the device costs in a step: seconds that compute does not hide, and bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from autoparallel.pricing.counts import ExecutionCounts
from autoparallel.pricing.host_gradients import HostGradients
from autoparallel.pricing.host_lookups import HostLookupPrices
from autoparallel.pricing.host_parameters import Fetching, HostParameters
from autoparallel.pricing.memo import Memo
from autoparallel.pricing.state_prices import StatePrices
from autoparallel.pricing.unit_costs import Prices
from autoparallel.strategies.space import TensorUse


class Compute(Protocol):
    """Seconds of an op in a step, by strategy."""

    @property
    def forward(self) -> np.ndarray: ...

    @property
    def again(self) -> np.ndarray: ...

    @property
    def backward(self) -> np.ndarray: ...


#: From an op's decision, its seconds in a step.
ComputeOf = Callable[[int], Compute]


class TierCosts:
    """States, gradients and parameters in the tiers of a step configuration, and tables on the host; arrays by strategy
    of a parameter."""

    def __init__(self, prices: Prices, counts: ExecutionCounts, memo: Memo) -> None:
        self.gradients, self.parameters = HostGradients(prices, counts), HostParameters(prices, counts)
        self.states = StatePrices(prices, counts.hybrid.offload, self.parameters)
        self.lookups = HostLookupPrices(prices, counts)
        self.space, self.memo, self._states_in = prices.space, memo, counts.hybrid.offload.states

    def gradients_s(self, index: int, compute: ComputeOf) -> np.ndarray:
        """Seconds per step of moving a parameter's gradient to the host that backward does not hide."""
        share = self.memo.once("exposed gradients",
                               lambda: self.gradients.exposed_share(lambda op: _least_s(compute(op))[1]))
        return share * self.gradients.moving_s(index)

    def fetch_s(self, use: TensorUse, compute: ComputeOf) -> tuple[np.ndarray, np.ndarray]:
        """Seconds per step of fetching a parameter from the host that compute does not hide (in forward, in
        backward)."""
        shares: Fetching = self.memo.once("exposed fetches", lambda: self.parameters.exposed_shares(
            lambda op: _least_s(compute(op))))
        forward, backward = self.parameters.moving_s(use)
        return shares.forward * forward, shares.backward * backward

    def bytes_in(self, index: int, tier: str) -> np.ndarray:
        """Bytes of a parameter, its gradient and its states in a tier."""
        s = self.space.strategy_sets[index]
        return self.states.tier_bytes(s) * (self._states_in == tier) + self.others_in(index, tier)

    def others_in(self, index: int, tier: str) -> np.ndarray:
        """Bytes of a parameter and its gradient in a tier."""
        s = self.space.strategy_sets[index]
        if self.lookups.is_table(index):
            return self.lookups.table_bytes(index) * (tier == "host")
        return (self.gradients.away_bytes(index) * (self.gradients.tier == tier)
                + self.parameters.away_bytes(s) * (self.parameters.tier == tier))


def _least_s(op: Compute) -> tuple[float, float]:
    """Seconds per step of an op (forward, backward with recompute), divided as evenly as can be."""
    return float(op.forward.min()), float((op.backward + op.again).min())


__all__ = ["TierCosts"]
