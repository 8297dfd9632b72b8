"""The least that ranks of a pipeline hold of its blocks, beside random divisions of the blocks into stages."""

from __future__ import annotations

import numpy as np
import pytest

from autoparallel.planning.least_in_flight import first_waits, least_in_flight
from autoparallel.plans import Hybrid
from autoparallel.pricing import equal_stages_s
from autoparallel.schedule.in_flight import in_flight
from autoparallel.schedule.pipeline_tasks import StageTimes, simulated_s
from cost_models.pipeline import pipeline_s

SHAPES = [(2, 2, 2), (2, 6, 4), (4, 8, 4), (4, 16, 4), (4, 8, 8), (3, 6, 6), (4, 8, 6), (8, 16, 16), (2, 2, 4),
          (4, 4, 6), (3, 3, 40), (2, 4, 16)]
#: Of which the seconds are simulated for each number of micro-batches, or stages are waited for all the same.
WAITING = [shape for shape in SHAPES if shape != (2, 4, 16)]


def steps(ranks: int, stages: int, micro_batches: int, count: int = 60) -> tuple[Hybrid, np.ndarray, list[float]]:
    """A pipeline, random shares of its blocks by stage, and the seconds of a step with each, if a micro-batch of all
    blocks takes one second on one rank."""
    rng = np.random.default_rng(0)
    step = Hybrid(micro_batches, stages, ranks, "interleaved" if stages > ranks else "1f1b")
    shares = rng.random((count, stages)) ** rng.choice([0.1, 0.3, 1.0, 4.0], (count, 1))
    shares /= shares.sum(axis=1, keepdims=True)
    found = []
    for one in shares:
        forward = rng.random()
        times = [StageTimes(forward * share, (1 - forward) * share) for share in one.tolist()]
        found.append(max(simulated_s(step, times), equal_stages_s(step, float(micro_batches))))
    return step, shares, found


@pytest.mark.parametrize("shape", WAITING)
def test_no_step_is_shorter_than_its_waits(shape: tuple[int, int, int]) -> None:
    step, shares, seconds = steps(*shape)
    rows = [row for rank in range(step.pipeline_ranks) for row in first_waits(step, rank)]
    assert len(rows) == step.stages
    for one, step_s in zip(shares, seconds, strict=True):
        assert max(sum(times * one[stage] for stage, times in row.items()) for row in rows) <= step_s + 1e-9


@pytest.mark.parametrize("shape", SHAPES)
def test_no_division_holds_less(shape: tuple[int, int, int]) -> None:
    step, shares, seconds = steps(*shape)
    held = np.array([in_flight(step, stage) for stage in range(step.stages)])
    for one, step_s in zip(shares, seconds, strict=True):
        assert least_in_flight(step, step_s) <= one @ held + 1e-6


def test_a_short_step_holds_as_much_as_equal_stages() -> None:
    """Without the waits at each stage a rank would have all blocks where the fewest micro-batches are in flight."""
    step = Hybrid(micro_batches=16, stages=64, pipeline_ranks=16, schedule="interleaved")
    even = np.mean([in_flight(step, stage) for stage in range(64)])
    shortest = pipeline_s([1 / 16] * 16, 16, virtual=4)
    assert 0.98 * even < least_in_flight(step, shortest) <= even
    assert least_in_flight(step, 1.3 * shortest) > 0.8 * even
    assert least_in_flight(step, 15 * shortest) == min(in_flight(step, stage) for stage in range(64))
    assert least_in_flight(step, 0.99 * shortest) == float("inf")
