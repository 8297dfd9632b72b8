"""Views that compiled parts leave to the program around them.

AOTAutograd makes a result that is a view of an input anew from the input, outside of the compiled graph. Where a
redistribution step lies between the two, whose forward is a view (a gradient's all-reduce, a slice), its backward would
be dropped. It keeps that of a step of an input whose own result the part returns, and that of views of a step of what
the part makes, but not that of such a step itself (torch 2.13, tests/test_compiled_views.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch
from torch.fx import Graph
from torch.fx import Node as FxNode

from autoparallel.kernels.collectives import item, reduce_gradient, share_gradient, take_shard

#: Steps whose forward may give a view of its operand.
_STEPS = frozenset({reduce_gradient, share_gradient, take_shard})


def views_left_out(graph: Graph, part_of: Callable[[FxNode], object]) -> frozenset[FxNode]:
    """The views of a step of a graph's input, and the steps of what a graph makes, that are read outside of it. Each
    contiguous run of nodes of one part is a graph (`lower.recompute_pass.in_parts`)."""
    found = set[FxNode]()

    def part(node: FxNode) -> object:
        return None if node in found else part_of(node)

    while True:    # a node that is left out ends a run
        runs = _runs(graph, part)
        if not (more := {node for node in runs if _is_left_out(node, runs)}):
            return frozenset(found)
        found |= more


def _runs(graph: Graph, part_of: Callable[[FxNode], object]) -> dict[FxNode, int]:
    """By node of a part, the number of its contiguous run."""
    runs = itertools.groupby(graph.nodes, lambda node: part_of(node) if node.op == "call_function" else None)
    return {node: number for number, (part, run) in enumerate(runs) if part is not None for node in run}


def _is_left_out(node: FxNode, runs: Mapping[FxNode, int]) -> bool:
    if all(runs.get(user) == runs[node] for user in node.users):
        return False
    passed_on, stepped = _passed_on(node, runs)
    return (_is_view(node) and passed_on and stepped) or (node.target in _STEPS and not passed_on)


def _is_view(node: FxNode) -> bool:
    """Whether an op's result, or one of its results, may share its first operand's memory, by its schema."""
    if node.target is item:
        return True
    schema = node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None
    return schema is not None and any(made.alias_info is not None for made in schema.returns)


def _passed_on(node: FxNode, runs: Mapping[FxNode, int]) -> tuple[bool, bool]:
    """Whether only views and steps lie between what a graph gets and the node, and whether a step is among them."""
    stepped, run = False, runs[node]
    while runs.get(node) == run:
        if not (_is_view(node) or node.target in _STEPS):
            return False, stepped
        stepped |= node.target in _STEPS
        node = node.all_input_nodes[0]
    return True, stepped


__all__ = ["views_left_out"]
