"""Masks as runs: for each query the stretches of keys on which a value is one and the same.

A causal mask of 65,536 tokens has 4 x 10^9 cells and two runs a query. What compares positions of queries with sorted
positions of keys has three, and what is computed cell by cell from values in runs has at most the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten

#: Values of more runs a query are left to a comparison cell by cell.
MOST_RUNS = 64
COMPARISONS = frozenset({aten.eq.Tensor, aten.ne.Tensor, aten.le.Tensor, aten.lt.Tensor, aten.ge.Tensor,
                         aten.gt.Tensor})


@dataclass(frozen=True)
class Runs:
    """``values`` [queries or 1, runs] from key ``starts`` [queries or 1, runs] on, to the next start; the first start
    is 0. Of runs with equal starts only the last has cells."""

    starts: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor) -> Runs | None:
        """Values [queries or 1, keys or 1] that differ by query only, or by key only; None of others."""
        start = torch.zeros(1, 1, dtype=torch.int64)
        if values.shape[1] == 1:
            return cls(start, values)
        if values.shape[0] > 1:
            return None
        starts = torch.cat([start, 1 + (values[:, 1:] != values[:, :-1]).nonzero()[None, :, 1]], 1)
        return cls(starts, values[:, starts[0]]) if starts.shape[1] <= MOST_RUNS else None

    def at(self, keys: torch.Tensor) -> torch.Tensor:
        """Values at keys [queries or 1, any number]."""
        rows = max(len(self.starts), len(self.values), len(keys))
        starts, keys = self.starts.expand(rows, -1).contiguous(), keys.expand(rows, -1).contiguous()
        return self.values.expand(rows, -1).gather(1, torch.searchsorted(starts, keys, right=True) - 1)


def compared(op: Any, first: torch.Tensor, second: torch.Tensor) -> Runs | None:
    """A comparison of a value for each query [queries, 1] with one for each key [1, keys], in either order; None where
    the keys' values are not sorted, or the two are not numbers of one type."""
    by_key = first.shape[1] > 1
    keys, queries = (first, second) if by_key else (second, first)
    row = keys[0].contiguous()
    if row.dtype != queries.dtype or row.dtype == torch.bool or bool(queries.isnan().any()):
        return None
    if not bool((row[1:] >= row[:-1]).all()):    # of NaN too
        return None
    bounds = [torch.searchsorted(row, queries, right=right) for right in (False, True)]
    sign, zero = torch.tensor([[-1, 0, 1]]), torch.zeros(1, 3, dtype=torch.int64)    # of key - query
    return Runs(torch.cat([torch.zeros_like(bounds[0]), *bounds], 1), op(sign, zero) if by_key else op(zero, sign))


def combined(op: Callable[[list[torch.Tensor]], torch.Tensor], parts: list[Runs]) -> Runs | None:
    """What ``op`` makes cell by cell of values in runs; None if that is of too many runs."""
    rows = max(max(len(part.starts), len(part.values)) for part in parts)
    starts = torch.cat([part.starts.expand(rows, -1) for part in parts], 1).sort(1).values
    if starts.shape[1] > MOST_RUNS:
        return None
    return Runs(starts, op([part.at(starts) for part in parts]))


def triangle(part: Runs, lower: bool, diagonal: int, shape: torch.Size) -> Runs | None:
    """`torch.tril`, or `torch.triu`, of values whose last two dims are ``shape``'s."""
    bound = (torch.arange(shape[-2])[:, None] + diagonal + int(lower)).clamp(0, shape[-1])
    kept = Runs(torch.cat([torch.zeros_like(bound), bound], 1), torch.tensor([[lower, not lower]]))
    return combined(lambda found: torch.where(found[1], found[0], torch.zeros_like(found[0])), [part, kept])


def kinds(seen: Callable[[torch.Tensor], torch.Tensor], runs: Runs, shape: torch.Size) -> set[str]:
    """Which of "causal" and "all" a mask is that lets queries see the keys of those runs whose values ``seen`` is true
    of."""
    queries, keys = shape[-2], shape[-1]
    starts = runs.starts.expand(queries, -1)
    ends = torch.cat([starts[:, 1:], torch.full((queries, 1), keys)], 1)
    empty = (starts >= ends) | (starts >= keys)
    values = runs.values.expand(queries, -1)
    true = seen(torch.where(empty, values[0, (~empty[0]).nonzero()[0, 0]], values))
    at = torch.arange(queries)[:, None]
    found = set()
    if bool((empty | true).all()):
        found.add("all")
    if queries == keys and bool((empty | torch.where(true, ends <= at + 1, starts > at)).all()):
        found.add("causal")
    return found
