"""Search: one small problem, several solvers, one judge, and a bound on how far from optimal. Imports no torch.

    solve(problem, search="auto" | "exact" | "ilp" | "recursive", time_limit_s=...) -> Solution
"""

from autoparallel.search.model.problem import (
    Edge,
    Evaluation,
    MemoryLimitError,
    Node,
    NotRepairedError,
    Pricer,
    Problem,
    Solution,
    Strategy,
    evaluate,
)
from autoparallel.search.solver import INTERRUPTED, SEARCHES, Progress, plan_within, solve

__all__ = [
    "INTERRUPTED",
    "SEARCHES",
    "Edge",
    "Evaluation",
    "MemoryLimitError",
    "Node",
    "NotRepairedError",
    "Pricer",
    "Problem",
    "Progress",
    "Solution",
    "Strategy",
    "evaluate",
    "plan_within",
    "solve",
]
