"""Users' torch.autograd.Functions as ops.

A plain trace would record the ops of the user's forward and lose the user's backward (a straight-through estimator
would get zero gradients). While tracing, ``apply`` therefore records the op ``autoparallel::user_function``, which
calls the Function at run time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from autoparallel.errors import CaptureError

#: Modules of torch's own Functions, which are traced as their forward's ops.
LOOKED_THROUGH = ("torch._", "torch.autograd", "torch.utils.checkpoint", "torch.fx", "torch.distributed")
PLAIN = (int, float, complex, str, bool, type(None), torch.dtype, torch.device)
_HERE = torch.autograd.function._SingleLevelFunction


@dataclass(frozen=True)
class Call:
    """A call of a Function: its arguments, with None for each tensor."""

    function: type[torch.autograd.Function]
    arguments: tuple[Any, ...]
    is_tensor: tuple[bool, ...]

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        given = iter(tensors)
        pairs = zip(self.arguments, self.is_tensor, strict=True)
        return self.function.apply(*(next(given) if tensor else value for value, tensor in pairs))


#: Calls by name, which graphs carry as the op's first argument; equal calls share one.
_CALLS: dict[str, Call] = {}
#: Of each call that has run: which of its results are tensors, and which None; None where it returns no tuple.
_RETURNED: dict[str, tuple[bool, ...] | None] = {}
_library = torch.library.Library("autoparallel", "FRAGMENT")
_library.define("user_function(str call, Tensor[] tensors) -> Tensor[]",
                tags=(torch.Tag.nondeterministic_seeded,))  # it may draw random numbers: equal on replicas


def _user_function(call: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    made = _CALLS[call](tensors)
    results = made if isinstance(made, tuple) else (made,)
    for value in results:
        if not isinstance(value, (torch.Tensor, type(None))):
            raise CaptureError(f"{_CALLS[call].function.__name__}.apply returns a {type(value).__name__}, and a "
                               "traced function returns a tensor, or a tuple of tensors and None\n  Return a tuple; "
                               "make tensors of numbers (torch.tensor(value)), or compute them outside of it.")
    found = [value for value in results if value is not None]
    if not found:
        raise CaptureError(f"{_CALLS[call].function.__name__}.apply returns no tensor: a program has results of "
                           "functions only\n  Return what it computes.")
    _RETURNED[call] = tuple(value is not None for value in results) if isinstance(made, tuple) else None
    return found


#: The code object of the frame in which users' Functions run.
RUNS = _user_function.__code__
_library.impl("user_function", _user_function, "CompositeImplicitAutograd")
user_function = torch.ops.autoparallel.user_function.default


def function_of(call: str) -> type[torch.autograd.Function]:
    """The class behind the op's first argument."""
    return _CALLS[call].function


@contextmanager
def functions_as_ops() -> Iterator[None]:
    """Within, users' Functions that this thread calls are recorded as ops. (`Function.apply` looks up its base class's
    ``apply``, which this replaces.)"""
    inside, thread = False, get_ident()

    def plain(cls: type[torch.autograd.Function], *args: Any) -> Any:
        return super(_HERE, cls).apply(*args)  # type: ignore[misc]

    def apply(cls: type[torch.autograd.Function], *args: Any) -> Any:
        nonlocal inside
        if get_ident() != thread:
            return plain(cls, *args)
        if cls is CheckpointFunction:  # (run_function, preserve_rng_state, *args)
            return args[0](*args[2:])
        if inside or cls.__module__.startswith(LOOKED_THROUGH):
            return plain(cls, *args)
        inside = True
        try:
            return _recorded(cls, args)
        finally:
            inside = False

    _HERE.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _HERE.apply  # type: ignore[attr-defined]


def _recorded(function: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    kept = tuple(None if isinstance(a, torch.Tensor) else a for a in args)
    for value in pytree.tree_leaves(kept):
        if isinstance(value, (torch.SymFloat, torch.SymInt)):
            raise CaptureError(f"{function.__name__}.apply takes it, and is recorded with its value; given as a "
                               "tensor, torch.tensor(value), it is an input of one program")
        if not isinstance(value, PLAIN):
            raise CaptureError(f"{function.__name__}.apply is given a {type(value).__name__}, which may hide tensors\n"
                               "  Pass its tensors as arguments of their own; others must be numbers, strings, dtypes.")
    call = Call(function, kept, tuple(isinstance(a, torch.Tensor) for a in args))
    versions, name = [t._version for t in tensors], _named(call)
    made = user_function(name, tensors)
    if [t._version for t in tensors] != versions:
        raise CaptureError(f"{function.__name__} writes in place to what it is given: write to copies (x.clone())")
    returned, found = _RETURNED[name], iter(made)
    return next(found) if returned is None else tuple(next(found) if tensor else None for tensor in returned)


def _named(call: Call) -> str:
    """The name of a call; equal calls have equal names, in every process."""
    name = f"{call.function.__module__}.{call.function.__qualname__}{call.arguments}"
    for number in itertools.count():
        key = f"{name}#{number}" if number else name
        if _CALLS.setdefault(key, call) == call:
            return key
    raise AssertionError("unreachable")


__all__ = ["function_of", "functions_as_ops", "user_function"]
