"""Exact minimum of node costs plus edge tables, by eliminating one node after another in a low-width order.

Eliminating v adds up every table that mentions v and takes the minimum over v: what is left is one table over v's
neighbours. The work of a step is the product of v's and its neighbours' numbers of choices. Steps are named by their
inputs, so that equal blocks of a model (which share their arrays) are computed once: work grows with the number of
*distinct* steps, not with depth. Memory limits do not appear here; `lagrange` prices them into the costs.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import heapq
import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoparallel import clock
from autoparallel.search.low_width.repeated_subgraphs import Subgraphs, repeated_subgraphs
from autoparallel.search.model.interned import Shared
from autoparallel.search.model.problem import FORBIDDEN, Problem

CHUNK_CELLS = 1_000_000
KEPT_CELLS = 10_000_000
HOPELESS_CELLS = 1e10
WHOLE_NODES = 5_000  # beyond, a second order takes seconds
SCRATCH_CELLS = 5_000  # sums from so many cells on are written where others were before
_SCRATCH = threading.local()


@dataclass(frozen=True)
class Order:
    """Which node is eliminated when, and what remains around it at that moment.

    ``neighbours[i]`` (ascending) are those of ``nodes[i]``; ``max_cells`` is the largest table that is kept.
    """

    nodes: tuple[int, ...]
    neighbours: tuple[tuple[int, ...], ...]
    max_cells: float


def elimination_order(sizes: Sequence[int], pairs: Sequence[tuple[int, int]], by_fill: bool = False,
                      inside: int | None = None) -> Order:
    """Greedy order: next is the node whose step is the smallest (or adds the fewest new pairs).

    Of the first ``inside`` nodes (default: all); the others stay. Ties by how often what is around a node was
    eliminated already, then by index: a chain of equal blocks is halved again and again, in few distinct steps.

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

    inside = len(sizes) if inside is None else inside
    current = [weight(v) for v in range(inside)]
    turns = [0] * len(sizes)
    heap = [(*current[v], 0, v) for v in range(inside)]
    heapq.heapify(heap)
    done = [False] * len(sizes)
    nodes, neighbours, max_cells = [], [], 1.0
    while heap:
        *seen, turn, v = heapq.heappop(heap)
        if done[v] or tuple(seen) != current[v]:
            continue
        if turn < turns[v]:
            heapq.heappush(heap, (*current[v], turns[v], v))
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
            turns[u] = max(turns[u], turns[v] + 1)
        touched = set(near).union(*(around[u] for u in near)) if by_fill else near
        for u in touched:
            if u >= inside:
                continue
            fresh = weight(u)
            if fresh != current[u]:
                current[u] = fresh
                heapq.heappush(heap, (*fresh, turns[u], u))
    return Order(tuple(nodes), tuple(neighbours), max_cells)


Places = tuple[int, ...]
Factor = tuple[Places, int]  # which nodes of a scope a table is about, by position, and the table's name


class Slot(NamedTuple):
    """What a step is, whatever the costs: elimination of ``node``, by adding up ``inputs`` and minimising over it.

    An input is a number: the sweep's factors first, then the results of earlier slots, which are tables over their
    ``near``; ``layout`` says of each which of (node, near) it is about. ``shape`` is that of the sum.
    """

    node: int
    near: tuple[int, ...]
    inputs: tuple[int, ...]
    layout: tuple[Places, ...]
    shape: tuple[int, ...]


class Step(NamedTuple):
    """A slot whose inputs are called ``inputs`` and whose result is called ``name``."""

    slot: Slot
    inputs: tuple[int, ...]
    name: int

    @property
    def factors(self) -> list[Factor]:
        return list(zip(self.slot.layout, self.inputs, strict=True))


class TimeIsUpError(Exception):
    """An elimination was not done by the deadline that it was given."""


