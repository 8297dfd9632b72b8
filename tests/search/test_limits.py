"""Searches that end on time: wherever the clock stops them, the plan fits and the bound holds."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoparallel import clock
from autoparallel.errors import InfeasibleError, SearchError
from autoparallel.search import Edge, MemoryLimitError, Node, Problem, evaluate, solve
from autoparallel.search.high_width import solve as high_width
from autoparallel.search.high_width.aggregation import Merger
from autoparallel.search.high_width.event_form import Compact
from autoparallel.search.high_width.trws import Messenger
from autoparallel.search.ilp import highs
from autoparallel.search.low_width.bucket_elimination import Eliminator, TimeIsUpError
from autoparallel.search.model.dominance import drop_dominated
from tests.search.problems import all_plans, block_chain, grid, random_problem, seeds, two_axes
from tests.support.tiers import slow

LATE_S = 1.0
WAYS = {"as it is": {}, "expensive": {"AT_ONCE_CELLS": 0.0}, "wide": {"WORK_CELLS": 0.0}, "whole": {"SCREEN_CELLS": 0.0,
        "AT_ONCE_CELLS": 0.0}}


def stop_after(patch: pytest.MonkeyPatch, looks: int) -> float:
    """A clock that advances when it is looked at, and the limit that so many looks are."""
    ticks = itertools.count()
    set_clock(patch, lambda: next(ticks) * 1e-3)
    return looks * 1e-3


def set_clock(patch: pytest.MonkeyPatch, now: Callable[[], float]) -> None:
    patch.setattr(clock, "now", now)


@settings(max_examples=60)
@given(seeds, st.integers(0, 300), st.sampled_from(sorted(WAYS)))
@example(3, 0, "wide")
@example(206, 277, "expensive")  # the least memory is not known in the time
def test_wherever_the_clock_stops_a_search_its_answer_holds(seed: int, looks: int, way: str) -> None:
    problem = random_problem(seed, limited=bool(seed % 4), max_nodes=5)
    plans = [judged for _, judged in all_plans(problem)]
    least = min((judged.objective for judged in plans if judged.feasible), default=math.inf)
    needed = min((judged.peak_bytes for judged in plans if judged.objective < math.inf), default=math.inf)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in WAYS[way].items():
            patch.setattr(f"autoparallel.search.solver.{name}", value)
        limit = stop_after(patch, looks)
        for search in ("auto", "recursive"):
            try:
                found = solve(problem, search, time_limit_s=limit)
            except MemoryLimitError as error:
                assert least == math.inf and problem.limit < error.needed_bytes <= needed
            except InfeasibleError:
                assert needed == math.inf
            except SearchError:
                continue  # no plan in time
            else:
                judged = evaluate(problem, found.choice)
                assert judged.feasible and judged.objective == found.objective >= least
                assert found.lower_bound <= least * (1 + 1e-9) + 1e-9
                assert found.stop_reason != "optimal" or found.objective <= least * (1 + 1e-5)


def test_an_elimination_ends_on_time_and_can_go_on() -> None:
    problem = block_chain(4)
    eliminator, fresh = Eliminator.of(problem).until(0.0), Eliminator.of(problem)
    for step in (eliminator.solve, eliminator.reduced_costs):
        with pytest.raises(TimeIsUpError):
            step(problem.costs)
    eliminator.until(math.inf)
    assert eliminator.solve(problem.costs) == fresh.solve(problem.costs)
    for one, other in zip(eliminator.reduced_costs(problem.costs), fresh.reduced_costs(problem.costs), strict=True):
        assert np.array_equal(one, other)


def test_after_the_deadline_no_choice_is_dropped() -> None:
    problem = random_problem(0, limited=True)
    assert drop_dominated(problem).problem.sizes.sum() < problem.sizes.sum()
    assert drop_dominated(problem, deadline=0.0).problem.sizes.sum() == problem.sizes.sum()


def ends_on_time(problem: Problem, limit_s: float) -> None:
    """By CPU seconds, so that the machine may be busy."""
    with pytest.MonkeyPatch.context() as patch:
        set_clock(patch, time.process_time)
        start = time.process_time()
        found = solve(problem, "auto", time_limit_s=limit_s)
        assert time.process_time() - start < limit_s * 1.05 + LATE_S
    assert evaluate(problem, found.choice).feasible and 0 < found.lower_bound <= found.objective


@pytest.mark.parametrize("limit_s", [0.5, pytest.param(3.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [pytest.param((60, 60, 12), marks=pytest.mark.slow), (5, 40, 12)])
def test_a_short_limit_is_kept(size: tuple[int, int, int], limit_s: float) -> None:
    """A graph too wide to eliminate, and one where an elimination takes a good part of the time."""
    ends_on_time(grid(*size, room=0.3), limit_s)


@pytest.mark.slow
def test_a_short_limit_is_kept_where_choices_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing choices with one another, where there are too many cells for messages, takes seconds."""
    monkeypatch.setattr("autoparallel.search.solver.SCREEN_CELLS", 0.0)
    problem = two_axes(0, 40, 20, weights=True)
    least = sum(float(node.usages.min()) for node in problem.nodes[40:])
    ends_on_time(replace(problem, limit=1.5 * least + 2.0), 1.0)


