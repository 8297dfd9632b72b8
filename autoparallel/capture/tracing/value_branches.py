"""Branches on the values of tensors, which a trace cannot follow, rewritten without a branch where that is possible.

    assert (x > 0).all()                                         not checked, and a warning says so
    if mask.any(): raise ValueError(...)                         the same
    if not x.isfinite().all(): x = x.clamp(-m, m)        ->      x = torch.where(~x.isfinite().all(), x.clamp(-m, m), x)

They are read off the source of the function that asks for a tensor's truth. Every other branch is refused by the trace.
"""

from __future__ import annotations

import ast
import ctypes
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from autoparallel.capture.tracing.frames import caller, statement_at
from autoparallel.capture.tracing.masked_rows.control_flow import REGIONS

Tensor = torch.Tensor
#: What reads a tensor's truth, or its only number.
READS = (Tensor.__bool__, Tensor.item)
#: What a branch may do to be made a choice: where its result is not chosen, the gradient of what was not to be computed
#: is zero, and no zero times infinity.
CHOSEN = frozenset({"clamp", "clip", "clamp_min", "clamp_max", "nan_to_num", "where", "masked_fill", "zeros_like",
                    "ones_like", "full_like", "isfinite", "isnan", "isinf", "logical_not", "logical_and", "logical_or",
                    "__get__", "detach", "clone", "dim", "size"})

#: What the number of rows is said to be where one of these makes a branch go as wanted.
LENGTHS = (0, 1, 2**30)


class Branches:
    """The branches of one trace."""

    def __init__(self) -> None:
        self._asked: dict[tuple[FrameType, ast.If], int] = {}  # -> at which instruction first

    def answer(self, tensor: Any) -> Any:
        """The number or bool that the function reading ``tensor`` gets, so that it can go on; None if there is none."""
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            return None
        frame = caller()
        statement = statement_at(frame, ast.If, ast.Assert)
        if statement is None:
            return None
        negated = _negated(statement.test, {**frame.f_globals, **frame.f_locals})
        if negated is None:
            return None
        if isinstance(statement, ast.Assert) or _only_raises(statement):
            place = f"{frame.f_code.co_filename}:{statement.lineno}"
            warnings.warn(f"the parallel program does not check what {place} checks: {ast.unparse(statement.test)}",
                          stacklevel=2)
            truth = isinstance(statement, ast.Assert) != negated
            return truth if tensor.dtype is torch.bool else _Number(truth)
        if self._chosen(frame, statement):
            return negated  # so that the branch is not taken
        taken = self._rows_only(frame, statement)
        return None if taken is None else taken != negated

    def _chosen(self, frame: FrameType, statement: ast.If) -> bool:
        """Replace the values that a branch assigns, in the function's variables, by choices between old and new ones;
        returns whether that was possible."""
        if self._asked.setdefault((frame, statement), frame.f_lasti) < frame.f_lasti:
            return True  # the same condition's next part: all was done when the first was asked for
        body = [s for s in statement.body if isinstance(s, ast.Assign) and len(s.targets) == 1
                and isinstance(s.targets[0], ast.Name)]
        if statement.orelse or len(body) != len(statement.body):
            return False
        names = {**frame.f_globals, **frame.f_locals}
        before = dict(frame.f_locals)
        try:
            condition = _condition(statement.test, names)
            with _Checked():
                exec(_compiled(ast.Module(list(body), []), "exec"), names)
        except _NotChosenError:
            return False
        written = dict.fromkeys(s.targets[0].id for s in body if isinstance(s.targets[0], ast.Name))  # in order
        for name in (name for name in written if name in before):
            new, old = names[name], before[name]
            if not (isinstance(new, Tensor) and isinstance(old, Tensor)):
                return False
            if (new.shape, new.dtype) != (old.shape, old.dtype):
                return False
            _assign(frame, name, torch.where(condition, new, old))
        return True

    def _rows_only(self, frame: FrameType, statement: ast.If) -> bool | None:
        """Whether the branch is to be taken, where all that depends on it is to write rows; None where more does."""
        try:
            condition = _condition(statement.test, {**frame.f_globals, **frame.f_locals})
        except _NotChosenError:
            return None
        return REGIONS.branch(frame, statement, condition) if isinstance(condition, Tensor) else None


