"""Reads and writes at places that rows name, as graph layers do: edges are the rows, nodes the places.

    x[rows], x.index_select(0, rows)                 x read at each row's place; at place 0 for rows that are not valid
    x.scatter_add(0, rows, values)                   values of rows that are not valid are zero
    x.scatter_reduce(0, rows, values, how), x[rows] = values
                                                     rows that are not valid go to a place behind the last one of x
    ctc_loss(scores, labels[mask], lengths, mask.sum(-1))
                                                     labels as a table again
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoparallel.capture.tracing.masked_rows.control_flow import REGIONS, refused
from autoparallel.capture.tracing.masked_rows.types import Rows
from autoparallel.ops.bounded import bounded_places

Tensor = torch.Tensor
#: Functions that write values of rows at places along a dim.
SCATTERS = frozenset({"scatter", "scatter_add", "scatter_reduce", "index_add", "index_reduce", "index_copy"})


def are_places(index: Any) -> bool:
    """Whether an index is of rows that are places."""
    return isinstance(index, Rows) and not (index.dtype.is_floating_point or index.dtype is torch.bool)


def reads_at(index: Any) -> bool:
    """Whether an index begins with places of rows."""
    return are_places(index[0] if isinstance(index, tuple) and index else index)


def read_at(x: Tensor, index: Any) -> Rows:
    """``x[index]``."""
    parts = index if isinstance(index, tuple) else (index,)
    places = [part for part in parts if isinstance(part, Rows)]
    if any(p.front or p.mask is not places[0].mask for p in places) or any(isinstance(part, Tensor) for part in parts):
        raise refused("rows picked by several indices")
    return Rows(places[0].mask, x[tuple(part.chosen() if isinstance(part, Rows) else part for part in parts)])


def put_at(x: Tensor, places: Rows, value: Any) -> bool:
    """``x[places] = value``."""
    own = isinstance(value, Rows) and value.mask is places.mask and not value.front
    fits = are_places(places) and not places.front and places.dim() == 1 and not places.extra
    if not fits or not (own or isinstance(value, bool | int | float)):
        raise refused("rows written at places that the data say")
    values = value.value.to(x.dtype) if own else torch.full((), value, dtype=x.dtype, device=x.device)
    at = torch.where(places.value < 0, places.value + x.shape[0], places.value)
    with REGIONS.ours():
        x.copy_(_with_a_place_more(x).index_put((_behind_unless_meant(x, places, at),), values)[:-1])
    return True


def written_at(function: Callable[..., Any], name: str, x: Tensor, dim: int, places: Any, values: Any, *args: Any,
               **kwargs: Any) -> Tensor:
    """``x.scatter_add(dim, places, values)`` and its kin."""
    own = are_places(places) and isinstance(values, Rows) and places.mask is values.mask
    if not own or isinstance(x, Rows) or dim % max(x.dim(), 1) or places.front or values.front or places.extra:
        raise refused(f"{name} of rows whose number the data say")
    if not name.startswith("index") and places.dim() != values.dim():
        raise refused(f"{name} of rows of another number of dims")
    in_place = function.__name__.endswith("_")
    with REGIONS.ours():
        if name in ("scatter_add", "index_add"):
            return function(x, dim, places.chosen(), values.chosen(), *args, **kwargs)
        out_of_place = getattr(torch, name)
        at = _behind_unless_meant(x, places, places.value)
        made = out_of_place(_with_a_place_more(x), dim, at, values.value, *args, **kwargs)[:-1]
        return x.copy_(made) if in_place else made


def table_by_lengths(values: Rows, lengths: Tensor) -> Tensor:
    """Values that a mask [b, s] picks, one after another, as a table [b, s] whose row i begins with the next
    ``lengths[i]`` of them; behind these are others."""
    cells = values.mask.valid()
    if cells.dim() != 2 or values.dim() != 1 or values.front or lengths.shape != cells.shape[:1]:
        raise refused("values whose number the data say, by lengths")
    in_order = values.chosen().flatten()[bounded_places(cells.flatten(), cells.numel()).clamp(min=0)]
    begin = (lengths.cumsum(0) - lengths).unsqueeze(1)
    return in_order[(begin + torch.arange(cells.shape[1], device=cells.device)).clamp(max=cells.numel() - 1)]


def _with_a_place_more(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


def _behind_unless_meant(x: Tensor, places: Rows, at: Tensor) -> Tensor:
    valid = places.mask.valid()
    return torch.where(valid.reshape(-1, *(1,) * (at.dim() - 1)), at, x.shape[0])


__all__ = ["SCATTERS", "are_places", "put_at", "read_at", "reads_at", "table_by_lengths", "written_at"]
