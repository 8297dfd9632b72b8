"""Indexing by masks and by places of masks: all rows are read or written, with a mask of the valid ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autoparallel.capture.tracing.masked_rows.control_flow import Chosen, refused
from autoparallel.capture.tracing.masked_rows.places import put_at
from autoparallel.capture.tracing.masked_rows.types import Mask, Place, Places, Rows, Tensorlike, filled

Tensor = torch.Tensor
#: Masks, masks of masks and masks one after another of the trace that runs (one at a time), by ids; `forget` ends them.
_MASKS: dict[int, Mask] = {}
_NESTED: dict[int, tuple[Rows, int, Mask]] = {}
_JOINED: dict[tuple[tuple[bool, int], ...], tuple[list[Mask | int], Mask]] = {}
#: Results of tests by what was asked, with the tensors asked and the result's version; and repeated results, by ids,
#: with their versions and the first of the same.
_ASKED: dict[tuple[Any, ...], tuple[tuple[Tensor, ...], Tensor, int]] = {}
_REPEATED: dict[int, tuple[Tensor, int, tuple[Any, ...]]] = {}


def nonzero(mask: Tensor, as_tuple: bool = False) -> Any:
    marked = mask_of(mask if mask.dtype is torch.bool else mask != 0)
    return tuple(Place(marked, d) for d in range(mask.dim())) if as_tuple else Places(marked)


def picks(index: Any) -> bool:
    """Whether an index picks rows by their values."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(i, Place | Chosen | Places) or is_mask(i) for i in parts)


def is_mask(index: Any) -> bool:
    return unknown(index) and index.dtype is torch.bool and index.dim() > 0


def unknown(x: Any) -> bool:
    """Whether a value is a tensor whose values a trace does not have."""
    return isinstance(x, FakeTensor) and x.constant is None


def mask_of(cells: Tensor) -> Mask:
    """The `Mask` of a tensor, the same object for the same tensor, and for the same test of the same tensors."""
    repeated = _REPEATED.get(id(cells))
    if repeated is not None and repeated[0] is cells and repeated[1] == cells._version:
        _, first, version = _ASKED[repeated[2]]
        cells = first if first._version == version else cells
    known = _MASKS.get(id(cells))
    if known is None or known.cells is not cells or known.version != cells._version:
        known = _MASKS[id(cells)] = Mask(cells, cells._version)
    return known


def note_test(name: Any, args: Sequence[Any], made: Any) -> None:
    """Note what a test (``y != -100``, ``~mask``) of tensors found: asked again, it is the same mask."""
    tensors = tuple(a for a in args if isinstance(a, Tensor))
    if not is_mask(made) or not all(map(unknown, tensors)):
        return
    key = (name, *((id(a), a._version) if isinstance(a, Tensor) else (type(a), a) for a in args))
    if key in _ASKED:
        _REPEATED[id(made)] = made, made._version, key
    else:
        _ASKED[key] = tensors, made, made._version


def is_nested(index: Any, mask: Mask) -> bool:
    """Whether an index picks rows of rows."""
    return isinstance(index, Rows) and index.mask is mask and index.dtype is torch.bool and index.dim() == 1


def nested(index: Rows) -> Mask:
    """The mask of rows of rows that an index of rows picks, the same object for the same index."""
    known = _NESTED.get(id(index))
    if known is None or known[0] is not index or known[1] != index.value._version:
        cells = index.mask.cells & index.value
        known = _NESTED[id(index)] = index, index.value._version, Mask(cells, cells._version)
    return known[2]


def joined(parts: Sequence[Mask | int], device: torch.device) -> Mask:
    """The mask of rows one after another, the same object for the same parts: masks of one dim, and numbers of rows
    that are all valid."""
    key = tuple((isinstance(p, int), p if isinstance(p, int) else id(p)) for p in parts)
    if key not in _JOINED:
        cells = torch.cat([torch.ones(p, dtype=torch.bool, device=device) if isinstance(p, int) else p.unchanged()
                           for p in parts])
        least = sum(p if isinstance(p, int) else p.least for p in parts)
        _JOINED[key] = list(parts), Mask(cells, cells._version, least)
    return _JOINED[key][1]


