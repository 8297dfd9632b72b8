"""Attention masks that say nothing: one that is computed from nothing but positions, and lets each query see itself
and what is before it, becomes ``is_causal=True``; one that lets it see everything is left out.

Tracing makes Hugging Face's models build the mask that they leave out otherwise; it costs a tensor of query x key per
sample, and the fast attention kernels. Masks are not recognised by their ops but computed and compared, in blocks of
queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph

from autoparallel.capture.editing import Node
from autoparallel.capture.graph import on_device

aten = torch.ops.aten

BLOCK_CELLS = 1 << 24
#: Masks of more cells (one sample's) are left as they are: comparing them would take seconds.
MOST_CELLS = 1 << 30
POINTWISE = frozenset({
    aten.__and__.Tensor, aten.__or__.Tensor, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_not.default,
    aten.logical_and.default, aten.logical_or.default, aten.logical_not.default, aten.eq.Tensor, aten.eq.Scalar,
    aten.ne.Tensor, aten.ne.Scalar, aten.le.Tensor, aten.le.Scalar, aten.lt.Tensor, aten.lt.Scalar, aten.ge.Tensor,
    aten.ge.Scalar, aten.gt.Tensor, aten.gt.Scalar, aten.sub.Tensor, aten.add.Tensor, aten.mul.Tensor,
    aten.where.self, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther, aten.masked_fill.Scalar,
    aten.to.dtype,
})
ONE_NUMBER = frozenset({aten.full.default, aten.zeros.default, aten.ones.default})
TRIANGLES = frozenset({aten.triu.default, aten.tril.default})


def drop_masks(graph: Graph, mutations: dict[str, Node]) -> None:
    """Attention without masks that are always the same, and causal or all true (of numbers: zero or the least)."""
    known: dict[Node, str] = {}
    for node in graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False))
        named.update(node.kwargs)
        mask = named.get("attn_mask")
        if mask is None:
            continue
        if mask not in known:
            known[mask] = kind_of(mask)
        if known[mask]:
            named.update(attn_mask=None, is_causal=known[mask] == "causal")
            node.args = tuple(named.pop(name) for name in ("query", "key", "value"))
            node.kwargs = named


def kind_of(mask: Node) -> str:
    """Of a mask that depends on nothing: "causal" if it is true exactly where key <= query, "all" if it is true
    everywhere; "" for any other."""
    shape = mask.meta["val"].shape
    if len(shape) < 2 or shape[-2] * shape[-1] > MOST_CELLS or not _from_nothing(mask):
        return ""
    queries, keys = torch.arange(shape[-2]), torch.arange(shape[-1])
    rows, values = max(1, BLOCK_CELLS // shape[-1]), _Values()
    kinds = {"causal", "all"} if shape[-2] == shape[-1] else {"all"}
    try:
        for start in range(0, shape[-2], rows):
            block = _seen(values.rows(mask, start, start + rows))
            if "causal" in kinds and not (block == (keys <= queries[start:start + rows, None])).all():
                kinds.discard("causal")
            if "all" in kinds and not block.all():
                kinds.discard("all")
            if not kinds:
                return ""
    except _UnknownError:
        return ""
    return min(kinds)


def _seen(block: Any) -> Any:
    """Where a mask lets a query see a key; a mask of numbers that does more than that is too much."""
    if block.dtype == torch.bool:
        return block
    seen = block == 0
    if not (seen | (block <= torch.finfo(block.dtype).min)).all():
        raise _UnknownError
    return seen


def _from_nothing(node: Node) -> bool:
    seen: set[Node] = set()
    stack = [node]
    while stack:
        top = stack.pop()
        if top.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(top.target, "tags", ()):
            return False
        if top not in seen:
            seen.add(top)
            stack.extend(top.all_input_nodes)
    return True


class _UnknownError(Exception):
    """A value that is neither small nor element-wise, or no mask."""


class _Values:
    """Values of constant nodes: small ones whole, large ones in blocks of rows (dim -2).

    A leading dim along which all is equal has length 1, so that samples alike cost no more than one.
    """

    def __init__(self) -> None:
        self.small: dict[Node, Any] = {}

    def rows(self, node: Node, start: int, stop: int) -> Any:
        value = node.meta["val"]
        if value.numel() <= BLOCK_CELLS:
            whole = self.whole(node)
            return whole[..., start:stop, :] if whole.dim() > 1 and whole.shape[-2] > 1 else whole
        if node.target is aten.expand.default:
            return self.rows(node.args[0], start, stop)
        if node.target in ONE_NUMBER:
            kwargs = on_device(node.kwargs, torch.device("cpu"))
            return node.target((1,) * value.dim(), *node.args[1:], **kwargs)
        if node.target in TRIANGLES:
            above, diagonal = self.rows(node.args[0], start, stop), node.args[1] if len(node.args) > 1 else 0
            cells = above.expand(*above.shape[:-2], min(stop, value.shape[-2]) - start, value.shape[-1])
            return node.target(cells, diagonal + start)
        if node.target not in POINTWISE:
            raise _UnknownError
        return self._run(node, lambda n: self.rows(n, start, stop))

    def whole(self, node: Node) -> Any:
        """Of a small node, and so of all that it is made of."""
        for each in self._in_order(node):
            if any(n.meta["val"].numel() > BLOCK_CELLS for n in each.all_input_nodes):
                raise _UnknownError
            self.small[each] = self._run(each, lambda n: self.small[n].expand(n.meta["val"].shape))
            if isinstance(self.small[each], torch.Tensor):
                self.small[each] = _alike(self.small[each])
        return self.small[node]

    def _in_order(self, node: Node) -> Iterator[Node]:
        stack = [node]
        while stack:
            missing = [n for n in stack[-1].all_input_nodes if n not in self.small]
            if missing:
                stack.extend(missing)
            elif (top := stack.pop()) not in self.small:
                yield top

    def _run(self, node: Node, value_of: Any) -> Any:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
        return node.target(*args, **on_device(kwargs, torch.device("cpu")))


def _alike(value: torch.Tensor) -> torch.Tensor:
    for dim in range(value.dim() - 2):
        first = value.narrow(dim, 0, min(1, value.shape[dim]))
        if bool((value == first).all()):
            value = first
    return value


__all__ = ["drop_masks", "kind_of"]
