"""Communication fusion: gradients of whole parameters are reduced in buckets, one collective for many.

`reduce_gradient` does nothing forward, so those of many parameters can stand side by side at the program's beginning;
backward, they run when the last gradient of the bucket is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode

from autoparallel.layout import INVARIANT, PARTIAL
from autoparallel.lower.collectives import act, all_reduce_own, all_reduce_tensor, reduce_gradient
from autoparallel.lower.emit import item
from autoparallel.runtime import groups
from autoparallel.runtime.groups import Axis

#: As torch's DistributedDataParallel.
BUCKET_BYTES = 25 * 2**20


class _ReduceGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, sum_dtype: torch.dtype | None, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.axis, ctx.sum_dtype = axis, sum_dtype
        ctx.set_materialize_grads(False)  # what is read under no_grad only has no gradient, rather than zeros
        return tuple(x.view_as(x) for x in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # to be differentiated again: one by one
            return None, None, *(g if g is None else _summed_alone(g, ctx.axis, ctx.sum_dtype) for g in gradients)
        there = [g.to(ctx.sum_dtype or g.dtype) for g in gradients if g is not None]
        if len(there) == 1:
            parts: Sequence[torch.Tensor] = [all_reduce_tensor(there[0], ctx.axis)]
        else:
            flat = all_reduce_own(torch.cat([g.reshape(-1) for g in there]), ctx.axis)
            parts = flat.split([g.numel() for g in there])
        reduced = iter(part.view(g.shape) for part, g in zip(parts, there, strict=True))
        return None, None, *(None if g is None else next(reduced).to(g.dtype) for g in gradients)


def _summed_alone(gradient: torch.Tensor, axis: Axis, sum_dtype: torch.dtype | None) -> torch.Tensor:
    return act(gradient.to(sum_dtype or gradient.dtype), axis, PARTIAL, INVARIANT).to(gradient.dtype)


def reduce_gradients(axis: str, *values: torch.Tensor, sum_dtype: torch.dtype | None = None
                     ) -> tuple[torch.Tensor, ...]:
    """I -> R for several parameters: nothing forward; backward one all_reduce, in ``sum_dtype`` if given."""
    return _ReduceGradients.apply(groups.current(axis), sum_dtype, *values)


def fuse_reductions(module: GraphModule) -> GraphModule:
    """The same program with the reductions of parameters' gradients in buckets, by axis and dtype."""
    graph, made = Graph(), dict[FxNode, FxNode]()
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    for node in placeholders:
        made[node] = graph.node_copy(node)
    values = placeholders
    while values:  # then those over a second axis, ...
        values = [user for value in values for user in value.users
                  if user.target is reduce_gradient and user.meta["global_meta"].requires_grad]
        for bucket in _buckets(values):
            axis = bucket[0].args[1]
            values_in = (made[n.args[0]] for n in bucket)  # type: ignore[index]
            result = graph.call_function(reduce_gradients, (axis, *values_in), dict(bucket[0].kwargs))
            for number, node in enumerate(bucket):
                made[node] = graph.call_function(item, (result, number))
                made[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    return GraphModule(module, graph, class_name=type(module).__name__)


def _buckets(steps: list[FxNode]) -> Iterator[list[FxNode]]:
    def kind(node: FxNode) -> tuple[str, str]:
        return str(node.args[1]), str(node.meta["val"].dtype)

    for _, alike in itertools.groupby(sorted(steps, key=kind), kind):
        bucket: list[FxNode] = []
        size = 0
        for node in alike:
            num_bytes = node.meta["val"].numel() * node.meta["val"].element_size()
            if bucket and size + num_bytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(node)
            size += num_bytes
        if bucket:
            yield bucket
