"""The wide search's parts, each against brute force: merging, messages, walks, parts, least memory, device classes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoparallel import clock
from autoparallel.errors import InfeasibleError
from autoparallel.search import SEARCHES, MemoryLimitError, Node, NotRepairedError, Problem, evaluate, solve
from autoparallel.search.high_width import branch_and_bound, minimum_memory
from autoparallel.search.high_width import solve as high_width
from autoparallel.search.high_width.aggregation import shrink
from autoparallel.search.high_width.event_form import Compact, compact_of, part_of
from autoparallel.search.high_width.local_search import LocalSearch, finite_limit
from autoparallel.search.high_width.solve import WideSearch
from autoparallel.search.high_width.trws import Messenger, raise_each, raise_prices, show_plans
from autoparallel.search.ilp.highs import LinearModel, run_highs
from autoparallel.search.model.problem import single_limit
from autoparallel.search.solver import Run
from tests.search.problems import all_plans, block_chain, lateness, random_problem, seeds


def compact_plans(compact: Compact) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, compact.sizes)))


def best_of(problem: Problem) -> float:
    return min((judged.objective for _, judged in all_plans(problem) if judged.feasible), default=math.inf)


def compact_or_none(problem: Problem) -> Compact | None:
    try:
        return compact_of(problem)
    except MemoryLimitError:
        return None


@settings(max_examples=40)
@given(seeds)
def test_parts_and_prices_end_by_themselves(seed: int) -> None:
    problem = random_problem(seed, limited=True, max_nodes=7)
    best = best_of(problem)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("SMALL_CELLS", -1), ("BRANCH_CELLS", -1), ("TURN_ROUNDS", 5)):
            patch.setattr(high_width, name, value)
        try:
            search = WideSearch(problem, math.inf, None, lambda outcome: None)
            search.run()
        except MemoryLimitError:
            assert best == math.inf
            return
    found = search.outcome
    assert found.lower_bound <= best * (1 + 1e-9) and found.objective >= best
    assert found.stop_reason != "optimal" or found.objective == pytest.approx(best, rel=1e-5)


@settings(max_examples=60)
@given(seeds, st.booleans())
def test_merging_keeps_an_optimum(seed: int, to_the_end: bool) -> None:
    problem = random_problem(seed, limited=bool(seed % 2))
    compact = compact_or_none(problem)
    if compact is None:
        assert best_of(problem) == math.inf
        return
    shrunk = shrink(compact, until=math.inf if to_the_end else 0.0)
    costs = [math.inf]
    for plan in compact_plans(shrunk.compact) if shrunk.allowed else []:
        judged = evaluate(problem, shrunk.restore(plan))
        cost = shrunk.compact.cost(plan)
        assert cost == judged.objective or (cost == math.inf and not judged.feasible)
        assert judged.feasible == (shrunk.compact.fits(plan) and cost < math.inf)
        if judged.feasible:
            costs.append(judged.objective)
            assert shrunk.compact.cost(shrunk.forward(shrunk.restore(plan))) == judged.objective
    assert min(costs) == best_of(problem)


def test_a_node_that_nothing_ties_to_others_is_settled_at_once() -> None:
    """Where its cheapest choice also uses the least memory; the other node has to do without its cheapest one."""
    nodes = (Node("free", np.array([2.0, 1.0]), np.array([5.0, 3.0]), (0, 2)),
             Node("torn", np.array([1.0, 2.0]), np.array([5.0, 3.0]), (0, 2)))
    problem = Problem(nodes, (), 7.0)
    shrunk = shrink(compact_of(problem), until=0.0)
    assert shrunk.roots == [1] and shrunk.compact.constant == 1.0 and shrunk.restore((0,)) == (1, 0)
    assert not shrunk.compact.fits((0,)) and shrunk.compact.fits((1,)) and solve(problem).objective == 3.0


@settings(max_examples=40)
@given(seeds)
def test_a_subproblem_counts_its_surroundings(seed: int) -> None:
    compact = compact_or_none(random_problem(seed, limited=True))
    if compact is None:
        return
    rng = np.random.default_rng(seed)
    plan = [int(rng.integers(size)) for size in compact.sizes]
    nodes = [v for v in range(len(plan)) if rng.random() < 0.6] or [0]
    if compact.cost(plan) == math.inf:
        return
    part = part_of(compact, plan, nodes)
    for picks in compact_plans(part):
        whole = list(plan)
        for v, pick in zip(nodes, picks, strict=True):
            whole[v] = pick
        assert part.cost(picks) == pytest.approx(compact.cost(whole))
        assert part.fits(picks) == compact.fits(whole)


@settings(max_examples=40)
@given(seeds)
def test_messages_bound_every_plan_and_every_choice(seed: int) -> None:
    problem = random_problem(seed, limited=bool(seed % 2))
    compact = compact_or_none(problem)
    if compact is None or best_of(problem) == math.inf:
        return
    messenger = Messenger(compact, finite_limit(compact))
    found = raise_prices(messenger, math.inf, 40, lambda plan: math.inf)
    costs = messenger.costs(found.values)
    bound = messenger.settle(costs) - float(found.values @ compact.room)
    reduced_costs = messenger.reduced_costs(costs)
    for plan, judged in all_plans(problem):
        if judged.feasible:
            assert max(bound, found.bound) <= judged.objective + 1e-6
            assert all(bound + reduced_costs[v][pick] <= judged.objective + 1e-6 for v, pick in enumerate(plan))


@settings(max_examples=30)
@given(seeds)
def test_prices_of_siblings_are_raised_as_if_each_were_alone(seed: int) -> None:
    compact = compact_or_none(random_problem(seed, limited=True))
    if compact is None:
        return
    messenger, rng = Messenger(compact, finite_limit(compact)), np.random.default_rng(seed)
    messenger.settle(messenger.costs(np.zeros(len(compact.room))))
    first, target = rng.random(len(compact.room)), abs(finite_limit(compact))
    together, alone = ([messenger.on([costs + seed for costs in compact.costs]) for seed in range(3)] for _ in range(2))
    for found, one, other in zip(raise_each(together, math.inf, 12, first, target), alone, together, strict=True):
        expected = raise_prices(one, math.inf, 12, None, first, target)
        assert found.steps == expected.steps and found.bound == pytest.approx(expected.bound)
        assert found.values == pytest.approx(expected.values) and other.into == pytest.approx(one.into)


@settings(max_examples=40)
@given(seeds)
def test_a_walk_keeps_its_books(seed: int) -> None:
    compact = compact_or_none(random_problem(seed, limited=True))
    if compact is None:
        return
    limit = finite_limit(compact)
    local_search = LocalSearch(compact, [0] * len(compact.costs), limit)
    fitted = local_search.repair()
    before = local_search.cost()
    local_search.descend()
    fresh = LocalSearch(compact, local_search.plan, limit)
    assert np.allclose(local_search.local, fresh.local) and np.allclose(local_search.over, fresh.over)
    assert not fitted or (compact.fits(local_search.plan) and local_search.cost() <= before)
    for v, size in enumerate(compact.sizes):
        for pick in range(size):
            costs = [compact.costs[v][pick], *(table[pick, local_search.plan[w]] for _, w, table in compact.around[v])]
            assert local_search.row_of(v)[pick] == pytest.approx(sum(min(cost, limit) for cost in costs))
            moved = [pick if u == v else old for u, old in enumerate(local_search.plan)]
            worse = (compact.load(moved) > np.maximum(compact.room, compact.load(local_search.plan))).any()
            assert local_search.fits(v, pick) == (not worse) or not fitted


@settings(max_examples=40)
@given(seeds)
def test_wide_search_is_right_about_small_problems(seed: int) -> None:
    problem, best = random_problem(seed, limited=True), 0.0
    best = best_of(problem)
    try:
        search = WideSearch(problem, clock.now() + 30, None, lambda outcome: None)
        search.run()
    except MemoryLimitError:
        assert best == math.inf
        return
    assert search.outcome.lower_bound <= best
    if search.outcome.choice is not None:
        judged = evaluate(problem, search.outcome.choice)
        assert judged.feasible and judged.objective == search.outcome.objective >= best


@settings(max_examples=60)
@given(seeds, st.booleans())
@example(56445, False)
def test_branching_proves_the_optimum(seed: int, by_program: bool) -> None:
    problem = random_problem(seed, limited=bool(seed % 4), max_nodes=7)
    compact, best = compact_or_none(problem), best_of(problem)
    if compact is None or not shrink(compact).allowed:
        assert best == math.inf
        return
    found = [math.inf]

    def offer(plan: Sequence[int]) -> float:
        if compact.fits(plan):
            found[0] = min(found[0], compact.cost(plan))
        return found[0]

    with pytest.MonkeyPatch.context() as patch:
        if not by_program:
            patch.setattr(branch_and_bound, "PROGRAM_CELLS", -1)
        bound = branch_and_bound.Branching(compact, math.inf, np.zeros(len(compact.room)), math.inf, offer).run()
    assert bound == found[0] == pytest.approx(best)


@settings(max_examples=60)
@given(seeds)
def test_nothing_that_better_plans_need_is_dropped(seed: int) -> None:
    problem = random_problem(seed, limited=True)
    compact, best = compact_or_none(problem), best_of(problem)
    if compact is None or best == math.inf:
        return
    messenger = Messenger(compact, finite_limit(compact))
    found = raise_prices(messenger, math.inf, 10, None)
    costs = messenger.costs(found.values)
    bound = messenger.settle(costs) - float(found.values @ compact.room)
    for room in (best - bound + 1e-6, best - bound + 3.0):
        left = messenger.within(costs, room)
        for plan, judged in all_plans(problem):
            if judged.feasible and judged.objective <= bound + room - 1e-6:
                assert left.cost(plan) == pytest.approx(judged.objective)


def test_merging_leaves_shared_arrays_shared() -> None:
    """Equal blocks stay equal, also where choices go and tables are turned."""
    blocks = block_chain(12, limit=0.7 * solve(block_chain(12), "exact").peak_bytes)
    nodes = tuple(replace(node, interval=(0, 1)) for node in blocks.nodes)
    forbidden = np.where(np.eye(8) == 1, blocks.nodes[1].costs, math.inf)
    tables = {id(edge.costs): forbidden for edge in blocks.edges[:1]}
    edges = tuple(replace(edge, costs=tables.get(id(edge.costs), edge.costs)) for edge in blocks.edges)
    merged = shrink(compact_of(replace(blocks, nodes=nodes, edges=edges))).compact
    assert len(merged.tables) > 30 and len({id(table) for table in merged.tables}) <= 12
    copies = replace(blocks, nodes=tuple(replace(node, costs=node.costs.copy()) for node in nodes),
                     edges=tuple(replace(edge, costs=edge.costs.copy()) for edge in edges))
    apart = shrink(compact_of(copies)).compact
    assert merged.ends == apart.ends
    for one, other in zip((*merged.costs, *merged.tables), (*apart.costs, *apart.tables), strict=True):
        assert np.array_equal(one, other)


def test_after_the_deadline_one_plan_is_shown() -> None:
    problem = block_chain(6, limit=0.7 * solve(block_chain(6), "exact").peak_bytes)
    messenger = Messenger(compact_of(problem), 1e6)
    for costs, shown in (([math.inf, 5.0, 4.0], 2), ([5.0, 4.0], 1)):
        answers = iter(costs)
        show_plans(messenger, np.ones(len(messenger.compact.room)), lambda plan, answers=answers: next(answers), 0.0)
        assert len(list(answers)) == len(costs) - shown


def test_without_time_for_prices_there_is_a_plan() -> None:
    """One step of prices takes more than its share of the time, which is up before the first ends."""
    problem = block_chain(8, limit=0.7 * solve(block_chain(8), "exact").peak_bytes)
    search = WideSearch(problem, clock.now() + 1e-3, None, lambda outcome: None)
    search.run()
    assert search.outcome.choice is not None and evaluate(problem, search.outcome.choice).feasible
    assert search.outcome.stop_reason == "time limit" and search.outcome.lower_bound > 0


def test_a_search_that_ended_on_time_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends a little before time is up, since what is left to do takes time; so a look at the clock does not tell."""
    monkeypatch.setattr(WideSearch, "_finish", lambda search: setattr(search.outcome, "stop_reason", "time limit"))
    monkeypatch.setattr(WideSearch, "_bound", lambda search, bound: None)
    monkeypatch.setattr(Run, "eliminate", lambda run: pytest.fail("too wide"))
    monkeypatch.setattr(Run, "program", lambda run, cells=0: pytest.fail("a program was started"))
    monkeypatch.setattr("autoparallel.search.solver.WORK_CELLS", 0)
    problem = block_chain(3, limit=0.7 * solve(block_chain(3), "recursive").peak_bytes)
    found = solve(problem, "auto", 60.0)
    assert found.stop_reason == "time limit" and found.gap > 0.001


