"""Inputs of compiled programs that no result with a gradient reads get no gradient.

AOTAutograd takes zeros for the gradients of results that nobody needs, and gives zeros to all that these results read:
optimizers with weight decay or momentum then change parameters that one process leaves alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx import Node as FxNode

#: Of a placeholder's meta: the numbers of the results that read it.
READ_BY = "read_by"


def note_reads(program: GraphModule, made: GraphModule) -> None:
    """Note on the placeholders of ``made``, the compiled ``program``, which of its results read them."""
    results = list(pytree.arg_tree_leaves(program.graph.output_node().args[0]))
    read_by: dict[FxNode, frozenset[int]] = {}
    for node in reversed(program.graph.nodes):
        own = frozenset(number for number, value in enumerate(results) if value is node)
        read_by[node] = own.union(*(read_by[user] for user in node.users if user.op != "output"))
    before = program.graph.find_nodes(op="placeholder")
    for node, after in zip(before, made.graph.find_nodes(op="placeholder"), strict=True):
        after.meta[READ_BY] = read_by[node]


def with_needed_gradients(made: GraphModule) -> nn.Module:
    """The compiled program, if each result reads all inputs; else as `NeededGradients`."""
    read_by = [node.meta[READ_BY] for node in made.graph.find_nodes(op="placeholder")]
    everything = frozenset().union(*read_by)
    some = {number: results for number, results in enumerate(read_by) if results and results != everything}
    return NeededGradients(made, some) if some else made


@dataclass
class _Backward:
    """The results that have a gradient in the last backward, autograd's number ``task``."""

    task: int = -1
    results: set[int] = field(default_factory=set)

    def came(self, number: int, gradient: Tensor | None) -> None:
        """The hook of a result."""
        if gradient is not None:
            if self.task != (task := torch._C._current_graph_task_id()):
                self.task, self.results = task, set()
            self.results.add(number)


class NeededGradients(nn.Module):
    """A compiled program. ``read_by``: by number of an input that not all results read, the results that do."""

    def __init__(self, made: GraphModule, read_by: dict[int, frozenset[int]]) -> None:
        super().__init__()
        self.made, self.read_by = made, read_by

    def forward(self, *inputs: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return self.made(*inputs)
        backward = _Backward()
        given = [_Input.apply(x, backward, self.read_by[number]) if number in self.read_by and x.requires_grad else x
                 for number, x in enumerate(inputs)]
        results = self.made(*given)
        for number, x in enumerate(pytree.tree_leaves(results)):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(partial(backward.came, number))
        return results


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: _Backward, read_by: frozenset[int]) -> Tensor:
        ctx.last, ctx.read_by = backward, read_by
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        return gradient if ctx.read_by & ctx.last.results else None, None, None


__all__ = ["NeededGradients", "note_reads", "with_needed_gradients"]
