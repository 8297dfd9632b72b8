"""The original is let go once nobody but its parallel module has it, as Python lets go of what has no name any more.

In ``model = autoparallel.compile(model, mesh)`` the original loses its name, and the parallel module still needs its
structure, to trace calls of other forms: not the values of its parameters, of which it has shards. It refers to a root
of its own with the same attributes, so that it can tell when the original is gone, and drops the values then.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import nn

#: Objects that parts of a model refer to, from which on it is taken to refer to itself.
MOST = 100_000
#: Objects that do not refer to a model, or are parts themselves.
_LEAVES = (nn.Module, torch.Tensor, torch.dtype, torch.device, type, ModuleType, BuiltinFunctionType, str, bytes, int,
           float, complex, type(None))


class Root:
    """The root of an original model, ``module``, and whether the user still has it.

    ``module`` is the model itself where that refers to itself (a bound method as an attribute, a module that knows its
    parent): reads by way of that would not be seen as the root's. Then nothing is let go.
    """

    def __init__(self, model: nn.Module) -> None:
        self._users: Callable[[], nn.Module | None] = ref(model)
        self.module = model if _knows_itself(model) else _with_attributes_of(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Root:
        """Of a copy nobody has the original."""
        made = object.__new__(Root)
        made.module, made._users = deepcopy(self.module, memo), lambda: None
        return made

    @property
    def is_own(self) -> bool:
        return self._users() is not self.module

    def is_gone(self) -> bool:
        """Whether nobody else has the original. While somebody has, a class that it was given is this root's, too."""
        users = self._users()
        if users is not None and type(users) is not type(self.module):
            self.module.__class__ = type(users)
        return users is None

    def drop_values(self) -> None:
        """Replace the parameters by ones without data. (What a trace leaves may hold the old ones until garbage is
        collected.)"""
        made, left = dict[int, nn.Parameter](), list[ref[nn.Parameter]]()
        for module in self.module.modules():
            for name in [name for name, p in module._parameters.items() if p is not None and not p.is_meta]:
                left.append(self._drop(module, name, made))
        if any(parameter() is not None for parameter in left):
            gc.collect()

    @staticmethod
    def _drop(module: nn.Module, name: str, made: dict[int, nn.Parameter]) -> ref[nn.Parameter]:
        parameter = module._parameters[name]
        assert parameter is not None
        if id(parameter) not in made:
            made[id(parameter)] = nn.Parameter(_without_data(parameter), parameter.requires_grad)
        setattr(module, name, made[id(parameter)])    # recurrent layers have lists of them
        return ref(parameter)


def _without_data(parameter: nn.Parameter) -> torch.Tensor:
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")


def _with_attributes_of(model: nn.Module) -> nn.Module:
    made = object.__new__(type(model))
    object.__setattr__(made, "__dict__", vars(model))
    return made


def _knows_itself(model: nn.Module) -> bool:
    """Whether a part of the model, or what a part has (containers, functions, objects), refers to the model. True too
    where there is too much to look at."""
    seen, waiting = set[int](), [*map(vars, model.modules())]
    while waiting and len(seen) < MOST:
        for value in _inside(waiting.pop()):
            if value is model:
                return True
            if id(value) not in seen and not isinstance(value, _LEAVES):
                seen.add(id(value))
                waiting.append(value)
    return bool(waiting)


def _inside(value: Any) -> list[Any]:
    """What an object refers to."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [*value]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        return [*(value.__defaults__ or ()), *(cell.cell_contents for cell in value.__closure__ or () if _is_set(cell))]
    return [*getattr(value, "__dict__", {}).values()]


def _is_set(cell: CellType) -> bool:
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:
        return False


__all__ = ["Root"]
