"""Search: the problem, its solvers and their one judge. No torch. See README.md."""

from __future__ import annotations

import time

from autoparallel.errors import InfeasibleError, SearchError
from autoparallel.search.elimination import Eliminator
from autoparallel.search.exact import Outcome, affordable, solve_exact, trivial_bound
from autoparallel.search.ilp import solve_ilp
from autoparallel.search.labelled import LabelledPricer
from autoparallel.search.presolve import drop_dominated
from autoparallel.search.problem import (
    Edge,
    Evaluation,
    MemoryLimitError,
    Node,
    Pricer,
    Problem,
    Solution,
    evaluate,
)
from autoparallel.search.recursive import solve_recursive

SEARCHES = ("auto", "exact", "ilp", "recursive")

__all__ = [
    "SEARCHES",
    "Edge",
    "Evaluation",
    "InfeasibleError",
    "LabelledPricer",
    "Node",
    "Pricer",
    "Problem",
    "Solution",
    "evaluate",
    "solve",
]


def solve(
    problem: Problem, search: str = "auto", *, time_limit_s: float = 60.0, pricer: Pricer | None = None
) -> Solution:
    """The best choice found, with its evidence.

    ``search``: "exact" (elimination; memory as prices), "ilp" (OR-tools on what presolve leaves), "recursive" (axis by
    axis; needs labels), or "auto" (exact where its tables fit, else recursive). ``pricer`` defaults to selecting from
    the problem itself.

    Raises SearchError for an unknown search, InfeasibleError when no choice meets the memory limit.
    """
    if search not in SEARCHES:
        raise SearchError(f"unknown search {search!r}; there are {', '.join(SEARCHES)}")
    started = time.monotonic()
    deadline = started + time_limit_s
    try:
        solver, outcome = _run(problem, search, deadline, pricer)
    except MemoryLimitError as error:
        raise InfeasibleError(*error.args) from error
    if outcome.choice is None:
        raise InfeasibleError(f"{problem.name}: no plan found within {problem.limit:.6g} bytes in {time_limit_s:g} s")
    judged = evaluate(problem, outcome.choice)
    seconds = {**outcome.seconds, "total": time.monotonic() - started}
    return Solution(outcome.choice, judged.objective, min(outcome.lower_bound, judged.objective), judged.peak_bytes,
                    outcome.stop_reason, solver, seconds)


def _run(problem: Problem, search: str, deadline: float, pricer: Pricer | None) -> tuple[str, Outcome]:
    if search == "recursive":
        return search, solve_recursive(problem, pricer or LabelledPricer(problem), deadline)
    began = time.monotonic()
    reduced = drop_dominated(problem)
    presolve_s = time.monotonic() - began
    eliminator = Eliminator(reduced.problem)
    if affordable(eliminator, reduced.problem):
        outcome = solve_exact(reduced.problem, deadline)
        solver = "exact"
    else:
        outcome = solve_recursive(reduced.problem, LabelledPricer(reduced.problem), deadline)
        outcome.lower_bound = max(outcome.lower_bound, trivial_bound(problem))
        solver = "recursive"
    outcome.seconds["presolve"] = presolve_s
    if outcome.choice is not None:
        outcome.choice = reduced.restore(outcome.choice)
    if search == "ilp":
        start, outcome = outcome, solve_ilp(problem, deadline, outcome)
        outcome.seconds = {**start.seconds, **outcome.seconds}
        return "ilp", outcome
    return solver, outcome