def test_messages_start_from_those_of_a_larger_problem() -> None:
    """A node goes and one loses a choice; what the messages say of the rest stays, so that the bound does at once."""
    free = solve(block_chain(6), "exact")
    outer = shrink(compact_of(block_chain(6, limit=0.7 * free.peak_bytes)))
    count = len(outer.compact.costs)
    messenger = Messenger(outer.compact, finite_limit(outer.compact))
    costs = messenger.costs(np.zeros(len(outer.compact.room)))
    bound = messenger.settle(costs, 50)
    pick = int(messenger.reduced_costs(costs)[1].argmax())
    without = [np.where((np.arange(len(array)) == pick) & (v == 1), math.inf, array)
               for v, array in enumerate(outer.compact.costs)]
    inner = shrink(replace(outer.compact, costs=tuple(without)), outer=outer)
    assert sum(inner.compact.sizes) < sum(outer.compact.sizes) and count > 3
    again, anew = (Messenger(inner.compact, messenger.limit) for _ in range(2))
    again.start_from(messenger, inner.origin(outer))
    inner_costs = again.costs(np.zeros(len(inner.compact.room)))
    assert again.settle(inner_costs, 1) >= bound - 1e-9 * abs(bound) > anew.settle(inner_costs, 1)


def test_wide_search_on_blocks() -> None:
    free = solve(block_chain(4), "exact")
    problem = block_chain(4, limit=0.7 * free.peak_bytes)
    known = solve(problem, "exact")
    search = WideSearch(problem, clock.now() + 60, known.choice, lambda outcome: None)
    search.run()
    assert search.outcome.objective <= known.objective
    assert search.outcome.lower_bound <= search.outcome.objective


