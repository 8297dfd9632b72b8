"""Sparse gradients, which have the rows of a table that were looked up (``nn.Embedding(..., sparse=True)``); sparse
values, which are refused."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph

from autoparallel.capture.graph import Node, OpGraph
from autoparallel.capture.passes.editing import source_line
from autoparallel.errors import CaptureError
from autoparallel.ops.embedding_bag import LOOKUPS

ARGUMENTS = ("sparse", "sparse_grad")


def refuse_sparse_values(graph: Graph, paths: Mapping[str, str]) -> None:
    """Raises CaptureError for a value of a traced model that is no strided tensor. ``paths``: names of parameters and
    buffers by those of their placeholders."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            name, kind = paths.get(node.name, node.name), str(value.layout).removeprefix("torch.")
            reader = node if node.op == "call_function" else next(iter(node.users), node)
            raise CaptureError(f"{name} is a {kind} tensor {list(value.shape)}, and programs have dense ones"
                               f"{source_line(reader)}\n  Keep it dense (x.to_dense()), or keep its indices and values "
                               "as two tensors: a sparse matrix times y is torch.zeros(rows, columns of y).index_add("
                               "0, row, values[:, None] * y[column]).")


def sparse_tables(graph: OpGraph) -> dict[str, float]:
    """The trained tables whose gradients are sparse, by name: the share of their rows that a call looks up at most."""
    found: dict[str, float] = {}
    for node in graph:
        if _argument(node) == "sparse" and node.target in LOOKUPS:
            table, ids = graph.nodes[node.inputs[0].node], graph.meta(node.inputs[1])
            if table.outputs[0].requires_grad:
                share = found.get(table.path, 0.0) + ids.num_elements / max(1, table.outputs[0].shape[0])
                found[table.path] = min(1.0, share)
    return found


def check_sparse_gradients(graph: OpGraph) -> None:
    """Raises CaptureError for an op that makes the gradient of its first tensor sparse, unless it looks up rows of a
    parameter that only such ops read."""
    for node in graph:
        if node.no_grad or (name := _argument(node)) is None or not graph.meta(node.inputs[0]).requires_grad:
            continue
        if node.target not in LOOKUPS or _true(node, "scale_grad_by_freq"):
            _refuse(node, name, "Gradients are sparse here of nn.Embedding, nn.EmbeddingBag and their functions alone, "
                                "without scale_grad_by_freq.")
        table = graph.nodes[node.inputs[0].node]
        if table.kind != "parameter":
            _refuse(node, name, f"Its table is no parameter, but computed by {table}.")
        if other := next((one for one in graph if any(
                ref.node == table.index and (at or one.target not in LOOKUPS or _argument(one) is None)
                for at, ref in enumerate(one.inputs))), None):
            _refuse(node, name, f"{other.source or other} reads {table.path} too, and its gradient is dense.")


def _argument(node: Node) -> str | None:
    """The argument that makes an op's gradient sparse."""
    return next((name for name in ARGUMENTS if _true(node, name)), None) if node.kind == "op" else None


def _true(node: Node, name: str) -> bool:
    for at, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return bool(node.kwargs[name] if name in node.kwargs else at < len(node.args) and node.args[at])
    return False


def _refuse(node: Node, name: str, why: str) -> None:
    layer = f" (of torch's layers: model.{node.module_path}.sparse = False)" \
        if node.module_path and name == "sparse" else ""
    where = "".join(f"\n  {word} {place}" for word, place in (("in", node.module_path), ("at", node.source)) if place)
    raise CaptureError(f"{node.op_name} is called with {name}=True, which makes a sparse gradient{where}\n"
                       f"  {why}\n"
                       f"  Write {name}=False{layer}, and an optimizer of dense gradients (SparseAdam takes sparse "
                       "ones only: Adam, Adagrad), or freeze what it reads.")


__all__ = ["check_sparse_gradients", "sparse_tables"]
