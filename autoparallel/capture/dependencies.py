"""The state of a model that a trace reads beside its arguments: attributes of modules, variables of functions, modes,
strides.

A traced program is that of the model as it was: a dropout's ``p``, a scale in a config, a global constant are fixed in
it. `Recorder` notes what was read, so that whoever keeps the program can tell when it is no longer the model's
(`runtime/guards.py`). It also puts back the attributes that forward assigned (a trace would leave tensors without data
in the user's model), and refuses forwards that carry values from call to call in attributes.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import sys
import threading
from argparse import Namespace
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from types import (
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx import Graph

from autoparallel.capture import settings
from autoparallel.errors import CaptureError, shown

ATOMS = (int, str, bytes, bool, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size)
_NUMBERS = (float, complex)  # 0.0 equals -0.0, and a NaN nothing
#: Attributes that every module has; hooks are watched apart from these.
INTERNAL = frozenset({*dir(nn.Module), *vars(nn.Module())})
_HOOK_TABLES = frozenset(name for name, value in vars(nn.Module()).items()
                         if isinstance(value, dict) and name not in ("_parameters", "_buffers", "_modules"))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: torch's tables of hooks of all modules, by name.
_HOOKS_OF_ALL = {name: table for name, table in vars(nn.modules.module).items() if name in (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")}
_DEPTH, _NODES, _BYTES = 8, 5_000, 1 << 20  # of a description; larger values are compared by identity
_CONTAINERS = (list, dict, MappingProxyType, set, tuple, deque, bytearray, array, ContextVar, functools.partial,
               np.ndarray)
_FUNCTIONS = (FunctionType, staticmethod, classmethod)
#: Classes of Python's own whose attributes are their content.
_WITH_FIELDS = (SimpleNamespace, Namespace, UserDict, UserList, ChainMap, threading.local, type(os.environ))
_NOT_USERS = frozenset({*sys.stdlib_module_names, "torch", "numpy", "autoparallel", "builtins"})


def hooks_of_all() -> list[Any]:
    """The user's hooks of all modules (`torch.nn.modules.module.register_module_forward_hook` and its kin)."""
    return [hook for table in _HOOKS_OF_ALL.values() if table for hook in table.values()
            if is_users({"__name__": getattr(hook, "__module__", "")})]


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
    if kind in _NUMBERS:
        return kind, repr(value)
    if isinstance(value, Enum):
        return kind, value.name
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object and value.nbytes <= _BYTES:
        return kind, value.dtype.str, value.shape, value.tobytes()
    left[0] -= 1
    if depth and left[0] > 0:
        if kind is slice:
            value = (value.start, value.stop, value.step)
        if isinstance(value, (tuple, list, deque)):
            return kind, tuple(_described(v, depth - 1, left) for v in value)
        if isinstance(value, _FUNCTIONS):
            return kind, Same(value), *(_described(v, depth - 1, left) for v in parts_of_function(value))
        if isinstance(value, (bytearray, array)):
            return kind, bytes(value)
        if isinstance(value, ContextVar):
            return kind, _described(value.get(Missing), depth - 1, left)
        if isinstance(value, (dict, MappingProxyType)):
            return kind, tuple((_described(k, depth - 1, left), _described(v, depth - 1, left))
                               for k, v in value.items())
        if isinstance(value, (set, frozenset)):
            return kind, frozenset(_described(v, depth - 1, left) for v in value)
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
        return function.__code__, function.__defaults__, function.__kwdefaults__
    return function.__func__,  # of a static method or a class method


def has_fields(value: Any) -> bool:
    """Whether a value is a plain object of the user's (a config), whose attributes are its content."""
    kind: Any = type(value)
    if isinstance(value, _WITH_FIELDS):
        return True
    home = kind.__module__.partition(".")[0]
    others = isinstance(value, (type, FunctionType, MethodType, ModuleType, nn.Module, torch.Tensor))
    return (hasattr(value, "__dict__") or bool(_slots(kind))) and not others and home not in _NOT_USERS


def fields_of(value: Any) -> dict[str, Any]:
    """The attributes of an object that `has_fields`, those in slots too."""
    kind: Any = type(value)
    slots = {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}
    if isinstance(value, threading.local):  # this thread's
        return {**vars(value), **slots}
    return {**object.__getattribute__(value, "__dict__"), **slots} if hasattr(value, "__dict__") else slots


