"""Double recursion: one mesh axis after another, from the slowest links to the fastest; on each, the whole graph
exactly.

Outer recursion: one axis is decided at a time. What the axes below it will do is not known yet, so each level is solved
under several lookaheads ("they repeat the work", "they do the same as this axis"), and the best few plans are kept (the
beam): looking at one level alone collapses to all data-parallel.
Inner recursion: a level's problem has one choice per row of one axis, and is decomposed and solved by elimination.

Decided level by level under a memory limit, plans come out up to 1.27 times the optimum: what a level saves depends on
levels that are not decided. So every strategy that some level wanted is kept, and all axes are decided at once among
these few, which gives the best prices of memory too. At these prices each axis in turn is decided again, beside every
wanted strategy, and adds what it wants; until nothing is added (column generation, with levels as its pricing
problems).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoparallel import clock
from autoparallel.search.low_width.bucket_elimination import Eliminator, TimeIsUpError
from autoparallel.search.low_width.lagrangian import at_prices, raise_bound
from autoparallel.search.low_width.solve import Incumbent, affordable, solve_exact
from autoparallel.search.low_width.variable_fixing import Priced
from autoparallel.search.model.memory_rows import least_peak, memory_of
from autoparallel.search.model.problem import FORBIDDEN, MemoryLimitError, Pricer, Problem, Strategy, evaluate

BEAM = 4
PRICINGS = 12
ROUNDS = 12
LEVEL_GAP = 1e-4
WANTED_GAP = 1e-3
WORK_CELLS = 2e9
Plan = tuple[Strategy, ...]


@dataclass(frozen=True)
class State:
    """A whole plan with its rank: bytes over the limit first, then seconds."""

    rank: tuple[float, float]
    plan: Plan


class AtPrices:
    """A pricer whose memory costs so many seconds per byte at each of ``times``, and has no limit."""

    def __init__(self, pricer: Pricer, times: np.ndarray, prices: np.ndarray) -> None:
        self._pricer, self._times, self._prices = pricer, times, prices
        self.axis_names, self.num_nodes = pricer.axis_names, pricer.num_nodes
        self.axis_strategies, self.strategies, self.repeat_strategy = (
            pricer.axis_strategies,
            pricer.strategies,
            pricer.repeat_strategy,
        )

    def problem(self, allowed: Sequence[Sequence[Strategy]]) -> Problem:
        return at_prices(self._pricer.problem(allowed), self._times, self._prices)[0]


@dataclass(frozen=True)
class Found:
    """A choice per node, as positions in its `strategies`, which may exceed the memory limit; and prices of memory, in
    seconds per byte at each of ``times`` (none where memory does not bind, or no feasible plan is known)."""

    choice: tuple[int, ...]
    times: np.ndarray
    prices: np.ndarray


class Recursion:
    """The search over one pricer; every intermediate state is a complete plan for all axes."""

    def __init__(self, pricer: Pricer, deadline: float) -> None:
        self.pricer, self.deadline = pricer, deadline
        self.num_axes = len(pricer.axis_names)
        shared: dict[tuple[Strategy, ...], tuple[Strategy, ...]] = {}
        self._strategies = [shared.setdefault(strategies, strategies) for strategies
                        in (tuple(pricer.strategies(v)) for v in range(pricer.num_nodes))]
        self._near: dict[tuple[int, Plan, int], tuple[Strategy, ...]] = {}
        self._closest: dict[tuple[int, Strategy, int], Strategy | None] = {}
        self._wanted: list[dict[Strategy, None]] = [{} for _ in self._strategies]

    def closest(self, v: int, wanted: Strategy, num_fixed: int) -> Strategy | None:
        """The strategy equal to ``wanted`` on the first axes that agrees most on the others; ties by position."""
        strategies = self._strategies[v]
        key = id(strategies), wanted, num_fixed
        if key not in self._closest:
            fits = [strategy for strategy in strategies if strategy[:num_fixed] == wanted[:num_fixed]]
            agrees = [sum(x == y for x, y in zip(strategy, wanted, strict=True)) for strategy in fits]
            self._closest[key] = fits[agrees.index(max(agrees))] if fits else None
        return self._closest[key]

    def solve_allowed(self, allowed: Sequence[Sequence[Strategy]]) -> State | None:
        """The best plan of a restricted problem, None when it has none; memory by prices and repair."""
        problem = self.pricer.problem(allowed)
        eliminator = Eliminator.of(problem)
        if not affordable(eliminator, problem, WORK_CELLS):
            return None
        memory = memory_of(problem if problem.limit == FORBIDDEN
                           else replace(problem, limit=max(problem.limit, least_peak(problem))))
        incumbent = Incumbent(problem, memory, self.deadline)
        dual = raise_bound(problem, memory, eliminator.solve, self.deadline, PRICINGS, incumbent.offer, LEVEL_GAP)
        plans = [*dual.plans, *([incumbent.choice] if incumbent.choice else [])]
        for plan in plans:
            self._want(allowed, plan)
        ranked = [(self._rank(problem, plan), plan) for plan in plans]
        if not ranked:
            return None
        rank, choice = min(ranked)
        if rank[1] == FORBIDDEN:
            return None
        return State(rank, tuple(strategies[i] for strategies, i in zip(allowed, choice, strict=True)))

    @staticmethod
    def _rank(problem: Problem, choice: Sequence[int]) -> tuple[float, float]:
        judged = evaluate(problem, choice)
        return max(0.0, judged.peak_bytes - problem.limit), judged.objective

    def level(self, axis: int, plan: Plan | None, lookahead: str) -> State | None:
        """Decide ``axis``; axes above it are as in ``plan``, axes below it follow the lookahead."""
        known: dict[object, tuple[Strategy, ...]] = {}
        allowed = []
        for v, strategies in enumerate(self._strategies):
            decided = plan[v] if plan is not None else ()
            repeat = tuple(self.pricer.repeat_strategy(v, a) for a in range(axis + 1, self.num_axes))
            key = id(strategies), decided, repeat
            if key not in known:
                wanted = ((*decided[:axis], one, *([one] * len(repeat) if lookahead == "same" else repeat))
                          for one in self.pricer.axis_strategies(v, axis))
                near = [self.closest(v, strategy, axis + 1) for strategy in wanted]
                known[key] = tuple(dict.fromkeys(strategy for strategy in (decided, *near) if strategy))
            allowed.append(known[key])
        return self.solve_allowed(allowed)

    def descend_axes(self) -> list[State]:
        """The outer recursion: best few plans, all axes decided."""
        beam: list[State | None] = [None]
        for axis in range(self.num_axes):
            lookaheads = ("repeat", "same") if axis + 1 < self.num_axes else ("repeat",)
            found: dict[Plan, State] = {}
            for state, lookahead in itertools.product(beam, lookaheads):
                start = clock.now()
                new = self.level(axis, state.plan if state else None, lookahead)
                for candidate in (new, state):
                    if candidate is not None:
                        found.setdefault(candidate.plan, candidate)
                if found and self._late(start):
                    break
            if not found:
                return []
            beam = [*sorted(found.values(), key=lambda state: state.rank)[:BEAM]]
            if clock.now() >= self.deadline:
                break
        return [state for state in beam if state is not None]

    def _late(self, start: float) -> bool:
        """Whether another round, as long as the one that began at ``start``, would end after the deadline."""
        now = clock.now()
        return now + (now - start) > self.deadline

    def improve(self, state: State) -> tuple[State, Priced | None]:
        """All axes at once among the wanted strategies and each axis anew at the prices found, in turn; never worse.

        With the prices of memory that were used last, None where there are none.
        """
        self._want([(strategy,) for strategy in state.plan], [0] * len(state.plan))
        left = None
        for _ in range(ROUNDS):
            known = self._num_wanted()
            start = clock.now()
            if start >= self.deadline:
                return state, left
            state, left = self.together(state)
            pricer = self.pricer if left is None else AtPrices(self.pricer, left.memory.times, left.dual.prices)
            for axis in range(self.num_axes):
                if clock.now() < self.deadline:
                    self.beside(axis, pricer)
            if self._late(start):
                return state, left
            if self._num_wanted() == known:
                break
        return state if left is None else self.together(state, mix=True)[0], left

    def together(self, state: State, mix: bool = False) -> tuple[State, Priced | None]:
        """Decide all axes at once among the wanted strategies; never worse. With the prices of memory, where it binds.

        ``mix``: whether to look for plans between those that the prices give (see `solve_exact`).
        """
        allowed = [tuple(wanted) for wanted in self._wanted]
        problem = self.pricer.problem(allowed)
        eliminator = Eliminator.of(problem)
        if not affordable(eliminator, problem, WORK_CELLS):
            return state, None
        start = [strategies.index(strategy) for strategies, strategy in zip(allowed, state.plan, strict=True)]
        try:
            found = solve_exact(problem, self.deadline, eliminator.until(self.deadline), lambda better: None,
                                WANTED_GAP, start=start, mix=mix)
        except MemoryLimitError:
            return state, None
        if found.choice is None:
            return state, found.left
        plan = tuple(strategies[pick] for strategies, pick in zip(allowed, found.choice, strict=True))
        return min(state, State(self._rank(problem, found.choice), plan), key=lambda s: s.rank), found.left

    def beside(self, axis: int, pricer: Pricer) -> None:
        """Want the best plan's strategies, among all that differ from wanted ones on this axis only, or not at all."""
        allowed = [self._beside(v, tuple(wanted), axis) for v, wanted in enumerate(self._wanted)]
        problem = pricer.problem(allowed)
        eliminator = Eliminator.of(problem)
        if affordable(eliminator, problem, WORK_CELLS):
            with contextlib.suppress(TimeIsUpError):
                _, plan = eliminator.until(self.deadline).solve(problem.costs)
                self._want(allowed, plan)

    def _beside(self, v: int, wanted: Plan, axis: int) -> tuple[Strategy, ...]:
        key = id(self._strategies[v]), wanted, axis
        if key not in self._near:
            others = {(*strategy[:axis], *strategy[axis + 1:]) for strategy in wanted}
            self._near[key] = tuple(x for x in self._strategies[v] if (*x[:axis], *x[axis + 1:]) in others)
        return self._near[key]

    def _want(self, allowed: Sequence[Sequence[Strategy]], plan: Sequence[int]) -> None:
        for wanted, strategies, pick in zip(self._wanted, allowed, plan, strict=True):
            wanted[strategies[pick]] = None

    def _num_wanted(self) -> int:
        return sum(map(len, self._wanted))


def search_axes(pricer: Pricer, deadline: float = FORBIDDEN) -> Found | None:
    """The best plan found; None when none is allowed.

    Per axis: a few eliminations with as many choices per node as the axis has rows; then rounds of one elimination per
    axis with a few times as many, and one search with a few choices per node.
    """
    search = Recursion(pricer, deadline)
    states = search.descend_axes()
    if not states:
        whole = search.solve_allowed([tuple(pricer.strategies(v)) for v in range(pricer.num_nodes)])
        states = [whole] if whole is not None else []
    if not states:
        return None
    best, left = search.improve(states[0])
    choice = tuple(tuple(pricer.strategies(v)).index(strategy) for v, strategy in enumerate(best.plan))
    if left is None or left.dual.bound == FORBIDDEN:
        return Found(choice, np.zeros(0, np.int64), np.zeros(0))
    return Found(choice, left.memory.times, left.dual.prices)
