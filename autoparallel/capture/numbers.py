"""Number arguments of a call as inputs of its program: one program for all values of a learning scale or a temperature.

A trace of a Python number has its value in it. Here it is a symbol instead (`torch.SymFloat`, `torch.SymInt`). Where
the model computes with it, the program has an expression (`Number`) in place of a constant, evaluated at each call with
Python's own arithmetic. Where it branches on the number, makes a size of it or reads its text, the trace is refused.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import Graph
from torch.fx import Node as FxNode

from autoparallel.capture.contents import is_users
from autoparallel.capture.dependencies import recorder
from autoparallel.errors import CaptureError

aten = torch.ops.aten
#: What is computed of numbers before an op takes them, by name.
OPERATORS: Mapping[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv,
                               operator.mod, operator.pow, operator.neg, operator.abs, operator.lt, operator.le,
                               operator.gt, operator.ge, operator.eq, operator.ne)},
    "float": float}
_NAMES: dict[Any, str] = {function: name for name, function in OPERATORS.items()}
_NAMES |= {torch.sym_float: "float", abs: "abs", pow: "pow"}
#: Ops that take numbers and have no tag that says so.
_POINTWISE = frozenset({aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, aten.rsub.Tensor,
                        aten.full.default, aten.floor_divide.default, aten.floor_divide.Scalar})
#: An expression: a value, the place of a number among the call's leaves, or an operator with its operands.
Form = int | float | tuple[str, Any] | tuple[str, Any, Any]


@dataclass(frozen=True)
class Number:
    """A number in the arguments of an op that each call brings, or an expression of such. ``example``: its value in
    the call that was traced."""

    form: Form
    example: float = field(compare=False, repr=False)

    def __bool__(self) -> bool:
        raise TypeError("a number argument has no value yet")


def evaluate(form: Any, values: Sequence[Any] | Mapping[int, Any]) -> Any:
    """The value of an expression, where ``values`` are those of the call's leaves."""
    if not isinstance(form, tuple):
        return form
    if form[0] == "leaf":
        return values[form[1]]
    return OPERATORS[form[0]](*(evaluate(operand, values) for operand in form[1:]))


def with_values(arguments: Any, values: Sequence[Any] | Mapping[int, Any]) -> Any:
    """Arguments of an op with values in place of `Number`s."""
    return pytree.tree_map_only(Number, lambda number: evaluate(number.form, values), arguments)


def with_examples(arguments: Any) -> Any:
    """Arguments with each `Number` replaced by its value in the traced call."""
    return pytree.tree_map_only(Number, lambda number: number.example, arguments)


def is_number(leaf: Any) -> bool:
    """Whether a leaf of a call is a Python number. (True and False are not.)"""
    return type(leaf) in (int, float)


def is_usual(leaf: Any) -> bool:
    """Whether a number may be a symbol. Not 0, -0.0, inf and NaN: a trace with symbols simplifies expressions (s - s, 0
    * s) that Python computes."""
    return is_number(leaf) and leaf != 0 and math.isfinite(leaf) and (type(leaf) is float or abs(leaf) < 2**53)


# --- while a model is traced ---------------------------------------------------------------------------------------


def as_tensors(call: Any, numbers: Sequence[int]) -> Any:
    """A call with a 0-dim tensor in place of each of these leaves."""
    leaves, spec = pytree.tree_flatten(call)
    for place in numbers:
        dtype = torch.float64 if type(leaves[place]) is float else torch.int64
        leaves[place] = torch.tensor(leaves[place], dtype=dtype, device="cpu")
    return pytree.tree_unflatten(leaves, spec)


@contextmanager
def as_symbols(model: nn.Module, numbers: Sequence[int]) -> Iterator[None]:
    """While a call of `as_tensors` is traced: forward gets a symbol in place of each of these tensors. Whoever reads a
    symbol's text, which a trace cannot follow, gets a CaptureError."""
    if not numbers:
        yield
        return

    def first(_: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
        for place in numbers:
            leaves[place] = aten._local_scalar_dense.default(leaves[place])
        return pytree.tree_unflatten(leaves, spec)

    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(first, prepend=True, with_kwargs=True).remove)
        for kind in (torch.SymFloat, torch.SymInt):
            for name in ("__str__", "__repr__"):
                stack.callback(setattr, kind, name, getattr(kind, name))
                setattr(kind, name, _unread(getattr(kind, name)))
        yield


def _unread(text: Callable[[Any], str]) -> Callable[[Any], str]:
    def read(symbol: Any) -> str:
        if recorder() is not None and is_users(sys._getframe(1).f_globals):
            raise CaptureError("forward reads the text of a number argument, which is another one at each call")
        return text(symbol)

    return read


# --- in the traced graph -------------------------------------------------------------------------------------------


def numbers_as_arguments(graph: Graph, placeholders: Mapping[FxNode, int], values: Sequence[Any]) -> None:
    """Replace values that the graph computes from number arguments by `Number`s. ``placeholders``: the node of each
    number, with its index among the call's leaves. Raises CaptureError if an op other than an element-wise one takes
    such a value."""
    if not placeholders:
        return
    found: dict[FxNode, Number] = {}

    def number(form: Any) -> Number:
        return Number(form, evaluate(form, values))

    for node in list(graph.nodes):
        inputs = node.all_input_nodes
        if node.op == "call_function" and node.target is aten._local_scalar_dense.default and inputs[0] in placeholders:
            found[node] = number(("leaf", placeholders[inputs[0]]))
        elif any(source in placeholders for source in inputs):
            raise CaptureError("a number argument is read by itself")
        elif any(source in found for source in inputs):
            args: Any = torch.fx.node.map_arg((node.args, dict(node.kwargs)), partial(_number_or_node, found))
            if (name := _NAMES.get(node.target)) is not None and (name != "pow" or _is_real(*args[0])):
                found[node] = number((name, *(arg.form if isinstance(arg, Number) else arg for arg in args[0])))
            elif isinstance(node.target, torch._ops.OpOverload) and "assert" not in str(node.target):
                node.args, node.kwargs = args
            else:
                raise CaptureError(f"{node.target} takes a number argument")
    for node in reversed([*placeholders, *found]):
        if not node.users and node.op != "placeholder":
            graph.erase_node(node)


def _number_or_node(found: Mapping[FxNode, Number], node: FxNode) -> Any:
    return found.get(node, node)


def _is_real(base: Any, exponent: Any) -> bool:
    """Whether a power is of the same type for all values: Python's of a negative number may be complex, of an integer
    a float."""
    if isinstance(exponent, Number):
        return type(base) is float and base > 0
    return float(exponent).is_integer() and (type(base.example) is float or exponent >= 0)


def refuse_elsewhere(target: Any, args: Any, kwargs: Any) -> None:
    """Raises CaptureError for an op of the normal form that takes a `Number` and is not element-wise: its shapes or its
    rule may depend on the value."""
    if any(isinstance(leaf, Number) for leaf in pytree.tree_leaves((args, kwargs))):
        tags = getattr(target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags or not (torch.Tag.pointwise in tags or target in _POINTWISE):
            raise CaptureError(f"{target} takes a number argument")


__all__ = ["Form", "Number", "as_symbols", "as_tensors", "evaluate", "is_number", "is_usual", "numbers_as_arguments",
           "refuse_elsewhere", "with_examples", "with_values"]
