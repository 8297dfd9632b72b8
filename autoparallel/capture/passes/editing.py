"""Edits of a traced graph that keep the metadata of a traced node: shape of its value, and line of the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.utils._pytree as pytree
from torch.fx import Graph

from autoparallel.capture.numbers import with_examples

Node: TypeAlias = Any  # an fx node, whose args torch types as a union of twenty kinds
#: Values without data that `emit` has made for a graph, by op and arguments; those arguments.
_RESULTS: WeakKeyDictionary[Graph, dict[object, tuple[Any, list[Any]]]] = WeakKeyDictionary()
_PLAIN = (torch.Tensor, int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def emit(graph: Graph, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert an op at the current point, with the value and origin metadata that a traced node would have."""
    node = graph.call_function(target, args, kwargs)
    values = with_examples(torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"]))
    node.meta = {k: like.meta[k] for k in ("nn_module_stack", "stack_trace", "no_grad") if k in like.meta}
    mode = getattr(like.meta.get("val"), "fake_mode", None)
    with mode or nullcontext():    # made from numbers alone, it has no data either
        node.meta["val"] = _result(graph, mode, target, *values)
    return node


def _result(graph: Graph, mode: object, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an op makes of values without data, under this ``mode``. The nodes of equal blocks have the same values, of
    which the same op makes one."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    schema = getattr(target, "_schema", None)    # arithmetic of numbers has none
    if schema is None or schema.is_mutable or not all(isinstance(leaf, _PLAIN) for leaf in leaves):
        return target(*args, **kwargs)
    known = _RESULTS.setdefault(graph, {})
    key = target, spec, mode, torch.is_grad_enabled(), tuple(
        id(leaf) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves)
    if key not in known:
        known[key] = target(*args, **kwargs), leaves    # which keep their identities as long
    return known[key][0]


def argument(node: Node, name: str) -> Any:
    """The value of a schema argument, its default when it is not given."""
    for position, declared in enumerate(node.target._schema.arguments):
        if declared.name == name:
            given = node.args[position] if position < len(node.args) else declared.default_value
            return node.kwargs.get(name, given)
    raise KeyError(f"{node.target} has no argument {name!r}")


def replace(node: Node, new: Node, mutations: dict[str, Node]) -> None:
    node.replace_all_uses_with(new)
    for name, value in mutations.items():
        if value is node:
            mutations[name] = new
    node.graph.erase_node(node)


def use_results(node: Node, values: Sequence[Node]) -> None:
    """Drop an op with several results, each of which is one of ``values``."""
    for user in list(node.users):
        user.replace_all_uses_with(values[user.args[1]])
        user.graph.erase_node(user)
    node.graph.erase_node(node)


def module_path(node: Node) -> str:
    """The module that called the op; of the model itself nothing."""
    stack = node.meta.get("nn_module_stack") or {}
    return next(reversed(stack.values()))[0] if stack else ""


def source_of(node: Node) -> str:
    """``file, line, function: code`` of the innermost frame outside torch."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    frames = [(lines[i].strip(), lines[i + 1].strip()) for i in range(0, len(lines) - 1)
              if lines[i].lstrip().startswith("File ")]
    own = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    return f"{own[-1][0]}: {own[-1][1]}" if own else ""


def source_line(node: Node) -> str:
    """Module and line of an op, as messages have them."""
    path, line = module_path(node), source_of(node)
    return (f"\n  in {path}" if path else "") + (f"\n  at {line}" if line else "")
