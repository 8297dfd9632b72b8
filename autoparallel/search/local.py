"""Local search: make a choice fit into memory (repair), then lower its cost by moves of one node or of an edge's pair.

Costs of a node's choices, given its neighbours, are kept until a neighbour moves; memory is kept as the load at the
times that matter, so that a move is checked in the time of a range maximum.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from autoparallel.search.memory import Memory
from autoparallel.search.problem import FORBIDDEN, Problem

PAIR_CELLS = 4096
PAIR_TRIES = 8


class LocalState:
    """A choice that changes by moves, with what each further move would cost.

    Invariant: ``load`` is `Memory.load` of ``choice``. `local_costs` of a node is O(degree * choices) when stale.
    """

    def __init__(self, problem: Problem, memory: Memory, choice: Sequence[int]) -> None:
        self.problem, self.memory, self.choice = problem, memory, list(choice)
        self.load = memory.load(problem, choice)
        self.around: list[list[tuple[int, int, bool]]] = [[] for _ in problem.nodes]
        for number, edge in enumerate(problem.edges):
            self.around[edge.source].append((number, edge.target, True))
            self.around[edge.target].append((number, edge.source, False))
        self._spans: list[tuple[int, int]] = [(low, high) for low, high in memory.spans.tolist()]
        self._uses = [low < high for low, high in self._spans]
        self._users = [[edge for edge in edges if self._uses[memory.num_nodes + edge[0]]] for edges in self.around]
        self._known: list[np.ndarray | None] = [None] * len(problem.nodes)
        pairs = [frozenset((edge.source, edge.target)) for edge in problem.edges]
        repeated = Counter(pairs)
        self.alone = [repeated[pair] == 1 for pair in pairs]

    def local_costs(self, v: int) -> np.ndarray:
        """Cost of each choice of v plus its edges, the neighbours as they are."""
        known = self._known[v]
        if known is None:
            known = self.problem.nodes[v].costs
            for number, other, is_source in self.around[v]:
                table = self.problem.edges[number].costs
                known = known + (table[:, self.choice[other]] if is_source else table[self.choice[other]])
            self._known[v] = known
        return known

    def changes(self, v: int) -> list[tuple[int, int, np.ndarray]]:
        """Ranges of times and the bytes by which v's move to each of its choices changes them."""
        memory, old, found = self.memory, self.choice[v], []
        if self._uses[v]:
            found.append((*self._spans[v], memory.extra[v] - memory.extra[v][old]))
        for number, other, is_source in self._users[v]:
            user = memory.num_nodes + number
            row = memory.extra[user][:, self.choice[other]] if is_source else memory.extra[user][self.choice[other]]
            found.append((*self._spans[user], row - row[old]))
        return found

    def excess_after(self, v: int, pick: int) -> float:
        """Highest excess over the room, in bytes, within v's times if it moved (<= 0: it fits there)."""
        changes = [(low, high, float(deltas[pick])) for low, high, deltas in self.changes(v)]
        if not changes or max(delta for _, _, delta in changes) <= 0:
            return 0.0
        if len(changes) == 1:
            low, high, delta = changes[0]
            return float((self.load[low:high] - self.memory.room[low:high]).max()) + delta
        first, last = min(low for low, _, _ in changes), max(high for _, high, _ in changes)
        rises = np.zeros(last - first)
        for low, high, delta in changes:
            rises[low - first:high - first] += delta
        over = self.load[first:last] - self.memory.room[first:last] + rises
        return float(over[rises > 0].max(initial=0.0))

    def move(self, v: int, pick: int) -> None:
        for low, high, deltas in self.changes(v):
            self.load[low:high] += deltas[pick]
        self.choice[v] = pick
        for _, other, _ in self.around[v]:
            self._known[other] = None

    def excess(self) -> float:
        """Bytes over the limit at the worst time (<= 0: feasible)."""
        return float((self.load - self.memory.room).max(initial=0.0))


def repair(state: LocalState, deadline: float = FORBIDDEN) -> bool:
    """Lower the load at the worst time by the moves with the least cost per byte saved, until all times fit.

    Returns whether it does fit. O(nodes * choices) per time that is over, and O(log nodes) per move.
    """
    for _ in range(2 * len(state.load)):
        over = state.load - state.memory.room
        at = int(over.argmax())
        if over[at] <= 0:
            return True
        if not _relieve(state, at) or time.monotonic() >= deadline:
            break
    return state.excess() <= 0


