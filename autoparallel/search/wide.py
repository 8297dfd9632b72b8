"""Search where elimination is too wide: merge, price memory with messages, prove by a program or improve part by part.

    compact form, shrunk -> messages and prices of memory    bound, plans that are made to fit
                         -> what can still be part of a better plan, as an integer program, if that is small
                         -> else large-neighbourhood search until time is up
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from autoparallel.search.compact import Compact, compact_of
from autoparallel.search.exact import TARGET_GAP, Outcome
from autoparallel.search.merge import shrink
from autoparallel.search.messages import Messenger, Prices, raise_prices
from autoparallel.search.parts import Parts
from autoparallel.search.problem import FORBIDDEN, MemoryLimitError, Problem, evaluate
from autoparallel.search.program import Program, cells
from autoparallel.search.walk import Walk, finite_limit

PROGRAM_CELLS = 60_000
PROGRAM_STEPS = 60
QUICK_STEPS = 20
STEPS = 2000
PRICE_SHARE = 0.35
PROGRAM_SHARE = 0.9
REPAIR_SHARE = 0.1
TELL_S = 2.0
FIRST_PLAN_SHARE = 0.04  # so much over time is better than no plan


def quick_plan(compact: Compact, deadline: float) -> list[int] | None:
    """Some plan that fits, from a few steps of messages and prices; None: not found."""
    best: list[int] | None = None
    cost = FORBIDDEN

    def offer(plan: list[int]) -> float:
        nonlocal best, cost
        walk = Walk(compact, plan, messenger.limit)
        if walk.repair(deadline):
            walk.descend(deadline)
            if walk.cost() < cost and compact.fits(walk.plan):
                best, cost = list(walk.plan), walk.cost()
        return cost

    messenger = Messenger(compact, finite_limit(compact))
    now = time.monotonic()
    raise_prices(messenger, now + (deadline - now) / 3, QUICK_STEPS, offer)
    return best


class WideSearch:
    """One search; ``outcome`` is what it knows at any time."""

    def __init__(self, problem: Problem, deadline: float, known: tuple[int, ...] | None,
                 on_better: Callable[[Outcome], None]) -> None:
        self.problem, self.deadline, self._on_better = problem, deadline, on_better
        self.outcome = Outcome(None, FORBIDDEN, -FORBIDDEN, "gap")
        self._start = time.monotonic()
        self._grace = FIRST_PLAN_SHARE * (deadline - self._start) if deadline < FORBIDDEN else 0.0
        self.shrunk = shrink(compact_of(problem))
        if not self.shrunk.allowed:
            raise MemoryLimitError(problem.name, problem.limit, problem.limit)
        self._known = known
        self._told = time.monotonic()
        self._best: list[int] | None = None
        self._cost = FORBIDDEN
        self._lap("merge")

    def _lap(self, phase: str) -> None:
        now = time.monotonic()
        self.outcome.seconds[phase] = self.outcome.seconds.get(phase, 0.0) + now - self._start
        self._start = now

    def _left(self, share: float) -> float:
        """The time at which this share of what is left has passed."""
        now = time.monotonic()
        return now + share * max(0.0, self.deadline - now) if self.deadline < FORBIDDEN else FORBIDDEN

    def run(self) -> None:
        """Search until proof or deadline; also when interrupted, ``outcome`` has the best plan."""
        try:
            self._run()
        finally:
            self._publish()

    def _run(self) -> None:
        compact = self.shrunk.compact
        messenger = Messenger(compact, finite_limit(compact))
        small = cells(compact) <= PROGRAM_CELLS
        if self._known is not None:
            self._offer(list(self.shrunk.forward(self._known)), messenger.limit)
        prices = raise_prices(messenger, self._left(PRICE_SHARE), PROGRAM_STEPS if small else STEPS,
                              lambda plan: self._offer(plan, messenger.limit))
        self._bound(prices.bound)
        self._lap("prices")
        if self._closed() or self._prove(messenger, prices):
            return
        if self._best is not None:
            parts = Parts(compact, self._best, messenger, prices.values, self.deadline, self._take)
            parts.run(self.outcome.lower_bound, TARGET_GAP)
            self._lap("parts")
            if not self._closed():
                self._prove(messenger, prices)
        self._finish()

    def _finish(self) -> None:
        self.outcome.stop_reason = ("optimal" if self._closed() else
                                    "time limit" if time.monotonic() >= self.deadline else "gap")

    def _closed(self) -> bool:
        return self._best is not None and self._cost - self.outcome.lower_bound <= TARGET_GAP * abs(self._cost)

    def _bound(self, bound: float) -> None:
        self.outcome.lower_bound = min(max(self.outcome.lower_bound, bound), self._cost)

    def _offer(self, plan: list[int], limit: float) -> float:
        """Make a plan fit and better, and keep it if it is the best; returns the best cost so far."""
        walk = Walk(self.shrunk.compact, plan, limit)
        if walk.repair(self._left(REPAIR_SHARE) if self._best else self.deadline + self._grace):
            walk.descend(self._left(REPAIR_SHARE))
            cost = walk.cost()
            if cost < self._cost and self.shrunk.compact.fits(walk.plan):
                self._take(list(walk.plan), cost)
        return self._cost

    def _take(self, plan: list[int], cost: float) -> None:
        self._best, self._cost = plan, cost
        if time.monotonic() - self._told > TELL_S:
            self._publish()
            self._told = time.monotonic()

    def _publish(self) -> None:
        """Show the best plan so far, judged; only what is told and when depends on the clock."""
        if self._best is not None:
            choice = self.shrunk.restore(self._best)
            judged = evaluate(self.problem, choice)
            if judged.feasible and judged.objective < self.outcome.objective:
                self.outcome.choice, self.outcome.objective = choice, judged.objective
                self._on_better(Outcome(choice, judged.objective, self.outcome.lower_bound, "better"))

    def _prove(self, messenger: Messenger, prices: Prices) -> bool:
        """Solve a program of the choices that can still be part of a better plan; False where it is too large."""
        compact = self.shrunk.compact
        if time.monotonic() >= self.deadline:
            return False
        costs = messenger.costs(prices.values)
        bound = messenger.settle(costs) - float(prices.values @ compact.room)
        self._bound(bound)
        kept = None
        if self._best is not None:
            room = (self._cost - bound) * (1 + 1e-6) + 1e-9 * abs(self._cost)
            kept = [np.flatnonzero(regret <= room) for regret in messenger.regrets(costs)]
            kept = [np.union1d(rows, [pick]) for rows, pick in zip(kept, self._best, strict=True)]
        left = shrink(compact, kept)
        if not left.allowed or cells(left.compact) > PROGRAM_CELLS:
            return False
        self._lap("program")
        picks, answer = Program(left.compact).solve(self._left(PROGRAM_SHARE), self._cost)
        if answer.reason == "infeasible":
            if self._best is None:
                raise MemoryLimitError(self.problem.name, self.problem.limit, self.problem.limit)
            self._bound(self._cost)
        else:
            self._bound(answer.bound)
        if picks is not None:
            self._offer(list(left.restore(picks)), messenger.limit)
        self._finish()
        self._lap("program")
        return self._closed()
