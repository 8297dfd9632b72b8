"""Ops of repeated blocks in place of the calls that were not traced (`repeated_blocks.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import Graph
from torch.fx.node import map_arg

from autoparallel.capture.passes.editing import Node, use_results
from autoparallel.capture.passes.functionalise import writes, written
from autoparallel.capture.tracing.repeated_blocks import (
    Call,
    Calls,
    UnlikeError,
    appearance,
    block_begins,
    block_ends,
    repeated_block,
)


def unfold(graph: Graph, calls: Calls, values: Mapping[str, str]) -> None:
    """Put the ops of its model in place of each repeated block, and take the marks away.

    ``values``: the path of each parameter and buffer by its placeholder's name. Raises UnlikeError, with the graph half
    done, where one block's ops are not known to be the other's.
    """
    if calls.looked_at is not None:
        raise UnlikeError(f"{calls.looked_at} is looked at")
    marks: dict[Any, dict[Call, Node]] = {block_begins: {}, block_ends: {}, repeated_block: {}}
    for node in graph.nodes:
        if node.target in marks:
            marks[node.target][calls.named[node.args[0]]] = node
    bodies = _bodies(graph, marks[block_begins], marks[block_ends], values)
    repeated = {call.model for call in marks[repeated_block]}
    for first, second in (equivalent for equivalent in calls.equivalent.values() if equivalent[0] in repeated):
        if bodies[first].form() != bodies[second].form():
            raise UnlikeError(f"{second.block.path} is traced otherwise than {first.block.path}")
    _refuse_writes(graph, [mark for kind in marks.values() for mark in kind.values()],
                   {node for body in bodies.values() for node in body.nodes})
    places = {path: node for node in graph.nodes if (path := values.get(node.name))}
    for call, stub in marks[repeated_block].items():
        assert call.model is not None
        bodies[call.model].copy(graph, stub, call.block.path, places)
    for kind in (block_ends, block_begins):
        for node in marks[kind].values():
            use_results(node, node.args[1])


def _bodies(graph: Graph, begins: Mapping[Call, Node], ends: Mapping[Call, Node], values: Mapping[str, str]
            ) -> dict[Call, _Body]:
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    return {call: _Body(call.block.path, begin, ends[call], nodes[place[begin] + 1:place[ends[call]]], values)
            for call, begin in begins.items()}


def _refuse_writes(graph: Graph, marks: list[Node], inside: set[Node]) -> None:
    """Which values share memory is read off the trace, and a copy reads and gives other memory than its model: blocks
    may write only to what they make and keep."""
    crossing = {_memory(node) for mark in marks for node in (*mark.args[1], *mark.users)}
    held = {_memory(node) for node in graph.nodes if node.op == "placeholder"}
    for node in graph.nodes:
        if not writes(node) or _detaches_nothing(node):
            continue
        if _memory(written(node)) in (crossing | held if node in inside else crossing):
            raise UnlikeError(f"{node.name} writes in place to what a block is given, holds or gives")


def _detaches_nothing(node: Node) -> bool:
    """Whether a node is the ``detach_`` of a tensor without gradient, as of each that is made of Python's numbers."""
    return node.target is torch.ops.aten.detach_.default and not written(node).meta["val"].requires_grad


class _Body:
    """The ops of one call of a block, and what they read: the call's tensors, the block's own, one another."""

    def __init__(self, path: str, begin: Node, end: Node, inside: list[Node], values: Mapping[str, str]) -> None:
        self.path, self.end, self.values = path, end, values
        self.given = {user: user.args[1] for user in begin.users}
        self.nodes = [n for n in inside if n not in self.given and (n.users or n.op != "get_attr")]
        self.number = {node: i for i, node in enumerate(self.nodes)}

    def read(self, node: Node) -> tuple[str, Any]:
        if node in self.number:
            return "op", self.number[node]
        if node in self.given:
            return "given", self.given[node]
        path = self.values.get(node.name)
        if path is None and node.op == "placeholder" and (empty := _empty(node)) is not None:
            return "empty", empty
        if path is None or not path.startswith(f"{self.path}."):
            raise UnlikeError(f"{self.path} reads {node.name}, which it is not given")
        return "own", path.removeprefix(f"{self.path}.")

    def form(self) -> list[str]:
        """Equal for bodies that compute the same. Raises UnlikeError if ops outside read values inside."""
        for node in self.nodes:
            for user in node.users:
                if user not in self.number and user is not self.end:
                    raise UnlikeError(f"{user.name} reads {node.name} of {self.path}")
        forms = [repr((node.op, str(node.target), map_arg((node.args, node.kwargs), self.read), _looks_like(node)))
                 for node in self.nodes]
        return [*forms, repr(map_arg(self.end.args[1], self.read))]

    def copy(self, graph: Graph, stub: Node, path: str, places: Mapping[str, Node]) -> None:
        made: list[Node] = []

        def value(node: Node) -> Node:
            kind, where = self.read(node)
            if kind == "empty":
                return node    # one empty tensor is as good as another
            if kind == "own":
                return places[f"{path}.{where}"]
            return made[where] if kind == "op" else stub.args[1][where]

        with graph.inserting_before(stub):
            for node in self.nodes:
                made.append(graph.node_copy(node, value))
                made[-1].meta["nn_module_stack"] = self._stack(node, path)
        use_results(stub, [value(node) for node in self.end.args[1]])

    def _stack(self, node: Node, path: str) -> dict[str, tuple[str, Any]]:
        held = {}
        for key, (name, kind) in node.meta.get("nn_module_stack", {}).items():
            inside = name == self.path or name.startswith(f"{self.path}.")
            held[key] = (path + name.removeprefix(self.path) if inside else name, kind)
        return held


def _looks_like(node: Node) -> object:
    values = [appearance(x) if isinstance(x, torch.Tensor) else x for x in pytree.tree_leaves(node.meta.get("val"))]
    return values, node.meta.get("no_grad"), node.meta.get("autocast")


def _empty(node: Node) -> object | None:
    """The appearance of a value without elements."""
    value = node.meta.get("val")
    return appearance(value) if isinstance(value, torch.Tensor) and not value.numel() else None


def _memory(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


__all__ = ["unfold"]
