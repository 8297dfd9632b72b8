"""Sums over ranks of single numbers as one all-reduce, as `schedule.number_sums` has it."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode

from autoparallel.kernels.collectives import all_reduce, all_reduce_numbers, item
from autoparallel.schedule.number_sums import Item, summed_together


def sum_numbers_together(module: GraphModule) -> GraphModule:
    """The same program with one all-reduce for sums of numbers over one axis that do not need each other. Only numbers
    are computed later for it, and the order of all other communication stays."""
    if sum(map(_is_sum, module.graph.nodes)) < 2:
        return module
    *nodes, output = module.graph.nodes
    numbers = {node: number for number, node in enumerate(nodes)}
    items = [Item([numbers[value] for value in node.all_input_nodes], _kind(node), _is_of_numbers(node))
             for node in nodes]
    graph, made = Graph(), dict[FxNode, FxNode]()
    for group in summed_together(items):
        if len(group) > 1:
            _merge(graph, [nodes[number] for number in group], made)
        else:
            made[nodes[group[0]]] = graph.node_copy(nodes[group[0]], made.__getitem__)
    graph.node_copy(output, made.__getitem__)
    graph.lint()
    return GraphModule(module, graph, class_name=type(module).__name__)


def _is_sum(node: FxNode) -> bool:
    """Whether a node all-reduces a tensor of one element. Its global shape decides, which is the same on all ranks, so
    that all ranks merge the same sums."""
    return (node.target is all_reduce and not node.kwargs and not node.meta["of_parameter"]
            and node.meta["global_meta"].num_elements == 1)


def _is_of_numbers(node: FxNode) -> bool:
    """Whether a node computes one number from others, or sums one."""
    meta = node.meta.get("global_meta")
    return _is_sum(node) or (isinstance(node.target, torch._ops.OpOverload) and meta is not None
                             and meta.num_elements == 1)


def _kind(node: FxNode) -> object:
    if not _is_sum(node):
        return None
    return node.args[1:], node.meta["global_meta"].dtype, node.meta.get("block")


def _merge(graph: Graph, members: list[FxNode], made: dict[FxNode, FxNode]) -> None:
    last = members[-1]
    values = (made[node.all_input_nodes[0]] for node in members)
    together = graph.call_function(all_reduce_numbers, (*last.args[1:], *values))
    together.meta = {key: last.meta[key] for key in ("decision", "block") if key in last.meta}
    for number, old in enumerate(members):
        made[old] = graph.call_function(item, (together, number))
        made[old].meta = {key: value for key, value in old.meta.items() if key != "step"}


__all__ = ["sum_numbers_together"]
