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
HOPELESS_CELLS = 1e10


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

    O(n w^2 log n) for width w (O(n w^3 log n) by fill). Gives up, with no nodes, at a table of `HOPELESS_CELLS`.
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
        if cells > HOPELESS_CELLS:
            return Order((), (), FORBIDDEN)
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
            content = hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).digest()
            known = self._by_id[id(array)] = array, self.of((array.shape, content))
        return known[1]


class Factor(NamedTuple):
    """A table over the choices of the nodes in ``scope``, called ``name``."""

    scope: tuple[int, ...]
    name: int


class Slot(NamedTuple):
    """What a step is, whatever the costs: elimination of ``node``, by adding up ``inputs`` and minimising over it.

    An input is a number: nodes' costs first, then edges' tables, then the results of earlier slots, which are tables
    over their ``near``; ``scopes`` are the nodes of each. Slots of equal ``layout`` add up their inputs alike.
    """

    node: int
    near: tuple[int, ...]
    inputs: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]
    layout: tuple[object, ...]


class Step(NamedTuple):
    """A slot whose inputs are called ``inputs`` and whose result is called ``name``."""

    slot: Slot
    inputs: tuple[int, ...]
    name: int

    @property
    def node(self) -> int:
        return self.slot.node

    @property
    def near(self) -> tuple[int, ...]:
        return self.slot.near

    @property
    def factors(self) -> tuple[Factor, ...]:
        return tuple(map(Factor, self.slot.scopes, self.inputs))


