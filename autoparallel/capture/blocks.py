"""Repeated blocks: the layers of a transformer are one block many times.

A block is everything under one index of a module list (``model.layers.3``). Two blocks are equal when their ops, in
order, have the same targets, shapes and arguments; equal blocks share a template.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from autoparallel.capture.graph import OpGraph


@dataclass(frozen=True)
class Block:
    """Block ``path`` (for example ``model.layers.3``): its op nodes in order, and its template's number."""

    path: str
    nodes: tuple[int, ...]
    template: int


@lru_cache(maxsize=4096)
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
    templates: dict[object, int] = {}
    blocks = []
    for path, nodes in members.items():
        blocks.append(Block(path, tuple(nodes), templates.setdefault(form_of(graph, nodes), len(templates))))
    return tuple(blocks)


def form_of(graph: OpGraph, nodes: Sequence[int]) -> tuple[object, ...]:
    """What is equal for equal groups of ops: what each computes, and of which others of the group."""
    place = {index: i for i, index in enumerate(nodes)}
    return tuple((graph.op_kinds[index], *(place.get(ref.node, -1) for ref in graph.nodes[index].inputs))
                 for index in nodes)


def equal_blocks(graph: OpGraph) -> list[list[Block]]:
    """The blocks by template, in the order of each template's first."""
    found: dict[int, list[Block]] = {}
    for block in find_blocks(graph):
        found.setdefault(block.template, []).append(block)
    return list(found.values())
