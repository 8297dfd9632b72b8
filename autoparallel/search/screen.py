"""Where elimination is dear: a bound and the choices that a better plan may have, from messages at known prices.

Double recursion has a plan and prices of memory in a second. At these prices no limit is left, messages (TRW-S) are
fast and mostly tight on models' graphs, and what they leave of the choices is eliminated in little time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from autoparallel.search.compact import compact_of
from autoparallel.search.exact import TimedPrices
from autoparallel.search.lagrange import at_prices
from autoparallel.search.messages import Messenger
from autoparallel.search.presolve import Reduced, keep
from autoparallel.search.problem import Problem
from autoparallel.search.walk import finite_limit

NO_PRICES = np.zeros(0, np.int64), np.zeros(0)
SWEEPS, QUICK_SWEEPS = 2, 5
MAX_SETTLES = 40
SLOW = 0.01  # of what is missing
SLACK = 1e-9


def bound_without_limit(problem: Problem) -> float:
    """A lower bound for every plan, whatever memory it takes, in little time."""
    free, _ = at_prices(problem, *NO_PRICES)
    messenger = Messenger(compact := compact_of(free), finite_limit(compact))
    return messenger.settle(messenger.costs(np.zeros(0)), QUICK_SWEEPS)


def screen(problem: Problem, choice: Sequence[int], objective: float, prices: TimedPrices | None, gap: float,
           deadline: float) -> tuple[float, Reduced]:
    """A lower bound for every plan that fits, and the choices of plans that cost less than ``objective``, the cost of
    ``choice``, which keeps its own. Sweeps end within ``gap`` (a share), or where they gain little.

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
        if missing <= gap * abs(objective) or bound - before <= SLOW * missing or time.monotonic() >= deadline:
            break
    reach = objective - bound + SLACK * abs(objective)
    kept = []
    for regret, pick in zip(messenger.regrets(costs), choice, strict=True):
        regret[pick] = 0.0
        kept.append(np.flatnonzero(regret <= reach))
    return bound, keep(problem, kept)