class Tables:
    """All arrays by number, and the constant that was subtracted from each result so that its minimum is 0. Equal
    inputs have equal numbers, so that an elimination with changed costs reuses the steps that did not change.
    ``cells``: the total size of all arrays kept."""

    def __init__(self, deadline: float = FORBIDDEN) -> None:
        self.deadline = deadline
        self._names: dict[object, int] = {}
        self._seen: dict[int, tuple[np.ndarray, int]] = {}
        self._arrays: dict[int, np.ndarray] = {}
        self.lowered: dict[int, float] = {}
        self.steps: dict[tuple[int, bytes], list[Step]] = {}
        self.picks: dict[tuple[int, ...], int] = {}
        self.cells = 0

    def __getitem__(self, name: int) -> np.ndarray:
        return self._arrays[name]

    def name(self, key: object) -> int:
        return self._names.setdefault(key, len(self._names))

    def names(self, arrays: Shared) -> np.ndarray:
        """Take in these arrays; the name of each owner's."""
        return np.array([self._name_of(array) for array in arrays.distinct], np.int64)[arrays.numbers]

    def _name_of(self, array: np.ndarray) -> int:
        """By identity where the array was seen before (it is kept alive), else by content."""
        known = self._seen.get(id(array))
        if known is None:
            row = array.reshape(-1) if array.ndim == 2 and min(array.shape) == 1 else array
            clock.did("tables named")
            content = hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=16).digest()
            known = self._seen[id(array)] = array, self.name((row.shape, content))
            self._arrays[known[1]] = row
            self.cells += row.size
        return known[1]

    def look_at_clock(self) -> None:
        """Raises TimeIsUpError after the deadline; asked about every `CHUNK_CELLS` cells."""
        if clock.now() >= self.deadline:
            raise TimeIsUpError

    def work_out(self, steps: Sequence[Step]) -> float:
        """Fill in the result of every step, each less its minimum; returns the sum of these minima."""
        for step in steps:
            if step.name not in self.lowered:
                self.look_at_clock()
                clock.did("tables made")
                clock.did("cells added", math.prod(step.slot.shape))
                result = self._minimise(step)
                lowest = float(result.min())
                self.lowered[step.name] = lowest
                self._arrays[step.name] = result - lowest if 0 < lowest < FORBIDDEN else result
                self.cells += result.size
        return math.fsum([self.lowered[step.name] for step in steps])

    def without(self, total: np.ndarray, part: int) -> int:
        """The name of a sum of tables without one of its terms."""
        name = self.name(("without", part, total.shape, self._name_of(total)))
        if name not in self._arrays:
            self._arrays[name] = _less(total, self[part])
            self.cells += total.size
        return name

    def project(self, factors: list[Factor], shape: tuple[int, ...], onto: Sequence[Places]) -> list[np.ndarray]:
        """Minima of the factors' sum over all of a scope but each of ``onto``, less the least.

        All of ``onto`` mention the first of the scope, along which the sum is worked out in pieces.
        """
        rest = [tuple(axis for axis in range(len(shape)) if axis not in part) for part in onto]
        parts = self._parts(factors, len(shape))
        clock.did("tables made", len(onto))
        clock.did("cells added", math.prod(shape) * len(onto))
        rows = max(1, int(CHUNK_CELLS * shape[0] / math.prod(shape)))
        pieces: list[list[np.ndarray]] = [[] for _ in onto]
        for low in range(0, shape[0], rows):
            self.look_at_clock()
            total = functools.reduce(np.add, [part if part.shape[0] == 1 else part[low:low + rows] for part in parts])
            full = np.broadcast_to(total, (min(rows, shape[0] - low), *shape[1:]))
            for found, axes in zip(pieces, rest, strict=True):
                found.append(full.min(axis=axes))
        least = [np.concatenate(found).transpose(np.argsort(np.argsort(part)))
                 for part, found in zip(onto, pieces, strict=True)]
        return [array - min(float(array.min()), 1e300) for array in least]

    def _parts(self, factors: Sequence[Factor], rank: int) -> list[np.ndarray]:
        """The factors' tables laid out over a scope of so many nodes (size 1 along absent ones)."""
        found = []
        for places, name in factors:
            order, index = _spread(places, rank)
            found.append(self._arrays[name].transpose(order)[index])
        return found

    def _minimise(self, step: Step) -> np.ndarray:
        """The table over the step's ``near``, computed in pieces that stay in the cache."""
        shape, cells = step.slot.shape, math.prod(step.slot.shape)
        parts = self._parts(step.factors, len(shape))
        if cells <= CHUNK_CELLS or len(shape) == 1:
            total = functools.reduce(np.add, parts) if cells < SCRATCH_CELLS else _added(parts)
            least = np.minimum.reduce(total, axis=0)
            return least if least.shape == shape[1:] else np.broadcast_to(least, shape[1:])
        rows = max(1, int(CHUNK_CELLS * shape[1] / cells))
        pieces = []
        for low in range(0, shape[1], rows):
            self.look_at_clock()
            some = [part if part.shape[1] == 1 else part[:, low:low + rows] for part in parts]
            pieces.append(np.minimum.reduce(_added(some), axis=0))
        full = shape[1:]
        return np.concatenate([np.broadcast_to(piece, (min(rows, full[0] - low), *full[1:])) for piece, low
                               in zip(pieces, range(0, full[0], rows), strict=True)])


