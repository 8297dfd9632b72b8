"""Linear layers cut section by section: the weight is stored in plain pieces, and used in pieces of each section.

The rows that a rank lacks come from the others by one all-to-all, of as many bytes as its piece of the weight has: far
fewer than the activations that would otherwise be gathered before they are taken apart.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from autoparallel.kernels import groups
from autoparallel.kernels.collectives import exchanged_rows
from autoparallel.kernels.groups import Axis
from autoparallel.layout.shapes import shard_of
from autoparallel.ops.linear_sections import linear_sections

Sizes = tuple[int, ...]


@functools.cache
def _stretches(sizes: Sizes, num_ranks: int, owner: int, user: int) -> tuple[tuple[int, int], ...]:
    """(start, end), within the owner's piece of all rows, of those that are in the user's piece of some section."""
    first, length = shard_of(sum(sizes), num_ranks, owner)
    found = []
    for offset, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        start, count = shard_of(size, num_ranks, user)
        begin, end = max(first, offset + start), min(first + length, offset + start + count)
        if begin < end:
            found.append((begin - first, end - first))
    return tuple(found)


def _used(x: torch.Tensor, axis: Axis, sizes: Sizes) -> torch.Tensor:
    """Of plain pieces of rows, x, the rows of this rank's pieces of all sections, in the order of the whole."""
    sent = [_stretches(sizes, axis.size, axis.rank, user) for user in range(axis.size)]
    received = [_stretches(sizes, axis.size, owner, axis.rank) for owner in range(axis.size)]
    order = [row for stretches in sent for start, end in stretches for row in range(start, end)]
    rows = x.index_select(0, torch.tensor(order, device=x.device))
    return exchanged_rows(rows, axis, [_length(s) for s in received], [_length(s) for s in sent])


def _length(stretches: Sequence[tuple[int, int]]) -> int:
    return sum(end - start for start, end in stretches)


def cut_sections(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sizes: list[int], *,
                 axes: tuple[str, ...]) -> list[torch.Tensor]:
    """`capture.sections.linear_sections` for a piece of each section: ``weight`` [piece of n, k], cut over one axis."""
    (name,) = axes
    axis = groups.current(name)
    own = [shard_of(size, axis.size, axis.rank)[1] for size in sizes]
    own_bias = _used(bias, axis, tuple(sizes)) if bias is not None else None
    return linear_sections(x, _used(weight, axis, tuple(sizes)), own_bias, own)
