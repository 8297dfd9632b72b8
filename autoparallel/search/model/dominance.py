"""Exact reductions, each with its inverse map: dominated choices are dropped, nodes of one choice are folded away.

    Reduced.problem     the smaller problem
    Reduced.restore     its choice -> a choice of the original with the same objective
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoparallel import clock
from autoparallel.errors import SearchError
from autoparallel.search.model.interned import Shared, firsts, paired
from autoparallel.search.model.problem import FORBIDDEN, NOTHING, Edge, Node, Problem, Strategy, unchecked

MAX_COMPARED = 1024
#: Columns in which all pairs of rows are compared, and those in which each row is compared next with what is left.
FEW_COLUMNS, MANY_COLUMNS = 16, 64
FAR = 1 << 32  # more than any choice's number


@dataclass(frozen=True, eq=False)
class Reduced:
    """A problem with fewer choices: ``kept[v]`` are those of the original's node v, ascending."""

    problem: Problem
    kept: tuple[np.ndarray, ...]

    def restore(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The same plan in the original's choices."""
        return tuple(self._rows[self._starts + np.asarray(choice, np.int64)].tolist())

    def forward(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The original's plan in this problem's choices; a choice that was dropped becomes the first one."""
        picks = np.arange(len(self.kept)) * FAR + np.asarray(choice, np.int64)
        at = np.minimum(np.searchsorted(self._keys, picks), max(0, len(self._keys) - 1))
        return tuple(np.where(self._keys[at] == picks, at - self._starts, 0).tolist())

    @cached_property
    def _rows(self) -> np.ndarray:
        """All of ``kept`` in one row."""
        return np.concatenate(self.kept)

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum([0, *map(len, self.kept)])[:-1]

    @cached_property
    def _keys(self) -> np.ndarray:
        """``_rows``, and the nodes that they are of: ascending."""
        return np.repeat(np.arange(len(self.kept)) * FAR, [len(kept) for kept in self.kept]) + self._rows

    def then(self, inner: Reduced) -> Reduced:
        """A further reduction of this problem, as one of the original."""
        return Reduced(inner.problem, tuple(old[new] for old, new in zip(self.kept, inner.kept, strict=True)))


def untouched(problem: Problem) -> Reduced:
    """All choices kept."""
    sizes = problem.sizes.tolist()
    whole = {size: np.arange(size) for size in set(sizes)}
    return Reduced(problem, tuple([whole[size] for size in sizes]))


def keep(problem: Problem, kept: Sequence[np.ndarray]) -> Reduced:
    return Reduced(select(problem, kept), tuple(kept))


def drop_dominated(problem: Problem, rounds: int = 2, deadline: float = FORBIDDEN) -> Reduced:
    """Drop forbidden choices, and those for which another choice costs and uses no more whatever the neighbours do.

    Of equal choices the first stays. Equal nodes (by array identity) are worked out once. O(nodes k^2 columns).
    After the deadline nodes keep what they have.
    """
    kept = [np.arange(len(node.costs)) for node in problem.nodes]
    reduced = problem
    for _ in range(rounds):
        picks = _needed(reduced, deadline)
        if all(len(pick) == len(node.costs) for pick, node in zip(picks, reduced.nodes, strict=True)):
            break
        kept = [old[pick] for old, pick in zip(kept, picks, strict=True)]
        reduced = select(problem, kept)

    return Reduced(reduced, tuple(kept))


def select(problem: Problem, kept: Sequence[np.ndarray]) -> Problem:
    """The problem with only these choices of each node; arrays that were shared stay shared.

    Raises SearchError where a node would have none.
    """
    if all(len(pick) == size for pick, size in zip(kept, problem.sizes.tolist(), strict=True)):
        return problem
    if not all(map(len, kept)):
        empty = next(node for node, pick in zip(problem.nodes, kept, strict=True) if not len(pick))
        raise SearchError(f"node {empty.name!r}: no choice is left")
    costs, usages = selected(problem.costs, problem.ends, kept), selected(problem.usages, problem.ends, kept)
    names: dict[tuple[int, bytes], tuple[Strategy, ...]] = {}

    def labels_of(node: Node, pick: np.ndarray) -> tuple[Strategy, ...] | None:
        if node.strategies is None:
            return None
        key = id(node.strategies), pick.tobytes()
        if key not in names:
            names[key] = tuple([node.strategies[i] for i in pick.tolist()])
        return names[key]

    nodes = tuple([unchecked(node, costs=cost, usages=usage, strategies=labels_of(node, pick))
                   for node, cost, usage, pick in zip(problem.nodes, costs, usages, kept, strict=False)])
    count = len(nodes)
    edges = tuple([unchecked(edge, costs=cost, usages=None if edge.usages is None else usage)
                   for edge, cost, usage in zip(problem.edges, costs[count:], usages[count:], strict=True)])
    return unchecked(problem, nodes=nodes, edges=edges, costs=costs, usages=usages,
                     sizes=np.array([len(pick) for pick in kept], np.int64))


def selected(arrays: Shared, ends: np.ndarray, kept: Sequence[np.ndarray]) -> Shared:
    """Of nodes' arrays, then edges' tables, only the choices kept of each node; what was shared stays shared."""
    seen: dict[bytes, int] = {}
    names = np.array([seen.setdefault(pick.tobytes(), len(seen)) for pick in kept], np.int64)
    owners = np.concatenate([np.repeat(np.arange(len(kept))[:, None], 2, axis=1), ends])
    first, numbers = firsts(paired(paired(arrays.numbers, names[owners[:, 0]]), names[owners[:, 1]]))

    def part(user: int) -> np.ndarray:
        array = arrays[user]
        within = [kept[v] for v in owners[user, :array.ndim].tolist()]
        if array is NOTHING or array.shape == tuple(map(len, within)):
            return array
        return array[np.ix_(*within)]

    parts = Shared.of(part(user) for user in first)
    return Shared(parts.distinct, parts.numbers[numbers])


def _needed(problem: Problem, deadline: float) -> list[np.ndarray]:
    around: list[list[tuple[Edge, bool]]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        around[edge.source].append((edge, True))
        around[edge.target].append((edge, False))
    memory = problem.limit < FORBIDDEN
    known: dict[tuple[object, ...], np.ndarray] = {}
    found = []
    for node, edges in zip(problem.nodes, around, strict=True):
        key = (id(node.costs), id(node.usages), *((id(e.costs), id(e.usages), side) for e, side in edges))
        if key not in known:
            in_time = clock.now() < deadline
            known[key] = _needed_choices(node, edges, memory) if in_time else np.arange(len(node.costs))
        found.append(known[key])
    return found


def _needed_choices(node: Node, edges: Sequence[tuple[Edge, bool]], memory: bool) -> np.ndarray:
    columns = [node.costs[:, None]]
    if memory:
        columns.append(node.usages[:, None])
    for edge, is_source in edges:
        columns.append(edge.costs if is_source else edge.costs.T)
        if memory and edge.usages is not None:
            columns.append(edge.usages if is_source else edge.usages.T)
    alive = np.flatnonzero(node.costs < FORBIDDEN)
    if not len(alive) or len(alive) > MAX_COMPARED:
        return alive if len(alive) else np.arange(len(node.costs))
    rows = np.concatenate(columns, axis=1)[alive]
    order = np.lexsort((np.arange(len(alive)), np.where(np.isfinite(rows), rows, 1e30).sum(axis=1)))
    return alive[np.sort(order[_not_dominated(rows[order])])]


def _not_dominated(rows: np.ndarray) -> np.ndarray:
    """Whether each row is kept: none kept before it is at most as large in all columns. Rows ascend by their sums, so
    that none after it can be. A few columns tell most pairs apart, and as many of the others as it takes the rest."""
    num_rows, num_columns = rows.shape
    few = rows[:, np.unique(np.linspace(0, num_columns - 1, FEW_COLUMNS).astype(int))].T
    may = np.tri(num_rows, num_rows, -1, bool).T    # by row and a later one, whether that may be dominated
    for column in few:
        may &= column[:, None] <= column
    compared = rows.size + len(few) * may.size
    kept = np.ones(num_rows, bool)
    for row in np.flatnonzero(may.any(axis=1)).tolist():
        if not kept[row]:
            continue
        larger, at, width = np.flatnonzero(may[row] & kept), 0, MANY_COLUMNS
        while len(larger) and at < num_columns:
            part = rows[larger, at : at + width]
            compared += part.size
            larger = larger[(rows[row, at : at + width] <= part).all(axis=1)]
            at, width = at + width, 2 * width
        kept[larger] = False
    clock.did("rows compared", num_rows)
    clock.did("cells compared", compared)
    return kept
