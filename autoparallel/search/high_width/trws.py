"""Bounds and plans for graphs too wide for elimination: sequential tree-reweighted message passing (TRW-S) with memory
prices.

Messages move costs between nodes and edges so that the sum of their minima grows: that sum is a lower bound, and taking
nodes in order, each given those before it and the messages of those after it, gives a plan (Kolmogorov, "Convergent
tree-reweighted message passing", 2006). No table is larger than an edge's; a sweep is O(cells).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from autoparallel import clock
from autoparallel.search.high_width.event_form import Compact
from autoparallel.search.model.interned import Shared
from autoparallel.search.model.problem import FORBIDDEN

STEP = 0.3
SHRINK = 0.7
PATIENCE = 10
MOMENTUM = 0.8
SHOW_EVERY = 20
SETTLE = 5
SWEEPS = 2
SLOW = 1e-4
SMALLEST_STEP = 1e-3
AS_ROW, AS_COLUMN = (..., None, slice(None)), (..., slice(None), None)
LONG = 2  # a table with so many times more rows than columns is read column by column
ROUNDING = 1e-12


class _Way(NamedTuple):
    """From a node along an edge: the node there, the line there that messages fill, the table that they are taken from,
    along which axis the least is looked for (the table lies so that the other one is not short), and how a message is
    laid against it."""

    end: int
    line: int
    table: np.ndarray
    axis: int
    laid: tuple[Any, ...]


class _Turn(NamedTuple):
    """What a node does in a sweep: its number, all its lines, those towards the nodes ahead; for each of these the line
    laid against a table, that table, the axis, and the line that is filled; how much of its belief each gets and how
    much stays (0: nothing)."""

    node: int
    view: np.ndarray
    lines: np.ndarray
    ahead: list[tuple[np.ndarray, np.ndarray, int, np.ndarray]]
    share: float
    kept: float


class Messenger:
    """Messages into every node, one line per edge; kept from sweep to sweep, so that prices can change in small steps.

    Nothing costs more than ``limit`` here, which is more than any allowed plan costs, so bounds stay valid. With
    `times`, several problems that differ in costs of nodes are swept at once: arrays have an axis more, the first.
    """

    def __init__(self, compact: Compact, limit: float) -> None:
        self.compact, self.limit = compact, limit
        self._around = [sorted(around, key=itemgetter(1)) for around in compact.around]
        self._lines = [{e: i for i, (e, _, _) in enumerate(around)} for around in self._around]
        tables = iter(Shared.of([table for around in self._around for _, _, table in around]).map(self._limited))
        self._tables = [list(itertools.islice(tables, len(around))) for around in self._around]
        self._ways = [[self._way(v, line, w, self._lines[w][e]) for line, (e, w, _) in enumerate(around)]
                      for v, around in enumerate(self._around)]
        self._alone = [v for v, around in enumerate(self._around) if not around]
        self._lay_out(np.zeros(sum([len(around) * size for around, size in
                                    zip(self._around, compact.sizes, strict=True)])))

    def _limited(self, table: np.ndarray) -> np.ndarray:
        return np.minimum(table, self.limit)

    def _way(self, v: int, line: int, w: int, back: int) -> _Way:
        table = self._tables[v][line]
        if len(table) >= LONG * table.shape[1]:
            return _Way(w, back, self._tables[w][back], -1, AS_ROW)
        return _Way(w, back, table, -2, AS_COLUMN)

    def _lay_out(self, into: np.ndarray) -> None:
        """Take these messages, and look up what each sweep needs of them."""
        sizes = self.compact.sizes
        ends = np.cumsum([0, *[len(ways) * size for ways, size in zip(self._ways, sizes, strict=True)]]).tolist()
        self.into = into
        self.views = [into[..., low:high].reshape(*into.shape[:-1], -1, size) for low, high, size in
                      zip(ends[:-1], ends[1:], sizes, strict=True)]
        lines = [list(view.swapaxes(0, -2)) for view in self.views]
        self._forward: list[_Turn] = []
        self._backward: list[_Turn] = []
        for v, (ways, view, near) in enumerate(zip(self._ways, self.views, lines, strict=True)):
            if not ways:
                continue
            behind = sum([way.end < v for way in ways])
            share = 1.0 / max(behind, len(ways) - behind)
            sent = [(line[laid], table, axis, lines[w][back])
                    for line, (w, back, table, axis, laid) in zip(near, ways, strict=True)]
            for turns, ahead, part in ((self._forward, sent[behind:], view[..., behind:, :]),
                                       (self._backward, sent[:behind], view[..., :behind, :])):
                kept = 1.0 - len(ahead) * share
                turns.append(_Turn(v, view, part, ahead, share, kept if kept > ROUNDING else 0.0))
        self._backward.reverse()
        self._sent = sum(len(ways) for ways in self._ways) // 2

    def times(self, count: int) -> Messenger:
        """A copy for so many problems at once, each with these messages."""
        found = copy.copy(self)
        found._lay_out(np.repeat(self.into[None], count, axis=0))
        return found

    def only(self, lines: np.ndarray) -> Messenger:
        """A copy for some of the problems."""
        found = copy.copy(self)
        found._lay_out(self.into[lines])
        return found

    def start_from(self, other: Messenger, origin: Sequence[tuple[int, np.ndarray]]) -> None:
        """Take over the messages of the problem that this one was shrunk from, where edges are still there.

        ``origin``: every node's node there, and its choices there. Bounds hold whatever the messages start from.
        """
        lines = [{w: line for line, (_, w, _) in enumerate(around)} for around in other._around]
        for view, around, (old, picks) in zip(self.views, self._around, origin, strict=True):
            for line, (_, w, _) in enumerate(around):
                if origin[w][0] in lines[old]:
                    view[line] = other.views[old][lines[old][origin[w][0]]][picks]

    def on(self, costs: Sequence[np.ndarray]) -> Messenger:
        """A copy for the same tables and other costs of nodes, with messages of its own."""
        found = copy.copy(self)
        found.compact = replace(self.compact, costs=tuple(costs))
        found._lay_out(self.into.copy())
        return found

    def costs(self, prices: np.ndarray) -> list[np.ndarray]:
        """Priced node costs without infinities. Edges that use memory keep their tables: a bound all the same."""
        return self.per_node(self.flat_costs(prices))

    def flat_costs(self, prices: np.ndarray) -> np.ndarray:
        """The same, those of all nodes in one array."""
        whole = self.compact.flat_costs
        return np.minimum(whole + self.compact.slot_prices(prices)[:len(whole)], self.limit)

    def per_node(self, flat: np.ndarray) -> list[np.ndarray]:
        borders = self.compact.firsts[:len(self.compact.costs) + 1].tolist()
        return [flat[..., low:high] for low, high in itertools.pairwise(borders)]

    def sweep(self, costs: Sequence[np.ndarray], forward: bool) -> Any:
        """Each node in turn shares what it has among the edges ahead of it; the bound that then holds (of each)."""
        bound: Any = self.compact.constant
        clock.did("messages sent", self._sent)
        for v in self._alone:
            bound = bound + np.minimum.reduce(costs[v], -1)
        for v, view, lines, ahead, share, kept in self._forward if forward else self._backward:
            belief = costs[v] + np.add.reduce(view, -2)
            if kept:
                bound = bound + kept * np.minimum.reduce(belief, -1)
            if ahead:
                lines -= (belief * share)[..., None, :]
                for given, table, axis, filled in ahead:
                    np.minimum.reduce(table - given, axis, out=filled)
        return bound

    def settle(self, costs: Sequence[np.ndarray], sweeps: int = SETTLE) -> Any:
        bound: Any = -FORBIDDEN
        for _ in range(sweeps):
            self.sweep(costs, True)
            bound = self.sweep(costs, False)
        return bound

    def plan(self, costs: Sequence[np.ndarray]) -> Any:
        """Nodes in order, each given the choices before it and the messages from those after it (a plan of each)."""
        plan: list[Any] = []
        for v, ways in enumerate(self._ways):
            total = costs[v]
            for line, (w, back, *_) in enumerate(ways):
                total = total + (self._around[w][back][2][plan[w]] if w < v else self.views[v][..., line, :])
            plan.append(total.argmin(-1))
        return np.array(plan, np.int64).T.tolist()

    def reduced_costs(self, costs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """For every choice: at least by how much (priced) plans with it exceed the bound."""
        return self._reduced_costs(costs)[0]

    def _reduced_costs(self, costs: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The same, and what is left of every table, less its minimum."""
        found = [array + view.sum(axis=0) for array, view in zip(costs, self.views, strict=True)]
        found = [belief - belief.min() for belief in found]
        lefts = []
        for e, ((u, v), table) in enumerate(zip(self.compact.ends, self.compact.tables, strict=True)):
            left = (np.minimum(table, self.limit) - self.views[u][self._lines[u][e]][:, None]
                    - self.views[v][self._lines[v][e]])
            left -= left.min()
            found[u] += left.min(axis=1)
            found[v] += left.min(axis=0)
            lefts.append(left)
        return found, lefts

    def within(self, costs: Sequence[np.ndarray], room: float) -> Compact:
        """The problem without the choices, and cells of tables, that put (priced) plans more than ``room`` above the
        bound."""
        reduced_costs, lefts = self._reduced_costs(costs)
        tables = []
        for (u, v), table, left in zip(self.compact.ends, self.compact.tables, lefts, strict=True):
            rises = left + (reduced_costs[u] - left.min(axis=1))[:, None] + (reduced_costs[v] - left.min(axis=0))
            tables.append(np.where(rises <= room, table, FORBIDDEN))
        kept = tuple(np.where(reduced_cost <= room, array, FORBIDDEN)
                     for reduced_cost, array in zip(reduced_costs, self.compact.costs, strict=True))
        return replace(self.compact, costs=kept, tables=tuple(tables))


