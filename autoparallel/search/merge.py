"""Exact merging: decisions that follow from others, or that can be taken once their neighbours are known, go away.

A table whose rows each allow at most one column makes its column node a function of its row node: the two become one
decision. Nodes without memory and with at most two neighbours are minimised out. What is left of a big problem is
often a tenth of it or less. Every step is undone by `Merger.restore`, and optimal plans stay optimal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autoparallel.search.compact import ROUNDING, Compact, moved, normalised, profiles
from autoparallel.search.problem import FORBIDDEN

FOLDED_CELLS = 20_000
ROUNDS = 4
MAX_COMPARED = 40_000_000
PAIRWISE = 200_000


class _Follows(NamedTuple):
    """``node`` takes ``picks[i]`` where ``leader`` takes ``when[i]`` (ascending)."""

    node: int
    leader: int
    when: np.ndarray
    picks: np.ndarray


class _Folded(NamedTuple):
    """``node`` takes ``picks[i, ...]`` where its former ``neighbours`` take ``whens[n][i]``."""

    node: int
    neighbours: tuple[int, ...]
    whens: tuple[np.ndarray, ...]
    picks: np.ndarray


def _functional(allowed: np.ndarray) -> tuple[bool, bool]:
    """Whether rows decide columns, and columns rows."""
    if allowed.all():
        return allowed.shape[1] == 1, allowed.shape[0] == 1
    return bool(allowed.sum(axis=1).max() <= 1), bool(allowed.sum(axis=0).max() <= 1)


class Merger:
    """The problem while it shrinks; choices keep their original numbers in ``choices``.

    ``costs[v]`` and the rows of ``near[v][w]`` run over ``choices[v]``, the choices of v that are left.
    ``uses[v]`` tells whether v's choice changes memory anywhere.
    """

    def __init__(self, compact: Compact) -> None:
        self.costs = list(compact.costs)
        self.uses = compact.uses.tolist()
        self.choices = [np.arange(len(costs)) for costs in self.costs]
        self.near: list[dict[int, np.ndarray]] = [{} for _ in self.costs]
        self.alive = [True] * len(self.costs)
        self.constant = compact.constant
        self.feasible = True
        self._log: list[_Follows | _Folded] = []
        self._weight = [1] * len(self.costs)
        self._nodes = list(range(len(self.costs)))
        self._pairs: list[tuple[int, int]] = []
        for (u, v), table in zip(compact.ends, compact.tables, strict=True):
            self._join(u, v, table)

    def run(self) -> None:
        """Merge and fold until nothing changes, or until no choice is left (``feasible`` turns False)."""
        while (self._nodes or self._pairs) and self.feasible:
            if self._pairs:
                u, v = self._pairs.pop()
                if v in self.near[u]:
                    self._check_pair(u, v)
            else:
                self._check_node(self._nodes.pop())

    def keep(self, v: int, rows: np.ndarray) -> None:
        """Leave only these positions of v's choices (ascending)."""
        self.feasible = self.feasible and len(rows) > 0
        self.choices[v], self.costs[v] = self.choices[v][rows], self.costs[v][rows]
        for w in self.near[v]:
            self._set(v, w, self.near[v][w][rows])
        self._nodes.append(v)

    def roots(self) -> list[int]:
        return [v for v, alive in enumerate(self.alive) if alive]

    def followers(self) -> dict[int, tuple[int, np.ndarray]]:
        """For every merged or surviving node: its root, and its original choice for each of the root's."""
        found = {v: (v, self.choices[v]) for v in self.roots()}
        for entry in reversed(self._log):
            if isinstance(entry, _Follows) and entry.leader in found:
                root, picks = found[entry.leader]
                found[entry.node] = root, entry.picks[np.searchsorted(entry.when, picks)]
        return found

    def restore(self, picks: dict[int, int]) -> tuple[int, ...]:
        """The original plan, from the position of each root's choice in ``choices``."""
        plan = [0] * len(self.costs)
        for v, pick in picks.items():
            plan[v] = int(self.choices[v][pick])
        for entry in reversed(self._log):
            if isinstance(entry, _Follows):
                plan[entry.node] = int(entry.picks[np.searchsorted(entry.when, plan[entry.leader])])
            else:
                at = tuple(int(np.searchsorted(when, plan[w]))
                           for w, when in zip(entry.neighbours, entry.whens, strict=True))
                plan[entry.node] = int(entry.picks[at])
        return tuple(plan)

    def _join(self, u: int, v: int, table: np.ndarray) -> None:
        self._set(u, v, table + self.near[u][v] if v in self.near[u] else table)

    def _set(self, u: int, v: int, table: np.ndarray) -> None:
        self.near[u][v], self.near[v][u] = table, table.T
        self._pairs.append((min(u, v), max(u, v)))

    def _part(self, u: int, v: int) -> np.ndarray:
        """Take the table between u (rows) and v away."""
        del self.near[v][u]
        self._nodes += (u, v)
        return self.near[u].pop(v)

    def _check_pair(self, u: int, v: int) -> None:
        table = self.near[u][v]
        allowed = table < FORBIDDEN
        u_decides, v_decides = _functional(allowed)
        if u_decides and v_decides and self._weight[u] < self._weight[v]:
            u_decides = False
        if u_decides:
            self._follow(v, u)
        elif v_decides:
            self._follow(u, v)
        elif not allowed.any(axis=1).all():
            self.keep(u, np.flatnonzero(allowed.any(axis=1)))
        elif not allowed.any(axis=0).all():
            self.keep(v, np.flatnonzero(allowed.any(axis=0)))
        elif allowed.all() and (table - table[:, :1] == table[0] - table[0, 0]).all():
            self._part(u, v)
            self.costs[u] = self.costs[u] + table[:, 0]
            self.costs[v] = self.costs[v] + (table[0] - table[0, 0])

    def _follow(self, v: int, leader: int) -> None:
        """Merge v into a leader each of whose choices leaves v at most one."""
        allowed = self.near[leader][v] < FORBIDDEN
        possible = allowed.any(axis=1)
        if not possible.all():
            self.keep(leader, np.flatnonzero(possible))
            return
        picks = allowed.argmax(axis=1)
        table = self._part(leader, v)
        self.costs[leader] = self.costs[leader] + table[np.arange(len(picks)), picks] + self.costs[v][picks]
        self._log.append(_Follows(v, leader, self.choices[leader], self.choices[v][picks]))
        for w in list(self.near[v]):
            self._join(leader, w, self._part(v, w)[picks])
        self.alive[v] = False
        self.uses[leader] = self.uses[leader] or self.uses[v]
        self._weight[leader] += self._weight[v]

    def _check_node(self, v: int) -> None:
        if not self.alive[v]:
            return
        allowed = self.costs[v] < FORBIDDEN
        if not allowed.all():
            self.keep(v, np.flatnonzero(allowed))
        elif len(allowed) == 1 and self.near[v]:
            for w in list(self.near[v]):
                self.costs[w] = self.costs[w] + self._part(v, w)[0]
        elif not self.uses[v] and len(self.near[v]) <= 2:
            self._fold(v)

    def _fold(self, v: int) -> None:
        """Minimise v out: its costs and tables become a constant, costs of one neighbour, or a table between two."""
        neighbours = tuple(self.near[v])
        shape = tuple(self.near[v][w].shape[1] for w in neighbours)
        if np.prod(shape) > FOLDED_CELLS:
            return
        tables = [self._part(v, w) for w in neighbours]
        total = self.costs[v]
        if len(tables) == 1:
            total = total[:, None] + tables[0]
        elif len(tables) == 2:
            total = (total[:, None] + tables[0])[:, :, None] + tables[1][:, None]
        least = total.min(axis=0)
        picks = self.choices[v][total.argmin(axis=0)]
        self._log.append(_Folded(v, neighbours, tuple(self.choices[w] for w in neighbours), picks))
        self.alive[v] = False
        if not neighbours:
            self.constant += float(least)
        elif len(neighbours) == 1:
            self.costs[neighbours[0]] = self.costs[neighbours[0]] + least
        else:
            self._join(neighbours[0], neighbours[1], least)


