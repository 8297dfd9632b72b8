"""Emission: strategy space and one strategy per decision -> one rank's program, a readable torch.fx.GraphModule.

Ops run on local shards with local sizes. A tensor use whose layouts differ becomes a path of redistribution steps, one
line each. Node metadata: ``layout``, ``global_meta``, ``decision`` (index), ``block``, ``val`` (meta tensor of the
local shape), ``reads`` (true for a parameter and the steps of its path to a reader) and ``of_parameter`` (also for
views of these, and the steps of their paths). Ops also have ``op_class`` and ``saves`` (whether backward
needs anything of them), steps ``step`` and ``num_bytes`` (of the fullest rank's result, so equal on all ranks).
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
from autoparallel.capture.graph import Node, on_device
from autoparallel.capture.numbers import Number
from autoparallel.kernels.collectives import STEP_FUNCTIONS, item
from autoparallel.kernels.flash import grouped_attention
from autoparallel.kernels.numbers import with_numbers
from autoparallel.kernels.rng import random_op
from autoparallel.kernels.variants import VARIANTS, Variant
from autoparallel.layout import Layout, Step, invariant_on_unit_axes, local_box, local_shape, shards
from autoparallel.layout.redistribution import name_of
from autoparallel.layout.shapes import largest_local_shape, shard_of
from autoparallel.ops.arguments import aten, fitted
from autoparallel.ops.linear_sections import linear_sections
from autoparallel.ops.routed_experts import routed_experts
from autoparallel.rules.rule import AxisStrategy
from autoparallel.schedule.stage import Part, Value
from autoparallel.strategies.space import Decision, Strategy, StrategySpace, TensorUse

#: (tensor, source layout, target layout) -> redistribution steps between the two.
PathFinder = Callable[[TensorUse, Layout, Layout], Sequence[Step]]


@dataclass(frozen=True)
class Program:
    """One rank's program, of the whole model or of one pipeline stage.

    ``module(*placeholders, *received)`` takes local tensors and returns (local outputs, new values of the buffers
    ``updates``, local values to send). Outputs of other stages are None.
    """

    module: GraphModule
    placeholders: tuple[Decision, ...]
    placeholder_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout | None, ...]
    updates: tuple[str, ...]
    received: tuple[FxNode, ...] = ()
    sent: tuple[FxNode, ...] = ()


def emit(
    space: StrategySpace,
    strategies: Sequence[Strategy],
    path: PathFinder,
    coordinate: Sequence[int],
    device: torch.device | str = "cpu",
    part: Part | None = None,
) -> Program:
    """The program of the rank at mesh coordinate ``coordinate``, given one strategy per decision.

    ``path`` finds redistribution steps; ``part`` restricts the program to one stage's decisions; ops that create
    tensors do so on ``device``.
    """
    part = part or Part(frozenset(range(len(space))))
    return _Emitter(space, strategies, path, tuple(coordinate), torch.device(device)).run(part)


def step_sizes(shape: tuple[int, ...], step: Step, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> tuple[
    tuple[int, ...], tuple[int, ...]
]:
    """Shard lengths along the source's and the target's cut dim, for all ranks of this rank's group on the step's axis;
    ``()`` for a placement that is not a shard."""
    found: list[tuple[int, ...]] = []
    for placement, layout in ((step.source, step.before), (step.target, step.after)):
        if not placement.is_shard:
            found.append(())
            continue
        size = shape[placement.dim]
        (axis,) = step.axes
        for other in range(axis):
            if layout[other].is_shard and layout[other].dim == placement.dim:
                size = shard_of(size, mesh_shape[other], coordinate[other])[1]
        found.append(shards(size, mesh_shape[axis]))
    return found[0], found[1]


class _Emitter:
    def __init__(
        self,
        space: StrategySpace,
        strategies: Sequence[Strategy],
        path: PathFinder,
        coordinate: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.space, self.strategies, self.path = space, strategies, path
        self.coordinate, self.device = coordinate, device
        self.graph = Graph()
        self.values: dict[tuple[int, int], FxNode] = {}

    def run(self, part: Part) -> Program:
        decisions = [self.space.decisions[index] for index in sorted(part.decisions)]
        placeholders = [decision for decision in decisions if decision.kind in ("parameter", "buffer", "input")]
        layouts = [self._placeholder(decision) for decision in placeholders]
        received = tuple(self._received(value) for value in part.received)
        results: dict[str, FxNode] = {}
        for decision in decisions:
            if decision.kind == "op":
                self._op(decision)
            elif decision.kind == "shared_read":
                self.values[decision.index, 0] = self._read(self.space.uses_by[decision.index][0])
            elif decision.kind in ("output", "update"):
                results[decision.name] = self._read(self.space.uses_by[decision.index][0])
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
        decision, s = self.space.decisions[value[0]], self.space.strategy_sets[value[0]]
        layout = s.output_layout(self.strategies[decision.index], value[1])
        name = "_".join(["received", *re.findall(r"\w+", decision.name), str(value[1])])
        node = self._describe(self.graph.placeholder(name), decision, s.output_metas[value[1]], layout)
        self.values[value] = node
        return node

    def _describe(self, node: FxNode, decision: Decision, meta: TensorMeta, layout: Layout) -> FxNode:
        layout = invariant_on_unit_axes(layout, self.space.mesh_shape)
        local = local_shape(meta.shape, layout, self.space.mesh_shape, self.coordinate)
        node.meta.update(layout=layout, global_meta=meta, decision=decision.index,
                         block=self.space.blocks[decision.index],
                         val=torch.empty(local, dtype=meta.dtype, device="meta"), reads=decision.kind == "parameter",
                         of_parameter=decision.kind == "parameter",
                         parameter=decision.path if decision.kind == "parameter" else None)
        return node

    def _placeholder(self, decision: Decision) -> Layout:
        meta = self.space.graph.nodes[decision.node].outputs[0]
        layout = self.space.strategy_sets[decision.index].output_layout(self.strategies[decision.index])
        name = "_".join(
            ["param" if decision.kind == "parameter" else decision.kind, *re.findall(r"\w+", decision.name)]
        )
        self.values[decision.index, 0] = self._describe(self.graph.placeholder(name), decision, meta, layout)
        return layout

    def _read(self, use: TensorUse) -> FxNode:
        """The tensor use's value in the layout that its target reads; emits the redistribution steps."""
        value = self.values[use.source, use.output]
        wanted = self.space.strategy_sets[use.target].input_layout(self.strategies[use.target], use.position)
        for step in self.path(use, value.meta["layout"], wanted):
            source_sizes, target_sizes = step_sizes(use.meta.shape, step, self.space.mesh_shape, self.coordinate)
            keywords: dict[str, Any] = {"source_sizes": source_sizes} if source_sizes else {}
            keywords |= {"target_sizes": target_sizes} if target_sizes else {}
            node = self.graph.call_function(
                STEP_FUNCTIONS[step.source.kind, step.target.kind],
                (value, name_of(step.axes, self.space.axis_names), str(step.source), str(step.target)), keywords,
            )
            self._describe(node, self.space.decisions[use.target], use.meta, step.after)
            largest = math.prod(largest_local_shape(use.meta.shape, step.after, self.space.mesh_shape))
            node.meta.update(step=step, reads=value.meta["reads"], of_parameter=value.meta["of_parameter"],
                             parameter=value.meta["parameter"],
                             num_bytes=largest * use.meta.dtype.itemsize, mesh_shape=self.space.mesh_shape)
            value = node
        return value

    def _op(self, decision: Decision) -> None:
        node = self.space.graph.nodes[decision.node]
        strategy_set, strategy = self.space.strategy_sets[decision.index], self.strategies[decision.index]
        values = [self._read(use) for use in self.space.uses_by.get(decision.index, ())]
        operands, is_view = iter(values), strategy_set.rule is not None and strategy_set.rule.alias
        args, kwargs = pytree.tree_map(
            lambda leaf: next(operands) if isinstance(leaf, Ref) else leaf, (node.args, dict(node.kwargs))
        )
        layouts = [strategy_set.output_layout(strategy, o) for o in range(len(node.outputs))]
        made = self._call(decision, node, list(args), on_device(node.target, kwargs, self.device), layouts)
        rule = strategy_set.rule
        made.meta["op_class"] = "" if rule is None else rule.op_class
        made.meta["saves"] = rule is not None and bool(rule.saves or rule.keeps_own) and any(
            meta.requires_grad for meta in strategy_set.output_metas)
        of_parameter = is_view and all(value.meta["of_parameter"] for value in values)
        if len(node.outputs) == 1 and not _returns_tuple(node):
            results = [made]
        else:
            made.meta.update(decision=decision.index, block=self.space.blocks[decision.index],
                             of_parameter=of_parameter)
            results = [self.graph.call_function(item, (made, o)) for o in range(len(node.outputs))]
        for output, (result, meta, layout) in enumerate(zip(results, node.outputs, layouts, strict=True)):
            self._describe(result, decision, meta, layout)
            if node.no_grad and node.target is not aten.detach.default:
                result = self._describe(
                    self.graph.call_function(aten.detach.default, (result,)), decision, meta, layout
                )
            result.meta["of_parameter"] = of_parameter
            self.values[decision.index, output] = result

    def _call(
        self, decision: Decision, node: Node, args: list[Any], kwargs: dict[str, Any], layouts: list[Layout]
    ) -> FxNode:
        shape = local_shape(node.outputs[0].shape, layouts[0], self.space.mesh_shape, self.coordinate)
        args = fitted(node.target, args, shape, node.outputs[0].shape)
        if node.target is routed_experts:
            args = [*args[:5], self._offsets(args[4][0])[0]]
        axis_strategies = [
            self.space.strategy_sets[decision.index].axis_strategies[r] for r in self.strategies[decision.index]
        ]
        function: Any = local_function(node)
        is_variant = any(one.variant for one, n in zip(axis_strategies, self.space.mesh_shape, strict=True) if n > 1)
        if is_variant:
            function, kwargs = self._variant(node, axis_strategies, args, kwargs)
        elif node.target is linear_sections:
            args[3] = [size * shape[-1] // node.outputs[0].shape[-1] for size in args[3]]
        rule = self.space.strategy_sets[decision.index].rule
        if rule is not None and rule.random:
            return self.graph.call_function(
                random_op, (function, decision.index, self._shard_number(axis_strategies), *args), kwargs
            )
        if is_variant:
            return self.graph.call_function(function, tuple(args), kwargs)
        node_name = node.name if node.name.isidentifier() else None
        positional = tuple((place, arg.form) for place, arg in enumerate(args) if isinstance(arg, Number))
        named = tuple((name, arg.form) for name, arg in kwargs.items() if isinstance(arg, Number))
        if positional or named:
            args = [function, positional, named, *(None if isinstance(arg, Number) else arg for arg in args)]
            kwargs = {name: arg for name, arg in kwargs.items() if not isinstance(arg, Number)}
            return self.graph.create_node("call_function", with_numbers, tuple(args), kwargs, name=node_name)
        return self.graph.create_node("call_function", function, tuple(args), kwargs, name=node_name)

    def _variant(
        self, node: Node, axis_strategies: Sequence[AxisStrategy], args: list[Any], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The function of an op's variant and its keyword arguments; of two, one runs the other (`Variant.runs`). An
        axis of one rank runs none."""
        taken: dict[str, list[tuple[str, AxisStrategy]]] = {}
        for name, ranks, axis_strategy in zip(self.space.axis_names, self.space.mesh_shape, axis_strategies,
                                              strict=True):
            if axis_strategy.variant and ranks > 1:
                taken.setdefault(axis_strategy.variant, []).append((name, axis_strategy))
        inner, *outer = sorted(taken, key=lambda kind: VARIANTS[kind].runs)
        keywords = {**kwargs, "axes": tuple(name for name, _ in taken[inner])}
        for kind in (inner, *outer):
            keywords |= self._keywords(VARIANTS[kind], taken[kind], node, args)
        (kind,) = outer or [inner]
        return VARIANTS[kind].function, keywords | ({"attend": inner} if outer else {})

    def _keywords(self, variant: Variant, taken: Sequence[tuple[str, AxisStrategy]], node: Node, args: list[Any]
                  ) -> dict[str, Any]:
        """What a variant's function asks for, of the axes that take it."""
        keywords: dict[str, Any] = {}
        if variant.start is not None:
            position, dim = variant.start
            cut = taken[0][1].inputs[position].dim if dim is None else dim
            keywords["start"] = self._offsets(args[position])[cut]
            if variant.length:
                keywords["length"] = args[position].meta["global_meta"].shape[cut]
        if variant.cuts:
            whole, made = args[0].meta["global_meta"].shape, node.outputs[0].shape
            dims = tuple(axis_strategy.inputs[0].dim for _, axis_strategy in taken)
            lengths = tuple((whole[d], made[d] if axis_strategy.outputs[0].is_shard else 1)
                            for d, (_, axis_strategy) in zip(dims, taken, strict=True))
            keywords |= {"op": node.target, "dims": dims, "sizes": lengths}
        if variant.shards is not None:
            keywords["shards"] = tuple(number for x in args[:2] for number in (
                self._offsets(x)[variant.shards], x.meta["global_meta"].shape[variant.shards]))
        return keywords

    def _shard_number(self, axis_strategies: Sequence[AxisStrategy]) -> int:
        """The index of this rank's shard of a random op; equal on ranks that compute the same shard."""
        number = 0
        for axis_strategy, n, rank in zip(axis_strategies, self.space.mesh_shape, self.coordinate, strict=True):
            number = number * n + (rank if axis_strategy.factor else 0)
        return number

    def _offsets(self, operand: FxNode) -> tuple[int, ...]:
        """Global offsets of this rank's shard, by dim."""
        meta = operand.meta
        return local_box(meta["global_meta"].shape, meta["layout"], self.space.mesh_shape, self.coordinate)[0]


def local_function(node: Node) -> Callable[..., Any]:
    """What runs an op on local shards: the op itself, but for attention of grouped queries."""
    grouped = node.target is aten.scaled_dot_product_attention.default and node.kwargs.get("enable_gqa")
    return grouped_attention if grouped else node.target


def _returns_tuple(node: Node) -> bool:
    returns = node.target._schema.returns
    return len(returns) > 1 or "[]" in str(returns[0].type) or "List" in str(returns[0].type)


