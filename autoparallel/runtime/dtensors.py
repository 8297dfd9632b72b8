"""DTensors on the meshes of parallel modules, where torch answers for one shard as if it were the whole: refused.

Assigning to ``.data`` changes nothing of a DTensor, and ``.item()``, ``float()`` and ``bool()`` of one that is sharded
or a summand read this rank's part. (The one file that touches DTensor's op handlers and attributes.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoparallel.errors import InputError

#: (op, arguments, keyword arguments) -> result, in place of DTensor's own way of running the op.
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_MESHES: WeakValueDictionary[int, DeviceMesh] = WeakValueDictionary()  # by id: equal meshes are several
_NUMBER = torch.ops.aten._local_scalar_dense.default
_DATA: Any = torch.Tensor.data


def watch(mesh: DeviceMesh) -> None:
    """Refuse, from now on, what is wrong of DTensors on this mesh."""
    _replace()
    _MESHES[id(mesh)] = mesh


def is_watched(value: Any) -> bool:
    """Whether a value is a DTensor on the mesh of a parallel module."""
    return isinstance(value, DTensor) and id(value.device_mesh) in _MESHES


def set_handler(op: Any, handler: Handler) -> Handler | None:
    """Let ``handler`` run ``op`` on DTensors; returns the handler before."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    before = handlers.get(op)
    handlers[op] = handler
    return before


@cache
def _replace() -> None:
    set_handler(_NUMBER, _number)
    DTensor.data = property(_DATA.__get__, _set_data)  # type: ignore[assignment]


def _number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value: DTensor = args[0]
    mesh = value.device_mesh
    if is_watched(value) and any(not p.is_replicate() and mesh.size(axis) > 1
                                 for axis, p in enumerate(value.placements)):
        raise InputError(f"a Python number is asked of a DTensor {list(value.shape)} with placements "
                         f"{value.placements}, of which this rank has a part only\n"
                         "  Write value.full_tensor().item(), on all ranks.")
    return op(value._local_tensor)


def _set_data(tensor: DTensor, value: Any) -> None:
    if is_watched(tensor):
        raise InputError(f"assigning to the data of a DTensor {list(tensor.shape)} changes nothing of it: its values "
                         "are in the local shard\n  Write into it: `with torch.no_grad(): tensor.copy_(value)`, with a "
                         "DTensor; a whole tensor as distribute_tensor(value, tensor.device_mesh, tensor.placements).")
    _DATA.__set__(tensor, value)


__all__ = ["Handler", "is_watched", "set_handler", "watch"]
