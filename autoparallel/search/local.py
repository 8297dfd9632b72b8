"""Local search: make a choice fit into memory (repair), then lower its cost by moves of one node or of an edge's pair.

Costs of a node's choices, given its neighbours, are kept by what is around it, so that equal blocks, and the plans that
are improved one after another, share them; memory is kept as the load at the times that matter, so that a move is
checked in the time of a range maximum.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from autoparallel.search.memory import Memory
from autoparallel.search.problem import FORBIDDEN, Problem

PAIR_CELLS = 4096
PAIR_TRIES = 8
KEPT_CELLS = 20_000_000


class Costs:
    """Cost of each choice of a node with its edges, the neighbours as they are."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @cached_property
    def order(self) -> list[int]:
        return [int(pick) for pick in np.argsort(self.array, kind="stable")]

    @cached_property
    def rank(self) -> np.ndarray:
        """How many choices cost less than each."""
        return np.searchsorted(np.sort(self.array), self.array)

    def cheaper_than(self, pick: int) -> list[int]:
        """The choices that cost less, in order of their costs."""
        return self.order[:int(self.rank[pick])]


class Neighbourhood:
    """What all local searches of a problem share: who is beside whom, and costs and good pairs by what is around.

    Nodes with equal arrays on all sides are of one kind. `costs` is O(degree * choices) for surroundings not met yet.
    """

    def __init__(self, problem: Problem, memory: Memory) -> None:
        self.problem, self.memory = problem, memory
        self.around: list[list[tuple[int, int, bool]]] = [[] for _ in problem.nodes]
        for number, edge in enumerate(problem.edges):
            self.around[edge.source].append((number, edge.target, True))
            self.around[edge.target].append((number, edge.source, False))
        self.spans: list[tuple[int, int]] = [(low, high) for low, high in memory.spans.tolist()]
        self.uses = [low < high for low, high in self.spans]
        self.users = [[edge for edge in edges if self.uses[memory.num_nodes + edge[0]]] for edges in self.around]
        pairs = [frozenset((edge.source, edge.target)) for edge in problem.edges]
        repeated = Counter(pairs)
        self._alone = [repeated[pair] == 1 for pair in pairs]
        self._kinds = [(id(node.costs), *((id(problem.edges[number].costs), side) for number, _, side in edges))
                       for node, edges in zip(problem.nodes, self.around, strict=True)]
        numbers: dict[tuple[object, ...], int] = {}
        self._kind = [numbers.setdefault(kind, len(numbers)) for kind in self._kinds]
        self._costs: dict[tuple[int, ...], Costs] = {}
        self._pairs: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        self._kept = 0

    def costs(self, v: int, choice: Sequence[int]) -> Costs:
        key = (self._kind[v], *[choice[other] for _, other, _ in self.around[v]])
        known = self._costs.get(key)
        if known is None:
            total = self.problem.nodes[v].costs
            for number, other, is_source in self.around[v]:
                table = self.problem.edges[number].costs
                total = total + (table[:, choice[other]] if is_source else table[choice[other]])
            known = self._costs[key] = Costs(total)
            self._make_room(total.size)
        return known

    def _make_room(self, cells: int) -> None:
        self._kept += cells
        if self._kept > KEPT_CELLS:
            self._costs.clear()
            self._pairs.clear()
            self._kept = 0

    def pairs(self, number: int, at: tuple[int, int], costs: tuple[Costs, Costs]) -> list[tuple[int, int]]:
        """The cheapest few joint moves of an edge's two nodes, both of them moving; ``costs`` are theirs now."""
        table = self.problem.edges[number].costs
        if not self._alone[number] or table.size == 1 or table.size > PAIR_CELLS:
            return []
        key = id(table), at, costs
        known = self._pairs.get(key)
        if known is None:
            known = self._pairs[key] = _joint_moves(table, at, costs[0].array, costs[1].array)
        return known


def _joint_moves(table: np.ndarray, at: tuple[int, int], costs_u: np.ndarray, costs_v: np.ndarray
                 ) -> list[tuple[int, int]]:
    """Of the `PAIR_TRIES` cheapest cells that cost less than ``at``, those in another row and another column."""
    if not table[at] < FORBIDDEN:
        return []
    left, right = table[:, at[1]], table[at[0]]
    now = costs_u[at[0]] + costs_v[at[1]] - table[at]
    if not (now < FORBIDDEN and left.max() < FORBIDDEN and right.max() < FORBIDDEN):
        return []
    total = ((costs_u - left)[:, None] + (costs_v - right)[None] + table).ravel()
    better = np.flatnonzero(total < now - 1e-12 * abs(now))
    cells = better[np.argsort(total[better], kind="stable")][:PAIR_TRIES]
    moves = [divmod(int(cell), table.shape[1]) for cell in cells]
    return [(i, j) for i, j in moves if i != at[0] and j != at[1]]


class LocalState:
    """A choice that changes by moves, with what each further move would cost.

    Invariant: ``load`` is `Memory.load` of ``choice``.
    """

    def __init__(self, neighbourhood: Neighbourhood, choice: Sequence[int]) -> None:
        self.near, self.choice = neighbourhood, list(choice)
        self.problem, self.memory = neighbourhood.problem, neighbourhood.memory
        self.load = self.memory.load(self.problem, choice)
        self._known: list[Costs | None] = [None] * len(self.problem.nodes)

    def costs(self, v: int) -> Costs:
        """Cost of each choice of v plus its edges, the neighbours as they are."""
        known = self._known[v]
        if known is None:
            known = self._known[v] = self.near.costs(v, self.choice)
        return known

    def changes(self, v: int) -> list[tuple[int, int, np.ndarray]]:
        """Ranges of times and the bytes by which v's move to each of its choices changes them."""
        memory, old, found = self.memory, self.choice[v], []
        if self.near.uses[v]:
            found.append((*self.near.spans[v], memory.extra[v] - memory.extra[v][old]))
        for number, other, is_source in self.near.users[v]:
            user = memory.num_nodes + number
            row = memory.extra[user][:, self.choice[other]] if is_source else memory.extra[user][self.choice[other]]
            found.append((*self.near.spans[user], row - row[old]))
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
        for _, other, _ in self.near.around[v]:
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
    costs = state.costs(v).array
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
                stale.update(dict.fromkeys(other for _, other, _ in state.near.around[v]))
        if time.monotonic() >= deadline or not pairs:
            return
        for number in range(len(state.problem.edges)):
            if _move_pair(state, number):
                edge = state.problem.edges[number]
                for v in (edge.source, edge.target):
                    stale.update(dict.fromkeys(other for _, other, _ in state.near.around[v]))
            if time.monotonic() >= deadline:
                return


def _move_one(state: LocalState, v: int) -> bool:
    for pick in state.costs(v).cheaper_than(state.choice[v]):
        if state.excess_after(v, pick) <= 0:
            state.move(v, pick)
            return True
    return False


def _move_pair(state: LocalState, number: int) -> bool:
    """Try the cheapest few joint moves of an edge's two nodes."""
    edge = state.problem.edges[number]
    u, v = edge.source, edge.target
    at_u, at_v = state.choice[u], state.choice[v]
    for i, j in state.near.pairs(number, (at_u, at_v), (state.costs(u), state.costs(v))):
        state.move(u, i)
        if state.excess_after(v, j) <= 0:
            state.move(v, j)
            if state.excess() <= 0:
                return True
            state.move(v, at_v)
        state.move(u, at_u)
    return False