def length_in_branch(frame: FrameType, counted: Callable[[Any], Any]) -> int | None:
    """What `len(x)` is to be told in the head of a branch that only writes rows; `counted` is what it would be told."""
    statement = statement_at(frame, ast.If)
    if statement is None:
        return None
    names = {**frame.f_globals, **frame.f_locals}
    try:
        condition = _condition(statement.test, {**names, "len": counted})
        taken = REGIONS.branch(frame, statement, condition) if isinstance(condition, Tensor) else None
    except _NotChosenError:
        return None
    told = (bool(_value(statement.test, {**names, "len": lambda _, n=n: n})) == taken for n in LENGTHS)
    return next((n for n, fits in zip(LENGTHS, told, strict=True) if fits), None)


class _Number:
    """A number of which every comparison comes out as wanted."""

    def __init__(self, truth: bool) -> None:
        self._truth = truth

    def _compared(self, other: object) -> bool:
        return self._truth

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compared
    __hash__ = None  # type: ignore[assignment]


class _NotChosenError(Exception):
    """The effect of a branch cannot be written as a choice between values."""


class _Checked(TorchFunctionMode):
    """Only what may be computed for nothing."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if getattr(function, "__name__", "") not in CHOSEN or "out" in (kwargs or {}):
            raise _NotChosenError
        return function(*args, **(kwargs or {}))


def _leaves(test: ast.expr, negated: bool = False) -> Iterator[tuple[ast.expr, bool]]:
    """The operands of a condition under and, or and not, each with whether it is negated."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _leaves(test.operand, not negated)
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _leaves(value, negated)
    else:
        yield test, negated


def _negated(test: ast.expr, names: dict[str, Any]) -> bool | None:
    """Whether the tensors of a condition are negated; None where one is and another is not."""
    leaves = list(_leaves(test))
    if len({negated for _, negated in leaves}) > 1:  # of tensors only, then
        leaves = [(leaf, negated) for leaf, negated in leaves if isinstance(_value(leaf, names), Tensor)]
    found = {negated for _, negated in leaves}
    return found.pop() if len(found) == 1 else None


def _value(leaf: ast.expr, names: dict[str, Any]) -> Any:
    """None where another part of the condition sees to it that it is not computed."""
    try:
        return eval(_compiled(ast.Expression(leaf), "eval"), names)
    except (AttributeError, TypeError, IndexError, KeyError):
        return None


def _only_raises(statement: ast.If) -> bool:
    return not statement.orelse and isinstance(statement.body[-1], ast.Raise)


def _condition(test: ast.expr, names: dict[str, Any]) -> Any:
    """The condition as a tensor; operands that are not tensors are evaluated as in Python."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        made = _condition(test.operand, names)
        return made.logical_not() if isinstance(made, Tensor) else not made
    if isinstance(test, ast.BoolOp):
        every = isinstance(test.op, ast.And)
        parts = []
        for value in test.values:
            part = _condition(value, names)
            if isinstance(part, Tensor):
                parts.append(part)
            elif bool(part) != every:
                return not every
        if not parts:
            return every
        return reduce(operator.and_ if every else operator.or_, parts)
    value = _value(test, names)
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise _NotChosenError
        return value.reshape(()) != 0
    return value


def _compiled(tree: Any, mode: str) -> Any:
    return compile(ast.fix_missing_locations(tree), "<branch>", mode)


def _assign(frame: FrameType, name: str, value: Any) -> None:
    """Set a variable of a running function."""
    frame.f_locals[name] = value
    if sys.version_info < (3, 13):  # there f_locals is a copy, to be written back
        local = frame.f_locals
        local[name] = value
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    assert frame.f_locals[name] is value


__all__ = ["READS", "Branches", "length_in_branch"]
