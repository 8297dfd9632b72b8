"""Fused linear layers (QKV, gate and up) cut section by section: each rank computes its shard of every section.

The weight is stored as plain shards of all rows. One all-to-all of the shard's size fetches the rows that a rank lacks:
far fewer bytes than gathering the activations before they are split.
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
    """(start, end), within the owner's shard of all rows, of the rows in the user's shard of some section."""
    first, length = shard_of(sum(sizes), num_ranks, owner)
    found = []
    for offset, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        start, count = shard_of(size, num_ranks, user)
        begin, end = max(first, offset + start), min(first + length, offset + start + count)
        if begin < end:
            found.append((begin - first, end - first))
    return tuple(found)


def _used(x: torch.Tensor, axis: Axis, sizes: Sizes) -> torch.Tensor:
    """From plain shards of rows ``x``, the rows of this rank's shard of each section, in global order."""
    sent = [_stretches(sizes, axis.size, axis.rank, user) for user in range(axis.size)]
    received = [_stretches(sizes, axis.size, owner, axis.rank) for owner in range(axis.size)]
    order = [row for stretches in sent for start, end in stretches for row in range(start, end)]
    rows = x.index_select(0, torch.tensor(order, device=x.device))
    return exchanged_rows(rows, axis, [_length(s) for s in received], [_length(s) for s in sent])


def _length(stretches: Sequence[tuple[int, int]]) -> int:
    return sum(end - start for start, end in stretches)


def cut_sections(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sizes: list[int], *,
                 axes: tuple[str, ...]) -> list[torch.Tensor]:
    """`ops.linear_sections` for a shard of each section. ``weight`` [n / ranks, k] and ``bias`` are plain shards over
    the one axis of ``axes``; ``sizes`` are global. Returns one tensor [..., shard of sizes[i]] per section."""
    (name,) = axes
    axis = groups.current(name)
    own = [shard_of(size, axis.size, axis.rank)[1] for size in sizes]
    own_bias = _used(bias, axis, tuple(sizes)) if bias is not None else None
    return linear_sections(x, _used(weight, axis, tuple(sizes)), own_bias, own)