@dataclass
class Prices:
    """``bound`` holds at ``values`` (seconds per byte at each row); ``steps`` were made."""

    values: np.ndarray
    bound: float
    steps: int = 0


class Ascent:
    """Subgradient steps on the prices of memory from ``first`` on (none: 0).

    What the messages' plan uses too much of gets more expensive: the cheapest choices one by one say less, since equal
    ones are many. Step length after Polyak, towards the best plan's cost or half as much again as the bound, whichever
    is nearer; shorter when the bound does not grow.
    """

    def __init__(self, compact: Compact, first: np.ndarray | None = None) -> None:
        self.compact, self.prices = compact, np.zeros(len(compact.room)) if first is None else first
        self.best = Prices(self.prices, -FORBIDDEN)
        self._scale = 1.0 / max(float(compact.room.max(initial=0.0)), 1.0)
        self._pull, self._step, self._idle, self._bound = 0.0 * self.prices, STEP, 0, -FORBIDDEN

    def climb(self, messenger: Messenger, deadline: float, steps: int,
              on_plan: Callable[[list[int]], float] | None = None, target: float = FORBIDDEN) -> bool:
        """So many steps, two sweeps of messages each; whether more may raise the bound.

        ``target``: the cost of the best plan known so far. ``on_plan`` is shown a plan now and then, at prices above
        and below, and returns the cost of the best plan so far (None: no plans are made).
        """
        goes_on = True
        for number in range(1, steps + 1):
            start = clock.now()
            costs = messenger.costs(self.prices)
            self.take(messenger.settle(costs, SWEEPS))
            now = clock.now()
            if number % SHOW_EVERY == 0 and on_plan is not None and number < steps:
                target = show_plans(messenger, self.best.values, on_plan, deadline)
            if (clock.now() + (now - start) > deadline or self.ended(target)
                    or not self.move(messenger.plan(costs), target)):
                goes_on = False
                break
        if on_plan is not None:
            show_plans(messenger, self.best.values, on_plan, deadline)
        return goes_on

    def take(self, priced_bound: float) -> None:
        """The messages' bound at the prices."""
        best, bound = self.best, float(priced_bound) - float(self.prices @ self.compact.room)
        best.steps += 1
        self._idle = 0 if bound > best.bound + SLOW * abs(best.bound) else self._idle + 1
        if bound > best.bound:
            best.values, best.bound = self.prices, bound
        self._bound = bound

    def ended(self, target: float) -> bool:
        near = target < FORBIDDEN and target - self.best.bound <= 1e-9 * abs(target)
        return near or self._step < SMALLEST_STEP

    def move(self, plan: Sequence[int], target: float) -> bool:
        """A step, from the messages' plan at the prices; False where prices do nothing."""
        prices, bound = self.prices, self._bound
        over = (self.compact.load(plan) - self.compact.room) * self._scale
        self._pull = MOMENTUM * self._pull + (1 - MOMENTUM) * over
        if self._idle >= PATIENCE:
            self.prices, self._pull, self._step, self._idle = self.best.values, 0.0 * over, self._step * SHRINK, 0
            return True
        way = np.where((prices <= 0) & (self._pull < 0), 0.0, self._pull)
        length = float(way @ way)
        if length == 0 and not prices.any() and self.best.steps > SHOW_EVERY:
            return False
        reach = min(max(target - bound, 0.0), 0.5 * abs(bound) + 1e-300)
        self.prices = np.maximum(0.0, prices + self._step * reach * self._scale / (length or 1.0) * way)
        return True