@dataclass(frozen=True, eq=False)
class Shrunk:
    """A smaller compact problem and the way back; ``merger.feasible`` is False where every plan is forbidden."""

    compact: Compact
    merger: Merger
    roots: list[int]
    outer: Shrunk | None = None

    @property
    def allowed(self) -> bool:
        """Whether a plan may be left: not every plan is forbidden, nor over the limit in every row by itself."""
        return self.merger.feasible and not (self.compact.room < 0).any()

    def restore(self, plan: Sequence[int]) -> tuple[int, ...]:
        """The plan in the choices of what was shrunk."""
        found = self.merger.restore(dict(zip(self.roots, plan, strict=True)))
        return found if self.outer is None else self.outer.restore(found)

    def origin(self, outer: Shrunk) -> list[tuple[int, np.ndarray]]:
        """For every node, its node and its choices in ``outer``, which this was shrunk from (in steps)."""
        found = [(v, self.merger.choices[v]) for v in self.roots]
        if self.outer is None or self.outer is outer:
            return found
        above = self.outer.origin(outer)
        return [(above[v][0], above[v][1][picks]) for v, picks in found]

    def forward(self, plan: Sequence[int]) -> tuple[int, ...]:
        """A plan of what was shrunk in this form; a choice that was dropped becomes the first one."""
        outer = plan if self.outer is None else self.outer.forward(plan)
        found = []
        for v in self.roots:
            choices = self.merger.choices[v]
            at = int(np.searchsorted(choices, outer[v]))
            found.append(at if at < len(choices) and choices[at] == outer[v] else 0)
        return tuple(found)


