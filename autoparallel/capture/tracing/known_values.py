"""Values that a trace knows although it computes nothing: of tensors that a model makes of no input and no parameter.

    mask = torch.eye(n, dtype=torch.bool)            known: it is the same at every call
    similar[~mask].view(n, n - 1)                    so the places of the mask are constants, and so many rows there are
    dims = torch.arange(2, x.dim()).tolist()         a list of numbers

The graph so far is run on real tensors, as far as it is made of nothing; what anything else has been written to is
unknown from there on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

Tensor = torch.Tensor
#: The most elements of a tensor that is computed during a trace: a mask of 2,048 x 2,048.
MOST_ELEMENTS = 1 << 22


class _UnknownError(Exception):
    """A value that depends on the call."""


#: What gives Python numbers of a tensor's values.
NUMBERS: frozenset[Any] = frozenset({Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
                                     Tensor.__index__})


def known_places(mask: Tensor) -> list[list[int]] | None:
    """Where a mask is true in every call, a list of places per dim; None where that depends on the call."""
    return _known(mask, lambda found: found.nonzero().t().tolist())


def known_numbers(function: Callable[[Tensor], Any], tensor: Any) -> Any:
    """The result of one of `NUMBERS` that is the same in every call; None where it depends on the call."""
    return _known(tensor, function) if isinstance(tensor, FakeTensor) and tensor.constant is None else None


def _known(tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
    """What ``read`` gives of the tensor's values, if they are known."""
    tracer: Any = getattr(get_proxy_mode(), "tracer", None)
    slot = get_proxy_slot(tensor, tracer, None) if tracer is not None else None
    if slot is None or tensor.numel() > MOST_ELEMENTS or not _of_nothing(slot.proxy.node):
        return None
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        found = _Values(tracer.graph, tracer.root).of(slot.proxy.node)
        same = isinstance(found, Tensor) and (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        return read(found) if same else None


def _of_nothing(node: Node) -> bool:
    """Whether a value is made of no input, as far as its operands tell; most are not, which is soon found."""
    seen, waiting = {node}, [node]
    while waiting:
        top = waiting.pop()
        if top.op == "placeholder":
            return False
        new = [n for n in top.all_input_nodes if n not in seen]
        seen.update(new)
        waiting += new
    return True


class _Values:
    """The values of a graph's nodes that do not depend on the call."""

    def __init__(self, graph: Graph, root: torch.nn.Module) -> None:
        self._root = root
        self._known: dict[Node, Any] = {}
        self._changed: set[int] = set()  # storages that something unknown was written to
        for node in graph.nodes:
            try:
                self._known[node] = self._run(node)
            except _UnknownError:
                self._spoil(node)

    def of(self, node: Node) -> Any:
        try:
            return self._read(node)
        except _UnknownError:
            return None

    def _read(self, node: Node) -> Any:
        value = self._known.get(node)
        if value is None or (isinstance(value, Tensor) and _storage(value) in self._changed):
            raise _UnknownError
        return value

    def _run(self, node: Node) -> Any:
        if node.op == "get_attr":
            held = getattr(self._root, str(node.target), None)
            if type(held) is not Tensor or held.device.type != "cpu" or held.numel() > MOST_ELEMENTS:
                raise _UnknownError
            return held.clone()
        if node.op != "call_function" or not _repeatable(node):
            raise _UnknownError
        args, kwargs = map_arg(node.args, self._read), dict(map_arg(node.kwargs, self._read))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        try:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:  # an op that the CPU has not, or a device among its arguments
            raise _UnknownError from error

    def _spoil(self, node: Node) -> None:
        """Note what an op that was not run would have written to."""
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and (schema is None or schema.is_mutable) and node.target is not operator.getitem:
            self._changed |= {_storage(value) for value in map(self._known.get, node.all_input_nodes)
                              if isinstance(value, Tensor)}


def _repeatable(node: Node) -> bool:
    """Whether an op gives the same at every call, and is no great work."""
    if node.target is operator.getitem:
        return True
    made = node.meta.get("val")
    if not isinstance(node.target, torch._ops.OpOverload) or (
            isinstance(made, Tensor) and made.numel() > MOST_ELEMENTS):
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)


__all__ = ["NUMBERS", "known_numbers", "known_places"]