def raise_prices(messenger: Messenger, deadline: float, steps: int, on_plan: Callable[[list[int]], float] | None,
                 first: np.ndarray | None = None, target: float = FORBIDDEN) -> Prices:
    """An ascent of so many steps at most."""
    ascent = Ascent(messenger.compact, first)
    ascent.climb(messenger, deadline, steps, on_plan, target)
    return ascent.best


def raise_each(messengers: Sequence[Messenger], deadline: float, steps: int, first: np.ndarray, target: float
               ) -> list[Prices]:
    """The same without plans shown, for problems that differ in costs of nodes, with equal messages: swept at once."""
    ascents = [Ascent(messenger.compact, first) for messenger in messengers]
    climbing, several = list(range(len(messengers))), messengers[0].times(len(messengers))
    for _ in range(steps):
        start = clock.now()
        costs = several.per_node(np.stack([messengers[i].flat_costs(ascents[i].prices) for i in climbing]))
        for i, bound in zip(climbing, several.settle(costs, SWEEPS), strict=True):
            ascents[i].take(bound)
        now = clock.now()
        late = now + (now - start) > deadline
        goes_on = [not late and not ascents[i].ended(target) and ascents[i].move(plan, target)
                   for i, plan in zip(climbing, several.plan(costs), strict=True)]
        if not all(goes_on):
            for line, i in enumerate(climbing):
                if not goes_on[line]:
                    messengers[i].into[:] = several.into[line]
            climbing = [i for i, on in zip(climbing, goes_on, strict=True) if on]
            if not climbing:
                break
            several = several.only(np.flatnonzero(goes_on))
    for line, i in enumerate(climbing):
        messengers[i].into[:] = several.into[line]
    return [ascent.best for ascent in ascents]


def show_plans(messenger: Messenger, prices: np.ndarray, on_plan: Callable[[list[int]], float], deadline: float,
               factors: Sequence[float] = (1.0, 0.8, 1.2)) -> float:
    """Show plans at multiples of the prices, messages left as they were; returns the best cost so far.

    After the deadline only until there is a plan.
    """
    before, best = messenger.into.copy(), math.inf
    for factor in factors if prices.any() else (1.0,):
        costs = messenger.costs(factor * prices)
        messenger.settle(costs, 2)
        best = on_plan(messenger.plan(costs))
        if best < FORBIDDEN and clock.now() >= deadline:
            break
    messenger.into[:] = before
    return best
