"""Attributes in which the original's forward leaves tensors of a call (``self.penalty = y.square().mean()``).

A program returns outputs only. The parallel module has a `NotKept` in such an attribute, so that a script which reads
it gets an error in place of the value that was there before the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

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

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

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


def mark(state: State, dependencies: Dependencies) -> None:
    """Mark the attributes in which a traced forward leaves tensors, on the parallel module's parts; those of the model
    itself, of which the parallel module reads the original's, in ``state.not_kept``."""
    for path, names in dependencies.left.items():
        module = state.model.get_submodule(path)
        if module is state.model:
            state.not_kept.update(names)
            continue
        attributes = vars(state.parts[module])
        attributes.update({name: NotKept(f"{path}.{name}") for name in names
                           if not isinstance(attributes.get(name), NotKept)})
