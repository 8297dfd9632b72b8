"""The simulator against closed forms and against what cannot be otherwise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.errors import TimelineError
from cost_models.timeline import Task, Timeline, equal_slowdown, simulate

BOTH = equal_slowdown(["compute", "network"], 1.5)


def pipeline(num_stages: int, num_micro_batches: int, forward_s: list[float], send_s: float = 0.0) -> Timeline:
    """Forward passes only: micro-batch m on stage s after stage s - 1 has sent it."""
    tasks: list[Task] = []
    arrived: dict[tuple[int, int], int] = {}
    for m in range(num_micro_batches):
        for s in range(num_stages):
            before = (arrived[s - 1, m],) if s else ()
            tasks.append(Task(forward_s[s], after=before, rank=s, name=f"{s}F{m}"))
            tasks.append(Task(send_s, "network", after=(len(tasks) - 1,), rank=s, name=f"{s}SEND{m}"))
            arrived[s, m] = len(tasks) - 1
    return simulate(tasks)


def test_streams_run_in_order_and_tasks_wait() -> None:
    line = simulate([Task(2.0), Task(3.0, "network", after=(0,)), Task(1.0), Task(1.0, after=(1,))])
    assert line.start_s.tolist() == [0, 2, 2, 5]
    assert line.end_s.tolist() == [2, 5, 3, 6]
    assert (line.total_s, line.busy_s(), line.busy_s(stream="network")) == (6, 4, 3)
    assert line.exposed_s() == 2


def test_nothing_takes_no_time() -> None:
    assert simulate([]).total_s == 0
    line = simulate([Task(0.0), Task(0.0, after=(0,))])
    assert (line.total_s, line.exposed_s()) == (0, 0)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (4, 8), (3, 2), (8, 1)])
def test_pipelines_follow_the_closed_form(stages: int, micro_batches: int) -> None:
    """Sum of stages + (m - 1) x slowest (Alpa); equal stages: (m + p - 1) t (GPipe)."""
    durations = [1.0 + 0.25 * (s % 3) for s in range(stages)]
    line = pipeline(stages, micro_batches, durations)
    assert line.total_s == pytest.approx(sum(durations) + (micro_batches - 1) * max(durations))
    equal = pipeline(stages, micro_batches, [2.0] * stages)
    assert equal.total_s == pytest.approx(2.0 * (micro_batches + stages - 1))
    assert equal.total_s - equal.busy_s(stages - 1) == pytest.approx(2.0 * (stages - 1))    # the bubble


def test_sends_hide_behind_compute() -> None:
    line = pipeline(2, 8, [1.0, 1.0], send_s=0.5)
    assert line.total_s == pytest.approx(1.0 + 0.5 + 8.0 + 0.5)
    assert line.exposed_s(0) == pytest.approx(0.5)    # only the last


def test_overlap_slows_both_sides_down() -> None:
    """Both take 3 alone. Together at 1/1.5: 3 takes 4.5; then nothing is left of either."""
    line = simulate([Task(3.0), Task(3.0, "network")], BOTH)
    assert line.end_s.tolist() == [4.5, 4.5]
    later = simulate([Task(3.0), Task(6.0, "network")], BOTH)
    assert later.end_s.tolist() == pytest.approx([4.5, 7.5])    # 3 left at full speed
    assert later.exposed_s() == pytest.approx(3.0)
    assert simulate([Task(3.0), Task(3.0, "network", rank=1)], BOTH).total_s == 3.0    # ranks do not disturb each other


def test_factors_by_set_and_stream() -> None:
    """Mist's form: other factors for each set of busy streams; unknown sets take the largest of known ones in them."""
    pairs = {frozenset({"compute", "network"}): {"compute": 1.2, "network": 2.0}}
    line = simulate([Task(10.0), Task(1.0, "network")], pairs)
    assert line.end_s[1] == pytest.approx(2.0)
    assert line.end_s[0] == pytest.approx(2.0 + (10.0 - 2.0 / 1.2))
    three = simulate([Task(10.0), Task(1.0, "network"), Task(1.0, "copy")], pairs)
    assert three.end_s[1] == pytest.approx(2.0)
    assert three.end_s[2] == pytest.approx(1.0)


@st.composite
def programs(draw: st.DrawFn) -> list[Task]:
    tasks = []
    for number in range(draw(st.integers(0, 14))):
        after = draw(st.lists(st.integers(0, number - 1), max_size=3)) if number else []
        tasks.append(Task(draw(st.floats(0, 10)), draw(st.sampled_from(["compute", "network", "copy"])), tuple(after),
                          rank=draw(st.integers(0, 1))))
    return tasks


@settings(max_examples=80)
@given(programs(), st.floats(1.0, 3.0))
def test_invariants_of_every_program(tasks: list[Task], factor: float) -> None:
    free, slowed = simulate(tasks), simulate(tasks, equal_slowdown(["compute", "network", "copy"], factor))
    durations = np.array([task.duration_s for task in tasks])
    assert free.end_s - free.start_s == pytest.approx(durations)
    assert (slowed.end_s - slowed.start_s >= durations - 1e-9).all()
    assert (slowed.end_s - slowed.start_s <= durations * factor + 1e-9).all()
    for line in (free, slowed):
        for number, task in enumerate(tasks):
            assert all(line.start_s[number] >= line.end_s[before] - 1e-9 for before in task.after)
        for rank in (0, 1):
            assert line.busy_s(rank) + line.exposed_s(rank) <= line.total_s + 1e-9
    assert free.total_s <= durations.sum() + 1e-9


@given(programs())
@settings(deadline=None)
def test_without_slowdown_the_same_as_by_events(tasks: list[Task]) -> None:
    """A factor of 1 slows nothing down, and is simulated event by event."""
    streams = sorted({task.stream for task in tasks} | {"compute", "other"})
    plain, by_events = simulate(tasks), simulate(tasks, equal_slowdown(streams, 1.0))
    assert plain.start_s.tolist() == by_events.start_s.tolist() and plain.end_s.tolist() == by_events.end_s.tolist()


def test_large_programs_are_quick() -> None:
    import time

    start = time.perf_counter()
    pipeline(16, 256, [1e-3] * 16, send_s=1e-4)
    assert time.perf_counter() - start < 3.0


def test_impossible_programs_are_refused() -> None:
    with pytest.raises(TimelineError, match=r"never start, .* 0 .a., 1 .b."):
        simulate([Task(1.0, after=(1,), name="a"), Task(1.0, "network", after=(0,), name="b")])
    with pytest.raises(TimelineError, match="later on their stream"):
        simulate([Task(1.0, after=(1,)), Task(1.0)])
    with pytest.raises(TimelineError, match=r"comes after .7., but there are 1 tasks"):
        simulate([Task(1.0, after=(7,))])
    with pytest.raises(TimelineError, match="duration_s must not be -1"):
        simulate([Task(-1.0)])
