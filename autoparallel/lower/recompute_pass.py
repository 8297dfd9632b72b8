"""Activation recompute (checkpointing): blocks keep their inputs only and run again in backward.

A block is a contiguous run of nodes under one index of a module list (`capture.blocks`). "full" recomputes all of it,
collectives included; "all_but_attention" keeps results of attention; "selective" those of matrix products, attention
and collectives; "offload" recomputes nothing. What "selective" and "offload" save may wait on the host or disk
(`kernels.saved_on_host`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode

from autoparallel.kernels import gathered_once
from autoparallel.kernels.collectives import item
from autoparallel.kernels.recomputed import Recomputed
from autoparallel.kernels.regather import begin_fetches, begin_gathers, end, gather, gather_parameter
from autoparallel.kernels.saved_on_host import SavedInOrder
from autoparallel.lower import overlap_pass


def with_recompute(program: GraphModule, mode: str, block_of: Callable[[FxNode], object],
                   in_parts_of_backward: bool = False, saved_on: str = "device") -> GraphModule:
    """The same program with each contiguous run of a block's nodes as a `Recomputed` module, or an `OffloadedBlock`.

    ``mode``: as `Hybrid.recompute`; ``block_of``: the block of a node, None for nodes that are not
    recomputed; ``in_parts_of_backward``: backward runs in several parts (zero bubble); ``saved_on``: as in `Hybrid`.
    """
    order = SavedInOrder(not in_parts_of_backward, saved_on == "disk")

    def made(body: GraphModule, _: Sequence[FxNode]) -> nn.Module:
        again = body if mode == "offload" else Recomputed(body, mode, in_parts_of_backward)
        return again if saved_on == "device" else order.block(again)

    return in_parts(program, block_of, made)


def in_parts(program: GraphModule, part_of: Callable[[FxNode], object],
             module_of: Callable[[GraphModule, Sequence[FxNode]], nn.Module]) -> GraphModule:
    """The same program with each contiguous run of ops of one part as a module: ``module_of(run as a graph, ops)``. Ops
    whose part is None stay."""
    graph = Graph()
    made: dict[FxNode, FxNode] = {}
    parts: dict[str, nn.Module] = {}
    nodes = list(program.graph.nodes)
    for part, run in itertools.groupby(nodes, lambda n: part_of(n) if n.op == "call_function" else None):
        members = list(run)
        if part is None:
            for node in members:
                made[node] = graph.node_copy(node, made.__getitem__)
            continue
        inside = set(members)
        inputs = list(dict.fromkeys(i for n in members for i in n.all_input_nodes if i not in inside))
        outputs = [n for n in members if any(user not in inside for user in n.users)]
        name = "_".join(["part", *re.findall(r"\w+", str(part)), str(len(parts))])
        parts[name] = module_of(_block(members, inputs, outputs), members)
        result = graph.call_module(name, tuple(made[i] for i in inputs))
        blocks = dict.fromkeys(node.meta.get("block") for node in members)
        result.meta = {"block": ", ".join(filter(None, blocks)) or None}
        for number, node in enumerate(outputs):
            made[node] = graph.call_function(item, (result, number))
            made[node].meta = dict(node.meta)
    own = dict(program.named_children())
    return GraphModule({**own, **parts}, graph, class_name="SplitProgram")


def _block(members: Sequence[FxNode], inputs: Sequence[FxNode], outputs: Sequence[FxNode]) -> GraphModule:
    graph = Graph()
    made: dict[FxNode, FxNode] = {}
    for node in inputs:
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    for node in members:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[n] for n in outputs))
    return GraphModule({}, graph, class_name="Block")


#: Prefetched reads of parameters, and the same with a repetition in backward.
_REPEATED: dict[Any, Any] = {overlap_pass.begin_gathers: begin_gathers, overlap_pass.begin_fetches: begin_fetches}


def gather_again(program: GraphModule, gathers: Callable[[Any], bool]) -> GraphModule:
    """Let backward repeat the steps for which ``gathers`` is true and the prefetched gathers (ZeRO-3). Changes and
    returns ``program``."""
    for node in program.graph.nodes:
        if node.target in _REPEATED:
            node.target = _REPEATED[node.target]
            node.kwargs = {**node.kwargs, "place": node.meta["place"], "num_bytes": node.meta["num_bytes"]}
        elif node.target is overlap_pass.end and node.args[0].target in _REPEATED.values():
            node.target = end
        elif node.target is not item and gathers(node):
            node.target = gather_parameter if node.meta["reads"] else gather
    program.recompile()
    return program


def gather_once(program: GraphModule, gathers: Callable[[Any], bool]) -> GraphModule:
    """Let steps for which ``gathers`` is true, and the prefetched gathers, run once in forward for all micro-batches
    (ZeRO-2). Changes and returns ``program``."""
    for number, node in enumerate(program.graph.nodes):
        if node.target is overlap_pass.begin_gathers:
            node.target, node.kwargs = gathered_once.begin_gathers, {**node.kwargs, "number": number}
        elif node.target is not item and gathers(node):
            node.target, node.kwargs = gathered_once.gather, {**node.kwargs, "number": number}
    program.recompile()
    return program


def gathers_of_stored(program: GraphModule, stored: int) -> GraphModule:
    """Issues, in order, those gathers of `gather_once` that read only the first ``stored`` of the values that the
    program is given; its arguments are these."""
    graph = Graph()
    made = {node: graph.placeholder(node.name) for node in program.graph.find_nodes(op="placeholder")[:stored]}
    for node in program.graph.nodes:
        if node.target is gathered_once.begin_gathers and made.keys() >= set(node.all_input_nodes):
            arguments = (*node.args[:2], *(made[value] for value in node.all_input_nodes))
            graph.call_function(gathered_once.issue_gathers, arguments, {"number": node.kwargs["number"]})
    graph.output(())
    return GraphModule({}, graph, class_name="StoredGathers")
