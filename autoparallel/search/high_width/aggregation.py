"""Exact merging: decisions that are functions of others, or that can be minimised out given their neighbours, are
removed.

A table whose rows each allow at most one column makes its column node a function of its row node: the two become one
decision. Nodes without memory and with at most two neighbours are minimised out. What is left of a big problem is
often a tenth of it or less. Every step is undone by `Merger.restore`, and optimal plans stay optimal.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from autoparallel import clock
from autoparallel.search.high_width.event_form import (
    ROUNDING,
    Compact,
    Events,
    above_least,
    fewer_rows,
    moved,
    of_owners,
)
from autoparallel.search.model.interned import Shared
from autoparallel.search.model.problem import FORBIDDEN

FOLDED_CELLS = 20_000
ROUNDS = 4
MAX_COMPARED = 40_000_000
PAIRWISE = 200_000
ONE = np.zeros((1, 1))


class _Facts(NamedTuple):
    """Of a table: whether rows decide columns, and columns rows; which rows, columns, allow anything (None: all)."""

    decides: bool
    decided: bool
    rows: _Array | None
    columns: _Array | None
    whole: bool


class _Array:
    """An array that equal blocks share, with values derived from it, each computed once."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def facts(self) -> _Facts:
        allowed = self.values < FORBIDDEN
        if np.logical_and.reduce(allowed, axis=None):
            return _Facts(allowed.shape[1] == 1, allowed.shape[0] == 1, None, None, True)
        by_row, by_column = np.add.reduce(allowed, axis=1), np.add.reduce(allowed, axis=0)
        return _Facts(bool(by_row.max() <= 1), bool(by_column.max() <= 1), _some(by_row > 0), _some(by_column > 0),
                      False)

    @cached_property
    def allowed(self) -> _Array | None:
        """Which of these costs are allowed; None: all."""
        return _some(self.values < FORBIDDEN)

    @cached_property
    def parts(self) -> tuple[_Array, _Array] | None:
        """Costs of the rows and costs of the columns, if the table is their sum; else None."""
        table = self.values
        if (self.facts.whole and table[-1, -1] - table[-1, 0] == table[0, -1] - table[0, 0]
                and np.logical_and.reduce(table - table[:, :1] == table[0] - table[0, 0], axis=None)):
            return _Array(table[:, 0]), _Array(table[0] - table[0, 0])
        return None

    @cached_property
    def picks(self) -> _Array:
        """The column that each row allows."""
        return _Array((self.values < FORBIDDEN).argmax(axis=1))

    @cached_property
    def cheapest(self) -> int:
        """The first of the least of these costs."""
        return int(self.values.argmin())

    @cached_property
    def least(self) -> np.ndarray:
        """The least of each row."""
        found: np.ndarray = np.minimum.reduce(self.values, axis=1)
        return found


def _some(kept: np.ndarray) -> _Array | None:
    """Indices of the choices that are kept; None: all."""
    return None if np.logical_and.reduce(kept) else _Array(np.flatnonzero(kept))


def _each(arrays: Iterable[np.ndarray]) -> list[_Array]:
    """What is one array is one here."""
    shared = Shared.of(arrays)
    made = [_Array(array) for array in shared.distinct]
    return [made[number] for number in shared.numbers.tolist()]


class _Follows(NamedTuple):
    """``node`` takes ``picks[i]`` where ``leader`` takes ``when[i]`` (ascending)."""

    node: int
    leader: int
    when: _Array
    picks: _Array


class _Folded(NamedTuple):
    """``node`` takes ``picks[i, ...]`` where its former ``neighbours`` take ``whens[n][i]``."""

    node: int
    neighbours: tuple[int, ...]
    whens: tuple[_Array, ...]
    picks: np.ndarray


class _Once:
    """Values derived from several arrays, computed once for all nodes that share these arrays, also while they
    merge."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Any] = {}
        self._turned: dict[_Array, _Array] = {}

    def __call__(self, what: Callable[..., Any], *arrays: _Array) -> Any:
        key = what, *arrays
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = what(*arrays)
        return found

    def turned(self, table: _Array) -> _Array:
        """The transpose, whose transpose is the table itself."""
        found = self._turned.get(table)
        if found is None:
            found = self._turned[table] = _Array(table.values.T)
            self._turned[found] = table
        return found


def _rows(table: _Array, rows: _Array) -> _Array:
    return _Array(table.values[rows.values])


def _sum(one: _Array, other: _Array) -> _Array:
    return _Array(one.values + other.values)


def _led(leader: _Array, table: _Array, follower: _Array) -> _Array:
    """A leader's costs with those of what follows it."""
    return _Array(leader.values + table.least + follower.values[table.picks.values])


