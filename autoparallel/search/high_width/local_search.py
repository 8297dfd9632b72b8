"""Local search on the compact form: make a plan fit, then lower its cost move by move and part by part.

What every choice of every node would cost, given its neighbours, and the load of every row are kept up to date, so
that the best of all moves is found by a few operations on whole arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoparallel import clock
from autoparallel.search.high_width.event_form import Compact
from autoparallel.search.model.interned import Shared
from autoparallel.search.model.problem import FORBIDDEN

BATCH = 8
PAIR_TRIES = 8


def finite_limit(compact: Compact) -> float:
    """A cost above that of any allowed plan, small enough to reckon with."""
    def most(array: np.ndarray) -> float:
        allowed = array[array < FORBIDDEN]
        return float(allowed.max()) if allowed.size else 0.0

    return sum(Shared.of([*compact.costs, *compact.tables]).each(most).tolist(), abs(compact.constant) + 1.0)


def local_costs(compact: Compact, plan: Sequence[int], limit: float) -> np.ndarray:
    """By node, the cost of each choice with its edges, neighbours as in the plan; forbidden choices cost ``limit``."""
    picks, sizes = np.asarray(plan, np.int64), np.array(compact.sizes, np.int64)
    cells, firsts, sources, targets = compact.flat_tables
    nodes = np.stack([sources, targets], axis=1).ravel()  # in the order of edges
    counts, strides = sizes[nodes], np.stack([sizes[targets], np.ones_like(targets)], axis=1).ravel()
    starts = np.stack([firsts + picks[targets], firsts + picks[sources] * sizes[targets]], axis=1).ravel()
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    beside = cells[np.repeat(starts, counts) + within * np.repeat(strides, counts)]
    slots = np.repeat(compact.firsts[nodes], counts) + within
    own = compact.flat_costs
    return np.bincount(np.concatenate([np.arange(len(own)), slots]), np.minimum(np.concatenate([own, beside]), limit),
                       len(own))


class LocalSearch:
    """A plan that changes. Forbidden cells count as ``limit`` here.

    ``local[slot]``: cost of the slot's choice with its edges, the neighbours as they are. ``over``: load less room.
    """

    def __init__(self, compact: Compact, plan: Sequence[int], limit: float) -> None:
        self.compact, self.plan, self.limit = compact, list(plan), limit
        self.over = compact.load(plan) - compact.room
        self.firsts = compact.firsts[:len(compact.costs) + 1]
        self.owner = np.repeat(np.arange(len(compact.costs)), np.diff(self.firsts))
        self.local = local_costs(compact, plan, limit)
        self._own = np.minimum(compact.flat_costs, limit)
        self._heavy: list[list[tuple[int, int, bool]]] = [[] for _ in compact.costs]
        for e in compact.heavy_edges:
            u, v = compact.ends[e]
            self._heavy[u].append((e, v, True))
            self._heavy[v].append((e, u, False))

    @property
    def taken(self) -> np.ndarray:
        """Each node's slot."""
        return self.firsts[:-1] + np.array(self.plan, np.int64)

    def row_of(self, v: int) -> np.ndarray:
        return self.local[self.firsts[v]:self.firsts[v + 1]]

    def _slots(self, v: int, pick: int) -> list[int]:
        """Slots taken with a choice of v: its own and the cells of its heavy edges."""
        compact, count = self.compact, len(self.compact.costs)
        found = [int(self.firsts[v]) + pick]
        for e, w, is_source in self._heavy[v]:
            u, x = (pick, self.plan[w]) if is_source else (self.plan[w], pick)
            found.append(int(compact.firsts[count + e]) + u * compact.tables[e].shape[1] + x)
        return found

    def change(self, v: int, pick: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows (ascending) from which on the load changes if v moves, and by how much."""
        events, starts = self.compact.events, self.compact.starts
        new = [slice(starts[s], starts[s + 1]) for s in self._slots(v, pick)]
        old = [slice(starts[s], starts[s + 1]) for s in self._slots(v, self.plan[v])]
        rows = np.concatenate([events.rows[part] for part in (*new, *old)])
        values = np.concatenate([*(events.values[part] for part in new), *(-events.values[part] for part in old)])
        order = np.argsort(rows, kind="stable")
        return rows[order], np.cumsum(values[order])

    def fits(self, v: int, pick: int) -> bool:
        """Whether no row is exceeded that v's move makes fuller."""
        clock.did("moves tried")
        rows, rises = self.change(v, pick)
        if not len(rows) or rises.max() <= 0:
            return True
        if len(rows) <= 16:
            ends = [*rows[1:].tolist(), len(self.over)]
            return all(rise <= 0 or low == high or self.over[low:high].max() + rise <= 0
                       for low, high, rise in zip(rows.tolist(), ends, rises.tolist(), strict=True))
        spread = np.repeat(rises, np.diff(rows, append=len(self.over)))
        return bool((self.over[rows[0]:] + spread)[spread > 0].max(initial=-1.0) <= 0)

    def move(self, v: int, pick: int) -> None:
        clock.did("moves tried")
        old = self.plan[v]
        rows, rises = self.change(v, pick)
        if len(rows):
            self.over[rows[0]:] += np.repeat(rises, np.diff(rows, append=len(self.over)))
        self.plan[v] = pick
        for _, w, table in self.compact.around[v]:
            self.row_of(w)[:] += np.minimum(table[pick], self.limit) - np.minimum(table[old], self.limit)

    def cost(self) -> float:
        return self.compact.cost(self.plan)

    def rough_cost(self) -> float:
        """The cost from what is kept of moves, rounded by them: `local` counts edges twice, nodes once."""
        taken = self.taken
        return self.compact.constant + float(self.local[taken].sum() + self._own[taken].sum()) / 2

    def state(self) -> tuple[list[int], np.ndarray, np.ndarray]:
        return list(self.plan), self.local.copy(), self.over.copy()

    def reset(self, plan: list[int], local: np.ndarray, over: np.ndarray) -> None:
        """Back to a `state`."""
        self.plan, self.local, self.over = plan, local, over

    def repair(self, deadline: float = FORBIDDEN) -> bool:
        """Moves with the least cost per byte saved where the load is too high, until it fits; whether it does."""
        for _ in range(4 * len(self.plan)):
            excess = np.maximum(self.over, 0.0)
            if not excess.any():
                return True
            if clock.now() >= deadline or not self._relieve(excess):
                return False
        return not (self.over > 0).any()

    def _relieve(self, excess: np.ndarray) -> bool:
        """A few moves that lower the sum of squares of the excess; whether one was found."""
        clock.did("cells passed", len(self.local))
        weights = self.compact.slot_prices(excess / excess.max())
        weights = weights[:self.firsts[-1]]
        taken = self.taken
        saved = weights[taken][self.owner] - weights
        rise = self.local - self.local[taken][self.owner]
        useful = np.flatnonzero(saved > 0)
        rates = np.maximum(rise[useful], 0.0) / saved[useful]
        order = useful[np.argsort(rates, kind="stable")]
        moved: set[int] = set()
        for slot in order[:200].tolist():
            v = int(self.owner[slot])
            if v in moved or any(w in moved for _, w, _ in self.compact.around[v]):
                continue
            pick = slot - int(self.firsts[v])
            old, before = self.plan[v], float((np.maximum(self.over, 0.0) ** 2).sum())
            self.move(v, pick)
            if float((np.maximum(self.over, 0.0) ** 2).sum()) >= before:
                self.move(v, old)
                continue
            moved.add(v)
            if len(moved) >= BATCH or not (self.over > 0).any():
                break
        return bool(moved)

    def descend(self, deadline: float = FORBIDDEN) -> None:
        """Moves of one node that lower the cost and fit, the best first, until there is none."""
        dead: set[int] = set()
        while clock.now() < deadline:
            clock.did("cells passed", len(self.local))
            gain = self.local[self.taken][self.owner] - self.local
            better = np.flatnonzero(gain > 1e-12 * self.limit)
            better = better[np.argsort(-gain[better], kind="stable")]
            moved: set[int] = set()
            for slot in better.tolist():
                v = int(self.owner[slot])
                if slot in dead or v in moved or any(w in moved for _, w, _ in self.compact.around[v]):
                    continue
                pick = slot - int(self.firsts[v])
                if self.fits(v, pick):
                    self.move(v, pick)
                    moved.add(v)
                else:
                    dead.add(slot)
                if clock.now() >= deadline:
                    return
            if not moved:
                if not dead:
                    return
                dead = set()
                if not self._any_fits(better, deadline):
                    return

    def _any_fits(self, slots: np.ndarray, deadline: float) -> bool:
        return any(clock.now() >= deadline or
                   self.fits(int(self.owner[slot]), slot - int(self.firsts[self.owner[slot]]))
                   for slot in slots.tolist())
