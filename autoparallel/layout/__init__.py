"""Layouts: placements, local shapes, redistribution paths. See README.md."""

from autoparallel.layout.placement import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Layout,
    Placement,
    dual,
    from_torch,
    layout_str,
    parse_layout,
    shard,
    to_torch,
    without_gradient,
)
from autoparallel.layout.redistribution import COLLECTIVES, SUMS, LayoutSpace, RedistributionTable, Step, is_local
from autoparallel.layout.shapes import can_cut, largest_local_shape, layout_fits, local_box, local_shape, shards

__all__ = [
    "COLLECTIVES",
    "INVARIANT",
    "PARTIAL",
    "REPLICATE",
    "SUMS",
    "Layout",
    "LayoutSpace",
    "Placement",
    "RedistributionTable",
    "Step",
    "can_cut",
    "dual",
    "from_torch",
    "is_local",
    "largest_local_shape",
    "layout_fits",
    "layout_str",
    "local_box",
    "local_shape",
    "parse_layout",
    "shard",
    "shards",
    "to_torch",
    "without_gradient",
]
