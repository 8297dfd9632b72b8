"""A device with a memory of its own, emulated on a CPU: ops on tensors of both memories raise, as on an accelerator."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
#: The device; torch has no kernels for it, and needs no library to name it.
DEVICE = torch.device("meta")
#: Ops that copy between the memories.
COPIES = (aten._to_copy.default, aten.copy_.default)


class There(torch.Tensor):
    """A tensor of the device: its values are in ``inner``, on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> There:
        strides = {} if inner.is_sparse else {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        made: There = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=DEVICE,
                                                          layout=inner.layout, **strides)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class TwoMemories(TorchDispatchMode):
    """While it is on, tensors that are made on `DEVICE` are `There`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    there, target = [isinstance(x, There) for x in tensors], kwargs.get("device")
    if func not in COPIES and any(there) and any(x.dim() for x, is_there in zip(tensors, there, strict=True)
                                                 if not is_there):
        raise RuntimeError(f"{func} of tensors on two devices")
    if target is not None:
        kwargs = {**{name: value for name, value in kwargs.items() if name != "pin_memory"}, "device": "cpu"}
    made = func(*pytree.tree_map(_inner, args), **pytree.tree_map(_inner, kwargs))
    if func._schema.is_mutable and tensors and func._schema.arguments[0].is_write:
        return args[0]
    on_device = any(there) if target is None else torch.device(target) == DEVICE
    return pytree.tree_map(lambda x: There(x) if on_device and isinstance(x, torch.Tensor) else x, made)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, There) else value


def memory_of(tensor: torch.Tensor) -> int:
    """A number of a tensor's memory, which its views share."""
    return int(_inner(tensor).untyped_storage()._cdata)