@settings(max_examples=40)
@given(seeds)
def test_least_memory_of_large_problems_is_bounded(seed: int) -> None:
    problem = random_problem(seed, limited=True)
    peaks = [judged.peak_bytes for _, judged in all_plans(problem) if judged.objective < math.inf]
    exact = minimum_memory.least_memory(problem)
    assert exact.bound == exact.peak == min(peaks, default=math.inf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimum_memory, "PROGRAM_CELLS", -1)
        found = minimum_memory.least_memory(problem)
    assert found.bound <= min(peaks, default=math.inf) * (1 + 1e-9) + 1e-6
    if found.plan is not None:
        assert evaluate(problem, found.plan).peak_bytes == found.peak >= min(peaks)


def two_classes(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, limited=True)
    nodes = tuple(replace(node, device_class=int(rng.integers(3))) for node in problem.nodes)
    edges = tuple(replace(edge, device_class=int(rng.integers(3))) for edge in problem.edges)
    limits = rng.integers(3, 20, 2).astype(float)
    return replace(problem, nodes=nodes, edges=edges, more_limits=(float(limits[0]), math.inf if seed % 2 else 9.0))


@settings(max_examples=40)
@given(seeds)
@example(935)
@example(5025)  # HiGHS looped on both while the pairs of choices had no upper bound
def test_every_device_class_keeps_its_limit(seed: int) -> None:
    problem = two_classes(seed)
    single, extra = single_limit(problem), len(single_limit(problem).nodes) - len(problem.nodes)
    for plan, judged in all_plans(problem):
        assert judged.feasible == evaluate(single, (*plan, *[0] * extra)).feasible
        assert len(judged.peaks) == 3
    best = best_of(problem)
    if best == math.inf:
        with pytest.raises(InfeasibleError):
            solve(problem)
        return
    found = solve(problem, "ilp")
    assert evaluate(problem, found.choice).feasible and found.objective == pytest.approx(best)
    assert found.lower_bound <= best + 1e-9


