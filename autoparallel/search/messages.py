"""A relaxation for graphs that are too wide to eliminate: sequential reweighted message passing (TRW-S).

Messages move costs between nodes and edges so that the sum of their minima grows: that sum is a lower bound, and taking
nodes in order, each given those before it and the messages of those after it, gives a plan. O(passes * cells), no
table is larger than an edge's. Messages are kept from call to call, so that prices can change in small steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from autoparallel.search.problem import FORBIDDEN, Problem

HUGE = 1e4
IMPROVEMENT = 1e-5
CHECK_EVERY = 5


class Messenger:
    """`solve` and `regrets` as those of `Eliminator`, with a bound in place of the minimum.

    Nothing costs more than ``HUGE`` times the sum of the nodes' median costs here, which keeps bounds valid.
    """

    def __init__(self, problem: Problem, passes: int, deadline: float = FORBIDDEN) -> None:
        self.passes, self.deadline = passes, deadline
        allowed = [node.costs[node.costs < FORBIDDEN] for node in problem.nodes]
        self._highest = HUGE * (sum(float(np.median(costs)) for costs in allowed if len(costs)) or 1.0)
        self._ends = [(edge.source, edge.target) for edge in problem.edges]
        self._num_nodes = len(problem.nodes)
        self._forward: list[list[int]] = [[] for _ in problem.nodes]
        self._backward: list[list[int]] = [[] for _ in problem.nodes]
        for number, (u, v) in enumerate(self._ends):
            self._forward[min(u, v)].append(number)
            self._backward[max(u, v)].append(number)
        self._into = [[np.zeros(len(problem.nodes[v].costs)) for v in ends] for ends in self._ends]
        self._capped: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def solve(self, costs: Sequence[np.ndarray], tables: Sequence[np.ndarray]) -> tuple[float, tuple[int, ...]]:
        """A lower bound and a plan. Deterministic for the same sequence of calls."""
        nodes, edges = self._cap(costs, False), self._cap(tables, True)
        bound = self.bound(nodes, edges)
        for number in range(1, self.passes + 1):
            self._sweep(nodes, edges, range(self._num_nodes), self._forward, self._backward)
            self._sweep(nodes, edges, range(self._num_nodes - 1, -1, -1), self._backward, self._forward)
            if number % CHECK_EVERY == 0 or number == self.passes:
                before, bound = bound, max(bound, self.bound(nodes, edges))
                if bound - before <= IMPROVEMENT * abs(bound) or time.monotonic() >= self.deadline:
                    break
        return bound, self._round(nodes, edges)

    def bound(self, nodes: Sequence[np.ndarray], edges: Sequence[np.ndarray]) -> float:
        """Sum of the minima of what the messages leave in nodes and edges."""
        total = sum(float(self._belief(nodes, v).min()) for v in range(self._num_nodes))
        return total + sum(float((table - to_u[:, None] - to_v[None]).min())
                           for table, (to_u, to_v) in zip(edges, self._into, strict=True))

    def regrets(self, costs: Sequence[np.ndarray], tables: Sequence[np.ndarray]) -> list[np.ndarray]:
        """For every choice: at least by how much plans with it exceed `bound`."""
        nodes, edges = self._cap(costs, False), self._cap(tables, True)
        found = [belief - belief.min() for belief in (self._belief(nodes, v) for v in range(self._num_nodes))]
        for (u, v), table, (to_u, to_v) in zip(self._ends, edges, self._into, strict=True):
            left = table - to_u[:, None] - to_v[None]
            left -= left.min()
            found[u] += left.min(axis=1)
            found[v] += left.min(axis=0)
        return found

    def _cap(self, arrays: Sequence[np.ndarray], keep: bool) -> list[np.ndarray]:
        """Arrays without infinities; those of ``keep`` are remembered by identity."""
        if not keep:
            return [np.minimum(array, self._highest) for array in arrays]
        for array in arrays:
            if id(array) not in self._capped:
                self._capped[id(array)] = array, np.minimum(array, self._highest)
        return [self._capped[id(array)][1] for array in arrays]

    def _belief(self, nodes: Sequence[np.ndarray], v: int) -> np.ndarray:
        total = nodes[v].copy()
        for number in self._forward[v]:
            total += self._into[number][self._ends[number][1] == v]
        for number in self._backward[v]:
            total += self._into[number][self._ends[number][1] == v]
        return total

    def _sweep(self, nodes: Sequence[np.ndarray], edges: Sequence[np.ndarray], order: range,
               ahead: Sequence[Sequence[int]], behind: Sequence[Sequence[int]]) -> None:
        """Each node in order shares what it has among the edges ahead of it."""
        for v in order:
            if not ahead[v]:
                continue
            share = self._belief(nodes, v) / max(len(ahead[v]), len(behind[v]))
            for number in ahead[v]:
                side = int(self._ends[number][1] == v)
                kept = self._into[number][side] - share
                table = edges[number]
                self._into[number][side] = kept
                self._into[number][1 - side] = ((table - kept[:, None]).min(axis=0) if side == 0
                                                else (table - kept).min(axis=1))

    def _round(self, nodes: Sequence[np.ndarray], edges: Sequence[np.ndarray]) -> tuple[int, ...]:
        plan = [0] * self._num_nodes
        for v in range(self._num_nodes):
            total = nodes[v].copy()
            for number in self._forward[v]:
                total += self._into[number][self._ends[number][1] == v]
            for number in self._backward[v]:
                u, w = self._ends[number]
                total += edges[number][:, plan[w]] if u == v else edges[number][plan[u]]
            plan[v] = int(total.argmin())
        return tuple(plan)
