"""Lagrangian relaxation of memory: prices in seconds per byte at each time that matters replace the memory limit.

For any prices >= 0, the least priced cost minus the prices of the room is a lower bound for every feasible choice. The
best prices are found by cutting planes: each solved pricing says how bound and overload move with the prices; a small
linear program over them proposes the next prices, taken part of the way from the best known ones ("in-out").
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autoparallel import clock
from autoparallel.search.low_width.bucket_elimination import TimeIsUpError
from autoparallel.search.model.interned import Shared
from autoparallel.search.model.memory_rows import Memory, Users, memory_at
from autoparallel.search.model.problem import FORBIDDEN, Problem, evaluate

Relaxation = Callable[[Shared], tuple[float, tuple[int, ...]]]
STEP = 0.6
NEW_TIMES = 3
PLACES = 256
MODEL_GAP = 1e-6
GROWTH = 4.0
MASTER_STEPS = 2_000
EVEN = 1e-2
NEAR_LEAST = 1e-5


@dataclass
class Dual:
    """The Lagrangian dual so far: ``bound`` is attained at ``prices``; ``plans`` are minimisers at prices tried, in
    order. ``cuts``: costs of these plans and the bytes by which they exceed the limit; prices are optimised at
    ``active`` times."""

    bound: float
    prices: np.ndarray
    plans: list[tuple[int, ...]] = field(default_factory=list)
    rounds: int = 0
    cuts: list[tuple[float, np.ndarray]] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    exact: bool = False

    def next_trial(self, over: np.ndarray | None = None, all_the_way: bool = False) -> np.ndarray | None:
        """Prices between the best ones and those that the cuts propose; None where the bound can hardly rise.

        ``all_the_way``: just these, as the last plan was known, and only they can tell whether the bound is attained.
        Times at which the last plan exceeds the room by most (``over``) become active.
        """
        worst = [] if over is None else [int(p) for p in np.argsort(-over, kind="stable")[:NEW_TIMES]
                                         if over[p] > 0 and p not in self.active]
        self.active += worst
        if not self.active or not self.cuts or min(cost for cost, _ in self.cuts) == FORBIDDEN:
            return None
        proposed = _master(self.cuts, self.active, len(self.prices), float(self.prices.max()))
        if proposed is None or (proposed[0] - self.bound <= MODEL_GAP * abs(proposed[0]) and not worst):
            return None
        step = 1.0 if all_the_way or len(self.active) == 1 else STEP
        return self.prices + step * (proposed[1] - self.prices)


def priced(problem: Problem, memory: Memory, prices: np.ndarray) -> Shared:
    """Node costs and edge tables with the memory's prices (seconds per byte at each time) added."""
    return problem.costs.priced(memory.extra, memory.prices_per_user(prices))


def at_prices(problem: Problem, times: np.ndarray, prices: np.ndarray) -> tuple[Problem, float]:
    """The problem where memory costs so many seconds per byte at each (ascending) time, and has no limit.

    With what the room is worth: the least cost there less this is a lower bound for every plan that fits here.
    """
    memory = memory_at(problem, times)
    return problem.with_costs(priced(problem, memory, prices), FORBIDDEN), float(prices @ memory.room)