def _with_first(costs: _Array, table: _Array) -> _Array:
    return _Array(costs.values + table.values[:, 0])


def _minimised(choices: _Array, costs: _Array, *tables: _Array) -> tuple[_Array, np.ndarray]:
    """A node minimised out: the least cost of node and tables for each combination of its neighbours' choices, and the
    choice that attains it."""
    total = costs.values
    if len(tables) == 1:
        total = total[:, None] + tables[0].values
    elif len(tables) == 2:
        total = (total[:, None] + tables[0].values)[:, :, None] + tables[1].values[:, None]
    return _Array(total.min(axis=0)), choices.values[total.argmin(axis=0)]


def _among(when: _Array, picks: _Array) -> _Array:
    """The position of each pick in an ascending array."""
    return _Array(np.searchsorted(when.values, picks.values))


class Merger:
    """The problem while it shrinks; choices keep their original numbers in ``choices``.

    ``costs[v]`` and the rows of ``near[v][w]`` run over ``choices[v]``, the choices of v that are left.
    ``uses[v]`` tells whether v's choice changes memory anywhere.
    """

    def __init__(self, compact: Compact) -> None:
        self.costs = _each(compact.costs)
        self.uses = compact.uses.tolist()
        self._once = _Once()
        whole = {size: _Array(np.arange(size)) for size in set(compact.sizes)}
        self.choices = [whole[size] for size in compact.sizes]
        self.near: list[dict[int, _Array]] = [{} for _ in self.costs]
        self.alive = [True] * len(self.costs)
        self.constant = compact.constant
        self.feasible = True
        self._log: list[_Follows | _Folded] = []
        self._weight = [1] * len(self.costs)
        self._nodes = list(range(len(self.costs)))
        self._pairs: list[tuple[int, int]] = []
        for (u, v), table in zip(compact.ends, _each(compact.tables), strict=True):
            self._join(u, v, table)

    def run(self) -> None:
        """Merge and fold until nothing changes, or until no choice is left (``feasible`` turns False)."""
        nodes, pairs, near, alive = self._nodes, self._pairs, self.near, self.alive
        while (nodes or pairs) and self.feasible:
            if pairs:
                u, v = pairs.pop()
                if v in near[u]:
                    self._check_pair(u, v)
            else:
                v = nodes.pop()
                if alive[v]:
                    self._check_node(v)
        self._once = _Once()

    def keep(self, v: int, rows: _Array) -> None:
        """Leave only these positions of v's choices (ascending)."""
        self.feasible = self.feasible and len(rows) > 0
        once = self._once
        self.choices[v], self.costs[v] = once(_rows, self.choices[v], rows), once(_rows, self.costs[v], rows)
        for w in self.near[v]:
            self._set(v, w, once(_rows, self.near[v][w], rows))
        self._nodes.append(v)

    def roots(self) -> list[int]:
        return [v for v, alive in enumerate(self.alive) if alive]

    def followers(self) -> dict[int, tuple[int, _Array]]:
        """For every merged or surviving node: its root, and its original choice for each of the root's."""
        found = {v: (v, self.choices[v]) for v in self.roots()}
        once = _Once()
        for entry in reversed(self._log):
            if isinstance(entry, _Follows) and (led := found.get(entry.leader)) is not None:
                root, picks = led
                at = entry.picks if picks is entry.when else once(_rows, entry.picks, once(_among, entry.when, picks))
                found[entry.node] = root, at
        return found

    def restore(self, picks: dict[int, int]) -> tuple[int, ...]:
        """The original plan, from the position of each root's choice in ``choices``."""
        plan = [0] * len(self.costs)
        for v, pick in picks.items():
            plan[v] = int(self.choices[v].values[pick])
        follows: dict[tuple[_Array, _Array], dict[int, int]] = {}
        for entry in reversed(self._log):
            if isinstance(entry, _Follows):
                key = entry.when, entry.picks
                if (taken := follows.get(key)) is None:
                    taken = follows[key] = dict(zip(*(one.values.tolist() for one in key), strict=True))
                plan[entry.node] = taken[plan[entry.leader]]
            else:
                at = tuple(int(np.searchsorted(when.values, plan[w]))
                           for w, when in zip(entry.neighbours, entry.whens, strict=True))
                plan[entry.node] = int(entry.picks[at])
        return tuple(plan)

    def _join(self, u: int, v: int, table: _Array) -> None:
        known = self.near[u].get(v)
        self._set(u, v, table if known is None else self._once(_sum, table, known))

    def _set(self, u: int, v: int, table: _Array) -> None:
        self.near[u][v], self.near[v][u] = table, self._once.turned(table)
        self._pairs.append((u, v) if u < v else (v, u))

    def _part(self, u: int, v: int) -> _Array:
        """Take the table between u (rows), which goes on, and v away."""
        del self.near[v][u]
        self._nodes.append(u)
        return self.near[u].pop(v)

    def _check_pair(self, u: int, v: int) -> None:
        table = self.near[u][v]
        u_decides, v_decides, rows, columns, _ = table.facts
        if u_decides and v_decides and self._weight[u] < self._weight[v]:
            u_decides = False
        if u_decides:
            self._follow(v, u, rows)
        elif v_decides:
            self._follow(u, v, columns)
        elif rows is not None:
            self.keep(u, rows)
        elif columns is not None:
            self.keep(v, columns)
        elif (parts := table.parts) is not None:
            self._part(u, v)
            self._nodes.append(v)
            self.costs[u], self.costs[v] = (self._once(_sum, self.costs[w], part)
                                            for w, part in zip((u, v), parts, strict=True))

    def _follow(self, v: int, leader: int, possible: _Array | None) -> None:
        """Merge v into a leader each of whose choices (those that are possible; None: all) leaves v one."""
        if possible is not None:
            self.keep(leader, possible)
            return
        once, table = self._once, self._part(leader, v)
        picks = table.picks
        self.costs[leader] = once(_led, self.costs[leader], table, self.costs[v])
        self._log.append(_Follows(v, leader, self.choices[leader], once(_rows, self.choices[v], picks)))
        for w in list(self.near[v]):
            self._join(leader, w, once(_rows, once.turned(self._part(w, v)), picks))
        self.alive[v] = False
        self.uses[leader] = self.uses[leader] or self.uses[v]
        self._weight[leader] += self._weight[v]

    def _check_node(self, v: int) -> None:
        allowed = self.costs[v].allowed
        if allowed is not None:
            self.keep(v, allowed)
        elif len(self.costs[v]) == 1 and self.near[v]:
            self._nodes.append(v)
            for w in list(self.near[v]):
                self.costs[w] = self._once(_with_first, self.costs[w], self._part(w, v))
        elif not self.uses[v] and len(self.near[v]) <= 2:
            self.fold(v)

    def fold(self, v: int) -> None:
        """Minimise v out: its costs and tables become a constant, costs of one neighbour, or a table between two."""
        neighbours = tuple(self.near[v])
        if math.prod(self.near[v][w].values.shape[1] for w in neighbours) > FOLDED_CELLS:
            return
        tables = [self._once.turned(self._part(w, v)) for w in neighbours]
        least, picks = self._once(_minimised, self.choices[v], self.costs[v], *tables)
        self._log.append(_Folded(v, neighbours, tuple(self.choices[w] for w in neighbours), picks))
        self.alive[v] = False
        if not neighbours:
            self.constant += float(least.values)
        elif len(neighbours) == 1:
            self.costs[neighbours[0]] = self._once(_sum, self.costs[neighbours[0]], least)
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
        found = [(v, self.merger.choices[v].values) for v in self.roots]
        if self.outer is None or self.outer is outer:
            return found
        above = self.outer.origin(outer)
        return [(above[v][0], above[v][1][picks]) for v, picks in found]

    def forward(self, plan: Sequence[int]) -> tuple[int, ...]:
        """A plan of what was shrunk in this form; a choice that was dropped becomes the first one."""
        outer = plan if self.outer is None else self.outer.forward(plan)
        found = []
        for v in self.roots:
            choices = self.merger.choices[v].values
            at = int(np.searchsorted(choices, outer[v]))
            found.append(at if at < len(choices) and choices[at] == outer[v] else 0)
        return tuple(found)


