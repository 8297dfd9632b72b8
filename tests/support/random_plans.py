"""Errors of models under random plans, on ranks that are threads of this process."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from autoparallel.capture import capture
from autoparallel.strategies.space import StrategySpace
from benchmarks.model_zoo import Candidate, Ranks, truth, worst_error
from cost_models import Cluster
from tests.support.programs import Program

#: Class-parallel cross-entropy computes in float32, everything else in float64.
TOLERANCE = 1e-5


@cache
def cluster(num_ranks: int) -> Cluster:
    return Cluster.load("h100-sxm", num_devices=num_ranks)


def error_of(program: Program, mesh: tuple[int, ...], plan: int) -> tuple[float, str]:
    """The largest error of any tensor on any rank under the plan of this seed, and where."""
    return next(errors_of(program, [mesh], [plan]))


def errors_of(program: Program, meshes: Sequence[tuple[int, ...]], plans: Sequence[int]) -> Iterator[tuple[float, str]]:
    """As `error_of`, for each mesh and plan."""
    model, inputs = program.model(), program.values()
    inputs["x"].requires_grad_(False)
    expected, graph = truth(model, inputs), capture(model, (), inputs)
    for mesh in meshes:
        space = StrategySpace(graph, mesh)
        for plan in plans:
            yield error_under(model, inputs, expected, space, plan)


def error_under(model: torch.nn.Module, inputs: dict[str, torch.Tensor], expected: Any, space: StrategySpace, plan: int
                ) -> tuple[float, str]:
    draw, mesh = random.Random(plan), space.mesh_shape
    strategies = tuple(draw.choice(strategy_set.strategies) for strategy_set in space.strategy_sets)
    model.zero_grad()
    return worst_error(expected, Ranks(Candidate(space, strategies), cluster(math.prod(mesh))).step(model, inputs))
