"""Captured graphs of functions of tensors and of the cases, plans of the cases, and the values that graphs compute."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import nn

import autoparallel
from autoparallel import compiler
from autoparallel.capture import OpGraph, Ref, capture
from autoparallel.runtime.interpret import values_of
from cost_models import Cluster
from tests.support.models import CASES


@functools.cache
def graph_of(case_name: str, batch: int = 8) -> OpGraph:
    """The captured step of a case, traced once per process: tracing is two thirds of the time of a small plan."""
    case = CASES[case_name]
    return capture(case.build(), *case.inputs(batch))


@contextmanager
def planning_on(graph: OpGraph) -> Iterator[None]:
    """Meanwhile `autoparallel.plan` takes this graph instead of tracing the model that it is given."""
    with patch.object(compiler, "capture", lambda *_: graph):
        yield


def plan_of(case_name: str, cluster: Cluster, batch: int = 8, **options: Any) -> autoparallel.Plan:
    """`autoparallel.plan` of a case with these options, on the graph of `graph_of`."""
    case = CASES[case_name]
    args, kwargs = case.inputs(batch)
    with planning_on(graph_of(case_name, batch)):
        return autoparallel.plan(case.build(), cluster, example_inputs=args, example_kwargs=kwargs, **options)


_graphs: WeakKeyDictionary[nn.Module, OpGraph] = WeakKeyDictionary()


def plan_again(model: nn.Module, cluster: Cluster | str, example_inputs: Sequence[Any] = (),
               example_kwargs: Mapping[str, Any] | None = None, **options: Any) -> autoparallel.Plan:
    """`autoparallel.plan`; a model is traced for its first plan only: those that follow must have the same example."""
    if model not in _graphs:
        _graphs[model] = capture(model, tuple(example_inputs), dict(example_kwargs or {}))
    with planning_on(_graphs[model]):
        return autoparallel.plan(model, cluster, example_inputs=example_inputs, example_kwargs=example_kwargs,
                                 **options)


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