@functools.lru_cache(maxsize=1024)
def _slots(kind: Any) -> tuple[str, ...]:
    """Names of the slots of a class."""
    return tuple(name for owner in kind.__mro__ for name, member in vars(owner).items()
                 if isinstance(member, MemberDescriptorType))


def is_mutable(value: Any) -> bool:
    """Whether a value can become another one and stay the same object."""
    return isinstance(value, (*_CONTAINERS, *_FUNCTIONS)) or has_fields(value)


@dataclass(frozen=True)
class Variable:
    """A global of a module, an attribute of a class or a cell of a closure that functions of the model read."""

    name: str
    holder: Any  # a namespace with ``get``, or a cell

    def value(self) -> Any:
        if type(self.holder) is not CellType:
            return self.holder.get(self.name, Missing)
        try:
            return self.holder.cell_contents
        except ValueError:
            return Missing

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        return self  # functions are not copied, nor are the variables that they read


@dataclass(frozen=True)
class Dependencies:
    """All state that a trace read: names of attributes by module path (class attributes and absent ones included),
    variables, modes with their values, and whether strides of tensors were read."""

    attributes: Mapping[str, tuple[str, ...]]
    variables: tuple[Variable, ...]
    strides: bool
    modes: Mapping[str, Any]


class Recorder:
    """Records what the forward of ``model`` reads and assigns while `recording`, in this thread."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._read: dict[str, dict[str, None]] = {path: {} for path in self._paths.values()}
        self._assigned: dict[tuple[str, str], Any] = {}
        self._read_now: set[tuple[str, str]] = set()  # in this trace
        self._read_first: set[tuple[str, str]] = set()
        self._ambient = settings.ambient()
        self._modes: dict[str, Any] = {}
        self.strides = False
        self._before = {module: dict(vars(module)) for module in model.modules()}
        self._contents = {id(value): (value, value.copy()) for values in self._before.values()
                          for name, value in values.items()
                          if name in _HOOK_TABLES or (name not in INTERNAL and type(value) in (list, dict, set))}
        self._numbers, self._watches = _RandomNumbers(), False
        self._variables = _variables_of(model)
        self._values = [variable.value() for variable in self._variables]

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record while the model is traced; afterwards the model's attributes have their old values."""
        key = threading.get_ident()
        for found in (self._assigned, self._read_now, self._read_first):
            found.clear()
        with _LOCK:
            _RECORDERS[key] = self
            if len(_RECORDERS) == 1:
                _install()
        draws = _Draws()
        try:
            with draws.watched() if self._watches else nullcontext():
                yield self
        finally:
            with _LOCK:
                del _RECORDERS[key]
                if not _RECORDERS:
                    _remove()
            self._restore()
            drawn = self._numbers.restore()
        if drawn and _others_run() and not self._watches:
            self._watches, self._numbers = True, _RandomNumbers()
            raise OthersDrawError
        if drawn and (draws.seen or not self._watches or any(_draws_by_numpy(value) for value in self._values)):
            raise CaptureError(f"forward of {type(self.model).__name__} draws numbers from {drawn}, others at each "
                               "call: a program has those of its trace\n"
                               "  Draw them by torch (torch.rand), or outside of forward and pass them. "
                               "(Of transformers' SpecAugment: config.apply_spec_augment=False.)")

    # --- what the forward does ---------------------------------------------------------------------------------

    def reads(self, module: nn.Module, name: str) -> None:
        if name not in INTERNAL and (path := self._paths.get(id(module))) is not None:
            self._read[path][name] = None
            self._read_now.add((path, name))

    def assigns(self, module: nn.Module, name: str, value: Any) -> None:
        path = self._paths.get(id(module))
        if path is not None and name not in INTERNAL and name not in module._buffers:  # which torch.export follows
            if (path, name) not in self._assigned and (path, name) in self._read_now:
                self._read_first.add((path, name))
            self._assigned[path, name] = value

    def mode(self, name: str, inside: Any) -> Any:
        """The answer to a user who asks for a setting: that of the call, unless the forward itself changed it."""
        self._modes.setdefault(name, self._ambient.get(name, inside))
        return settings.answer(name, self._ambient, inside)

    # --- afterwards --------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Give the model its attributes back."""
        for module, before in self._before.items():
            now = vars(module)
            for name in [n for n in {**now, **before} if n not in INTERNAL]:
                if name not in before:
                    del now[name]
                elif now.get(name, Missing) is not before[name]:
                    now[name] = before[name]
        for value, content in self._contents.values():
            if not _same_content(value, content):
                value.clear()
                value.extend(content) if isinstance(value, list) else value.update(content)

    def refuse_memory(self, graph: Graph) -> None:
        """Raises CaptureError for state that forward leaves for its next call: an attribute that it reads before it
        assigns another value. Values that depend on no argument of a call may stay."""
        for path, name in sorted(self._read_first):
            before = self._before[self.model.get_submodule(path)].get(name, Missing)
            after = self._assigned[path, name]
            plain = type(after) in (*ATOMS, *_NUMBERS) and type(before) in (int, float, complex, str, bytes, bool)
            if (isinstance(after, torch.Tensor) and _depends_on_call(after, graph)) or (
                    plain and description(before) != description(after)):
                raise CaptureError(
                    f"forward of {type(self.model).__name__} reads {f'{path}.{name}'.strip('.')} and assigns another "
                    f"value to it ({_kind(before)}, then {_kind(after)}), which its next call would read: a program "
                    "has no such memory\n  Keep a tensor in a buffer (register_buffer, then self.x.copy_(...)), or "
                    "pass it and return it; count outside of forward.")
        for variable, before in zip(self._variables, self._values, strict=True):
            if type(before) in (*ATOMS, *_NUMBERS) and description(variable.value()) != description(before):
                raise CaptureError(f"forward of {type(self.model).__name__} assigns to the global {variable.name} "
                                   f"({shown(before)} before), which its next call would read: a program has no such "
                                   "memory\n  Keep it in a buffer, or change it outside of forward.")

    def dependencies(self, equivalent: Iterable[Sequence[str]] = ()) -> Dependencies:
        """All that was read. ``equivalent``: paths of blocks of which only some were traced: what is read in one is
        read in each."""
        for blocks in equivalent:
            names = dict[str, dict[str, None]]()
            for block in blocks:
                for path in self._inside(block):
                    names.setdefault(path.removeprefix(block), {}).update(self._read[path])
            for block in blocks:
                for path in self._inside(block):
                    self._read[path].update(names[path.removeprefix(block)])
        attributes = {path: tuple(names) for path, names in self._read.items() if names}
        variables = tuple(variable for variable, before in zip(self._variables, self._values, strict=True)
                          if description(variable.value()) == description(before))  # others are its own caches
        return Dependencies(attributes, variables, self.strides, dict(self._modes))

    def _inside(self, block: str) -> list[str]:
        return [path for path in self._read if path == block or path.startswith(f"{block}.")]


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else "absent" if value is Missing else shown(value)


