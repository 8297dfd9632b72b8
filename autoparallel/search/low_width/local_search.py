"""Local search: repair makes a choice fit into memory; descent lowers its cost by changing one node, or both ends of an
edge.

Costs of a node's choices, given its neighbours, are kept by what is around it, so that equal blocks, and the plans that
are improved one after another, share them; memory is kept as the load at the times that matter, so that a move is
checked in the time of a range maximum.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from autoparallel import clock
from autoparallel.search.model.interned import firsts, paired
from autoparallel.search.model.memory_rows import Memory
from autoparallel.search.model.problem import FORBIDDEN, Problem

MANY_EDGES = 8
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
        count, source, target = len(problem.nodes), problem.ends[:, 0], problem.ends[:, 1]
        self.spans: list[tuple[int, int]] = [(low, high) for low, high in memory.spans.tolist()]
        self.uses: list[bool] = (memory.spans[:, 0] < memory.spans[:, 1]).tolist()
        owner = np.concatenate([source, target])
        order = np.argsort(owner, kind="stable")
        order = order[problem.sizes[owner[order]] > 1]  # the others never move
        self._edge = np.tile(np.arange(len(source)), 2)[order]
        self._other = np.concatenate([target, source])[order]
        self._is_source = np.repeat([True, False], len(source))[order]
        self._degree = np.bincount(owner[order], minlength=count)
        self._start = np.cumsum(self._degree) - self._degree
        self._unlike = np.flatnonzero(self._degree > MANY_EDGES)
        _, repeated, times = np.unique(np.sort(problem.ends, axis=1), axis=0, return_inverse=True, return_counts=True)
        self.alone = times[repeated.reshape(-1)] == 1
        arrays = paired(problem.costs.numbers, memory.extra.numbers)
        self._kind = self._equivalent(arrays[:count], paired(arrays[count + self._edge], self._is_source))
        self._around: dict[int, list[tuple[int, int, bool]]] = {}
        self._using: dict[int, list[tuple[int, int, np.ndarray, int]]] = {}
        self._costs: dict[tuple[int, ...], Costs] = {}
        self._pairs: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        self._kept = 0

    def around(self, v: int) -> list[tuple[int, int, bool]]:
        """Every edge of v, which has several choices: its number, its other end, and whether v is its source."""
        if v not in self._around:
            part = slice(self._start[v], self._start[v] + self._degree[v])
            self._around[v] = list(zip(self._edge[part].tolist(), self._other[part].tolist(),
                                       self._is_source[part].tolist(), strict=True))
        return self._around[v]

    def using(self, v: int) -> list[tuple[int, int, np.ndarray, int]]:
        """The memory that node v's choice decides: ranges of times, tables with a row per choice of v, and the node
        whose choices are the columns (-1: there is one column)."""
        if v not in self._using:
            extra, count = self.memory.extra, self.memory.num_nodes
            found = [(*self.spans[v], extra[v][:, None], -1)] if self.uses[v] else []
            for number, other, is_source in self.around(v):
                if self.uses[count + number]:
                    table = extra[count + number]
                    found.append((*self.spans[count + number], table if is_source else table.T, other))
            self._using[v] = found
        return self._using[v]

    def _equivalent(self, numbers: np.ndarray, beside: np.ndarray) -> np.ndarray:
        """Equal numbers for nodes that have equal ``numbers`` and, edge by edge, equal numbers ``beside`` them; nodes
        with more than `MANY_EDGES` are like no other."""
        found = paired(numbers, self._degree)
        for place in range(min(MANY_EDGES, int(self._degree.max(initial=0)))):
            who = np.flatnonzero(self._degree > place)
            found[who] = paired(found[who], beside[self._start[who] + place])
        found = paired(found, self._degree)
        found[self._unlike] = len(found) + np.arange(len(self._unlike))
        return found

    def surroundings(self, choice: np.ndarray) -> np.ndarray:
        """Equal numbers for nodes of one kind whose neighbours' choices are equal."""
        return self._equivalent(self._kind, choice[self._other])

    def live(self, numbers: np.ndarray, at: int) -> np.ndarray:
        """Nodes' numbers, further apart by which of their and their edges' memory is in use at a time."""
        low, high = self.memory.spans.T
        live = (low <= at) & (at < high)
        count = len(numbers)
        return self._equivalent(paired(numbers, live[:count]), live[count + self._edge])

    def costs(self, v: int, choice: Sequence[int]) -> Costs:
        around = self.around(v)
        key = (self._kind[v], *[choice[other] for _, other, _ in around])
        known = self._costs.get(key)
        if known is None:
            total = self.problem.nodes[v].costs
            for number, other, is_source in around:
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
        if not self.alone[number] or min(table.shape) == 1 or table.size > PAIR_CELLS:
            return []
        key = id(table), at, costs
        known = self._pairs.get(key)
        if known is None:
            known = self._pairs[key] = _joint_moves(table, at, costs[0].array, costs[1].array)
        return known


