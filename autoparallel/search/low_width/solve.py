"""Exact search: elimination; where memory binds, elimination of the priced problem with bounds and repaired plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoparallel import clock
from autoparallel.search.low_width.bucket_elimination import Eliminator, TimeIsUpError
from autoparallel.search.low_width.lagrangian import Dual, LowestPeak, lowest_peak, mixed_plans, raise_bound
from autoparallel.search.low_width.local_search import LocalState, Neighbourhood, descend, repair
from autoparallel.search.low_width.variable_fixing import Priced
from autoparallel.search.model.dominance import untouched
from autoparallel.search.model.memory_rows import Memory, Users
from autoparallel.search.model.problem import FORBIDDEN, MemoryLimitError, Problem, evaluate

TABLE_CELLS = 2e7
WORK_CELLS = 2e10
MAX_ROUNDS = 60
MIXED_GAP = 5e-4
MIXTURES = ((1.1, True), (1.1, False), (1.03, True), (1.3, True), (1.3, False))
LEAST_PRICINGS = 5
TARGET_GAP = 1e-6
WITHIN_REACH = 0.05  # of the best plan; more expensive ones are not worth a descent
FIRST_ROUNDS = 6
WORTHWHILE = 0.5
NARROWING_PRICINGS = 12
DEEP_NODES = 500
CHEAP_CELLS = 2e7  # of one elimination, which then takes little longer than its calls of numpy
LEAST_S = 5.0
LEAST_ROUNDS = 15


TimedPrices = tuple[np.ndarray, np.ndarray]  # ascending times, and seconds per byte at each of them


@dataclass
class Outcome:
    """The result of a solver: the best feasible choice (None: none found), a lower bound for all, and why it
    stopped."""

    choice: tuple[int, ...] | None
    objective: float
    lower_bound: float
    stop_reason: str
    seconds: dict[str, float] = field(default_factory=dict)
    left: Priced | None = None


class Incumbent:
    """The best feasible choice so far. Plans that do not fit are repaired and improved by local search first."""

    def __init__(self, problem: Problem, memory: Memory, deadline: float,
                 on_better: Callable[[tuple[int, ...], float], None] | None = None) -> None:
        self.problem, self.memory, self.deadline = problem, memory, deadline
        self.choice: tuple[int, ...] | None = None
        self.objective = FORBIDDEN
        self._on_better = on_better
        self._near: Neighbourhood | None = None
        self._seen: set[tuple[int, ...]] = set()

    def offer(self, plan: tuple[int, ...]) -> float:
        """Take the plan, or what local search makes of it; returns the best objective so far."""
        if plan in self._seen:
            return self.objective
        self._seen.add(plan)
        self.take(plan)
        if self.memory.binds:
            self._near = self._near or Neighbourhood(self.problem, self.memory)
            state = LocalState(self._near, plan)
            if repair(state, self.deadline) and self.take(tuple(state.choice)) <= (1 + WITHIN_REACH) * self.objective:
                descend(state, self.deadline)
                self.take(tuple(state.choice))
        return self.objective

    def within(self, bound: float, gap: float) -> bool:
        """Whether a bound is so near, as a share of the plan's cost."""
        return self.choice is not None and self.objective - bound <= gap * abs(self.objective)

    def take(self, plan: tuple[int, ...]) -> float:
        """Keep the plan if it fits and is the best so far; returns its cost."""
        judged = evaluate(self.problem, plan)
        if judged.feasible and judged.objective < self.objective:
            self.choice, self.objective = plan, judged.objective
            if self._on_better is not None:
                self._on_better(plan, judged.objective)
        return judged.objective


def trivial_bound(problem: Problem) -> float:
    """Sum of the least cost of every node and edge: valid for every choice, weak. O(cells)."""
    return float(problem.costs.each(np.min).sum())


def elimination_cells(eliminator: Eliminator, problem: Problem) -> float:
    """Cells that elimination touches; inf where one table would be too large."""
    if eliminator.max_cells > TABLE_CELLS:
        return FORBIDDEN
    return eliminator.work(problem.costs)


def affordable(eliminator: Eliminator, problem: Problem, work_cells: float = WORK_CELLS) -> bool:
    """Whether elimination fits in the budgets for one table and for all work."""
    return elimination_cells(eliminator, problem) <= work_cells


