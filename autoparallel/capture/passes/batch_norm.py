"""Norms over the batch, their running statistics as buffer updates."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph

from autoparallel.capture.passes.editing import Node, argument, emit, replace
from autoparallel.errors import CaptureError
from autoparallel.ops.batch_norm import batch_norm

aten = torch.ops.aten


def norms_in_training(graph: Graph, mutations: dict[str, Node]) -> None:
    """Batch norm in training into `ops.batch_norm`, and instance norm with running statistics into sums and
    element-wise ops: the statistics, which their schemas do not say they update, become buffer updates like any other,
    and later readers get their new values.
    """
    now: dict[Node, Node] = {}    # by buffer
    for node in list(graph.nodes):
        whole = node.target is aten.batch_norm.default and argument(node, "training")
        instances = node.target is aten.instance_norm.default and argument(node, "running_mean") is not None
        if whole or instances:
            with graph.inserting_before(node):
                new = (_batch_norm if whole else _instance_norm)(graph, node, now)
            replace(node, new, mutations)
        else:
            for buffer in now.keys() & set(node.all_input_nodes):
                node.replace_input_with(buffer, now[buffer])
    for buffer, value in now.items():
        written = [name for name, last in mutations.items() if last is buffer]    # in place, before the norms
        mutations.update(dict.fromkeys(written, value))
        if not written:
            mutations.setdefault(buffer.name, value)    # else the user's code writes in place behind the norms


def _batch_norm(graph: Graph, node: Node, now: dict[Node, Node]) -> Node:
    """``now``: running statistics that norms have updated, by buffer."""
    x, weight, bias, *running = node.args[:5]
    read = [None if buffer is None else now.get(buffer, buffer) for buffer in running]
    made = emit(graph, node, batch_norm, x, weight, bias, *read, *node.args[6:8])
    result = emit(graph, node, operator.getitem, made, 0)
    for number, buffer in enumerate(running, 1):
        if buffer is not None:
            now[buffer] = emit(graph, node, operator.getitem, made, number)
    return result


def _instance_norm(graph: Graph, node: Node, now: dict[Node, Node]) -> Node:
    """Computed in float32 where x has lower precision, as torch does. ``now``: as in `_batch_norm`."""
    x, weight, bias, running_mean, running_var, training, momentum, eps = node.args[:8]
    value = x.meta["val"]
    instances, channels = value.shape[:2]
    dims, count = list(range(2, value.dim())), value.numel() // channels // instances

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
        unbiased = 1.0 / max(1, count - 1)
        for buffer, statistic, scale in ((running_mean, mean, 1.0), (running_var, squares, unbiased)):
            batch = e(aten.sum.dim_IntList, e(aten.detach.default, statistic), [0], True)
            batch = e(aten.reshape.default, e(aten.mul.Tensor, batch, 1.0 / instances), [channels])
            kept = e(aten.mul.Tensor, now.get(buffer, buffer), 1.0 - momentum)
            new = e(aten.add.Tensor, kept, e(aten.mul.Tensor, batch, scale * momentum))
            now[buffer] = as_type(new, buffer.meta["val"].dtype)
    else:
        mean, variance = (wide(now.get(buffer, buffer)) for buffer in (running_mean, running_var))
        centred = e(aten.sub.Tensor, x, mean)
    out = e(aten.mul.Tensor, centred, e(aten.rsqrt.default, e(aten.add.Tensor, variance, eps)))
    if weight is not None:
        out = e(aten.mul.Tensor, out, wide(weight))
    return as_type(e(aten.add.Tensor, out, wide(bias)) if bias is not None else out, value.dtype)


def refuse_given_statistics(mutations: dict[str, Node], buffer_names: dict[str, str]) -> None:
    """Raises CaptureError for running statistics that are not buffers: their new values would be lost."""
    if inputs := [name for name in mutations if name not in buffer_names]:
        raise CaptureError("a norm updates running statistics that are no buffers, but inputs or computed: "
                           f"{inputs}\n  Hold them as buffers (register_buffer), or norm by them (training=False).")
