"""Autocast made explicit: the casts that torch.autocast does unseen become ops of the program.

A trace under autocast has the ops as they were called and the values as autocast made them. Autocast casts all
floating-point operands of an op to its low precision, or all to float32, or none: which of these gives the value's
dtype is found by trying. (For an op where several do, torch's type promotion does what autocast would.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.fx import Graph

from autoparallel.capture.numbers import with_examples
from autoparallel.capture.passes.dtype_check import refusal
from autoparallel.capture.passes.editing import Node, emit, source_line
from autoparallel.errors import CaptureError

aten = torch.ops.aten
DEVICES = ("cpu", "cuda")
#: Always in low precision; and tensors without data do not say that these refuse operands of several types.
PRODUCTS = frozenset({aten.linear, aten.matmul, aten.mm, aten.conv1d, aten.conv2d, aten.conv3d,
                      aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d, aten.convolution})


def ambient(tensors: Iterable[Any]) -> torch.dtype | None:
    """The low-precision dtype of the active autocast for a call with these tensors; None if none is active. Raises
    CaptureError if it is active for another device than theirs."""
    for device_type in DEVICES:
        if torch.is_autocast_enabled(device_type):
            refuse_elsewhere(device_type, tensors)
            return torch.get_autocast_dtype(device_type)
    return None


@contextmanager
def without_autocast() -> Iterator[None]:
    """Run what has its casts already."""
    with ExitStack() as stack:
        for device_type in DEVICES:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def refuse_elsewhere(device_type: str, tensors: Iterable[Any]) -> None:
    """Raises CaptureError for tensors on other devices: a trace does not show what autocast would do there."""
    others = sorted({t.device.type for t in tensors if isinstance(t, torch.Tensor)} - {device_type})
    if others:
        raise CaptureError(f"torch.autocast({device_type!r}) cannot be traced with tensors on {', '.join(others)}\n"
                           f"  Trace the model on {device_type}, or cast explicitly (x.to(dtype)).")


def explicit_casts(graph: Graph) -> None:
    """Insert the casts of each op that ran under autocast (``meta["autocast"]``: its low precision)."""
    for node in list(graph.nodes):
        low = node.meta.get("autocast")
        if low is None or not isinstance(node.target, torch._ops.OpOverload):
            continue
        wanted = _dtypes(node.meta["val"])
        for dtype in (low,) if node.target.overloadpacket in PRODUCTS else (None, low, torch.float32):
            if _made(node, dtype) == wanted and (dtype is not None or refusal(node) is None):
                if dtype is not None:
                    _cast(graph, node, dtype)
                break
        else:
            raise CaptureError(f"what torch.autocast does to {node.target} is not known{source_line(node)}\n"
                               "  Cast its operands yourself (x.to(dtype)).")


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _made(node: Node, dtype: torch.dtype | None) -> list[torch.dtype] | None:
    """Dtypes of the op's results with its operands cast; None when it cannot run so."""

    def operand(argument: Node) -> Any:
        value = argument.meta["val"]
        return value.to(dtype) if dtype is not None and _eligible(value) else value

    args, kwargs = with_examples(torch.fx.node.map_arg((node.args, dict(node.kwargs)), operand))
    try:
        return _dtypes(node.target(*args, **kwargs))
    except (RuntimeError, ValueError, TypeError):
        return None


def _dtypes(value: Any) -> list[torch.dtype]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [v.dtype for v in values if isinstance(v, torch.Tensor)]


def _cast(graph: Graph, node: Node, dtype: torch.dtype) -> None:
    def cast(argument: Node) -> Node:
        value = argument.meta["val"]
        needed = _eligible(value) and value.dtype != dtype
        return emit(graph, node, aten.to.dtype, argument, dtype) if needed else argument

    with graph.inserting_before(node):
        node.args, node.kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), cast)
