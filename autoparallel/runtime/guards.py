"""Guards: whether a compiled program is still valid for the model.

A program fixes what its trace read (`capture/dependencies.py`): values of attributes and globals, modes, hooks. Guards
compare them at each call and describe changes. The parallel module's parts share the attributes of the original's
modules (`SharedAttributes`): setting one sets both.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, is_
from types import MappingProxyType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoparallel.capture.contents import (
    CachedFunction,
    Missing,
    cached_by,
    description,
    fields_in_dict,
    has_fields,
    inside,
    is_mutable,
)
from autoparallel.capture.dependencies import ALL, INTERNAL, Dependencies, hooks_of_all
from autoparallel.capture.settings import reader
from autoparallel.capture.variables import HOOKS, Variable
from autoparallel.errors import InputError, shown


class NotAlone:
    """The forward of a submodule of a parallel module, which has no program of its own: raises InputError."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError(f"{self.name} is a part of a parallel module, and cannot be called by itself: its parameters "
                         "are shards, and programs are of calls of the whole model\n"
                         "  For a method or a part alone give forward an argument that says so, def forward(self, x, "
                         f"part=None), and call parallel(x, part=\"{self.name}\"): each is a program of the same "
                         "parameters. A part compiled by itself has its own, which start from the original's.")


class SharedAttributes:
    """Keeps plain attributes of the original's modules and of the parallel module's parts equal: a value set on one is
    copied to the other. (The root has none of its own: it reads and sets the original's.)"""

    def __init__(self, parts: Mapping[nn.Module, nn.Module]) -> None:
        model, *modules = parts
        self.names = {module: name for name, module in model.named_modules()}
        self.pairs = [(module, parts[module]) for module in modules]
        self.before = [_plain_attributes(module) for module in modules]
        self.kinds = list(map(type, modules))
        for module, part in self.pairs:
            self._refuse_alone(module, part)

    def holders(self) -> list[Any]:
        """The containers in here of the original's modules."""
        return [self.names, *self.pairs]

    def merge(self) -> None:
        """Copy attributes and classes set since the last call. Raises InputError if both sides were set to different
        ones."""
        for number, (module, part) in enumerate(self.pairs):
            self._merge_class(number, module, part)
            before, ours, theirs = self.before[number], vars(part), vars(module)
            self._merge_forward(module, part)
            for name in [n for n in {**ours, **theirs, **before} if n not in INTERNAL]:
                was, a, b = (d.get(name, Missing) for d in (before, ours, theirs))
                if a is b:
                    continue
                if a is not was and b is not was and description(a) != description(b):
                    raise InputError(f"{self.names[module]}.{name} is {_shown(a)} in the parallel module and "
                                     f"{_shown(b)} in the model that it was made of, which share their attributes: set "
                                     "it on one of them")
                new, target = (a, theirs) if a is not was else (b, ours)
                if new is Missing:
                    target.pop(name, None)
                else:
                    target[name] = new
            self.before[number] = _plain_attributes(module)

    def _merge_class(self, number: int, module: nn.Module, part: nn.Module) -> None:
        new = {type(module), type(part)} - {self.kinds[number]}
        if len(new) > 1:
            raise InputError(f"{self.names[module]} is a {type(part).__name__} in the parallel module and a "
                             f"{type(module).__name__} in the model that it was made of: give one of them a class")
        for kind in new:
            module.__class__ = part.__class__ = self.kinds[number] = kind

    def _merge_forward(self, module: nn.Module, part: nn.Module) -> None:
        """Move a forward that was set on a part to the original's module, which is the one that is traced."""
        given = vars(part).get("forward")
        if not isinstance(given, NotAlone):
            if given is not None:
                vars(module)["forward"] = MethodType(given.__func__, module) if isinstance(given, MethodType) else given
            self._refuse_alone(module, part)

    def _refuse_alone(self, module: nn.Module, part: nn.Module) -> None:
        """Refuse calls of a part. A parametrization is called where its tensor is read, and computes on DTensors."""
        if ".parametrizations." not in f".{self.names[module]}.":
            vars(part)["forward"] = NotAlone(self.names[module])


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in INTERNAL}


