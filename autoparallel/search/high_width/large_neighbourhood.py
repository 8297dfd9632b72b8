"""Large-neighbourhood search: a connected part of the plan is optimised anew with the rest fixed; improvements are
kept.

Small parts are solved as integer programs, memory exactly as it is. Large parts are solved by elimination at prices of
memory, then made to fit by local search. Parts grow around nodes that cost more than the bound's share for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoparallel import clock
from autoparallel.search.high_width.aggregation import shrink
from autoparallel.search.high_width.event_form import Compact, part_of
from autoparallel.search.high_width.local_search import LocalSearch
from autoparallel.search.high_width.trws import Messenger
from autoparallel.search.ilp.formulation import Program
from autoparallel.search.low_width.bucket_elimination import Eliminator, elimination_order
from autoparallel.search.model.interned import Shared
from autoparallel.search.model.problem import FORBIDDEN

PROGRAM_CELLS = (4_000, 15_000, 40_000)
PROGRAM_S = 15.0
BRANCHES = 10
LARGE_PARTS = (50, 150, 500, 1500)
HOPE = 1e-3
LEARNING = 0.2
CURIOSITY = 0.1
TABLE_CELLS = 3e4
MAX_FANOUT = 20
FACTORS = (0.0, 0.5, 0.8, 1.0, 1.2, 1.5)
PRICINGS = 2
WEIGHTS_EVERY = 50
WORST_FACTOR = 1e-12


@dataclass
class _Kind:
    """A way to better a part of some size; ``effort`` is about its seconds, ``value`` what it lately brought for it.

    ``improve``, which takes that size, returns for how many seconds it did not look at the clock, ``blind_s`` the most
    of these.
    """

    improve: Callable[[Parts, int], float]
    size: int
    effort: float
    value: float = HOPE
    blind_s: float = 0.0


class Parts:
    """The best plan so far and the moves that improve parts of it; random choices are seeded."""

    def __init__(self, compact: Compact, plan: Sequence[int], messenger: Messenger, prices: np.ndarray,
                 deadline: float, on_better: Callable[[list[int], float], None]) -> None:
        self.compact, self.plan, self.cost = compact, list(plan), compact.cost(plan)
        self.messenger, self.prices, self.deadline = messenger, prices, deadline
        self._on_better = on_better
        self._near = [[w for _, w, _ in around] for around in compact.around]
        self._random = np.random.default_rng(0)
        self._walk = LocalSearch(compact, self.plan, messenger.limit)
        self._weights = np.zeros(0)
        self.is_late = False
        self._kinds = [_Kind(Parts._by_elimination, size, 0.03 + size / 8000) for size in LARGE_PARTS]
        self._kinds += [_Kind(Parts._by_program, size, 0.1 + size / 30_000) for size in PROGRAM_CELLS]

    def go_on(self, plan: list[int], prices: np.ndarray) -> None:
        """From this plan, at these prices."""
        self.prices = prices
        if plan is not self.plan:
            self.plan, self.cost = list(plan), self.compact.cost(plan)
            self._walk = LocalSearch(self.compact, self.plan, self.messenger.limit)

    def run(self, bound: float, gap: float, rounds: int) -> None:
        """So many rounds, unless the gap is reached, or none more ends before the deadline (``is_late``)."""
        for number in range(rounds):
            if clock.now() >= self.deadline or self.cost - bound <= gap * abs(self.cost):
                return
            if number % WEIGHTS_EVERY == 0:
                self._weights = self._dearness()
            kind, before, start = self._kind(), self.cost, clock.now()
            if start + kind.blind_s > self.deadline:
                self.is_late = True
                return
            kind.blind_s = max(kind.blind_s, kind.improve(self, kind.size))
            kind.value += LEARNING * ((before - self.cost) / abs(before) / kind.effort - kind.value)

    def _kind(self) -> _Kind:
        """By chance, those more often that brought more for their effort."""
        values = np.array([kind.value for kind in self._kinds])
        chances = (values + CURIOSITY * values.max() + WORST_FACTOR) ** 2
        return self._kinds[int(self._random.choice(len(values), p=chances / chances.sum()))]

    def _dearness(self) -> np.ndarray:
        """Cumulative weights for drawing a node: its cost in the plan, with its edges, above its share of the messages'
        bound."""
        costs = self.messenger.costs(self.prices)
        reduced_costs = self.messenger.reduced_costs(costs)
        found = np.array([reduced_cost[pick] for reduced_cost, pick in zip(reduced_costs, self.plan, strict=True)])
        found = np.minimum(found, self.cost)
        return np.cumsum(found + found.mean() * 0.2 + WORST_FACTOR)

    def _seed(self) -> int:
        at = self._random.random() * self._weights[-1]
        return int(min(np.searchsorted(self._weights, at), len(self._weights) - 1))

    def _grow(self, max_nodes: int, max_cells: int) -> list[int]:
        """A random connected part, ascending."""
        seed = self._seed()
        inside, cells, fringe = {seed}, 0, self._some(self._near[seed])
        while fringe and len(inside) < max_nodes and cells < max_cells:
            v = fringe.pop(int(self._random.integers(len(fringe))))
            if v in inside:
                continue
            cells += sum(table.size for _, w, table in self.compact.around[v] if w in inside)
            inside.add(v)
            fringe += [w for w in self._some(self._near[v]) if w not in inside]
        clock.did("nodes laid out", len(inside))
        return sorted(inside)

    def _some(self, nodes: list[int]) -> list[int]:
        if len(nodes) <= MAX_FANOUT:
            return list(nodes)
        return [nodes[i] for i in self._random.permutation(len(nodes))[:MAX_FANOUT]]

    def _by_program(self, cells: int) -> float:
        start = clock.now()
        part = self._grow(len(self.plan), cells)
        shrunk = shrink(part_of(self.compact, self.plan, part))
        picks: Sequence[int] | None = None
        blind_s = clock.now() - start
        if shrunk.merger.feasible and shrunk.roots:
            deadline = min(self.deadline, clock.now() + PROGRAM_S)
            program = Program(shrunk.compact)
            blind_s = clock.now() - start
            picks, _ = program.solve(deadline, self.cost, BRANCHES)
        elif shrunk.merger.feasible:
            picks = ()
        if picks is not None:
            self._try(part, shrunk.restore(picks))
        return blind_s

    def _by_elimination(self, max_nodes: int) -> float:
        """At a few multiples of the prices: expensive memory leaves room for what local search then makes cheaper."""
        begun = clock.now()
        part = self._narrow(self._grow(max_nodes, 10**9))
        inner = part_of(self.compact, self.plan, part)
        eliminator = Eliminator(inner.sizes, inner.ends)
        blind_s = clock.now() - begun
        for factor in self._random.choice(FACTORS, PRICINGS, replace=False).tolist():
            start = clock.now()
            if start >= self.deadline:
                break
            costs, tables = inner.priced(factor * self.prices)
            value, picks = eliminator.solve(Shared.of([*costs, *tables]))
            blind_s = max(blind_s, clock.now() - start)
            if value < FORBIDDEN:
                self._try(part, picks)
        return blind_s

    def _narrow(self, part: list[int]) -> list[int]:
        """Without those that have most neighbours inside, until elimination is quick."""
        while True:
            place = {v: i for i, v in enumerate(part)}
            pairs = [(i, place[w]) for i, v in enumerate(part) for w in self._near[v] if v < w and w in place]
            order = elimination_order([self.compact.sizes[v] for v in part], pairs)
            if order.max_cells <= TABLE_CELLS:
                return part
            degrees = [sum(w in place for w in self._near[v]) for v in part]
            drop = set(np.argsort(degrees)[-max(1, len(part) // 10):].tolist())
            part = [v for i, v in enumerate(part) if i not in drop]

    def _try(self, part: Sequence[int], picks: Sequence[int]) -> None:
        """Take over the part's choices if, after local search, the plan fits and costs less."""
        local_search = self._walk
        moves = [(v, pick) for v, pick in zip(part, picks, strict=True) if pick != self.plan[v]]
        if not moves:
            return
        saved = local_search.state()
        for v, pick in moves:
            local_search.move(v, pick)
        if (local_search.over <= 0).all() or local_search.repair(self.deadline):
            local_search.descend(self.deadline)
            cost = local_search.cost() if local_search.rough_cost() < self.cost * (1 + 1e-9) else FORBIDDEN
            if cost < self.cost * (1 - 1e-12) and self.compact.fits(local_search.plan):
                self.plan, self.cost = list(local_search.plan), cost
                self._on_better(self.plan, cost)
                return
        local_search.reset(*saved)
