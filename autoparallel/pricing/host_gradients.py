"""Seconds and bytes of gradients that go to the host or disk: on their way, and there; of those let go: their bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from autoparallel.pricing.counts import ExecutionCounts
from autoparallel.pricing.host_parameters import ops_beside
from autoparallel.pricing.op_costs import kept_precision
from autoparallel.pricing.parameter_prices import elements_of
from autoparallel.pricing.unit_costs import Prices
from autoparallel.schedule.fusion import in_buckets
from autoparallel.schedule.tiers import BUCKETS_IN_FLIGHT
from cost_models import memory, offload


class HostGradients:
    """Gradients of parameters that leave the device during backward (`Offload.gradients`), or that it lets go when it
    has stepped with them (`Offload.steps_there`), on the fullest rank; arrays by strategy of a parameter."""

    def __init__(self, prices: Prices, counts: ExecutionCounts) -> None:
        self.prices, self.counts, self.space = prices, counts, prices.space
        self.go = prices.training and counts.hybrid.offload.moves_gradients    # some of them

    def leave(self, index: int) -> bool:
        """Whether a parameter's gradient leaves the device within backward. Those that several micro-batches add up
        before they are reduced (ZeRO 0 and 1), and those of several pipeline ranks, leave at its end; let go are those
        of one micro-batch only."""
        hybrid = self.counts.hybrid
        if hybrid.offload.steps_there:
            return hybrid.is_plain and self._is_let_go(index)
        return (self._goes(index) and (hybrid.is_plain or hybrid.zero_stage >= 2)
                and len(self.counts.stages_of[index]) == 1 and len(self.counts.ranks_with(index)) < 2)

    def _goes(self, index: int) -> bool:
        """Whether a decision is a trained parameter whose gradient leaves the device, where it is made."""
        return self.go and self._is_away(index) and index not in self.counts.lookups.tables

    def is_here(self, index: int) -> bool:
        """Whether a parameter's gradient is made on the device."""
        return index not in self.counts.lookups.tables or index in self.counts.lookups.cached

    def _is_let_go(self, index: int) -> bool:
        s = self.space.strategy_sets[index]
        return (self.prices.training and self.space.decisions[index].kind == "parameter"
                and self.is_here(index) and s.output_metas[0].requires_grad)

    def _is_away(self, index: int) -> bool:
        """Whether a decision is a trained parameter whose gradient is outside of the device, also if made there."""
        moves = self.prices.training and self.counts.away[index].moves_gradients \
            and index not in self.counts.lookups.cached
        return moves and self.space.strategy_sets[index].output_metas[0].requires_grad

    def bytes_of(self, index: int) -> np.ndarray:
        """Bytes of a parameter's gradient; of a sparse one, of its rows."""
        s, rows = self.space.strategy_sets[index], self.counts.sparse.share(index, self.counts.hybrid.micro_batches)
        kept = kept_precision(s.output_metas[0], self.prices.cluster)
        state = memory.training_state(elements_of(self.prices, s), kept, self.prices.optimizer)
        return rows * np.asarray(state.gradients)

    def away_bytes(self, index: int) -> np.ndarray:
        """Bytes in the gradients' tier; of the sum over micro-batches, where that is more precise."""
        s = self.space.strategy_sets[index]
        if not self._is_away(index):
            return np.zeros(len(s.strategies))
        summed_there = self.leave(index) or index in self.counts.lookups.tables
        apart = self.counts.accumulator_bytes(s.output_metas[0]) if summed_there else 0
        return np.maximum(self.bytes_of(index), apart * elements_of(self.prices, s))

    def moving_s(self, index: int) -> np.ndarray:
        """Seconds per step of moving a parameter's gradient, as if nothing else went on; of several micro-batches at a
        time it is one."""
        s = self.space.strategy_sets[index]
        if not self._goes(index):
            return np.zeros(len(s.strategies))
        times = self.counts.count(index) // self.counts.hybrid.copies if self.leave(index) else 1
        on_disk = self.counts.away[index].gradients == "disk"
        each = offload.gradients_s(self.bytes_of(index), self.prices.cluster, times > 1, on_disk=on_disk)
        return times * self.counts.multiplicities[index] * each

    def exposed_share(self, backward_s: Callable[[int], float]) -> float:
        """The share of `moving_s` that exceeds backward, if both are divided evenly over all devices; ``backward_s``:
        seconds of an op's backward so."""
        if not self.go:
            return 0.0
        moving = sum(float(self.moving_s(index).min()) for index in range(len(self.space)) if self._goes(index))
        beside = sum(map(backward_s, ops_beside(self.counts, lambda away: away.moves_gradients)))
        return max(0.0, 1 - beside / moving) if moving else 0.0

    def last_in_flight(self) -> Mapping[int, int | None]:
        """By parameter whose gradient leaves, the reader at whose backward it is gone for good: more than
        `BUCKETS_IN_FLIGHT` buckets, divided evenly over the devices, have been made since: one on its way to the host
        or reduced, the other made, or stepped on the device. (Where one device steps, a bucket is gone when it is
        made.) None: only at the end."""
        read_at: dict[int, int] = {}
        for use in self.space.uses:
            if self.leave(use.source):
                read_at[use.source] = min(use.target, read_at.get(use.source, use.target))
        order = sorted(read_at, key=read_at.__getitem__, reverse=True)
        sizes = [float(self.bytes_of(index).min()) for index in order]
        if self.counts.hybrid.offload.steps_there and math.prod(self.space.mesh_shape) == 1:
            buckets = in_buckets(sizes[::-1], self.counts.hybrid.bucket_bytes)
            return {order[::-1][n]: read_at[order[::-1][bucket[0]]] for bucket in buckets for n in bucket}
        most, gone, pending = BUCKETS_IN_FLIGHT * self.counts.hybrid.bucket_bytes, 0, 0.0
        found: dict[int, int | None] = dict.fromkeys(order)
        for number, index in enumerate(order):
            pending += sizes[number]
            while pending > most and gone < number:
                found[order[gone]] = read_at[index]
                pending -= sizes[gone]
                gone += 1
        return found


__all__ = ["HostGradients"]
