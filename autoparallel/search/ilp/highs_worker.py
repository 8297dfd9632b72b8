"""The program that `highs.py` starts as a process: reads pickled models from stdin, writes the solutions of HiGHS to
stdout.

A process of its own, since HiGHS looks at its clock only now and then and prints to stdout whatever it is told: the
search can end this process on time, and nobody sees what it prints. It imports nothing of autoparallel.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import pickle
import signal
import sys
import time
from typing import Any

import numpy as np

_PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h


def solve(model: dict[str, Any]) -> tuple[np.ndarray | None, float, str, int, int]:
    """Values (None: none found), a lower bound, MathOpt's name of the reason to stop, nodes of the search tree, and
    pivots of the simplex method."""
    from ortools.math_opt import model_pb2
    from ortools.math_opt.python import mathopt
    from ortools.math_opt.solvers import highs_pb2

    proto = model_pb2.ModelProto()
    count = len(model["costs"])
    proto.variables.ids.extend(range(count))
    proto.variables.lower_bounds.extend([0.0] * count)
    proto.variables.upper_bounds.extend(model["highest"].tolist())
    proto.variables.integers.extend(model["integer"].tolist())
    paid = np.flatnonzero(model["costs"])
    proto.objective.linear_coefficients.ids.extend(paid.tolist())
    proto.objective.linear_coefficients.values.extend(model["costs"][paid].tolist())
    proto.linear_constraints.ids.extend(range(len(model["lows"])))
    proto.linear_constraints.lower_bounds.extend(model["lows"].tolist())
    proto.linear_constraints.upper_bounds.extend(model["highs"].tolist())
    matrix = proto.linear_constraint_matrix
    matrix.row_ids.extend(model["rows"].tolist())
    matrix.column_ids.extend(model["columns"].tolist())
    matrix.coefficients.extend(model["coefficients"].tolist())
    left = None if model["until"] is None else max(0.01, model["until"] - time.time())
    limit = None if left is None else datetime.timedelta(seconds=left)
    parameters = mathopt.SolveParameters(
        random_seed=1, highs=highs_pb2.HighsOptionsProto(string_options={"parallel": "off"}), time_limit=limit,
        relative_gap_tolerance=model["gap"], absolute_gap_tolerance=0.0, node_limit=model["nodes"])
    result = mathopt.solve(mathopt.Model.from_model_proto(proto), mathopt.SolverType.HIGHS, params=parameters)
    values = None
    if result.has_primal_feasible_solution():
        values = np.zeros(count)
        for variable, value in result.variable_values().items():
            values[variable.id] = value
    termination, did = result.termination, result.solve_stats
    return (values, termination.objective_bounds.dual_bound, termination.reason.name, did.node_count,
            did.simplex_iterations)


def end_with(parent: int) -> None:
    """Let this process end when its parent does, also in the middle of a model. (On Linux; elsewhere it ends when it
    reads the next model.)"""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        sys.exit()


def main() -> None:
    end_with(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while True:
        try:
            model = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: object = solve(model)
        except Exception as error:
            cause = error.__context__ or error  # ortools 9.15 fails to tell what went wrong
            answer = f"{type(cause).__name__}: {cause}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