def test_a_program_ends_when_time_is_up() -> None:
    """A knapsack with many rows, which branch and cut does not finish."""
    rng, model = np.random.default_rng(0), LinearModel()
    picks = model.variables(np.zeros(120), True)
    values = model.variables(np.ones(1), False, math.inf)
    weights = rng.integers(10, 1000, (30, 120)).astype(float)
    for row in weights:
        number = model.rows(1, float(row.sum()) / 2, float(row.sum()) / 2 + 1)
        model.terms(np.repeat(number, 120), picks, row)
    cover = model.rows(1, 60.0, math.inf)
    model.terms(np.repeat(cover, 121), np.append(picks, values), np.append(rng.random(120), 1.0))
    start = clock.now()
    answer = run_highs(model, start + 2.0)
    assert clock.now() - start < 2.0 * 1.05 + lateness()
    assert answer.reason in ("time limit", "infeasible", "optimal")


def pair_of_classes(usages: float, limits: tuple[float, ...], extra: float) -> Problem:
    """A node in each of two classes, whose first choice uses nothing and costs so much more than the other."""
    nodes = tuple(Node(f"n{number}", np.array([10.0 + extra, 10.0]), np.array([0.0, usages]), (0, 2), None, number)
                  for number in range(2))
    return Problem(nodes, (), limits[0], "classes", limits[1:])


