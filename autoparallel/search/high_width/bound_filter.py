"""Where elimination is expensive: a lower bound by message passing, and the choices that a better plan may still
contain.

Double recursion has a plan and prices of memory in a second. At these prices no limit is left, messages (TRW-S) are
fast and mostly tight on models' graphs, and what they leave of the choices is eliminated in little time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoparallel import clock
from autoparallel.search.high_width.event_form import compact_of
from autoparallel.search.high_width.local_search import finite_limit
from autoparallel.search.high_width.trws import Messenger
from autoparallel.search.low_width.lagrangian import at_prices
from autoparallel.search.low_width.solve import TimedPrices
from autoparallel.search.model.dominance import Reduced, keep
from autoparallel.search.model.problem import Problem

NO_PRICES = np.zeros(0, np.int64), np.zeros(0)
SWEEPS, QUICK_SWEEPS = 2, 5
MAX_SETTLES = 40
SLOW = 0.01  # of what is missing


def bound_without_limit(problem: Problem) -> float:
    """A lower bound for every plan, whatever memory it takes, in little time."""
    free, _ = at_prices(problem, *NO_PRICES)
    messenger = Messenger(compact := compact_of(free), finite_limit(compact))
    return messenger.settle(messenger.costs(np.zeros(0)), QUICK_SWEEPS)


@dataclass(frozen=True, eq=False)
class Screened:
    """A lower bound for every plan that fits, and by how much one with each choice of each node must exceed it."""

    problem: Problem
    bound: float
    reduced_costs: tuple[np.ndarray, ...]

    def within(self, reach: float, choice: Sequence[int]) -> Reduced:
        """Without the choices of which no plan costs less than ``bound + reach``, but with those of ``choice``."""
        kept = [np.union1d(np.flatnonzero(reduced_cost <= reach), [pick])
                for reduced_cost, pick in zip(self.reduced_costs, choice, strict=True)]
        return keep(self.problem, kept)


def screen(problem: Problem, objective: float, prices: TimedPrices | None, gap: float, deadline: float) -> Screened:
    """Sweeps end within ``gap`` (a share) of ``objective``, the cost of a plan, or where they gain little.

    ``prices``: of memory, any at all. Takes a few times the memory of all tables; O(cells) a sweep.
    """
    free, room = at_prices(problem, *(prices or NO_PRICES))
    compact = compact_of(free)
    messenger = Messenger(compact, finite_limit(compact))
    costs = messenger.costs(np.zeros(0))
    bound = -np.inf
    for _ in range(MAX_SETTLES):
        before, bound = bound, max(bound, messenger.settle(costs, SWEEPS) - room)
        missing = objective - bound
        if missing <= gap * abs(objective) or bound - before <= SLOW * missing or clock.now() >= deadline:
            break
    return Screened(problem, bound, tuple(messenger.reduced_costs(costs)))