def shrink(compact: Compact, limited: bool = True, outer: Shrunk | None = None, until: float = FORBIDDEN) -> Shrunk:
    """Merge, fold, and drop what is dominated or cannot fit until nothing changes; forbidden choices go first.

    Without ``limited`` what cannot fit stays: the room may grow later. ``outer``: what ``compact`` was shrunk from.
    ``until``: no round begins that would end later, if it takes as long as the last one.
    """
    start = clock.now()
    _count(compact)
    found = _merge(compact, None, outer)
    known: dict[tuple[int, bytes], np.ndarray] = {}
    for _ in range(ROUNDS):
        now = clock.now()
        if not found.allowed or now + (now - start) > until:
            break
        start = now
        fitting = without_overfull(found.compact) if limited else found.compact
        needed = _needed(fitting, known)
        if fitting is found.compact and all(len(rows) == size for rows, size in
                                            zip(needed, fitting.sizes, strict=True)):
            break
        _count(fitting)
        found = _merge(fitting, needed, found)
    return found


def _count(compact: Compact) -> None:
    """Count the work of a round."""
    clock.did("nodes laid out", len(compact.costs) + len(compact.tables))
    clock.did("cells passed", sum(table.size for table in compact.tables))


def without_overfull(compact: Compact) -> Compact:
    """Forbid the choices and the cells of tables that exceed the room even if all others use the least.

    The same object where there are none. O(cells * rows of change).
    """
    room, count = compact.room, len(compact.costs)
    if not len(room):
        return compact
    most = room + ROUNDING * float(np.abs(room).max())
    costs, tables = list(compact.costs), list(compact.tables)
    tops, spare = np.full(len(compact.firsts), -FORBIDDEN), np.full(len(compact.firsts), FORBIDDEN)
    changed = False
    for group in compact.profiles:
        least_room = _least_from(most, group.rows)
        over = np.logical_or.reduce(group.usage > group.spread(least_room), axis=1)
        tops[group.owners] = np.maximum.reduceat(group.usage.max(axis=1), group.starts)
        spare[group.owners] = least_room.min(axis=1)
        for i in np.flatnonzero(np.logical_or.reduceat(over, group.starts)).tolist():
            owner, own = int(group.owners[i]), over[group.starts[i]:group.starts[i] + group.counts[i]]
            changed = True
            if owner < count:
                costs[owner] = np.where(own, FORBIDDEN, costs[owner])
            else:
                table = tables[owner - count]
                tables[owner - count] = np.where(own.reshape(table.shape), FORBIDDEN, table)
    u, v = np.array(compact.ends, np.int64).reshape(-1, 2).T
    tight = np.flatnonzero(tops[u] + tops[v] > np.minimum(spare[u], spare[v]))
    usages = {owner: (rows, usage) for owner, rows, usage in compact.each_profile} if len(tight) else {}
    for e in tight.tolist():
        over = _over_together(usages[u[e]], usages[v[e]], most) & (tables[e] < FORBIDDEN)
        if over.any():
            changed, tables[e] = True, np.where(over, FORBIDDEN, tables[e])
    return replace(compact, costs=tuple(costs), tables=tuple(tables)) if changed else compact


