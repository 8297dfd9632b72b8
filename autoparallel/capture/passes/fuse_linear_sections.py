"""Linear layers whose result is taken apart (a fused query-key-value projection, gate and up in one) as one op.

A shard of the fused dim is no shard of its sections, so nothing after the slices could be cut as it would be if the
layers stood apart. ``autoparallel::linear_sections`` gives the sections themselves, and each can be cut:

    x[*b, k], weight[n, k], bias[n], sizes -> y_0[*b, sizes[0]], y_1[*b, sizes[1]], ...     sum(sizes) = n

Views between the layer and its slices (``view(b, s, 3, h, d).permute(2, 0, 3, 1, 4)``) are made of each section.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass

import torch
from torch.fx import Graph

from autoparallel.capture.passes.editing import Node, emit, replace
from autoparallel.ops.linear_sections import linear_sections

aten = torch.ops.aten

#: Smaller sections are left as slices: they could not be cut over many ranks, and then no other section could.
SMALLEST_SECTION = 8

def gather_sections(graph: Graph, mutations: dict[str, Node]) -> None:
    """Put each linear layer of whose result only slices are used, and the slices, into one op."""
    for node in list(graph.nodes):
        sections = _Sections.of(node) if node.target is aten.linear.default else None
        if sections is not None and not any(view.node in mutations.values() for view in sections.views):
            sections.replace(mutations)


@dataclass(frozen=True)
class _View:
    """A view between the layer and its slices: ``dim`` of its result numbers stretches of ``unit`` features."""

    node: Node
    dim: int
    unit: int

    def of_section(self, graph: Graph, section: Node, features: int) -> Node:
        if self.node.target is aten.permute.default:
            return emit(graph, self.node, aten.permute.default, section, self.node.args[1])
        shape = list(self.node.meta["val"].shape)
        shape[self.dim] = features // self.unit
        return emit(graph, self.node, aten.reshape.default, section, shape)


@dataclass(frozen=True)
class _Sections:
    """A layer, the views of its result, and the slices of those: (first feature, end, slice or select)."""

    layer: Node
    views: tuple[_View, ...]
    slices: tuple[tuple[int, int, Node], ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(layer: Node) -> _Sections | None:
        width = layer.meta["val"].shape[-1]
        views, last = _views(layer)
        dim, unit = (views[-1].dim, views[-1].unit) if views else (layer.meta["val"].dim() - 1, 1)
        slices = [_slice(user, dim, unit) for user in last.users]
        found = tuple(s for s in slices if s is not None)
        graded = {bool(node.meta.get("no_grad")) for node in (layer, *(view.node for view in views), *last.users)}
        if not found or len(found) != len(slices) or len(graded) > 1:
            return None
        ends = sorted({0, width, *(place for start, end, _ in found for place in (start, end))})
        sizes = tuple(b - a for a, b in itertools.pairwise(ends))
        whole = {(a, b) for a, b in itertools.pairwise(ends)}
        if len(sizes) < 2 or min(sizes) < SMALLEST_SECTION or any((a, b) not in whole for a, b, _ in found):
            return None
        return _Sections(layer, tuple(views), found, sizes)

    def replace(self, mutations: dict[str, Node]) -> None:
        graph, starts = self.layer.graph, [0, *itertools.accumulate(self.sizes)]
        x, weight, *bias = self.layer.args
        with graph.inserting_before(self.layer.next):
            made = emit(graph, self.layer, linear_sections, x, weight, bias[0] if bias else None, list(self.sizes))
            parts = {}
            for start in sorted({start for start, _, _ in self.slices}):
                number = starts.index(start)
                part = emit(graph, self.layer, operator.getitem, made, number)
                for view in self.views:
                    part = view.of_section(graph, part, self.sizes[number])
                parts[start] = part
            selected = {node: emit(graph, node, aten.reshape.default, parts[start], list(node.meta["val"].shape))
                        for start, _, node in self.slices if node.target is aten.select.int}
        for start, _, node in self.slices:
            replace(node, selected.get(node, parts[start]), mutations)
        for view in reversed(self.views):
            graph.erase_node(view.node)
        graph.erase_node(self.layer)


def _views(layer: Node) -> tuple[list[_View], Node]:
    """The reshapes and permutes that follow a layer, as long as each is the only user and keeps its features in order
    along one dim or as the first of several; and the last of them."""
    node, dim, unit = layer, layer.meta["val"].dim() - 1, 1
    views: list[_View] = []
    while len(node.users) == 1:
        (user,) = node.users
        source = node.meta["val"].shape
        if user.target is aten.permute.default:
            dim = [d % len(source) for d in user.args[1]].index(dim)
        elif user.target is aten.reshape.default:
            target = user.meta["val"].shape
            place = _first_of(source, dim, target)
            if place is None:
                break
            dim, unit = place, unit * (source[dim] // target[place])
        else:
            break
        node = user
        views.append(_View(node, dim, unit))
    return views, node


def _first_of(source: torch.Size, dim: int, target: torch.Size) -> int | None:
    """The dim of ``target`` that is ``source``'s ``dim`` after a reshape, or the leading one of those it is taken apart
    into."""
    before = math.prod(source[:dim])
    for place, size in enumerate(target):
        if math.prod(target[:place]) == before and size != 1:
            ends = [math.prod(target[place:end]) for end in range(place + 1, len(target) + 1)]
            return place if source[dim] in ends else None
    return None


def _slice(node: Node, dim: int, unit: int) -> tuple[int, int, Node] | None:
    """The features that a slice or select of the last view takes, where it takes a stretch of them."""
    if node.target is aten.slice.Tensor:
        _, of, start, end, step = node.args
        return (start * unit, end * unit, node) if (of, step) == (dim, 1) else None
    if node.target is aten.select.int:
        shape = node.args[0].meta["val"].shape
        of, index = node.args[1] % len(shape), node.args[2] % shape[dim]
        return (index * unit, (index + 1) * unit, node) if of == dim else None
    return None


__all__ = ["gather_sections"]
