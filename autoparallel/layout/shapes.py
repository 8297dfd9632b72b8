"""Global and local shapes.

A dim of size s cut over n ranks gives shards of ceil(s/n), the last ones smaller (as ``torch.chunk`` and DTensor do). A
cut that would leave some rank without elements is not allowed. Several axes on one dim cut piece by piece, the leftmost
axis first. An interleaved cut takes the dim for k equal parts and cuts each of them, evenly, and no other axis cuts the
dim; what a rank then holds is not a box of the tensor but several.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

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


def served(first: int, count: int, times: int) -> Counter[int]:
    """By head of keys that serves any: how many it serves of the ``count`` heads of grouped queries from ``first`` on.
    Of all heads, it serves ``times``."""
    return Counter(head // times for head in range(first, first + count))


@cache
def most_heads_read(heads: int, groups: int, parts: tuple[int, ...]) -> int:
    """Most heads of keys, of ``groups``, that attention reads on a rank, where the ``heads`` of grouped queries are cut
    in ``parts``, one after another. A rank whose heads of keys serve unequal numbers reads some of them several times.
    """
    spans = [(0, heads)]
    for n in parts:
        spans = [(first + start, size) for first, length in spans
                 for start, size in (shard_of(length, n, rank) for rank in range(n)) if size]
    return max(size // math.gcd(*served(first, size, heads // groups).values()) for first, size in spans)


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


def parts_of_dim(layout: Layout, dim: int) -> frozenset[int]:
    return frozenset(p.parts for p in layout if p.is_shard and p.dim == dim)


def can_cut_parts(size: int, cuts: tuple[int, ...], parts: frozenset[int]) -> bool:
    """`can_cut` for axes that take the dim for so many parts. One axis alone may cut parts, each of them evenly.

    >>> can_cut_parts(24, (4,), frozenset({3})), can_cut_parts(24, (8,), frozenset({2})), can_cut_parts(9, (8,), {1})
    (True, False, False)
    """
    if max(parts) == 1:
        return can_cut(size, cuts)
    return len(cuts) == 1 and size > 0 and size % (max(parts) * cuts[0]) == 0


def layout_fits(shape: Shape, layout: Layout, mesh_shape: Sequence[int]) -> bool:
    """Whether a tensor of this global shape can have this layout."""
    if any(p.is_shard and p.dim >= len(shape) for p in layout):
        return False
    cuts = ((size, cuts_of_dim(layout, mesh_shape, dim), parts_of_dim(layout, dim)) for dim, size in enumerate(shape))
    return all(can_cut_parts(size, cut, parts) for size, cut, parts in cuts if cut)  # empty tensors fit whole


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
    """(offsets, local shape) of the shard that the rank at ``coordinate`` holds.

    Raises ValueError if it is not a box (see `local_boxes`).
    """
    (box,) = local_boxes(shape, layout, mesh_shape, coordinate)
    return box.offsets, box.shape


class Box(NamedTuple):
    """A box of a tensor that a rank holds: where it begins in the tensor and in the rank's shard, and its shape."""

    offsets: Shape
    local_offsets: Shape
    shape: Shape


def local_boxes(
    shape: Shape, layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[Box, ...]:
    """The boxes of which the shard of the rank at ``coordinate`` is made: one, but of interleaved shards.

    >>> from autoparallel.layout import shard
    >>> [tuple(box) for box in local_boxes((12, 4), (shard(0, parts=3),), (2,), (1,))]
    [((2, 0), (0, 0), (2, 4)), ((6, 0), (2, 0), (2, 4)), ((10, 0), (4, 0), (2, 4))]
    """
    stretches = [_stretches(size, dim, layout, mesh_shape, coordinate) for dim, size in enumerate(shape)]
    places = [[0, *itertools.accumulate(length for _, length in of_dim)] for of_dim in stretches]
    numbered = itertools.product(*(range(len(of_dim)) for of_dim in stretches))
    return tuple(Box(tuple(stretches[dim][i][0] for dim, i in enumerate(numbers)),
                     tuple(places[dim][i] for dim, i in enumerate(numbers)),
                     tuple(stretches[dim][i][1] for dim, i in enumerate(numbers))) for numbers in numbered)


def _stretches(size: int, dim: int, layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]
               ) -> list[tuple[int, int]]:
    """(start, length) in the whole dim of what a rank holds of it, in order."""
    held = [(0, size)]
    for p, n, rank in zip(layout, mesh_shape, coordinate, strict=True):
        if p.is_shard and p.dim == dim:
            part = sum(length for _, length in held) // p.parts
            start, length = shard_of(part, n, rank)
            held = [piece for number in range(p.parts)
                    for piece in _within(held, number * part + start, number * part + start + length)]
    return held


def _within(held: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The elements ``begin`` to ``end`` of those in ``held``; an empty piece where there are none."""
    found, passed = [], 0
    for start, length in held:
        first, last = max(begin, passed), min(end, passed + length)
        if first < last:
            found.append((start + first - passed, last - first))
        passed += length
    return found or [(held[0][0] + begin, 0)]


def local_shape(shape: Shape, layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> Shape:
    """The shape of the shard that the rank at ``coordinate`` holds."""
    local = list(shape)
    for p, n, rank in zip(layout, mesh_shape, coordinate, strict=True):
        if p.is_shard:
            local[p.dim] = p.parts * shard_of(local[p.dim] // p.parts, n, rank)[1]
    return tuple(local)
