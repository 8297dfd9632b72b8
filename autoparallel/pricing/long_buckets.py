"""Sizes of buckets where nobody gave them: as large as the links need, and no larger, since backward hides all but the
last one."""

from __future__ import annotations

from dataclasses import replace

from autoparallel.layout.redistribution import name_of
from autoparallel.pricing.unit_costs import Prices
from autoparallel.schedule.step_config import Hybrid


def with_sizes(prices: Prices, hybrid: Hybrid) -> Hybrid:
    """The step configuration with sizes of buckets for the groups of a mesh (`StepSeconds.long_buckets`). As it is
    where somebody gave sizes, or where memory is counted by the default size (states or gradients elsewhere)."""
    fusion, away = hybrid.fusion, hybrid.offload
    if not fusion.blocks or fusion.axis_bytes or hybrid.reads_alone or away.is_away or away.in_backward:
        return hybrid
    sizes = sorted((name_of(axes, prices.space.axis_names), num_bytes)
                   for axes, num_bytes in prices.redistribution.single.long_buckets.items())
    return replace(hybrid, fusion=replace(fusion, axis_bytes=tuple(sizes))) if sizes else hybrid


__all__ = ["with_sizes"]