class Places:
    """The parameters, buffers and submodules of the parallel module at the time they were placed."""

    def __init__(self, root: nn.Module) -> None:
        self.tables = [(table, path) for path, part in root.named_modules()
                       for table in (part._modules, part._parameters, part._buffers)]
        self._note()

    def _note(self) -> None:
        self.placed = [dict(table) for table, _ in self.tables]
        self.counts = [len(table) for table, _ in self.tables]
        self.values = [value for placed in self.placed for value in placed.values()]

    def _is_unchanged(self) -> bool:
        """Whether all tables have the objects that were noted. (Loops in C: this runs at every call.)"""
        tables = [table for table, _ in self.tables]
        return (list(map(len, tables)) == self.counts
                and all(map(is_, chain.from_iterable(map(dict.values, tables)), self.values)))

    def check(self) -> None:
        """Raises InputError if one was replaced by an object that compiled programs cannot read."""
        if self._is_unchanged():
            return
        for (table, path), placed in zip(self.tables, self.placed, strict=True):
            for name in {**placed, **table}:
                old, new = placed.get(name), table.get(name)
                if old is not new and not _fits(old, new):
                    what = "is new" if old is None else "is gone" if new is None else "was replaced"
                    raise InputError(f"{f'{path}.{name}'.strip('.')} {what} ({_told(old)}, then {_told(new)}), and "
                                     "programs were compiled for what it was\n"
                                     "  Give new values by load_state_dict(...) or copy_(...); change the model (prune "
                                     "or parametrize it, too) before it is compiled.")
        self._note()


