"""Views that compiled parts leave to the program around them.

AOTAutograd makes a result that is a view of an input anew from the input, outside of the compiled graph. Where a
redistribution step lies between the two, whose forward is a view (a gradient's all-reduce, a slice), its backward would
be dropped. It keeps that of a step of an input whose own result the part returns, and that of views of a step of what
the part makes, but not that of such a step itself (torch 2.13, tests/test_compiled_views.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Graph
from torch.fx import Node as FxNode

from autoparallel.kernels.collectives import item, reduce_gradient, share_gradient, take_shard

#: Steps whose forward may give a view of its operand.
_STEPS = frozenset({reduce_gradient, share_gradient, take_shard})


def views_left_out(graph: Graph, part_of: Callable[[FxNode], object]) -> frozenset[FxNode]:
    """The views of a step of a part's input, and the steps of what a part makes, that are read outside of the part."""
    found = set[FxNode]()
    for node in reversed(graph.nodes):
        part = part_of(node)
        read_outside = any(user in found or user.op == "output" or part_of(user) != part for user in node.users)
        if part is None or not read_outside:
            continue
        passed_on, stepped = _passed_on(node, part, part_of)
        if (_is_view(node) and passed_on and stepped) or (node.target in _STEPS and not passed_on):
            found.add(node)
    return frozenset(found)


def _is_view(node: FxNode) -> bool:
    """Whether an op's result, or one of its results, may share its first operand's memory, by its schema."""
    if node.target is item:
        return True
    schema = node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None
    return schema is not None and any(made.alias_info is not None for made in schema.returns)


def _passed_on(node: FxNode, part: object, part_of: Callable[[FxNode], object]) -> tuple[bool, bool]:
    """Whether only views and steps lie between what the part gets and the node, and whether a step is among them."""
    stepped = False
    while node.op == "call_function" and part_of(node) == part:
        if not (_is_view(node) or node.target in _STEPS):
            return False, stepped
        stepped |= node.target in _STEPS
        node = node.all_input_nodes[0]
    return True, stepped


__all__ = ["views_left_out"]