def _owners(state: LocalState, at: int) -> list[int]:
    """Nodes whose choice changes the load at a time."""
    spans, num_nodes = state.memory.spans, state.memory.num_nodes
    live = np.flatnonzero((spans[:, 0] <= at) & (at < spans[:, 1]))
    owners = {int(user) for user in live if user < num_nodes}
    for user in live[live >= num_nodes]:
        edge = state.problem.edges[user - num_nodes]
        owners.update((edge.source, edge.target))
    return sorted(owners)


def _relief(state: LocalState, v: int, at: int) -> tuple[float, int]:
    """The least cost per byte saved at a time by moving v, and the choice (inf: none saves)."""
    saved = -sum(deltas for low, high, deltas in state.changes(v) if low <= at < high)
    if not isinstance(saved, np.ndarray) or saved.max() <= 0:
        return FORBIDDEN, 0
    costs = state.local_costs(v)
    now = costs[state.choice[v]]
    rise = np.maximum(costs - now, 0.0) if now < FORBIDDEN else costs
    over = state.load[at] - state.memory.room[at]
    useful = np.where(saved > 0, np.minimum(saved, over) if over > 0 else saved, 1.0)
    rates = np.where(saved > 0, rise, FORBIDDEN) / useful
    pick = int(rates.argmin())
    return float(rates[pick]), pick


def _relieve(state: LocalState, at: int) -> bool:
    """Moves in order of cost per byte, until this time fits; False when no move is left. Rates are kept current."""
    heap = [(rate, v, pick) for v in _owners(state, at) for rate, pick in [_relief(state, v, at)] if rate < FORBIDDEN]
    heapq.heapify(heap)
    worst = state.excess()
    moves = 0
    while state.load[at] > state.memory.room[at]:
        if not heap or moves > 20 * len(state.problem.nodes):
            return False
        rate, v, pick = heapq.heappop(heap)
        fresh = _relief(state, v, at)
        if fresh != (rate, pick):
            if fresh[0] < FORBIDDEN:
                heapq.heappush(heap, (*fresh[:1], v, fresh[1]))
        elif state.excess_after(v, pick) <= worst:
            state.move(v, pick)
            moves += 1
            again = _relief(state, v, at)
            if again[0] < FORBIDDEN:
                heapq.heappush(heap, (again[0], v, again[1]))
    return True


def descend(state: LocalState, deadline: float = FORBIDDEN, pairs: bool = True) -> None:
    """Moves that lower the cost and fit, first of single nodes, then of pairs, until none is left."""
    stale = dict.fromkeys(range(len(state.problem.nodes)))
    while stale:
        while stale and time.monotonic() < deadline:
            v = next(iter(stale))
            del stale[v]
            if _move_one(state, v):
                stale.update(dict.fromkeys(other for _, other, _ in state.around[v]))
        if time.monotonic() >= deadline or not pairs:
            return
        for number in range(len(state.problem.edges)):
            if _move_pair(state, number):
                edge = state.problem.edges[number]
                for v in (edge.source, edge.target):
                    stale.update(dict.fromkeys(other for _, other, _ in state.around[v]))
            if time.monotonic() >= deadline:
                return


def _move_one(state: LocalState, v: int) -> bool:
    costs = state.local_costs(v)
    now = costs[state.choice[v]]
    for pick in np.argsort(costs, kind="stable"):
        if not costs[pick] < now:
            return False
        if state.excess_after(v, int(pick)) <= 0:
            state.move(v, int(pick))
            return True
    return False


def _move_pair(state: LocalState, number: int) -> bool:
    """Try the cheapest few joint moves of an edge's two nodes."""
    edge = state.problem.edges[number]
    u, v = edge.source, edge.target
    at_u, at_v = state.choice[u], state.choice[v]
    if not state.alone[number] or edge.costs.size == 1 or edge.costs.size > PAIR_CELLS:
        return False
    if not edge.costs[at_u, at_v] < FORBIDDEN:
        return False
    now = state.local_costs(u)[at_u] + state.local_costs(v)[at_v] - edge.costs[at_u, at_v]
    left, right = edge.costs[:, at_v], edge.costs[at_u]
    if not (now < FORBIDDEN and left.max() < FORBIDDEN and right.max() < FORBIDDEN):
        return False
    total = (state.local_costs(u) - left)[:, None] + (state.local_costs(v) - right)[None] + edge.costs
    better = np.flatnonzero(total.ravel() < now - 1e-12 * abs(now))
    for cell in better[np.argsort(total.ravel()[better], kind="stable")][:PAIR_TRIES]:
        i, j = divmod(int(cell), edge.costs.shape[1])
        if i == at_u or j == at_v:
            continue
        state.move(u, i)
        if state.excess_after(v, j) <= 0:
            state.move(v, j)
            if state.excess() <= 0:
                return True
            state.move(v, at_v)
        state.move(u, at_u)
    return False
