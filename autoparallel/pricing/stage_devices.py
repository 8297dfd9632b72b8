"""The devices of a pipeline's stages on unequal clusters: their speed and memory, and how messages between them go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cost_models import Group
from cost_models.accuracy import usable_bytes

if TYPE_CHECKING:
    from autoparallel.pricing.unit_costs import Prices
    from autoparallel.schedule.step_config import Hybrid


def devices_of(prices: Prices, ranks: Sequence[int]) -> Sequence[int]:
    """The numbers of the devices of some ranks of the pipeline axis."""
    size = math.prod(prices.space.mesh_shape)
    return [number for rank in ranks for number in range(rank * size, (rank + 1) * size)]


def along_pipeline(prices: Prices, ranks: Sequence[int] = (), together: bool = False) -> Group:
    """How messages along the pipeline axis cross the links, by the NICs of these ranks' hosts (default: of all);
    ``together``: collectives of these ranks."""
    devices = () if prices.least else devices_of(prices, ranks) if ranks and prices.stages_differ else None
    return prices.cluster.group(prices.mesh_shape, 0, ranks if together else (), devices)


def paces_of(prices: Prices, groups: Sequence[Sequence[int]]) -> list[float]:
    """By group of pipeline ranks: how many times as fast its devices run all ops as the slowest of all devices do, each
    op by its fastest strategy."""
    if len(prices.kinds) == 1 or len(groups) == 1:
        return [1.0] * len(groups)
    ops = [decision.index for decision in prices.space.decisions if decision.kind == "op"]
    whole, *each = (sum(float(some.op_of(index).total_s.min()) for index in ops)
                    for some in (prices, *map(prices.of_ranks, groups)))
    return [whole / seconds if seconds else 1.0 for seconds in each]


def slowest_rank(prices: Prices, hybrid: Hybrid) -> int:
    """With micro-batches by rank, the rank of that axis for whose micro-batches its devices take longest; else 0. Of
    several the one with the fewest, whose devices are the slowest, also in the optimizer's step."""
    if not hybrid.by_rank:
        return 0
    each = seconds_by_rank(prices, hybrid)
    longest = [rank for rank, seconds in enumerate(each) if seconds >= max(each) * (1 - 1e-9)]
    return min(longest, key=hybrid.by_rank.__getitem__)


def seconds_by_rank(prices: Prices, hybrid: Hybrid) -> list[float]:
    """With micro-batches by rank, the seconds of each rank's, in those of one on the slowest devices."""
    paces = paces_of(prices, [(rank,) for rank in range(hybrid.pipeline_ranks)])
    return [count / pace for count, pace in zip(hybrid.by_rank, paces, strict=True)]


def memory_shares(prices: Prices, hybrid: Hybrid) -> tuple[float, ...]:
    """By group of pipeline ranks: what the smallest device of all can take over what the smallest of the group can;
    empty where that is the same for all."""
    if len(prices.kinds) == 1 or hybrid.stages == 1 or prices.same_limit or not prices.differ:
        return ()
    usable = [min(map(usable_bytes, prices.of_ranks(hybrid.ranks_of(number)).kinds))
              for number in range(len(hybrid.groups))]
    least = min(map(usable_bytes, prices.kinds))
    return tuple(least / one for one in usable) if max(usable) > least else ()


__all__ = ["along_pipeline", "devices_of", "memory_shares", "paces_of", "seconds_by_rank", "slowest_rank"]
