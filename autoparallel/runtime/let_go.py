"""The original is let go once nobody but its parallel module has it, as Python lets go of what has no name any more.

In ``model = autoparallel.compile(model, mesh)`` the original loses its name, and the parallel module still needs its
structure, to trace calls of other forms: not the values of its parameters, of which it has shards. It refers to a root
of its own with the same attributes, so that it can tell when the original is gone, and drops the values then.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any
from weakref import getweakrefs, ref

import torch
from torch import nn

from autoparallel.capture.dependencies import MIRRORS
from autoparallel.capture.devices import put, without_data

#: Objects that parts of a model refer to, from which on it is taken to refer to itself.
MOST = 100_000
#: Objects that do not refer to a model, or are parts themselves.
_LEAVES = (nn.Module, torch.Tensor, torch.dtype, torch.device, type, ModuleType, str, bytes, int, float, complex,
           type(None))


class Root:
    """The root of an original model, and whether the user still has it.

    ``module`` is the model itself where another object cannot stand in for it (`_is_more_than_attributes`) and where it
    refers to itself (a bound method as an attribute, a module that has its parent): what it refers to would be gone.
    Then nothing is let go. ``dropped``: names of the parameters whose values were dropped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._users: Callable[[], nn.Module | None] = ref(model)
        must_stay = _is_more_than_attributes(model) or _refers_to_itself(model)
        self._module = model if must_stay else _with_attributes_of(model)
        self.dropped = frozenset[str]()

    def __deepcopy__(self, memo: dict[int, Any]) -> Root:
        """Of a copy nobody has the original."""
        made = object.__new__(Root)
        made._module, made._users, made.dropped = deepcopy(self.module, memo), lambda: None, self.dropped
        return made

    @property
    def module(self) -> nn.Module:
        """The root. While somebody has the original, a class that it was given is this root's, too."""
        users = self._users()
        if users is not None and type(users) is not type(self._module):
            self._module.__class__ = type(users)
        return self._module

    def is_gone(self) -> bool:
        """Whether nobody else has the root of the original."""
        return self._users() is None

    def is_held(self, holders: Iterable[Any]) -> bool:
        """Whether somebody else has a module or a parameter of the original: a model that is a part of it, an optimizer
        or a list of its parameters, another parallel module of it. ``holders``: our own containers of these.
        """
        modules = [*self._module.modules()]
        tables = [*chain.from_iterable((module._modules, module._parameters) for module in modules)]
        mirrors = [vars(module)[name] for module in modules for name in MIRRORS & vars(module).keys()]
        cells = chain.from_iterable(map(_cells, set(map(type, modules))))
        ours = {id(holder): holder for holder in (*holders, *tables, *mirrors, *cells)}
        counts = Counter(map(id, chain.from_iterable(map(gc.get_referents, ours.values()))))
        root = modules.pop(0)
        return (_has_more(modules, [nn.Module()], counts)
                or _has_more([*root.parameters()], [nn.Parameter(torch.empty(0))], counts)
                or _has_more([*map(vars, (root, *modules))], [vars(nn.Module())], counts, 1))

    def drop_values(self) -> None:
        """Replace the parameters by ones without data, which can be trained later."""
        owned = [(path, module, name, parameter) for path, module in self._module.named_modules()
                 for name, parameter in module._parameters.items() if parameter is not None and not parameter.is_meta]
        with torch.inference_mode(False):
            empty = {id(parameter): without_data(parameter, "meta") for *_, parameter in owned}
        for path, module, name, parameter in owned:
            put(module, name, empty[id(parameter)])
            self.dropped |= {f"{path}.{name}".strip(".")}


def _has_more(objects: Sequence[Any], alone: Sequence[Any], counts: Mapping[int, int], owners: int = 0) -> bool:
    """Whether one of the objects has more references than ``counts`` and ``owners`` of it. ``alone``: one without."""
    (of_this,) = map(sys.getrefcount, alone)
    return any(count > of_this + owners + counts[id(one)] for one, count in zip(
        objects, [*map(sys.getrefcount, objects)], strict=True))


def _cells(kind: type) -> list[Any]:
    """The cells of a class's properties, and of functions in these: torch's parametrized modules are there."""
    found = list[Any]()
    waiting: list[Any] = [f for value in vars(kind).values() if isinstance(value, property)
                          for f in (value.fget, value.fset)]
    while waiting:
        for cell in getattr(waiting.pop(), "__closure__", None) or ():
            if all(cell is not known for known in found):
                found.append(cell)
                waiting += [inner for inner in gc.get_referents(cell) if isinstance(inner, FunctionType)]
    return found


def _with_attributes_of(model: nn.Module) -> nn.Module:
    made = object.__new__(type(model))
    object.__setattr__(made, "__dict__", vars(model))
    return made


def _is_more_than_attributes(model: nn.Module) -> bool:
    """Whether more than its attributes makes the model: slots, a builtin container as a base, a ``__del__``."""
    kind = type(model)
    return hasattr(kind, "__del__") or any(
        vars(base).get("__slots__") or not base.__flags__ & _OF_PYTHON for base in kind.__mro__[:-1])


#: Of a class that a ``class`` statement made (`Py_TPFLAGS_HEAPTYPE`).
_OF_PYTHON = 1 << 9


def _refers_to_itself(model: nn.Module) -> bool:
    """Whether a part of the model, or what a part has (containers, functions, objects, weak references), refers to the
    model. True too where there is too much to look at."""
    wanted, looked_at = {id(model), *map(id, getweakrefs(model))}, 0
    seen, waiting = set[int](), [*map(vars, model.modules())]
    while waiting and len(seen) < MOST and looked_at < 100 * MOST:
        found = _inside(waiting.pop())
        looked_at += len(found)
        for value in found:
            if id(value) in wanted:
                return True
            if not isinstance(value, _LEAVES) and id(value) not in seen:
                seen.add(id(value))
                waiting.append(value)
    return bool(waiting)


def _inside(value: Any) -> list[Any]:
    """What an object refers to, asked of Python itself: a container's own methods may raise, or read files."""
    if isinstance(value, FunctionType):    # not all that its file has
        return [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *(value.__closure__ or ()),
                *vars(value).values()]
    return gc.get_referents(value)


__all__ = ["Root"]
