"""Exact reductions, each with a way back: choices that cannot be needed, nodes that can be folded away.

    Reduced.problem     the smaller problem
    Reduced.restore     its choice -> a choice of the original with the same objective
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoparallel.search.problem import FORBIDDEN, Edge, Node, Problem

MAX_COMPARED = 1024
FOLD_CELLS = 1_000_000
Restore = Callable[[Sequence[int]], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Reduced:
    """A smaller problem and the way back from its choices."""

    problem: Problem
    restore: Restore


def drop_dominated(problem: Problem, rounds: int = 2) -> Reduced:
    """Drop forbidden choices, and those for which another choice costs and uses no more whatever the neighbours do.

    Of equal choices the first stays. Equal nodes (by array identity) are worked out once. O(nodes k^2 columns).
    """
    kept = [np.arange(len(node.costs)) for node in problem.nodes]
    reduced = problem
    for _ in range(rounds):
        picks = _needed(reduced)
        if all(len(pick) == len(node.costs) for pick, node in zip(picks, reduced.nodes, strict=True)):
            break
        kept = [old[pick] for old, pick in zip(kept, picks, strict=True)]
        reduced = select(problem, kept)

    def restore(choice: Sequence[int]) -> tuple[int, ...]:
        return tuple(int(old[c]) for old, c in zip(kept, choice, strict=True))

    return Reduced(reduced, restore)


def select(problem: Problem, kept: Sequence[np.ndarray]) -> Problem:
    """The problem with only these choices of each node; arrays that were shared stay shared."""
    made: dict[tuple[object, ...], np.ndarray] = {}

    def part(array: np.ndarray, *index: np.ndarray) -> np.ndarray:
        if all(len(i) == n for i, n in zip(index, array.shape, strict=True)):
            return array
        key = (id(array), *(i.tobytes() for i in index))
        if key not in made:
            made[key] = array[np.ix_(*index)]
        return made[key]

    nodes = tuple(
        Node(n.name, part(n.costs, k), part(n.usages, k), n.interval,
             None if n.labels is None else tuple(n.labels[i] for i in k))
        for n, k in zip(problem.nodes, kept, strict=True)
    )
    edges = tuple(
        Edge(e.source, e.target, part(e.costs, kept[e.source], kept[e.target]),
             None if e.usages is None else part(e.usages, kept[e.source], kept[e.target]), e.interval)
        for e in problem.edges
    )
    return Problem(nodes, edges, problem.limit, problem.name)


def _needed(problem: Problem) -> list[np.ndarray]:
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
            known[key] = _needed_choices(node, edges, memory)
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
    rows = np.concatenate(columns, axis=1)
    alive = np.flatnonzero((node.costs < FORBIDDEN))
    if not len(alive) or len(alive) > MAX_COMPARED:
        return alive if len(alive) else np.arange(len(node.costs))
    rows = rows[alive]
    order = np.lexsort((np.arange(len(alive)), np.where(np.isfinite(rows), rows, 1e30).sum(axis=1)))
    kept: list[int] = []
    for i in order:  # a dominating choice has the smaller sum, so it comes first
        if not kept or not (rows[kept] <= rows[i]).all(axis=1).any():
            kept.append(int(i))
    return alive[np.sort(kept)]


def fold(problem: Problem) -> Reduced:
    """Fold away nodes with at most two neighbours, whose choice then follows from theirs. Only without a memory limit.

    The table left between the two neighbours is the minimum over the folded node's choices. O(k^3) per node.
    """
    if problem.limit < FORBIDDEN:
        raise ValueError("folding ignores memory; the problem has a limit")
    work = _Folding(problem)
    work.run()
    return work.result()


class _Folding:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.costs = [node.costs for node in problem.nodes]
        self.tables: list[dict[int, np.ndarray]] = [{} for _ in problem.nodes]
        for edge in problem.edges:
            self._join(edge.source, edge.target, edge.costs)
        self.folded: list[tuple[int, tuple[int, ...], np.ndarray, list[np.ndarray]]] = []
        self.gone = [False] * len(problem.nodes)

    def _join(self, u: int, v: int, table: np.ndarray) -> None:
        if v in self.tables[u]:
            table = self.tables[u][v] + table
        self.tables[u][v], self.tables[v][u] = table, table.T

    def run(self) -> None:
        waiting = sorted(range(len(self.costs)), reverse=True)
        while waiting:
            v = waiting.pop()
            near = sorted(self.tables[v])
            cells = len(self.costs[v]) * int(np.prod([len(self.costs[u]) for u in near]))
            if self.gone[v] or len(near) > 2 or cells > FOLD_CELLS * 40:
                continue
            self._remove(v, near)
            waiting.extend(u for u in near if len(self.tables[u]) <= 2)

    def _remove(self, v: int, near: list[int]) -> None:
        tables = [self.tables[v][u] for u in near]
        self.folded.append((v, tuple(near), self.costs[v], tables))
        self.gone[v] = True
        for u in near:
            del self.tables[u][v]
        self.tables[v] = {}
        if len(near) == 1:
            self.costs[near[0]] = self.costs[near[0]] + (self.costs[v][:, None] + tables[0]).min(axis=0)
        elif len(near) == 2:
            left = self.costs[v][:, None] + tables[0]
            joined = np.empty((left.shape[1], tables[1].shape[1]))
            for j in range(tables[1].shape[1]):
                joined[:, j] = (left + tables[1][:, j, None]).min(axis=0)
            self._join(near[0], near[1], joined)

    def result(self) -> Reduced:
        left = [v for v in range(len(self.costs)) if not self.gone[v]]
        place = {v: i for i, v in enumerate(left)}
        nodes = [Node(self.problem.nodes[v].name, self.costs[v], np.zeros(len(self.costs[v]))) for v in left]
        edges = [Edge(place[u], place[v], t) for u in left for v, t in self.tables[u].items() if u < v]
        constant = sum(float((self.costs[v]).min()) for v, near, _, _ in self.folded if not near)
        nodes.append(Node("folded away", np.array([constant]), np.zeros(1)))

        def restore(choice: Sequence[int]) -> tuple[int, ...]:
            full = [0] * len(self.costs)
            for v, c in zip(left, choice, strict=False):
                full[v] = int(c)
            for v, near, costs, tables in reversed(self.folded):
                total = costs + sum((t[:, full[u]] for u, t in zip(near, tables, strict=True)), np.zeros(len(costs)))
                full[v] = int(total.argmin())
            return tuple(full)

        return Reduced(Problem(tuple(nodes), tuple(edges), FORBIDDEN, self.problem.name), restore)
