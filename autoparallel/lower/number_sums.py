"""Sums over ranks of single numbers, such as a loss and its count, as one all-reduce where they follow each other.

A message of one number costs what its threads take to wake up, on each rank. Plans are priced with each sum by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode

from autoparallel.kernels.collectives import all_reduce, all_reduce_numbers, item


def sum_numbers_together(module: GraphModule) -> GraphModule:
    """The same program with one all-reduce for sums of numbers over one axis that do not need each other. Only numbers
    are computed later for it, and the order of all other communication stays."""
    if sum(map(_is_sum, module.graph.nodes)) < 2:
        return module
    graph, done = Graph(), set[FxNode]()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in list(graph.nodes):
        if node not in done and _is_sum(node):
            members, later = _together(node)
            done.update(members)
            if len(members) > 1:
                _merge(graph, members, later)
    graph.lint()
    return GraphModule(module, graph, class_name=type(module).__name__)


def _is_sum(node: FxNode) -> bool:
    """Whether a node all-reduces a tensor of one element. Its global shape decides, which is the same on all ranks, so
    that all ranks merge the same sums."""
    return (node.target is all_reduce and not node.kwargs and not node.meta["of_parameter"]
            and node.meta["global_meta"].num_elements == 1)


def _is_of_numbers(node: FxNode) -> bool:
    """Whether a node computes one number from others, or sums one."""
    value = node.meta.get("val")
    return _is_sum(node) or (isinstance(node.target, torch._ops.OpOverload) and value is not None
                             and value.numel() == 1)


def _kind(node: FxNode) -> tuple[Any, ...]:
    return node.args[1:], node.meta["val"].dtype, node.meta.get("block")


def _together(first: FxNode) -> tuple[list[FxNode], list[FxNode]]:
    """The sums that can be merged with the first one, and the nodes between them that read one of these sums."""
    members, later, between = [first], list[FxNode](), list[FxNode]()
    for node in _behind(first):
        if any(value in members or value in later or value in between for value in node.all_input_nodes):
            if not _is_of_numbers(node):
                break
            between.append(node)
        elif _is_sum(node) and _kind(node) == _kind(first):
            members.append(node)
            later += between
            between.clear()
    return members, later


def _behind(node: FxNode) -> Iterator[FxNode]:
    while node.next.op != "output":
        node = node.next
        yield node


def _merge(graph: Graph, members: list[FxNode], later: list[FxNode]) -> None:
    last = members[-1]
    with graph.inserting_after(last):
        made = graph.call_function(all_reduce_numbers, (*last.args[1:], *(node.args[0] for node in members)))
    made.meta = {key: last.meta[key] for key in ("decision", "block") if key in last.meta}
    after = made
    for number, old in enumerate(members):
        with graph.inserting_after(after):
            after = graph.call_function(item, (made, number))
        after.meta = {key: value for key, value in old.meta.items() if key != "step"}
        old.replace_all_uses_with(after)
        graph.erase_node(old)
    for node in later:
        after.append(node)
        after = node


__all__ = ["sum_numbers_together"]
