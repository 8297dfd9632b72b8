"""Exact minimum of node costs plus edge tables, by eliminating one node after another in a low-width order.

Eliminating v adds up every table that mentions v and takes the minimum over v: what is left is one table over v's
neighbours. The work of a step is the product of v's and its neighbours' numbers of choices. Steps are named by their
inputs, so that equal blocks of a model (which share their arrays) are computed once: work grows with the number of
*distinct* steps, not with depth. Memory limits do not appear here; `lagrange` prices them into the costs.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoparallel.search.problem import FORBIDDEN, Problem

CHUNK_CELLS = 1_000_000


@dataclass(frozen=True)
class Order:
    """Which node is eliminated when, and what remains around it at that moment.

    ``neighbours[i]`` (ascending) are those of ``nodes[i]``; ``max_cells`` is the largest table that is kept.
    """

    nodes: tuple[int, ...]
    neighbours: tuple[tuple[int, ...], ...]
    max_cells: float


def elimination_order(sizes: Sequence[int], pairs: Sequence[tuple[int, int]], by_fill: bool = False) -> Order:
    """Greedy order: next is the node whose step is the smallest (or adds the fewest new pairs); ties by index.

    O(n w^2 log n) for width w (O(n w^3 log n) by fill).
    """
    around: list[set[int]] = [set() for _ in sizes]
    for u, v in pairs:
        around[u].add(v)
        around[v].add(u)

    def weight(v: int) -> tuple[float, float]:
        cells = float(sizes[v])
        for u in around[v]:
            cells *= sizes[u]
        if not by_fill:
            return cells, 0.0
        near = sorted(around[v])
        fill = sum(sizes[a] * sizes[b] for i, a in enumerate(near) for b in near[i + 1:] if b not in around[a])
        return float(fill), cells

    current = [weight(v) for v in range(len(sizes))]
    heap = [(*current[v], v) for v in range(len(sizes))]
    heapq.heapify(heap)
    done = [False] * len(sizes)
    nodes, neighbours, max_cells = [], [], 1.0
    while heap:
        *seen, v = heapq.heappop(heap)
        if done[v] or tuple(seen) != current[v]:
            continue
        done[v] = True
        near = sorted(around[v])
        nodes.append(v)
        neighbours.append(tuple(near))
        cells = 1.0
        for u in near:
            cells *= sizes[u]
        max_cells = max(max_cells, cells)
        for u in near:
            around[u].discard(v)
            around[u].update(near)
            around[u].discard(u)
        touched = set(near).union(*(around[u] for u in near)) if by_fill else near
        for u in touched:
            fresh = weight(u)
            if fresh != current[u]:
                current[u] = fresh
                heapq.heappush(heap, (*fresh, u))
    return Order(tuple(nodes), tuple(neighbours), max_cells)


class _Names:
    """Small numbers for arrays and steps: equal inputs, equal number."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._by_id: dict[int, tuple[np.ndarray, int]] = {}

    def of(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def of_array(self, array: np.ndarray) -> int:
        """By identity where the array was seen before (it is kept alive), else by content."""
        known = self._by_id.get(id(array))
        if known is None:
            content = hashlib.blake2b(np.ascontiguousarray(array), digest_size=16).digest()
            known = self._by_id[id(array)] = array, self.of((array.shape, content))
        return known[1]


class Factor(NamedTuple):
    """A table over the choices of the nodes in ``scope``, called ``name``."""

    scope: tuple[int, ...]
    name: int


class Step(NamedTuple):
    """Elimination of ``node``: add up ``factors``, minimise over the node; the result, ``name``, is over ``near``."""

    node: int
    near: tuple[int, ...]
    factors: tuple[Factor, ...]
    name: int


class Eliminator:
    """Solves problems of one structure (same nodes and edges) again and again with changed costs."""

    def __init__(self, problem: Problem) -> None:
        self.sizes = [len(node.costs) for node in problem.nodes]
        self._pairs = [(edge.source, edge.target) for edge in problem.edges]
        open_pairs = [(u, v) for u, v in self._pairs if self.sizes[u] > 1 and self.sizes[v] > 1]
        self.order = elimination_order(self.sizes, open_pairs)
        if self.order.max_cells > CHUNK_CELLS:
            other = elimination_order(self.sizes, open_pairs, by_fill=True)
            self.order = min(self.order, other, key=lambda order: order.max_cells)
        self._lines: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._rank = [0] * len(self.sizes)
        for rank, v in enumerate(self.order.nodes):
            self._rank[v] = rank

    def _only(self, table: np.ndarray, axis: int) -> np.ndarray:
        """The table of an edge whose node on ``axis`` has one choice, as costs of the other; the same object again."""
        known = self._lines.get((id(table), axis))
        if known is None:
            known = self._lines[id(table), axis] = table, table[0] if axis == 0 else table[:, 0]
        return known[1]

    def work(self, costs: Sequence[np.ndarray], tables: Sequence[np.ndarray]) -> float:
        """Cells that `solve` would touch: the sum over distinct steps."""
        steps, _ = self._steps(costs, tables)
        cells = {step.name: math.prod(float(self.sizes[u]) for u in (step.node, *step.near)) for step in steps}
        return sum(cells.values())

    def solve(self, costs: Sequence[np.ndarray], tables: Sequence[np.ndarray]) -> tuple[float, tuple[int, ...]]:
        """The minimum of sum(costs) + sum(tables) and a choice that attains it (inf: none is allowed).

        ``costs`` has an array per node, ``tables`` one per edge of the problem given at birth. Time O(`work`).
        """
        steps, arrays = self._steps(costs, tables)
        offsets: dict[int, float] = {}
        for step in steps:
            if step.name not in offsets:
                result = self._minimise(step, arrays)
                lowest = float(result.min())
                offsets[step.name] = lowest
                arrays[step.name] = result - lowest if 0 < lowest < FORBIDDEN else result
        total = math.fsum(offsets[step.name] for step in steps)
        return total, self._choose(steps, arrays)

    def _steps(self, costs: Sequence[np.ndarray], tables: Sequence[np.ndarray]
               ) -> tuple[list[Step], dict[int, np.ndarray]]:
        """Every elimination with what it adds up, and the arrays that are known so far by name."""
        names, arrays = _Names(), {}
        waiting: list[list[Factor]] = [[] for _ in self.sizes]
        for v, array in enumerate(costs):
            waiting[v].append(Factor((v,), names.of_array(array)))
            arrays[waiting[v][-1].name] = array
        for (u, v), table in zip(self._pairs, tables, strict=True):
            scope = (u, v)
            if self.sizes[u] == 1:  # a node with one choice joins nothing
                scope, table = (v,), self._only(table, 0)
            elif self.sizes[v] == 1:
                scope, table = (u,), self._only(table, 1)
            first = min(scope, key=self._rank.__getitem__)
            waiting[first].append(Factor(scope, names.of_array(table)))
            arrays[waiting[first][-1].name] = table
        steps = []
        for v, near in zip(self.order.nodes, self.order.neighbours, strict=True):
            place = {u: axis for axis, u in enumerate((v, *near))}
            key = tuple((factor.name, *(place[u] for u in factor.scope)) for factor in waiting[v])
            steps.append(Step(v, near, tuple(waiting[v]), names.of(key)))
            if near:
                waiting[min(near, key=self._rank.__getitem__)].append(Factor(near, steps[-1].name))
        return steps, arrays

    def _minimise(self, step: Step, arrays: dict[int, np.ndarray]) -> np.ndarray:
        """The table over ``step.near``, computed in pieces that stay in the cache."""
        scope = (step.node, *step.near)
        place = {u: axis for axis, u in enumerate(scope)}
        shape = tuple(self.sizes[u] for u in scope)
        parts = []
        for factor in step.factors:
            axes = [place[u] for u in factor.scope]
            spread = [1] * len(scope)
            for axis in axes:
                spread[axis] = shape[axis]
            parts.append(arrays[factor.name].transpose(np.argsort(axes)).reshape(spread))
        parts.sort(key=lambda part: part.size)
        if len(scope) == 1:
            return functools.reduce(np.add, parts).min(axis=0)
        rows = max(1, int(CHUNK_CELLS * shape[1] / math.prod(shape)))
        pieces = [functools.reduce(np.add, [part if part.shape[1] == 1 else part[:, low:low + rows] for part in parts])
                  .min(axis=0) for low in range(0, shape[1], rows)]
        full = shape[1:]
        return np.concatenate([np.broadcast_to(piece, (min(rows, full[0] - low), *full[1:])) for piece, low
                               in zip(pieces, range(0, full[0], rows), strict=True)]) if len(pieces) > 1 else pieces[0]

    def _choose(self, steps: list[Step], arrays: dict[int, np.ndarray]) -> tuple[int, ...]:
        """Walk back: the best choice of each node given those of the nodes eliminated after it."""
        choice = [0] * len(self.sizes)
        for step in reversed(steps):
            total = np.zeros(self.sizes[step.node])
            for factor in step.factors:
                index = tuple(slice(None) if u == step.node else choice[u] for u in factor.scope)
                total = total + arrays[factor.name][index]
            choice[step.node] = int(total.argmin())
        return tuple(choice)
