"""Rows picked by their values, so that their number depends on the data: all rows are computed, with a mask of the
valid ones.

    place, = torch.where(mask)              no op: place stands for the dim of ``mask``
    rows = layer(x[place])                  layer(x), of which the rows where ``mask`` is true are valid
    y.index_add_(0, place, rows)     ->     y + torch.where(mask, layer(x), 0)
    x[mask].mean()                   ->     torch.where(mask, x, 0).sum() / mask.sum()
    torch.cat([edges[:, mask], loops], 1)   all edges and loops, with a mask that is true of the loops

So are loops over experts written, over those that are hit too (`for e in hit.nonzero():`), and branches that save work
(`if mask.any():`; `control_flow.py`). What is computed is dense: every expert of every row, each of which may be cut.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from autoparallel.capture.tracing.masked_rows.constant_masks import always_at
from autoparallel.capture.tracing.masked_rows.control_flow import REGIONS, refused
from autoparallel.capture.tracing.masked_rows.indexing import (
    forget,
    is_mask,
    nonzero,
    note_test,
    picked,
    picks,
    put,
    unknown,
)
from autoparallel.capture.tracing.masked_rows.places import read_at, reads_at
from autoparallel.capture.tracing.masked_rows.types import Mask, Place, Rows, Tensorlike
from autoparallel.errors import CaptureError

Tensor = torch.Tensor
#: Comparisons of the number of rows with another number.
COMPARED = {getattr(Tensor, form.format(name)): getattr(operator, name)
            for name in ("eq", "ne", "lt", "le", "gt", "ge") for form in ("{}", "__{}__")}
#: Tests of tensors, by what they ask.
TESTS = {**COMPARED, **{getattr(owner, name): name for name in ("logical_not", "isnan", "isfinite", "isinf")
                        for owner in (torch, Tensor)},
         **{getattr(torch, name): getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
         Tensor.__invert__: "invert", Tensor.bool: "bool"}
#: What a tensor is asked that picks rows by their values.
ASKED = {torch.nonzero: nonzero, Tensor.nonzero: nonzero, torch.argwhere: nonzero, Tensor.argwhere: nonzero}


def decided(compare: Callable[[int, int], bool], mask: Mask, other: int) -> Any:
    """How a comparison of the number of a mask's rows comes out whatever the data say; NotImplemented where that
    depends on them."""
    least, most = mask.least, mask.cells.numel()
    found = {compare(count, other) for count in (least, most, min(max(other, least), most))}
    return found.pop() if len(found) == 1 else NotImplemented


@contextmanager
def rows_by_value() -> Iterator[None]:
    """For one trace."""
    try:
        yield
    finally:
        REGIONS.close()
        forget()


def asked(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a call of torch on rows picked by their values; NotImplemented if none of its tensors are such
    rows."""
    if not args or not isinstance(args[0], Tensor) or isinstance(args[0], Tensorlike):
        return NotImplemented
    if function in COMPARED and (mask := getattr(args[0], "of_rows", None)) and type(args[1]) is int:
        return decided(COMPARED[function], mask, args[1])
    if function in ASKED and unknown(args[0]):
        return nonzero(*args, **kwargs)
    if function is torch.where and len(args) == 1 and not kwargs and unknown(args[0]):
        return nonzero(args[0], as_tuple=True)
    if function in (torch.masked_select, Tensor.masked_select) and len(args) == 2 and is_mask(args[1]):
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)    # (broadcast_tensors makes one op of both)
        function, args = Tensor.__getitem__, [x if x.shape == shape else x.expand(shape) for x in args]
    if function is Tensor.__getitem__ and picks(args[1]):
        try:
            return picked(*args)
        except CaptureError:
            if (index := always_at(args[1])) is None:
                raise
            return args[0][index]
    if function is Tensor.__getitem__ and reads_at(args[1]):
        return read_at(*args)
    if function is Tensor.__setitem__ and (picks(args[1]) or any(isinstance(a, Rows) for a in args[1:])) and put(*args):
        return None
    name = getattr(function, "__name__", "")
    writes = function is Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__"))
    ours = function is Tensor.index_add_ and any(isinstance(a, Place) for a in args)
    if writes and not ours and not REGIONS.writing and REGIONS.open and REGIONS.conditions():
        raise refused(f"{name.strip('_')} in place where the data say whether")
    return NotImplemented


def noted(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
    """What a call of torch made: a test of the same tensors is the same mask when it is asked again."""
    if function in TESTS and not kwargs and all(isinstance(a, Tensor | int | float) for a in args):
        note_test(TESTS[function], args, made)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments or results, nested structures included."""
    if isinstance(value, Rows):
        yield value.value
    elif isinstance(value, Tensor) and not isinstance(value, Tensorlike):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_of(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_of(each)


__all__ = ["asked", "noted", "rows_by_value", "tensors_of"]
