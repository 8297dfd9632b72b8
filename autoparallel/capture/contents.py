"""Contents of the values that a forward reads besides its arguments: described, compared and restored."""

from __future__ import annotations

import functools
import gc
import io
import os
import queue
import random
import sys
import threading
import weakref
from argparse import Namespace
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from types import (
    BuiltinMethodType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import nn

ATOMS = (int, str, bytes, bool, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size)
NUMBERS = (float, complex)  # 0.0 equals -0.0, and a NaN nothing
_DEPTH, _NODES, _BYTES = 8, 5_000, 1 << 20  # of a description; larger values are compared by identity
_CONTAINERS = (list, dict, MappingProxyType, set, tuple, deque, bytearray, array, ContextVar, functools.partial,
               np.ndarray, weakref.ref)
#: Class of the functions of `functools.lru_cache`.
CachedFunction: Any = type(functools.lru_cache(lambda: None))
_FUNCTIONS = (FunctionType, staticmethod, classmethod, CachedFunction)
#: Classes of Python's own whose attributes are their content.
_WITH_FIELDS = (SimpleNamespace, Namespace, UserDict, UserList, ChainMap, threading.local, type(os.environ),
                weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet)
#: Python's, torch's and ours; libraries of formulas and pictures, whose thousands of functions would be followed.
_NOT_USERS = frozenset({*sys.stdlib_module_names, "torch", "numpy", "autoparallel", "builtins", "sympy", "mpmath",
                        "matplotlib"})


class Missing:
    """In place of the value of an attribute or variable that is not there."""


class Same:
    """A value that is equal to itself only."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def description(value: Any) -> object:
    """A value that is equal for two values if and only if no program can tell them apart: plain values, containers and
    objects by their contents; tensors, modules, functions and all else by identity."""
    return _described(value, _DEPTH, [_NODES])


def _described(value: Any, depth: int, left: list[int]) -> object:
    kind = type(value)
    if kind in ATOMS or value is Missing:
        return kind, value
    if kind in NUMBERS:
        return kind, repr(value)
    if isinstance(value, Enum):
        return kind, value.name
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object and value.nbytes <= _BYTES:
        return kind, value.dtype.str, value.shape, value.tobytes()
    left[0] -= 1
    if depth and left[0] > 0:
        if kind is slice:
            value = (value.start, value.stop, value.step)
        fields = _attributes_of_subclass(value)
        attributes = (_described(fields, depth - 1, left),) if fields else ()
        if isinstance(value, (tuple, list, deque)):
            return kind, tuple(_described(v, depth - 1, left) for v in value), *attributes
        if isinstance(value, _FUNCTIONS):
            return kind, Same(value), *(_described(v, depth - 1, left) for v in parts_of_function(value))
        if isinstance(value, np.ndarray) and value.dtype == object:
            return kind, value.shape, tuple(_described(v, depth - 1, left) for v in value.flat)
        if isinstance(value, weakref.ref):
            return kind, _described(value(), depth - 1, left)
        if isinstance(value, (bytearray, array)):
            return kind, bytes(value)
        if isinstance(value, ContextVar):
            return kind, _described(value.get(Missing), depth - 1, left)
        if isinstance(value, (dict, MappingProxyType)):
            made = getattr(value, "default_factory", None)  # of a defaultdict
            return kind, _described(made, depth - 1, left), tuple(
                (_described(k, depth - 1, left), _described(v, depth - 1, left)) for k, v in value.items()), *attributes
        if isinstance(value, (set, frozenset)):
            return kind, frozenset(_described(v, depth - 1, left) for v in value), *attributes
        if kind is functools.partial:
            return kind, tuple(_described(v, depth - 1, left) for v in (value.func, value.args, value.keywords))
        if has_fields(value):
            return kind, _described(fields_of(value), depth - 1, left)
    if kind.__hash__ not in (None, object.__hash__, torch.Tensor.__hash__):
        return kind, value  # what Python has made equal by value: a path, a range, a decimal
    return Same(value)


def parts_of_function(function: Any) -> tuple[Any, ...]:
    """What may be replaced in a function that stays the same object, as IPython's autoreload does."""
    if isinstance(function, FunctionType):
        return function.__code__, function.__defaults__, function.__kwdefaults__, vars(function)
    return inner_function(function),


def inner_function(function: Any) -> Any:
    """The function in a static method, a class method or a cached function."""
    return function.__wrapped__ if isinstance(function, CachedFunction) else function.__func__


def cached_by(function: Any) -> list[tuple[Any, Any]]:
    """What a function of `functools.lru_cache` keeps: arguments, as its keys, and results. (As CPython's collector sees
    it: of a cache with a bound, key, result and class of a link one after another; else a dict.)"""
    parts = gc.get_referents(function)
    if function.cache_parameters()["maxsize"] is None:
        own = function.__dict__
        return list(next(part for part in parts if isinstance(part, dict) and part is not own).items())
    return [(parts[at - 2], parts[at - 1]) for at, part in enumerate(parts) if part is _Link]


def _link_class() -> Any:
    """Class of the links of a bounded cache."""
    one = functools.lru_cache(lambda key: key)
    one(0)
    return next(type(link) for part in gc.get_referents(one) if isinstance(part, dict) for link in part.values()
                if type(link).__name__ == "_lru_list_elem")


_Link = _link_class()


def has_fields(value: Any) -> bool:
    """Whether a value is a plain object of the user's (a config), whose attributes are its content."""
    kind: Any = type(value)
    if isinstance(value, _WITH_FIELDS):
        return True
    home = str(kind.__module__).partition(".")[0]    # Cython's metaclasses have a descriptor there
    others = isinstance(value, (type, FunctionType, MethodType, ModuleType, nn.Module, torch.Tensor))
    return (hasattr(value, "__dict__") or bool(_slots(kind))) and not others and home not in _NOT_USERS


def fields_of(value: Any) -> dict[str, Any]:
    """The attributes of an object that `has_fields`, those in slots too."""
    kind: Any = type(value)
    slots = {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}
    if isinstance(value, threading.local):  # this thread's
        return {**vars(value), **slots}
    return {**object.__getattribute__(value, "__dict__"), **slots} if hasattr(value, "__dict__") else slots


def fields_in_dict(value: Any) -> bool:
    """Whether the `fields_of` an object are those in its ``__dict__``, with none in slots."""
    kind: Any = type(value)
    odd = isinstance(value, (*_CONTAINERS, *_FUNCTIONS, threading.local))
    return not odd and hasattr(value, "__dict__") and not _slots(kind)


@functools.lru_cache(maxsize=1024)
def _slots(kind: Any) -> tuple[str, ...]:
    """Names of the slots of a class."""
    return tuple(name for owner in kind.__mro__ for name, member in vars(owner).items()
                 if isinstance(member, MemberDescriptorType) and name != "__dict__")


def is_mutable(value: Any) -> bool:
    """Whether a value can become another one and stay the same object."""
    return isinstance(value, (*_CONTAINERS, *_FUNCTIONS)) or has_fields(value)


def is_users(namespace: Mapping[str, Any]) -> bool:
    """Whether a function with these globals is neither torch's, nor Python's, nor ours, nor of formulas or pictures."""
    return str(namespace.get("__name__", "")).partition(".")[0] not in _NOT_USERS


def inside(container: Any) -> Iterable[Any]:
    """The contents of a mutable value (`is_mutable`)."""
    fields = _attributes_of_subclass(container)
    if isinstance(container, (dict, MappingProxyType)):
        made = getattr(container, "default_factory", None)
        return chain(container, container.values(), (made,), fields, fields.values())
    if isinstance(container, (list, tuple, set, frozenset, deque)):
        return chain(container, fields, fields.values()) if fields else container
    if isinstance(container, ContextVar):
        return (container.get(Missing),)
    if isinstance(container, weakref.ref):
        return (container(),)
    if isinstance(container, functools.partial):
        return container.func, container.args, container.keywords
    if isinstance(container, _FUNCTIONS):
        return parts_of_function(container)
    fields = fields_of(container)
    return chain(fields, fields.values())


def _attributes_of_subclass(container: Any) -> dict[str, Any]:
    """The attributes of an instance of a user's subclass of list, dict, ..., which has them besides its items."""
    kind: Any = type(container)
    has_both = isinstance(container, (dict, list, tuple, set, frozenset, deque)) and hasattr(container, "__dict__")
    if not has_both or kind.__module__.partition(".")[0] in _NOT_USERS:
        return {}
    return dict(object.__getattribute__(container, "__dict__"))


class Inventory:
    """The containers that can be reached from a model's attributes and variables, with what is in them; of the user's
    objects by fields of these names."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held: dict[int, tuple[str, bool, Any, Any]] = {}
        self._caches: list[tuple[str, Any, list[tuple[Any, Any]]]] = []
        self._moving: dict[int, Any] = {}

    def add(self, name: str, root: Any, owned: bool) -> Any:
        """Hold what is in ``root``; ``owned``: it is the model's own. Returns a value in it that `is_moving`, or
        Missing."""
        if id(root) not in self._moving and (is_mutable(root) or is_moving(root)):
            self._moving[id(root)] = self._hold(name, root, owned)
        return self._moving.get(id(root), Missing)

    def _hold(self, name: str, root: Any, owned: bool) -> Any:
        waiting, known = [root], set[int]()
        moving: Any = Missing
        while waiting and len(known) < MOST:
            value = waiting.pop()
            moving = value if is_moving(value) else moving
            if id(value) in known or not is_mutable(value):
                continue
            known.add(id(value))
            if id(value) not in self._held:
                if isinstance(value, CachedFunction):
                    self._caches.append((name, value, cached_by(value)))
                self._held[id(value)] = name, owned, value, _copied(value)
            waiting.extend(self._parts(value))
        return moving

    def _parts(self, value: Any) -> Iterable[Any]:
        if isinstance(value, FLAT):
            return ()
        if isinstance(value, (*_CONTAINERS, *_FUNCTIONS, *_WITH_FIELDS)):
            return inside(value)
        return [part for name, part in fields_of(value).items() if name in self._names]

    def newly_cached(self) -> Iterator[tuple[str, Any, list[Any]]]:
        """Functions of `functools.lru_cache` that have kept results since, with these."""
        for name, function, before in self._caches:
            known = {id(key) for key, _ in before}
            if new := [result for key, result in cached_by(function) if id(key) not in known]:
                yield name, function, new

    def changes(self) -> list[Change]:
        """The containers whose contents have changed. Other running threads count only if the model owns them: they
        update their own attributes at any time, as tqdm's monitor does every ten seconds."""
        return [Change(name, owned, value, before, now) for name, owned, value, before in self._held.values()
                if (owned or not _runs_beside(value)) and not _is_equal(before, now := _copied(value))]


@dataclass(frozen=True)
class Change:
    """A container, ``value``, with what was in it and what is, and the attribute or variable that it is reached by.
    ``owned``: by an attribute of the model; others may be other threads' as well."""

    name: str
    owned: bool
    value: Any
    before: Any
    now: Any


def restore(changes: Iterable[Change]) -> None:
    """Restore the earlier contents of containers; read-only ones keep theirs."""
    for change in changes:
        value, before = change.value, change.before
        if isinstance(value, np.ndarray):
            value[...] = np.frombuffer(before, value.dtype).reshape(value.shape)
        elif isinstance(value, bytearray):
            value[:] = before
        elif isinstance(value, array):
            value[:] = array(value.typecode, before)
        elif isinstance(value, (list, deque)):
            value.clear()
            value.extend(before)
        elif isinstance(value, (dict, set)):
            value.clear()
            value.update(before)
        elif hasattr(value, "__dict__") and isinstance(before, dict):
            kind: Any = type(value)
            vars(value).clear()
            vars(value).update({n: v for n, v in before.items() if n not in _slots(kind)})
            for name in [n for n in _slots(kind) if n in before]:
                setattr(value, name, before[name])


def _copied(container: Any) -> Any:
    """What is in a container: a dict by name or key, a list or a set, bytes."""
    if isinstance(container, (np.ndarray, bytearray, array)):
        flat = container.nbytes <= _BYTES if isinstance(container, np.ndarray) else True
        return bytes(container.tobytes() if not isinstance(container, bytearray) else container) if flat else b""
    if isinstance(container, (dict, MappingProxyType)):
        return dict(container)
    if isinstance(container, set):
        return set(container)
    if has_fields(container):
        return dict(fields_of(container))
    return list(inside(container))


def _is_equal(before: Any, now: Any) -> bool:
    if isinstance(before, (bytes, set)):
        return bool(before == now)
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(map(_is_same, before.values(), map(now.get, before)))
    return len(before) == len(now) and all(map(_is_same, before, now))


def _is_same(before: Any, now: Any) -> bool:
    return before is now or (is_plain(before) and is_plain(now) and description(before) == description(now))


def _runs_beside(value: Any) -> bool:
    return isinstance(value, threading.Thread) and value is not threading.current_thread() and value.is_alive()


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or the like."""
    return type(value) in (*ATOMS, *NUMBERS)


def is_moving(value: Any) -> bool:
    """Whether a value gives another one each time it is asked: an iterator, a queue, a generator of random numbers
    (not Python's and numpy's own, which are watched), or a method of one."""
    if isinstance(value, (BuiltinMethodType, MethodType, MethodWrapperType)):
        value = value.__self__
    return (isinstance(value, _MOVING) and not isinstance(value, (io.IOBase, torch.Tensor, nn.Module))
            and value is not PYTHONS and value is not _NUMPYS)


FLAT = (np.ndarray, bytearray, array)
MOST = 5_000  # containers in one attribute
_MOVING = (Iterator, random.Random, np.random.Generator, np.random.RandomState, queue.Queue, queue.SimpleQueue)
PYTHONS: Any = getattr(random.random, "__self__", None)
_NUMPYS: Any = getattr(np.random.rand, "__self__", None)
