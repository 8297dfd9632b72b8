"""Parameter communication overlapped with compute: prefetched gathers, gradient reductions during backward.

A redistribution step of a parameter becomes two lines, `begin_...` and `end`, with compute between the two:

    forward     begin: the gather is issued           end: it is awaited
    backward    end: the reduction is issued          begin: it is awaited

Autograd runs in reverse order of the program, so the position of `begin` fixes both how early a gather is issued and
how late a reduction is awaited. All-reduces of whole parameters (no communication forward) begin at the top of the
program, in buckets; gathers begin as far ahead of their reader as `schedule/async_windows.py` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode

from autoparallel.kernels.async_communication import begin_fetches, begin_gathers, begin_reductions, end
from autoparallel.kernels.collectives import (
    item,
    reduce_gradient,
)
from autoparallel.kernels.fetching import fetch
from autoparallel.schedule.async_windows import TOP, AsyncWindows, Event, Pair, Read, kind_of, places
from autoparallel.schedule.fusion import BY_SIZE, Fusion
from autoparallel.schedule.step_config import Hybrid

#: node -> the name of its block, or None.
BlockOf = Callable[[FxNode], str | None]


def ended_together(module: GraphModule) -> list[list[int]]:
    """For each `end` whose values are program outputs only: their indices among the outputs."""
    output = module.graph.output_node()
    index = {node: number for number, node in enumerate(output.all_input_nodes)}
    items = [sorted(node.users, key=lambda made: made.args[1]) for node in module.graph.nodes if node.target is end]
    return [[index[made] for made in made_here] for made_here in items
            if all(set(made.users) == {output} for made in made_here)]


def overlap(module: GraphModule, hybrid: Hybrid, block_of: BlockOf | None = None) -> GraphModule:
    """The same program with parameter communication overlapped with compute, as the step configuration has it.

    ``block_of``: blocks whose parameters are gathered before they begin, such as recomputed ones, which stay
    contiguous.
    """
    steps, reads = reads_of(module, block_of or (lambda node: None), hybrid.fusion)
    writer, events = _Writer(module, steps, reads), AsyncWindows.of(reads, hybrid).events
    writer.run(events.get(TOP, ()))
    seen = set[int]()
    for node in module.graph.nodes:
        if node.op == "call_function" and (decision := node.meta["decision"]) not in seen:
            seen.add(decision)
            writer.run(events.get(decision, ()))
        writer.copy(node)
    return GraphModule(module, writer.graph, class_name=type(module).__name__)


def reads_of(module: GraphModule, block_of: BlockOf, fusion: Fusion = BY_SIZE) -> tuple[list[FxNode], list[Read]]:
    """The redistribution steps of parameters in program order, and the same steps as `AsyncWindows` takes them."""
    made = [node for node in module.graph.nodes if node.op == "call_function"]
    place = places((node.meta["decision"], block_of(node)) for node in made)
    steps = [node for node in made if "step" in node.meta and node.meta["reads"]]
    number, reads = {node: n for n, node in enumerate(steps)}, []
    for node in steps:
        step, meta = node.meta["step"], node.meta["global_meta"]
        kind = kind_of(step.forward, step.backward, meta.requires_grad)
        reads.append(Read(number.get(node.all_input_nodes[0]), kind, str(node.args[1]), str(meta.dtype),
                          float(node.meta["num_bytes"]) if kind else 0.0, place[node.meta["decision"]],
                          node.meta["block"], step.backward, fusion.number_of(node.meta["parameter"])))
    return steps, reads


class _Writer:
    """Copies a program with `begin_...` and `end` in place of steps. ``made``: old node -> new node; ``steps`` and
    ``reads`` are indexed by the numbers in a `Pair`."""

    def __init__(self, module: GraphModule, steps: Sequence[FxNode], reads: Sequence[Read]) -> None:
        self.graph, self.made, self.begun = Graph(), dict[FxNode, FxNode](), dict[Pair, FxNode]()
        self.steps, self.reads = steps, reads
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self.copy(node)

    def copy(self, node: FxNode) -> FxNode:
        """The node's copy; inputs that have none yet are copied first."""
        if node not in self.made:
            self.made[node] = self.graph.node_copy(node, self.copy)
        return self.made[node]

    def run(self, events: Sequence[Event]) -> None:
        for action, pair in events:
            match action:
                case "launch":
                    self._begin(pair)
                case "wait":
                    self._end(pair)
                case "run":
                    self._outside_blocks(self.copy(self.steps[pair.steps[0]]))

    def _begin(self, pair: Pair) -> None:
        steps = [self.steps[n] for n in pair.steps]
        first, values = steps[0], [self.copy(step.all_input_nodes[0]) for step in steps]
        if first.target is reduce_gradient:
            made = self.graph.call_function(begin_reductions, (first.args[1], *values), dict(first.kwargs))
        elif first.target is fetch:
            made = self.graph.call_function(begin_fetches, (first.args[2], *values))
            made.meta = self._ahead(pair)
        else:
            each = tuple((*step.args[2:], step.kwargs["source_sizes"]) for step in steps)
            sums = {key: value for step in steps for key, value in step.kwargs.items() if key == "sum_dtype"}
            made = self.graph.call_function(begin_gathers, (first.args[1], each, *values), sums)
            made.meta = self._ahead(pair)
        self.begun[pair] = made

    def _ahead(self, pair: Pair) -> dict[str, object]:
        """What backward needs to know to repeat a gather."""
        return {"place": max(self.reads[n].place for n in pair.steps),
                "num_bytes": tuple(self.steps[n].meta["num_bytes"] for n in pair.steps)}

    def _end(self, pair: Pair) -> None:
        ended = self.graph.call_function(end, (self.begun[pair],))
        for number, step in enumerate(self.steps[n] for n in pair.steps):
            self.made[step] = self.graph.call_function(item, (ended, number))
            self.made[step].meta = dict(step.meta)
            self._outside_blocks(self.made[step])

    def _outside_blocks(self, made: FxNode) -> None:
        """Parameters are read before a block, and not again where it is recomputed."""
        made.meta.pop("block", None)
