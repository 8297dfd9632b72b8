"""Pipelines in closed form agree with the simulation; what is in flight agrees with the papers."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cost_models import ClusterError
from cost_models.memory import in_flight_micro_batches
from cost_models.pipeline import one_forward_one_backward, pipeline_s
from cost_models.timeline import simulate

STAGES = st.lists(st.floats(0.5, 4.0), min_size=1, max_size=6)


@given(st.integers(1, 6), st.integers(1, 12), st.floats(0.1, 3.0))
@settings(max_examples=40)
def test_equal_stages_agree_with_the_simulation(stages: int, micro_batches: int, forward_s: float) -> None:
    tasks = one_forward_one_backward([forward_s] * stages, [2 * forward_s] * stages, micro_batches)
    assert pipeline_s([3 * forward_s] * stages, micro_batches) == pytest.approx(simulate(tasks).total_s)


@given(STAGES, st.integers(1, 12))
@settings(max_examples=60)
def test_unequal_stages_are_bounded_by_it(forward_s: list[float], micro_batches: int) -> None:
    """The closed form waits for the slowest stage once more than needed where that lies inside: never too low, and too
    high by no more than the stages on one side of it."""
    backward_s = [2 * seconds for seconds in forward_s]
    each = [3 * seconds for seconds in forward_s]
    measured = simulate(one_forward_one_backward(forward_s, backward_s, micro_batches)).total_s
    closed = pipeline_s(each, micro_batches)
    assert measured <= closed * (1 + 1e-9)
    assert closed - measured <= sum(each) - max(each) + 1e-9


@given(st.lists(st.tuples(st.floats(0.5, 4.0), st.integers(1, 3)), min_size=1, max_size=4), st.integers(1, 4))
@example([(2.0, 2), (1.0, 1), (3.0, 3), (1.0, 1)], 6)  # one forward for each rank to come is too few
@settings(max_examples=60)
def test_stages_on_several_ranks_are_bounded_by_it(stages: list[tuple[float, int]], rounds: int) -> None:
    """Never too low, and too high by filling and draining at most."""
    forward_s, replicas = [seconds for seconds, _ in stages], [ranks for _, ranks in stages]
    backward_s, each = [2 * seconds for seconds in forward_s], [3 * seconds for seconds in forward_s]
    micro_batches = rounds * math.lcm(*replicas)
    measured = simulate(one_forward_one_backward(forward_s, backward_s, micro_batches, replicas)).total_s
    closed = pipeline_s(each, micro_batches, replicas=replicas)
    slowest = max(seconds / ranks for seconds, ranks in zip(each, replicas, strict=True))
    assert measured <= closed * (1 + 1e-9)
    assert closed - measured <= sum(each) - math.gcd(*replicas) * slowest + 1e-9


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
@settings(max_examples=30)
def test_ranks_dealt_out_as_work_is_all_work_all_the_time(replicas: list[int]) -> None:
    """Once the pipeline is full, a micro-batch more takes what a rank's share of it takes."""
    whole = math.lcm(*replicas)

    def measured(micro_batches: int) -> float:
        work = [float(ranks) for ranks in replicas]
        tasks = one_forward_one_backward(work, [2 * seconds for seconds in work], micro_batches, replicas)
        return simulate(tasks).total_s

    assert measured(10 * whole) - measured(8 * whole) == pytest.approx(2 * whole * 3.0)


@given(STAGES, st.integers(1, 12), st.integers(1, 4))
def test_more_never_takes_less(each: list[float], micro_batches: int, virtual: int) -> None:
    least = pipeline_s(each, micro_batches, virtual)
    assert pipeline_s(each, micro_batches + 1, virtual) > least
    assert pipeline_s([*each, 1.0], micro_batches, virtual) > least
    assert pipeline_s(each, micro_batches, virtual + 1) <= least
    assert least >= micro_batches * max(each)


def test_one_stage_has_no_bubble() -> None:
    assert pipeline_s([2.0], 5) == 10.0


def test_impossible_options_are_refused() -> None:
    for bad in (([], 1, 1), ([-1.0], 1, 1), ([1.0], 0, 1), ([1.0], 1, 0)):
        with pytest.raises(ClusterError):
            pipeline_s(*bad)


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 64))
def test_the_first_stage_holds_most(stages: int, virtual: int, micro_batches: int) -> None:
    held = [in_flight_micro_batches("interleaved-1f1b", stage, stages, micro_batches, virtual)
            for stage in range(stages)]
    assert held == sorted(held, reverse=True)
    assert held[-1] >= 1 and held[0] <= micro_batches * virtual
    if virtual > 1 and micro_batches >= 2 * stages:
        assert held[0] / virtual == pytest.approx(stages * (1 + (stages - 1) / (stages * virtual)))


def test_gpipe_holds_all() -> None:
    assert in_flight_micro_batches("gpipe", 3, 4, 16, virtual=2) == 32
