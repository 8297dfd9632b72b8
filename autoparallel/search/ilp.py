"""Integer linear program over the local polytope, solved by HiGHS through OR-tools.

    x[v, i] in {0, 1}      node v takes choice i                      sum_i x[v, i] = 1
    z[e, g, h] >= 0        edge e's ends are in row group g and column group h
                           sum_h z[e, g, h] = sum_{i in g} x[source, i],  and so for columns

Rows of a table that differ by a constant form one group: the constant moves into the node's cost. Memory has one row
per time that matters. Equal inputs give equal plans: one thread, one seed, and a clock only as the last stop.
"""

from __future__ import annotations

import datetime
import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autoparallel.errors import SearchError
from autoparallel.search.exact import Incumbent, Outcome, trivial_bound
from autoparallel.search.lagrange import LowestPeak
from autoparallel.search.memory import Memory, least_peak, memory_of
from autoparallel.search.problem import FORBIDDEN, Edge, Problem, evaluate

RELATIVE_GAP = 1e-9
MEMORY_SCALE = 1e3
MAX_CELLS = 500_000
MAX_MEMORY_TERMS = 1_000_000


@dataclass
class LinearModel:
    """A minimisation over variables >= 0 with rows ``low <= sum coefficient * variable <= high``."""

    costs: list[float] = field(default_factory=list)
    highest: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)
    row_ids: list[int] = field(default_factory=list)
    column_ids: list[int] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)

    def variables(self, costs: list[float], integer: bool, highest: float = 1.0) -> range:
        first = len(self.costs)
        self.highest += [highest] * len(costs)
        self.costs += costs
        self.integer += [integer] * len(costs)
        return range(first, len(self.costs))

    def row(self, low: float, high: float, terms: dict[int, float]) -> None:
        """Add a row; terms are kept in the order of their variables."""
        number = len(self.lows)
        self.lows.append(low)
        self.highs.append(high)
        for variable in sorted(terms):
            self.row_ids.append(number)
            self.column_ids.append(variable)
            self.coefficients.append(terms[variable])


def _groups(table: np.ndarray) -> np.ndarray:
    """The number of each row's class of equal rows, in order of first appearance."""
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(row.tobytes(), len(seen)) for row in np.ascontiguousarray(table)])


