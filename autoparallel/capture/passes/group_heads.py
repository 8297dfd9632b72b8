"""Attention whose keys and values are repeated for groups of queries, as attention of grouped queries.

    k [b, g, s, d] -> reshape [b, g, 1, s, d] -> expand [b, g, n, s, d] -> reshape [b, g n, s, d] -> attention
    attention(q, k, v, enable_gqa=True)

Models repeat each head of keys and values n times (``repeat_kv``, ``repeat_interleave``, ``expand``), before or after
heads are brought in front, or a cast. As one op no copies are made, kept for backward, or sent to other ranks. Of keys
or values that are a section of a fused projection, a copy is kept instead of the whole result.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Graph

from autoparallel.capture.passes.editing import Node, argument, emit

aten = torch.ops.aten
#: The dim of heads, of [batch, heads, sequence, width].
_HEADS = 1


def group_heads(graph: Graph, mutations: dict[str, Node]) -> None:
    """Let each such attention read its keys and values before they are repeated."""
    made = dict[Node, Node]()
    for node in list(graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default or argument(node, "enable_gqa"):
            continue
        query, key, value = (argument(node, name) for name in ("query", "key", "value"))
        heads = [x.meta["val"].shape[_HEADS] if x.meta["val"].dim() == 4 else 0 for x in (query, key, value)]
        times = [_repeats(x, _HEADS, node) for x in (key, value)]
        if len(set(heads)) > 1 or len(set(times)) > 1 or times[0] < 2:
            continue
        for x in (key, value):
            if x not in made:
                made[x] = _alone(graph, x, _apart(graph, x, _HEADS), query)
        node.args = (query, made[key], made[value], *node.args[3:])
        node.kwargs = {name: x for name, x in node.kwargs.items() if name not in ("query", "key", "value")}
        node.kwargs = {**node.kwargs, "enable_gqa": True}


def _repeats(x: Node, dim: int, like: Node) -> int:
    """How many times in a row ``x`` has each part along ``dim``; 1 where no repetition is seen. Gradients flow through
    its ops as through ``like``."""
    if bool(x.meta.get("no_grad")) != bool(like.meta.get("no_grad")):
        return 1
    if x.target is aten.permute.default:
        return _repeats(x.args[0], x.args[1][dim], like)
    if x.target is aten.to.dtype:
        return _repeats(x.args[0], dim, like)
    if x.target is aten.expand.default:
        return _expanded(x, like) if _expanded_dim(x) == dim else 1
    if x.target is not aten.reshape.default or x.args[0].target is not aten.expand.default:
        return 1
    wide, shape = x.args[0], x.meta["val"].shape
    times, inner = _expanded(wide, like), _expanded_dim(wide) + 1
    ends = math.prod(wide.meta["val"].shape[inner:]) == math.prod(shape[dim + 1 :]) and math.prod(shape)
    return times if ends and shape[dim] % times == 0 else 1


def _expanded(wide: Node, like: Node) -> int:
    """How many times an expand repeats the one dim that it makes longer; 1 if it makes none, or several."""
    dim = _expanded_dim(wide)
    same = bool(wide.meta.get("no_grad")) == bool(like.meta.get("no_grad"))
    return int(wide.meta["val"].shape[dim]) if dim >= 0 and same else 1


def _expanded_dim(wide: Node) -> int:
    source, shape = wide.args[0].meta["val"].shape, wide.meta["val"].shape
    longer = [d for d, (a, b) in enumerate(zip(source, shape, strict=False)) if a != b]
    return longer[0] if len(longer) == 1 and len(source) == len(shape) else -1


def _apart(graph: Graph, x: Node, dim: int) -> Node:
    """A new node that computes ``x`` without the repetition along ``dim``."""
    with graph.inserting_before(x):
        if x.target is aten.permute.default:
            return emit(graph, x, aten.permute.default, _apart(graph, x.args[0], x.args[1][dim]), x.args[1])
        if x.target is aten.to.dtype:
            return emit(graph, x, aten.to.dtype, _apart(graph, x.args[0], dim), *x.args[1:], **x.kwargs)
        if x.target is aten.expand.default:
            return x.args[0]
        shape, wide = list(x.meta["val"].shape), x.args[0]
        shape[dim] //= wide.meta["val"].shape[_expanded_dim(wide)]
        source: Node = wide.args[0]
        same = list(source.meta["val"].shape) == shape
        return source if same else emit(graph, x, aten.reshape.default, source, shape)


def _alone(graph: Graph, x: Node, single: Node, query: Node) -> Node:
    """``single``, copied if it is a view of a fused projection's result that backward keeps for this view alone."""
    whole = _section_of(single)
    if whole is None or whole is _section_of(query) or x.meta.get("no_grad"):
        return single
    with graph.inserting_before(x):
        return emit(graph, x, aten.clone.default, single)


def _section_of(x: Node) -> Node | None:
    """The tensor that ``x`` is a view of a part of; None if it is none."""
    while x.target in (aten.reshape.default, aten.permute.default):
        x = x.args[0]
    return x.args[0] if x.target in (aten.slice.Tensor, aten.select.int) else None


__all__ = ["group_heads"]