def test_a_choice_to_begin_with_where_there_are_device_classes() -> None:
    """It was left out, and the search that needs one said that there is none of its name."""
    found = solve(pair_of_classes(5.0, (5.0, 4.0), 1.0), "local", first=(1, 1))
    assert found.choice == (1, 0) and found.stop_reason == "made to fit" and found.peak_bytes == 5.0
    with pytest.raises(NotRepairedError) as caught:
        solve(pair_of_classes(5.0, (5.0, 4.0), 90.0), "local", first=(1, 1))
    assert (caught.value.peak_bytes, caught.value.limit_bytes) == (5.0, 4.0)


@pytest.mark.parametrize("search", SEARCHES)
def test_the_room_of_a_class_is_not_rounded_up(search: str) -> None:
    """6 less 2.0000000000000004 is 3.9999999999999996, and 4 and 2.0000000000000004 are 6: too much fitted."""
    problem = pair_of_classes(4.0, (6.0, math.nextafter(4.0, 0.0)), 1.0)
    found = solve(problem, search)
    assert found.choice == (1, 0) and evaluate(problem, found.choice).feasible


@pytest.mark.parametrize("search", SEARCHES)
def test_a_class_without_any_room(search: str) -> None:
    """Bytes are no whole numbers here, so that a little room is kept for rounding: there is none to keep of nothing."""
    problem = pair_of_classes(0.3, (0.7, 0.0), 1.0)
    assert solve(problem, search).choice == (1, 0)