def raise_bound(problem: Problem, memory: Memory, relax: Relaxation, deadline: float, rounds: int,
                on_plan: Callable[[tuple[int, ...]], float], target_gap: float,
                unpriced: tuple[float, tuple[int, ...]] | None = None, dual: Dual | None = None) -> Dual:
    """Cutting planes on the prices; one call of ``relax`` per round. Goes on from ``dual``, which changes.

    ``on_plan`` is shown each minimiser and returns the cost of the best feasible plan so far (inf: none); rounds end
    when the bound is within ``target_gap`` of it, when the model of the bound is exact (``dual.exact``), at the
    deadline or after ``rounds``. ``unpriced``: the answer of ``relax`` without prices, where it is known.
    """
    dual = dual or Dual(-FORBIDDEN, np.zeros(len(memory.times)))
    trial = dual.next_trial() if dual.rounds else dual.prices
    highest = highest_cost(problem)
    for _ in range(rounds):
        start = clock.now()
        if trial is None:
            dual.exact = True
            break
        known, unpriced = unpriced, None
        try:
            value, plan = known or relax(priced(problem, memory, trial))
        except TimeIsUpError:
            break
        bound = value - float(trial @ memory.room)
        dual.rounds += 1
        if value == FORBIDDEN or dual.bound > highest:
            return Dual(FORBIDDEN, trial, dual.plans, dual.rounds)
        again = plan in dual.plans
        if not again:
            over = memory.load(problem, plan) - memory.room
            dual.cuts.append((bound - float(trial @ over), over))
            dual.plans.append(plan)
        over = dual.cuts[dual.plans.index(plan)][1]
        if bound > dual.bound:
            dual.bound, dual.prices = bound, trial
        best = on_plan(plan)
        now = clock.now()
        if (best < FORBIDDEN and best - dual.bound <= target_gap * abs(best)) or now + (now - start) > deadline:
            break
        trial = dual.next_trial(over, again)
    return dual


