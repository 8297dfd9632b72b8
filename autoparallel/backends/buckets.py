"""Collectives of parameters and gradients in buckets, on a traced graph.

Each member of a bucket keeps its shape; its result is a view of the bucket's. Gathers and scatters are packed by one
cat. Gradients to all-reduce are written into their bucket directly, by matrix products too, and summed in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph
from torch.fx import Node as FxNode

from autoparallel.backends.traced import (
    GATHER,
    REDUCE,
    SCATTER,
    WAIT,
    aten,
    call,
    gathers_of,
    named_bucket,
    named_reductions,
    own,
    reductions_of,
    waited,
)
from autoparallel.schedule.async_windows import FIRST_BUCKET_BYTES
from autoparallel.schedule.fusion import BY_SIZE, Fusion, in_buckets

Bucket = list[FxNode]
#: Elements of which parts of a bucket that products write begin at a multiple.
ALIGNED = 64


@dataclass(frozen=True)
class Limits:
    """The limits of buckets: ``most_bytes``, or as ``fusion`` says; ``axis_of``: mesh axes by their groups' names."""

    most_bytes: float
    fusion: Fusion = BY_SIZE
    axis_of: Mapping[str, str] = field(default_factory=dict)

    def on(self, group_name: str) -> float:
        """The largest bucket of a process group, in bytes."""
        return self.fusion.bytes_on(self.axis_of.get(group_name, ""), self.most_bytes)


def _num_bytes(node: FxNode) -> int:
    value = waited(node).meta["val"] if node.target is GATHER else node.args[0].meta["val"]  # type: ignore[union-attr]
    return int(value.nbytes)


def grouped(nodes: Sequence[FxNode], kind: Callable[[FxNode], object], limits: Limits,
            named: Callable[[FxNode], int | None], first: float = math.inf) -> list[Bucket]:
    """Buckets of nodes of equal ``kind``, in the order of their first nodes. ``named``: the number of a node's bucket
    of any size, or None. ``first``: the most bytes of the first of a kind."""
    by_kind: dict[object, Bucket] = {}
    for node in nodes:
        value = node.args[0].meta["val"]  # type: ignore[union-attr]
        by_kind.setdefault((named(node), kind(node), node.target, node.args[1:], value.dtype, value.device), []
                           ).append(node)
    found = list[Bucket]()
    for members in by_kind.values():
        if named(members[0]) is not None:
            found.append(members)
            continue
        sizes, most = list(map(_num_bytes, members))[::-1], limits.on(str(members[0].args[-1]))
        buckets = in_buckets(sizes, most, first, limits.fusion.most)    # from the end: of the nodes the first ones
        found += [[members[len(members) - 1 - n] for n in reversed(bucket)] for bucket in reversed(buckets)]
    return found


def bucket_gathers(graph: Graph, limits: Limits) -> list[FxNode]:
    """Gather parameters in buckets; returns the new gathers, in the order in which they are read."""
    made = []
    for bucket in grouped(gathers_of(graph), _gathers_before, limits, named_bucket):
        made.append(_gather(graph, bucket) if len(bucket) > 1 else bucket[0])
    return made


def _gathers_before(node: FxNode) -> int:
    """The number of gathers on the path to this one."""
    before = max((_gathers_before(i) for i in node.all_input_nodes), default=0)
    return before + (node.target is GATHER)


def _gather(graph: Graph, bucket: Bucket) -> FxNode:
    sent = [node.args[0] for node in bucket]
    _, ranks, group = bucket[0].args
    with graph.inserting_before(bucket[-1]):
        flat = [call(graph, aten.view.default, value, [-1]) for value in sent]
        start = call(graph, GATHER, call(graph, aten.cat.default, flat), ranks, group)
        rows = call(graph, aten.view.default, call(graph, WAIT, start), [ranks, -1])
        ends = list(accumulate(node.meta["val"].shape[0] for node in flat))
        for node, begin, end in zip(bucket, [0, *ends], ends, strict=False):
            part = call(graph, aten.slice.Tensor, rows, 1, begin, end)
            whole = call(graph, aten.clone.default, part, memory_format=torch.contiguous_format)
            _replace(graph, node, call(graph, aten.view.default, whole, list(node.meta["val"].shape)))
    return start


def bucket_reductions(graph: Graph, limits: Limits, parameters: Mapping[int, int | None] = MappingProxyType({})
                      ) -> None:
    """Sum gradients in buckets; the first one is small. ``parameters``: by number of the traced function's inputs, the
    bucket of any size."""
    depth, named = reductions_of(graph), named_reductions(graph, parameters)
    for bucket in grouped(list(depth), depth.__getitem__, limits, named.get, FIRST_BUCKET_BYTES):
        if len(bucket) > 1:
            (_all_reduce if bucket[0].target is REDUCE else _reduce_scatter)(graph, bucket)


def _all_reduce(graph: Graph, bucket: Bucket) -> None:
    last, bucket = bucket[-1], sorted(bucket, key=_is_odd)
    with graph.inserting_before(last):
        parts: list[Any] = [node.args[0] for node in bucket]
        start = call(graph, REDUCE, call(graph, own.bucket.default, parts), *bucket[0].args[1:])
        _cut(graph, bucket, call(graph, WAIT, start), [part.meta["val"].numel() for part in parts])


def _is_odd(node: FxNode) -> bool:
    """Whether what lies behind a part of a bucket would begin at an address that slows kernels down."""
    return node.args[0].meta["val"].numel() % ALIGNED != 0  # type: ignore[union-attr]


def _reduce_scatter(graph: Graph, bucket: Bucket) -> None:
    ranks = bucket[0].args[2]
    with graph.inserting_before(bucket[-1]):
        rows = [call(graph, aten.reshape.default, node.args[0], [ranks, -1]) for node in bucket]
        packed = call(graph, aten.view.default, call(graph, aten.cat.default, rows, 1), [-1])
        start = call(graph, SCATTER, packed, *bucket[0].args[1:])
        _cut(graph, bucket, call(graph, WAIT, start), [node.meta["val"].shape[1] for node in rows])


def _cut(graph: Graph, bucket: Bucket, summed: FxNode, lengths: Sequence[int]) -> None:
    ends = list(accumulate(lengths))
    made = []
    for node, begin, end in zip(bucket, [0, *ends], ends, strict=False):
        part = call(graph, aten.slice.Tensor, summed, 0, begin, end)
        made.append(call(graph, aten.view.default, part, list(node.meta["val"].shape)))
    for node, view in zip(bucket, made, strict=True):    # they were put before one of the nodes, which go now
        _replace(graph, node, view)


def _replace(graph: Graph, start: FxNode, made: FxNode) -> None:
    """``made`` in place of a collective's awaited result. (Order is restored by the pass that moves collectives.)"""
    wait = waited(start)
    wait.replace_all_uses_with(made)
    graph.erase_node(wait)
    graph.erase_node(start)

