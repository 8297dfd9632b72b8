"""A program as AOTAutograd takes it: flat tensors in and out, the seeds of its random ops among the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode
from torch.fx.node import map_arg

from autoparallel.kernels.rng import random_op
from autoparallel.kernels.seeded import Draw, seeded_op, seeds_of


@dataclass(frozen=True)
class FlatProgram:
    """``module(*seeds, *placeholders)`` returns the tensors among the program's results, in order.

    ``draws``: of each random op; their seeds are one int64 tensor, left out if there are none.
    ``results``: the results, with a `Position` in place of each tensor. ``text``: equal for programs of the same ops.
    """

    module: GraphModule
    draws: tuple[Draw, ...]
    results: Any
    text: str

    @cached_property
    def _in_order(self) -> bool:
        """Whether the results are a list or tuple of the tensors in their order, as most parts' are."""
        return type(self.results) in (list, tuple) and list(self.results) == [
            Position(number) for number in range(len(self.results))]

    @property
    def returns(self) -> bool:
        """Whether the graph has a result."""
        return bool(self.module.graph.output_node().all_input_nodes)

    def inputs(self, placeholders: Sequence[Tensor], call_seeds: Sequence[int]) -> list[Tensor]:
        """The inputs of ``module``. ``call_seeds``: by copy."""
        return [seeds_of(call_seeds, self.draws), *placeholders] if self.draws else list(placeholders)

    def structured(self, tensors: Sequence[Tensor]) -> Any:
        """The program's results from the tensors that ``module`` returned."""
        if self._in_order:
            return type(self.results)(tensors)
        return pytree.tree_map(lambda leaf: tensors[leaf.number] if isinstance(leaf, Position) else leaf, self.results)


@dataclass(frozen=True)
class Position:
    """The place of a tensor among the results of a flat program."""

    number: int


def flat(program: GraphModule, recomputed: Mapping[FxNode, int]) -> FlatProgram:
    """The program with flat results, and random ops that read their seeds. The numbers of
    ``recomputed`` nodes are kept as ``meta["custom"]["recomputed"]``, which AOTAutograd copies to what it traces."""
    graph, made = Graph(), dict[FxNode, FxNode]()
    draws = tuple((node.kwargs.get("of_copy", 0), node.args[1], node.args[2]) for node in program.graph.nodes
                  if node.target is random_op)
    seeds = graph.placeholder("seeds") if draws else None
    numbers = iter(range(len(draws)))
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        copy = made[node] = graph.node_copy(node, made.__getitem__)
        if node.target is random_op:
            op, _, _, *rest = copy.args
            copy.target, copy.args = seeded_op, (op, seeds, next(numbers), *rest)
            copy.kwargs = {name: value for name, value in copy.kwargs.items() if name != "of_copy"}
        copy.meta = {"custom": {"recomputed": recomputed[node]}} if node in recomputed else {}
    tensors = list[FxNode]()

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, FxNode):
            return leaf
        tensors.append(made[leaf])
        return Position(len(tensors) - 1)

    results = pytree.tree_map(place, program.graph.output_node().args[0])
    graph.output(tuple(tensors))
    return FlatProgram(GraphModule(program, graph, class_name="FlatProgram"), draws, results, _text(graph))


def _text(graph: Graph) -> str:
    """The computation of a graph as text, with numbers in place of names."""
    number = {node: f"%{n}" for n, node in enumerate(graph.nodes)}
    first = min((node.meta["custom"]["recomputed"] for node in graph.nodes if node.meta), default=0)

    def line(node: FxNode) -> str:
        target = node.target if node.op == "call_function" else ""
        if callable(target) and hasattr(target, "__qualname__"):
            target = f"{target.__module__}.{target.__qualname__}"
        args = map_arg((node.args, node.kwargs), lambda arg: _Name(number[arg]))
        recomputed = node.meta["custom"]["recomputed"] - first if node.meta else None
        return f"{node.op} {target} {args} {recomputed}"

    return "\n".join(map(line, graph.nodes))


class _Name(str):
    """A string that is shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__
