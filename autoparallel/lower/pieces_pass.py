"""Linear layers whose operand or result is redistributed, in pieces of their rows, as `schedule.pieces` has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode

from autoparallel.kernels.collectives import item
from autoparallel.kernels.in_pieces import gathered_products, reduced_product
from autoparallel.lower.activation_pass import ActivationPaths, communicates
from autoparallel.schedule.pieces import (
    Candidate,
    Cut,
    cut_of,
    gathers,
    pieced_products,
    reduces,
    runs_in_pieces,
)
from autoparallel.schedule.step_config import Hybrid


@dataclass(frozen=True)
class ProgramPieces:
    """Layers of a program in pieces: ``step`` is the redistribution, behind them if it is one of their results."""

    step: FxNode
    layers: Sequence[FxNode]
    behind: bool
    cut: Cut


def in_pieces(module: GraphModule, hybrid: Hybrid) -> GraphModule:
    """The same program with layers in pieces, as the step configuration has it."""
    found = pieces_of(module, hybrid) if runs_in_pieces(hybrid) else []
    return _written(module, found, hybrid.pieces) if found else module


def pieces_of(module: GraphModule, hybrid: Hybrid) -> list[ProgramPieces]:
    """The layers of a program that run in pieces."""
    paths = ActivationPaths(module)
    some = [one for path in paths.travelling if (one := _candidate(path, paths, hybrid)) is not None]
    blocks = {node.meta["decision"]: node.meta.get("block") for node in paths.order if "decision" in node.meta}
    found = list[ProgramPieces]()
    for made in pieced_products([candidate for candidate, *_ in some], blocks.get):
        _, step, layers = some[made.number]
        found.append(ProgramPieces(step, [step.all_input_nodes[0]] if made.behind else layers, made.behind, made.cut))
    return found


def _candidate(path: Sequence[FxNode], paths: ActivationPaths, hybrid: Hybrid
               ) -> tuple[Candidate, FxNode, Sequence[FxNode]] | None:
    """A path as a candidate, its step that communicates, and the layers that read its result."""
    steps = [step for step in path if communicates(step)]
    if len(steps) != 1:
        return None
    (node,), source = steps, path[0].all_input_nodes[0]
    step, meta = node.meta["step"], node.meta["global_meta"]
    cut = cut_of(meta.shape, step, node.meta["mesh_shape"], hybrid.pieces) if meta.requires_grad else None
    if cut is None:
        return None
    layers, is_made = paths.layers[path[-1]], node is path[0] and reduces(step) and _is_layer(source)
    read = node is path[-1] and gathers(step) and set(node.users) == set(layers)
    readers = tuple(layer.meta["decision"] for layer in layers) if read else ()
    maker = {"maker": source.meta["decision"]} if is_made and set(source.users) == {node} else {}
    return Candidate(node.meta["decision"], cut, readers, **maker), node, layers


def _is_layer(node: FxNode) -> bool:
    """Whether a node is a linear layer with gradients of all operands."""
    return node.target is torch.ops.aten.linear.default and all(
        arg.meta["global_meta"].requires_grad for arg in node.all_input_nodes)


def _written(module: GraphModule, found: Sequence[ProgramPieces], count: int) -> GraphModule:
    graph, made = Graph(), dict[FxNode, FxNode]()
    at = {(one.step.all_input_nodes[0] if one.behind else one.layers[0]): one for one in found}
    replaced = {node for one in found for node in (one.step, *one.layers)}
    for node in module.graph.nodes:
        if (one := at.get(node)) is not None:
            made.update(_behind(graph, made, one, count) if one.behind else _before(graph, made, one, count))
        elif node not in replaced:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.lint()
    return GraphModule(module, graph, class_name=type(module).__name__)


def _layer(node: FxNode, made: dict[FxNode, FxNode]) -> tuple[FxNode, FxNode | None]:
    weight, *bias = node.args[1:]
    assert isinstance(weight, FxNode)
    return made[weight], made[bias[0]] if bias and isinstance(bias[0], FxNode) else None


def _step_arguments(one: ProgramPieces, count: int) -> dict[str, Any]:
    _, axis, source, target = one.step.args
    sizes = {name: one.step.kwargs.get(name, ()) for name in ("source_sizes", "target_sizes")}
    return {"axis": axis, "source": source, "target": target, **sizes, "cut": (count, *one.cut)}


def _behind(graph: Graph, made: dict[FxNode, FxNode], one: ProgramPieces, count: int
            ) -> Iterator[tuple[FxNode, FxNode]]:
    (layer,) = one.layers
    x = made[layer.all_input_nodes[0]]
    node = graph.call_function(reduced_product, (x, _layer(layer, made)), _step_arguments(one, count))
    node.meta = {**layer.meta, **{key: one.step.meta[key] for key in ("layout", "global_meta", "val")}}
    yield one.step, node


def _before(graph: Graph, made: dict[FxNode, FxNode], one: ProgramPieces, count: int
            ) -> Iterator[tuple[FxNode, FxNode]]:
    x, layers = made[one.step.all_input_nodes[0]], tuple(_layer(layer, made) for layer in one.layers)
    node = graph.call_function(gathered_products, (x, layers), _step_arguments(one, count))
    node.meta = dict(one.layers[0].meta)
    for number, layer in enumerate(one.layers):
        result = graph.call_function(item, (node, number))
        result.meta = dict(layer.meta)
        yield layer, result


__all__ = ["ProgramPieces", "in_pieces", "pieces_of"]
