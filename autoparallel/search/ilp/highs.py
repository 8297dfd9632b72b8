"""Linear and integer programs for HiGHS, in a process of its own (see `highs_worker.py`) that ends when time is up."""

from __future__ import annotations

import atexit
import logging
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np

from autoparallel import clock
from autoparallel.search.model.problem import FORBIDDEN

_log = logging.getLogger("autoparallel")

RELATIVE_GAP = 1e-9
GRACE_S = 0.3  # HiGHS is given that much, or a share of its time, to hand in what it has
GRACE_SHARE = 0.1


class LinearModel:
    """A minimisation over variables from 0 to ``highest`` with rows ``low <= sum coefficient * variable <= high``."""

    def __init__(self) -> None:
        self.num_variables = self.num_rows = 0
        self._variables: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []
        self._terms: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def variables(self, costs: np.ndarray, integer: bool, highest: float | np.ndarray = 1.0) -> np.ndarray:
        """New variables, as their numbers."""
        count = len(costs)
        self._variables.append((costs, np.full(count, integer), np.broadcast_to(highest, count)))
        self.num_variables += count
        return np.arange(self.num_variables - count, self.num_variables)

    def rows(self, count: int, low: float, high: float | np.ndarray) -> np.ndarray:
        """New rows, as their numbers."""
        self._rows.append((np.full(count, low), np.full(count, high)))
        self.num_rows += count
        return np.arange(self.num_rows - count, self.num_rows)

    def terms(self, rows: np.ndarray, variables: np.ndarray, coefficients: float | np.ndarray) -> None:
        """Add ``coefficients[i] * variables[i]`` to ``rows[i]``; each pair once."""
        self._terms.append((rows, variables, np.broadcast_to(coefficients, rows.shape)))

    @property
    def costs(self) -> np.ndarray:
        return np.concatenate([costs for costs, _, _ in self._variables])

    def message(self, scale: float) -> dict[str, Any]:
        """The model for `highs_worker.py`, costs divided by ``scale``."""
        _, integer, highest = (np.concatenate(parts) for parts in zip(*self._variables, strict=True))
        lows, highs = (np.concatenate(parts) for parts in zip(*self._rows, strict=True))
        rows, columns, coefficients = (np.concatenate(parts) for parts in zip(*self._terms, strict=True))
        order = np.lexsort((columns, rows))
        return {"costs": self.costs / scale, "highest": highest, "integer": integer, "lows": lows, "highs": highs,
                "rows": rows[order], "columns": columns[order], "coefficients": coefficients[order]}


@dataclass(frozen=True)
class Answer:
    """``values`` per variable (None: none found), a lower bound, and why HiGHS stopped.

    Reasons: "optimal", "infeasible", "time limit" (also: the limit on branches), "ended" (its process, by the system;
    or HiGHS, by an error of its own, which is logged).
    """

    values: np.ndarray | None
    bound: float
    reason: str


class _Process(threading.local):
    """HiGHS in a process of its own, one for each thread that asks; it is kept for the thread's next model, since it
    takes a second to start. It ends with this process, however that ends."""

    def __init__(self) -> None:
        self._running: subprocess.Popen[bytes] | None = None
        self._parent = os.getpid()

    def ask(self, model: dict[str, Any], seconds: float) -> Any:
        """The answer, or None when the process was ended: by us after so many seconds, or for memory."""
        if self._parent != os.getpid():  # of a forked process the helper is the parent's
            self._running, self._parent = None, os.getpid()
        if self._running is None or self._running.poll() is not None:
            worker = str(Path(__file__).with_name("highs_worker.py"))
            self._running = subprocess.Popen(
                [sys.executable, worker, str(self._parent)], start_new_session=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            _started.add(self._running)
        running = self._running
        assert running.stdin is not None and running.stdout is not None
        timer = None
        if seconds < FORBIDDEN:
            timer = threading.Timer(max(0.0, seconds), running.kill)
            timer.name = "autoparallel deadline"
            timer.start()
        try:
            with clock.waiting():
                pickle.dump(model, running.stdin)
                running.stdin.flush()
                return pickle.load(running.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            return None
        except BaseException:
            self.stop()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def stop(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.wait()
            self._running = None


_started: WeakSet[subprocess.Popen[bytes]] = WeakSet()
_process = _Process()


@atexit.register
def _stop_all() -> None:
    for running in list(_started):
        running.kill()


def run_highs(model: LinearModel, deadline: float, cutoff: float = FORBIDDEN, branches: int | None = None) -> Answer:
    """Solve by branch and cut, one thread, one seed: equal models get equal answers unless the clock stops it.

    ``cutoff``: an objective that is known to be reached already; nothing above it is looked for. ``branches``: stop
    after so many nodes of the search tree.
    """
    costs = model.costs
    scale = 2.0 ** math.floor(math.log2(costs.max(initial=0.0) or 1.0) - 10)
    if cutoff < FORBIDDEN:
        paid = np.flatnonzero(costs)
        row = model.rows(1, -FORBIDDEN, cutoff / scale * (1 + 1e-9) + 1e-9)
        model.terms(np.repeat(row, len(paid)), paid, costs[paid] / scale)
    left = deadline - clock.now()
    if left <= 0:
        return Answer(None, -FORBIDDEN, "time limit")
    if clock.is_counted():
        most = left / (clock.RATES["variables branched"] * model.num_variables)
        branches = min(branches or sys.maxsize, 1 + int(min(most, 1e9)))
        left = clock.emergency_s()
    until = None if left == FORBIDDEN else time.time() + left - min(GRACE_S, GRACE_SHARE * left)
    answer = _process.ask({**model.message(scale), "gap": RELATIVE_GAP, "nodes": branches, "until": until}, left)
    if answer is None:
        return Answer(None, -FORBIDDEN, "time limit" if clock.now() >= deadline else "ended")
    values, bound, reason, nodes, pivots = (None, 0.0, answer, 0, 0) if isinstance(answer, str) else answer
    clock.did("variables branched", nodes * model.num_variables)
    clock.did("rows pivoted", pivots * model.num_rows)
    if reason in ("INFEASIBLE", "INFEASIBLE_OR_UNBOUNDED"):
        return Answer(None, FORBIDDEN, "infeasible")
    if reason not in ("OPTIMAL", "FEASIBLE", "NO_SOLUTION_FOUND"):
        _log.warning("HiGHS stopped without an answer, and the search goes on without it: %s", reason)
        return Answer(None, -FORBIDDEN, "ended")
    return Answer(values, bound * scale, "optimal" if reason == "OPTIMAL" else "time limit")