def _without_minimum(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row less its minimum, and the minima (0 for rows that are forbidden throughout)."""
    low = table.min(axis=1)
    low = np.where(low < FORBIDDEN, low, 0.0)
    return table - low[:, None], low


class IlpModel:
    """The linear model of a problem; ``x[v]`` maps v's allowed choices to variables."""

    def __init__(self, problem: Problem, memory: Memory) -> None:
        self.problem, self.memory, self.model = problem, memory, LinearModel()
        self.x: list[dict[int, int]] = []
        self.memory_rows: list[tuple[int, float]] = []
        shared: dict[tuple[int, int], Any] = {}
        costs = [node.costs.copy() for node in problem.nodes]
        residues = []
        for edge in problem.edges:
            key = id(edge.costs), id(edge.usages)
            if key not in shared:
                shared[key] = self.split(edge)
            residue, row_costs, column_costs, rows, columns = shared[key]
            costs[edge.source] += row_costs
            costs[edge.target] += column_costs
            residues.append((residue, rows, columns))
        for array in costs:
            allowed = np.flatnonzero(array < FORBIDDEN)
            self.x.append(dict(zip(allowed.tolist(), self.model.variables(array[allowed].tolist(), True), strict=True)))
            self.model.row(1.0, 1.0, dict.fromkeys(self.x[-1].values(), 1.0))
        self._memory_terms: list[tuple[int, int, float]] = []
        for number, (edge, parts) in enumerate(zip(problem.edges, residues, strict=True)):
            self._add_edge(number, edge, *parts)
        self._add_memory()

    @staticmethod
    def split(edge: Edge) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Table without what its rows and columns share, those two shares, and the groups of rows and columns."""
        residue, row_costs = _without_minimum(edge.costs)
        turned, column_costs = _without_minimum(residue.T)
        residue = turned.T
        wide = residue if edge.usages is None else np.concatenate([residue, edge.usages], axis=1)
        tall = residue if edge.usages is None else np.concatenate([residue, edge.usages], axis=0)
        return residue, row_costs, column_costs, _groups(wide), _groups(tall.T)

    def _add_edge(self, number: int, edge: Edge, residue: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> None:
        user = self.memory.num_nodes + number
        uses = edge.usages is not None and self.memory.uses(user)
        if not residue.any() and not uses:
            return
        first_row = [int(np.flatnonzero(rows == g)[0]) for g in range(rows.max() + 1)]
        first_column = [int(np.flatnonzero(columns == h)[0]) for h in range(columns.max() + 1)]
        small = residue[np.ix_(first_row, first_column)]
        allowed = np.argwhere(small < FORBIDDEN).tolist()
        z = self.model.variables([float(small[g, h]) for g, h in allowed], False)
        for end, groups, side in ((edge.source, rows, 0), (edge.target, columns, 1)):
            terms: list[dict[int, float]] = [{} for _ in range(groups.max() + 1)]
            for cell, variable in zip(allowed, z, strict=True):
                terms[cell[side]][variable] = 1.0
            for pick, variable in self.x[end].items():
                terms[groups[pick]][variable] = -1.0
            for row in terms:
                self.model.row(0.0, 0.0, row)
        if uses:
            extra = self.memory.extra[user][np.ix_(first_row, first_column)]
            self._memory_terms += [(user, variable, float(extra[g, h]))
                                   for (g, h), variable in zip(allowed, z, strict=True) if extra[g, h] > 0]

    def _add_memory(self) -> None:
        for v, picks in enumerate(self.x):
            if self.memory.uses(v):
                self._memory_terms += [(v, variable, float(self.memory.extra[v][pick]))
                                       for pick, variable in picks.items() if self.memory.extra[v][pick] > 0]
        lengths = self.memory.spans[:, 1] - self.memory.spans[:, 0]
        if sum(int(lengths[user]) for user, _, _ in self._memory_terms) > MAX_MEMORY_TERMS:
            self._chain_memory()
            return
        rows: list[dict[int, float]] = [{} for _ in self.memory.times]
        for user, variable, usage in self._memory_terms:
            low, high = self.memory.spans[user]
            for at in range(low, high):
                rows[at][variable] = usage
        for at, terms in enumerate(rows):
            scale = MEMORY_SCALE / max(float(self.memory.room[at]), max(terms.values(), default=1.0))
            self.memory_rows.append((len(self.model.lows), scale))
            self.model.row(-FORBIDDEN, float(self.memory.room[at]) * scale, {v: u * scale for v, u in terms.items()})

    def _chain_memory(self) -> None:
        """Two terms per use instead of one per time: load(t) = load(t - 1) + what starts - what ends."""
        count = len(self.memory.times)
        unit = max(float(self.memory.room.max()), max(usage for _, _, usage in self._memory_terms)) / MEMORY_SCALE
        loads = self.model.variables([0.0] * count, False, FORBIDDEN)
        rows: list[dict[int, float]] = [{load: -1.0} for load in loads]
        for at in range(1, count):
            rows[at][loads[at - 1]] = 1.0
        for user, variable, usage in self._memory_terms:
            low, high = self.memory.spans[user]
            rows[low][variable] = rows[low].get(variable, 0.0) + usage / unit
            if high < count:
                rows[high][variable] = rows[high].get(variable, 0.0) - usage / unit
        for at, load in enumerate(loads):
            self.model.row(0.0, 0.0, rows[at])
            self.memory_rows.append((len(self.model.lows), 1.0 / unit))
            self.model.row(-FORBIDDEN, float(self.memory.room[at]) / unit, {load: 1.0})

    def choice(self, values: dict[int, float]) -> tuple[int, ...]:
        return tuple(max(picks, key=lambda pick: (values[picks[pick]], -pick)) for picks in self.x)


def _proto(model: LinearModel, scale: float) -> Any:
    """The model as a MathOpt message, costs divided by ``scale``."""
    from ortools.math_opt import model_pb2

    proto = model_pb2.ModelProto()
    count = len(model.costs)
    proto.variables.ids.extend(range(count))
    proto.variables.lower_bounds.extend([0.0] * count)
    proto.variables.upper_bounds.extend(model.highest)
    proto.variables.integers.extend(model.integer)
    proto.objective.linear_coefficients.ids.extend(i for i, cost in enumerate(model.costs) if cost)
    proto.objective.linear_coefficients.values.extend(cost / scale for cost in model.costs if cost)
    proto.linear_constraints.ids.extend(range(len(model.lows)))
    proto.linear_constraints.lower_bounds.extend(model.lows)
    proto.linear_constraints.upper_bounds.extend(model.highs)
    order = np.lexsort((model.column_ids, model.row_ids))
    matrix = proto.linear_constraint_matrix
    matrix.row_ids.extend(np.array(model.row_ids, np.int64)[order].tolist())
    matrix.column_ids.extend(np.array(model.column_ids, np.int64)[order].tolist())
    matrix.coefficients.extend(np.array(model.coefficients)[order].tolist())
    return proto


def run_highs(model: LinearModel, deadline: float, cutoff: float = FORBIDDEN
              ) -> tuple[dict[int, float] | None, float, str]:
    """Solve; returns values by variable (None: none found), a lower bound, and why it stopped.

    Reasons: "optimal", "infeasible", "time limit".

    ``cutoff``: an objective that is known to be reached already; nothing above it is looked for.
    """
    from ortools.math_opt.python import mathopt
    from ortools.math_opt.solvers import highs_pb2

    scale = max((cost for cost in model.costs), default=1.0) or 1.0
    scale = 2.0 ** math.floor(math.log2(scale) - 10)
    if cutoff < FORBIDDEN:
        terms = {i: cost / scale for i, cost in enumerate(model.costs) if cost}
        model.row(-FORBIDDEN, cutoff / scale * (1 + 1e-9) + 1e-9, terms)
    left = max(0.01, deadline - time.monotonic())
    parameters = mathopt.SolveParameters(
        random_seed=1, highs=highs_pb2.HighsOptionsProto(string_options={"parallel": "off"}),
        relative_gap_tolerance=RELATIVE_GAP, absolute_gap_tolerance=0.0,
        time_limit=None if left == FORBIDDEN else datetime.timedelta(seconds=left))
    result = mathopt.solve(mathopt.Model.from_model_proto(_proto(model, scale)), mathopt.SolverType.HIGHS,
                           params=parameters)
    reasons = mathopt.TerminationReason
    reason = result.termination.reason
    bound = result.termination.objective_bounds.dual_bound * scale
    if reason in (reasons.INFEASIBLE, reasons.INFEASIBLE_OR_UNBOUNDED):
        return None, FORBIDDEN, "infeasible"
    if reason not in (reasons.OPTIMAL, reasons.FEASIBLE, reasons.NO_SOLUTION_FOUND):
        raise SearchError(f"HiGHS stopped without an answer: {result.termination.detail or reason}")
    values = {variable.id: value for variable, value in result.variable_values().items()} \
        if result.has_primal_feasible_solution() else None
    return values, bound, "optimal" if reason == reasons.OPTIMAL else "time limit"


def model_cells(problem: Problem) -> int:
    """How many variables the edges of the problem's model would have."""
    known: dict[tuple[int, int], int] = {}
    for edge in problem.edges:
        key = id(edge.costs), id(edge.usages)
        if key not in known:
            _, _, _, rows, columns = IlpModel.split(edge)
            known[key] = int((rows.max() + 1) * (columns.max() + 1))
    return sum(known[id(edge.costs), id(edge.usages)] for edge in problem.edges)


def solve_ilp(problem: Problem, deadline: float = FORBIDDEN, hint: tuple[int, ...] | None = None) -> Outcome:
    """Branch and cut to proven optimality or the deadline. ``hint``: a choice that bounds the search from above.

    The lower bound holds for this problem; "infeasible" is a stop reason. Memory O(`model_cells`).
    """
    start = time.monotonic()
    memory = memory_of(problem)
    incumbent = Incumbent(problem, memory, deadline)
    if hint is not None:
        incumbent.offer(hint)
    if model_cells(problem) > MAX_CELLS:
        return Outcome(incumbent.choice, incumbent.objective, min(trivial_bound(problem), incumbent.objective),
                       "too large", {"ilp": time.monotonic() - start})
    built = IlpModel(problem, memory)
    ready = time.monotonic()
    values, bound, reason = run_highs(built.model, deadline, incumbent.objective)
    if values is not None:
        incumbent.offer(built.choice(values))
    if reason == "infeasible":
        bound, reason = incumbent.objective, "infeasible" if incumbent.choice is None else "optimal"
    bound = min(max(bound, trivial_bound(problem)), incumbent.objective)
    return Outcome(incumbent.choice, incumbent.objective, bound, reason,
                   {"ilp model": ready - start, "ilp": time.monotonic() - ready})


def least_memory(problem: Problem, deadline: float = FORBIDDEN) -> LowestPeak:
    """The least peak over all allowed choices, as a program of its own. Bound and plan differ when time runs out."""
    floor = least_peak(problem)
    memory = memory_of(replace(problem, limit=floor))
    built = IlpModel(problem, memory)
    model = built.model
    model.costs = [0.0] * len(model.costs)
    unit = sum(float(extra.max()) for extra in memory.extra) or 1.0
    above = model.variables([1.0], False)[0]
    for row, scale in built.memory_rows:
        model.row_ids.append(row)
        model.column_ids.append(above)
        model.coefficients.append(-unit * scale)
    values, bound, reason = run_highs(model, deadline)
    if reason == "infeasible":
        return LowestPeak(FORBIDDEN, FORBIDDEN, None)
    if values is None:
        return LowestPeak(floor + max(0.0, bound) * unit, FORBIDDEN, None)
    plan = built.choice(values)
    peak = evaluate(problem, plan).peak_bytes
    return LowestPeak(peak if reason == "optimal" else floor + max(0.0, bound) * unit, peak, plan)
