"""Emission: strategy space and a label per site -> one rank's program, a readable torch.fx.GraphModule.

Every op runs on local pieces with local sizes; every link whose layouts differ becomes a chain of redistribution
steps, each one line that names its axis and its placements. Node metadata: ``layout``, ``global_meta``, ``site``,
``val`` (a meta tensor of the local shape), and ``reads`` (of a parameter and the steps that take it to its readers).
Steps also have ``step`` and ``num_bytes`` (of the fullest rank's result: the same on all ranks).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode

from autoparallel.capture import Ref, TensorMeta
from autoparallel.capture.blocks import block_path
from autoparallel.capture.graph import Node, on_device
from autoparallel.kernels.collectives import STEP_FUNCTIONS, item
from autoparallel.kernels.rng import random_op
from autoparallel.kernels.variants import VARIANTS
from autoparallel.layout import Layout, Step, local_box, local_shape, pieces
from autoparallel.layout.shapes import largest_local_shape, piece_of
from autoparallel.ops.arguments import aten, fitted
from autoparallel.ops.routed_experts import routed_experts
from autoparallel.rules.rule import Row
from autoparallel.schedule.stage import Part, Value
from autoparallel.strategies.space import Label, Link, Site, StrategySpace

#: The cheapest steps between two layouts of a tensor.
PathFinder = Callable[[TensorMeta, Layout, Layout], Sequence[Step]]


@dataclass(frozen=True)
class Program:
    """One rank's program (of one part of the model, where that is cut into stages).

    ``module(*placeholders, *received)`` takes local tensors and returns (local outputs, new values of the buffers in
    ``updates``, local values to send). An output that another part makes is None.
    """

    module: GraphModule
    placeholders: tuple[Site, ...]
    placeholder_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout | None, ...]
    updates: tuple[str, ...]
    received: tuple[FxNode, ...] = ()
    sent: tuple[FxNode, ...] = ()


def emit(
    space: StrategySpace,
    labels: Sequence[Label],
    path: PathFinder,
    coordinate: Sequence[int],
    device: torch.device | str = "cpu",
    part: Part | None = None,
) -> Program:
    """Write the program of the rank at ``coordinate`` for one label per site; of one part of the sites if given."""
    part = part or Part(frozenset(range(len(space))))
    return _Emitter(space, labels, path, tuple(coordinate), torch.device(device)).run(part)


def step_sizes(shape: tuple[int, ...], step: Step, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> tuple[
    tuple[int, ...], tuple[int, ...]
]:
    """Lengths of the pieces along the source's and the target's cut dim, for the ranks of this rank's group."""
    found: list[tuple[int, ...]] = []
    for placement, layout in ((step.source, step.before), (step.target, step.after)):
        if not placement.is_shard:
            found.append(())
            continue
        size = shape[placement.dim]
        for other in range(step.axis):
            if layout[other].is_shard and layout[other].dim == placement.dim:
                size = piece_of(size, mesh_shape[other], coordinate[other])[1]
        found.append(pieces(size, mesh_shape[step.axis]))
    return found[0], found[1]


