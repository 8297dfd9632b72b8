"""Branch and bound, for problems where message passing and memory prices leave a gap between bound and best plan.

    open problem -> prices, messages: a bound, and what no better plan can contain goes -> merge what is left
                 -> HiGHS, where little is left
                 -> else branch on how much memory one node uses; groups of choices that a few sweeps rule out go first

Memory is what tears the gap open: once it is settled who uses most of a tight row, messages nearly close it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoparallel import clock
from autoparallel.search.high_width.aggregation import Shrunk, shrink
from autoparallel.search.high_width.event_form import Compact, moved_prices
from autoparallel.search.high_width.local_search import finite_limit
from autoparallel.search.high_width.trws import Messenger, Prices, raise_each, raise_prices
from autoparallel.search.ilp.formulation import Program
from autoparallel.search.model.interned import Shared
from autoparallel.search.model.problem import FORBIDDEN

PROGRAM_CELLS = 25_000
PROGRAM_BRANCHES = 2_000
STEPS = 150
WARM_STEPS = 30
WORTH = 0.8  # another round of prices where this share or less of the cells is left
PROBED = 10
PROBED_OTHERS = 4
PROBE_SWEEPS = 2
AT_ONCE = 8  # groups, so that their tables less messages stay in a cache
HALVES = 4
HARDNESS = 4.0  # a child with all of the gap left is taken to be 10^this times the work of one with none
EXACT = 1e-9
RESTART = 0.01
DEAREST = 1e3


@dataclass(frozen=True, eq=False)
class _Open:
    """A subproblem that may contain a better plan. ``bound``: no plan of it costs less. It has the messages and memory
    prices found so far, which may still be raised."""

    shrunk: Shrunk
    bound: float
    prices: np.ndarray
    messenger: Messenger | None = None
    raised: Prices | None = None


@dataclass(frozen=True, eq=False)
class _Bounded:
    """A subproblem with its messages; ``left``: the same nodes, without choices that no better plan contains."""

    shrunk: Shrunk
    messenger: Messenger
    prices: np.ndarray
    costs: list[np.ndarray]
    bound: float
    left: Compact


def allowed_cells(compact: Compact) -> int:
    """Cells of tables that are not forbidden."""
    return int(Shared.of(compact.tables).each(lambda table: float(np.count_nonzero(table < FORBIDDEN))).sum())


def memory_groups(compact: Compact) -> dict[int, list[np.ndarray]]:
    """The choices of each node that uses memory, those that use the same together; who uses most of a row first."""
    found: dict[int, list[np.ndarray]] = {}
    tops: dict[int, float] = {}
    for owner, rows, usage in compact.each_profile:
        if owner < len(compact.costs):
            _, group = np.unique(usage, axis=0, return_inverse=True)
            found[owner] = [np.flatnonzero(group.ravel() == number) for number in range(int(group.max()) + 1)]
            tops[owner] = float((usage.max(axis=0) / np.maximum(compact.room[rows], 1.0)).max())
    return {owner: found[owner] for owner in sorted(found, key=lambda owner: -tops[owner]) if len(found[owner]) > 1}


class Branching:
    """Depth first, what looks best first. ``offer`` is shown plans and returns the best cost so far."""

    def __init__(self, compact: Compact, cost: float, prices: np.ndarray, deadline: float,
                 offer: Callable[[Sequence[int]], float]) -> None:
        self.cost, self.deadline = cost, deadline
        self._offer_root = offer
        self._settling_s, self.is_late = 0.0, False
        root = shrink(compact, until=deadline)
        self._open = [_Open(root, -FORBIDDEN, moved_prices(prices, compact, root.compact))] if root.allowed else []

    def run(self) -> float:
        """Until proof or deadline; a bound for every plan (the best cost where it is proven to be the least)."""
        start = self.cost
        anew = [replace(root, prices=np.zeros(len(root.prices))) for root in self._open]
        while self._open and not self._late():
            if self.cost < start * (1 - RESTART):  # rules out most at the root
                self._open, start = list(anew), self.cost
            if self._closes(self._open[-1].bound):
                self._open.pop()
                continue
            children = self._work(self._open[-1])
            if not self._late():
                self._open.pop()
                self._open += sorted(children, key=lambda child: -child.bound)
        return min((node.bound for node in self._open), default=self.cost)

    def _late(self, seconds: float = 0.0) -> bool:
        """Whether time is up, or would be after so many seconds; from then on nothing that is open is settled."""
        self.is_late = self.is_late or clock.now() + seconds >= self.deadline
        return self.is_late

    def _closes(self, bound: float) -> bool:
        return bound >= self.cost - EXACT * abs(self.cost) if self.cost < FORBIDDEN else bound == FORBIDDEN

    def _offer(self, shrunk: Shrunk, plan: Sequence[int]) -> float:
        self.cost = min(self.cost, self._offer_root(shrunk.restore(plan)))
        return self.cost

    def _work(self, node: _Open) -> list[_Open]:
        """The subproblems that stay open after bounding: none if no better plan is in it, or if time ran out before
        that was known."""
        found = self._bounded(node)
        if found is None or self._late():
            return []
        if allowed_cells(found.left) <= PROGRAM_CELLS:
            shrunk = shrink(found.left, outer=found.shrunk)
            if not shrunk.allowed or self._program(shrunk):
                return []
        return self._children(found)

    def _bounded(self, node: _Open) -> _Bounded | None:
        """Bound, drop and merge, as long as that makes the problem much smaller. None where nothing is left, or time is
        up."""
        shrunk, prices, known, raised = node.shrunk, node.prices, node.bound, node.raised
        messenger = node.messenger or self._messenger(shrunk.compact)
        steps = STEPS if node.messenger is None else WARM_STEPS
        while True:
            if not shrunk.compact.costs:
                self._offer(shrunk, ())
                return None
            raised = raised or raise_prices(messenger, self.deadline, steps, None, prices, self.cost)
            if self._late(self._settling_s):
                return None
            start = clock.now()
            costs = messenger.costs(raised.values)
            bound = messenger.settle(costs) - float(raised.values @ shrunk.compact.room)
            self._settling_s = clock.now() - start
            known = max(known, bound, raised.bound)
            self._offer(shrunk, messenger.plan(costs))
            if self._closes(known):
                return None
            left = messenger.within(costs, self._slack(bound))
            cells = allowed_cells(left)
            if cells <= PROGRAM_CELLS or cells >= WORTH * allowed_cells(shrunk.compact):
                return _Bounded(shrunk, messenger, raised.values, costs, known, left)
            smaller = shrink(left, outer=shrunk)
            if not smaller.allowed:
                return None
            before, messenger = messenger, self._messenger(smaller.compact)
            messenger.start_from(before, smaller.origin(shrunk))
            prices = moved_prices(raised.values, shrunk.compact, smaller.compact)
            shrunk, steps, raised = smaller, WARM_STEPS, None

    def _messenger(self, compact: Compact) -> Messenger:
        return Messenger(compact, min(finite_limit(compact), DEAREST * abs(self.cost) or FORBIDDEN))

    def _slack(self, bound: float) -> float:
        """By how much better plans may exceed a bound."""
        return FORBIDDEN if self.cost == FORBIDDEN else self.cost - bound + EXACT * abs(self.cost)

    def _program(self, shrunk: Shrunk) -> bool:
        """Solve it as an integer program; whether that settled it."""
        picks, answer = Program(shrunk.compact).solve(self.deadline, self.cost, PROGRAM_BRANCHES)
        if picks is not None:
            self._offer(shrunk, picks)
        return answer.reason in ("optimal", "infeasible") or self._closes(answer.bound)

    def _groups(self, found: _Bounded) -> dict[int, list[np.ndarray]]:
        """Ways to branch: the uses of memory of the nodes that use most; else the choices of those with most to say."""
        allowed = [np.flatnonzero(costs < FORBIDDEN) for costs in found.left.costs]
        groups = {v: [group[np.isin(group, allowed[v])] for group in parts]
                  for v, parts in memory_groups(found.left).items()}
        groups = {v: [group for group in parts if len(group)] for v, parts in groups.items()}
        chosen = dict([(v, parts) for v, parts in groups.items() if len(parts) > 1][:PROBED])
        weight = [len(around) * np.log(len(picks)) for around, picks in zip(found.left.around, allowed, strict=True)]
        for v in sorted(range(len(allowed)), key=lambda v: -weight[v])[:PROBED_OTHERS]:
            if len(allowed[v]) > 1:
                chosen.setdefault(v, np.array_split(allowed[v], min(HALVES, len(allowed[v]))))
        return chosen

    def _children(self, found: _Bounded) -> list[_Open]:
        """The problem split by one node's groups of choices, without those that a few sweeps rule out."""
        messenger = found.messenger
        costs, left = list(found.costs), list(found.left.costs)
        several: dict[int, Messenger] = {}
        gap = self._slack(found.bound) if self.cost < FORBIDDEN else abs(found.bound) + 1.0
        best: tuple[float, int, list[tuple[float, np.ndarray]]] = (FORBIDDEN, -1, [])
        for v, groups in self._groups(found).items():
            if self._late():
                return []
            open_groups = []
            for group, bound in zip(groups, self._probe(found, costs, v, groups, several), strict=True):
                if self._closes(bound):
                    costs[v], left[v] = costs[v].copy(), left[v].copy()
                    costs[v][group], left[v][group] = messenger.limit, FORBIDDEN
                else:
                    open_groups.append((bound, group))
            if not open_groups:
                return []
            work = sum(10.0 ** (HARDNESS * (1.0 - (bound - found.bound) / gap)) for bound, _ in open_groups)
            best = min(best, (work, v, open_groups), key=lambda way: way[:2])
        _, v, open_groups = best
        children = []
        for bound, group in open_groups:
            only = np.full(len(left[v]), FORBIDDEN)
            only[group] = left[v][group]
            inner = messenger.on([*left[:v], only, *left[v + 1:]])
            children.append(_Open(replace(found.shrunk, compact=inner.compact), bound, found.prices, inner))
        parts = [children[low:low + AT_ONCE] for low in range(0, len(children), AT_ONCE)]
        return [child for part in parts for child in self._raised(part)]

    def _raised(self, children: Sequence[_Open]) -> list[_Open]:
        """Siblings, with prices raised for each."""
        messengers = [child.messenger for child in children if child.messenger is not None]
        found = raise_each(messengers, self.deadline, WARM_STEPS, children[0].prices, self.cost)
        return [replace(child, bound=max(child.bound, raised.bound), raised=raised)
                for child, raised in zip(children, found, strict=True)]

    def _probe(self, found: _Bounded, costs: Sequence[np.ndarray], v: int, groups: Sequence[np.ndarray],
               several: dict[int, Messenger]) -> list[float]:
        """Lower bounds of plans with each group of choices, after a few sweeps; ``several``: messengers to reuse."""
        paid, bounds = float(found.prices @ found.left.room), []
        for low in range(0, len(groups), AT_ONCE):
            some = groups[low:low + AT_ONCE]
            messenger = several.get(len(some)) or several.setdefault(
                len(some), found.messenger.times(len(some)))
            messenger.into[:] = found.messenger.into
            trial = list(costs)
            trial[v] = np.full((len(some), len(costs[v])), messenger.limit)
            for line, group in zip(trial[v], some, strict=True):
                line[group] = costs[v][group]
            bounds += (messenger.settle(trial, PROBE_SWEEPS) - paid).tolist()
        return [max(found.bound, bound) for bound in bounds]
