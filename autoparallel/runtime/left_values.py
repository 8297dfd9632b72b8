"""Attributes in which the original's forward leaves tensors of a call (``self.penalty = y.square().mean()``).

A program returns outputs only. The parallel module has a `NotKept` in such an attribute, so that a script which reads
it gets an error in place of the value that was there before the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from autoparallel.capture.dependencies import Dependencies
from autoparallel.errors import InputError

if TYPE_CHECKING:
    from autoparallel.runtime.state import State


def refused(name: str) -> InputError:
    """The error of a script that reads the attribute ``name``, a dotted path."""
    return InputError(f"{name} is read, where forward leaves tensors of its call: a program returns outputs only, and "
                      "has no values of attributes\n  Return them from forward too, in a tuple or a dict, and read "
                      "them there.")


class NotKept:
    """In place of an attribute's value that no program keeps: whatever is asked of it raises InputError."""

    _is_param = _is_buffer = False    # asked by isinstance(x, nn.Parameter)

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

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
def hidden(state: State) -> Iterator[None]:
    """The parts of the parallel module with the original's values in place of the marks: what guards compare, and what
    a trace reads. A value that a script has set in place of a mark stays."""
    found = list[tuple[dict[str, Any], str, NotKept]]()
    pairs = [*state.parts.items()] if state.left else []
    for place, names in state.left.values():
        theirs, ours = map(vars, pairs[place])
        for name in names:
            if isinstance(mark := ours.get(name), NotKept):
                found.append((ours, name, mark))
                if name in theirs:
                    ours[name] = theirs[name]
                else:
                    del ours[name]
    try:
        yield
    finally:
        for ours, name, mark in found:
            ours[name] = mark


def mark(state: State, dependencies: Dependencies) -> None:
    """Mark the attributes in which the forward of a call leaves tensors, on the parallel module's parts; those of the
    model itself, of which the parallel module reads the original's, in ``state.not_kept``. At every call: a script may
    set them between calls, to None or a new list."""
    parts = [*state.parts.values()] if dependencies.left else []
    for path, names in dependencies.left.items():
        if not path:
            state.not_kept.update(names)
            continue
        if path not in state.left:
            state.left[path] = [*state.parts].index(state.model.get_submodule(path)), {}
        place, known = state.left[path]
        known.update(dict.fromkeys(names))
        attributes = vars(parts[place])
        for name in names:
            if not isinstance(attributes.get(name), NotKept):
                attributes[name] = NotKept(f"{path}.{name}")
