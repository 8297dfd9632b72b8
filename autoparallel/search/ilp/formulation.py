"""Integer linear program over the local polytope of a compact problem, for HiGHS.

    x[v, i] in {0, 1}      node v takes choice i                      sum_i x[v, i] = 1
    z[e, g, h] >= 0        edge e's ends are in row group g and column group h
                           sum_h z[e, g, h] = sum_{i in g} x[source, i],  and so for columns
    0 <= load[t] <= room   load[t] = load[t - 1] + what the events at row t add for the choices taken

Rows of a table that differ by a constant form one group: the constant moves into the node's cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoparallel.search.high_width.event_form import Compact
from autoparallel.search.ilp.highs import Answer, LinearModel, run_highs
from autoparallel.search.model.problem import FORBIDDEN

MEMORY_SCALE = 1e3
MOST_COVERS = 20


class Split(NamedTuple):
    """A table less what its rows and its columns share, these shares, and the groups of equal rows and columns."""

    residue: np.ndarray
    row_costs: np.ndarray
    column_costs: np.ndarray
    rows: np.ndarray
    columns: np.ndarray

    @property
    def cells(self) -> int:
        """Variables that the edge needs, at most."""
        return int(self.rows.max() + 1) * int(self.columns.max() + 1) if self.residue.any() else 0


def _groups(table: np.ndarray) -> np.ndarray:
    """The number of each row's class of equal rows, in order of first appearance."""
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(row.tobytes(), len(seen)) for row in np.ascontiguousarray(table)])


