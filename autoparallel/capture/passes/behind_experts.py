"""Independent branches of a mixture of experts, such as shared experts, moved to where its rows are being sent.

Models add shared experts to the routed ones, computed before or after them. Rows travel to the ranks of their experts
and back; whatever the mixture does not need, and what does not need it, can be computed meanwhile
(`schedule.expert_windows`). Such ops of its block are put right behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.fx import Graph

from autoparallel.capture.blocks import block_path
from autoparallel.capture.passes.editing import Node, module_path
from autoparallel.ops.routed_experts import routed_experts


def branches_behind_experts(graph: Graph) -> None:
    """Move, in place, the ops of other branches that are joined with a mixture's result right behind the mixture."""
    for mixture in [node for node in graph.nodes if node.target is routed_experts]:
        nodes = list(graph.nodes)
        needed, needs = _sources(mixture), _readers(mixture, nodes)
        scope = _scope(mixture)
        members = [node for node in nodes if node.op == "call_function" and _scope(node) == scope]
        branch = _branch(members, needed, needs)
        at = nodes.index(mixture)
        place = {node: number for number, node in enumerate(nodes)}
        moved = _can_move(branch, place, at)
        for node in sorted(moved, key=place.__getitem__, reverse=True):
            mixture.append(node)


def _scope(node: Node) -> str:
    """The block of an op; without blocks its parent module."""
    path = module_path(node)
    return block_path(path) or path.rpartition(".")[0]


def _sources(node: Node) -> set[Node]:
    """All nodes that a node depends on."""
    found, left = set[Node](), [node]
    while left:
        for source in left.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                left.append(source)
    return found


def _readers(first: Node, nodes: Sequence[Node]) -> set[Node]:
    """A node and all nodes that depend on it."""
    found = {first}
    for node in nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _branch(members: Sequence[Node], needed: Collection[Node], needs: Collection[Node]) -> set[Node]:
    """The ops that ``needs`` joins with the mixture's result, and those that they read, which the mixture does not."""
    inside, found = set(members), set[Node]()
    left = [node for node in members if node in needs]
    while left:
        for source in left.pop().all_input_nodes:
            if source in inside and source not in found and source not in needed and source not in needs:
                found.add(source)
                left.append(source)
    return found


def _can_move(branch: Collection[Node], place: dict[Node, int], at: int) -> set[Node]:
    """The ops of a branch whose operands are all there at place ``at``, and that nothing else needs before it."""
    found = set[Node]()
    for node in sorted((node for node in branch if place[node] < at), key=place.__getitem__, reverse=True):
        if all(place[user] > at or user in found for user in node.users):
            found.add(node)
    for node in sorted((node for node in branch if place[node] > at), key=place.__getitem__):
        if all(place[source] < at or source in found for source in node.all_input_nodes):
            found.add(node)
    return found


__all__ = ["branches_behind_experts"]