def picked(x: Tensor, index: Any) -> Any:
    """``x[index]``."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(i, Places) for i in parts):
        raise refused("an index of places whose number the data say")
    plain = [i for i in parts if not isinstance(i, Chosen)]
    if len(plain) < len(parts):
        return x[tuple(_number(i, x.shape[d]) if isinstance(i, Chosen) else i for d, i in enumerate(parts))]
    first = next(n for n, i in enumerate(parts) if i is not None and not _is_whole(i))
    kept = sum(map(_is_whole, parts[:first]))
    if not kept and not first:
        return _picked_first(x, parts)
    rows = _picked_first(x.movedim(tuple(range(kept)), tuple(range(-kept, 0))), parts[first:])
    return _moved_before(rows, [i is None for i in parts[:first]], kept)


def _is_whole(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


def _moved_before(rows: Rows, new: list[bool], kept: int) -> Rows:
    """Rows behind dims: their last ``kept``, and ``new`` ones of length 1."""
    value, of_mask = rows.value, rows.extra + 1
    behind = value.shape[of_mask: value.dim() - kept]
    around = iter(value.shape[value.dim() - kept:])
    value = value.movedim(tuple(range(-kept, 0)), tuple(range(of_mask, of_mask + kept)))
    before = [1 if is_new else next(around) for is_new in new]
    return Rows(rows.mask, value.reshape(*value.shape[:of_mask], *before, *behind), len(new))


def _picked_first(x: Tensor, parts: list[Any]) -> Rows:
    """``x[parts]``, where the rows' places are the first of the parts."""
    if is_mask(parts[0]):
        mask, used = mask_of(parts[0]), parts[0].dim()
        if x.shape[:used] != parts[0].shape:
            raise refused("rows picked by a mask of another length")
        rest, dims = parts[1:], list(range(used))
    else:
        places = [i for i in parts if isinstance(i, Place)]
        if not isinstance(parts[0], Place):
            raise refused("rows picked by their values, beside another index")
        mask, used = places[0].mask, len(places)
        if parts[:used] != places or any(p.mask is not mask for p in places):
            raise refused("rows picked by several masks")
        if any(x.shape[d] != mask.cells.shape[p.dim] for d, p in enumerate(places)):
            raise refused("rows picked of fewer than the mask is of")
        rest, dims = parts[used:], [p.dim for p in places]
    if len(set(dims)) < len(dims) or any(isinstance(i, Tensor | Tensorlike) for i in rest):
        raise refused("rows picked by several indices")
    order = sorted(range(used), key=lambda d: dims[d])
    value = x.permute(*order, *range(used, x.dim())) if order != list(range(used)) else x
    shape = [mask.cells.shape[d] if d in dims else 1 for d in range(mask.cells.dim())]
    value = value.reshape(*shape, *x.shape[used:])
    if rest:
        value = value[(*(slice(None),) * len(shape), *rest)]
    return Rows(mask, harmless(value, mask))


def harmless(value: Tensor, mask: Mask) -> Tensor:
    """A copy whose invalid rows are finite, with places inside any table."""
    if value.dtype is torch.bool:
        return value.clone()
    return filled(value, mask, 0.5 if value.is_floating_point() or value.is_complex() else 0)


def _number(chosen: Chosen, length: int) -> int | slice:
    """A place beyond the end is one that is never chosen (dbrx asks for one expert more than there are)."""
    number = min(chosen.number, length - 1)
    return slice(number, number + 1) if chosen.rank else number


def put(x: Tensor, index: Any, value: Any) -> bool:
    """``x[index] = value``; False where that is not of rows."""
    if isinstance(index, Rows):
        return put_at(x, index, value)
    if not isinstance(value, Rows) and not isinstance(index, Place):
        return False
    if not isinstance(value, Rows):
        raise refused("what is written to places whose number the data say")
    own = index.mask if isinstance(index, Place) else mask_of(index) if is_mask(index) else None
    if own is not value.mask or value.front:
        raise refused("rows written to other places than they are of")
    if isinstance(index, Place) and own.cells.dim() != 1:
        return _put_last(x, index, value)
    if value.value.dim() != x.dim():
        raise refused("rows of another number of dims written")
    x.copy_(torch.where(_wide(own.valid(), x), value.value, x))
    return True


def _put_last(x: Tensor, place: Place, rows: Rows) -> bool:
    """``x[place] = rows`` where a place may come several times, along the mask's other dims: the last is written, as on
    a CPU (torch leaves open which), and all have its gradient, as in torch."""
    mask, dim = place.mask, place.dim
    cells, around = mask.valid(), mask.cells.dim()
    value = rows.value.expand(*cells.shape, *rows.value.shape[around:])
    if x.shape[0] != cells.shape[dim] or value.shape[around:] != x.shape[1:] or not x.is_floating_point():
        raise refused("rows of another form written")
    cells = cells.movedim(dim, 0).flatten(1)
    value = value.movedim(dim, 0).flatten(1, around - 1)
    count = cells.to(torch.int64)
    last = cells & (count.cumsum(1) == count.sum(1, keepdim=True))
    zeros = torch.zeros_like(value)
    overwritten = torch.where(_wide(cells & ~last, value), value - value.detach(), zeros)
    written = (torch.where(_wide(last, value), value, zeros) + overwritten).sum(1)
    x.copy_(torch.where(_wide(cells.any(1), x), written.to(x.dtype), x))
    return True


def _wide(cells: Tensor, x: Tensor) -> Tensor:
    return cells.reshape(*cells.shape, *(1,) * (x.dim() - cells.dim()))


def forget() -> None:
    """At a trace's end."""
    _MASKS.clear()
    _NESTED.clear()
    _JOINED.clear()
    _ASKED.clear()
    _REPEATED.clear()


__all__ = ["forget", "harmless", "is_mask", "is_nested", "joined", "nested", "nonzero", "note_test", "picked", "picks",
           "put", "unknown"]
