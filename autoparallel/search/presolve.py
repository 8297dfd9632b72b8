"""Exact reductions, each with a way back: choices that cannot be needed, nodes that can be folded away.

    Reduced.problem     the smaller problem
    Reduced.restore     its choice -> a choice of the original with the same objective
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoparallel.search.problem import FORBIDDEN, Edge, Node, Problem

MAX_COMPARED = 1024


@dataclass(frozen=True, eq=False)
class Reduced:
    """A problem with fewer choices: ``kept[v]`` are those of the original's node v, ascending."""

    problem: Problem
    kept: tuple[np.ndarray, ...]

    def restore(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The same plan in the original's choices."""
        return tuple(int(kept[pick]) for kept, pick in zip(self.kept, choice, strict=True))

    def forward(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The original's plan in this problem's choices; a choice that was dropped becomes the first one."""
        found = []
        for kept, pick in zip(self.kept, choice, strict=True):
            at = int(np.searchsorted(kept, pick))
            found.append(at if at < len(kept) and kept[at] == pick else 0)
        return tuple(found)

    def then(self, inner: Reduced) -> Reduced:
        """A further reduction of this problem, as one of the original."""
        return Reduced(inner.problem, tuple(old[new] for old, new in zip(self.kept, inner.kept, strict=True)))


def keep(problem: Problem, kept: Sequence[np.ndarray]) -> Reduced:
    return Reduced(select(problem, kept), tuple(kept))


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

    return Reduced(reduced, tuple(kept))


def select(problem: Problem, kept: Sequence[np.ndarray]) -> Problem:
    """The problem with only these choices of each node; arrays that were shared stay shared."""
    made: dict[tuple[object, ...], np.ndarray] = {}
    names = [pick.tobytes() for pick in kept]
    in_order = {size: np.arange(size, dtype=np.int64).tobytes() for size in {len(n.costs) for n in problem.nodes}}
    whole = [name == in_order[len(node.costs)] for name, node in zip(names, problem.nodes, strict=True)]

    def part(array: np.ndarray, *owners: int) -> np.ndarray:
        if all(whole[v] for v in owners):
            return array
        key = (id(array), *(names[v] for v in owners))
        found = made.get(key)
        if found is None:
            found = made[key] = array[np.ix_(*(kept[v] for v in owners))]
        return found

    nodes = tuple(
        node if whole[v] else
        replace(node, costs=part(node.costs, v), usages=part(node.usages, v),
                labels=None if node.labels is None else tuple(node.labels[i] for i in kept[v]))
        for v, node in enumerate(problem.nodes)
    )
    edges = tuple(
        replace(e, costs=part(e.costs, e.source, e.target),
                usages=None if e.usages is None else part(e.usages, e.source, e.target))
        for e in problem.edges
    )
    return replace(problem, nodes=nodes, edges=edges)


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
    alive = np.flatnonzero(node.costs < FORBIDDEN)
    if not len(alive) or len(alive) > MAX_COMPARED:
        return alive if len(alive) else np.arange(len(node.costs))
    rows = rows[alive]
    order = np.lexsort((np.arange(len(alive)), np.where(np.isfinite(rows), rows, 1e30).sum(axis=1)))
    kept: list[int] = []
    for i in order:  # a dominating choice has the smaller sum, so it comes first
        if not kept or not (rows[kept] <= rows[i]).all(axis=1).any():
            kept.append(int(i))
    return alive[np.sort(kept)]
