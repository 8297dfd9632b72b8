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
class Turn:
    """A program in two: ``reads(*parameters)`` and ``turn(*values, *rest)``, where ``rest`` are the program's other
    placeholders in order. ``gathers`` tells the steps of ``turn`` that gather parameters."""

    reads: GraphModule
    turn: GraphModule
    gathers: Callable[[FxNode], bool]


def gathered_each_turn(node: FxNode) -> bool:
    """Whether a step makes a whole parameter of its pieces (what ZeRO-3 does anew for every turn)."""
    return node.meta["step"].forward in COLLECTIVES


def sum_gradients_in(program: Program, dtype: torch.dtype | None) -> None:
    """Let the steps by which parameters are read sum their gradients in this type (None: in the gradients' own)."""
    graph = program.module.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    read = {n for n, site in zip(placeholders, program.placeholders, strict=False) if site.kind == "parameter"}
    for node in graph.nodes:
        if "step" in node.meta and node.args[0] in read:
            read.add(node)
            learns = node.meta["global_meta"].requires_grad
            if dtype is not None and learns and node.meta["step"].backward in SUMS:
                node.update_kwarg("sum_dtype", dtype)
    program.module.recompile()


def split_reads(program: Program, stays: Callable[[FxNode], bool] = lambda node: False) -> Turn:
    """Take the redistribution of parameters apart from the rest; steps for which ``stays`` is true stay (and all after
    them)."""
    nodes = list(program.module.graph.nodes)
    names = {site.name for site in program.placeholders if site.kind == "parameter"}
    placeholders = [n for n in nodes if n.op == "placeholder"]
    parameters = [n for n, site in zip(placeholders, program.placeholders, strict=False) if site.name in names]
    early: dict[FxNode, None] = dict.fromkeys(parameters)
    for node in nodes:
        if "step" in node.meta and node.args[0] in early and not stays(node):
            early[node] = None
    frontier = [n for n in early if any(user not in early for user in n.users)]
    late: dict[FxNode, None] = {}
    for node in nodes:
        if "step" in node.meta and node not in early and (node.args[0] in early or node.args[0] in late):
            late[node] = None
    turn = _turn(nodes, set(early), frontier)
    names_late = {n.name for n in late if gathered_each_turn(n)}
    return Turn(_reads(parameters, list(early), frontier), turn, lambda node: node.name in names_late)


def _reads(parameters: list[FxNode], early: list[FxNode], frontier: list[FxNode]) -> GraphModule:
    graph = Graph()
    made: dict[FxNode, FxNode] = {}
    for node in parameters + [n for n in early if n.op != "placeholder"]:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[n] for n in frontier))
    return GraphModule({}, graph, class_name="ParameterReads")


def _turn(nodes: list[FxNode], early: set[FxNode], frontier: list[FxNode]) -> GraphModule:
    graph = Graph()
    made: dict[FxNode, FxNode] = {}
    for node in frontier:
        made[node] = graph.placeholder(f"{node.name}_value")
        made[node].meta = dict(node.meta)
    for node in nodes:
        if node not in early:
            made[node] = graph.node_copy(node, made.__getitem__)
    return GraphModule({}, graph, class_name="Turn")