def shrink(compact: Compact, limited: bool = True, outer: Shrunk | None = None) -> Shrunk:
    """Merge, fold, and drop what is dominated or cannot fit until nothing changes; forbidden choices go first.

    Without ``limited`` what cannot fit stays: the room may grow later. ``outer``: what ``compact`` was shrunk from.
    """
    found = _merge(compact, None, outer)
    for _ in range(ROUNDS):
        if not found.allowed:
            break
        fitting = without_overfull(found.compact) if limited else found.compact
        needed = _needed(fitting)
        if fitting is found.compact and all(len(rows) == size for rows, size in
                                            zip(needed, fitting.sizes, strict=True)):
            break
        found = _merge(fitting, needed, found)
    return found


def without_overfull(compact: Compact) -> Compact:
    """Forbid the choices and the cells of tables that exceed the room even if all others use the least.

    The same object where there are none. O(cells * rows of change).
    """
    room, count = compact.room, len(compact.costs)
    if not len(room):
        return compact
    most = room + ROUNDING * float(np.abs(room).max())
    costs, tables = list(compact.costs), list(compact.tables)
    usages: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    tops: dict[int, float] = {}
    spare: dict[int, float] = {}
    changed = False
    for owner, rows, usage in profiles(compact.events, compact.firsts):
        least_room = np.minimum.reduceat(most, rows)
        over = (usage > least_room).any(axis=1)
        if over.any():
            changed = True
            if owner < count:
                costs[owner] = np.where(over, FORBIDDEN, costs[owner])
            else:
                table = tables[owner - count]
                tables[owner - count] = np.where(over.reshape(table.shape), FORBIDDEN, table)
        usages[owner], tops[owner], spare[owner] = (rows, usage), float(usage.max()), float(least_room.min())
    for e, (u, v) in enumerate(compact.ends):
        if u in usages and v in usages and tops[u] + tops[v] > min(spare[u], spare[v]):
            over = _over_together(usages[u], usages[v], most) & (tables[e] < FORBIDDEN)
            if over.any():
                changed, tables[e] = True, np.where(over, FORBIDDEN, tables[e])
    return replace(compact, costs=tuple(costs), tables=tuple(tables)) if changed else compact


def _over_together(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray], most: np.ndarray
                   ) -> np.ndarray:
    """Which pairs of choices of two owners exceed the room at some row."""
    rows = np.union1d(one[0], other[0])
    left, right = (np.pad(usage, ((0, 0), (1, 0)))[:, np.searchsorted(at, rows, side="right")]
                   for at, usage in (one, other))
    found = np.zeros((len(left), len(right)), bool)
    for of_left, of_right, limit in zip(left.T, right.T, np.minimum.reduceat(most, rows), strict=True):
        if of_left.max() + of_right.max() > limit:
            found |= of_left[:, None] + of_right > limit
    return found


