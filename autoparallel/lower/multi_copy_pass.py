"""Multi-copy: the segments of several micro-batches alternate, so that one's activations travel while another computes.

The program of a micro-batch is cut where activations are redistributed by communication; `schedule/multi_copy.py`
has the order of the copies' segments. A step is begun at the end of a segment, and awaited where the copy's next
segment begins:

    forward     copy 0: compute, begin    copy 1: compute, begin    copy 0: await, compute, begin    copy 1: await, ...

Backward runs in reverse order of forward, so it overlaps as well. (MindSpore calls this multi-copy, Domino the same.)
Segments that end with blocks (`runs_by_block`) are the schedule of L2L (Pudipeddi et al. 2020).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode
from torch.fx.node import map_arg

from autoparallel.kernels.async_communication import (
    begin_fetches,
    begin_gathers,
    begin_reductions,
    begin_step,
    end,
    end_step,
)
from autoparallel.kernels.expert_dispatch import run_experts, send_rows
from autoparallel.kernels.rng import random_op
from autoparallel.layout import COLLECTIVES
from autoparallel.schedule.multi_copy import block_ends, ends_every_block, rounds_of, runs_by_block, segment_order
from autoparallel.schedule.step_config import Hybrid


def in_copies(module: GraphModule, shared: int, hybrid: Hybrid, asynchronous: bool = True, by_block: bool = False
              ) -> GraphModule:
    """The program of `Hybrid.copies` micro-batches at a time, whose results are a tuple of the micro-batches' results.

    ``shared``: the number of leading placeholders that the copies share, the values of parameters. The others are
    given for each copy: ``module(*shared, *others of copy 0, *others of copy 1, ...)``. A node's ``meta["copy"]`` is
    the number of its copy. Without ``asynchronous`` a step that ends a segment is awaited at once, for a backend that
    moves the wait of its graphs (`backends.moving`); ``by_block``: each block is compiled by itself, for all copies.
    """
    nodes, copies = list(module.graph.nodes), hybrid.copies
    placeholders = [node for node in nodes if node.op == "placeholder"]
    last_saved = {node.meta["block"]: node.meta["decision"] for node in nodes
                  if node.meta.get("saves") and hybrid.recomputed(node.meta.get("block"))}
    writer = _Writer(copies, _common(nodes, placeholders[:shared], hybrid.alternates), asynchronous, last_saved)
    for node in placeholders[:shared]:
        writer.share(node)
    for copy in range(copies):
        for node in placeholders[shared:]:
            writer.copy(node, copy, f"{node.name}_{copy}")
    ops = [node for node in nodes if node.op == "call_function"]
    segments = _segments(ops, writer.common, hybrid, by_block)
    for number, copy in segment_order(len(segments), copies):
        writer.write(segments[number], copy)
    results = module.graph.output_node().args[0]
    writer.graph.output(tuple(writer.arguments(results, copy) for copy in range(copies)))
    writer.graph.lint()
    return GraphModule({}, writer.graph, class_name=type(module).__name__)


@dataclass
class _Segment:
    """A segment of one copy's program: await ``awaited``, run ``body``, begin ``begun``."""

    awaited: Sequence[FxNode] = ()
    body: list[FxNode] = field(default_factory=list)
    begun: Sequence[FxNode] = ()


def _common(nodes: Sequence[FxNode], shared: Sequence[FxNode], views: bool) -> set[FxNode]:
    """The nodes that copies share: values of parameters, their redistribution, and, with ``views``, views of them and
    theirs. (A view in a block that is recomputed is made again for each copy.)"""
    found = set(shared)
    for node in nodes:
        of_parameter = node.target in (begin_fetches, begin_gathers, begin_reductions, end) or (
            node.meta.get("of_parameter") and (views or node.meta.get("reads")))
        if node.op == "call_function" and of_parameter and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _segments(nodes: Sequence[FxNode], common: set[FxNode], hybrid: Hybrid, by_block: bool) -> list[_Segment]:
    """The program of one copy. Of each decision first its nodes ``common`` to all copies, then its redistribution steps
    of activations, which end segments. ``by_block``: so do all blocks."""
    if not (by_block or runs_by_block(hybrid)):
        return _alternating(nodes, common)
    if not hybrid.alternates:
        return [_Segment(body=run) for run in _runs_of_blocks(nodes, lambda members: False)]

    def sends(members: Sequence[FxNode]) -> bool:
        whole = by_block or ends_every_block(hybrid)
        rounds = [] if whole else rounds_of(_paths(_steps(members, common)), communicates)
        return any(together for _, together in rounds)

    return [segment for run in _runs_of_blocks(nodes, sends) for segment in _alternating(run, common)]


def _groups(nodes: Sequence[FxNode]) -> list[list[FxNode]]:
    """The nodes by decision; those of none (collectives in buckets) by themselves."""
    return [list(group) for _, group in itertools.groupby(nodes, lambda node: node.meta.get("decision"))]


