"""Ops that make sparse gradients, which no shard or collective of ours takes."""

from __future__ import annotations

from autoparallel.capture.passes.editing import Node, argument, module_path, source_line
from autoparallel.errors import CaptureError

ARGUMENTS = ("sparse", "sparse_grad")


def refuse_sparse_gradients(node: Node) -> None:
    """Raises CaptureError for an op with an argument that makes the gradient of its first tensor sparse."""
    declared = {a.name for a in node.target._schema.arguments}
    for name in ARGUMENTS:
        if name in declared and argument(node, name):
            path = module_path(node)
            layer = f" (of torch's layers: model.{path}.sparse = False)" if path and name == "sparse" else ""
            raise CaptureError(
                f"{node.target} is called with {name}=True, which makes a sparse gradient{source_line(node)}\n"
                "  Gradients are dense here, as parameters are.\n"
                f"  Write {name}=False{layer}, and an optimizer of dense "
                "gradients (SparseAdam takes sparse ones only: Adam, Adagrad), or freeze what it reads; or put the "
                "table on parameter servers, whose gradients are sparse (autoparallel.serve_parameters).")


__all__ = ["refuse_sparse_gradients"]
