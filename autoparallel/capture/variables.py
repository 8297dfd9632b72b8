"""Variables that functions of a model may read: globals, attributes of classes, cells of closures."""

from __future__ import annotations

import builtins
import functools
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dis import EXTENDED_ARG, opmap
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from autoparallel.capture.contents import (
    FLAT,
    MOST,
    CachedFunction,
    Missing,
    has_fields,
    inside,
    is_moving,
    is_mutable,
    is_plain,
    is_users,
)
from autoparallel.capture.impure import ASKING, OPENING, may_ask
from autoparallel.capture.settings import function_of

_FUNCTIONS = (FunctionType, staticmethod, classmethod, property, functools.partial, functools.cached_property,
              CachedFunction)
#: Namespaces of torch and Python of which a user's function may read what others put there.
_TORCHS = tuple(map(vars, (torch, nn.functional, sys)))
_OF_TENSORS = vars(torch.Tensor)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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

    def set(self, value: Any) -> None:
        """Set the variable, of a module or of a closure."""
        if type(self.holder) is CellType:
            self.holder.cell_contents = value
        elif isinstance(self.holder, dict):
            self.holder[self.name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        return self  # functions are not copied, nor are the variables that they read


#: All of the environment. (A variable of the environment is held by `os.environ`.)
ENVIRONMENT = Variable("environ", vars(os))


@dataclass(frozen=True)
class Read:
    """What the functions of a model may read beside their arguments, by their code.

    ``variables``: globals, class attributes and cells. ``settings``: variables that name a function of torch which
    reports a setting. ``names``: all names in the code. ``may_ask``: whether they may read a clock or the operating
    system's random numbers. ``bypasses``: whether they may read attributes by ``object.__getattribute__``, which cannot
    be observed.
    """

    variables: tuple[Variable, ...]
    settings: tuple[Variable, ...]
    names: Collection[str]
    may_ask: bool
    bypasses: bool


def read_by(model: nn.Module) -> Read:
    """Globals, class attributes and cells that the model's functions may read: those named in the code of forward and
    hooks, of the functions and methods named there, and of functions and objects in the attributes of modules."""
    found = _Names()
    for module in model.modules():
        found.add_class(type(module))
        for name, value in vars(module).items():
            if isinstance(value, str) and value.isidentifier():  # of what it takes by getattr
                found.add_name(value)
            elif name not in _TABLES:
                found.add_contents(value)
        for hooks in HOOKS[:2]:
            for hook in vars(module)[hooks].values():
                found.add(hook)
    found.add_name("forward")
    found.add_name("__call__")
    found.run()
    namespaces: dict[type, Mapping[str, Any]] = dict(found.owners)
    for kind in {type(module): None for module in model.modules()}:  # installed ones' too: libraries replace forwards
        for name in ("forward", "__call__", "__getattr__"):
            for owner in kind.__mro__:
                namespace = namespaces.setdefault(owner, vars(owner))
                found.variables[id(namespace), name] = Variable(name, namespace)
                if name in namespace:
                    break
    return Read(tuple(found.variables.values()), tuple(found.settings), found.names, found.may_ask, found.bypasses)


#: What every module has; parameters and submodules are watched apart.
_TABLES = frozenset(vars(nn.Module()))
#: Names in code that may read a global whose name is a text, or an attribute of the module.
_BY_TEXT = frozenset(("globals", "vars", "eval", "exec", "modules", "import_module", "__import__", "__globals__",
                      "__dict__", "attrgetter", "__main__"))
_LOOKS_UP = frozenset((opmap["LOAD_GLOBAL"], opmap["LOAD_NAME"]))
#: Methods of classes by which objects are made, copied and shown, not computed with.
_NOT_CALLED = frozenset(("__init__", "__new__", "__repr__", "__str__", "__del__", "__dir__", "__format__", "__copy__",
                         "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
                         "__init_subclass__", "__class_getitem__", "__sizeof__"))


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
        self.settings: list[Variable] = []
        self.may_ask = self.bypasses = False

    def add(self, function: Any) -> None:
        self.waiting.append(function)

    def add_name(self, name: str) -> None:
        if name not in self.names:
            self.names[name] = None
            self.may_ask = self.may_ask or name in ASKING
            for namespace in [*self.owners.values(), *self.modules.values()]:
                if name in namespace and not _makes_installed(namespace, name):
                    self._value(namespace, name)

    def add_class(self, kind: type) -> None:
        """A class whose attributes of the names met so far, and later, may be read, and whose operators called."""
        self.kinds[kind] = None
        for owner in [*kind.__mro__, *type.mro(type(kind))]:
            if owner is not nn.Module and owner not in self.owners and is_users({"__name__": owner.__module__}):
                namespace = self.owners[owner] = vars(owner)
                for name in [n for n in self.names if n in namespace and not _makes_installed(namespace, n)]:
                    self._value(namespace, name)
                for name, member in list(namespace.items()):
                    if name[:2] == name[-2:] == "__" and name not in _NOT_CALLED and isinstance(member, _FUNCTIONS):
                        self._value(namespace, name)

    def add_contents(self, root: Any) -> None:
        """The functions, and the classes of objects, that can be reached from a value through containers."""
        waiting, known = [root], set[int]()
        while waiting and len(known) < MOST:
            value = waiting.pop()
            if isinstance(value, (MethodType, *_FUNCTIONS)):
                self.add(value)
            elif id(value) not in known and is_mutable(value) and not isinstance(value, FLAT):
                known.add(id(value))
                if has_fields(value):
                    self.add_class(type(value))
                waiting.extend(inside(value))

    def run(self) -> None:
        while self.waiting:
            function = self.waiting.pop()
            while function is not None:
                function = _plain_function(function)
                self._function(function)
                function = getattr(function, "__wrapped__", None)
        if not self.names.keys().isdisjoint(("environ", "getenv")):
            self.variables[id(vars(os)), "environ"] = ENVIRONMENT
        names: dict[int, dict[str, None]] = {}  # of the variables of a namespace
        for variable in self.variables.values():
            names.setdefault(id(variable.holder), {})[variable.name] = None
        for kind in self.kinds:
            self._hidden_by_subclasses([self.owners[owner] for owner in kind.__mro__ if owner in self.owners], names)

    def _hidden_by_subclasses(self, namespaces: Sequence[Mapping[str, Any]], names: dict[int, dict[str, None]]) -> None:
        """Attributes of a class that one of the classes before it, in order of search, may be given."""
        hidden = [(name, place) for place, namespace in enumerate(namespaces) for name in names.get(id(namespace), ())]
        for name, place in hidden:
            for before in namespaces[:place]:
                self.variables.setdefault((id(before), name), Variable(name, before))
                names.setdefault(id(before), {})[name] = None

    def _function(self, function: Any) -> None:
        if not isinstance(function, FunctionType) or id(function) in self.seen or not is_users(function.__globals__):
            return
        self.seen.add(id(function))
        installed = is_installed(function.__globals__)
        if not installed:
            self._add_torchs(function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            variable = Variable(name, cell)
            self._follow(variable.value(), variable, installed)
        package = function.__globals__.get("__package__")
        for code in _codes(function.__code__):
            self.bypasses = self.bypasses or {"object", "__getattribute__"} <= {*code.co_names}
            self.may_ask = self.may_ask or not (installed or OPENING.isdisjoint(code.co_names))
            by_text = not _BY_TEXT.isdisjoint(code.co_names)
            named, own = (*code.co_names, *_texts(code.co_consts)), set(_globals_of(code))
            for name in named:
                self.add_name(name)
                if (by_text or name in own) and name in function.__globals__:
                    self._value(function.__globals__, name)
                for imported in (name, f"{package}.{name}"):
                    if imported in sys.modules:
                        self._value(sys.modules, imported)

    def _add_torchs(self, function: FunctionType) -> None:
        """Functions and values of torch's and Python's that a user's function names, and someone may replace."""
        for name in dict.fromkeys(name for code in _codes(function.__code__) for name in code.co_names):
            for namespace in _TORCHS:
                if name in namespace:
                    self.variables[id(namespace), name] = Variable(name, namespace)
            if hasattr(torch.Tensor, name):
                self.variables[id(_OF_TENSORS), name] = Variable(name, _OF_TENSORS)
            if is_plain(vars(builtins).get(name, Missing)):
                self.variables[id(vars(builtins)), name] = Variable(name, vars(builtins))

    def _value(self, namespace: Mapping[str, Any], name: str) -> None:
        self._follow(namespace[name], Variable(name, namespace), is_installed(namespace))

    def _follow(self, value: Any, variable: Variable, installed: bool) -> None:
        """Watch a variable and follow its value. ``installed``: it is an installed library's, whose tables and objects
        are assumed not to change between calls."""
        self.may_ask = self.may_ask or may_ask(value)
        if function_of(value) is not None:
            self.settings.append(variable)
        if isinstance(value, (MethodType, *_FUNCTIONS)):
            if not installed and variable.name != "__init__":  # another one may be put there
                self.variables[id(variable.holder), variable.name] = variable
            self.add(value)
        elif isinstance(value, type):
            if value.__module__ != "builtins" and is_users({"__name__": value.__module__}):
                self.add_class(value)
                for owner in value.__mro__:  # an object may be made; a library's reads nothing that changes
                    if owner in self.owners and "__init__" in vars(owner) and not is_installed(vars(owner)):
                        self.add(vars(owner)["__init__"])
        elif isinstance(value, ModuleType):
            namespace = vars(value)
            if is_users(namespace) and not installed and not is_installed(namespace):
                self.variables[id(variable.holder), variable.name] = variable
            if is_users(namespace) and id(namespace) not in self.modules:
                self.modules[id(namespace)] = namespace
                for name in [n for n in {**self.names, "__getattr__": None} if n in namespace]:
                    self._value(namespace, name)
        elif not variable.name.startswith("__") and (
                is_plain(value) or isinstance(value, torch.Tensor)
                or ((is_mutable(value) or is_moving(value)) and not installed)):
            self.variables[id(variable.holder), variable.name] = variable
            self.add_contents(value)


def is_installed(namespace: Any) -> bool:
    """Whether the namespace of a module or class is of an installed library."""
    if not isinstance(namespace, Mapping):
        return False
    home = namespace if "__name__" in namespace else vars(sys.modules.get(namespace.get("__module__", ""), object))
    return "site-packages" in str(home.get("__file__"))


def _makes_installed(namespace: Any, name: str) -> bool:
    """Whether the name is of a library's constructor. Each constructor names the one of its base, and so would every
    class of the library be followed, with what it reads of files, clocks and devices when an object is made."""
    return name in ("__init__", "__new__") and is_installed(namespace)


def _plain_function(value: Any) -> Any:
    """The function in a method, property or partial."""
    for name in ("__func__", "fget", "func"):
        while (inner := getattr(value, name, None)) is not None:
            value = inner
    return value


def _texts(constants: Sequence[Any]) -> Iterator[str]:
    """Texts in a function's code that may name an attribute, a global or a module."""
    for value in constants:
        if isinstance(value, (tuple, frozenset)):
            yield from _texts(list(value))
        elif isinstance(value, str) and value.replace(".", "").isidentifier():
            yield value


def _globals_of(code: CodeType) -> Iterator[str]:
    """The names that code looks up as globals. (Attributes and methods of such names are others: a script's ``loss``
    is not what ``output.loss`` reads.)"""
    high = 0
    for op, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        if op in _LOOKS_UP:
            yield code.co_names[high + low >> (op == opmap["LOAD_GLOBAL"])]
        high = high + low << 8 if op == EXTENDED_ARG else 0


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
