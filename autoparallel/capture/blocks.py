"""Repeated blocks: the layers of a transformer are one block many times.

A block is everything under one index of a module list (``model.layers.3``). Two blocks are equal when their ops, in
order, have the same targets, shapes and arguments; equal blocks share a template.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from autoparallel.capture.graph import Node, OpGraph, Ref, copies


@dataclass(frozen=True)
class Block:
    """Block ``path`` (for example ``model.layers.3``): its op nodes in order, and its template's number."""

    path: str
    nodes: tuple[int, ...]
    template: int


def block_path(module_path: str) -> str | None:
    """The outermost indexed module of a path: ``model.layers.3`` for ``model.layers.3.mlp.up_proj``."""
    match = re.match(r"(.*?\.\d+)(\.|$)", "." + module_path)
    return match[1][1:] if match else None


def find_blocks(graph: OpGraph) -> tuple[Block, ...]:
    """All blocks in execution order; a model without indexed modules has none."""
    members: dict[str, list[int]] = {}
    for node in graph.of_kind("op"):
        if path := block_path(node.module_path):
            members.setdefault(path, []).append(node.index)
    templates: dict[str, int] = {}
    blocks = []
    for path, nodes in members.items():
        key = _signature(graph, nodes)
        blocks.append(Block(path, tuple(nodes), templates.setdefault(key, len(templates))))
    return tuple(blocks)


def equal_blocks(graph: OpGraph) -> list[list[Block]]:
    """The blocks by template, in the order of each template's first."""
    found: dict[int, list[Block]] = {}
    for block in find_blocks(graph):
        found.setdefault(block.template, []).append(block)
    return list(found.values())


def _signature(graph: OpGraph, members: list[int]) -> str:
    place = {index: i for i, index in enumerate(members)}
    digest = hashlib.sha256()
    for index in members:
        node = graph.nodes[index]
        inner = [place.get(ref.node, -1) for ref in node.inputs]
        digest.update(f"{op_signature(graph, node)}{inner}".encode())
    return digest.hexdigest()


def op_signature(graph: OpGraph, node: Node) -> tuple[object, ...]:
    """Equal for two ops exactly when rules and prices cannot tell them apart."""
    return (
        node.op_name,
        _without_refs(node.args),
        _without_refs(dict(node.kwargs)),
        tuple(graph.meta(ref) for ref in node.inputs),
        node.outputs,
        copies(graph, node),
    )


def _without_refs(value: object) -> object:
    """Arguments as a hashable value with every Ref replaced by a mark."""
    if isinstance(value, Ref):
        return "ref"
    if isinstance(value, (list, tuple)):
        return tuple(_without_refs(v) for v in value)
    if isinstance(value, Mapping):
        return tuple(sorted((k, _without_refs(v)) for k, v in value.items()))
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
