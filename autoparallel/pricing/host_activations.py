"""Seconds of saved tensors of blocks on their way to the host's memory or disk, and back (`Hybrid.saved_on`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autoparallel.pricing.counts import ExecutionCounts
from autoparallel.pricing.memo import Memo
from autoparallel.pricing.unit_costs import Prices
from autoparallel.strategies.space import TensorUse
from cost_models import offload

#: Seconds of the copies that leave the device, and of those back; by strategy.
Both = tuple[np.ndarray, np.ndarray]


class HostActivations:
    """Exposed seconds of these copies, on the fullest rank. ``bytes_of``: bytes of a decision's results, by strategy.

    Copies overlap with compute: those that leave with forward, those back with backward and recompute. Exposed is the
    time by which all copies of a direction exceed all compute of that pass, both divided evenly over the devices. Where
    host and device share one memory, forward makes each copy to the host itself, and no copy goes back.
    """

    def __init__(self, prices: Prices, counts: ExecutionCounts, memo: Memo, bytes_of: Callable[[int], np.ndarray]
                 ) -> None:
        self.prices, self.counts, self.space, self.memo, self.bytes_of = prices, counts, prices.space, memo, bytes_of

    def of(self, index: int) -> Both:
        """Of an op's results, per step."""
        times = self.counts.offloads(index)
        if not times.there:
            nothing = np.zeros(len(self.space.strategy_sets[index].strategies))
            return nothing, nothing
        there, back = self._moved_s(times, self.bytes_of(index))
        return self._exposed[0] * there, self._exposed[1] * back

    def of_copy(self, use: TensorUse) -> Both:
        """Of a use's redistributed copy, per step; by (source strategy, target strategy)."""
        there, back = self._moved_s(self.counts.offloads_copy(use), self.prices.redistribution.use_copies(use))
        return self._exposed[0] * there, self._exposed[1] * back

    @property
    def _exposed(self) -> tuple[float, float]:
        """The shares of copies that leave and that come back which are exposed."""
        if self.prices.cluster.host.shared_memory and not self._on_disk:
            return 1.0, 0.0
        there, back = self.memo.once("exposed copies", self._exceeding)
        return there, 1.0 if self.counts.hybrid.puts_off_weights else back    # whose two parts await each copy

    def _exceeding(self) -> tuple[float, float]:
        ops = [decision.index for decision in self.space.decisions if decision.kind == "op"]
        times = {index: times for index in ops if (times := self.counts.offloads(index)).there}
        moved = [self._moved_s(some, self.bytes_of(index)) for index, some in times.items()]
        forward_s = backward_s = 0.0
        for index in ops:
            price, (in_all, runs) = self.prices.op_of(index), self.counts.op_times(index)
            one_s = float(price.forward_s.min())
            forward_s += runs * one_s
            backward_s += runs * float(price.backward_s.min()) + (in_all - runs) * one_s
        there_s, back_s = (sum(float(one[way].min()) for one in moved) for way in (0, 1))
        return (max(0.0, 1 - forward_s / there_s) if there_s else 0.0,
                max(0.0, 1 - backward_s / back_s) if back_s else 0.0)

    def _moved_s(self, times: tuple[int, int], num_bytes: np.ndarray) -> Both:
        cluster, there_too = self.prices.cluster, self._on_disk
        there, back = (n * np.where(num_bytes > 0, offload.saved_s(num_bytes, cluster, way, there_too), 0.0)
                       for n, way in zip(times, (False, True), strict=True))
        return there, back

    @property
    def _on_disk(self) -> bool:
        return self.counts.hybrid.saved_on == "disk"


__all__ = ["HostActivations"]
