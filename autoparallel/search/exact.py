"""Exact search: elimination; where memory binds, elimination of the priced problem with bounds and repaired plans."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autoparallel.search.elimination import Eliminator
from autoparallel.search.lagrange import Relaxation, lowest_peak, mix_prices, raise_bound
from autoparallel.search.local import LocalState, descend, repair
from autoparallel.search.memory import Memory, memory_of
from autoparallel.search.problem import FORBIDDEN, MemoryLimitError, Problem, evaluate

TABLE_CELLS = 2e7
WORK_CELLS = 2e10
MAX_ROUNDS = 60
PRICE_ROUNDS = 12
TARGET_GAP = 1e-6
LEAST_S = 5.0
LEAST_ROUNDS = 15


@dataclass
class Outcome:
    """What a solver found: the best feasible choice (None: none yet), a bound for all, and why it stopped."""

    choice: tuple[int, ...] | None
    objective: float
    lower_bound: float
    stop_reason: str
    seconds: dict[str, float] = field(default_factory=dict)
    prices: np.ndarray | None = None


class Incumbent:
    """The best feasible choice so far. Plans that do not fit are repaired and improved by local search first."""

    def __init__(self, problem: Problem, memory: Memory, deadline: float,
                 report: Callable[[float], None] | None = None) -> None:
        self.problem, self.memory, self.deadline = problem, memory, deadline
        self.choice: tuple[int, ...] | None = None
        self.objective = FORBIDDEN
        self._report = report
        self._seen: set[tuple[int, ...]] = set()

    def offer(self, plan: tuple[int, ...]) -> float:
        """Take the plan, or what local search makes of it; returns the best objective so far."""
        if plan in self._seen:
            return self.objective
        self._seen.add(plan)
        self._take(plan)
        if self.memory.binds:
            state = LocalState(self.problem, self.memory, plan)
            if repair(state, self.deadline):
                descend(state, self.deadline)
                self._take(tuple(state.choice))
        return self.objective

    def _take(self, plan: tuple[int, ...]) -> None:
        judged = evaluate(self.problem, plan)
        if judged.feasible and judged.objective < self.objective:
            self.choice, self.objective = plan, judged.objective
            if self._report is not None:
                self._report(judged.objective)


def trivial_bound(problem: Problem) -> float:
    """Sum of the least cost of every node and edge: valid for every choice, weak. O(cells)."""
    lows = {id(array): float(array.min()) for array in
            [node.costs for node in problem.nodes] + [edge.costs for edge in problem.edges]}
    return (sum(lows[id(node.costs)] for node in problem.nodes)
            + sum(lows[id(edge.costs)] for edge in problem.edges))


def affordable(eliminator: Eliminator, problem: Problem, work_cells: float = WORK_CELLS) -> bool:
    """Whether elimination fits in the budgets for one table and for all work."""
    if eliminator.order.max_cells > TABLE_CELLS:
        return False
    return eliminator.work([n.costs for n in problem.nodes], [e.costs for e in problem.edges]) <= work_cells


def solve_exact(problem: Problem, deadline: float = FORBIDDEN, relax: Relaxation | None = None, exact: bool = True,
                report: Callable[[float], None] | None = None) -> Outcome:
    """Optimal without memory; with it, the best prices' bound and the best repaired plan.

    ``relax`` solves priced problems (default: elimination); ``exact`` tells whether its answer is their minimum.

    Raises MemoryLimitError when the least usages alone exceed the limit. Time: `Eliminator.work` per round of prices.
    """
    start = time.monotonic()
    memory = memory_of(problem)
    if relax is None:
        relax = Eliminator.of(problem).solve
    incumbent = Incumbent(problem, memory, deadline, report)
    if memory.binds and exact:
        least = lowest_peak(problem, relax, min(deadline, start + LEAST_S), LEAST_ROUNDS, problem.limit)
        if problem.limit < least.bound < FORBIDDEN:
            raise MemoryLimitError(problem.name, least.bound, problem.limit, least.peak)
        if least.peak <= problem.limit and least.plan is not None:
            incumbent.offer(least.plan)
    dual = raise_bound(problem, memory, relax, deadline, MAX_ROUNDS, incumbent.offer, TARGET_GAP)
    if memory.binds and incumbent.objective - dual.bound > TARGET_GAP * abs(dual.bound) and dual.bound < FORBIDDEN:
        mix_prices(problem, memory, relax, deadline, dual, PRICE_ROUNDS, incumbent.offer)
    if incumbent.choice is None and memory.binds and exact:
        least = lowest_peak(problem, relax, deadline, MAX_ROUNDS, problem.limit)
        if least.plan is not None and least.bound > problem.limit:
            raise MemoryLimitError(problem.name, least.bound, problem.limit, least.peak)
        if least.plan is not None:
            incumbent.offer(least.plan)
    gap_closed = incumbent.objective - dual.bound <= TARGET_GAP * abs(incumbent.objective)
    if gap_closed and incumbent.choice is not None:
        reason = "optimal"
    else:
        reason = "time limit" if time.monotonic() >= deadline else "gap"
    return Outcome(incumbent.choice, incumbent.objective, min(dual.bound, incumbent.objective), reason,
                   {"exact": time.monotonic() - start}, dual.prices)
