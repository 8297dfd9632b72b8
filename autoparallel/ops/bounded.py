"""Rows that a mask picks, padded to a bound that the user gives, so that no shape depends on the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoparallel.errors import BoundError, InputError, shown

Tensor = torch.Tensor
_library = torch.library.Library("autoparallel", "FRAGMENT")
_library.define("bounded_places(Tensor mask, int at_most) -> Tensor")


def _bounded_places(mask: Tensor, at_most: int) -> Tensor:
    """Places of the true elements along the last dim, in order, then -1: [..., L] -> [..., at_most]."""
    count = int(mask.sum(-1).max()) if mask.numel() else 0
    if count > at_most:
        raise BoundError(f"a mask of shape {list(mask.shape)} has {count} true elements along its last dim, and "
                         f"autoparallel.bound was told of at most {at_most}\n  Give a larger at_most=; nothing was "
                         "dropped.")
    rank = mask.cumsum(-1) - 1
    places = mask.new_full((*mask.shape[:-1], at_most + 1), -1, dtype=torch.int64)
    here = torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape)
    return places.scatter_(-1, torch.where(mask, rank, at_most), here)[..., :at_most].contiguous()


def _shape(mask: Tensor, at_most: int) -> Tensor:
    return mask.new_empty((*mask.shape[:-1], at_most), dtype=torch.int64)


_library.impl("bounded_places", _bounded_places, "CompositeExplicitAutograd")
_library.impl("bounded_places", _shape, "Meta")
bounded_places = torch.ops.autoparallel.bounded_places.default


@dataclass(frozen=True)
class Bounded:
    """The elements of a mask [..., L] that are true, padded to ``n`` along the last dim.

    ``places``: int64 [..., n], their places in order; 0 where there are fewer. ``valid``: bool [..., n], whether there
    is such an element.
    """

    mask: Tensor
    places: Tensor
    valid: Tensor

    def take(self, x: Tensor) -> Tensor:
        """Rows of ``x`` [..., L, *rest] -> [..., n, *rest]; zero where not ``valid``. Raises InputError where ``x`` has
        other dims than the mask."""
        self._check(x, self.mask.shape, "x")
        rows = x.gather(self._dim, self._index(x))
        return torch.where(_wide(self.valid, rows), rows, torch.zeros_like(rows))

    def put(self, x: Tensor, rows: Tensor) -> Tensor:
        """A copy of ``x`` [..., L, *rest] with the valid ones of ``rows`` [..., n, *rest] at their places. Raises
        InputError where they have other dims or another dtype."""
        self._check(x, self.mask.shape, "x")
        self._check(rows, self.valid.shape, "rows")
        if rows.shape[self._dim + 1:] != x.shape[self._dim + 1:] or rows.dtype != x.dtype:
            raise InputError(f"rows of {rows.dtype} {list(rows.shape)} do not fit x of {x.dtype} {list(x.shape)}")
        known = torch.where(_wide(self.valid, rows), rows, torch.zeros_like(rows))
        written = torch.zeros_like(x).scatter_add(self._dim, self._index(x), known)
        return torch.where(_wide(self.mask, x), written, x)

    @property
    def _dim(self) -> int:
        return self.mask.dim() - 1

    def _index(self, x: Tensor) -> Tensor:
        return _wide(self.places, x).expand(*self.places.shape, *x.shape[self._dim + 1:])

    def _check(self, x: Tensor, dims: torch.Size, name: str) -> None:
        if x.shape[: len(dims)] != dims:
            raise InputError(f"{name} has shape {list(x.shape)}: required is {list(dims)}, and any dims after these")


def bound(mask: Tensor, *, at_most: int) -> Bounded:
    """The true elements of ``mask``, bool [..., L], of which there are at most ``at_most`` along the last dim.

    In place of ``x[mask]`` and ``mask.nonzero()``, whose shapes depend on the data. The model computes the same with
    and without autoparallel. Raises InputError for another dtype or bound, and BoundError in a call with more: nothing
    is dropped. (The host waits for the device to see that.)

    >>> import torch
    >>> rows = bound(torch.tensor([False, True, True, False]), at_most=3)
    >>> rows.places, rows.valid
    (tensor([1, 2, 0]), tensor([ True,  True, False]))
    >>> rows.take(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([2., 3., 0.])
    """
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.dim() == 0:
        given = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"autoparallel.bound takes a bool tensor of one dim or more; given: {given}")
    if type(at_most) is not int or not 1 <= at_most < 2**31:
        raise InputError(f"at_most={shown(at_most)}: required is the largest number of true elements, an int of 1 or "
                         "more")
    found = bounded_places(mask, at_most)
    return Bounded(mask, found.clamp(min=0), found >= 0)


def _wide(x: Tensor, like: Tensor) -> Tensor:
    return x.reshape(*x.shape, *(1,) * (like.dim() - x.dim()))


__all__ = ["Bounded", "bound", "bounded_places"]