class _Emitter:
    def __init__(self, space: StrategySpace, labels: Sequence[Label], path: PathFinder, coordinate: tuple[int, ...],
                 device: torch.device) -> None:
        self.space, self.labels, self.path = space, labels, path
        self.coordinate, self.device = coordinate, device
        self.graph = Graph()
        self.values: dict[tuple[int, int], FxNode] = {}

    def run(self, part: Part) -> Program:
        sites = [self.space.sites[index] for index in sorted(part.sites)]
        placeholders = [site for site in sites if site.kind in ("parameter", "buffer", "input")]
        layouts = [self._placeholder(site) for site in placeholders]
        received = tuple(self._received(value) for value in part.received)
        results: dict[str, FxNode] = {}
        for site in sites:
            if site.kind == "op":
                self._op(site)
            elif site.kind == "hub":
                self.values[site.index, 0] = self._read(self.space.links_into[site.index][0])
            elif site.kind in ("output", "update"):
                results[site.name] = self._read(self.space.links_into[site.index][0])
        outputs = [
            results.get(f"output:{i}") if isinstance(value, Ref) else value
            for i, value in enumerate(self.space.graph.outputs)
        ]
        updates = tuple(name for name in self.space.graph.mutations if f"update:{name}" in results)
        sent = tuple(self.values[value] for value in part.sent)
        self.graph.output((tuple(outputs), tuple(results[f"update:{name}"] for name in updates), sent))
        self.graph.lint()
        output_layouts = tuple(x.meta["layout"] if isinstance(x, FxNode) else None for x in outputs)
        module = GraphModule({}, self.graph, class_name="ParallelProgram")
        return Program(module, tuple(placeholders), tuple(layouts), output_layouts, updates, received, sent)

    def _received(self, value: Value) -> FxNode:
        site, s = self.space.sites[value[0]], self.space.strategies[value[0]]
        layout = s.output_layout(self.labels[site.index], value[1])
        name = "_".join(["received", *re.findall(r"\w+", site.name), str(value[1])])
        node = self._describe(self.graph.placeholder(name), site, s.output_metas[value[1]], layout)
        self.values[value] = node
        return node

    def _describe(self, node: FxNode, site: Site, meta: TensorMeta, layout: Layout) -> FxNode:
        local = local_shape(meta.shape, layout, self.space.mesh_shape, self.coordinate)
        origin = site.node if site.ref is None else site.ref.node
        path = self.space.graph.nodes[origin].module_path if site.kind in ("op", "hub") else ""
        node.meta.update(layout=layout, global_meta=meta, site=site.index, block=block_path(path),
                         val=torch.empty(local, dtype=meta.dtype, device="meta"), reads=site.kind == "parameter")
        return node

    def _placeholder(self, site: Site) -> Layout:
        meta = self.space.graph.nodes[site.node].outputs[0]
        layout = self.space.strategies[site.index].output_layout(self.labels[site.index])
        name = "_".join(["param" if site.kind == "parameter" else site.kind, *re.findall(r"\w+", site.name)])
        self.values[site.index, 0] = self._describe(self.graph.placeholder(name), site, meta, layout)
        return layout

    def _read(self, link: Link) -> FxNode:
        """The link's tensor in the layout that its target asks for."""
        value = self.values[link.source, link.output]
        wanted = self.space.strategies[link.target].input_layout(self.labels[link.target], link.position)
        for step in self.path(link.meta, value.meta["layout"], wanted):
            source_sizes, target_sizes = step_sizes(link.meta.shape, step, self.space.mesh_shape, self.coordinate)
            keywords: dict[str, Any] = {"source_sizes": source_sizes} if source_sizes else {}
            keywords |= {"target_sizes": target_sizes} if target_sizes else {}
            node = self.graph.call_function(
                STEP_FUNCTIONS[step.source.kind, step.target.kind],
                (value, self.space.axis_names[step.axis], str(step.source), str(step.target)), keywords,
            )
            self._describe(node, self.space.sites[link.target], link.meta, step.after)
            largest = math.prod(largest_local_shape(link.meta.shape, step.after, self.space.mesh_shape))
            node.meta.update(step=step, reads=value.meta["reads"], num_bytes=largest * link.meta.dtype.itemsize)
            value = node
        return value

    def _op(self, site: Site) -> None:
        node = self.space.graph.nodes[site.node]
        strategies, label = self.space.strategies[site.index], self.labels[site.index]
        operands = iter([self._read(link) for link in self.space.links_into.get(site.index, ())])
        args, kwargs = pytree.tree_map(
            lambda leaf: next(operands) if isinstance(leaf, Ref) else leaf, (node.args, dict(node.kwargs))
        )
        layouts = [strategies.output_layout(label, o) for o in range(len(node.outputs))]
        made = self._call(site, node, list(args), on_device(kwargs, self.device), layouts)
        if len(node.outputs) == 1 and not _returns_tuple(node):
            results = [made]
        else:
            made.meta.update(site=site.index, block=block_path(node.module_path))
            results = [self.graph.call_function(item, (made, o)) for o in range(len(node.outputs))]
        for output, (result, meta, layout) in enumerate(zip(results, node.outputs, layouts, strict=True)):
            self._describe(result, site, meta, layout)
            if node.no_grad and node.target is not aten.detach.default:
                result = self._describe(self.graph.call_function(aten.detach.default, (result,)), site, meta, layout)
            self.values[site.index, output] = result

    def _call(self, site: Site, node: Node, args: list[Any], kwargs: dict[str, Any], layouts: list[Layout]) -> FxNode:
        shape = local_shape(node.outputs[0].shape, layouts[0], self.space.mesh_shape, self.coordinate)
        args = fitted(node.target, args, shape, node.outputs[0].shape)
        if node.target is routed_experts:
            args = [*args[:5], self._offsets(args[4][0])[0]]
        rows = [self.space.strategies[site.index].rows[r] for r in self.labels[site.index]]
        if any(row.variant for row in rows):
            return self._variant(node, rows, args, kwargs)
        rule = self.space.strategies[site.index].rule
        if rule is not None and rule.random:
            return self.graph.call_function(
                random_op, (node.target, site.index, self._piece_number(rows), *args), kwargs
            )
        node_name = node.name if node.name.isidentifier() else None
        return self.graph.create_node("call_function", node.target, tuple(args), kwargs, name=node_name)

    def _variant(self, node: Node, rows: Sequence[Row], args: list[Any], kwargs: dict[str, Any]) -> FxNode:
        taken = [(name, row) for name, row in zip(self.space.axis_names, rows, strict=True) if row.variant]
        (kind,) = {row.variant for _, row in taken}
        variant, keywords = VARIANTS[kind], {**kwargs, "axes": tuple(name for name, _ in taken)}
        if variant.start is not None:
            position, dim = variant.start
            keywords["start"] = self._offsets(args[position])[taken[0][1].inputs[position].dim if dim is None else dim]
        if variant.cuts:
            whole, made = args[0].meta["global_meta"].shape, node.outputs[0].shape
            dims = tuple(row.inputs[0].dim for _, row in taken)
            lengths = tuple((whole[d], made[d] if row.outputs[0].is_shard else 1)
                            for d, (_, row) in zip(dims, taken, strict=True))
            keywords |= {"op": node.target, "dims": dims, "sizes": lengths}
        return self.graph.call_function(variant.function, tuple(args), keywords)

    def _piece_number(self, rows: Sequence[Row]) -> int:
        """Numbers the pieces of a random op: equal where ranks repeat the same work."""
        number = 0
        for row, n, rank in zip(rows, self.space.mesh_shape, self.coordinate, strict=True):
            number = number * n + (rank if row.factor else 0)
        return number

    def _offsets(self, operand: FxNode) -> tuple[int, ...]:
        """Where this rank's piece of a value begins."""
        meta = operand.meta
        return local_box(meta["global_meta"].shape, meta["layout"], self.space.mesh_shape, self.coordinate)[0]


def _returns_tuple(node: Node) -> bool:
    returns = node.target._schema.returns
    return len(returns) > 1 or "[]" in str(returns[0].type) or "List" in str(returns[0].type)


