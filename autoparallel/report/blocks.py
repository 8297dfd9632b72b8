"""Layouts block by block: equal blocks with equal strategies are told once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from autoparallel.capture import Node, find_blocks
from autoparallel.layout import layout_str
from autoparallel.plans import BlockLayouts
from autoparallel.rules.space import Label, StrategySet, StrategySpace

#: Ops worth a line: those that cost something or join the others.
_DULL = ("aten.reshape.", "aten.permute.", "aten.expand.", "aten.slice.", "aten.select.", "aten.detach.")


def block_layouts(space: StrategySpace, labels: Sequence[Label]) -> tuple[BlockLayouts, ...]:
    """One entry per distinct block and set of strategies, in execution order; everything outside blocks comes first."""
    blocks = find_blocks(space.graph)
    inside = {index for block in blocks for index in block.nodes}
    outside = [n.index for n in space.graph.of_kind("op") if n.index not in inside]
    found: dict[tuple[tuple[str, str, str], ...], list[str]] = {}

    @cache
    def told(strategies: StrategySet, label: Label) -> tuple[str, str]:
        return "·".join(strategies.names(label)), layout_str(strategies.output_layout(label))

    def lines(nodes: Sequence[int], path: str) -> tuple[tuple[str, str, str], ...]:
        sites = [(index, space.site_named[space.graph.nodes[index].name]) for index in nodes
                 if _is_told(space.graph.nodes[index])]
        return tuple((_name(space.graph.nodes[index], path), *told(space.strategies[site], labels[site]))
                     for index, site in sites)

    if outside:
        found[lines(outside, "")] = ["outside blocks"]
    for block in blocks:
        found.setdefault(lines(block.nodes, block.path), []).append(block.path)
    return tuple(BlockLayouts(tuple(paths), lines) for lines, paths in found.items() if lines)


def _is_told(node: Node) -> bool:
    return any(m.requires_grad for m in node.outputs) and not node.op_name.startswith(_DULL)


def _name(node: Node, path: str) -> str:
    """Where in its block an op is, and what it is."""
    where = node.module_path.removeprefix(path).lstrip(".")
    return f"{where} {node.op_name.removeprefix('aten.').rsplit('.', 1)[0]}".strip()
