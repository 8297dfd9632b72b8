"""Attention masks without effect: a mask computed from positions only that is causal becomes ``is_causal=True``; one
that hides nothing is removed.

Tracing makes Hugging Face's models build the mask that they leave out otherwise; it costs a tensor of query x key per
sample, and the fast attention kernels. Masks are not recognised by their ops but computed and compared: as runs of keys
(`attention_mask_runs`), or, where a mask is more than comparisons of positions, cell by cell in blocks of queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph

from autoparallel.capture.graph import on_device
from autoparallel.capture.passes import attention_mask_runs
from autoparallel.capture.passes.attention_mask_runs import Runs
from autoparallel.capture.passes.editing import Node

aten = torch.ops.aten

BLOCK_CELLS = 1 << 24
#: Masks of more cells (one sample's) that are not runs of keys are left as they are: 65,536 x 65,536 takes 25 s.
MOST_CELLS = 1 << 32
POINTWISE = frozenset({
    aten.__and__.Tensor, aten.__or__.Tensor, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_not.default,
    aten.logical_and.default, aten.logical_or.default, aten.logical_not.default, aten.eq.Tensor, aten.eq.Scalar,
    aten.ne.Tensor, aten.ne.Scalar, aten.le.Tensor, aten.le.Scalar, aten.lt.Tensor, aten.lt.Scalar, aten.ge.Tensor,
    aten.ge.Scalar, aten.gt.Tensor, aten.gt.Scalar, aten.sub.Tensor, aten.add.Tensor, aten.mul.Tensor,
    aten.where.self, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther, aten.masked_fill.Scalar,
    aten.to.dtype,
})
ONE_NUMBER = frozenset({aten.full.default, aten.zeros.default, aten.ones.default})
#: Ops along one dim, and the place of its number among their arguments.
ALONG = {aten.slice.Tensor: 1, aten.diff.default: 2, aten.cumsum.default: 1}
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
    """The kind of a constant mask: "causal" if it is true exactly where key <= query, "all" if it is true everywhere,
    "" for any other."""
    shape = mask.meta["val"].shape
    if len(shape) < 2 or min(shape) == 0 or not _from_nothing(mask):
        return ""
    values = _Values()
    try:
        if (runs := values.runs(mask)) is not None:
            return min(attention_mask_runs.kinds(_seen, runs, shape), default="")
        return _kind_by_cells(mask, shape, values) if shape[-2] * shape[-1] <= MOST_CELLS else ""
    except _UnknownError:
        return ""


def _kind_by_cells(mask: Node, shape: torch.Size, values: _Values) -> str:
    queries, keys = torch.arange(shape[-2]), torch.arange(shape[-1])
    rows = max(1, BLOCK_CELLS // shape[-1])
    kinds = {"causal", "all"} if shape[-2] == shape[-1] else {"all"}
    for start in range(0, shape[-2], rows):
        block = _seen(values.rows(mask, start, start + rows))
        causal = keys <= queries[start:start + rows, None]
        if "causal" in kinds and not (block == causal).all():
            kinds.discard("causal")
        if "all" in kinds and not block.all():
            kinds.discard("all")
        if not kinds:
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


def _is_matrix(shape: torch.Size) -> bool:
    return len(shape) > 1 and min(shape[-2:]) > 1


def _one_of_each(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether one of two matrices is of keys, the other of queries or one number."""
    return sorted((first.shape[1] > 1, second.shape[1] > 1)) == [False, True] and (
        first if first.shape[1] > 1 else second).shape[0] == 1


class _UnknownError(Exception):
    """A value that is neither small nor element-wise, or no mask."""