def _added(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sum of tables, in memory that the next such sum of this thread overwrites: new memory for each takes as long
    as adding up. More than `CHUNK_CELLS` are not kept for it."""
    *some, last = parts
    if not some:
        return last
    first = functools.reduce(np.add, some)
    shape = tuple(map(max, first.shape, last.shape))
    if (cells := math.prod(shape)) > CHUNK_CELLS:
        return np.add(first, last)
    room: np.ndarray | None = getattr(_SCRATCH, "room", None)
    if room is None:
        room = _SCRATCH.room = np.empty(CHUNK_CELLS)
    return np.add(first, last, out=room[:cells].reshape(shape))


@functools.lru_cache(maxsize=4096)
def _spread(places: Places, rank: int) -> tuple[Places, tuple[slice | None, ...]]:
    """How to lay out a table over these places among so many: the order of its axes, then where new ones go."""
    order = tuple(sorted(range(len(places)), key=places.__getitem__))
    return order, tuple(slice(None) if axis in places else None for axis in range(rank))


class Sweep:
    """The rule by which the first ``num_inside`` of some nodes (default: all) are eliminated, whatever the costs.

    ``scopes`` are the nodes of each table that is given. The result over the nodes that stay is the last step's.
    """

    def __init__(self, sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], num_inside: int | None = None) -> None:
        self.sizes, self.scopes = sizes, scopes
        self.num_inside = len(sizes) if num_inside is None else num_inside
        pairs = [pair for scope in scopes for pair in itertools.combinations(scope, 2)]
        self.order = elimination_order(sizes, pairs, inside=self.num_inside)
        if CHUNK_CELLS < self.order.max_cells < FORBIDDEN:
            other = elimination_order(sizes, pairs, by_fill=True, inside=self.num_inside)
            self.order = min(self.order, other, key=lambda order: order.max_cells)
        self._rank = [len(sizes)] * len(sizes)
        for rank, v in enumerate(self.order.nodes):
            self._rank[v] = rank
        self._slots = self._laid_out() if self.order.nodes else []

    def _first(self, scope: Sequence[int]) -> int | None:
        """The node of these that is eliminated first; None if all stay."""
        v = min(scope, key=self._rank.__getitem__, default=None)
        return None if v is None or self._rank[v] == len(self.sizes) else v

    def _laid_out(self) -> list[Slot]:
        """A slot per node, in order. O(n w)."""
        waiting: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in self.sizes]
        for number, scope in enumerate(self.scopes):
            if (v := self._first(scope)) is not None:
                waiting[v].append((number, scope))
        slots: list[Slot] = []
        for v, near in zip(self.order.nodes, self.order.neighbours, strict=True):
            place = {u: axis for axis, u in enumerate((v, *near))}
            small_first = sorted(waiting[v], key=lambda given: math.prod(self.sizes[u] for u in given[1]))
            layout = tuple(tuple(place[u] for u in scope) for _, scope in small_first)
            shape = tuple(self.sizes[u] for u in place)
            if (after := self._first(near)) is not None:
                waiting[after].append((len(self.scopes) + len(slots), near))
            slots.append(Slot(v, near, tuple(number for number, _ in small_first), layout, shape))
        return slots

    def steps(self, called: Sequence[int], tables: Tables) -> list[Step]:
        """All elimination steps, each with the tables that it adds, for the factors with these numbers."""
        called, steps = list(called), []
        for slot in self._slots:
            inputs = tuple([called[number] for number in slot.inputs])
            steps.append(Step(slot, inputs, tables.name((slot.layout, inputs))))
            called.append(steps[-1].name)
        return steps

    def cells(self, steps: Sequence[Step]) -> dict[int, float]:
        """Cells that each distinct step touches."""
        return {step.name: math.prod(map(float, step.slot.shape)) for step in steps}

    def choose(self, steps: Sequence[Step], tables: Tables, choice: list[int]) -> None:
        """Walk back: the best choice of each node given those of the nodes eliminated after it, or that stay."""
        known = tables.picks
        for step in reversed(steps):
            v, near = step.slot.node, step.slot.near
            around = [choice[u] for u in near]
            key = (step.name, *around)
            if key not in known:
                picks: list[int | slice] = [slice(None), *around]
                parts = [tables[name][tuple([picks[place] for place in places])] for places, name in step.factors]
                known[key] = int(functools.reduce(np.add, parts).argmin())
            choice[v] = known[key]

    def reduced_costs(self, steps: Sequence[Step], tables: Tables, wanted: Sequence[int] = (), above: int | None = None
                ) -> tuple[list[np.ndarray], dict[int, int]]:
        """Of every node inside; and for each ``wanted`` table the name of all others' least sum over its scope.

        The way down: what is added up at each step is once more minimised, for the step's node and for each table that
        was a result. ``above``: the sum of what is outside, over the nodes that stay.
        """
        reduced_costs: list[np.ndarray] = [np.zeros(0)] * self.num_inside
        results, first = set(wanted), len(self.scopes)
        over = {} if above is None else {first + len(steps) - 1: above}
        known: dict[tuple[object, ...], list[np.ndarray]] = {}
        for number in range(len(steps) - 1, -1, -1):
            step = steps[number]
            slot, factors = step.slot, step.factors
            given = [(i, places, name) for i, (places, name) in zip(slot.inputs, factors, strict=True)
                     if i >= first or i in results]
            if first + number in over:
                factors.append((tuple(range(1, len(slot.shape))), over[first + number]))
            onto = [(0,), *(places for _, places, _ in given)]
            key = (tuple(factors), tuple(onto))
            if key not in known:
                known[key] = tables.project(factors, slot.shape, onto)
            reduced_costs[slot.node], *totals = known[key]
            for (i, _, name), total in zip(given, totals, strict=True):
                over[i] = tables.without(total, name)
        return reduced_costs, over


class Layout(NamedTuple):
    """The rules of an elimination: one for each form of ``subgraphs``, and ``top`` for the ``nodes`` that join them, of
    the tables with the numbers ``inputs``, the first ``given``, and of the results of subgraphs."""

    subgraphs: list[Subgraphs]
    rules: list[Sweep]
    nodes: np.ndarray
    inputs: np.ndarray
    given: int
    top: Sweep
    max_cells: float


#: By numbers of choices and edges: problems that differ in costs alone have the same.
_RECENT: dict[tuple[bytes, bytes], Layout] = {}
MOST_RECENT = 64
#: Held while `_RECENT` is changed: threads that plan at the same time share it.
_CHANGING = threading.Lock()


class Eliminator:
    """Solves problems of one structure (same nodes and edges) again and again with changed costs.

    Repeated subgraphs are eliminated first, once for all of equal costs; then the nodes between them. Check
    ``max_cells``, the cells of the largest table kept, before solving (`affordable` does): inf means that no
    elimination order was found. After the deadline (`until`) `solve` and `reduced_costs` raise TimeIsUpError.
    ``solved_s``: seconds of the last `solve`.
    """

    def __init__(self, sizes: Sequence[int] | np.ndarray, pairs: Sequence[tuple[int, int]] | np.ndarray) -> None:
        self.sizes, self.solved_s = np.asarray(sizes, np.int64), 0.0
        self._tables = Tables()
        clock.did("nodes laid out", len(self.sizes) + len(pairs))    # also those of before
        ends = np.asarray(pairs, np.int64).reshape(-1, 2)
        key = self.sizes.tobytes(), ends.tobytes()
        if (known := _RECENT.get(key)) is None:
            known = self._laid_out(ends)
            with _CHANGING:
                _RECENT[key] = known
                while len(_RECENT) > MOST_RECENT:
                    del _RECENT[next(iter(_RECENT))]
        self._subgraphs, self._rules, self._nodes, self._inputs, self._given, self._top, self.max_cells = known

    def _laid_out(self, ends: np.ndarray) -> Layout:
        """The rules, of repeated subgraphs or of all nodes as one graph, if that is narrower."""
        found = self._lay_out(ends, repeated_subgraphs(self.sizes, ends))
        if found.max_cells > CHUNK_CELLS and found.subgraphs and len(self.sizes) <= WHOLE_NODES:
            found = min(found, self._lay_out(ends, []), key=lambda one: one.max_cells)
        return found

    def _lay_out(self, ends: np.ndarray, subgraphs: list[Subgraphs]) -> Layout:
        """The rules: one per form of subgraphs, and one for what joins them."""
        count = len(self.sizes)
        rules = [Sweep(self.sizes[np.concatenate([form.nodes[0], form.border[0]])].tolist(), form.scopes,
                       form.nodes.shape[1]) for form in subgraphs]
        outside, left = np.ones(count, bool), np.ones(count + len(ends), bool)
        for form in subgraphs:
            outside[form.nodes], left[form.inputs] = False, False
        nodes, inputs = np.flatnonzero(outside), np.flatnonzero(left)
        place = dict(zip(nodes.tolist(), range(len(nodes)), strict=True))
        scopes: list[tuple[int, ...]] = [(place[v],) for v in nodes.tolist()]
        for u, v in ends[inputs[len(nodes):] - count].tolist():
            open_ends = [w for w in (u, v) if self.sizes[w] > 1] or [v]  # a node with one choice joins nothing
            scopes.append(tuple(place[w] for w in open_ends))
        given = len(scopes)
        scopes += [tuple(place[v] for v in border) for form in subgraphs for border in form.border.tolist()]
        top = Sweep(self.sizes[nodes].tolist(), scopes)
        return Layout(subgraphs, rules, nodes, inputs, given, top,
                      max(rule.order.max_cells for rule in (top, *rules)))

    @classmethod
    def of(cls, problem: Problem) -> Eliminator:
        """Of a problem; one with other costs that was made of it has the same order (`Problem.with_edges`)."""
        sizes = problem.sizes.tobytes()
        known: Eliminator = problem.orders.get(sizes) or cls(problem.sizes, problem.ends)
        if not problem.orders:  # only the first: of those with fewer choices there are many
            problem.orders[sizes] = known
        made = copy.copy(known)
        made._tables, made.solved_s = Tables(), 0.0
        return made

    @classmethod
    def none(cls) -> Eliminator:
        """No order is looked for."""
        found = cls((), ())
        found.max_cells = FORBIDDEN
        return found

    @property
    def deadline(self) -> float:
        return self._tables.deadline

    def until(self, deadline: float) -> Eliminator:
        """This one, with a deadline."""
        self._tables.deadline = deadline
        return self

    def work(self, arrays: Shared) -> float:
        """Cells that `solve` would touch: the sum over distinct steps."""
        run = _Run(self, arrays)
        cells = self._top.cells(run.top)
        for rule, kinds in zip(self._rules, run.kinds, strict=True):
            for kind in kinds:
                cells.update(rule.cells(kind))
        return sum(cells.values())

    def solve(self, arrays: Shared) -> tuple[float, tuple[int, ...]]:
        """The minimum of the sum of all arrays' entries and a choice that attains it (inf: none is allowed).

        An array of costs per node, then a table per edge of the problem given at birth. Time O(`work`).
        """
        start = clock.now()
        run = _Run(self, arrays)
        found = run.value(), run.choice()
        self._forget()
        self.solved_s = clock.now() - start
        return found

    def reduced_costs(self, arrays: Shared) -> list[np.ndarray]:
        """For every choice of every node: by how much the best plan with it exceeds the best plan (inf: there is none).

        One pass up (as `solve`) and one down. Raises nothing; all 0 when no plan is allowed.
        """
        run = _Run(self, arrays)
        if run.value() == FORBIDDEN:
            return [np.zeros(size) for size in self.sizes]
        found = run.reduced_costs()
        self._forget()
        return found

    def _forget(self) -> None:
        """Let go of tables where they are many."""
        if self._tables.cells > KEPT_CELLS:
            self._tables = Tables(self._tables.deadline)


class _Run:
    """One elimination: the steps of every kind of subgraph (a form with certain costs), and the kind of each."""

    def __init__(self, eliminator: Eliminator, arrays: Shared) -> None:
        self.of, self.tables = eliminator, eliminator._tables
        self.kinds: list[list[list[Step]]] = []
        self.kind_of: list[np.ndarray] = []
        given = self.tables.names(arrays)
        called = given[eliminator._inputs].tolist()
        for number, (form, rule) in enumerate(zip(eliminator._subgraphs, eliminator._rules, strict=True)):
            rows = given[form.inputs]
            which, first = _equal_rows(rows)
            self.kinds.append([self._steps(number, rule, rows[row]) for row in first])
            self.kind_of.append(which)
            ends = np.array([kind[-1].name for kind in self.kinds[-1]])
            called += ends[which].tolist()
        self.top = eliminator._top.steps(called, self.tables)

    def _steps(self, form: int, rule: Sweep, called: np.ndarray) -> list[Step]:
        key, known = (form, called.tobytes()), self.tables.steps
        if key not in known:
            known[key] = rule.steps(called.tolist(), self.tables)
        return known[key]

    def value(self) -> float:
        """Fill in all tables; the least sum."""
        sums = []
        for kinds, which in zip(self.kinds, self.kind_of, strict=True):
            each = np.array([self.tables.work_out(kind) for kind in kinds])
            sums += each[which].tolist()
        return math.fsum([*sums, self.tables.work_out(self.top)])

    def choice(self) -> tuple[int, ...]:
        of = self.of
        choice = np.zeros(len(of.sizes), np.int64)
        outside = [0] * len(of._nodes)
        of._top.choose(self.top, self.tables, outside)
        choice[of._nodes] = outside
        for form, rule, kinds, which in zip(of._subgraphs, of._rules, self.kinds, self.kind_of, strict=True):
            around = np.concatenate([which[:, None], choice[form.border]], axis=1)
            equivalent, first = _equal_rows(around)
            inside = np.zeros((len(first), rule.num_inside), np.int64)
            for row, picks in zip(inside, around[first].tolist(), strict=True):
                found = [0] * rule.num_inside + picks[1:]
                rule.choose(kinds[picks[0]], self.tables, found)
                row[:] = found[:rule.num_inside]
            choice[form.nodes] = inside[equivalent]
        return tuple(choice.tolist())

    def reduced_costs(self) -> list[np.ndarray]:
        of = self.of
        found: list[np.ndarray] = [np.zeros(0)] * len(of.sizes)
        results = range(of._given, len(of._top.scopes))
        outside, above = of._top.reduced_costs(self.top, self.tables, results)
        for v, reduced_cost in zip(of._nodes.tolist(), outside, strict=True):
            found[v] = reduced_cost
        number = of._given
        for form, rule, kinds, which in zip(of._subgraphs, of._rules, self.kinds, self.kind_of, strict=True):
            known: dict[tuple[int, int | None], list[np.ndarray]] = {}
            for kind, nodes in zip(which.tolist(), form.nodes.tolist(), strict=True):
                key = kind, above.get(number)
                if key not in known:
                    known[key], _ = rule.reduced_costs(kinds[kind], self.tables, (), key[1])
                for v, reduced_cost in zip(nodes, known[key], strict=True):
                    found[v] = reduced_cost
                number += 1
        return found


def _equal_rows(rows: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """For every row which distinct one it is, and where each of these is first."""
    seen: dict[bytes, int] = {}
    which = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in rows], np.int64)
    return which, np.unique(which, return_index=True)[1].tolist()


def _less(total: np.ndarray, part: np.ndarray) -> np.ndarray:
    """A sum without one of its terms; inf where that is inf."""
    return np.subtract(total, part, out=np.full(total.shape, FORBIDDEN), where=part < FORBIDDEN)
