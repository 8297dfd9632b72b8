"""Parameter reads once per step: redistribution of parameters is split off the part that runs per micro-batch.

    reads         local parameters -> values that micro-batches read     (all-gathers; backward: gradient reductions)
    micro_batch   these values, inputs, received values -> results

Gradients accumulate between the two, and are reduced once per step (ZeRO 0 and 1), or after each second part of
backward (ZeRO-2 with zero bubble). Else steps that communicate stay in the micro-batch (`Hybrid.reads_each`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode

from autoparallel.layout import COLLECTIVES, SUMS
from autoparallel.lower.emit import Program


@dataclass(frozen=True)
class SplitProgram:
    """A program in two parts: ``reads(*parameters)`` returns the values of ``micro_batch(*values, *rest)``; ``rest``
    are the other placeholders, in order."""

    reads: GraphModule
    micro_batch: GraphModule


def is_read(node: FxNode) -> bool:
    """Whether the node is a redistribution step on the path from a parameter to a reader."""
    return "step" in node.meta and bool(node.meta["reads"])


def gathers_parameter(node: FxNode) -> bool:
    """Whether the node communicates in forward on the path from a parameter to a reader, or fetches it from the
    host."""
    return is_read(node) and node.meta["step"].forward in (*COLLECTIVES, "fetch")


def communicates(node: FxNode) -> bool:
    """Whether the node communicates on the path from a parameter to a reader, forward or backward; ZeRO-3 runs it in
    each micro-batch."""
    trainable = is_read(node) and node.meta["global_meta"].requires_grad
    return gathers_parameter(node) or (trainable and node.meta["step"].backward in COLLECTIVES)


def moves_parameter(node: FxNode) -> bool:
    """Whether the node does anything in forward on the path from a parameter to a reader."""
    return node.op == "call_function" and is_read(node) and node.meta["step"].forward != "none"


def repeats(node: FxNode) -> bool:
    """Whether ZeRO-3 repeats the node in backward: a step on the path of a parameter, also behind views of it."""
    is_step = node.op == "call_function" and "step" in node.meta
    return is_step and bool(node.meta["of_parameter"]) and node.meta["step"].forward != "none"


def sum_gradients_in(program: Program, dtype: torch.dtype | None) -> None:
    """Sum parameters' gradients in ``dtype`` (None: in the gradients' own). Changes the program in place."""
    for node in program.module.graph.nodes:
        trainable = is_read(node) and node.meta["global_meta"].requires_grad
        if dtype is not None and trainable and node.meta["step"].backward in SUMS:
            node.update_kwarg("sum_dtype", dtype)
    program.module.recompile()


def split_reads(program: Program, stays: Callable[[FxNode], bool] = lambda node: False) -> SplitProgram:
    """Split the redistribution of parameters off the rest. Steps for which ``stays`` is true remain in the rest, with
    all later steps of their path."""
    nodes = list(program.module.graph.nodes)
    parameters = [n for n in nodes if n.op == "placeholder" and n.meta["reads"]]
    early: dict[FxNode, None] = dict.fromkeys(parameters)
    for node in nodes:
        if is_read(node) and node.args[0] in early and not stays(node):
            early[node] = None
    frontier = [n for n in early if any(user not in early for user in n.users)]
    return SplitProgram(_reads(parameters, list(early), frontier), _per_micro_batch(nodes, set(early), frontier))


def reduced_together(reads: GraphModule) -> list[list[int]]:
    """The results of `SplitProgram.reads`, by number: those together whose gradients are reduced by steps that they
    share."""
    found = dict[FxNode, list[int]]()
    for number, node in enumerate(reads.graph.output_node().args[0]):  # type: ignore[arg-type]
        first = node
        while first.op != "placeholder" and first.all_input_nodes[0].op != "placeholder":
            first = first.all_input_nodes[0]
        found.setdefault(first, []).append(number)
    return list(found.values())


def _reads(parameters: list[FxNode], early: list[FxNode], frontier: list[FxNode]) -> GraphModule:
    graph = Graph()
    made: dict[FxNode, FxNode] = {}
    for node in parameters + [n for n in early if n.op != "placeholder"]:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[n] for n in frontier))
    return GraphModule({}, graph, class_name="ParameterReads")


def _per_micro_batch(nodes: list[FxNode], early: set[FxNode], frontier: list[FxNode]) -> GraphModule:
    graph = Graph()
    made: dict[FxNode, FxNode] = {}
    for node in frontier:
        made[node] = graph.placeholder(f"{node.name}_value")
        made[node].meta = dict(node.meta)
    for node in nodes:
        if node not in early:
            made[node] = graph.node_copy(node, made.__getitem__)
    return GraphModule({}, graph, class_name="SplitProgram")