def _fits(old: Any, new: Any) -> bool:
    """Whether compiled programs can read ``new`` in place of ``old``: tensors of equal shape, dtype and placements."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    if isinstance(old, DTensor) != isinstance(new, DTensor) or (old.shape, old.dtype) != (new.shape, new.dtype):
        return False
    return not isinstance(old, DTensor) or (isinstance(new, DTensor) and old._spec == new._spec)


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value.dtype}{list(value.shape)}".replace("torch.", "")
    return "nothing" if value is None else type(value).__name__


class _Contents:
    """The contents of a mutable value at the time of a trace.

    ``parts``: the containers in it, each with what was in it, compared object by object; where an object is another
    one, the `description` of the whole decides. None if a container cannot be compared so.
    """

    def __init__(self, value: Any) -> None:
        self.value, self.description = value, description(value)
        self.parts: list[tuple[Any, tuple[Any, ...]]] | None = []
        waiting, known = [value], set[int]()
        while waiting and self.parts is not None:
            container = waiting.pop()
            if id(container) in known or not is_mutable(container):
                continue
            known.add(id(container))
            if isinstance(container, (np.ndarray, bytearray, array)) or len(known) > _MOST_PARTS:
                self.parts = None
            else:
                found = _found(container)
                self.parts.append((container, found))
                waiting += found

    def hold(self) -> bool:
        if self.parts is not None and all(map(_has, self.parts)):
            return True
        return description(self.value) == self.description


#: Containers in a value, from which on it is compared by its description only.
_MOST_PARTS = 1000


class _Inside:
    """What was in containers, compared object by object: that of dicts and of plain objects by loops in C, as this runs
    at every call."""

    def __init__(self, values: Sequence[_Contents]) -> None:
        self.odd = [value for value in values if value.parts is None]
        parts = [part for value in values for part in value.parts or ()]
        dicts = [part for part in parts if type(part[0]) is dict]
        objects = [part for part in parts if has_fields(part[0]) and fields_in_dict(part[0])]
        self.dicts, self.objects = [part[0] for part in dicts], [part[0] for part in objects]
        known = {id(container) for container, _ in (*dicts, *objects)}
        self.others = [part for part in parts if id(part[0]) not in known]
        found = [found for _, found in (*dicts, *objects)]    # names, then values, as `inside` gives them
        self.counts, self.kinds = list(map(len, self._tables())), list(map(type, self.objects))
        self.found = [*chain.from_iterable(each[:n] for each, n in zip(found, self.counts, strict=True)),
                      *chain.from_iterable(each[n:2 * n] for each, n in zip(found, self.counts, strict=True))]

    def _tables(self) -> list[dict[Any, Any]]:
        return [*self.dicts, *map(object.__getattribute__, self.objects, repeat("__dict__"))]

    def is_unchanged(self) -> bool:
        tables = self._tables()
        return (list(map(len, tables)) == self.counts and all(map(is_, map(type, self.objects), self.kinds))
                and all(map(is_, _names_and_values(tables), self.found))
                and all(map(_has, self.others)) and all(map(_Contents.hold, self.odd)))


def _names_and_values(tables: Sequence[dict[Any, Any]]) -> Iterator[Any]:
    return chain(chain.from_iterable(tables), chain.from_iterable(map(dict.values, tables)))


def _found(container: Any) -> tuple[Any, ...]:
    """What is in a container, and its class, which a plain object may be given another of."""
    return *inside(container), type(container)


def _has(part: tuple[Any, tuple[Any, ...]]) -> bool:
    """Whether a container has the very objects that it had."""
    now = _found(part[0])
    return len(now) == len(part[1]) and all(map(is_, now, part[1]))


@dataclass(frozen=True)
class _Seen:
    """A global or closure variable with its value at the time of a trace. ``cached``: what a function of
    `functools.lru_cache` kept."""

    variable: Variable
    value: Any
    contents: _Contents | None
    cached: Sequence[tuple[Any, Any]] = ()

    @staticmethod
    def of(variable: Variable) -> _Seen:
        value = variable.value()
        return _Seen(variable, value, _Contents(value) if is_mutable(value) else None,
                     cached_by(value) if isinstance(value, CachedFunction) else ())

    def holds(self) -> bool:
        new = self.variable.value()
        if new is self.value:
            return (self.contents is None or self.contents.hold()) and (not self.cached or self._keeps_results())
        return description(new) == (description(self.value) if self.contents is None else self.contents.description)

    def _keeps_results(self) -> bool:
        """Whether the function still has the results that it had; it may have more."""
        now = {id(key): result for key, result in cached_by(self.value)}
        return all(now.get(id(key), Missing) is result for key, result in self.cached)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Seen:
        return self  # functions are not copied, nor their variables


class _Variables:
    """Variables as they were at the time of a trace. Those of namespaces, and what is in them, are compared object by
    object, by loops in C: this runs at every call."""

    def __init__(self, seen: Sequence[_Seen]) -> None:
        self.seen = seen
        fixed = [one for one in seen if not one.cached and type(one.variable.holder) in _GET]
        self.others = [one for one in seen if one.cached or type(one.variable.holder) not in _GET]
        self.inside = _Inside([one.contents for one in fixed if one.contents is not None])
        self.fixed = [(get, *zip(*((one.variable.holder, one.variable.name, one.value) for one in fixed
                                   if type(one.variable.holder) is kind), strict=True))
                      for kind, get in _GET.items() if any(type(one.variable.holder) is kind for one in fixed)]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Variables:
        return self  # as of `_Seen`

    def are_unchanged(self) -> bool:
        same = all(all(map(is_, map(get, holders, names, repeat(Missing)), values))
                   for get, holders, names, values in self.fixed) and self.inside.is_unchanged()
        return all(map(_Seen.holds, self.others if same else self.seen))


#: How a variable of a namespace is read, by its type.
_GET: Mapping[type, Any] = {dict: dict.get, MappingProxyType: MappingProxyType.get}


class Guards:
    """Compares the model with its state at the time of one trace, object by object."""

    def __init__(self, parts: Mapping[nn.Module, nn.Module], dependencies: Dependencies, leaves: Sequence[Any]) -> None:
        model, root = next(iter(parts.items()))
        self.attributes: list[tuple[nn.Module, str, str, Any]] = []
        self.hooks: list[tuple[Mapping[Any, Any], tuple[Any, ...], str, str]] = []
        for path, module in model.named_modules():
            own = {**module._parameters, **module._buffers, **module._modules}
            names = ("forward", *(n for n in dependencies.attributes.get(path, ()) if n not in own))
            for holder in (module,) if module is model else (module, parts[module]):
                self.attributes += [(holder, path, n, vars(holder).get(n, Missing)) for n in names]
            self.hooks += [(vars(module)[name], tuple(vars(module)[name].values()), path, name) for name in HOOKS]
        self.hook_tables, self.had_hooks = [hooks for hooks, *_ in self.hooks], any(was for _, was, *_ in self.hooks)
        self.sizes = [(vars(holder), len(vars(holder)), path) for path, module in model.named_modules()
                      if ALL in dependencies.attributes.get(path, ()) for holder in {module, parts[module]} - {root}]
        self.modules = [holder for module, part in parts.items() for holder in {module, part} - {root}]
        self.orders = list(map(_order, self.modules))
        self.owners, _, self.names, self.values = zip(*self.attributes, strict=True)
        self.variables = _Variables([_Seen.of(variable) for variable in dependencies.variables])
        self.modes = [(reader(name), name, answer) for name, answer in dependencies.modes.items()]
        self.strides = _strides(leaves) if dependencies.strides else None
        contents = {id(value): (value, f"{path}.{name}".strip(".")) for _, path, name, value in self.attributes
                    if is_mutable(value)}
        self.contents = [(_Contents(value), name) for value, name in contents.values()]
        self.inside = _Inside([value for value, _ in self.contents])

    def holders(self) -> list[Any]:
        """The containers in here of the original's modules and their attributes."""
        return [*self.attributes, self.owners, self.modules, *self.sizes]

    def hold(self, leaves: Sequence[Any]) -> bool:
        """Whether the traced program is valid for a call with these arguments on the model now."""
        return self._is_unchanged(leaves) or next(self.failing(leaves), None) is None

    def _is_unchanged(self, leaves: Sequence[Any]) -> bool:
        """Whether everything is the very object that it was. (Loops in C: this runs at every call.)"""
        now = map(dict.get, map(_namespace, self.owners), self.names, repeat(Missing))
        return (all(map(is_, now, self.values)) and all(map(is_, map(_order, self.modules), self.orders))
                and all(len(names) == count for names, count, _ in self.sizes)
                and (self.inside.is_unchanged() or all(contents.hold() for contents, _ in self.contents))
                and self.variables.are_unchanged() and not self.had_hooks and not any(self.hook_tables)
                and all(mode() == answer for mode, _, answer in self.modes) and not hooks_of_all()
                and (self.strides is None or _strides(leaves) == self.strides))

    def failing(self, leaves: Sequence[Any]) -> Iterator[str]:
        """Descriptions of the changes since the trace."""
        for holder, path, name, value in self.attributes:
            if (new := vars(holder).get(name, Missing)) is not value and description(new) != description(value):
                yield f"{path}.{name}".strip(".") + f" was {_shown(value)} and is {_shown(new)}"
        for module, order in zip(self.modules, self.orders, strict=True):
            if _order(module) is not order:
                yield f"a {order[0].__name__} is of the classes {', '.join(k.__name__ for k in _order(module))}"
        for names, count, path in self.sizes:
            if len(names) != count:
                yield f"{path or 'the model'} had {count} attributes and has {len(names)}"
        for contents, name in self.contents:
            if not contents.hold():
                yield f"{name} has other contents"
        for seen in self.variables.seen:
            if not seen.holds():
                yield f"{seen.variable.name} was {_shown(seen.value)} and is {_shown(seen.variable.value())}"
        for hooks, values, path, name in self.hooks:
            if len(hooks) != len(values) or (hooks and tuple(hooks.values()) != values):
                yield f"{path or 'the model'} has other {name.strip('_').replace('_', ' ')}"
        if hooks_of_all():
            yield "there are hooks of all modules"
        for mode, name, answer in self.modes:
            if mode() != answer:
                yield f"{name} was {answer}"
        if self.strides is not None and _strides(leaves) != self.strides:
            yield "arguments have other strides"


_namespace = attrgetter("__dict__")
_order = attrgetter("__class__.__mro__")


def _strides(leaves: Sequence[Any]) -> tuple[tuple[int, ...] | None, ...]:
    """Strides of the arguments; None for contiguous tensors and DTensors."""
    return tuple(leaf.stride() if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
                 and not leaf.is_contiguous() else None for leaf in leaves)


def _shown(value: Any) -> str:
    return "absent" if value is Missing else shown(value)


__all__ = ["Guards", "NotAlone", "Places", "SharedAttributes"]
