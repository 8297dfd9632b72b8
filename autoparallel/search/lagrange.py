"""Memory as prices: seconds per byte at each time that matters, so that a problem without limits remains.

For any prices >= 0, the least priced cost minus the prices of the room is a lower bound for every feasible choice. The
best prices are found by cutting planes: each solved pricing says how bound and overload move with the prices; a small
linear program over them proposes the next prices, taken part of the way from the best known ones ("in-out").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoparallel.search.memory import Memory
from autoparallel.search.problem import FORBIDDEN, Problem, evaluate

Relaxation = Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], tuple[float, tuple[int, ...]]]
STEP = 0.6
NEW_TIMES = 3


@dataclass
class Dual:
    """What is known: ``bound`` is attained at ``prices``; ``plans`` are (priced) minimisers, in order of discovery."""

    bound: float
    prices: np.ndarray
    plans: list[tuple[int, ...]] = field(default_factory=list)
    rounds: int = 0


def priced(problem: Problem, memory: Memory, prices: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Node costs and edge tables with the memory's prices added; unpriced arrays stay the same objects."""
    rates = memory.prices_per_user(prices)
    shared: dict[tuple[int, int, float], np.ndarray] = {}

    def with_price(array: np.ndarray, user: int) -> np.ndarray:
        rate = float(rates[user])
        if rate == 0.0:
            return array
        key = id(array), id(problem.edges[user - memory.num_nodes].usages if user >= memory.num_nodes
                            else problem.nodes[user].usages), rate
        if key not in shared:
            shared[key] = array + rate * memory.extra[user]
        return shared[key]

    costs = [with_price(node.costs, v) for v, node in enumerate(problem.nodes)]
    tables = [edge.costs if edge.usages is None else with_price(edge.costs, memory.num_nodes + e)
              for e, edge in enumerate(problem.edges)]
    return costs, tables


def raise_bound(problem: Problem, memory: Memory, relax: Relaxation, deadline: float, rounds: int,
                on_plan: Callable[[tuple[int, ...]], float], target_gap: float) -> Dual:
    """Cutting planes on the prices; one call of ``relax`` per round.

    ``on_plan`` is shown each minimiser and returns the cost of the best feasible plan so far (inf: none); rounds end
    when the bound is within ``target_gap`` of it, when the model of the bound is exact, at the deadline or after
    ``rounds``.
    """
    dual = Dual(-FORBIDDEN, np.zeros(len(memory.times)))
    active: list[int] = []
    cuts: list[tuple[float, np.ndarray]] = []
    trial = dual.prices
    while dual.rounds < rounds:
        value, plan = relax(*priced(problem, memory, trial))
        bound = value - float(trial @ memory.room)
        dual.rounds += 1
        if value == FORBIDDEN:
            return Dual(FORBIDDEN, trial, dual.plans, dual.rounds)
        over = memory.load(problem, plan) - memory.room
        cuts.append((evaluate(problem, plan).objective, over))
        dual.plans.append(plan)
        if bound > dual.bound:
            dual.bound, dual.prices = bound, trial
        best = on_plan(plan)
        if best - dual.bound <= target_gap * abs(best) or time.monotonic() >= deadline:
            break
        worst = [int(p) for p in np.argsort(-over, kind="stable")[:NEW_TIMES] if over[p] > 0 and p not in active]
        active += worst
        if not active:
            break
        ceiling, proposal = _master(cuts, active, len(memory.times), memory, dual)
        if ceiling - dual.bound <= 1e-9 * abs(ceiling) and not worst:
            break
        step = 1.0 if len(active) == 1 else STEP
        trial = dual.prices + step * (proposal - dual.prices)
    return dual


def _master(cuts: list[tuple[float, np.ndarray]], active: list[int], num_times: int, memory: Memory, dual: Dual
            ) -> tuple[float, np.ndarray]:
    """Prices on the active times that maximise the least of the cuts, each ``cost + prices @ over``."""
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    spread = max(cost for cost, _ in cuts) or 1.0
    box = max(10.0 * float(dual.prices.max()), _steepest(cuts, active, spread))
    prices = [solver.NumVar(0.0, 1.0, "") for _ in active]
    low = solver.NumVar(-solver.infinity(), solver.infinity(), "")
    for cost, over in cuts:
        row = solver.Constraint(-solver.infinity(), cost / spread)
        row.SetCoefficient(low, 1.0)
        for price, at in zip(prices, active, strict=True):
            row.SetCoefficient(price, -float(over[at]) * box / spread)
    solver.Maximize(low)
    solver.Solve()
    result = np.zeros(num_times)
    result[active] = [max(0.0, price.solution_value()) * box for price in prices]
    return float(low.solution_value()) * spread, result


def _steepest(cuts: list[tuple[float, np.ndarray]], active: list[int], spread: float) -> float:
    """A price at which the smallest overload seen at an active time costs as much as the dearest plan."""
    overloads = [float(over[at]) for _, over in cuts for at in active if over[at] > 0]
    return spread / min(overloads) if overloads else 0.0
