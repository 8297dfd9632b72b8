"""Reads of a DTensor at plain indices: ``weight[ids]``, as of rows of a table or entries of an output.

torch takes no plain indices of a DTensor. Here they are those of the whole, equal on all ranks, which compare them by a
hash; each rank gets the whole result. A mask that is a DTensor is gathered. Gradients flow as in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoparallel.runtime.dtensors import Handler, as_before, is_watched, replicated, set_handler
from autoparallel.runtime.gathered import gathered
from autoparallel.runtime.places import plain_as_whole

_READ, _PUT = torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default
_Indices = Sequence[Tensor | None]


@cache
def read_places() -> None:
    """Read so, from now on, DTensors on the meshes of parallel modules."""
    for op, run in ((_READ, _read), (_PUT, _put)):
        before: list[Handler | None] = []
        before.append(set_handler(op, partial(run, before)))


def _read(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value, indices = args
    if not is_watched(value) or not any(_is_ours(index) for index in indices):
        return as_before(before, op, args, kwargs)
    return _as_whole(op(gathered(op, value)._local_tensor, _whole(indices, value)), value)


def _put(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of a read: rows are added to zeros, at their places."""
    zeros, indices, rows, *options = args
    if not is_watched(zeros) or not any(_is_ours(index) for index in indices):
        return as_before(before, op, args, kwargs)
    rows = replicated(plain_as_whole(rows, zeros))._local_tensor
    made = op(replicated(zeros)._local_tensor, _whole(indices, zeros), rows, *options, **kwargs)
    return _as_whole(made, zeros)


def _is_ours(index: Tensor | None) -> bool:
    """Whether torch takes no such index: a plain one, or a mask."""
    return index is not None and (not isinstance(index, DTensor) or index.dtype in (torch.bool, torch.uint8))


def _whole(indices: _Indices, like: DTensor) -> list[Tensor | None]:
    return [index if index is None else replicated(index)._local_tensor for index in plain_as_whole(indices, like)]


def _as_whole(local: Tensor, like: DTensor) -> DTensor:
    return plain_as_whole(local, like, compare=False)


__all__ = ["read_places"]
