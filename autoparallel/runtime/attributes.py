"""Attributes of a parallel module: those that forward may read are the original's, which is traced."""

from __future__ import annotations

import inspect
from functools import cached_property
from types import MethodType
from typing import Any, cast

from torch import nn

from autoparallel.capture.contents import Missing
from autoparallel.errors import InputError, StageError
from autoparallel.runtime import tracing
from autoparallel.runtime.containers import CHANGES, is_container
from autoparallel.runtime.state import State
from autoparallel.runtime.wrappers import naming_ddp, refuse_reading, refuse_setting

#: Attributes of the parallel module itself; all others are the original's.
_OWN = frozenset({"__class__", "_state", "_calls", *vars(nn.Module())})


def read(module: nn.Module, name: str) -> Any:
    """An attribute that ``module`` itself lacks. Methods and properties of the original and of its modules are bound
    to ``module`` and its parts, so that they call these and read their parameters: the original's are not trained.
    Raises AttributeError; StageError for a parameter of another pipeline stage."""
    try:
        return nn.Module.__getattr__(module, name)
    except StageError:
        raise
    except AttributeError:
        state: State | None = module.__dict__.get("_state")
        refuse_reading(name, None if state is None else state.model)
        if state is None or name.startswith("__"):
            raise
        model = state.model
    if name in state.left_in_root:
        return state.left_in_root[name]
    described = inspect.getattr_static(type(model), name, None)
    if isinstance(described, property) and described.fget is not None:
        return described.fget(module)
    if isinstance(described, cached_property):
        return described.func(module)
    with naming_ddp(name):
        value = getattr(model, name)
    if name in CHANGES and not state.forms and is_container(model):
        return value
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return MethodType(value.__func__, _part(value.__self__, module, state))
    return _part(value, module, state) if isinstance(value, nn.Module) else value


class Inherited:
    """A value or method that a subclass of the original's class inherits: one that the original itself has in its
    place (set in ``__init__``, left by forward, a replaced method) comes first, as in the original."""

    def __init__(self, original: type[nn.Module], name: str) -> None:
        self.original, self.name = original, name

    def __get__(self, module: nn.Module | None, owner: type[nn.Module]) -> Any:
        state: State | None = None if module is None else module.__dict__.get("_state")
        if state is not None and (self.name in vars(state.model) or self.name in state.left_in_root):
            return read(cast(nn.Module, module), self.name)
        value = inspect.getattr_static(self.original, self.name)
        return value.__get__(module, owner) if hasattr(value, "__get__") else value


def inherited(original: type[nn.Module], above: type[nn.Module]) -> dict[str, Inherited]:
    """By name, for a subclass of ``above`` and ``original``, what it inherits of the latter."""
    found = {name: value for each in original.__mro__ for name, value in vars(each).items()}
    return {name: Inherited(original, name) for name in found if not name.startswith("__") and not hasattr(above, name)
            and not isinstance(inspect.getattr_static(original, name), (property, classmethod, staticmethod))}


def item(module: nn.Module, state: State, key: Any) -> Any:
    """``module[key]`` by the original's ``__getitem__``. Raises TypeError if that has none, as the original does, and
    InputError for a slice of an `nn.Sequential`, which would be a module of its own without a program."""
    method = getattr(type(state.model), "__getitem__", None)
    if method is None:
        raise TypeError(f"'{type(state.model).__name__}' object is not subscriptable")
    tracing.first_form(state)
    if method not in (nn.Sequential.__getitem__, nn.ModuleList.__getitem__):
        return method(module, key)
    if isinstance(key, slice):
        raise InputError("a slice of a parallel module would be a module without a program\n  Its parts are "
                         "list(parallel.children())[...].")
    return [*module._modules.values()][key]


def _part(original: nn.Module, root: nn.Module, state: State) -> nn.Module:
    """What the parallel module ``root`` has in place of the original or of a module of it; others are themselves."""
    return root if original is state.model else state.parts.get(original, original)


def set_on_original(module: nn.Module, name: str, value: Any) -> bool:
    """Set an attribute that is the original's there; returns False, with nothing set, for one of ``module`` itself:
    its own state, and after the first trace tensors and submodules. A setter of the original runs on ``module``."""
    refuse_setting(name)
    state: State | None = module.__dict__.get("_state")
    if name == "training" and state is not None and not state.forms:
        state.model.training = value  # the first trace takes the original's modes
    if state is None or name in _OWN or isinstance(getattr(type(module), name, None), property):
        return False
    described = inspect.getattr_static(type(state.model), name, None)
    if isinstance(described, property) and described.fset is not None:
        described.fset(module, value)
    elif state.forms and (isinstance(value, (nn.Parameter, nn.Module)) or _registered(module, name)):
        return False
    else:
        setattr(state.model, name, value)
        state.left_in_root.pop(name, None)
    return True


def delete_on_original(module: nn.Module, name: str) -> bool:
    """Delete an attribute that is the original's there; returns False for one of ``module`` itself."""
    state: State | None = module.__dict__.get("_state")
    if state is None or name in module.__dict__ or _registered(module, name):
        return False
    if state.left_in_root.pop(name, Missing) is Missing or name in vars(state.model):
        delattr(state.model, name)
    return True


def _registered(module: nn.Module, name: str) -> bool:
    """Whether ``name`` is a parameter, buffer or submodule of ``module`` itself."""
    return name in (*module._parameters, *module._buffers, *module._modules)
