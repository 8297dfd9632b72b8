"""Global and local shapes.

A dim of size s cut over n ranks gives shards of ceil(s/n), the last ones smaller (as ``torch.chunk`` and DTensor do). A
cut that would leave some rank without elements is not allowed. Several axes on one dim cut piece by piece, the leftmost
axis first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from autoparallel.layout.placement import Layout

Shape = tuple[int, ...]


@cache
def shards(size: int, num_ranks: int) -> tuple[int, ...]:
    """Sizes of the shards of a dim, rank by rank.

    >>> shards(10, 4)
    (3, 3, 3, 1)
    """
    step = -(-size // num_ranks)
    return tuple(max(0, min(step, size - rank * step)) for rank in range(num_ranks))


def shard_sizes(size: int, num_ranks: int) -> set[int]:
    """The different sizes of the shards of a dim, in a time that does not grow with the ranks.

    >>> sorted(shard_sizes(10, 4)), sorted(shard_sizes(9, 8))
    ([1, 3], [0, 1, 2])
    """
    step = -(-size // num_ranks)
    whole = size // step if step else 0
    found = [step] * (whole > 0) + [size - whole * step] * (whole < num_ranks) + [0] * (whole + 1 < num_ranks)
    return set(found)


def shard_of(size: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """(start, length) of one rank's shard."""
    step = -(-size // num_ranks)
    start = min(size, rank * step)
    return start, max(0, min(step, size - start))


@cache
def can_cut(size: int, cuts: tuple[int, ...]) -> bool:
    """Whether cutting a dim by each of ``cuts`` in turn leaves every rank at least one element.

    >>> can_cut(9, (8,)), can_cut(9, (3, 3)), can_cut(10, (4,))
    (False, True, True)
    """
    if not cuts:
        return size > 0
    return all(can_cut(local_shard, cuts[1:]) for local_shard in shard_sizes(size, cuts[0]))


def cuts_of_dim(layout: Layout, mesh_shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return tuple(n for p, n in zip(layout, mesh_shape, strict=True) if p.is_shard and p.dim == dim)


def layout_fits(shape: Shape, layout: Layout, mesh_shape: Sequence[int]) -> bool:
    """Whether a tensor of this global shape can have this layout."""
    if any(p.is_shard and p.dim >= len(shape) for p in layout):
        return False
    cuts = ((size, cuts_of_dim(layout, mesh_shape, dim)) for dim, size in enumerate(shape))
    return all(can_cut(size, cut) for size, cut in cuts if cut)  # a tensor without elements fits where it is whole


def largest_local_shape(shape: Shape, layout: Layout, mesh_shape: Sequence[int]) -> Shape:
    """The local shape of the rank that holds most: ceil(size / n) axis by axis."""
    local = list(shape)
    for p, n in zip(layout, mesh_shape, strict=True):
        if p.is_shard:
            local[p.dim] = -(-local[p.dim] // n)
    return tuple(local)


def local_box(
    shape: Shape, layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[Shape, Shape]:
    """(offsets, local shape) of the shard that the rank at ``coordinate`` holds."""
    offsets, local = [0] * len(shape), list(shape)
    for p, n, rank in zip(layout, mesh_shape, coordinate, strict=True):
        if p.is_shard:
            start, local[p.dim] = shard_of(local[p.dim], n, rank)
            offsets[p.dim] += start
    return tuple(offsets), tuple(local)


def local_shape(shape: Shape, layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> Shape:
    """The shape of the shard that the rank at ``coordinate`` holds."""
    return local_box(shape, layout, mesh_shape, coordinate)[1]
