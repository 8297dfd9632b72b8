"""The form that the searches for wide graphs work on: costs and tables, and memory as events.

    slot     one choice of one node, or one cell of an edge that uses memory; a plan takes some of them
    event    from this row on, the load is so many bytes higher if this slot is taken
    load = cumsum(sum of the taken slots' events) <= room, one entry per row (a time at which the limit may bind)

Loads count from the least that each owner of slots can use at a time; ``room`` is what that leaves of the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autoparallel.search.model.interned import Shared
from autoparallel.search.model.memory_rows import Memory, memory_of
from autoparallel.search.model.problem import FORBIDDEN, NOTHING, Problem

ROW_ROUNDS = 8
ROUNDING = 1e-11


@dataclass(frozen=True, eq=False)
class Events:
    """From row ``rows[i]`` on, ``values[i]`` bytes more if slot ``slots[i]`` is taken; ascending by slot, then row."""

    slots: np.ndarray
    rows: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, eq=False)
class Compact:
    """Nodes with costs, edges with tables, memory as events; see the module. Arrays must not be written to.

    ``firsts[o]`` is the first slot of owner o: the nodes, then the edges (an edge without memory has no slots).
    The objective is ``constant`` plus the costs and cells that a plan takes. ``room`` may be negative: nothing fits.
    ``names`` (ascending) are what rows were called at birth, when there were more of them.
    """

    costs: tuple[np.ndarray, ...]
    ends: tuple[tuple[int, int], ...]
    tables: tuple[np.ndarray, ...]
    firsts: np.ndarray
    events: Events
    room: np.ndarray
    names: np.ndarray
    constant: float = 0.0

    @cached_property
    def sizes(self) -> list[int]:
        return [len(costs) for costs in self.costs]

    @cached_property
    def flat_costs(self) -> np.ndarray:
        """Costs of all nodes, concatenated."""
        return np.concatenate([np.zeros(0), *self.costs])

    @cached_property
    def flat_tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """All distinct tables, concatenated; and for each edge the offset of its table, source and target."""
        tables = Shared.of(self.tables)
        firsts = np.cumsum([0, *[table.size for table in tables.distinct]])[tables.numbers]
        sources, targets = np.array(self.ends, np.int64).reshape(-1, 2).T
        return np.concatenate([np.zeros(0), *[table.ravel() for table in tables.distinct]]), firsts, sources, targets

    @cached_property
    def starts(self) -> np.ndarray:
        """Offsets of each slot's events."""
        return np.searchsorted(self.events.slots, np.arange(self.firsts[-1] + 1))

    @cached_property
    def around(self) -> list[list[tuple[int, int, np.ndarray]]]:
        """For every node: edge, other end, and the table with this node's choices as rows."""
        found: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in self.costs]
        turned = Shared.of(self.tables).map(lambda table: np.ascontiguousarray(table.T))
        for e, ((u, v), table, back) in enumerate(zip(self.ends, self.tables, turned, strict=True)):
            found[u].append((e, v, table))
            found[v].append((e, u, back))
        return found

    @cached_property
    def heavy_edges(self) -> list[int]:
        """Edges that use memory."""
        firsts = self.firsts[len(self.costs):]
        return np.flatnonzero(firsts[1:] > firsts[:-1]).tolist()

    @cached_property
    def uses(self) -> np.ndarray:
        """Whether a node's choice changes the load."""
        count, owners = len(self.costs), self.owners
        found = np.zeros(count, bool)
        found[owners[owners < count]] = True
        for e in self.heavy_edges:
            found[list(self.ends[e])] = True
        return found

    @cached_property
    def owners(self) -> np.ndarray:
        """The owner of each event's slot."""
        return owners_of(self.events, self.firsts)

    @cached_property
    def profiles(self) -> list[Profiles]:
        return list(profiles_of(self.events, self.firsts))

    @property
    def each_profile(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """For every owner with events (ascending): its rows of change, and its slots' usage from each of them on."""
        found = [(owner, rows, group.usage[low:low + count]) for group in self.profiles for owner, rows, low, count in
                 zip(group.owners.tolist(), group.rows, group.starts.tolist(), group.counts.tolist(), strict=True)]
        return sorted(found, key=lambda one: one[0])

    def slots(self, plan: Sequence[int]) -> np.ndarray:
        """The slots that a plan takes."""
        count = len(self.costs)
        cells = [self.firsts[count + e] + plan[u] * self.sizes[v] + plan[v]
                 for e in self.heavy_edges for u, v in [self.ends[e]]]
        return np.concatenate([self.firsts[:count] + np.asarray(plan, np.int64), np.array(cells, np.int64)])

    def load(self, plan: Sequence[int]) -> np.ndarray:
        """Bytes above the least, per row."""
        taken = np.zeros(self.firsts[-1])
        taken[self.slots(plan)] = 1.0
        events = self.events
        return np.cumsum(np.bincount(events.rows, events.values * taken[events.slots], len(self.room)))

    def fits(self, plan: Sequence[int]) -> bool:
        return bool((self.load(plan) <= self.room).all())

    def cost(self, plan: Sequence[int]) -> float:
        picks, (cells, firsts, sources, targets) = np.asarray(plan, np.int64), self.flat_tables
        nodes = self.flat_costs[self.firsts[:len(picks)] + picks]
        edges = cells[firsts + picks[sources] * np.array(self.sizes, np.int64)[targets] + picks[targets]]
        return self.constant + sum(nodes.tolist()) + sum(edges.tolist())

    def slot_prices(self, prices: np.ndarray) -> np.ndarray:
        """Seconds that each slot's memory costs, from seconds per byte at each row."""
        after = np.cumsum(prices[::-1])[::-1]
        return np.bincount(self.events.slots, self.events.values * after[self.events.rows], self.firsts[-1])

    def priced(self, prices: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Node costs and edge tables, each plus the price of its bytes (a Lagrange multiplier per memory limit). A
        table whose edge uses no memory is returned as it is."""
        extra, count = self.slot_prices(prices), len(self.costs)
        costs = [costs + extra[self.firsts[v]:self.firsts[v + 1]] for v, costs in enumerate(self.costs)]
        tables = list(self.tables)
        for e in self.heavy_edges:
            low, high = self.firsts[count + e], self.firsts[count + e + 1]
            tables[e] = tables[e] + extra[low:high].reshape(tables[e].shape)
        return costs, tables


def num_events(problem: Problem) -> int:
    """How many events the compact form has at most: what it takes in memory and time, where edges use memory."""
    if problem.limit == FORBIDDEN:
        return 0
    return 2 * int(problem.usages.each(lambda usage: 0 if usage is NOTHING else usage.size).sum())


def compact_of(problem: Problem) -> Compact:
    """The problem in compact form. Raises MemoryLimitError if the least usages alone exceed the limit."""
    memory = memory_of(problem)
    arrays, count = tuple(problem.costs), len(problem.nodes)
    heavy = memory.spans[memory.num_nodes:, 0] < memory.spans[memory.num_nodes:, 1]
    firsts = np.cumsum([0, *problem.sizes, *np.where(heavy, problem.sizes[problem.ends].prod(axis=1), 0)])
    events, room = _events_of(memory, firsts), memory.room.astype(float)
    if (events.values != np.rint(events.values)).any():  # sums may be rounded otherwise here than by `evaluate`
        room = np.minimum(room, np.maximum(room - ROUNDING * problem.limit, 0.0))  # the least fits in any case
    return Compact(arrays[:count], tuple(map(tuple, problem.ends.tolist())), arrays[count:], firsts, events, room,
                   np.arange(len(room)))


def _events_of(memory: Memory, firsts: np.ndarray) -> Events:
    users = np.flatnonzero(memory.spans[:, 0] < memory.spans[:, 1])
    counts = firsts[users + 1] - firsts[users]
    slots = np.arange(int(counts.sum())) + np.repeat(firsts[users] - (np.cumsum(counts) - counts), counts)
    values = np.concatenate([np.zeros(0), *[extra.ravel() for extra in memory.extra[users]]])
    spans = np.repeat(memory.spans[users], counts, axis=0)
    return merged(np.repeat(slots, 2), spans.ravel(), np.stack([values, -values], axis=1).ravel(), len(memory.room))


def owners_of(events: Events, firsts: np.ndarray) -> np.ndarray:
    """The owner of each event's slot."""
    return np.repeat(np.arange(len(firsts) - 1), np.diff(np.searchsorted(events.slots, firsts)))


def merged(slots: np.ndarray, rows: np.ndarray, values: np.ndarray, num_rows: int) -> Events:
    """One event per slot and row, none of 0 bytes, none after the last row."""
    kept = np.flatnonzero((rows < num_rows) & (values != 0))
    slots, rows, values = slots[kept], rows[kept], values[kept]
    key = slots * (num_rows + 1) + rows
    if not (key[1:] >= key[:-1]).all():
        order = np.argsort(key, kind="stable")
        slots, rows, values, key = slots[order], rows[order], values[order], key[order]
    new = np.append(True, key[1:] != key[:-1])[:len(key)]
    if not new.all():
        values = np.bincount(np.cumsum(new) - 1, values)
        heads = np.flatnonzero(new)[values != 0]
        slots, rows, values = slots[heads], rows[heads], values[values != 0]
    return Events(slots, rows, values)


class Profiles(NamedTuple):
    """Usage over time of all owners of slots that change at equally many rows.

    ``rows[i]`` are those of ``owners[i]``, whose slots are ``counts[i]`` lines of ``usage`` from ``starts[i]`` on;
    a line has a slot's usage from each row on. ``slots`` names the lines.
    """

    owners: np.ndarray
    rows: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    slots: np.ndarray
    usage: np.ndarray

    def spread(self, per_owner: np.ndarray) -> np.ndarray:
        """A line per slot, from one per owner."""
        return np.repeat(per_owner, self.counts, axis=0)


def profiles_of(events: Events, firsts: np.ndarray) -> Iterator[Profiles]:
    if not len(events.slots):
        return
    owners = owners_of(events, firsts)
    stride = int(events.rows.max()) + 1
    keys, at = np.unique(owners * stride + events.rows, return_inverse=True)
    begins = np.flatnonzero(np.diff(keys // stride, prepend=-1))
    users, widths = keys[begins] // stride, np.diff(begins, append=len(keys))
    which = np.searchsorted(users, owners)
    sizes = firsts[users + 1] - firsts[users]
    for width in np.unique(widths).tolist():
        these, inside = np.flatnonzero(widths == width), np.flatnonzero(widths[which] == width)
        counts = sizes[these]
        starts = np.cumsum(counts) - counts
        slots = np.arange(int(counts.sum())) + np.repeat(firsts[users[these]] - starts, counts)
        place = np.zeros(len(users), np.int64)
        place[these] = starts
        usage = np.zeros((len(slots), width))
        owner = which[inside]
        usage[place[owner] + events.slots[inside] - firsts[owners[inside]], at[inside] - begins[owner]] = (
            events.values[inside])
        rows = keys[begins[these][:, None] + np.arange(width)] % stride
        yield Profiles(users[these], rows, counts, starts, slots, np.cumsum(usage, axis=1, out=usage))


def above_least(events: Events, firsts: np.ndarray, room: np.ndarray) -> tuple[Events, np.ndarray, np.ndarray]:
    """Usage above each owner's least, the room that is left, and the rows where the limit can bind."""
    nothing = (events.slots[:0], events.rows[:0], events.values[:0])
    parts, borders = [nothing], [(nothing[1], nothing[2], nothing[2])]
    for group in profiles_of(events, firsts):
        low, high = (what.reduceat(group.usage, group.starts, axis=0) for what in (np.minimum, np.maximum))
        borders.append((group.rows.ravel(), _steps(low).ravel(), _steps(high).ravel()))
        change = _steps(group.usage - group.spread(low))
        lines, at = np.nonzero(change)
        parts.append((group.slots[lines], group.spread(group.rows)[lines, at], change[lines, at]))
    slots, rows, values = (np.concatenate(part) for part in zip(*parts, strict=True))
    at, low, high = (np.concatenate(part) for part in zip(*borders, strict=True))
    least, most = (np.cumsum(np.bincount(at, change, len(room)))[:len(room)] for change in (low, high))
    return merged(slots, rows, values, len(room)), room - least, most > room


def _steps(levels: np.ndarray) -> np.ndarray:
    """By how much each entry along the last axis exceeds the one before it."""
    found = levels.copy()
    found[..., 1:] -= levels[..., :-1]
    return found


def of_owners(events: Events, firsts: np.ndarray, kept: np.ndarray) -> tuple[Events, np.ndarray]:
    """The events of some owners of slots only, and the first slot of each of these."""
    sizes, owners = np.diff(firsts), owners_of(events, firsts)
    shifts = np.cumsum(np.where(kept, 0, sizes))[owners]
    inside = kept[owners]
    left = Events((events.slots - shifts)[inside], events.rows[inside], events.values[inside])
    return left, np.concatenate([[0], np.cumsum(sizes[kept])])


def fewer_rows(events: Events, firsts: np.ndarray, room: np.ndarray, kept: np.ndarray
               ) -> tuple[Events, np.ndarray, np.ndarray]:
    """Only rows that are kept, without those that the row before or after them implies; also which these are."""
    numbers = np.arange(len(room))
    for _ in range(ROW_ROUNDS):
        at = (np.cumsum(kept) - kept)[events.rows]
        room, numbers = room[kept], numbers[kept]
        events = merged(events.slots, at, events.values, len(room))
        kept = ~_implied(events, firsts, room)
        if kept.all():
            break
    return events, room, numbers


def moved_prices(prices: np.ndarray, old: Compact, new: Compact) -> np.ndarray:
    """Prices of the rows of ``old`` for ``new``, which has fewer: a row that is gone leaves its price to the next."""
    found = np.zeros(len(new.room))
    if len(found):
        np.add.at(found, np.minimum(np.searchsorted(new.names, old.names), len(found) - 1), prices)
    return found


def _implied(events: Events, firsts: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Rows whose load can exceed that of a neighbouring row by no more than the room does."""
    count = len(room)
    owners = owners_of(events, firsts)
    key, where = np.unique(owners * (count + 1) + events.rows, return_inverse=True)
    rise, fall = np.zeros(len(key)), np.zeros(len(key))
    np.maximum.at(rise, where, events.values)
    np.maximum.at(fall, where, -events.values)
    most_rise = np.bincount(key % (count + 1), rise, count + 1)
    most_fall = np.bincount(key % (count + 1), fall, count + 1)
    by_next, by_last = np.zeros(count, bool), np.zeros(count, bool)
    by_next[:-1] = most_fall[1:count] <= room[:-1] - room[1:]
    by_last[1:] = (most_rise[1:count] <= room[1:] - room[:-1]) & ~by_next[:-1]  # what implies a row stays
    return by_next | by_last


def part_of(compact: Compact, plan: Sequence[int], nodes: Sequence[int]) -> Compact:
    """Only these nodes (ascending), all others as in the plan."""
    place = {v: i for i, v in enumerate(nodes)}
    count = len(compact.costs)
    costs, owners, ends, tables = [], list(nodes), [], []
    fixed = 0.0
    for v in nodes:
        total = compact.costs[v]
        for e, w, table in compact.around[v]:
            if w not in place:
                total = total + table[:, plan[w]]
            elif v < w:
                ends.append((place[compact.ends[e][0]], place[compact.ends[e][1]]))
                tables.append(compact.tables[e])
                owners.append(count + e)
        costs.append(total)
        fixed += float(total[plan[v]])
    fixed += sum(float(table[plan[nodes[i]], plan[nodes[j]]]) for (i, j), table in zip(ends, tables, strict=True))
    sizes = [compact.firsts[o + 1] - compact.firsts[o] for o in owners]
    firsts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    old = [np.arange(compact.firsts[o], compact.firsts[o + 1]) for o in owners]
    new = [np.arange(firsts[-1])]
    for e in compact.heavy_edges:  # towards a node outside: cells that go with the node inside
        u, v = compact.ends[e]
        if (u in place) != (v in place):
            grid = np.arange(compact.firsts[count + e], compact.firsts[count + e + 1]).reshape(compact.tables[e].shape)
            inside = place[u] if u in place else place[v]
            old.append(grid[:, plan[v]] if u in place else grid[plan[u]])
            new.append(np.arange(firsts[inside], firsts[inside + 1]))
    part = Compact(tuple(costs), tuple(ends), tuple(tables), firsts,
                   moved(compact, np.concatenate(old), np.concatenate(new)), compact.room, compact.names,
                   compact.cost(plan) - fixed)
    room = compact.room - compact.load(plan) + part.load([plan[v] for v in nodes])
    return replace(part, room=room)


def moved(compact: Compact, old: np.ndarray, new: np.ndarray) -> Events:
    """The events of slots ``old``, as those of slots ``new``."""
    counts = compact.starts[old + 1] - compact.starts[old]
    shift = np.repeat(compact.starts[old] - np.append(0, np.cumsum(counts)[:-1]), counts)
    at = np.arange(len(shift)) + shift
    return merged(np.repeat(new, counts), compact.events.rows[at], compact.events.values[at], len(compact.room))
