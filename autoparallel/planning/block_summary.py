"""Layouts by block; equal blocks with equal strategies share an entry."""

from __future__ import annotations

from collections.abc import Sequence

from autoparallel.capture import Node, find_blocks
from autoparallel.layout import layout_str
from autoparallel.plans import BlockLayouts
from autoparallel.pricing.record import COUNTED
from autoparallel.strategies.space import Strategy, StrategySpace

#: An (op, strategy, output layout) line per op.
Lines = tuple[tuple[str, str, str], ...]
#: Op name prefixes left out of the summary: views.
_OMITTED = ("aten.reshape.", "aten.permute.", "aten.expand.", "aten.slice.", "aten.select.", "aten.detach.")


def block_layouts(space: StrategySpace, strategies: Sequence[Strategy]) -> tuple[BlockLayouts, ...]:
    """One entry per distinct block and its strategies, in execution order; ops outside blocks come first."""
    blocks, nodes = find_blocks(space.graph), space.graph.nodes
    decision_of = {decision.node: decision.index for decision in space.decisions if decision.kind == "op"}
    inside = {index for block in blocks for index in block.nodes}
    outside = [index for index in decision_of if index not in inside and _is_told(nodes[index])]
    found: dict[tuple[Lines, tuple[float, ...]], list[str]] = {}
    listed: dict[int, list[int]] = {}  # by template, positions of the listed ops in a block
    known: dict[object, tuple[Lines, tuple[float, ...]]] = {}

    def lines(ops: Sequence[int], path: str) -> tuple[Lines, tuple[float, ...]]:
        both = [(space.strategy_sets[decision_of[index]], strategies[decision_of[index]]) for index in ops]
        told = tuple((_name(nodes[index], path), "·".join(s.names(strategy)), layout_str(s.output_layout(strategy)))
                     for index, (s, strategy) in zip(ops, both, strict=True))
        return told, tuple(s.rule.flops if s.rule is not None and s.rule.op_class in COUNTED else 0.0 for s, _ in both)

    if outside:
        found[lines(outside, "")] = ["outside blocks"]
    for block in blocks:
        if block.template not in listed:
            listed[block.template] = [place for place, index in enumerate(block.nodes) if _is_told(nodes[index])]
        ops = [block.nodes[place] for place in listed[block.template]]
        seen = (block.template, tuple([strategies[decision_of[index]] for index in ops]),
                tuple([nodes[index].module_path[len(block.path):] for index in ops]))
        if seen not in known:
            known[seen] = lines(ops, block.path)
        found.setdefault(known[seen], []).append(block.path)
    return tuple(BlockLayouts(tuple(paths), *told) for told, paths in found.items() if told[0])


def _is_told(node: Node) -> bool:
    return any(m.requires_grad for m in node.outputs) and not node.op_name.startswith(_OMITTED)


def _name(node: Node, path: str) -> str:
    """Module path within the block, and op name."""
    where = node.module_path.removeprefix(path).lstrip(".")
    return f"{where} {node.op_name.removeprefix('aten.').rsplit('.', 1)[0]}".strip()
