"""Functions of tensors as captured graphs, and the values that graphs compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoparallel.capture import OpGraph, Ref, capture
from autoparallel.runtime.interpret import values_of


def traced(function: Any, *inputs: torch.Tensor) -> list[str]:
    """Op names of a function of tensors."""
    return [node.op_name for node in captured(function, *inputs).of_kind("op")]


def captured(function: Any, *inputs: torch.Tensor) -> OpGraph:
    class Model(nn.Module):
        def forward(self, *args: torch.Tensor) -> Any:
            return function(*args)

    return capture(Model(), inputs)


def outputs(graph: OpGraph, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the graph computes."""
    known = {Ref(node.index): graph.constant_tensors[node.path] for node in graph.of_kind("buffer")}
    known |= {Ref(node.index): inputs[int(node.path)] for node in graph.of_kind("input")}
    made = values_of(graph, graph.outputs, known, torch.device("cpu"))
    return tuple(made[ref] for ref in graph.outputs)


class Weighed(nn.Module):
    """A function of an input and of a parameter that has an op's name."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.std = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.std)


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