class Eliminator:
    """Solves problems of one structure (same nodes and edges) again and again with changed costs.

    Look at ``order.max_cells`` first (`exact.affordable` does): inf means that there is no order to solve in.
    """

    def __init__(self, sizes: Sequence[int], pairs: Sequence[tuple[int, int]]) -> None:
        self.sizes, self._pairs = list(sizes), list(pairs)
        open_pairs = [(u, v) for u, v in self._pairs if self.sizes[u] > 1 and self.sizes[v] > 1]
        self.order = elimination_order(self.sizes, open_pairs)
        if CHUNK_CELLS < self.order.max_cells < FORBIDDEN:
            other = elimination_order(self.sizes, open_pairs, by_fill=True)
            self.order = min(self.order, other, key=lambda order: order.max_cells)
        self._lines: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._rank = [0] * len(self.sizes)
        for rank, v in enumerate(self.order.nodes):
            self._rank[v] = rank
        self._slots = self._laid_out() if self.order.nodes else []

    @classmethod
    def of(cls, problem: Problem) -> Eliminator:
        return cls([len(node.costs) for node in problem.nodes], [(e.source, e.target) for e in problem.edges])

    def _laid_out(self) -> list[Slot]:
        """A slot per node, in order. O(n w)."""
        waiting: list[list[tuple[int, tuple[int, ...]]]] = [[(v, (v,))] for v in range(len(self.sizes))]
        number = len(self.sizes)
        for pair in self._pairs:
            scope = tuple(u for u in pair if self.sizes[u] > 1) or pair[1:]  # a node with one choice joins nothing
            waiting[min(scope, key=self._rank.__getitem__)].append((number, scope))
            number += 1
        slots = []
        for v, near in zip(self.order.nodes, self.order.neighbours, strict=True):
            place = {u: axis for axis, u in enumerate((v, *near))}
            inputs, scopes = zip(*waiting[v], strict=True)
            layout = tuple(tuple(place[u] for u in scope) for scope in scopes)
            slots.append(Slot(v, near, inputs, scopes, layout))
            if near:
                waiting[min(near, key=self._rank.__getitem__)].append((number, near))
            number += 1
        return slots

    def _table(self, pair: tuple[int, int], table: np.ndarray) -> np.ndarray:
        """The table of an edge, as costs of the one where the other has one choice; of one table the same object."""
        if min(table.shape) > 1:
            return table
        axis = 0 if self.sizes[pair[0]] == 1 else 1
        known = self._lines.get((id(table), axis))
        if known is None:
            known = self._lines[id(table), axis] = table, table[0] if axis == 0 else table[:, 0]
        return known[1]

    def work(self, costs: Sequence[np.ndarray], tables: Sequence[np.ndarray]) -> float:
        """Cells that `solve` would touch: the sum over distinct steps."""
        steps, _, _ = self._steps(costs, tables)
        cells = {step.name: math.prod(float(self.sizes[u]) for u in (step.node, *step.near)) for step in steps}
        return sum(cells.values())

    def solve(self, costs: Sequence[np.ndarray], tables: Sequence[np.ndarray]) -> tuple[float, tuple[int, ...]]:
        """The minimum of sum(costs) + sum(tables) and a choice that attains it (inf: none is allowed).

        ``costs`` has an array per node, ``tables`` one per edge of the problem given at birth. Time O(`work`).
        """
        steps, arrays, _ = self._steps(costs, tables)
        return self._forward(steps, arrays), self._choose(steps, arrays)

    def regrets(self, costs: Sequence[np.ndarray], tables: Sequence[np.ndarray]) -> list[np.ndarray]:
        """For every choice of every node: by how much the best plan with it exceeds the best plan (inf: there is none).

        One pass up (as `solve`) and one down, in which what is added up at each step is once more minimised, for the
        step's node and for each earlier step that gave it a table. Raises nothing; all 0 when no plan is allowed.
        """
        steps, arrays, names = self._steps(costs, tables)
        if self._forward(steps, arrays) == FORBIDDEN:
            return [np.zeros(size) for size in self.sizes]
        above: dict[int, Factor] = {}
        regrets: list[np.ndarray] = [np.zeros(0)] * len(self.sizes)
        known: dict[tuple[object, ...], list[np.ndarray]] = {}
        position = {step.node: number for number, step in enumerate(steps)}
        children: list[list[int]] = [[] for _ in steps]
        for number, step in enumerate(steps):
            if step.near:
                children[position[min(step.near, key=self._rank.__getitem__)]].append(number)
        for number in range(len(steps) - 1, -1, -1):
            step, given = steps[number], children[number]
            factors = [*step.factors, *([above[number]] if number in above else [])]
            scope = (step.node, *step.near)
            onto = [(step.node,), *(steps[child].near for child in given)]
            place = {u: axis for axis, u in enumerate(scope)}
            key = (tuple((factor.name, *(place[u] for u in factor.scope)) for factor in factors),
                   tuple(tuple(place[u] for u in part) for part in onto), tuple(self.sizes[u] for u in scope))
            if key not in known:
                known[key] = self._project(factors, scope, onto, arrays)
            regrets[step.node], *totals = known[key]
            for child, total in zip(given, totals, strict=True):
                name = names.of(("above", steps[child].name, names.of_array(total)))
                if name not in arrays:
                    arrays[name] = _less(total, arrays[steps[child].name])
                above[child] = Factor(steps[child].near, name)
        return regrets

    def _forward(self, steps: list[Step], arrays: dict[int, np.ndarray]) -> float:
        """Fill in the result of every step, each less its minimum; returns the sum of these minima."""
        offsets: dict[int, float] = {}
        for step in steps:
            if step.name not in offsets:
                result = self._minimise(step, arrays)
                lowest = float(result.min())
                offsets[step.name] = lowest
                arrays[step.name] = result - lowest if 0 < lowest < FORBIDDEN else result
        return math.fsum(offsets[step.name] for step in steps)

    def _project(self, factors: list[Factor], scope: tuple[int, ...], onto: Sequence[tuple[int, ...]],
                 arrays: dict[int, np.ndarray]) -> list[np.ndarray]:
        """Minima of the factors' sum over all of ``scope`` but each of ``onto``, less the least.

        All of ``onto`` mention the first of ``scope``, along which the sum is worked out in pieces.
        """
        place = {u: axis for axis, u in enumerate(scope)}
        shape = tuple(self.sizes[u] for u in scope)
        rest = [tuple(axis for axis, u in enumerate(scope) if u not in part) for part in onto]
        parts = self._parts(factors, scope, arrays)
        rows = max(1, int(CHUNK_CELLS * shape[0] / math.prod(shape)))
        pieces: list[list[np.ndarray]] = [[] for _ in onto]
        for low in range(0, shape[0], rows):
            total = functools.reduce(np.add, [part if part.shape[0] == 1 else part[low:low + rows] for part in parts])
            full = np.broadcast_to(total, (min(rows, shape[0] - low), *shape[1:]))
            for found, axes in zip(pieces, rest, strict=True):
                found.append(full.min(axis=axes))
        least: list[np.ndarray] = []
        for part, found in zip(onto, pieces, strict=True):
            joined = np.concatenate(found)
            left = [place[u] for u in scope if u in part]
            least.append(joined.transpose([left.index(place[u]) for u in part]))
        return [array - min(float(array.min()), 1e300) for array in least]

    def _parts(self, factors: Sequence[Factor], scope: tuple[int, ...], arrays: dict[int, np.ndarray]
               ) -> list[np.ndarray]:
        """The factors' tables laid out over ``scope`` (size 1 along absent nodes), small ones first."""
        place = {u: axis for axis, u in enumerate(scope)}
        parts = []
        for factor in factors:
            axes = [place[u] for u in factor.scope]
            spread = [1] * len(scope)
            for axis in axes:
                spread[axis] = self.sizes[scope[axis]]
            parts.append(arrays[factor.name].transpose(np.argsort(axes)).reshape(spread))
        return sorted(parts, key=lambda part: part.size)

    def _steps(self, costs: Sequence[np.ndarray], tables: Sequence[np.ndarray]
               ) -> tuple[list[Step], dict[int, np.ndarray], _Names]:
        """Every elimination with what it adds up, and the arrays that are known so far by name."""
        given = [*costs, *map(self._table, self._pairs, tables)]
        names = _Names()
        called = [names.of_array(array) for array in given]
        arrays = dict(zip(called, given, strict=True))
        steps = []
        for slot in self._slots:
            inputs = tuple([called[number] for number in slot.inputs])
            steps.append(Step(slot, inputs, names.of((slot.layout, inputs))))
            called.append(steps[-1].name)
        return steps, arrays, names

    def _minimise(self, step: Step, arrays: dict[int, np.ndarray]) -> np.ndarray:
        """The table over ``step.near``, computed in pieces that stay in the cache."""
        scope = (step.node, *step.near)
        shape = tuple(self.sizes[u] for u in scope)
        parts = self._parts(step.factors, scope, arrays)
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
        known: dict[tuple[int, ...], int] = {}
        for step in reversed(steps):
            key = (step.name, *[choice[u] for u in step.near])
            if key not in known:
                total = np.zeros(self.sizes[step.node])
                for factor in step.factors:
                    index = tuple(slice(None) if u == step.node else choice[u] for u in factor.scope)
                    total = total + arrays[factor.name][index]
                known[key] = int(total.argmin())
            choice[step.node] = known[key]
        return tuple(choice)


def _less(total: np.ndarray, part: np.ndarray) -> np.ndarray:
    """A sum without one of its terms; inf where that is inf."""
    return np.subtract(total, part, out=np.full(total.shape, FORBIDDEN), where=part < FORBIDDEN)
