"""Attributes in which the original's forward leaves tensors of a call (``self.penalty = y.square().mean()``).

A program has them as further results (`capture/left.py`), which are put into the attributes of the parallel module
after the call. What is not a tensor or a structure of tensors (a list that grows, an object), and what a step in
micro-batches or pipeline stages leaves, has a `NotKept` in its place: a script which reads it gets an error, and not an
older value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from autoparallel.capture.contents import Missing, description, has_fields, is_plain
from autoparallel.capture.dependencies import Dependencies
from autoparallel.errors import InputError

if TYPE_CHECKING:
    from autoparallel.runtime.state import State


def refused(name: str) -> InputError:
    """The error of a script that reads the attribute ``name``, a dotted path."""
    return InputError(f"{name} is read, where forward leaves tensors of its call: a program keeps no lists that grow "
                      "and no objects there, and nothing of a step in micro-batches or stages\n  Return the tensors "
                      "from forward too, in a tuple or a dict, and read them there.")


class NotKept:
    """In place of an attribute's value that no program keeps: whatever is asked of it raises InputError."""

    _is_param = _is_buffer = False    # asked by isinstance(x, nn.Parameter)

    def __init__(self, name: str, left: bool = False) -> None:
        """``left``: by a call, which has run."""
        self.__dict__.update(name=name, left=left)

    @property  # type: ignore[misc]
    def __class__(self) -> type[torch.Tensor]:  # type: ignore[override]
        """For `isinstance(layer.penalty, torch.Tensor)`, after which a script reads it, or else leaves it out."""
        return torch.Tensor

    def __reduce__(self) -> Any:
        return NotKept, (self.__dict__["name"],)

    def __repr__(self) -> str:
        return f"<{self.__dict__['name']}: not kept by a parallel module>"

    def __deepcopy__(self, memo: dict[int, Any]) -> NotKept:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refused(self.__dict__["name"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        flat = [leaf for value in given for leaf in (value if isinstance(value, (list, tuple)) else (value,))]
        raise refused(next(leaf.__dict__["name"] for leaf in flat if isinstance(leaf, cls)))


def _refuses(self: NotKept, *args: Any, **kwargs: Any) -> NoReturn:
    raise refused(self.__dict__["name"])


_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
for _name in (*_OPERATORS, *(f"r{name}" for name in _OPERATORS), *(f"i{name}" for name in _OPERATORS), "neg", "abs",
              "lt", "le", "gt", "ge", "bool", "int", "float", "index", "len", "iter", "getitem", "setitem", "delitem",
              "contains", "call", "format", "setattr"):
    setattr(NotKept, f"__{_name}__", _refuses)


@contextmanager
def hidden(state: State) -> Iterator[Mapping[tuple[str, str], Any]]:
    """The parts of the parallel module with the original's values in place of those of a call and of the marks: what
    guards compare, and what a trace reads. A value that a script has set in place of these stays. Yields what is
    hidden, by module path and name, with what the model itself has."""
    found, values = list[tuple[dict[str, Any], str, Any]](), {("", n): put for n, put in state.left_in_root.items()}
    pairs = [*state.parts.items()] if state.left else []
    for path, (place, names) in state.left.items():
        theirs, ours = map(vars, pairs[place])
        for name, put in names.items():
            if ours.get(name, Missing) is put:
                found.append((ours, name, put))
                values[path, name] = put
                if name in theirs:
                    ours[name] = theirs[name]
                else:
                    del ours[name]
    try:
        yield values
    finally:
        for ours, name, put in found:
            ours[name] = put


def check_reads(state: State, dependencies: Dependencies, values: Mapping[tuple[str, str], Any]) -> None:
    """Raises InputError for a call whose forward reads an attribute in which the last call, of another form, has left
    a value (``values``, of `hidden`): the program was traced with the original's value."""
    for path, name in values if dependencies.found else ():
        if name not in dependencies.found.get(path, ()) or name in dependencies.left.get(path, ()):
            continue
        put, before = values[path, name], vars(state.model.get_submodule(path)).get(name, Missing)
        if type(put) is not NotKept or (put.__dict__["left"] and (is_plain(before) or not has_fields(before))):
            shown = f"{path}.{name}".strip(".")
            raise InputError(f"forward reads {shown}, in which a call of another form has left a value of its own: a "
                             "program has no such memory\n  Keep a tensor in a buffer (register_buffer, and in forward "
                             f"self.x.copy_(...)), or pass it and return it; or set {shown} before this call.")


def mark(state: State, dependencies: Dependencies, runs: bool) -> None:
    """Mark the attributes in which the forward of a call leaves tensors, on the parallel module's parts; those of the
    model itself, of which the parallel module reads the original's, in ``state.left_in_root``. Before every call that
    ``runs``, also over the values of the last one: a script may set them between calls, to None or a new list."""
    parts = [*state.parts.values()] if dependencies.left else []
    for path, names in dependencies.left.items():
        if path and path not in state.left:
            state.left[path] = [*state.parts].index(state.model.get_submodule(path)), {}
        known, attributes = _places(state, path, parts)
        for name in names:
            if runs or name not in known:
                known[name] = attributes[name] = NotKept(f"{path}.{name}".strip("."), runs)
    for (path, name), value in dependencies.plain.items() if runs else ():
        if path in ("", *state.left):
            _settle(state, path, name, value)


def _settle(state: State, path: str, name: str, value: Any) -> None:
    """Put the plain value that a call leaves in place of a tensor that another one has left there."""
    known, attributes = _places(state, path, [*state.parts.values()])
    if name not in known or attributes.get(name, Missing) is not known[name]:
        return
    before = vars(state.model.get_submodule(path)).get(name, Missing)
    known[name] = attributes[name] = value
    if description(before) == description(value):
        del known[name]
        if path:
            attributes[name] = before


def keep(state: State, values: Mapping[tuple[str, str], Any]) -> None:
    """Put the values of a call, by module path and name, where `mark` has marked them."""
    parts = [*state.parts.values()] if values else []
    for (path, name), value in values.items():
        known, attributes = _places(state, path, parts)
        known[name] = attributes[name] = value


def in_copies(state: State) -> dict[int, NotKept]:
    """For `copy.deepcopy`: marks in place of the values, by their ids. (They belong to the call's graph of autograd,
    which torch does not copy.)"""
    names = {(path, name): value for path, (_, known) in state.left.items() for name, value in known.items()}
    names |= {("", name): value for name, value in state.left_in_root.items()}
    return {id(value): NotKept(".".join(filter(None, name))) for name, value in names.items() if not is_plain(value)}


def _places(state: State, path: str, parts: Sequence[nn.Module]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is noted of a module's attributes, and the attributes."""
    if not path:
        return state.left_in_root, state.left_in_root
    place, known = state.left[path]
    return known, vars(parts[place])
