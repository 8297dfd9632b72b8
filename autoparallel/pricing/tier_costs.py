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
from autoparallel.pricing.state_prices import BesideBackward, StatePrices
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
        self.states = StatePrices(prices, counts, self.parameters)
        self.lookups = HostLookupPrices(prices, counts)
        self.away, self.memo = counts.away, memo
        self.steps_in_backward = counts.hybrid.offload.in_backward

    def gradients_s(self, index: int, compute: ComputeOf) -> np.ndarray:
        """Seconds per step of moving a parameter's gradient to the host that backward does not hide."""
        share = self.memo.once("exposed gradients",
                               lambda: self.gradients.exposed_share(lambda op: _least_s(compute(op))[1]))
        return share * self.gradients.moving_s(index)

    def update_s(self, index: int, prices: Prices, compute: ComputeOf) -> np.ndarray:
        """Seconds per step of a parameter's update, at the ``prices`` of its devices, that backward does not hide."""
        if not self.steps_in_backward:
            return self.states.update_s(index, prices)
        beside: BesideBackward = self.memo.once("beside backward", lambda: self.states.beside_backward(
            lambda op: _least_s(compute(op))[1]))
        return self.states.device_s(index, prices) + beside.exposed_s(index, self.states.host_s(index, prices))

    def fetch_s(self, use: TensorUse, compute: ComputeOf) -> tuple[np.ndarray, np.ndarray]:
        """Seconds per step of fetching a parameter from the host that compute does not hide (in forward, in
        backward)."""
        shares: Fetching = self.memo.once("exposed fetches", lambda: self.parameters.exposed_shares(
            lambda op: _least_s(compute(op))))
        forward, backward = self.parameters.moving_s(use)
        return shares.forward * forward, shares.backward * backward

    def bytes_in(self, index: int, tier: str) -> np.ndarray:
        """Bytes of a parameter, its gradient and its states in a tier."""
        away = self.away[index]
        return (self.states.tier_bytes(index) * (away.states == tier)
                + self.gradients.away_bytes(index) * (away.gradients == tier)
                + self.parameters.away_bytes(index) * (away.parameters == tier))

    def tiled_bytes(self, index: int) -> np.ndarray:
        """Bytes of a parameter's states on disk, which are stepped by tiles in host memory."""
        return self.states.tier_bytes(index) * (self.away[index].states == "disk")


def _least_s(op: Compute) -> tuple[float, float]:
    """Seconds per step of an op (forward, backward with recompute), divided as evenly as can be."""
    return float(op.forward.min()), float((op.backward + op.again).min())


__all__ = ["TierCosts"]
