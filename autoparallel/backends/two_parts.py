"""Backward graphs in two parts, for schedules that compute gradients of weights later (zero bubble).

Autograd runs a compiled graph's backward as one node, which gives all gradients. Here its graph is cut in two: one
gives the gradients of inputs, the other those of weights, from what the first leaves. Within `putting_off` the node
runs the first, gives no gradient to weights, and leaves the second to the caller; elsewhere it runs both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode

#: Autograd's name of the node that runs a graph which AOTAutograd made (torch 2.13).
NODE = "CompiledFunctionBackward"


@dataclass
class PutOff:
    """Second parts that are left. ``weights``: of the node that runs now, by number of the graph's input."""

    later: list[tuple[Sequence[Tensor], Callable[[], Sequence[Tensor]]]] = field(default_factory=list)
    weights: Mapping[int, Tensor] = field(default_factory=dict)


_put_off: ContextVar[PutOff | None] = ContextVar("put_off", default=None)


@contextmanager
def putting_off() -> Iterator[PutOff]:
    """Leave gradients of weights to the caller: ``later`` has weights, and the function that computes their
    gradients, of each node that runs in the block."""
    token = _put_off.set(made := PutOff())
    try:
        yield made
    finally:
        _put_off.reset(token)


def runs_next(weights: Mapping[int, Tensor]) -> None:
    """Say whose backward runs next, by the weights whose gradients are put off. A node of which this is not said runs
    both parts."""
    if (put_off := _put_off.get()) is not None:
        put_off.weights = weights


@dataclass(frozen=True)
class Halves:
    """A backward graph in two. ``first``: the graph's inputs -> its results, None for weights, then ``passed`` values;
    ``second``: the inputs ``read``, by number, then the passed values -> gradients of weights, which are the results
    of the numbers ``weights``."""

    first: GraphModule
    second: GraphModule
    read: Sequence[int]
    weights: Sequence[int]

    def examples(self) -> list[Any]:
        """Values that stand for the second part's inputs."""
        return [node.meta["val"] for node in self.second.graph.find_nodes(op="placeholder")]

    def call(self, first: Callable[..., Any], second: Callable[..., Any]) -> Callable[[list[Any]], Any]:
        """The whole backward, of its compiled parts, which are given a list of inputs that they empty."""
        def run(inputs: list[Any]) -> list[Any]:
            kept = [inputs[number] for number in self.read]
            given = list(inputs)
            inputs.clear()
            made = list(first(given))
            results = made[: (count := len(made) - self.passed)]
            kept += made[count:]
            put_off = _put_off.get()
            if put_off is not None and put_off.weights:
                weights, put_off.weights = put_off.weights, {}
                put_off.later.append(([weights[number] for number in self.weights], lambda: second(kept)))
                return results
            for number, gradient in zip(self.weights, second(kept), strict=True):
                results[number] = gradient
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    @property
    def passed(self) -> int:
        """The number of values that the first part leaves for the second."""
        return len(self.second.graph.find_nodes(op="placeholder")) - len(self.read)


def halves(graph: GraphModule, weights: Collection[int]) -> Halves | None:
    """The graph cut in two; ``weights``: the numbers of results that the second part gives. None if all of these are
    needed for the others anyway, or none is computed."""
    results = list(graph.graph.output_node().args[0])  # type: ignore[arg-type]
    late = [number for number in sorted(weights) if isinstance(results[number], FxNode)]
    early = [None if number in late else result for number, result in enumerate(results)]
    there = _needed(node for node in early if isinstance(node, FxNode))
    placeholders = graph.graph.find_nodes(op="placeholder")
    second = _needed(results[number] for number in late) - there - set(placeholders)
    if not second:
        return None
    nodes = [node for node in graph.graph.nodes if node in second]
    read = {value for node in nodes for value in node.all_input_nodes if value not in second}
    read |= {results[number] for number in late if results[number] not in second}
    given = [number for number, node in enumerate(placeholders) if node in read]
    passed = [node for node in graph.graph.nodes if node in read and node.op != "placeholder"]
    before = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output") and node not in second]
    return Halves(_written(graph, placeholders, before, [*early, *passed]),
                  _written(graph, [*(placeholders[number] for number in given), *passed], nodes,
                           [results[number] for number in late]), given, late)


def _needed(results: Iterator[FxNode] | Any) -> set[FxNode]:
    """The nodes that results are computed from, themselves included."""
    found, waiting = set[FxNode](), list(results)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _written(source: GraphModule, inputs: Sequence[FxNode], nodes: Sequence[FxNode], results: Sequence[Any]
             ) -> GraphModule:
    graph, made = Graph(), dict[FxNode, FxNode]()
    for node in inputs:
        made[node] = graph.node_copy(node) if node.op == "placeholder" else graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    for node in nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] if isinstance(node, FxNode) else None for node in results)).meta = {}
    return GraphModule(source, graph)


__all__ = ["Halves", "PutOff", "halves", "putting_off", "runs_next"]