def mixed_plans(problem: Problem, memory: Memory, relax: Relaxation, deadline: float, prices: np.ndarray,
                contrast: float, expensive_last: bool) -> list[tuple[int, ...]]:
    """The plans that just fit, and just do not, of those made of the plans on both sides of the best prices.

    At the best prices equal blocks change their minds together: a little cheaper and the plan does not fit, a little
    more expensive and it leaves room unused. So the last nodes (or the first) get prices that are ``contrast`` times
    the best, the others that much cheaper ones, and the place of the change is bisected. What both sides gain by prices
    of their own must outweigh the change of layouts between them, so a small contrast may not mix. O(log `PLACES`)
    relaxations.
    """
    count = len(problem.nodes)
    users = np.concatenate([np.arange(count), problem.ends.max(axis=1)])
    rates, places = memory.prices_per_user(prices), np.arange(count)
    found: dict[bool, tuple[int, ...]] = {}

    def fits(number: int) -> bool:
        """Whether the plan fits at whose prices ``number`` nodes pay ``contrast`` times the best price for memory."""
        expensive = places >= count - number if expensive_last else places < number
        _, plan = relax(problem.costs.priced(memory.extra, rates * np.where(expensive, contrast, 1 / contrast)[users]))
        fit = bool((memory.load(problem, plan) <= memory.room).all())
        found[fit] = plan
        return fit

    low, high = 0, count
    with contextlib.suppress(TimeIsUpError):
        start = clock.now()
        if fits(count):
            spent = clock.now() - start
            while high - low > max(1, count // PLACES) and clock.now() + spent <= deadline:
                middle = (low + high) // 2
                low, high = (low, middle) if fits(middle) else (middle, high)
    return list(found.values())


def highest_cost(problem: Problem) -> float:
    """More than any allowed plan can cost: a bound above it proves that no plan fits."""
    highs = problem.costs.each(lambda array: float(array.max(initial=0.0, where=array < FORBIDDEN)))
    return float(highs.sum()) * (1 + 1e-6) + 1e-300


@dataclass(frozen=True)
class LowestPeak:
    """Every allowed plan needs at least ``bound`` bytes; ``plan`` (None: none is known) needs ``peak``.

    The least is known exactly where the two are equal; both are inf where every plan is forbidden.
    """

    bound: float
    peak: float
    plan: tuple[int, ...] | None


def lowest_peak(problem: Problem, relax: Relaxation, deadline: float, rounds: int, enough: float = 0.0,
                users: Users | None = None) -> LowestPeak:
    """The plan with the least memory, whatever it costs, until one needs at most ``enough`` bytes, or all need more.

    The same cutting planes: weights on times that sum to 1; the least weighted memory bounds the least peak. All times
    share `EVEN` of the weight, half as much each round, since times without any would use what they like; users count
    as if they lived at one of them only, which bounds all the same and keeps equal blocks equal. ``users``: the
    problem's, where they are known.
    """
    users = users or Users(problem)
    floor = float(users.least.max(initial=0.0))
    memory = users.within(floor)
    bare = problem.costs.map(lambda array: np.where(array < FORBIDDEN, 0.0, FORBIDDEN))  # only what is forbidden
    live_intervals = memory.spans[:, 0] < memory.spans[:, 1]
    weights = np.zeros(len(memory.times))
    if memory.binds:
        weights[int(memory.room.argmin())] = 1.0
    best, peak, bound = None, FORBIDDEN, floor
    active: list[int] = []
    cuts: list[tuple[float, np.ndarray]] = []
    for number in range(rounds):
        start = clock.now()
        share = EVEN / 2**number
        trial, even = (1 - share) * weights, share / max(1, len(weights))
        try:
            value, plan = relax(bare.priced(memory.extra, memory.prices_per_user(trial) + even * live_intervals))
        except TimeIsUpError:
            break
        if value == FORBIDDEN:
            return LowestPeak(FORBIDDEN, FORBIDDEN, None)
        bound = max(bound, value + float((trial + even) @ (floor - memory.room)))
        judged = evaluate(problem, plan).peak_bytes
        if judged < peak:
            best, peak = plan, judged
        now = clock.now()
        if peak <= max(enough, bound * (1 + NEAR_LEAST)) or now + (now - start) > deadline or not memory.binds:
            break
        if 0.0 < enough < bound:
            return LowestPeak(min(bound, peak), peak, best)
        over = memory.load(problem, plan) - memory.room + floor
        cuts.append((0.0, over))
        worst = [int(p) for p in np.argsort(-over, kind="stable")[:NEW_TIMES] if p not in active]
        active += worst
        proposed = _master(cuts, active, len(memory.times), 0.0, sum_to_one=True)
        if proposed is None or (proposed[0] - bound <= NEAR_LEAST * abs(proposed[0]) and not worst):
            break
        weights = proposed[1]
    return LowestPeak(min(bound, peak), peak, best)


def _master(cuts: list[tuple[float, np.ndarray]], active: list[int], num_times: int, highest: float,
            sum_to_one: bool = False) -> tuple[float, np.ndarray] | None:
    """Prices on the active times that maximise the least of the cuts, each ``cost + prices @ over``; None: no answer.

    ``highest`` is the highest price in use; with ``sum_to_one`` prices are weights instead.
    """
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    steps = f"max_number_of_iterations: {MASTER_STEPS}"  # it can go round in circles
    solver.SetSolverSpecificParametersAsString(steps)
    spread = max(cost for cost, _ in cuts) or max(float(np.abs(over[active]).max()) for _, over in cuts) or 1.0
    box = 1.0 if sum_to_one else GROWTH * highest or _first_price(cuts, active)
    prices = [solver.NumVar(0.0, 1.0, "") for _ in active]
    low = solver.NumVar(-solver.infinity(), solver.infinity(), "")
    if sum_to_one:
        total = solver.Constraint(1.0, 1.0)
        for price in prices:
            total.SetCoefficient(price, 1.0)
    for cost, over in cuts:
        row = solver.Constraint(-solver.infinity(), cost / spread)
        row.SetCoefficient(low, 1.0)
        for price, at in zip(prices, active, strict=True):
            row.SetCoefficient(price, -float(over[at]) * box / spread)
    solver.Maximize(low)
    if solver.Solve() != solver.OPTIMAL:
        return None
    result = np.zeros(num_times)
    result[active] = [max(0.0, price.solution_value()) * box for price in prices]
    return float(low.solution_value()) * spread, result


def _first_price(cuts: list[tuple[float, np.ndarray]], active: list[int]) -> float:
    """A price at which the largest overload seen at an active time costs as much as the cheapest plan."""
    overload = max(float(over[active].max()) for _, over in cuts)
    return (min(cost for cost, _ in cuts) or 1.0) / overload if overload > 0 else 0.0
