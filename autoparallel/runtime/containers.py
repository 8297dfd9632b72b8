"""Parallel modules of containers: ``len(parallel)``, iteration and ``parallel[2] = layer`` are as the original's.

Python asks the class for these methods, so that a container has a class of its own; other models raise torch's
TypeErrors. Before the first trace they are the original's, which is traced; after it a replaced part is refused at the
next call (`guards.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

from autoparallel.runtime.state import State

_METHODS = ("__len__", "__iter__", "__contains__", "__setitem__", "__delitem__")
#: Methods by which a container changes itself, bound to it before the first trace.
CHANGES = frozenset({"append", "extend", "insert", "pop", "clear", "update"})


def is_container(model: nn.Module) -> bool:
    return hasattr(type(model), "__len__")


@cache
def containing(module: Any, container: type) -> type:
    """A subclass of ``module`` with those of the methods that ``container`` has."""
    methods = {name: _as_original(getattr(container, name)) for name in _METHODS if hasattr(container, name)}
    return type(module.__name__, (module,), {**methods, "__module__": module.__module__, "__doc__": module.__doc__})


def _as_original(method: Callable[..., Any]) -> Callable[..., Any]:
    def called(self: Any, *args: Any) -> Any:
        state: State = self._state
        return method(self if state.forms else state.model, *args)

    return called


__all__ = ["CHANGES", "containing", "is_container"]