def _same_content(value: Any, before: Any) -> bool:
    if len(value) != len(before):
        return False
    if isinstance(value, set):
        return value == before
    pairs = zip(value.items(), before.items(), strict=True) if isinstance(value, dict) else \
        ((((), a), ((), b)) for a, b in zip(value, before, strict=True))
    return all(k is m and a is b for (k, a), (m, b) in pairs)


def _depends_on_call(value: torch.Tensor, graph: Graph) -> bool:
    """Whether a traced tensor is made of arguments, parameters or buffers."""
    memory = value.untyped_storage()._cdata
    stack = [node for node in graph.nodes if isinstance(made := node.meta.get("val"), torch.Tensor)
             and made.layout == torch.strided and made.untyped_storage()._cdata == memory]
    if not stack:
        return True
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node.op == "placeholder":
            return True
        more = [n for n in node.all_input_nodes if n not in seen]
        seen.update(more)
        stack.extend(more)
    return False


class _RandomNumbers:
    """The states of the generators of random numbers, as they are when it is made."""

    def __init__(self) -> None:
        self._python, self._torch = random.getstate(), torch.get_rng_state()
        self._numpy: Any = np.random.get_state()

    def restore(self) -> str:
        """Set them back. Returns the name of one that a trace cannot follow, if numbers were drawn from it."""
        drawn = "Python's random" if random.getstate() != self._python else ""
        now: Any = np.random.get_state()
        if now[2:] != self._numpy[2:] or not np.array_equal(now[1], self._numpy[1]):
            drawn = drawn or "numpy.random"
        if drawn and not _others_run():
            random.setstate(self._python)
            np.random.set_state(self._numpy)
        if not _others_run():  # whose numbers would come again
            torch.set_rng_state(self._torch)
        return drawn


