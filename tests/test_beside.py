"""Work beside a search: the same in a process of its own as in turn, however either goes; no process is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from autoparallel import Plan, clock
from autoparallel.planning import beside
from autoparallel.planning.beside import LATER_S, Beside, Task
from cost_models import Cluster
from tests.support.captured import plan_of

pytestmark = pytest.mark.ranks
UNIT_S = clock.RATES["moves tried"]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that were made; all searches make one at once."""
    pids, fork = list[int](), os.fork

    def noted() -> int:
        if pid := fork():
            pids.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", noted)
    monkeypatch.setattr(beside, "may_fork", lambda: True)
    monkeypatch.setattr(beside, "FORK_S", 0.0)
    return pids


def is_left(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def count(seconds: float) -> None:
    """As work that takes so many counted seconds."""
    clock.did("moves tried", seconds / UNIT_S)


def pieces() -> Task:
    """Pieces of many lengths; tells of each when it ended and what it had heard; rests after every seventh."""
    heard, number = list[Any](), 0
    count(0.05)
    while True:
        heard += yield None if number % 7 == 3 else [(clock.now(), tuple(heard))]
        if "end" in heard:
            return
        number += 1
        count(0.01 + 0.13 * (number * 37 % 11) / 11)


def searched(begin: Callable[[], Task], each: Callable[[int], None] = lambda number: None) -> list[tuple[float, Any]]:
    """What a search hears, and when, that tells its number now and then; last its end."""
    found = list[tuple[float, Any]]()
    with clock.counted(1e3), Beside(begin) as other:
        for number in range(60):
            count(0.02 + 0.3 * (number * 29 % 13) / 13)
            each(number)
            found += [(clock.now(), one) for one in other.hear()]
            if number % 3 == 0:
                other.tell(number)
        other.tell("end")
        rest = other.last()
        return [*found, *((clock.now(), one) for one in rest), (clock.now(), "end")]


def test_a_process_finds_and_hears_what_work_in_turn_does(forked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    apart = searched(pieces, lambda number: time.sleep(0.01 * (number % 3)))
    assert len(forked) == 1 and not is_left(forked[0])
    monkeypatch.setattr(beside, "may_fork", lambda: False)
    in_turn = searched(pieces)
    assert len(forked) == 1 and len(in_turn) > 60
    assert apart == in_turn


def test_what_is_told_is_heard_later_by_each_clock() -> None:
    heard = [(now, *told) for now, told in searched(pieces)[:-1]]
    assert all(now >= found + LATER_S for now, found, _ in heard[:20])
    spans = [0.02 + 0.3 * (number * 29 % 13) / 13 for number in range(60)]
    told_s = [sum(spans[: number + 1]) for number in range(0, 60, 3)]
    for _, found, numbers in heard:
        assert all(told_s[at] + LATER_S <= found + 1e-9 for at, number in enumerate(numbers) if number != "end")


def test_work_goes_on_in_turn_where_its_process_ends(forked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def end(number: int) -> None:
        if number == 30:
            os.kill(forked[0], signal.SIGKILL)

    ended = searched(pieces, end)
    assert not is_left(forked[0])
    monkeypatch.setattr(beside, "may_fork", lambda: False)
    assert ended == searched(pieces)


def failing() -> Task:
    for _ in range(5):
        yield ["fine"]
        count(0.2)
    raise ValueError("no such bound")


@pytest.mark.parametrize("may_fork", [True, False])
def test_an_error_of_the_work_is_raised_in_the_search(forked: list[int], monkeypatch: pytest.MonkeyPatch, may_fork: bool
                                                      ) -> None:
    monkeypatch.setattr(beside, "may_fork", lambda: may_fork)
    with pytest.raises(ValueError, match="no such bound") as raised:
        searched(failing)
    if may_fork:
        assert "in failing" in "".join(raised.value.__notes__)
    assert len(forked) == may_fork and not any(map(is_left, forked))


def test_an_interrupted_search_leaves_no_process(forked: list[int]) -> None:
    def interrupt(number: int) -> None:
        if number == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        searched(pieces, interrupt)
    assert len(forked) == 1 and not is_left(forked[0])


def test_short_searches_and_single_processors_make_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise AssertionError("a process was made")

    monkeypatch.setattr(os, "fork", refused)
    with clock.counted(1e3), Beside(pieces) as other:
        count(0.9 * beside.FORK_S)
        other.hear()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert not beside.may_fork()
    searched(pieces)


def answer(plan: Plan) -> tuple[Any, ...]:
    evidence = plan.evidence
    return (plan.mesh_shape, plan.hybrid, plan.strategies, plan.prediction.step_s, evidence.combinations,
            evidence.step_bound_s, clock.spent_s())


def test_plans_are_the_same_with_and_without_a_process(forked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster.load("h100-sxm", num_devices=8)
    first = answer(plan_of("llama", cluster, joint=True, time_limit_s=2.5))
    assert forked and not any(map(is_left, forked))
    monkeypatch.setattr(beside, "may_fork", lambda: False)
    count_before = len(forked)
    assert answer(plan_of("llama", cluster, joint=True, time_limit_s=2.5)) == first
    assert len(forked) == count_before
