"""The judge, the file format, presolve, elimination, memory rows and prices, each by itself."""

from __future__ import annotations

import copy
import json
import math
import pickle
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from autoparallel import clock
from autoparallel.errors import SearchError
from autoparallel.search import Edge, Node, Problem, evaluate, solve
from autoparallel.search.low_width import bucket_elimination
from autoparallel.search.low_width.bucket_elimination import Eliminator, Sweep, Tables, elimination_order
from autoparallel.search.low_width.lagrangian import lowest_peak, raise_bound
from autoparallel.search.low_width.local_search import LocalState, Neighbourhood, descend, repair
from autoparallel.search.low_width.repeated_subgraphs import repeated_subgraphs
from autoparallel.search.low_width.variable_fixing import Priced
from autoparallel.search.model import iopddl
from autoparallel.search.model.dominance import drop_dominated, keep
from autoparallel.search.model.memory_rows import least_peak, memory_of
from tests.search.problems import all_plans, block_chain, random_problem, seeds

NO_EDGES = {"nodes": [], "costs": []}


def test_judge_counts_half_open_intervals_and_edges() -> None:
    nodes = (Node("a", np.array([1.0, 2.0]), np.array([3.0, 4.0]), (0, 2)),
             Node("b", np.array([5.0]), np.array([7.0]), (2, 4)), Node("c", np.array([1.0]), np.array([99.0]), (1, 1)))
    edges = (Edge(0, 1, np.array([[10.0], [0.0]]), np.array([[0.0], [2.0]]), (1, 3)),)
    problem = Problem(nodes, edges, 9.0)
    judged = evaluate(problem, (1, 0, 0))
    assert (judged.objective, judged.peak_bytes, judged.feasible, judged.peak_time) == (8.0, 9.0, True, 2)
    assert evaluate(replace(problem, limit=8.0), (1, 0, 0)).feasible is False
    with pytest.raises(SearchError, match="choice 2 of node 0"):
        evaluate(problem, (2, 0, 0))


@pytest.mark.parametrize("seed", range(5))
def test_a_problem_that_was_searched_can_be_copied(seed: int) -> None:
    problem = random_problem(seed, limited=False)
    found = solve(problem, "exact")
    for again in (pickle.loads(pickle.dumps(problem)), copy.deepcopy(problem)):
        assert evaluate(again, found.choice) == evaluate(problem, found.choice)
        assert solve(again, "exact").choice == found.choice


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Node("a", np.array([math.nan]), np.zeros(1)), "costs must be numbers"),
    (lambda: Node("a", np.array([-1.0]), np.zeros(1)), "costs must be numbers"),
    (lambda: Node("a", np.zeros(1), np.array([math.inf])), "usages must be finite"),
    (lambda: Node("a", np.zeros(1), np.zeros(1), (2, 1)), "ends before it starts"),
    (lambda: Node("a", np.zeros(1), np.zeros(1), strategies=()), "0 strategies for 1 choices"),
    (lambda: Edge(1, 1, np.zeros((1, 1))), "two different nodes"),
    (lambda: Edge(0, 1, np.zeros((1, 1)), np.zeros((1, 2))), "must have the shape of costs"),
    (lambda: Problem((Node("a", np.zeros(1), np.zeros(1)),), (Edge(0, 3, np.zeros((1, 1))),)), "names node 3"),
    (lambda: Problem((Node("a", np.zeros(1), np.zeros(1)),), (), -1.0), "limit must be >= 0"),
])
def test_malformed_problems_are_refused_at_birth(make: object, message: str) -> None:
    with pytest.raises(SearchError, match=message):
        make()  # type: ignore[operator]


