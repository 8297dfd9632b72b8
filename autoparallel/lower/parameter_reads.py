"""Parameters read once per step: redistribution of parameters is taken out of the part of a program that takes turns.

    reads   local parameters -> the values that the turns read     (all-gathers; backward: reductions of gradients)
    turn    these values, inputs, received values -> results

Between the two, gradients of all turns add up, and are reduced once, or after each turn.
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
    """A program in two: ``reads(*parameters)`` gives the values that ``micro_batch(*values, *rest)`` takes; ``rest``
    are the other placeholders, in order."""

    reads: GraphModule
    micro_batch: GraphModule


def is_read(node: FxNode) -> bool:
    """Whether the node is a step on the way from a parameter to its readers."""
    return "step" in node.meta and bool(node.meta["reads"])


def gathers_parameter(node: FxNode) -> bool:
    """Whether the node makes a whole parameter of its pieces (what ZeRO-3 does anew for every turn)."""
    return is_read(node) and node.meta["step"].forward in COLLECTIVES


def sum_gradients_in(program: Program, dtype: torch.dtype | None) -> None:
    """Let the steps by which parameters are read sum their gradients in this type (None: in the gradients' own)."""
    for node in program.module.graph.nodes:
        trainable = is_read(node) and node.meta["global_meta"].requires_grad
        if dtype is not None and trainable and node.meta["step"].backward in SUMS:
            node.update_kwarg("sum_dtype", dtype)
    program.module.recompile()


def split_reads(program: Program, stays: Callable[[FxNode], bool] = lambda node: False) -> SplitProgram:
    """Take the redistribution of parameters apart from the rest; steps for which ``stays`` is true stay (and all after
    them)."""
    nodes = list(program.module.graph.nodes)
    parameters = [n for n in nodes if n.op == "placeholder" and n.meta["reads"]]
    early: dict[FxNode, None] = dict.fromkeys(parameters)
    for node in nodes:
        if is_read(node) and node.args[0] in early and not stays(node):
            early[node] = None
    frontier = [n for n in early if any(user not in early for user in n.users)]
    return SplitProgram(_reads(parameters, list(early), frontier), _per_micro_batch(nodes, set(early), frontier))


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
