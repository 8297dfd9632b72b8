"""Norms over the batch as sums and element-wise ops, their running statistics as buffer updates."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph

from autoparallel.capture.passes.editing import Node, argument, emit, replace
from autoparallel.errors import CaptureError

aten = torch.ops.aten


def batch_norm(graph: Graph, mutations: dict[str, Node]) -> None:
    """Batch norm into sums and element-wise ops: a batch cut over ranks then gives synchronised statistics by itself.
    And so instance norm, where it has running statistics.

    These, which the op updates behind its schema's back, become buffer updates like any other. As the op does, it
    computes in float32 what has less.
    """
    for node in list(graph.nodes):
        instances = node.target is aten.instance_norm.default and argument(node, "running_mean") is not None
        if node.target is aten.batch_norm.default or instances:
            with graph.inserting_before(node):
                new = _batch_norm(graph, node, mutations)
            replace(node, new, mutations)


def _batch_norm(graph: Graph, node: Node, mutations: dict[str, Node]) -> Node:
    x, weight, bias, running_mean, running_var, training, momentum, eps = node.args[:8]
    value = x.meta["val"]
    channels, one_each = value.shape[1], node.target is aten.instance_norm.default
    instances = value.shape[0] if one_each else 1
    dims = [d for d in range(value.dim()) if d != 1 and not (one_each and d == 0)]
    count = value.numel() // channels // instances

    def e(target: Any, *args: Any) -> Node:
        return emit(graph, node, target, *args)

    def wide(vector: Node) -> Node:
        return e(aten.reshape.default, vector, [1, channels] + [1] * (value.dim() - 2))

    def as_type(made: Node, dtype: torch.dtype) -> Node:
        return made if made.meta["val"].dtype == dtype else e(aten.to.dtype, made, dtype)

    if value.dtype.itemsize < 4:
        x = e(aten.to.dtype, x, torch.float32)
    if training:
        mean = e(aten.mul.Tensor, e(aten.sum.dim_IntList, x, dims, True), 1.0 / count)
        centred = e(aten.sub.Tensor, x, mean)
        squares = e(aten.sum.dim_IntList, e(aten.mul.Tensor, centred, centred), dims, True)
        variance = e(aten.mul.Tensor, squares, 1.0 / count)
        if running_mean is not None:
            unbiased = 1.0 / max(1, count - 1)
            for buffer, statistic, scale in ((running_mean, mean, 1.0), (running_var, squares, unbiased)):
                batch = e(aten.detach.default, statistic)
                if one_each:
                    batch = e(aten.mul.Tensor, e(aten.sum.dim_IntList, batch, [0], True), 1.0 / instances)
                batch = e(aten.reshape.default, batch, [channels])
                kept = e(aten.mul.Tensor, mutations.get(buffer.name, buffer), 1.0 - momentum)
                new = e(aten.add.Tensor, kept, e(aten.mul.Tensor, batch, scale * momentum))
                mutations[buffer.name] = as_type(new, buffer.meta["val"].dtype)
    else:
        mean, variance = wide(running_mean), wide(running_var)
        centred = e(aten.sub.Tensor, x, mean)
    out = e(aten.mul.Tensor, centred, e(aten.rsqrt.default, e(aten.add.Tensor, variance, eps)))
    if weight is not None:
        out = e(aten.mul.Tensor, out, wide(weight))
    return as_type(e(aten.add.Tensor, out, wide(bias)) if bias is not None else out, value.dtype)


def refuse_given_statistics(mutations: dict[str, Node], buffer_names: dict[str, str]) -> None:
    """Raises CaptureError for running statistics that are not buffers: their new values would be lost."""
    if inputs := [name for name in mutations if name not in buffer_names]:
        raise CaptureError(f"a norm updates running statistics that are the model's inputs {inputs}\n"
                           "  Hold them as buffers (register_buffer), or norm by them (training=False).")