def _without_minimum(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row less its minimum, and the minima (0 for rows that are forbidden throughout)."""
    low = table.min(axis=1)
    low = np.where(low < FORBIDDEN, low, 0.0)
    return table - low[:, None], low


def split(table: np.ndarray, usage: np.ndarray | None = None) -> Split:
    """``usage``: bytes over time of each cell (third axis); cells of one group have the same."""
    residue, row_costs = _without_minimum(table)
    turned, column_costs = _without_minimum(residue.T)
    residue = turned.T
    wide = residue if usage is None else np.concatenate([residue, usage.reshape(len(table), -1)], axis=1)
    tall = residue.T if usage is None else np.concatenate(
        [residue.T, usage.transpose(1, 0, 2).reshape(table.shape[1], -1)], axis=1)
    return Split(residue, row_costs, column_costs, _groups(wide), _groups(tall))


def splits(compact: Compact) -> list[Split]:
    """All edges' tables taken apart; equal tables once."""
    count = len(compact.costs)
    usages = {owner - count: usage for owner, _, usage in compact.each_profile if owner >= count}
    known: dict[int, Split] = {}
    found = []
    for e, table in enumerate(compact.tables):
        if e in usages:
            found.append(split(table, usages[e].reshape(*table.shape, -1)))
        else:
            found.append(known[id(table)] if id(table) in known else known.setdefault(id(table), split(table)))
    return found


def cells(compact: Compact) -> int:
    """How many variables the edges need."""
    return sum(part.cells for part in splits(compact))


class Program:
    """The model of a compact problem; ``picks`` are the variables of its nodes' choices, one per slot."""

    def __init__(self, compact: Compact, parts: list[Split] | None = None) -> None:
        self.compact, self.model = compact, LinearModel()
        parts = parts or splits(compact)
        costs = [array.copy() for array in compact.costs]
        for (u, v), part in zip(compact.ends, parts, strict=True):
            costs[u] += part.row_costs
            costs[v] += part.column_costs
        self._slot_terms: list[tuple[np.ndarray, np.ndarray]] = []
        self.picks = [self._add_node(v, array) for v, array in enumerate(costs)]
        heavy = set(compact.heavy_edges)
        for e, part in enumerate(parts):
            if part.residue.any() or e in heavy:
                self._add_edge(e, part, e in heavy)
        most = np.abs(compact.events.values).max(initial=1.0), compact.room[compact.room < FORBIDDEN].max(initial=1.0)
        self.unit = float(max(most)) / MEMORY_SCALE
        self.loads = self._add_memory() if len(compact.room) else np.zeros(0, np.int64)

    def solve(self, deadline: float, cutoff: float = FORBIDDEN, branches: int | None = None
              ) -> tuple[tuple[int, ...] | None, Answer]:
        """A plan and HiGHS's answer, its bound with the problem's constant. To HiGHS a plan fits that exceeds the limit
        by a little (`highs_worker.py`): what such a plan takes where it does is ruled out, a few times."""
        constant = self.compact.constant
        if not self.picks:
            return (), Answer(None, constant, "optimal")
        plan, bound = None, -FORBIDDEN
        for _ in range(MOST_COVERS):
            answer = run_highs(self.model, deadline, cutoff - constant, branches)
            bound = max(bound, answer.bound)
            if answer.values is None:
                break
            plan = self.plan(answer.values)
            if not self._cover(plan):
                break
        return plan, Answer(answer.values, bound + constant, answer.reason)

    def _cover(self, plan: Sequence[int]) -> bool:
        """Rule out what a plan takes at the time at which it exceeds the room most: not all of these nodes take these
        choices, or others that use as much then. Whether there is such a time."""
        compact = self.compact
        over = compact.load(plan) - compact.room
        if not (over > 0).any():
            return False
        row, choices = int(over.argmax()), dict[int, np.ndarray]()
        for owner, rows, usage in compact.each_profile:
            at = int(np.searchsorted(rows, row, side="right")) - 1
            used = usage[:, at] if at >= 0 else np.zeros(len(usage))
            if owner < len(compact.costs):
                if used[plan[owner]] > 0:
                    choices.setdefault(owner, np.flatnonzero(used >= used[plan[owner]]))
            else:
                u, v = compact.ends[owner - len(compact.costs)]
                if used[plan[u] * compact.sizes[v] + plan[v]] > 0:
                    choices |= {end: np.array([plan[end]]) for end in (u, v)}
        variables = np.concatenate([self.picks[v][picks] for v, picks in choices.items()])
        self.model.terms(np.repeat(self.model.rows(1, 0.0, len(choices) - 1.0), len(variables)), variables, 1.0)
        return True

    def plan(self, values: np.ndarray) -> tuple[int, ...]:
        return tuple(int(values[picks].argmax()) for picks in self.picks)

    def _add_node(self, v: int, costs: np.ndarray) -> np.ndarray:
        model, allowed = self.model, costs < FORBIDDEN
        picks = model.variables(np.where(allowed, costs, 0.0), True, allowed.astype(float))
        model.terms(np.repeat(model.rows(1, 1.0, 1.0), len(picks)), picks, 1.0)
        self._slot_terms.append((np.arange(self.compact.firsts[v], self.compact.firsts[v + 1]), picks))
        return picks

    def _add_edge(self, e: int, part: Split, heavy: bool) -> None:
        model = self.model
        first_row = np.unique(part.rows, return_index=True)[1]
        first_column = np.unique(part.columns, return_index=True)[1]
        small = part.residue[np.ix_(first_row, first_column)]
        g, h = np.nonzero(small < FORBIDDEN)
        z = model.variables(small[g, h], False)  # at most 1 by the rows already; without saying so HiGHS can loop
        for end, groups, at, count in zip(self.compact.ends[e], (part.rows, part.columns), (g, h), small.shape,
                                          strict=True):
            rows = model.rows(count, 0.0, 0.0)
            model.terms(rows[at], z, 1.0)
            model.terms(rows[groups], self.picks[end], -1.0)
        if heavy:
            first = self.compact.firsts[len(self.compact.costs) + e]
            self._slot_terms.append((first + first_row[g] * part.residue.shape[1] + first_column[h], z))

    def _add_memory(self) -> np.ndarray:
        """Two terms per row, and one per event; loads count in ``unit`` bytes."""
        compact, model = self.compact, self.model
        unit = self.unit
        loads = model.variables(np.zeros(len(compact.room)), False, np.maximum(compact.room, 0.0) / unit)
        rows = model.rows(len(loads), 0.0, 0.0)
        model.terms(rows, loads, -1.0)
        model.terms(rows[1:], loads[:-1], 1.0)
        variable = np.full(compact.firsts[-1], -1)
        for slots, variables in self._slot_terms:
            variable[slots] = variables
        events = compact.events
        known = variable[events.slots] >= 0
        model.terms(rows[events.rows[known]], variable[events.slots[known]], events.values[known] / unit)
        return loads
