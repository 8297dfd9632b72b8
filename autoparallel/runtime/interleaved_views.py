"""Views of interleaved DTensors that regroup their cut dim: of this rank's shard where that is right, or of the whole.

torch finds placements for a view (``weight.view(3, heads, dim, -1)``, ``weight.view(-1, 128)``) by the lengths of dims
alone, and takes some where the elements of the view's shard are others than this rank's, or none (torch 2.13).

Of the tensor's elements in order a shard S(d;k) of n elements along dim d, with b behind each, has stretches of
n / k * b / ranks at distances of n / k * b: its period. A view is of the shard where the periods of both are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autoparallel.runtime.dtensors import Handler, as_before, is_watched, set_handler

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.view_as_real.default, aten.view_as_complex.default)
_CUTS = (Shard, _StridedShard)
Shape = Sequence[int]


@cache
def view_rightly() -> None:
    """Run views so, from now on, for DTensors on the meshes of parallel modules."""
    for op in _VIEWS:
        before: list[Handler | None] = []
        before.append(set_handler(op, partial(_view, before)))


def _view(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value: DTensor = args[0]
    if not is_watched(value) or not value.numel():
        return as_before(before, op, args, kwargs)
    try:
        made = as_before(before, op, args, kwargs)
    except RuntimeError:
        if not _by_parts(value):
            raise
    else:
        if not (_by_parts(value) or _by_parts(made)) or _of_shards(value, made):
            return made
    with torch.no_grad():
        whole = value.redistribute(placements=[p if p.is_partial() else Replicate() for p in value.placements])
    return as_before(before, op, (whole, *args[1:]), kwargs)


def _by_parts(value: DTensor) -> bool:
    return any(isinstance(placement, _StridedShard) for placement in value.placements)


def _of_shards(value: DTensor, made: DTensor) -> bool:
    """Whether the shards of a view have the elements of the value's shards."""
    mesh, scale = value.device_mesh, made.numel() / value.numel()  # of complex numbers that are seen as real ones
    axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    for placements in (value.placements, made.placements):
        cut = [p.dim for p in map(placements.__getitem__, axes) if isinstance(p, Shard | _StridedShard)]
        if len(set(cut)) < len(cut):  # by several axes
            return False
    return all(_same(value.placements[axis], value.shape, made.placements[axis], made.shape, mesh.size(axis), scale)
               for axis in axes)


def _same(source: Placement, shape: Shape, target: Placement, view: Shape, ranks: int, scale: float) -> bool:
    if not isinstance(source, _CUTS) or not isinstance(target, _CUTS):
        return source == target
    if isinstance(source, Shard) and isinstance(target, Shard):
        return True  # torch is right of these
    return _period(source, shape, ranks) * scale == _period(target, view, ranks)


def _period(placement: Any, shape: Shape, ranks: int) -> float:
    """The period of an even cut; of an uneven one a number that is equal to none."""
    length, parts = shape[placement.dim], int(getattr(placement, "split_factor", 1))
    return math.nan if length % (parts * ranks) else length // parts * math.prod(shape[placement.dim + 1 :])


__all__ = ["view_rightly"]
