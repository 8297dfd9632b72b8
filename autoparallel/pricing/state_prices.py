"""Seconds and bytes of a parameter's training state, whose optimizer states may live outside of the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from autoparallel.pricing.counts import ExecutionCounts
from autoparallel.pricing.host_parameters import HostParameters
from autoparallel.pricing.op_costs import kept_precision
from autoparallel.pricing.parameter_prices import elements_of, parameter_update_s, training_bytes
from autoparallel.pricing.unit_costs import Prices
from autoparallel.schedule.tiers import buffer_bytes
from cost_models import memory, offload


class BesideBackward(NamedTuple):
    """How much of the steps on the host backward hides, if both are divided evenly over all devices. ``seconds``: of
    backward, by parameter, in proportion to the parameter's step; ``last``: the share of the last tile in all steps,
    which nothing hides, since its gradients come at the end of backward."""

    seconds: Mapping[int, float]
    last: float

    def exposed_s(self, index: int, step_s: np.ndarray) -> np.ndarray:
        """The exposed seconds of a parameter's step of ``step_s`` seconds."""
        return np.maximum(step_s - self.seconds.get(index, 0.0), self.last * step_s)


class StatePrices:
    """Prices of states in the tiers of their parameters, on the fullest rank; arrays by strategy of a parameter."""

    def __init__(self, prices: Prices, counts: ExecutionCounts, parameters: HostParameters) -> None:
        self.prices, self.counts, self.space, self.parameters = prices, counts, prices.space, parameters

    def device_bytes(self, index: int) -> np.ndarray:
        """Bytes of the parameter, unless it is in another tier, of its gradient and the optimizer states that stay."""
        s, rows = self.space.strategy_sets[index], self._rows(index)
        whole = training_bytes(self.prices, s) - self.tier_bytes(index) - self.parameters.away_bytes(index)
        if rows < 1:
            kept = kept_precision(s.output_metas[0], self.prices.cluster)
            state = memory.training_state(elements_of(self.prices, s), kept, self.prices.optimizer)
            whole = whole - (1 - rows) * state.gradients
        return whole

    def _rows(self, index: int) -> float:
        """The share of a parameter's rows that have a gradient and are stepped."""
        return self.counts.sparse.share(index, self.counts.hybrid.micro_batches)

    def tier_bytes(self, index: int) -> np.ndarray:
        """Bytes of optimizer states in the parameter's tier, if that is not the device."""
        kept = kept_precision(self.space.strategy_sets[index].output_metas[0], self.prices.cluster)
        return memory.training_state(self._moved(index), kept, self.prices.optimizer).optimizer

    def update_s(self, index: int, prices: Prices) -> np.ndarray:
        """Seconds of the optimizer's update, at the ``prices`` of the parameter's devices: of what stays on them, then
        of what is stepped on the host. Of a table with sparse gradients, of the rows that were looked up."""
        return self.device_s(index, prices) + self.host_s(index, prices)

    def device_s(self, index: int, prices: Prices) -> np.ndarray:
        """As `update_s`, of what is stepped on the devices."""
        s, rows = self.space.strategy_sets[index], self._rows(index)
        whole_s, elements = parameter_update_s(prices, s), elements_of(self.prices, s)
        if self._steps_there(index, whole_s):
            return rows * whole_s * (1 - self._moved(index) / np.maximum(elements, 1))
        by_row = self._by_row(index) * self.prices.cluster.host.shared_memory
        return rows * (whole_s + by_row * (whole_s > 0) * elements)

    def host_s(self, index: int, prices: Prices) -> np.ndarray:
        """As `update_s`, of what is stepped on the host."""
        s, away = self.space.strategy_sets[index], self.counts.away[index]
        if not self._steps_there(index, parameter_update_s(prices, s)):
            return np.zeros(len(s.strategies))
        moved = self._moved(index)
        found = offload.host_step(moved, kept_precision(s.output_metas[0], self.prices.cluster), self.prices.optimizer,
                                  self.prices.cluster, away.states == "disk", away.moves_gradients,
                                  away.moves_parameters, away.in_tier("disk"))
        return self._rows(index) * (np.asarray(found.total_s) + self._by_row(index) * moved)

    def _steps_there(self, index: int, whole_s: np.ndarray) -> bool:
        """Whether the host steps a parameter; of a cached table the device does, on the rows that it holds."""
        return self.counts.away[index].is_away and index not in self.counts.lookups.cached and bool(whole_s.any())

    def _by_row(self, index: int) -> float:
        return offload.SPARSE_ELEMENT_S if self._rows(index) < 1 else 0.0

    def beside_backward(self, backward_s: Callable[[int], float]) -> BesideBackward:
        """What backward hides of the host's steps, where it goes on meanwhile. ``backward_s``: seconds of an op's
        backward. Nothing where host and device are the same cores."""
        if not self.counts.hybrid.offload.in_backward or self.prices.cluster.host.shared_memory:
            return BesideBackward({}, 1.0)
        steps, num_bytes = dict[int, float](), 0.0
        for one in self.space.decisions:
            if one.kind == "parameter" and self._moved(one.index).any():
                many = self.counts.multiplicities[one.index]
                steps[one.index] = many * float(self.host_s(one.index, self.prices).min())
                itemsize = self.space.strategy_sets[one.index].output_metas[0].dtype.itemsize
                num_bytes += many * float(self._moved(one.index).min()) * itemsize
        beside_s = sum(backward_s(one.index) for one in self.space.decisions if one.kind == "op")
        there_s = sum(steps.values())
        last = min(1.0, self.counts.hybrid.offload.tile_bytes / num_bytes) if num_bytes else 1.0
        return BesideBackward({index: beside_s * step_s / there_s / self.counts.multiplicities[index]
                               for index, step_s in steps.items()} if there_s else {}, last)

    def _moved(self, index: int) -> np.ndarray:
        """Elements whose states are in the tier."""
        s = self.space.strategy_sets[index]
        meta = s.output_metas[0]
        if not (meta.requires_grad and self.prices.training):
            return np.zeros(len(s.strategies))
        return self.counts.away[index].moved(elements_of(self.prices, s), meta.dtype.itemsize)

    def tiles_bytes(self, disk_bytes: float) -> float:
        """Bytes of host memory for tiles of a rank that has so many bytes of states on disk."""
        states = memory.recipe(self.prices.optimizer).num_states
        return states * buffer_bytes(disk_bytes / states, self.counts.hybrid.offload.tile_bytes) if states else 0.0


__all__ = ["StatePrices"]
