"""Seconds and bytes of parameters that live on the host or disk and are fetched to the device for each use."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from autoparallel.pricing.counts import ExecutionCounts
from autoparallel.pricing.op_costs import kept_precision
from autoparallel.pricing.parameter_prices import elements_of
from autoparallel.pricing.unit_costs import Prices
from autoparallel.schedule.tiers import Offload
from autoparallel.strategies.space import TensorUse
from cost_models import memory, offload


class Fetching(NamedTuple):
    """Of the fetches in forward and of those that backward repeats."""

    forward: float
    backward: float


class HostParameters:
    """Parameters outside of the device (`Offload.parameters`), on the fullest rank; arrays by strategy of one."""

    def __init__(self, prices: Prices, counts: ExecutionCounts) -> None:
        self.prices, self.counts, self.space = prices, counts, prices.space

    def fetches(self, use: TensorUse) -> bool:
        """Whether a use reads a parameter where it is stored, outside of the device, and no op there."""
        return self.counts.away[use.source].moves_parameters and use.source not in self.counts.lookups.tables

    def away_bytes(self, index: int) -> np.ndarray:
        """Bytes of a parameter in its tier."""
        s = self.space.strategy_sets[index]
        if not self.counts.away[index].moves_parameters:
            return np.zeros(len(s.strategies))
        (meta,), elements = s.output_metas, elements_of(self.prices, s)
        if not (meta.requires_grad and self.prices.training):
            return elements * meta.dtype.itemsize
        kept = kept_precision(meta, self.prices.cluster)
        return np.asarray(memory.training_state(elements, kept, self.prices.optimizer).parameters)

    def bytes_of(self, use: TensorUse) -> np.ndarray:
        """Bytes of the stored shard that a use fetches."""
        return self.prices.local_bytes(use.meta, self.space.strategy_sets[use.source].outputs[use.output])

    def moving_s(self, use: TensorUse) -> tuple[np.ndarray, np.ndarray]:
        """Seconds per step of the fetches (of forward, of backward), as if nothing else went on."""
        forward, again, _ = self.counts.use_times(use)
        on_disk = self.counts.away[use.source].parameters == "disk"
        each = np.asarray(offload.fetch_s(self.bytes_of(use), self.prices.cluster, on_disk=on_disk))
        return forward * each, again * each

    def exposed_shares(self, compute_s: Callable[[int], tuple[float, float]]) -> Fetching:
        """The shares of `moving_s` that exceed the compute beside which they run, if all is divided evenly over the
        devices; ``compute_s``: seconds of an op (forward, backward with recompute) so."""
        moving = [self.moving_s(use) for use in self.space.uses if self.fetches(use)]
        ops = list(map(compute_s, ops_beside(self.counts, lambda away: away.moves_parameters)))
        found = []
        for direction in (0, 1):
            fetch_s = sum(float(each[direction].min()) for each in moving)
            beside_s = sum(each[direction] for each in ops)
            found.append(max(0.0, 1 - beside_s / fetch_s) if fetch_s else 0.0)
        return Fetching(*found)


def ops_beside(counts: ExecutionCounts, moves: Callable[[Offload], bool]) -> list[int]:
    """The ops beside which parameters or gradients move: all but those of blocks whose own do not (each moves while the
    block next to its own computes). ``moves``: whether those of a parameter with these tiers do; of tables that are
    looked up on the host none does."""
    space, blocks = counts.space, {True: set[object](), False: set[object]()}
    for use in space.uses:
        if space.decisions[use.source].kind == "parameter":
            own = use.source not in counts.lookups.tables and moves(counts.away[use.source])
            blocks[own].add(space.blocks[use.target])
    idle = blocks[False] - blocks[True]
    return [one.index for one in space.decisions if one.kind == "op" and space.blocks[one.index] not in idle]


__all__ = ["Fetching", "HostParameters", "ops_beside"]