class _Values:
    """Values of constant nodes: small ones whole, large ones in blocks of rows (dim -2).

    A dim along which all is equal has length 1, so that samples alike cost no more than one.
    """

    def __init__(self) -> None:
        self.small: dict[Node, Any] = {}
        self.in_runs: dict[Node, Runs | None] = {}

    def runs(self, node: Node) -> Runs | None:
        """A value of queries x keys, equal for all samples, as runs of keys; None where that is not known."""
        if node not in self.in_runs:
            self.in_runs[node] = self._made_of_runs(node)
        return self.in_runs[node]

    def _made_of_runs(self, node: Node) -> Runs | None:
        if node.target is aten.expand.default:
            return self.runs(node.args[0])
        if node.target in TRIANGLES:
            part, diagonal = self.runs(node.args[0]), node.args[1] if len(node.args) > 1 else 0
            lower, shape = node.target is aten.tril.default, node.meta["val"].shape
            return None if part is None else attention_mask_runs.triangle(part, lower, diagonal, shape)
        inputs = list(node.all_input_nodes)
        if node.target in attention_mask_runs.COMPARISONS and len(inputs) == 2:
            first, second = (self._matrix(n) for n in node.args)
            if first is not None and second is not None and _one_of_each(first, second):
                return attention_mask_runs.compared(node.target, first, second)
        if node.target in POINTWISE and inputs and _is_matrix(node.meta["val"].shape):
            parts = [part for n in inputs if (part := self.runs(n)) is not None]
            if len(parts) < len(inputs):
                return None
            place = {n: i for i, n in enumerate(inputs)}
            return attention_mask_runs.combined(lambda found: self._run(node, lambda n: found[place[n]]), parts)
        value = self._matrix(node)
        return Runs.of(value) if value is not None else None

    def _matrix(self, node: Node) -> torch.Tensor | None:
        """A small value, equal for all samples, as [queries or 1, keys or 1]."""
        try:
            value = self.whole(node)
        except _UnknownError:
            return None
        if not isinstance(value, torch.Tensor) or value.numel() != math.prod(value.shape[-2:]):
            return None
        return value.reshape((1, 1, *value.shape)[-2:] if value.dim() < 2 else value.shape[-2:])

    def rows(self, node: Node, start: int, stop: int) -> Any:
        value = node.meta["val"]
        large = value.numel() > BLOCK_CELLS
        if large and node.target is aten.expand.default:
            return self.rows(node.args[0], start, stop)
        if large and node.target in TRIANGLES:
            above, diagonal = self.rows(node.args[0], start, stop), node.args[1] if len(node.args) > 1 else 0
            cells = above.expand(*above.shape[:-2], min(stop, value.shape[-2]) - start, value.shape[-1])
            return node.target(cells, diagonal + start)
        if large and node.target in POINTWISE:
            return self._run(node, lambda n: self.rows(n, start, stop))
        whole = self.whole(node)
        return whole[..., start:stop, :] if whole.dim() > 1 and whole.shape[-2] > 1 else whole

    def whole(self, node: Node) -> Any:
        """Of a node that is small where it is not alike, as all must be that it is made of."""
        for each in self._in_order(node):
            made = self._made(each)
            self.small[each] = _equivalent(made) if isinstance(made, torch.Tensor) else made
        return self.small[node]

    def _in_order(self, node: Node) -> Iterator[Node]:
        stack = [node]
        while stack:
            missing = [n for n in stack[-1].all_input_nodes if n not in self.small]
            if missing:
                stack.extend(missing)
            elif (top := stack.pop()) not in self.small:
                yield top

    def _made(self, node: Node) -> Any:
        if node.target in ONE_NUMBER:
            kwargs = on_device(node.target, node.kwargs, torch.device("cpu"))
            return node.target((1,) * node.meta["val"].dim(), *node.args[1:], **kwargs)
        if node.target is aten.expand.default:
            value = self.small[node.args[0]]
            return value.reshape((1,) * (node.meta["val"].dim() - value.dim()) + value.shape)
        if node.target is aten.index.Tensor:
            return self._indexed(node)
        if node.target not in POINTWISE:
            return self._run(node, lambda n: self._spread(n, node))
        if math.prod(torch.broadcast_shapes(*(self.small[n].shape for n in node.all_input_nodes))) > BLOCK_CELLS:
            raise _UnknownError
        return self._run(node, self.small.__getitem__)

    def _spread(self, node: Node, reader: Node) -> torch.Tensor:
        """A value as long as its reader needs it: along the reader's one dim, and as what else it reads; or whole."""
        value, full, dim = self.small[node], node.meta["val"].shape, _along(reader)
        if dim is not None:
            others = [self.small[n].shape for n in reader.all_input_nodes]
            full = [n if d == dim % len(full) else max(shape[d] for shape in others) for d, n in enumerate(full)]
        if math.prod(full) > BLOCK_CELLS:
            raise _UnknownError
        return value.expand(full)

    def _indexed(self, node: Node) -> Any:
        """Where all is alike along a dim, every place in it is the first."""
        value, whole = self.small[node.args[0]], node.args[0].meta["val"].shape
        places = [None if n is None else self.small[n] if value.shape[d] == whole[d] else
                  torch.zeros((1,) * n.meta["val"].dim(), dtype=torch.int64) for d, n in enumerate(node.args[1])]
        return aten.index.Tensor(value, places)

    def _run(self, node: Node, value_of: Any) -> Any:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
        return node.target(*args, **on_device(node.target, kwargs, torch.device("cpu")))


def _along(node: Node) -> int | None:
    """The only dim along which an op looks at more than one element, if that is known."""
    position = ALONG.get(node.target, len(node.args))
    return node.args[position] if position < len(node.args) else None


def _equivalent(value: torch.Tensor) -> torch.Tensor:
    for dim in range(value.dim()):
        first = value.narrow(dim, 0, min(1, value.shape[dim]))
        if bool((value == first).all()):
            value = first
    return value


__all__ = ["drop_masks", "kind_of"]