def _least_from(room: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """In each line of (ascending) rows: the least room from each row to the next, from the last to the end."""
    found = np.minimum.reduceat(room, rows.ravel()).reshape(rows.shape)
    found[:, -1] = np.minimum.accumulate(room[::-1])[::-1][rows[:, -1]]
    return found


def _over_together(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray], most: np.ndarray
                   ) -> np.ndarray:
    """The pairs of choices of two owners that together exceed the limit at some row."""
    rows = np.union1d(one[0], other[0])
    left, right = (np.where((last := np.searchsorted(at, rows, side="right") - 1) < 0, 0.0, usage[:, last])
                   for at, usage in (one, other))
    found, limits = np.zeros((len(left), len(right)), bool), np.minimum.reduceat(most, rows)
    for at in np.flatnonzero(left.max(axis=0) + right.max(axis=0) > limits):
        found |= left[:, at, None] + right[:, at] > limits[at]
    return found


def _merge(compact: Compact, kept: Sequence[np.ndarray] | None, outer: Shrunk | None) -> Shrunk:
    merger = Merger(compact)
    for v, rows in enumerate(_each(kept or ())):
        if len(rows) < len(merger.choices[v]):
            merger.keep(v, rows)
    merger.run()
    left = _what_is_left(compact, merger) if merger.feasible else compact
    return Shrunk(left, merger, merger.roots(), outer)


