"""Check of an emitted program before it runs: layouts against the rules, redistribution steps against the table.

The input is the program alone: annotated layouts, functions and arguments. For each op and mesh axis, some axis
strategy of its rule must take these input placements to this output placement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node as FxNode

from autoparallel.axis_names import apart
from autoparallel.capture.graph import Node
from autoparallel.errors import LoweringError
from autoparallel.kernels.collectives import STEP_FUNCTIONS, item
from autoparallel.kernels.numbers import with_numbers
from autoparallel.kernels.rng import random_op
from autoparallel.kernels.variants import VARIANTS
from autoparallel.layout import COLLECTIVES, Layout, Placement, layout_fits, layout_str, local_shape
from autoparallel.layout.redistribution import ACTIONS, JOINT
from autoparallel.lower.emit import Program, local_function
from autoparallel.strategies.space import StrategySpace

aten = torch.ops.aten
_STEPS = frozenset(STEP_FUNCTIONS.values())
_VARIANTS: dict[Any, str] = {variant.function: name for name, variant in VARIANTS.items()}


def check(program: Program, space: StrategySpace, coordinate: Sequence[int]) -> None:
    """Raises LoweringError with the program's line where a value's layout does not follow from its inputs' layouts.

    ``coordinate``: of the rank on the mesh.
    """
    for node in program.module.graph.nodes:
        if node.op == "output":
            _check_results(program, node)
            continue
        if "layout" not in node.meta or node.target is item:
            continue
        layout: Layout = node.meta["layout"]
        _check_shape(space, node, layout, coordinate)
        if node.op == "placeholder":
            continue
        if node.target in _STEPS:
            _check_step(space, node, layout)
        elif node.target is aten.detach.default and _graph_node(space, node).target is not node.target:
            _expect(node, node.all_input_nodes[0].meta["layout"] == layout, "detach changes the layout")
        else:
            _check_op(space, node)


def order_digest(program: Program) -> str:
    """A hash of the program's collectives in order; equal on ranks that issue the same ones in the same order."""
    digest = hashlib.sha256()
    for node in program.module.graph.nodes:
        if node.target in _STEPS:
            digest.update(f"{node.target.__name__}{node.args[1:]}{node.meta['global_meta']}".encode())
        elif node.target in _VARIANTS:
            digest.update(f"{_VARIANTS[node.target]}{node.kwargs['axes']}".encode())
    return digest.hexdigest()


def _expect(node: FxNode, condition: bool, message: str) -> None:
    if not condition:
        raise LoweringError(f"the emitted program is wrong at {node.format_node()}: {message}")


def _graph_node(space: StrategySpace, node: FxNode) -> Node:
    return space.graph.nodes[space.decisions[node.meta["decision"]].node]


def _check_shape(space: StrategySpace, node: FxNode, layout: Layout, coordinate: Sequence[int]) -> None:
    meta = node.meta["global_meta"]
    _expect(node, layout_fits(meta.shape, layout, space.mesh_shape), f"{meta} cannot be {layout_str(layout)}")
    shape = local_shape(meta.shape, layout, space.mesh_shape, coordinate)
    _expect(node, tuple(node.meta["val"].shape) == shape, f"local shape {tuple(node.meta['val'].shape)}, not {shape}")


def _check_step(space: StrategySpace, node: Any, layout: Layout) -> None:
    value, axis_name, source_text, target_text = node.args
    try:
        axes = tuple(space.axis_names.index(name) for name in apart(axis_name))
        source, target = Placement.parse(source_text), Placement.parse(target_text)
    except ValueError as error:
        raise LoweringError(f"the emitted program is wrong at {node.format_node()}: {error}") from None
    before: Layout = value.meta["layout"]
    _expect(node, (source.kind, target.kind) in ACTIONS, "no such step")
    _expect(node, STEP_FUNCTIONS[source.kind, target.kind] is node.target, "the wrong function for this step")
    _expect(node, len(axes) == 1 or (source.kind, target.kind) in JOINT, f"no such step on {axis_name}")
    _expect(node, all(before[axis] == source for axis in axes), f"its input is {layout_str(before)}")
    wanted = tuple(target if axis in axes else placement for axis, placement in enumerate(before))
    _expect(node, layout == wanted, f"its result is {layout_str(layout)}")
    for placement in (source, target):
        inner = [p for p in before[axes[-1] + 1 :] if placement.is_shard and p.is_shard and p.dim == placement.dim]
        _expect(node, not inner, "an inner axis cuts the same dim")


def _check_op(space: StrategySpace, node: FxNode) -> None:
    decision = space.decisions[node.meta["decision"]]
    strategy_set = space.strategy_sets[decision.index]
    leaves: list[FxNode] = []
    torch.fx.node.map_arg((node.args, node.kwargs), leaves.append)
    given = [leaf.meta["layout"] for leaf in leaves]
    _expect(node, len(leaves) == len(strategy_set.input_metas), "wrong number of tensors")
    op: Any = node.args[0] if node.target in (random_op, with_numbers) else node.target
    variants = {_VARIANTS.get(op, ""), node.kwargs.get("attend", "")}
    if variants == {""}:
        made = _graph_node(space, node)
        _expect(node, op is local_function(made), f"the model's op is {made.target}")
    for axis, ranks in enumerate(space.mesh_shape):
        if ranks == 1:
            continue
        ins = tuple(layout[axis] for layout in given)
        out = node.meta["layout"][axis]
        found = any(
            axis_strategy.inputs == ins and axis_strategy.outputs[0] == out and axis_strategy.variant in variants | {""}
            for axis_strategy in strategy_set.axis_strategies
        )
        _expect(node, found, f"no rule takes {[str(p) for p in ins]} to {out} on axis {space.axis_names[axis]}")


def _check_results(program: Program, node: Any) -> None:
    outputs, updates, _ = node.args[0]
    for value in (*outputs, *updates):
        if isinstance(value, FxNode):
            kinds = {p.kind for p in value.meta["layout"]}
            _expect(node, kinds <= {"I", "S"}, f"result {value.name} leaves as {layout_str(value.meta['layout'])}")


def count_collectives(program: Program) -> dict[tuple[str, str], int]:
    """Collectives that the program runs, by (``"forward"`` or ``"backward"``, kind). Scalars are not counted."""
    counts: dict[tuple[str, str], int] = {}
    for node in program.module.graph.nodes:
        if node.target not in _STEPS or node.meta["global_meta"].num_elements <= 1:
            continue
        step, meta = node.meta["step"], node.meta["global_meta"]
        directions = [("forward", step.forward)] + ([("backward", step.backward)] if meta.requires_grad else [])
        for direction, action in directions:
            if action in COLLECTIVES:
                counts[direction, action] = counts.get((direction, action), 0) + 1
    return counts
