"""Layouts block by block: equal blocks with equal strategies are told once."""

from __future__ import annotations

from collections.abc import Sequence

from autoparallel.capture import find_blocks
from autoparallel.layout import layout_str
from autoparallel.plans import BlockLayouts
from autoparallel.rules.space import Label, StrategySpace

#: Ops worth a line: those that cost something or join the others.
_DULL = ("aten.reshape.", "aten.permute.", "aten.expand.", "aten.slice.", "aten.select.", "aten.detach.")


def block_layouts(space: StrategySpace, labels: Sequence[Label]) -> tuple[BlockLayouts, ...]:
    """One entry per distinct block and set of strategies, in execution order; everything outside blocks comes first."""
    blocks = find_blocks(space.graph)
    inside = {index for block in blocks for index in block.nodes}
    outside = [n.index for n in space.graph.of_kind("op") if n.index not in inside]
    found: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
    if outside:
        found[_lines(space, labels, outside, "")] = ["outside blocks"]
    for block in blocks:
        found.setdefault(_lines(space, labels, block.nodes, block.path), []).append(block.path)
    return tuple(BlockLayouts(tuple(paths), lines) for lines, paths in found.items() if lines)


def _lines(
    space: StrategySpace, labels: Sequence[Label], nodes: Sequence[int], path: str
) -> tuple[tuple[str, str, str], ...]:
    lines = []
    for index in nodes:
        node = space.graph.nodes[index]
        grad = any(m.requires_grad for m in node.outputs)
        if not grad or node.op_name.startswith(_DULL):
            continue
        site = space.site_named[node.name]
        strategies, label = space.strategies[site], labels[site]
        where = node.module_path.removeprefix(path).lstrip(".")
        op = node.op_name.removeprefix("aten.").rsplit(".", 1)[0]
        lines.append((f"{where} {op}".strip(), "·".join(strategies.names(label)),
                      layout_str(strategies.output_layout(label))))
    return tuple(lines)