def solve_exact(problem: Problem, deadline: float, eliminator: Eliminator, tell: Callable[[Outcome], None],
                gap: float = TARGET_GAP, least_pricings: int = LEAST_PRICINGS,
                start: Sequence[int] | None = None, mix: bool = True, prices: TimedPrices | None = None,
                enough_s: float = FORBIDDEN) -> Outcome:
    """Optimal where the best plan without a limit fits; else the best prices' bound and the best repaired plan, until
    they are within ``gap`` (a share of the plan's cost).

    ``eliminator`` is the problem's. The first answer tells how long each takes; without the time for
    ``least_pricings`` of them its bound is all that comes back, and no choice. ``tell`` hears of the first bound and of
    each better plan. ``start``: a choice that may be good, and may not fit. ``mix``: whether to drop choices and
    to mix the plans on both sides of the best prices, which close the gap. ``prices``: to begin with, where memory
    is known to bind. ``enough_s``: where no plan costs less, even without a memory limit, that bound is all.

    Raises MemoryLimitError when no plan fits. Time: `Eliminator.work` per round of prices.
    """
    began = clock.now()
    relax = eliminator.solve
    unpriced, value = None, -FORBIDDEN
    if prices is None:
        try:
            unpriced = value, plan = relax(problem.costs)
        except TimeIsUpError:
            return Outcome(None, FORBIDDEN, -FORBIDDEN, "time limit", {"exact": clock.now() - began})
        spent = clock.now() - began
        if enough_s < FORBIDDEN and value >= enough_s:
            return Outcome(None, FORBIDDEN, value, "bound", {"exact": spent})
        if value < FORBIDDEN and (judged := evaluate(problem, plan)).feasible:
            return Outcome(plan, judged.objective, min(value, judged.objective), "optimal", {"exact": spent})
        if least_pricings * spent > deadline - clock.now():
            return Outcome(None, FORBIDDEN, value, "time limit", {"exact": spent})
        if value < FORBIDDEN:
            tell(Outcome(None, FORBIDDEN, value, "bound"))
    users = Users(problem)
    memory = users.within(problem.limit)
    dual = None
    if prices is not None:
        memory = users.memory(np.union1d(memory.times, prices[0]), problem.limit)
        dual = Dual(-FORBIDDEN, np.zeros(len(memory.times)))
        dual.prices[np.searchsorted(memory.times, prices[0])] = prices[1]
    incumbent = Incumbent(problem, memory, deadline, lambda plan, cost: tell(Outcome(plan, cost, value, "better")))
    if start is not None:
        incumbent.offer(tuple(start))
    least = None
    if incumbent.choice is None and mix:
        quick = min(deadline, began + LEAST_S)
        least = _take_least(incumbent, lowest_peak(problem, relax, quick, LEAST_ROUNDS, problem.limit, users))
    rounds = FIRST_ROUNDS if mix else MAX_ROUNDS
    dual = raise_bound(problem, memory, relax, deadline, rounds, incumbent.offer, gap, unpriced, dual)
    if least is not None and incumbent.choice == least:
        incumbent.offer(least)
    left = Priced(untouched(problem), memory, eliminator, dual)
    if mix:
        left = _closed(left, incumbent, deadline, gap)
    if incumbent.choice is None:
        least = _take_least(incumbent, lowest_peak(problem, relax, deadline, MAX_ROUNDS, problem.limit, users))
        if least is not None and incumbent.choice is not None:
            incumbent.offer(least)
    bound = min(left.dual.bound, incumbent.objective)
    reason = ("optimal" if incumbent.within(bound, TARGET_GAP) else
              "time limit" if clock.now() >= deadline else "gap")
    return Outcome(incumbent.choice, incumbent.objective, bound, reason, {"exact": clock.now() - began}, left)


def _closed(left: Priced, incumbent: Incumbent, deadline: float, gap: float) -> Priced:
    """Close the gap by better prices, fewer choices and mixed plans. Where an elimination is cheap, there are as many
    rounds first as raise the bound: to find fewer choices takes longer, and in deep models longer than mixtures."""
    deep = len(left.problem.nodes) >= DEEP_NODES
    if left.work() <= CHEAP_CELLS and left.dual.bound < FORBIDDEN and not incumbent.within(left.dual.bound, gap):
        left = left.raised(deadline, MAX_ROUNDS - left.dual.rounds, incumbent.offer, gap)
        if deep:
            _mix(left, incumbent, deadline, gap)
            if incumbent.within(left.dual.bound, max(MIXED_GAP, gap)):
                return left
    left = _narrowed(left, incumbent, deadline, gap)
    _mix(left, incumbent, deadline, gap)
    return left


def _mix(left: Priced, incumbent: Incumbent, deadline: float, gap: float) -> None:
    """Offer mixtures until one is near enough."""
    for contrast, expensive_last in MIXTURES if left.dual.bound < FORBIDDEN else ():
        in_time = clock.now() + left.eliminator.solved_s <= deadline
        if incumbent.within(left.dual.bound, max(MIXED_GAP, gap)) or not in_time:
            break
        for mixed in mixed_plans(left.problem, left.memory, left.relax, deadline, left.dual.prices, contrast,
                                 expensive_last):
            incumbent.offer(left.reduced.restore(mixed))


def _narrowed(left: Priced, incumbent: Incumbent, deadline: float, gap: float) -> Priced:
    """Better prices and fewer choices in turn, until the one is no longer possible or the other makes no difference.

    Dropping choices takes as long as `NARROWING_PRICINGS` eliminations.
    """
    work = left.work()
    while left.dual.bound < FORBIDDEN and not incumbent.within(left.dual.bound, gap) and clock.now() < deadline:
        best, near = incumbent.choice, incumbent.within(left.dual.bound, max(MIXED_GAP, gap))
        in_time = NARROWING_PRICINGS * left.eliminator.solved_s < deadline - clock.now()
        if best is not None and not near and in_time and left.dual.rounds < MAX_ROUNDS:
            try:
                fewer = left.narrowed(incumbent.objective, best)
            except TimeIsUpError:
                return left
            less = fewer.work()
            if less <= WORTHWHILE * work:
                left, work = fewer, less
            elif left.dual.exact:
                return left
        elif left.dual.exact or left.dual.rounds >= MAX_ROUNDS:
            return left
        left = left.raised(deadline, FIRST_ROUNDS, incumbent.offer, gap)
    return left


def _take_least(incumbent: Incumbent, least: LowestPeak) -> tuple[int, ...] | None:
    """Have the plan with the least memory in hand, as it is. Raises MemoryLimitError where no plan fits."""
    limit = incumbent.problem.limit
    if limit < least.bound < FORBIDDEN:
        raise MemoryLimitError(incumbent.problem.name, least.bound, limit, least.peak)
    if least.plan is not None and least.peak <= limit:
        incumbent.take(least.plan)
    return least.plan
