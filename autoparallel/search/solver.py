"""`solve`: which search runs when, under one clock, judged by `evaluate`."""

from __future__ import annotations

import time
from collections.abc import Callable

from autoparallel.errors import SearchError
from autoparallel.search.elimination import Eliminator
from autoparallel.search.exact import TARGET_GAP, Outcome, affordable, solve_exact, trivial_bound
from autoparallel.search.ilp import raise_infeasible, solve_ilp
from autoparallel.search.memory import memory_of
from autoparallel.search.problem import FORBIDDEN, MemoryLimitError, Pricer, Problem, Solution, evaluate
from autoparallel.search.recursive import solve_recursive_problem

Progress = Callable[[str, float, float], None]
AUTO_GAP = 1e-3


def _exact(problem: Problem, deadline: float, pricer: Pricer | None) -> Outcome:
    eliminator = Eliminator(problem)
    if not affordable(eliminator, problem):
        return _merge(solve_recursive_problem(problem, deadline, pricer), solve_ilp_or_nothing(problem, deadline))
    return solve_exact(problem, deadline, eliminator.solve)


def _ilp(problem: Problem, deadline: float, pricer: Pricer | None) -> Outcome:
    return solve_ilp(problem, deadline)


def _auto(problem: Problem, deadline: float, pricer: Pricer | None) -> Outcome:
    """Elimination first; a program over the rest only where a gap is left."""
    found = _exact(problem, deadline, pricer)
    if found.objective - found.lower_bound > AUTO_GAP * abs(found.objective) and time.monotonic() < deadline:
        found = _merge(found, solve_ilp(problem, deadline, found.choice))
    return found


def solve_ilp_or_nothing(problem: Problem, deadline: float) -> Outcome:
    if time.monotonic() >= deadline:
        return Outcome(None, FORBIDDEN, trivial_bound(problem), "time limit")
    return solve_ilp(problem, deadline)


def _merge(first: Outcome, second: Outcome) -> Outcome:
    """The better plan, the better bound, the later reason, all the seconds."""
    best = min(first, second, key=lambda outcome: outcome.objective)
    bound = min(max(first.lower_bound, second.lower_bound), best.objective)
    closed = best.choice is not None and best.objective - bound <= TARGET_GAP * abs(best.objective)
    seconds = {name: first.seconds.get(name, 0.0) + second.seconds.get(name, 0.0)
               for name in [*first.seconds, *second.seconds]}
    return Outcome(best.choice, best.objective, bound, "optimal" if closed else second.stop_reason, seconds)


_SEARCHES: dict[str, Callable[[Problem, float, Pricer | None], Outcome]] = {
    "auto": _auto, "exact": _exact, "ilp": _ilp, "recursive": lambda *given: solve_recursive_problem(*given)}
SEARCHES = tuple(_SEARCHES)


def solve(problem: Problem, search: str = "auto", time_limit_s: float | None = None, pricer: Pricer | None = None,
          progress: Progress | None = None) -> Solution:
    """The best plan that this search finds, with a lower bound that holds for every plan.

    ``progress(phase, objective, lower_bound)`` is called as the search goes on. The same problem gives the same plan
    unless the clock stops the search.

    Raises:
        SearchError: unknown search, or no plan found in time though none is proven impossible.
        MemoryLimitError: no plan fits into the limit (with ``needed_bytes`` and ``limit_bytes``).
        InfeasibleError: every plan is forbidden.
    """
    if search not in _SEARCHES:
        raise SearchError(f"unknown search {search!r}; there are: {', '.join(SEARCHES)}")
    start = time.monotonic()
    deadline = FORBIDDEN if time_limit_s is None else start + time_limit_s
    try:
        found = _SEARCHES[search](problem, deadline, pricer)
    except MemoryLimitError:
        raise_infeasible(problem, deadline)
        raise
    if found.choice is None:
        found = _merge(found, solve_ilp(problem, max(deadline, time.monotonic() + 1.0)))
    if found.choice is None:
        raise SearchError(f"{problem.name}: no plan that fits was found in {time.monotonic() - start:.1f} s, though "
                          "none is proven impossible. Allow more time (time_limit_s) or more memory.")
    judged = evaluate(problem, found.choice)
    if progress is not None:
        progress(found.stop_reason, judged.objective, found.lower_bound)
    seconds = {**found.seconds, "total": time.monotonic() - start}
    return Solution(found.choice, judged.objective, min(found.lower_bound, judged.objective), judged.peak_bytes,
                    found.stop_reason, search, seconds)
