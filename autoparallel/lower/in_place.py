"""Sums over ranks of matrix products and convolutions, in the memory of the products."""

from __future__ import annotations

from torch.fx import GraphModule
from torch.fx import Node as FxNode

from autoparallel.kernels.collectives import all_reduce, all_reduce_in_place
from autoparallel.schedule.step_config import Hybrid

#: Classes of ops whose backward does not read their result.
_LET_GO = frozenset({"matmul", "conv"})


def sum_in_place(module: GraphModule, hybrid: Hybrid) -> GraphModule:
    """The same program, changed here: an all-reduce is in place where it alone reads what a product makes. Not in
    recomputed blocks, which may keep both."""
    changed = False
    for node in module.graph.nodes:
        if _is_sum_of_a_product(node) and not hybrid.recomputed(node.meta.get("block")):
            node.target, changed = all_reduce_in_place, True
    if changed:
        module.recompile()
    return module


def _is_sum_of_a_product(node: FxNode) -> bool:
    if node.target is not all_reduce or node.kwargs:
        return False
    (summand,) = node.all_input_nodes
    if node.meta["global_meta"].num_elements == 1:    # sums of single numbers are merged (`number_sums.py`)
        return False
    return (len(summand.users) == 1 and "step" not in summand.meta and not summand.meta.get("of_parameter")
            and summand.meta.get("op_class") in _LET_GO)


__all__ = ["sum_in_place"]