@settings(max_examples=30)
@given(seeds)
def test_files_keep_problems(seed: int) -> None:
    problem = random_problem(seed, limited=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.json.gz"
        iopddl.write(problem, path)
        again = iopddl.read(path)
    assert again.limit == problem.limit
    for choice, judged in all_plans(problem):
        extended = [*choice, *(choice[e.source] * e.costs.shape[1] + choice[e.target]
                               for e in problem.edges if e.usages is not None)]
        assert evaluate(again, extended) == judged


def test_a_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"problem": {"nodes": {}}}')
    with pytest.raises(SearchError, match=r"bad\.json: not a problem in IOPDDL JSON"):
        iopddl.read(path)


def document(**changes: object) -> str:
    nodes = {"intervals": [[0, 2], [0, 2]], "costs": [[1, 2], [1, 2]], "usages": [[3, 4], [3, 4]]}
    edges = {"nodes": [[0, 1]], "costs": [[0, 1e18, 1, 0]]}
    whole = {"name": 'a[0] "[1, 2]"', "nodes": nodes, "edges": edges, "usage_limit": 8}
    return json.dumps({"problem": whole | changes})


def test_a_file_has_each_array_once(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text(document())
    problem = iopddl.read(path)
    first, second = problem.nodes
    assert problem.name == 'a[0] "[1, 2]"' and (first.name, second.name) == ("n0", "n1")
    assert first.costs is second.costs and first.usages is second.usages
    assert problem.edges[0].costs.tolist() == [[0, math.inf], [1, 0]] and problem.limit == 8.0


@pytest.mark.parametrize("changes", [
    {"edges": {"nodes": [[0, 1]], "costs": [0]}}, {"edges": {"nodes": [[0, 1]], "costs": [[[1, 2, 3, 4]]]}},
    {"edges": {"nodes": [0, 1], "costs": []}}, {"edges": {"nodes": [[0, 1]], "costs": [[1, 2, 3]]}},
    {"edges": {"nodes": [[1, 1]], "costs": [[1, 2, 3, 4]]}}, {"edges": {"nodes": [[0, 5]], "costs": [[1, 2, 3, 4]]}},
    {"nodes": {"intervals": [[0, 2], [2, 0]], "costs": [[1], [1]], "usages": [[3], [3]]}, "edges": NO_EDGES},
    {"nodes": {"intervals": [[0, 2]], "costs": [[1], [1]], "usages": [[3], [3]]}, "edges": NO_EDGES},
])
def test_a_malformed_file_is_an_error(changes: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(document(**changes))
    with pytest.raises(SearchError):
        iopddl.read(path)


@settings(max_examples=60)
@given(seeds)
def test_presolve_keeps_an_optimum(seed: int) -> None:
    problem = random_problem(seed, limited=bool(seed % 2))
    reduced = drop_dominated(problem)
    plans = all_plans(problem)
    best = min((judged.objective for _, judged in plans if judged.feasible), default=math.inf)
    found = min((judged.objective for _, judged in all_plans(reduced.problem) if judged.feasible), default=math.inf)
    assert found == best
    for choice, judged in all_plans(reduced.problem):
        assert evaluate(problem, reduced.restore(choice)) == judged
        assert reduced.forward(reduced.restore(choice)) == choice


@settings(max_examples=20)
@given(seeds)
def test_dominated_choices_are_those_that_another_is_at_most_in_all_columns(seed: int) -> None:
    """Rows of two edges, wide and with equal and forbidden costs, against the definition."""
    random = np.random.default_rng(seed)
    costs = random.integers(0, 3, (24, 1 + 180)) + random.integers(0, 8, (24, 1)).astype(float)
    costs[random.random(costs.shape) < 0.005] = math.inf
    costs[8:16] = costs[:8] + (random.random((8, 181)) < 0.01)
    whole = [Node("many", costs[:, 0], np.zeros(24), (0, 1))]
    others = [Node(name, np.zeros(90), np.zeros(90), (0, 1)) for name in ("left", "right")]
    problem = Problem((*whole, *others), (Edge(0, 1, costs[:, 1:91]), Edge(2, 0, costs[:, 91:].T)), math.inf)
    with clock.counted(60.0):
        kept = drop_dominated(problem, rounds=1).kept[0].tolist()
        counted_s = clock.now()
    alive = np.flatnonzero(np.isfinite(costs[:, 0]))
    order = sorted(alive.tolist(), key=lambda i: (np.minimum(costs[i], 1e30).sum(), i))
    assert kept == sorted(row for at, row in enumerate(order)
                          if not any((costs[other] <= costs[row]).all() for other in order[:at]))
    assert counted_s > 24 * 181 * clock.RATES["cells compared"]


@settings(max_examples=40)
@given(seeds)
def test_elimination_and_its_regrets(seed: int) -> None:
    problem = random_problem(seed, limited=False)
    eliminator = Eliminator.of(problem)
    value, choice = eliminator.solve(problem.costs)
    plans = all_plans(problem)
    best = min(judged.objective for _, judged in plans)
    assert value == best
    if best == math.inf:
        return
    assert evaluate(problem, choice).objective == best
    for v, reduced_costs in enumerate(eliminator.reduced_costs(problem.costs)):
        for pick, reduced_cost in enumerate(reduced_costs):
            assert reduced_cost == min(judged.objective for plan, judged in plans if plan[v] == pick) - best


def test_equal_blocks_are_worked_out_once() -> None:
    problem = block_chain(64, choices=16)
    eliminator = Eliminator.of(problem)
    order = elimination_order(problem.sizes.tolist(), problem.ends.tolist())
    one_by_one = sum(math.prod(eliminator.sizes[u] for u in (v, *near))
                     for v, near in zip(order.nodes, order.neighbours, strict=True))
    assert eliminator.work(problem.costs) < 0.9 * one_by_one
    value, choice = eliminator.solve(problem.costs)
    assert evaluate(problem, choice).objective == value


@pytest.mark.parametrize("blocks", [8, 32])
def test_a_chain_of_equal_blocks_is_halved_again_and_again(blocks: int) -> None:
    """All its tables have one name; the ends, which stay, are open to something wider, so that neither goes first."""
    scopes = [(v, v + 1) for v in range(blocks - 2)] + [(0, blocks - 1), (blocks - 2, blocks)]
    rule = Sweep([4] * (blocks + 1), scopes, blocks - 1)
    steps = rule.steps([1] * len(scopes), Tables())
    assert len({step.name for step in steps}) <= 2 * math.log2(blocks) < len(steps)


@pytest.mark.parametrize("seed", range(6))
def test_repeated_subgraphs_are_eliminated_by_one_rule(seed: int) -> None:
    problem = block_chain(12, choices=3, seed=seed)
    rates = np.random.default_rng(seed).choice([0.0, 0.5], len(problem.costs))  # blocks of several kinds
    costs = problem.costs.priced(problem.usages, rates)
    found = repeated_subgraphs(problem.sizes, problem.ends)
    assert sum(form.nodes.size for form in found if form.border.size) > len(problem.nodes) / 2
    by_subgraphs, whole = Eliminator.of(problem), Eliminator.of(problem)
    whole._lay_out(problem.ends, [])
    value, choice = by_subgraphs.solve(costs)
    assert value == pytest.approx(whole.solve(costs)[0])
    assert costs.take(problem.cells(choice)).sum() == pytest.approx(value)
    for reduced_cost, expected in zip(by_subgraphs.reduced_costs(costs), whole.reduced_costs(costs), strict=True):
        assert np.allclose(reduced_cost, expected)


@pytest.mark.parametrize("kept_cells", [0, 10**6])
def test_tables_of_earlier_prices_change_nothing(kept_cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_elimination, "KEPT_CELLS", kept_cells)
    problem = block_chain(8, choices=3, seed=1)
    rng, kept = np.random.default_rng(1), Eliminator.of(problem)
    some = rng.choice([0.0, 0.25, 0.5], (3, len(problem.costs)))
    for rates in some[[0, 1, 0, 2, 1]]:
        costs, fresh = problem.costs.priced(problem.usages, rates), Eliminator.of(problem)
        assert kept.solve(costs) == fresh.solve(costs)
        for reduced_cost, expected in zip(kept.reduced_costs(costs), fresh.reduced_costs(costs), strict=True):
            assert np.array_equal(reduced_cost, expected)
    assert (kept._tables.cells == 0) == (kept_cells == 0)


@settings(max_examples=40)
@given(seeds)
def test_choices_that_were_dropped_become_the_first(seed: int) -> None:
    problem, rng = random_problem(seed, limited=True), np.random.default_rng(seed)
    kept = [np.flatnonzero(rng.random(size) < 0.5) for size in problem.sizes]
    kept = [pick if len(pick) else np.array([0]) for pick in kept]
    left, choice = keep(problem, kept), [int(rng.integers(size)) for size in problem.sizes]
    expected = tuple(pick.tolist().index(c) if c in pick else 0 for pick, c in zip(kept, choice, strict=True))
    assert left.forward(choice) == expected
    checked = Problem(left.problem.nodes, left.problem.edges, problem.limit)  # with nothing derived yet
    assert evaluate(left.problem, expected) == evaluate(checked, expected) == evaluate(problem, left.restore(expected))
    with pytest.raises(SearchError, match="no choice is left"):
        keep(problem, [np.zeros(0, np.int64), *kept[1:]])


@settings(max_examples=40)
@given(seeds)
def test_priced_bounds_hold(seed: int) -> None:
    problem = replace(random_problem(seed, limited=True), limit=math.inf)
    problem = replace(problem, limit=max(least_peak(problem), 12.0))
    memory, relax = memory_of(problem), Eliminator.of(problem).solve
    plans = [judged for _, judged in all_plans(problem)]
    best = min((judged.objective for judged in plans if judged.feasible), default=math.inf)
    dual = raise_bound(problem, memory, relax, math.inf, 20, lambda plan: math.inf, 0.0)
    assert dual.bound <= best * (1 + 1e-9) + 1e-9
    assert len(set(dual.plans)) == len(dual.plans)
    for plan, (cost, over) in zip(dual.plans, dual.cuts, strict=dual.bound < math.inf):
        assert cost == pytest.approx(evaluate(problem, plan).objective)
        assert np.array_equal(over, memory.load(problem, plan) - memory.room)
    least = lowest_peak(problem, relax, math.inf, 20)
    peaks = [judged.peak_bytes for judged in plans if judged.objective < math.inf]
    assert least.bound <= min(peaks, default=math.inf) * (1 + 1e-9) <= least.peak * (1 + 1e-9)
    if 0.0 < least.bound < math.inf:  # with less than all need the search for the least ends early, with a bound
        early = lowest_peak(problem, relax, math.inf, 20, least.bound * 0.9)
        assert least.bound * 0.9 < early.bound <= min(peaks) * (1 + 1e-9)


@settings(max_examples=40)
@given(seeds)
def test_local_search_keeps_its_books(seed: int) -> None:
    problem = random_problem(seed, limited=True)
    problem = replace(problem, limit=max(problem.limit, least_peak(problem)))
    memory = memory_of(problem)
    state = LocalState(Neighbourhood(problem, memory), [0] * len(problem.nodes))
    for v, size in enumerate(problem.sizes.tolist()):
        for pick in range(size):
            assert state.rises(v, pick) == [(low, high, rise[pick]) for low, high, rise in state.changes(v)]
    fits = repair(state)
    before = evaluate(problem, state.choice)
    descend(state)
    after = evaluate(problem, state.choice)
    assert np.allclose(state.load, memory.load(problem, state.choice))
    if fits and after.objective < math.inf:
        assert after.peak_bytes <= problem.limit and after.objective <= before.objective


@settings(max_examples=60)
@given(seeds)
def test_no_cheaper_plan_has_a_choice_that_was_dropped(seed: int) -> None:
    problem = random_problem(seed, limited=True)
    problem = replace(problem, limit=max(problem.limit, least_peak(problem)))
    costs = {plan: judged.objective for plan, judged in all_plans(problem) if judged.feasible}
    plans = list(costs)
    if not plans:
        return
    middle = sorted(plans, key=lambda plan: costs[plan])[len(plans) // 2]
    memory, eliminator = memory_of(problem), Eliminator.of(problem)
    dual = raise_bound(problem, memory, eliminator.solve, math.inf, 3, lambda plan: math.inf, 0.0)
    whole = Priced(keep(problem, [np.arange(len(node.costs)) for node in problem.nodes]), memory, eliminator, dual)
    left = whole.narrowed(costs[middle], middle)
    for plan in plans:
        if costs[plan] < costs[middle] or plan == middle:
            inside = left.reduced.forward(plan)
            assert left.reduced.restore(inside) == plan
            assert np.allclose(left.memory.load(left.problem, inside), memory.load(problem, plan))
    better = left.raised(math.inf, 20, lambda plan: math.inf, 0.0)
    assert min(better.dual.bound, costs[middle]) <= min(costs.values()) * (1 + 1e-9)


def test_sums_that_share_their_memory_do_not_change_one_another() -> None:
    """Tables large enough to be added where others were, more of them than one, and results that are still read."""
    rng = np.random.default_rng(0)
    nodes = [Node(name, rng.random(30), np.zeros(30)) for name in "abcde"]
    assert bucket_elimination.SCRATCH_CELLS < 30**3
    edges = [Edge(u, v, rng.random((30, 30))) for u in range(4) for v in range(u + 1, 5)]
    problem = Problem(nodes, edges)
    value, choice = Eliminator.of(problem).solve(problem.costs)
    assert value == pytest.approx(evaluate(problem, choice).objective)
    total = np.zeros((30,) * 5)
    for edge in edges:
        total += edge.costs.reshape([30 if axis in (edge.source, edge.target) else 1 for axis in range(5)])
    for axis, node in enumerate(nodes):
        total += node.costs.reshape([30 if other == axis else 1 for other in range(5)])
    assert value == pytest.approx(total.min())
    again = Eliminator.of(problem)
    assert again.solve(problem.costs) == (value, choice) == again.solve(problem.costs)


def test_memory_of_large_sums_is_let_go() -> None:
    """A slice of a wide table may have more cells than its share; the thread would keep their memory for good."""
    many = 1 + bucket_elimination.CHUNK_CELLS // 1_000
    for parts in ([np.ones((1_000, 1)), np.ones((1_000, 10))], [np.ones((many, 1)), np.ones((1, 1_000))]):
        total = bucket_elimination._added(parts)
        assert total.shape == np.broadcast_shapes(*(part.shape for part in parts)) and (total == 2.0).all()
        assert bucket_elimination._SCRATCH.room.size <= bucket_elimination.CHUNK_CELLS


def test_threads_share_the_orders_of_elimination_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one of them makes room for an order, another that adds one of its own waits."""
    others, waited = list[threading.Thread](), list[bool]()

    class Recent(dict[tuple[bytes, bytes], bucket_elimination.Layout]):
        """As if another thread came in just before the oldest order is picked."""

        def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
            found = super().__iter__()
            if not others:
                others.append(threading.Thread(target=Eliminator, args=([3, 5], [(0, 1)]), daemon=True))
                others[0].start()
                others[0].join(0.5)
                waited.append(others[0].is_alive())
            return found

    monkeypatch.setattr(bucket_elimination, "_RECENT", recent := Recent())
    monkeypatch.setattr(bucket_elimination, "MOST_RECENT", 2)
    made = [Eliminator([2, 4, size], [(0, 1), (1, 2)]) for size in (1, 2, 3)]
    others[0].join(5.0)
    assert waited == [True] and not others[0].is_alive() and len(made) == 3 and len(recent) == 2
