"""Next best plans, explanations and conflicts, against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from autoparallel.errors import InfeasibleError, SearchError
from autoparallel.search import Edge, Node, Problem, Solution, evaluate, solve
from autoparallel.search.alternatives import alternatives, conflict, explain, pinned, solve_pinned
from tests.search.problems import all_plans, random_problem, seeds


@settings(max_examples=25)
@given(seeds)
def test_the_second_best_plan(seed: int) -> None:
    problem = random_problem(seed, limited=bool(seed % 2))
    try:
        best = solve(problem, "ilp")
    except InfeasibleError:
        return
    costs = sorted((judged.objective, plan) for plan, judged in all_plans(problem)
                   if judged.feasible and plan != best.choice)
    found = alternatives(problem, best, 1, search="ilp")
    assert [one.objective for one in found] == pytest.approx([cost for cost, _ in costs[:1]])
    for one in found:
        judged = evaluate(problem, one.choice)
        assert judged.feasible and judged.objective == one.objective and one.choice != best.choice


def test_no_alternatives_are_none() -> None:
    """It ended in an IndexError."""
    problem = random_problem(3, limited=False)
    assert alternatives(problem, solve(problem), 0) == []


def test_an_explanation_that_finds_no_plan_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no plan was found for was not told; the whole explanation ended in the search's error."""
    problem = Problem(tuple(Node(name, np.array([1.0, 2.0]), np.zeros(2)) for name in "ab"), ())
    best = solve(problem)

    def late(*_: object) -> Solution:
        raise SearchError("no plan that fits was found in 0.0 s")

    monkeypatch.setattr("autoparallel.search.alternatives.solve", late)
    chosen, other = explain(problem, best, 0, resolve=[1], time_limit_s=0.0)
    assert (chosen.pick, chosen.resolved) == (0, 2.0)
    assert (other.pick, other.alone, other.resolved) == (1, 3.0, None)


def test_alternatives_differ_in_what_matters() -> None:
    nodes = tuple(Node(f"n{i}", np.array([1.0, 1.5 + i, 4.0]), np.zeros(3)) for i in range(4))
    problem = Problem(nodes, (Edge(0, 1, np.where(np.eye(3) > 0, 0.0, 9.0)),))
    best = solve(problem)
    found = alternatives(problem, best, 3, nodes=[0, 1], min_changed=2)
    assert [one.choice[:2] for one in found] == [(1, 1), (2, 2)]
    assert found[0].objective <= found[1].objective


@settings(max_examples=25)
@given(seeds)
def test_explanations_hold(seed: int) -> None:
    problem = random_problem(seed, limited=bool(seed % 2))
    try:
        best = solve(problem, "ilp")
    except InfeasibleError:
        return
    plans = [(plan, judged) for plan, judged in all_plans(problem) if judged.feasible]
    for option in explain(problem, best, 0, resolve=range(len(problem.nodes[0].costs)), search="ilp"):
        with_it = min((judged.objective for plan, judged in plans if plan[0] == option.pick), default=math.inf)
        alone = evaluate(problem, (option.pick, *best.choice[1:]))
        assert option.alone == (alone.objective if alone.feasible else math.inf)
        assert option.resolved == pytest.approx(with_it) and option.least <= with_it + 1e-9
        assert with_it <= option.alone


def test_a_pin_that_names_nothing() -> None:
    problem = Problem((Node("a", np.zeros(2), np.zeros(2)),), ())
    with pytest.raises(SearchError, match="node 3 with choices"):
        pinned(problem, {3: [0]})
    assert solve_pinned(problem, {0: [1]}).choice == (1,)


def chain(limit: float) -> Problem:
    """Three nodes that must take equal choices; choice 0 is big and cheap."""
    nodes = tuple(Node(name, np.array([1.0, 2.0]), np.array([40.0, 10.0]), (0, 3)) for name in "abc")
    same = np.where(np.eye(2) > 0, 0.0, np.inf)
    return Problem(nodes, (Edge(0, 1, same), Edge(1, 2, same)), limit)


def test_pins_that_contradict_each_other() -> None:
    pins = {"a big": {0: [0]}, "b any": {1: [0, 1]}, "c small": {2: [1]}}
    found = conflict(chain(math.inf), pins)
    assert found is not None and found.pins == ("a big", "c small") and not found.memory and found.minimal
    assert found.needed_bytes == math.inf
    assert conflict(chain(math.inf), {"a big": {0: [0]}}) is None


def test_pins_that_need_more_memory_than_there_is() -> None:
    found = conflict(chain(50.0), {"a big": {0: [0]}, "b any": {1: [0, 1]}})
    assert found is not None and found.pins == ("a big",) and found.memory and found.minimal
    assert (found.needed_bytes, found.without) == (120.0, {"a big": 30.0})
    assert conflict(chain(50.0), {"a small": {0: [1]}}) is None


def test_no_pin_is_to_blame() -> None:
    found = conflict(chain(20.0), {"a small": {0: [1]}})
    assert found is not None and found.pins == () and found.needed_bytes == 30.0