def _joint_moves(table: np.ndarray, at: tuple[int, int], costs_u: np.ndarray, costs_v: np.ndarray
                 ) -> list[tuple[int, int]]:
    """Moves of both ends of an edge: of the `PAIR_TRIES` cheapest cells that cost less than ``at``, those in another
    row and another column."""
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
    """A choice that changes by moves, with the cost of each further move. Invariant: ``load`` is `Memory.load` of
    ``choice``."""

    def __init__(self, neighbourhood: Neighbourhood, choice: Sequence[int]) -> None:
        self.near, self.choice = neighbourhood, list(choice)
        self.problem, self.memory = neighbourhood.problem, neighbourhood.memory
        self.load = self.memory.load(self.problem, choice)
        self._known: dict[int, Costs] = {}

    def costs(self, v: int) -> Costs:
        """Cost of each choice of v plus its edges, the neighbours as they are."""
        known = self._known.get(v)
        if known is None:
            clock.did("moves tried")
            known = self._known[v] = self.near.costs(v, self.choice)
        return known

    def improvable(self, deadline: float) -> list[int]:
        """Nodes with a choice that costs less, the neighbours as they are, and fits at the time with the least room; of
        those that the clock leaves time for."""
        picks, at, room = np.array(self.choice), *self._tightest()
        first, equivalent = firsts(self.near.live(paired(self.near.surroundings(picks), picks), at))
        better = [clock.now() < deadline and
                  any(self._rise(v, pick, at) <= room for pick in self.costs(v).cheaper_than(self.choice[v]))
                  for v in first]
        return np.flatnonzero(np.array(better, bool)[equivalent]).tolist()

    def _tightest(self) -> tuple[int, float]:
        """The time with the least room, and that room."""
        room = self.memory.room - self.load
        at = int(room.argmin()) if len(room) else -1
        return at, max(0.0, float(room[at])) if len(room) else FORBIDDEN

    def _rise(self, v: int, pick: int, at: int) -> float:
        """By how many bytes the load at a time rises if v moves."""
        clock.did("moves tried")
        return sum(delta for low, high, delta in self.rises(v, pick) if low <= at < high)

    def improvable_pairs(self, deadline: float) -> list[int]:
        """Edges whose two nodes can both change so that the plan costs less and still fits at its fullest time. After
        ``deadline`` no further edge is tried."""
        picks, (source, target), (at, room) = np.array(self.choice), self.problem.ends.T, self._tightest()
        equivalent = self.near.live(paired(self.near.surroundings(picks), picks), at)
        tables = paired(self.problem.costs.numbers[len(picks):], self.near.alone)
        first, edges = firsts(paired(paired(equivalent[source], equivalent[target]), tables))
        better = [clock.now() < deadline and
                  any(self._joint_rise(number, moves, at) <= room for moves in self.pairs(number))
                  for number in first]
        return np.flatnonzero(np.array(better, bool)[edges]).tolist()

    def _joint_rise(self, number: int, moves: tuple[int, int], at: int) -> float:
        """By how many bytes the load at a time rises if both of an edge's nodes move."""
        u, v = self.problem.ends[number].tolist()
        before, rise = self.choice[u], self._rise(u, moves[0], at)
        self.choice[u] = moves[0]
        rise += self._rise(v, moves[1], at)
        self.choice[u] = before
        return rise

    def pairs(self, number: int) -> list[tuple[int, int]]:
        """The cheapest few joint moves of an edge's two nodes."""
        edge = self.problem.edges[number]
        at = self.choice[edge.source], self.choice[edge.target]
        return self.near.pairs(number, at, (self.costs(edge.source), self.costs(edge.target)))

    def changes(self, v: int) -> list[tuple[int, int, np.ndarray]]:
        """Ranges of times and the bytes by which v's move to each of its choices changes them."""
        old, found = self.choice[v], []
        for low, high, table, other in self.near.using(v):
            row = table[:, self.choice[other]] if other >= 0 else table[:, 0]
            found.append((low, high, row - row[old]))
        return found

    def rises(self, v: int, pick: int) -> list[tuple[int, int, float]]:
        """The same of one choice."""
        old, found = self.choice[v], []
        for low, high, table, other in self.near.using(v):
            column = self.choice[other] if other >= 0 else 0
            found.append((low, high, float(table[pick, column]) - float(table[old, column])))
        return found

    def excess_after(self, v: int, pick: int) -> float:
        """Highest excess over the room, in bytes, within v's times if it moved (<= 0: it fits there)."""
        clock.did("moves tried")
        changes = self.rises(v, pick)
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
        for low, high, delta in self.rises(v, pick):
            self.load[low:high] += delta
        self.choice[v] = pick
        for _, other, _ in self.near.around(v):
            self._known.pop(other, None)

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
        if not _relieve(state, at, deadline) or clock.now() >= deadline:
            break
    return state.excess() <= 0


