"""Search for graphs too wide for elimination: merge, price memory with message passing, prove by an integer program or
branch and bound, else improve by large-neighbourhood search.

    compact form, shrunk -> messages and prices of memory    bound, plans that are made to fit
                         -> where that is not too large: some large-neighbourhood search, then branch and bound
                         -> else large-neighbourhood search; where that brings nothing more, prices, and again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autoparallel import clock
from autoparallel.search.high_width.aggregation import shrink
from autoparallel.search.high_width.branch_and_bound import Branching, allowed_cells
from autoparallel.search.high_width.event_form import Compact, compact_of
from autoparallel.search.high_width.large_neighbourhood import Parts
from autoparallel.search.high_width.local_search import LocalSearch, finite_limit
from autoparallel.search.high_width.trws import SWEEPS, Ascent, Messenger, raise_prices
from autoparallel.search.low_width.solve import TARGET_GAP, Outcome
from autoparallel.search.model.problem import FORBIDDEN, MemoryLimitError, Problem, evaluate

SMALL_CELLS = 60_000
BRANCH_CELLS = 600_000
FIRST_ROUNDS = 15
TURN_ROUNDS = 100
IDLE_TURNS = 8
SMALL_GAIN = 1e-5
QUICK_STEPS = 20
STEPS = 60
PRICE_SHARE = 0.35
DEAR = 30.0
REPAIR_SHARE = 0.1
FIRST_SHARE = 0.5
TELL_S = 10.0
MERGE_SHARE = 0.3
FIRST_PLAN_SHARE = 0.04  # so much over time, or so many seconds, are better than no plan
FIRST_PLAN_S = 5.0
JUDGINGS = 2.0  # what is left to do when time is up takes as long as judging a plan so many times
ROUND_SWEEPS, PARTS_SWEEPS, PLAN_SWEEPS = 16, 4, 5  # what a step of the prices and a look at its plan, the setting up
# of parts, and a plan that is made to fit take, in sweeps one way


def quick_plan(compact: Compact, deadline: float) -> list[int] | None:
    """A plan that fits, from a few steps of message passing and memory prices; None if none is found."""
    best: list[int] | None = None
    cost = FORBIDDEN

    def offer(plan: list[int]) -> float:
        nonlocal best, cost
        local_search = LocalSearch(compact, plan, messenger.limit)
        if local_search.repair(deadline):
            local_search.descend(deadline)
            if local_search.cost() < cost and compact.fits(local_search.plan):
                best, cost = list(local_search.plan), local_search.cost()
        return cost

    messenger = Messenger(compact, finite_limit(compact))
    now = clock.now()
    raise_prices(messenger, now + (deadline - now) / 3, QUICK_STEPS, offer)
    return best


class WideSearch:
    """One search; ``outcome`` is its best plan and bound so far, at any time."""

    def __init__(self, problem: Problem, deadline: float, known: Sequence[int] | None,
                 on_better: Callable[[Outcome], None]) -> None:
        self.problem, self.deadline, self._on_better = problem, deadline, on_better
        self.outcome = Outcome(None, FORBIDDEN, -FORBIDDEN, "gap")
        self._start = clock.now()
        self._grace = max(FIRST_PLAN_S, FIRST_PLAN_SHARE * (deadline - self._start)) if deadline < FORBIDDEN else 0.0
        self.shrunk = shrink(compact_of(problem), until=self._left(MERGE_SHARE))
        if not self.shrunk.allowed:
            raise MemoryLimitError(problem.name, problem.limit, problem.limit)
        self._known = known
        self._told = clock.now()
        self._best: list[int] | None = None
        self._shown: list[int] | None = None
        self._cost = FORBIDDEN
        self._sweep_s = self._judging_s = 0.0
        self._cut_short = False
        self._lap("merge")

    def _lap(self, phase: str) -> None:
        now = clock.now()
        self.outcome.seconds[phase] = self.outcome.seconds.get(phase, 0.0) + now - self._start
        self._start = now

    def _left(self, share: float) -> float:
        """The time at which ``share`` of the remaining time has passed."""
        now = clock.now()
        return now + share * max(0.0, self.deadline - now) if self.deadline < FORBIDDEN else FORBIDDEN

    def _ends_late(self, seconds: float = 0.0) -> bool:
        """Whether there is a plan, and no time for a phase that takes so long; then the search is cut short."""
        late = self._best is not None and clock.now() + seconds >= self.deadline
        self._cut_short = self._cut_short or late
        return late

    def run(self) -> None:
        """Search until proof or deadline; also when interrupted, ``outcome`` has the best plan."""
        try:
            self._run()
        finally:
            self._publish()

    def _run(self) -> None:
        compact = self.shrunk.compact
        messenger = Messenger(compact, finite_limit(compact))

        def offer(plan: Sequence[int]) -> float:
            return self._offer(plan, messenger.limit)

        if self._known is not None:
            offer(self.shrunk.forward(self._known))
        self._first_plan(messenger, offer)
        ascent = Ascent(compact)
        if not self._ends_late(ROUND_SWEEPS * self._sweep_s):
            messenger.into[:] = 0.0
            ascent.climb(messenger, self._left(PRICE_SHARE), STEPS, offer)
        self._bound(ascent.best.bound)
        self._lap("prices")
        self._publish()
        self.deadline -= JUDGINGS * self._judging_s
        cells = allowed_cells(compact)
        if self._best is not None and not self._closed() and cells > SMALL_CELLS and not self._ends_late(
                PARTS_SWEEPS * self._sweep_s):
            parts = Parts(compact, self._best, messenger, ascent.best.values, self.deadline, self._take)
            if cells <= BRANCH_CELLS:
                parts.run(self.outcome.lower_bound, TARGET_GAP, FIRST_ROUNDS)
                self._lap("parts")
            else:
                self._in_turns(ascent, parts, offer)
            self._cut_short = self._cut_short or parts.is_late
        if cells <= BRANCH_CELLS and not self._closed() and not self._ends_late():
            branching = Branching(compact, self._cost, ascent.best.values, self.deadline, offer)
            self._bound(branching.run())
            self._cut_short = self._cut_short or branching.is_late
            if self._best is None and self.outcome.lower_bound == FORBIDDEN:
                raise MemoryLimitError(self.problem.name, self.problem.limit, self.problem.limit)
            self._lap("branches")
        self._finish()

    def _in_turns(self, ascent: Ascent, parts: Parts, offer: Callable[[Sequence[int]], float]) -> None:
        """Parts; once several turns of them bring next to nothing, prices as far as they go, and parts from there."""
        climbs, idle = True, 0
        while self._best is not None and not self._closed() and not self._ends_late(PARTS_SWEEPS * self._sweep_s):
            cost = self._cost
            if idle < IDLE_TURNS:
                parts.go_on(self._best, ascent.best.values)
                parts.run(self.outcome.lower_bound, TARGET_GAP, TURN_ROUNDS)
                idle = idle + 1 if cost - self._cost <= SMALL_GAIN * abs(cost) else 0
                self._lap("parts")
                if parts.is_late:
                    return
            elif climbs and not self._ends_late(ROUND_SWEEPS * self._sweep_s):
                until = self.deadline - 2 * ROUND_SWEEPS * self._sweep_s
                climbs = ascent.climb(parts.messenger, until, STEPS, offer, cost)
                self._bound(max(ascent.best.bound, self._settled(parts.messenger, ascent.best.values)))
                idle = IDLE_TURNS if climbs else 0
                self._lap("prices")
            else:
                return

    def _settled(self, messenger: Messenger, prices: np.ndarray) -> float:
        """The bound of messages that have caught up with these prices; the next steps start from such messages."""
        return float(messenger.settle(messenger.costs(prices))) - float(prices @ messenger.compact.room)

    def _first_plan(self, messenger: Messenger, offer: Callable[[Sequence[int]], float]) -> None:
        """Where there is no time for all steps of the prices: a plan for which what the nodes' own cheapest choices use
        too much of is expensive, so that it soon fits. It may cost twice the best. Sweeps go on while there is time."""
        if self.deadline == FORBIDDEN:
            return
        compact, start = messenger.compact, clock.now()
        costs = messenger.costs(np.zeros(len(compact.room)))
        bound = messenger.sweep(costs, False)
        now = clock.now()
        self._sweep_s = now - start
        if 2 * SWEEPS * STEPS * self._sweep_s > PRICE_SHARE * (self.deadline - now):
            bound = self._settle(messenger, costs, bound, PLAN_SWEEPS)
            self._bound(bound)
            if self._best is None:
                least = [int(array.argmin()) for array in costs]
                over = np.maximum(compact.load(least) - compact.room, 0.0)
                expensive = messenger.costs(DEAR * abs(bound) * over / (float(over @ over) or 1.0))
                if clock.now() + (1 + PLAN_SWEEPS) * self._sweep_s < self.deadline:
                    self._settle(messenger, expensive, messenger.sweep(expensive, False), PLAN_SWEEPS)
                offer(messenger.plan(expensive))
            self._publish()

    def _settle(self, messenger: Messenger, costs: Sequence[np.ndarray], bound: float, later: int) -> float:
        """Sweeps there and back, while there is time for what takes as long as so many more."""
        for _ in range(SWEEPS):
            if clock.now() + (2 + later) * self._sweep_s > self.deadline:
                break
            messenger.sweep(costs, True)
            bound = max(bound, messenger.sweep(costs, False))
        return bound

    def _finish(self) -> None:
        late = self._cut_short or clock.now() >= self.deadline
        self.outcome.stop_reason = "optimal" if self._closed() else "time limit" if late else "gap"

    def _closed(self) -> bool:
        return self._best is not None and self._cost - self.outcome.lower_bound <= TARGET_GAP * abs(self._cost)

    def _bound(self, bound: float) -> None:
        self.outcome.lower_bound = min(max(self.outcome.lower_bound, bound), self._cost)

    def _offer(self, plan: Sequence[int], limit: float) -> float:
        """Make a plan fit and better, and keep it if it is the best; returns the best cost so far."""
        local_search = LocalSearch(self.shrunk.compact, plan, limit)
        if local_search.repair(self._left(REPAIR_SHARE) if self._best else self.deadline + self._grace):
            local_search.descend(self._left(REPAIR_SHARE if self._best else FIRST_SHARE))
            cost = local_search.cost()
            if cost < self._cost and self.shrunk.compact.fits(local_search.plan):
                self._take(list(local_search.plan), cost)
        return self._cost

    def _take(self, plan: list[int], cost: float) -> None:
        self._best, self._cost = plan, cost
        if clock.now() - self._told > TELL_S:
            self._publish()
            self._told = clock.now()

    def _publish(self) -> None:
        """Report the best plan so far to the caller; only the moment of reports depends on the clock."""
        if self._best is None or self._best is self._shown:
            return
        start, self._shown = clock.now(), self._best
        choice = self.shrunk.restore(self._best)
        judged = evaluate(self.problem, choice)
        if judged.feasible and judged.objective < self.outcome.objective:
            self.outcome.choice, self.outcome.objective = choice, judged.objective
            self._on_better(Outcome(choice, judged.objective, self.outcome.lower_bound, "better"))
        self._judging_s = max(self._judging_s, clock.now() - start)
