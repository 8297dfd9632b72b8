"""Random models under random plans compute what one process computes: loss, output, every gradient.

Models are drawn from `tests.programs`, plans label by label from the whole strategy space; ranks are threads of this
process (`benchmarks.in_process`) and run the emitted programs as they are, in float64. ``-m slow`` runs 5,000 cases.
"""

from __future__ import annotations

import math
import random
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

from autoparallel.capture import capture
from autoparallel.rules.space import StrategySpace
from benchmarks.model_zoo import Candidate, Ranks, truth, worst_error
from cost_models import Cluster
from tests.programs import Program, programs

MESHES = [(2,), (3,), (4,), (2, 2)]
#: Class-parallel cross-entropy computes in float32, everything else in float64.
TOLERANCE = 1e-5


@cache
def cluster(num_ranks: int) -> Cluster:
    return Cluster.load("h100-sxm", num_devices=num_ranks)


def error_of(program: Program, mesh: tuple[int, ...], plan: int) -> tuple[float, str]:
    """The largest error of any tensor on any rank under the plan of this seed, and where."""
    model, inputs = program.model(), program.values()
    inputs["x"].requires_grad_(False)
    expected, graph = truth(model, inputs), capture(model, (), inputs)
    space, draw = StrategySpace(graph, mesh), random.Random(plan)
    labels = tuple(draw.choice(strategies.labels) for strategies in space.strategies)
    model.zero_grad()
    return worst_error(expected, Ranks(Candidate(space, labels), cluster(math.prod(mesh))).step(model, inputs))


def run_cases(number: int, count: int) -> None:
    """``count`` random cases, the same for the same ``number``."""

    @seed(number)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(programs(), st.sampled_from(MESHES), st.integers(0, 2**16))
    def check(program: Program, mesh: tuple[int, ...], plan: int) -> None:
        note(f"{program}\nmesh {mesh}, plan {plan}")
        error, name = error_of(program, mesh, plan)
        assert error <= TOLERANCE, name

    torch.set_num_threads(1)
    check()


def test_random_models_under_random_plans() -> None:
    run_cases(0, 50)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(1, 21))
def test_many_random_models_under_random_plans(number: int) -> None:
    """Twenty times 250."""
    run_cases(number, 250)