def _runs_of_blocks(nodes: Sequence[FxNode], sends: Callable[[Sequence[FxNode]], bool]) -> list[list[FxNode]]:
    """The nodes, cut where `block_ends` says. Reads of parameters, which are in no block, belong to the op after
    them."""
    groups, ahead = list[list[FxNode]](), list[FxNode]()
    for members in _groups(nodes):
        ahead += members
        if "block" in members[-1].meta:
            groups.append(ahead)
            ahead = []
    blocks = [members[-1].meta.get("block") for members in groups]
    ends = block_ends(blocks, list(map(sends, groups)))
    runs = [list[FxNode]()]
    for number, members in enumerate(groups):
        if number in ends:
            runs.append([])
        runs[-1] += members
    runs[-1] += ahead
    return runs


def _steps(members: Sequence[FxNode], common: set[FxNode]) -> list[FxNode]:
    """Of a decision's nodes, the redistribution steps of activations."""
    return [node for node in members if "step" in node.meta and node not in common]


def _alternating(nodes: Sequence[FxNode], common: set[FxNode]) -> list[_Segment]:
    """Segments that end where activations, or rows of experts, are sent."""
    found = [_Segment()]
    for members in _groups(nodes):
        steps = _steps(members, common)
        found[-1].body += (node for node in members if node in common)
        for before, together in rounds_of(_paths(steps), communicates):
            found[-1].body += before
            if together:
                found[-1].begun = together
                found.append(_Segment(together))
        for node in members:
            if node not in common and "step" not in node.meta:
                found[-1].body.append(node)
                if node.target in (send_rows, run_experts):    # rows, or results, are on their way
                    found.append(_Segment())
    return found


def _paths(steps: Sequence[FxNode]) -> list[list[FxNode]]:
    """Steps, in order, as paths: each but the first of a path reads the one before it."""
    paths = list[list[FxNode]]()
    for step in steps:
        if paths and step.all_input_nodes[0] is paths[-1][-1]:
            paths[-1].append(step)
        else:
            paths.append([step])
    return paths


def communicates(step: FxNode) -> bool:
    """Whether a redistribution step of a program communicates, forward or backward."""
    action, meta = step.meta["step"], step.meta["global_meta"]
    return action.forward in COLLECTIVES or (action.backward in COLLECTIVES and meta.requires_grad)


class _Writer:
    """Writes the program of all copies. ``common``: nodes that are written once for all of them; ``asynchronous``: as
    of `in_copies`; ``last_saved``: by recomputed block, the last decision that saves anything, behind which its
    recompute ends; ``shared``, ``own``: old node -> new node, of all and of each copy."""

    def __init__(self, copies: int, common: set[FxNode], asynchronous: bool, last_saved: Mapping[str, int]) -> None:
        self.last_saved = last_saved
        self.graph, self.common, self.shared = Graph(), common, dict[FxNode, FxNode]()
        self.asynchronous = asynchronous
        self.own: list[dict[FxNode, FxNode]] = [{} for _ in range(copies)]
        self.begun: list[dict[FxNode, FxNode]] = [{} for _ in range(copies)]

    def share(self, node: FxNode) -> None:
        self.shared[node] = self.graph.node_copy(node, self.shared.__getitem__)

    def copy(self, node: FxNode, copy: int, name: str | None = None) -> None:
        made = self.graph.node_copy(node, lambda value: self._value(value, copy))
        if name is not None:
            made.target = made.name = name
        if node.target is random_op:
            made.update_kwarg("of_copy", copy)
        made.meta["copy"] = copy
        self.own[copy][node] = made

    def arguments(self, values: Any, copy: int) -> Any:
        """A structure of nodes, as copy ``copy`` has them."""
        return map_arg(values, lambda value: self._value(value, copy))

    def write(self, segment: _Segment, copy: int) -> None:
        for step in segment.awaited if self.asynchronous else ():
            self.own[copy][step] = self._described(
                self.graph.call_function(end_step, (self.begun[copy].pop(step),)), step)
        for node in segment.body:
            if node not in self.common:
                self.copy(node, copy)
            elif copy == 0:
                self.share(node)
        for step in segment.begun:
            if not self.asynchronous:
                self.copy(step, copy)
                continue
            args = (self._value(step.all_input_nodes[0], copy), *step.args[1:])
            late = step.meta["decision"] > self.last_saved.get(step.meta["block"] or "", step.meta["decision"])
            how = {**step.kwargs, "ends_recompute": True} if late else step.kwargs
            self.begun[copy][step] = self._described(self.graph.call_function(begin_step, args, how), step)

    def _value(self, node: FxNode, copy: int) -> FxNode:
        return self.shared[node] if node in self.shared else self.own[copy][node]

    @staticmethod
    def _described(made: FxNode, step: FxNode) -> FxNode:
        made.meta = {key: value for key, value in step.meta.items() if key != "step"}
        return made
