"""Bounds and plans where elimination is too wide: sequential reweighted message passing (TRW-S) with memory prices.

Messages move costs between nodes and edges so that the sum of their minima grows: that sum is a lower bound, and taking
nodes in order, each given those before it and the messages of those after it, gives a plan (Kolmogorov, "Convergent
tree-reweighted message passing", 2006). No table is larger than an edge's; a sweep is O(cells).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoparallel.search.compact import Compact
from autoparallel.search.problem import FORBIDDEN

STEP = 0.3
SHRINK = 0.8
PATIENCE = 20
MOMENTUM = 0.8
SHOW_EVERY = 20
SETTLE = 5
SLOW = 1e-4
SMALLEST_STEP = 1e-3


class _Ahead(NamedTuple):
    """What a node does in a sweep: its tables towards the nodes ahead side by side, and where the messages go."""

    lines: np.ndarray
    tables: np.ndarray
    line_of_column: np.ndarray
    targets: np.ndarray
    share: float


class Messenger:
    """Messages into every node, one line per edge; kept from sweep to sweep, so that prices can change in small steps.

    Nothing costs more than ``limit`` here, which is more than any allowed plan costs, so bounds stay valid.
    """

    def __init__(self, compact: Compact, limit: float) -> None:
        self.compact, self.limit = compact, limit
        sizes = compact.sizes
        lines = [{e: i for i, (e, _, _) in enumerate(around)} for around in compact.around]
        ends = np.cumsum([0, *(len(line) * size for line, size in zip(lines, sizes, strict=True))])
        self.into = np.zeros(ends[-1])
        self.views = [self.into[low:low + len(line) * size].reshape(len(line), size)
                      for low, line, size in zip(ends[:-1], lines, sizes, strict=True)]
        self._lines = lines
        self._forward = [self._ahead(v, ends, forward=True) for v in range(len(sizes))]
        self._backward = [self._ahead(v, ends, forward=False) for v in range(len(sizes))]

    def _ahead(self, v: int, ends: np.ndarray, forward: bool) -> _Ahead | None:
        around = self.compact.around[v]
        chosen = [i for i, (_, w, _) in enumerate(around) if (w > v) == forward]
        if not chosen:
            return None
        widths = [around[i][2].shape[1] for i in chosen]
        targets = []
        for i, width in zip(chosen, widths, strict=True):
            edge, w, _ = around[i]
            first = int(ends[w]) + self._lines[w][edge] * width
            targets.append(np.arange(first, first + width))
        tables = np.minimum(np.concatenate([around[i][2] for i in chosen], axis=1), self.limit)
        return _Ahead(np.array(chosen), tables, np.repeat(np.arange(len(chosen)), widths), np.concatenate(targets),
                      1.0 / max(len(chosen), len(around) - len(chosen)))

    def costs(self, prices: np.ndarray) -> list[np.ndarray]:
        """Priced node costs without infinities. Edges that use memory keep their tables: a bound all the same."""
        compact = self.compact
        extra = compact.slot_prices(prices)
        return [np.minimum(costs + extra[compact.firsts[v]:compact.firsts[v + 1]], self.limit)
                for v, costs in enumerate(compact.costs)]

    def sweep(self, costs: Sequence[np.ndarray], forward: bool) -> float:
        """Each node in turn shares what it has among the edges ahead of it; the bound that then holds."""
        order = range(len(costs)) if forward else range(len(costs) - 1, -1, -1)
        steps = self._forward if forward else self._backward
        bound = self.compact.constant
        for v in order:
            view, step = self.views[v], steps[v]
            belief = costs[v] + view.sum(axis=0)
            if step is None:
                bound += belief.min()
                continue
            kept = view[step.lines] - belief * step.share
            view[step.lines] = kept
            spread = kept[0][:, None] if len(kept) == 1 else kept.T[:, step.line_of_column]
            self.into[step.targets] = (step.tables - spread).min(axis=0)
            bound += (1.0 - len(kept) * step.share) * belief.min()
        return float(bound)

    def settle(self, costs: Sequence[np.ndarray], sweeps: int = SETTLE) -> float:
        bound = -FORBIDDEN
        for _ in range(sweeps):
            self.sweep(costs, True)
            bound = self.sweep(costs, False)
        return bound

    def apart(self, costs: Sequence[np.ndarray]) -> list[int]:
        """Each node's cheapest choice by itself."""
        return [int((array + view.sum(axis=0)).argmin()) for array, view in zip(costs, self.views, strict=True)]

    def plan(self, costs: Sequence[np.ndarray]) -> list[int]:
        """Nodes in order, each given the choices before it and the messages from those after it."""
        plan: list[int] = []
        for v, around in enumerate(self.compact.around):
            total = costs[v]
            for line, (_, w, table) in enumerate(around):
                total = total + (table[:, plan[w]] if w < v else self.views[v][line])
            plan.append(int(total.argmin()))
        return plan

    def regrets(self, costs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """For every choice: at least by how much (priced) plans with it exceed the bound."""
        found = [array + view.sum(axis=0) for array, view in zip(costs, self.views, strict=True)]
        found = [belief - belief.min() for belief in found]
        for e, ((u, v), table) in enumerate(zip(self.compact.ends, self.compact.tables, strict=True)):
            left = (np.minimum(table, self.limit) - self.views[u][self._lines[u][e]][:, None]
                    - self.views[v][self._lines[v][e]])
            left -= left.min()
            found[u] += left.min(axis=1)
            found[v] += left.min(axis=0)
        return found


@dataclass
class Prices:
    """``bound`` holds at ``values`` (seconds per byte at each row); ``steps`` were made."""

    values: np.ndarray
    bound: float
    steps: int = 0


def raise_prices(messenger: Messenger, deadline: float, steps: int,
                 on_plan: Callable[[list[int]], float]) -> Prices:
    """Subgradient steps on the prices of memory, two sweeps of messages each.

    Step length after Polyak, towards the best plan's cost or half as much again as the bound, whichever is nearer;
    shorter when the bound does not grow. ``on_plan`` is shown a plan now and then, at prices above and below, and
    returns the cost of the best plan so far.
    """
    compact = messenger.compact
    room, scale = compact.room, 1.0 / max(float(compact.room.max(initial=0.0)), 1.0)
    best = Prices(np.zeros(len(room)), -FORBIDDEN)
    prices, pull, step, idle, target = best.values, np.zeros(len(room)), STEP, 0, FORBIDDEN
    for number in range(1, steps + 1):
        costs = messenger.costs(prices)
        bound = messenger.settle(costs, 2) - float(prices @ room)
        best.steps = number
        idle = 0 if bound > best.bound + SLOW * abs(best.bound) else idle + 1
        if bound > best.bound:
            best.values, best.bound = prices, bound
        if number % SHOW_EVERY == 0:
            target = show_plans(messenger, best.values, on_plan)
        near = target < FORBIDDEN and target - best.bound <= 1e-9 * abs(target)
        if time.monotonic() >= deadline or step < SMALLEST_STEP or near:
            break
        over = (compact.load(messenger.apart(costs)) - room) * scale
        pull = MOMENTUM * pull + (1 - MOMENTUM) * over
        if idle >= PATIENCE:
            prices, pull, step, idle = best.values, 0.0 * pull, step * SHRINK, 0
            continue
        way = np.where((prices <= 0) & (pull < 0), 0.0, pull)
        length = float(way @ way)
        if length == 0 and not prices.any() and number > SHOW_EVERY:
            break
        reach = min(max(target - bound, 0.0), 0.5 * abs(bound) + 1e-300)
        prices = np.maximum(0.0, prices + step * reach * scale / (length or 1.0) * way)
    target = show_plans(messenger, best.values, on_plan)
    return best


def show_plans(messenger: Messenger, prices: np.ndarray, on_plan: Callable[[list[int]], float],
               factors: Sequence[float] = (1.0, 0.8, 1.2)) -> float:
    """Show plans at multiples of the prices, messages left as they were; returns the best cost so far."""
    before, best = messenger.into.copy(), math.inf
    for factor in factors if prices.any() else (1.0,):
        costs = messenger.costs(factor * prices)
        messenger.settle(costs, 2)
        best = on_plan(messenger.plan(costs))
    messenger.into[:] = before
    return best