def _merge(compact: Compact, kept: Sequence[np.ndarray] | None, outer: Shrunk | None) -> Shrunk:
    merger = Merger(compact)
    for v, rows in enumerate(kept or ()):
        if len(rows) < len(merger.choices[v]):
            merger.keep(v, rows)
    merger.run()
    roots = merger.roots()
    return Shrunk(_what_is_left(compact, merger, roots) if merger.feasible else compact, merger, roots, outer)


def _what_is_left(compact: Compact, merger: Merger, roots: list[int]) -> Compact:
    place = {v: i for i, v in enumerate(roots)}
    followers, count = merger.followers(), len(compact.costs)
    heavy = {}
    for e in compact.heavy_edges:
        u, v = (followers[end][0] for end in compact.ends[e])
        if u != v:
            heavy[min(u, v), max(u, v)] = True
    light = [(u, v) for u in roots for v in merger.near[u] if u < v and (u, v) not in heavy]
    pairs = [*light, *heavy]
    sizes = [len(merger.costs[v]) for v in roots]
    tables = [merger.near[u].get(v, np.zeros((len(merger.costs[u]), len(merger.costs[v])))) for u, v in pairs]
    sizes += [tables[i].size if pair in heavy else 0 for i, pair in enumerate(pairs)]
    firsts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    first_of = dict(zip([*roots, *pairs], firsts.tolist(), strict=False))
    old, new = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for v in np.unique(compact.owners[compact.owners < count]).tolist():
        root, picks = followers[v]
        old.append(compact.firsts[v] + picks)
        new.append(first_of[root] + np.arange(len(picks)))
    for e in compact.heavy_edges:
        (a, b), width = compact.ends[e], compact.sizes[compact.ends[e][1]]
        (u, left), (v, right) = followers[a], followers[b]
        if u == v:
            old.append(compact.firsts[count + e] + left * width + right)
            new.append(first_of[u] + np.arange(len(left)))
            continue
        cells = compact.firsts[count + e] + left[:, None] * width + right
        old.append((cells if u < v else cells.T).ravel())
        new.append(first_of[min(u, v), max(u, v)] + np.arange(cells.size))
    events = moved(compact, np.concatenate(old), np.concatenate(new))
    events, room, kept = normalised(events, firsts, compact.room)
    return Compact(tuple(merger.costs[v] for v in roots), tuple((place[u], place[v]) for u, v in pairs),
                   tuple(np.ascontiguousarray(table) for table in tables), firsts, events, room, compact.names[kept],
                   merger.constant)


def _needed(compact: Compact) -> list[np.ndarray]:
    """For every node the choices for which no other costs and uses no more, whatever the neighbours do."""
    columns = [[costs[:, None], *(table for _, _, table in around)]
               for costs, around in zip(compact.costs, compact.around, strict=True)]
    for owner, _, usage in profiles(compact.events, compact.firsts):
        if owner < len(columns):
            columns[owner].append(usage)
            continue
        u, v = compact.ends[owner - len(columns)]
        grid = usage.reshape(compact.sizes[u], compact.sizes[v], -1)
        columns[u].append(grid.reshape(len(grid), -1))
        columns[v].append(grid.transpose(1, 0, 2).reshape(grid.shape[1], -1))
    return [undominated(np.concatenate(parts, axis=1)) if len(parts[0]) > 1 else np.arange(1) for parts in columns]


def undominated(rows: np.ndarray) -> np.ndarray:
    """Rows that no other row is below or equal to in every column; of equal rows the first. Ascending."""
    if len(rows) == 1 or len(rows) * rows.size > MAX_COMPARED:
        return np.arange(len(rows))
    order = np.argsort(np.where(np.isfinite(rows), rows, 1e30).sum(axis=1), kind="stable")
    if len(rows) * rows.size <= PAIRWISE:
        rows = rows[order]
        below = (rows[:, None] <= rows[None]).all(axis=2)
        return np.sort(order[~np.triu(below, 1).any(axis=0)])
    kept: list[int] = []
    for i in order:  # a dominating row has the smaller sum, so it comes first
        if not kept or not (rows[kept] <= rows[i]).all(axis=1).any():
            kept.append(int(i))
    return np.sort(kept)
