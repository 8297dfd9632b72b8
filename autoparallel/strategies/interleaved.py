"""Which tensors may be in interleaved shards: weights and biases of fused projections of equal sections.

A fused projection with an interleaved shard of its weight makes a shard of each section, and sends nothing for it. The
weight may be transposed or cast on its way from the parameter; no other tensor has these layouts, so that programs
without fused projections have the strategies that they would have without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from autoparallel.capture import OpGraph, Ref
from autoparallel.capture.graph import Node
from autoparallel.layout import Layout, Placement, layout_fits, shard
from autoparallel.ops.linear_sections import linear_sections
from autoparallel.rules.registry import find_rule
from autoparallel.rules.rule import AxisStrategy, Rule

aten = torch.ops.aten
Shape = tuple[int, ...]

#: Ops of one tensor that do with each slice along a dim what they do with the others, in any order.
ORDERLESS = frozenset({aten.permute.default, aten.to.dtype, aten.detach.default})


def interleaved_placements(graph: OpGraph, mesh_shape: Sequence[int], stored: Mapping[str, Layout]
                           ) -> Mapping[Shape, tuple[Placement, ...]]:
    """The interleaved placements of which a tensor may have one on some mesh axis, by its shape. ``stored``: layouts of
    parameters that lie on the mesh already."""
    found: dict[Shape, set[Placement]] = {}
    for node in graph.of_kind("parameter"):
        if there := {p for p in stored.get(node.path, ()) if p.is_interleaved}:
            found.setdefault(node.outputs[0].shape, set()).update(there)
    for node in graph.of_kind("op"):
        if node.target is linear_sections:
            for one in find_rule(graph, node)[0].variants:
                for ref, placement in zip(node.inputs, one.inputs, strict=True):
                    if placement.is_interleaved:
                        _follow(graph, ref, placement, mesh_shape, found)
    return {shape: tuple(sorted(placements)) for shape, placements in found.items()}


def _follow(graph: OpGraph, ref: Ref, placement: Placement, mesh_shape: Sequence[int],
            found: dict[Shape, set[Placement]]) -> None:
    """Note the placement of a value and of what it is made of."""
    shape = graph.meta(ref).shape
    if not any(n > 1 and layout_fits(shape, (placement,), (n,)) for n in mesh_shape):
        return
    found.setdefault(shape, set()).add(placement)
    node = graph.nodes[ref.node]
    if node.kind == "op" and node.target in ORDERLESS:
        rule = find_rule(graph, node)[0]
        dim = rule.inputs[0].index(rule.outputs[0][placement.dim])
        _follow(graph, node.inputs[0], shard(dim, placement.parts), mesh_shape, found)


def with_interleaved(node: Node, rule: Rule, possible: Sequence[Sequence[Placement]]) -> list[AxisStrategy]:
    """The op's strategies, also those on interleaved shards. ``possible``: the interleaved placements that each of its
    inputs and results may have."""
    found = [one for one in rule.axis_strategies()
             if all(not p.is_interleaved or p in placements
                    for p, placements in zip((*one.inputs, *one.outputs), possible, strict=True))]
    if node.target not in ORDERLESS:
        return found
    for placement in possible[-1]:
        factor = rule.outputs[0][placement.dim]
        found += [replace(one, name=f"{factor};{placement.parts}", inputs=(shard(one.inputs[0].dim, placement.parts),),
                          outputs=(placement,)) for one in found if factor is not None and one.factor == factor
                  and not one.outputs[0].is_interleaved]
    return found


__all__ = ["interleaved_placements", "with_interleaved"]
