"""Linear layers cut section by section: the weight is stored in plain pieces, and used in pieces of each section.

The rows that a rank lacks come from the others by one all-to-all, of as many bytes as its piece of the weight has: far
fewer than the activations that would otherwise be gathered before they are taken apart.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from autoparallel.capture.sections import linear_sections
from autoparallel.layout.shapes import piece_of
from autoparallel.lower.collectives import exchanged_rows
from autoparallel.runtime import groups
from autoparallel.runtime.groups import Axis

Sizes = tuple[int, ...]


@functools.cache
def _stretches(sizes: Sizes, num_ranks: int, owner: int, user: int) -> tuple[tuple[int, int], ...]:
    """(start, end), within the owner's piece of all rows, of those that are in the user's piece of some section."""
    first, length = piece_of(sum(sizes), num_ranks, owner)
    found = []
    for offset, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        start, count = piece_of(size, num_ranks, user)
        begin, end = max(first, offset + start), min(first + length, offset + start + count)
        if begin < end:
            found.append((begin - first, end - first))
    return tuple(found)


def _counts(sizes: Sizes, axis: Axis) -> tuple[list[int], list[int]]:
    """Rows that this rank sends to each rank to use, and rows that it uses of each."""
    def rows(owner: int, user: int) -> int:
        return sum(end - start for start, end in _stretches(sizes, axis.size, owner, user))

    return [rows(axis.rank, r) for r in range(axis.size)], [rows(r, axis.rank) for r in range(axis.size)]


class _ToSections(torch.autograd.Function):
    """Plain pieces of rows to pieces of each section; with ``back`` the other way; one is the other's backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, sizes: Sizes, back: bool) -> torch.Tensor:
        ctx.call = axis, sizes, back
        owned, used = _counts(sizes, axis)
        stretches = [s for user in range(axis.size) for s in _stretches(sizes, axis.size, axis.rank, user)]
        if not back:  # both ways a rank's rows are in the order of the whole tensor's
            return exchanged_rows(torch.cat([x[start:end] for start, end in stretches]), axis, used, owned)
        rows = exchanged_rows(x.contiguous(), axis, owned, used).split([end - start for start, end in stretches])
        return torch.cat([part for _, part in sorted(zip(stretches, rows, strict=True), key=lambda pair: pair[0])])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        axis, sizes, back = ctx.call
        return _ToSections.apply(gradient, axis, sizes, not back), None, None, None


def cut_sections(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sizes: list[int], *,
                 axes: tuple[str, ...]) -> list[torch.Tensor]:
    """`capture.sections.linear_sections` for a piece of each section: ``weight`` [piece of n, k], cut over one axis."""
    (name,) = axes
    axis = groups.current(name)
    weight = _ToSections.apply(weight, axis, tuple(sizes), False)
    bias = _ToSections.apply(bias, axis, tuple(sizes), False) if bias is not None else None
    return linear_sections(x, weight, bias, [piece_of(size, axis.size, axis.rank)[1] for size in sizes])