def _what_is_left(compact: Compact, merger: Merger) -> Compact:
    roots, followers, count = merger.roots(), merger.followers(), len(compact.costs)
    heavy = {}
    for e in compact.heavy_edges:
        u, v = (followers[end][0] for end in compact.ends[e])
        if u != v:
            heavy[min(u, v), max(u, v)] = True
    light = [(u, v) for u in roots for v in merger.near[u] if u < v and (u, v) not in heavy]
    pairs = [*light, *heavy]
    sizes = [len(merger.costs[v]) for v in roots]
    tables = [table.values if (table := merger.near[u].get(v)) is not None else
              np.zeros((len(merger.costs[u]), len(merger.costs[v]))) for u, v in pairs]
    sizes += [tables[i].size if pair in heavy else 0 for i, pair in enumerate(pairs)]
    firsts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    first_of = dict(zip([*roots, *pairs], firsts.tolist(), strict=False))
    users = np.unique(compact.owners[compact.owners < count]).tolist()
    counts = np.array([len(followers[v][1]) for v in users], np.int64)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    picks = np.concatenate([np.zeros(0, np.int64), *(followers[v][1].values for v in users)])
    old = [np.repeat(compact.firsts[users], counts) + picks]
    new = [np.repeat(np.array([first_of[followers[v][0]] for v in users], np.int64), counts) + within]
    for e in compact.heavy_edges:
        (a, b), width = compact.ends[e], compact.sizes[compact.ends[e][1]]
        u, v = followers[a][0], followers[b][0]
        left, right = followers[a][1].values, followers[b][1].values
        if u == v:
            old.append(compact.firsts[count + e] + left * width + right)
            new.append(first_of[u] + np.arange(len(left)))
            continue
        cells = compact.firsts[count + e] + left[:, None] * width + right
        old.append((cells if u < v else cells.T).ravel())
        new.append(first_of[min(u, v), max(u, v)] + np.arange(cells.size))
    events = moved(compact, np.concatenate(old), np.concatenate(new))
    events, room, kept = above_least(events, firsts, compact.room)
    left = _without_settled(merger, roots, {end for pair in heavy for end in pair}, events, firsts)
    events, firsts = of_owners(events, firsts, np.append(left, np.ones(len(pairs), bool)))
    events, room, kept = fewer_rows(events, firsts, room, kept)
    roots = merger.roots()
    place = {v: i for i, v in enumerate(roots)}
    return Compact(tuple(merger.costs[v].values for v in roots), tuple((place[u], place[v]) for u, v in pairs),
                   tuple(Shared.of(tables).map(np.ascontiguousarray)), firsts, events, room, compact.names[kept],
                   merger.constant)


def _without_settled(merger: Merger, roots: Sequence[int], tied: set[int], events: Events, firsts: np.ndarray
                     ) -> np.ndarray:
    """Settle nodes that neither tables nor memory on edges (``tied``) tie to others, and whose cheapest choice uses the
    least memory at any time; which of the roots are left."""
    least = np.bincount(events.slots, minlength=firsts[-1]) == 0
    left = np.ones(len(roots), bool)
    for i, v in enumerate(roots):
        if not merger.near[v] and v not in tied and least[firsts[i] + merger.costs[v].cheapest]:
            merger.fold(v)
            left[i] = False
    return left


def _needed(compact: Compact, known: dict[tuple[int, bytes], np.ndarray]) -> list[np.ndarray]:
    """For every node the choices for which no other costs and uses no more, whatever the neighbours do.

    ``known``: what was found by what was compared; equal nodes, and those of an earlier round, are not compared again.
    """
    columns = [[costs[:, None], *(table for _, _, table in around)]
               for costs, around in zip(compact.costs, compact.around, strict=True)]
    for owner, _, usage in compact.each_profile:
        if owner < len(columns):
            columns[owner].append(usage)
            continue
        u, v = compact.ends[owner - len(columns)]
        grid = usage.reshape(compact.sizes[u], compact.sizes[v], -1)
        columns[u].append(grid.reshape(len(grid), -1))
        columns[v].append(grid.transpose(1, 0, 2).reshape(grid.shape[1], -1))
    found = []
    for parts in columns:
        rows = np.concatenate(parts, axis=1) if len(parts[0]) > 1 else ONE
        key = len(rows), hashlib.blake2b(rows.data, digest_size=16).digest()
        if key not in known:
            known[key] = undominated(rows)
        found.append(known[key])
    return found


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
