"""Bags of embeddings as an op with one result, which says of equally long bags that they are rows:

    weight[v, h], ids[b, l], weights[b, l] -> y[b, h]          sum, mean or maximum over l

Torch flattens such bags, and names where each begins; then nothing but ``h`` could be cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph

from autoparallel.capture.passes.editing import Node, argument, emit, replace
from autoparallel.ops.embedding_bag import MEAN, SUM, embedding_bag

aten = torch.ops.aten
def gather_bags(graph: Graph, mutations: dict[str, Node]) -> None:
    """Write bags so, unless their gradients are scaled, or more of their results is used."""
    for node in list(graph.nodes):
        if node.target not in (aten.embedding_bag.default, aten.embedding_bag.padding_idx):
            continue
        read = [user for user in node.users if user.users]
        if argument(node, "scale_grad_by_freq") or [u.args[1] for u in read] != [0]:
            continue
        with graph.inserting_before(node):
            made = _bags(graph, node)
        replace(read[0], made, mutations)
        for user in list(node.users):
            graph.erase_node(user)
        graph.erase_node(node)


def _bags(graph: Graph, node: Node) -> Node:
    weight, ids, offsets, weights, mode, last = (
        argument(node, name) for name in ("weight", "indices", "offsets", "per_sample_weights", "mode",
                                          "include_last_offset"))
    padding_idx = argument(node, "padding_idx") if node.target is aten.embedding_bag.padding_idx else None
    if padding_idx is not None:
        padding_idx %= weight.meta["val"].shape[0]
    sparse = argument(node, "sparse")
    length = _length_of_all(offsets, ids.meta["val"].numel(), last)
    if length is None:
        return emit(graph, node, embedding_bag, weight, ids, weights, offsets, mode, last, padding_idx, sparse)
    shape = [ids.meta["val"].numel() // length, length]
    ids, weights = (t if t is None else emit(graph, node, aten.reshape.default, t, shape) for t in (ids, weights))
    mean = mode == MEAN and padding_idx is None
    made = emit(graph, node, embedding_bag, weight, ids, weights, None, SUM if mean else mode, False, padding_idx,
                sparse)
    return emit(graph, node, aten.mul.Tensor, made, 1.0 / length) if mean else made


def _length_of_all(offsets: Any, count: int, last: bool) -> int | None:
    """The length of all bags, where they begin at 0, n, 2 n, ..."""
    if offsets.target is not aten.arange.start_step or last:
        return None
    start, end, step = (*offsets.args, 1)[:3]
    return step if start == 0 and end == count and step > 0 and count % step == 0 else None


__all__ = ["gather_bags"]