@pytest.mark.parametrize(("limit_s", "sweeps", "has_parts"), [(3.0, 1, False), slow(12.0, 6, True)])
def test_in_haste_there_is_a_plan_from_one_sweep(limit_s: float, sweeps: int, has_parts: bool,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing but sweeps takes time, a second each: with more of it there are more, and parts are bettered in the
    rest, in which no step of prices would end."""
    done, sweep = [], Messenger.sweep
    monkeypatch.setattr(Messenger, "sweep", lambda *args: done.append(1) or sweep(*args))
    set_clock(monkeypatch, lambda: float(len(done)))
    for name, value in (("SMALL_CELLS", -1), ("BRANCH_CELLS", -1), ("TURN_ROUNDS", 5)):
        monkeypatch.setattr(high_width, name, value)
    problem = grid(6, 6, 4, room=0.3)
    search = high_width.WideSearch(problem, limit_s, None, lambda outcome: None)
    search.run()
    found = search.outcome
    assert found.choice is not None and evaluate(problem, found.choice).feasible and found.lower_bound > 0
    assert len(done) == sweeps and ("parts" in found.seconds) == has_parts and found.stop_reason == "time limit"


def test_a_search_leaves_nothing_to_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's collector waits while it runs, so that what refers to itself would stay for long."""
    monkeypatch.setattr(high_width, "SMALL_CELLS", -1)
    monkeypatch.setattr("autoparallel.search.solver.WORK_CELLS", 0.0)
    problem = grid(6, 6, 4, room=0.3)
    gc.collect()
    gc.disable()
    try:
        assert {"parts", "branches"} <= solve(problem).seconds.keys()
        assert not [kept for kept in gc.get_objects() if type(kept) in (Compact, Messenger, Merger)]
    finally:
        gc.enable()


@pytest.mark.parametrize("answer", [
    pytest.param("StatusNotOk: kError", marks=pytest.mark.slow), (None, 0.0, "NUMERICAL_ERROR", 0, 0), None])
def test_failures_of_highs_lose_no_plan(answer: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """It errs on some of the contest's large instances, minutes after there is a plan."""
    asked = []
    monkeypatch.setattr(highs._process, "ask", lambda *_: asked.append(1) or answer)
    for seed in range(30):
        problem = random_problem(seed, limited=True)
        costs = [judged.objective for _, judged in all_plans(problem) if judged.feasible]
        if not costs:
            continue
        for search in ("auto", "ilp"):
            with suppress(SearchError):  # no plan found
                found = solve(problem, search)
                assert evaluate(problem, found.choice).feasible and found.lower_bound <= min(costs) * (1 + 1e-9)
                assert found.stop_reason != "optimal" or found.objective <= min(costs) * (1 + 1e-5)
    assert asked and ("stopped without an answer" in caplog.text) == (answer is not None)


def test_a_trial_that_cannot_fit_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search from a choice, of which there are many, says a bound; the others say what is enough, which takes as
    long as a search."""
    nodes = [Node(name, np.zeros(2), np.array([4.0, 8.0]), (0, 2)) for name in "ab"]
    problem = Problem(nodes, [Edge(0, 1, np.zeros((2, 2)))], 6.0)
    with pytest.raises(MemoryLimitError) as explained:
        solve(problem, "exact", first=(1, 1))
    assert explained.value.needed_bytes == explained.value.sufficient_bytes == 8.0
    monkeypatch.setattr("autoparallel.search.solver.lowest_memory", lambda *_: pytest.fail("explained"))
    with pytest.raises(MemoryLimitError) as bounded:
        solve(problem, "local", first=(1, 1))
    assert 6.0 < bounded.value.needed_bytes <= 8.0
