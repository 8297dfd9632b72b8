"""Rows and places of masks that are the same in every call (all but the diagonal): plain tensors, of a known number."""

from __future__ import annotations

from typing import Any

import torch

from autoparallel.capture.tracing.known_values import known_places
from autoparallel.capture.tracing.masked_rows.control_flow import REGIONS
from autoparallel.capture.tracing.masked_rows.indexing import is_mask
from autoparallel.capture.tracing.masked_rows.types import Place, Rows

Tensor = torch.Tensor


class _UnknownError(Exception):
    """A mask that depends on the call."""


def always(value: Any) -> Any:
    """``value`` with plain tensors for its rows and places; None if there are none, or if a mask of them depends on the
    call."""
    found: list[Tensor] = []
    try:
        made = _plain(value, found)
    except _UnknownError:
        return None
    return made if found else None


def always_at(index: Any) -> tuple[Any, ...] | None:
    """An index with places for its masks; None if one of them depends on the call."""
    parts = index if isinstance(index, tuple) else (index,)
    found: list[Tensor] = []
    try:
        each = [_places(part, found) if is_mask(part) else (_plain(part, found),) for part in parts]
    except _UnknownError:
        return None
    return tuple(part for places in each for part in places) if found else None


def _plain(value: Any, found: list[Tensor]) -> Any:
    if isinstance(value, Place):
        return _places(value.mask.unchanged(), found)[value.dim]
    if isinstance(value, Rows):
        whole = value.value.expand(*value.mask.cells.shape, *value.value.shape[value.extra + 1:])
        return whole[_places(value.mask.unchanged(), found)].movedim(0, value.front)
    if type(value) in (tuple, list):
        return type(value)(_plain(each, found) for each in value)
    if type(value) is dict:
        return {key: _plain(each, found) for key, each in value.items()}
    return value


def _places(cells: Tensor, found: list[Tensor]) -> tuple[Tensor, ...]:
    known = known_places(cells) if not REGIONS.conditions() else None
    if known is None:
        raise _UnknownError
    found.append(cells)
    return tuple(torch.tensor(places, dtype=torch.int64, device=cells.device) for places in known)


__all__ = ["always", "always_at"]
