"""The device that a model is traced on: that of its program, wherever the model lies.

A model built on the CPU or on the meta device runs on GPUs, where autocast casts other ops, and code that asks for a
device gets another answer. While it is traced, its parameters, buffers and inputs are tensors of the program's device
without data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

#: The device that models are traced on within `traced_on`.
_DEVICE: ContextVar[torch.device | None] = ContextVar("device of traces", default=None)
_PLAIN = ("cpu", "meta")


@contextmanager
def traced_on(device: torch.device) -> Iterator[None]:
    """Within, models are traced as they run on this device."""
    token = _DEVICE.set(device)
    try:
        yield
    finally:
        _DEVICE.reset(token)


def program_device(model: nn.Module, leaves: Sequence[Any]) -> torch.device | None:
    """The device to trace a call on, of which the model or an argument is not; None if all lie there."""
    tensors = [*model.parameters(), *model.buffers(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
    device = _DEVICE.get() or next((t.device for t in tensors if t.device.type not in _PLAIN), None)
    return None if device is None or all(t.device.type == device.type for t in tensors) else device


@contextmanager
def moved(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
          ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Within, parameters and buffers of the model are tensors of the device without data; gives the arguments likewise.

    A tensor that is registered twice stays one tensor.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode, made = FakeTensorMode(allow_non_fake_inputs=True), dict[int, Tensor]()

    def fake(value: Tensor) -> Tensor:
        if is_lazy(value):
            return value
        if id(value) not in made:
            made[id(value)] = without_data(value, device, mode)
        return made[id(value)]

    owned = [(module, name, value) for module in model.modules()
             for table in (module._parameters, module._buffers) for name, value in table.items() if value is not None]
    arguments = pytree.tree_map_only(Tensor, fake, (tuple(args), dict(kwargs)))
    try:
        for module, name, value in owned:
            put(module, name, fake(value))
        yield arguments
    finally:
        for module, name, value in owned:
            put(module, name, value)


def put(module: nn.Module, name: str, value: Any) -> None:
    """Register a parameter or buffer in place of another one, without what a class does to the user who sets it; a
    recurrent layer's list has it, too."""
    table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    before, table[name] = table.get(name), value
    flat = vars(module).get("_flat_weights", ())
    for number, tensor in enumerate(flat):
        if tensor is before:
            flat[number] = value


def without_data(value: Tensor, device: torch.device | str, mode: AbstractContextManager[Any] | None = None) -> Tensor:
    """A tensor of the shape, strides, dtype and ``requires_grad`` of ``value``, made within ``mode``; a parameter if
    ``value`` is one."""
    with mode or nullcontext():
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(made, value.requires_grad)
    return made.requires_grad_(value.requires_grad)


__all__ = ["moved", "program_device", "put", "traced_on", "without_data"]