class OthersDrawError(Exception):
    """Random numbers were drawn while a model was traced, by it or by another thread: trace again, watching this
    thread."""


class _Draws:
    """Whether this thread calls Python's or numpy's generator."""

    def __init__(self) -> None:
        self.seen = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        generator = getattr(random.random, "__self__", None)

        def look(frame: Any, event: str, function: Any) -> None:
            if event == "c_call" and getattr(function, "__self__", None) is generator:
                self.seen = True

        before = sys.getprofile()
        own = {name: getattr(np.random, name) for name in _NUMPY_DRAWS}
        for name, function in own.items():    # a profiler does not see Cython's functions
            setattr(np.random, name, self._seen_here(function))
        sys.setprofile(look)
        try:
            yield
        finally:
            sys.setprofile(before)
            for name, function in own.items():
                setattr(np.random, name, function)

    def _seen_here(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls in this thread are seen."""
        thread = threading.get_ident()

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen = self.seen or threading.get_ident() == thread
            return function(*args, **kwargs)

        return call


#: Functions of numpy's global generator.
_NUMPY_DRAWS = tuple(name for name in np.random.__all__ if name not in ("default_rng", "get_state")
                     and callable(value := getattr(np.random, name)) and not isinstance(value, type))


def _draws_by_numpy(value: Any) -> bool:
    return any(value is getattr(np.random, name) for name in _NUMPY_DRAWS)


def _others_run() -> bool:
    """Whether other threads run that may draw numbers: neither this one, nor ours, nor the one that tqdm leaves."""
    here = threading.get_ident()
    return any(t.ident != here and not t.name.startswith("autoparallel ") and not type(t).__module__.startswith("tqdm")
               for t in threading.enumerate())


# --- while any thread records --------------------------------------------------------------------------------------

_LOCK = threading.Lock()
#: The recorder of each thread that traces, by thread id.
_RECORDERS: dict[int, Recorder] = {}
_SET = nn.Module.__setattr__


def recorder() -> Recorder | None:
    """Whoever records in this thread."""
    return _RECORDERS.get(threading.get_ident())


def _get(module: nn.Module, name: str) -> Any:
    if (active := _RECORDERS.get(threading.get_ident())) is not None:
        active.reads(module, name)
    return object.__getattribute__(module, name)


def _set(module: nn.Module, name: str, value: Any) -> None:
    if (active := _RECORDERS.get(threading.get_ident())) is not None:
        active.assigns(module, name, value)
    _SET(module, name, value)


def _asked(name: str, inside: Any, asking: Mapping[str, Any]) -> Any:
    active = _RECORDERS.get(threading.get_ident())
    return active.mode(name, inside) if active is not None and is_users(asking) else inside


def is_users(namespace: Mapping[str, Any]) -> bool:
    """Whether a function with these globals is neither torch's, nor Python's, nor ours."""
    return str(namespace.get("__name__", "")).partition(".")[0] not in _NOT_USERS


def _install() -> None:
    nn.Module.__getattribute__ = _get  # type: ignore[method-assign,assignment]
    nn.Module.__setattr__ = _set  # type: ignore[method-assign,assignment]
    settings.install(_asked)


def _remove() -> None:
    del nn.Module.__getattribute__
    nn.Module.__setattr__ = _SET  # type: ignore[method-assign]
    settings.remove()


# --- variables that functions read ---------------------------------------------------------------------------------


def _variables_of(model: nn.Module) -> tuple[Variable, ...]:
    """Globals, class attributes and cells that the model's functions may read: those that are named in the code of
    forward, of hooks, and of the functions and methods that these name in turn."""
    found = _Names()
    for module in model.modules():
        found.add_class(type(module))
        for value in vars(module).values():
            if isinstance(value, (FunctionType, MethodType, functools.partial)):
                found.add(value)
        for hooks in HOOKS[:2]:
            for hook in vars(module)[hooks].values():
                found.add(hook)
    found.add_name("forward")
    found.add_name("__call__")
    found.run()
    for kind in {type(module): None for module in model.modules()}:  # installed ones' too: libraries replace forwards
        namespace = vars(next(owner for owner in kind.__mro__ if "forward" in vars(owner)))
        found.variables[id(namespace), "forward"] = Variable("forward", namespace)
    return tuple(found.variables.values())


class _Names:
    """Follows names through the code of functions, without running it."""

    def __init__(self) -> None:
        self.variables: dict[tuple[int, str], Variable] = {}
        self.names: dict[str, None] = {}
        self.owners: dict[type, Mapping[str, Any]] = {}
        self.kinds: dict[type, None] = {}
        self.modules: dict[int, Mapping[str, Any]] = {}
        self.seen: set[int] = set()
        self.waiting: list[Any] = []

    def add(self, function: Any) -> None:
        self.waiting.append(function)

    def add_name(self, name: str) -> None:
        if name not in self.names:
            self.names[name] = None
            for namespace in [*self.owners.values(), *self.modules.values()]:
                if name in namespace:
                    self._value(namespace, name)

    def add_class(self, kind: type) -> None:
        """A class whose attributes of the names met so far, and later, may be read."""
        self.kinds[kind] = None
        for owner in kind.__mro__:
            if owner is not nn.Module and owner not in self.owners and is_users({"__name__": owner.__module__}):
                namespace = self.owners[owner] = vars(owner)
                for name in [n for n in self.names if n in namespace]:
                    self._value(namespace, name)

    def run(self) -> None:
        while self.waiting:
            self._function(inspect.unwrap(_plain_function(self.waiting.pop())))
        if not self.names.keys().isdisjoint(("environ", "getenv")):
            self.variables[id(vars(os)), "environ"] = Variable("environ", vars(os))
        for kind in self.kinds:
            self._hidden_by_subclasses([self.owners[owner] for owner in kind.__mro__ if owner in self.owners])

    def _hidden_by_subclasses(self, namespaces: Sequence[Mapping[str, Any]]) -> None:
        """Attributes of a class that one of the classes before it, in order of search, may be given."""
        hidden = [(variable.name, place) for place, namespace in enumerate(namespaces)
                  for variable in list(self.variables.values()) if variable.holder is namespace]
        for name, place in hidden:
            for before in namespaces[:place]:
                self.variables.setdefault((id(before), name), Variable(name, before))

    def _function(self, function: Any) -> None:
        if not isinstance(function, FunctionType) or id(function) in self.seen or not is_users(function.__globals__):
            return
        self.seen.add(id(function))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            variable = Variable(name, cell)
            self._follow(variable.value(), variable)
        for code in _codes(function.__code__):
            for name in code.co_names:
                self.add_name(name)
                if name in function.__globals__:
                    self._value(function.__globals__, name)

    def _value(self, namespace: Mapping[str, Any], name: str) -> None:
        self._follow(namespace[name], Variable(name, namespace))

    def _follow(self, value: Any, variable: Variable) -> None:
        if isinstance(value, (FunctionType, MethodType, staticmethod, classmethod, property, functools.partial,
                              functools.cached_property)):
            if not _is_installed(variable.holder) and variable.name != "__init__":  # another one may be put there
                self.variables[id(variable.holder), variable.name] = variable
            self.add(value)
        elif isinstance(value, type):
            if value.__module__ != "builtins" and is_users({"__name__": value.__module__}):
                self.add_class(value)
        elif isinstance(value, ModuleType):
            namespace = vars(value)
            if is_users(namespace) and id(namespace) not in self.modules:
                self.modules[id(namespace)] = namespace
                for name in [n for n in self.names if n in namespace]:
                    self._value(namespace, name)
        elif not variable.name.startswith("__") and (
                type(value) in (*ATOMS, *_NUMBERS) or isinstance(value, torch.Tensor)
                or (is_mutable(value) and not _is_installed(variable.holder))):
            self.variables[id(variable.holder), variable.name] = variable


def _is_installed(namespace: Any) -> bool:
    """Whether a module is of an installed library, whose module-level tables are assumed not to change between
    calls."""
    if not isinstance(namespace, Mapping):
        return False
    home = namespace if "__name__" in namespace else vars(sys.modules.get(namespace.get("__module__", ""), object))
    return "site-packages" in str(home.get("__file__"))


def _plain_function(value: Any) -> Any:
    """The function in a method, property or partial."""
    for name in ("__func__", "fget", "func"):
        while (inner := getattr(value, name, None)) is not None:
            value = inner
    return value


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


__all__ = ["HOOKS", "INTERNAL", "Dependencies", "Missing", "Recorder", "Same", "Variable", "description", "fields_of",
           "hooks_of_all", "is_mutable", "is_users", "parts_of_function", "recorder"]