def _reliefs(state: LocalState, at: int) -> list[tuple[float, int, float]]:
    """Of every node: `_relief` where its choice changes the load at a time, else that nothing saves."""
    spans, num_nodes, picks = state.memory.spans, state.memory.num_nodes, np.array(state.choice)
    live = (spans[:, 0] <= at) & (at < spans[:, 1])
    owns = live[:num_nodes].copy()
    owns[state.problem.ends[live[num_nodes:]]] = True
    first, equivalent = firsts(state.near.live(paired(paired(state.near.surroundings(picks), picks), owns), at))
    known = [_relief(state, v, at) if owns[v] else (FORBIDDEN, 0, 0.0) for v in first]
    return [known[number] for number in equivalent.tolist()]


def _relief(state: LocalState, v: int, at: int) -> tuple[float, int, float]:
    """The least cost per byte saved at a time by moving v, the choice (inf: none saves), and the most bytes that any
    saves: where so many are over the room, no fewer make a difference."""
    clock.did("moves tried")
    saved = -sum(deltas for low, high, deltas in state.changes(v) if low <= at < high)
    if not isinstance(saved, np.ndarray) or saved.max() <= 0:
        return FORBIDDEN, 0, 0.0
    costs = state.costs(v).array
    now = costs[state.choice[v]]
    rise = np.maximum(costs - now, 0.0) if now < FORBIDDEN else costs
    over = state.load[at] - state.memory.room[at]
    useful = np.where(saved > 0, np.minimum(saved, over) if over > 0 else saved, 1.0)
    rates = np.where(saved > 0, rise, FORBIDDEN) / useful
    pick = int(rates.argmin())
    return float(rates[pick]), pick, float(saved.max())


def _relieve(state: LocalState, at: int, deadline: float) -> bool:
    """Moves in order of cost per byte, until this time fits; False when no move, or no time, is left. Rates are kept
    current."""
    known = _reliefs(state, at)
    heap = [(rate, v, pick) for v, (rate, pick, _) in enumerate(known) if rate < FORBIDDEN]
    heapq.heapify(heap)
    touched: set[int] = set()
    worst = state.excess()
    moves = 0
    while state.load[at] > state.memory.room[at]:
        if not heap or moves > 20 * len(state.problem.nodes) or clock.now() >= deadline:
            return False
        rate, v, pick = heapq.heappop(heap)
        if v in touched or known[v][2] > state.load[at] - state.memory.room[at]:
            known[v] = _relief(state, v, at)
            touched.discard(v)
        if known[v][:2] != (rate, pick):
            if known[v][0] < FORBIDDEN:
                heapq.heappush(heap, (known[v][0], v, known[v][1]))
        elif state.excess_after(v, pick) <= worst:
            state.move(v, pick)
            moves += 1
            touched.update([other for _, other, _ in state.near.around(v)])
            known[v] = _relief(state, v, at)
            if known[v][0] < FORBIDDEN:
                heapq.heappush(heap, (known[v][0], v, known[v][1]))
    return True


def descend(state: LocalState, deadline: float = FORBIDDEN, pairs: bool = True) -> None:
    """Moves that lower the cost and fit, first of single nodes, then of pairs, until none is left."""
    stale = dict.fromkeys(state.improvable(deadline))
    while True:
        while stale and clock.now() < deadline:
            v = next(iter(stale))
            del stale[v]
            if _move_one(state, v):
                stale.update(dict.fromkeys(other for _, other, _ in state.near.around(v)))
        if clock.now() >= deadline or not pairs:
            return
        for number in state.improvable_pairs(deadline):
            if _move_pair(state, number):
                for v in state.problem.ends[number].tolist():
                    stale.update(dict.fromkeys(other for _, other, _ in state.near.around(v)))
            if clock.now() >= deadline:
                return
        if not stale:
            return


def _move_one(state: LocalState, v: int) -> bool:
    for pick in state.costs(v).cheaper_than(state.choice[v]):
        if state.excess_after(v, pick) <= 0:
            state.move(v, pick)
            return True
    return False


def _move_pair(state: LocalState, number: int) -> bool:
    """Try the cheapest few joint moves of an edge's two nodes."""
    u, v = state.problem.ends[number].tolist()
    at_u, at_v = state.choice[u], state.choice[v]
    for i, j in state.pairs(number):
        state.move(u, i)
        if state.excess_after(v, j) <= 0:
            state.move(v, j)
            if state.excess() <= 0:
                return True
            state.move(v, at_v)
        state.move(u, at_u)
    return False
