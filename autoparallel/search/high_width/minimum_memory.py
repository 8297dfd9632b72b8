"""The least memory of any plan, whatever it costs: a bound that no plan is below, and a plan that is near it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from autoparallel import clock
from autoparallel.search.high_width.aggregation import Shrunk, shrink
from autoparallel.search.high_width.event_form import Compact, compact_of
from autoparallel.search.high_width.local_search import LocalSearch
from autoparallel.search.high_width.trws import Messenger
from autoparallel.search.ilp.formulation import Program, cells
from autoparallel.search.low_width.lagrangian import LowestPeak
from autoparallel.search.model.memory_rows import least_peak
from autoparallel.search.model.problem import FORBIDDEN, Edge, Node, Problem, evaluate

PROGRAM_CELLS = 20_000
STEPS = 100
RATE = 4.0
HALVINGS = 12
REPAIR_S = 1.0


def least_memory(problem: Problem, deadline: float = FORBIDDEN) -> LowestPeak:
    """Merge; weigh the rows to raise the bound; make plans fit into less and less; a program where it is small.

    Takes as long as merging takes, even past the deadline.
    """
    floor = least_peak(problem)
    bare = _without_costs(replace(problem, limit=floor))
    shrunk = shrink(compact_of(bare), limited=False)
    if not shrunk.merger.feasible:
        return LowestPeak(FORBIDDEN, FORBIDDEN, None)
    return _Search(problem, floor, shrunk, deadline).run()


def _without_costs(problem: Problem) -> Problem:
    """The problem with all costs set to zero but those of forbidden choices; equal arrays stay the same objects."""
    known: dict[int, np.ndarray] = {}

    def bare(array: np.ndarray) -> np.ndarray:
        return known.setdefault(id(array), np.where(array < FORBIDDEN, 0.0, FORBIDDEN))

    nodes = tuple(Node(n.name, bare(n.costs), n.usages, n.interval) for n in problem.nodes)
    edges = tuple(Edge(e.source, e.target, bare(e.costs), e.usages, e.interval) for e in problem.edges)
    return Problem(nodes, edges, problem.limit, problem.name)


def _with_room(compact: Compact, more: float) -> Compact:
    return replace(compact, room=compact.room + more)


class _Search:
    """A search for the plan with the least peak memory. ``above``: bytes above ``floor`` that every plan needs;
    ``peak``: bytes of the best plan so far."""

    def __init__(self, problem: Problem, floor: float, shrunk: Shrunk, deadline: float) -> None:
        self.problem, self.floor, self.shrunk, self.deadline = problem, floor, shrunk, deadline
        self.compact = shrunk.compact
        self.above = max(0.0, -float(self.compact.room.min(initial=0.0)))
        self.plan: tuple[int, ...] | None = None
        self.peak = FORBIDDEN

    def run(self) -> LowestPeak:
        if cells(self.compact) > PROGRAM_CELLS or not self._program():
            self._weigh()
            self._squeeze()
        return LowestPeak(min(self.floor + self.above, self.peak), self.peak, self.plan)

    def _offer(self, picks: Sequence[int]) -> None:
        plan = self.shrunk.restore(picks)
        judged = evaluate(self.problem, plan)
        if judged.objective < FORBIDDEN and judged.peak_bytes < self.peak:
            self.plan, self.peak = plan, judged.peak_bytes

    def _program(self) -> bool:
        """Minimise the most by which a row exceeds its room; whether the least is known then."""
        if not self.compact.costs:
            self._offer(())
            return True
        program = Program(_with_room(self.compact, FORBIDDEN))
        model, unit = program.model, program.unit
        above = model.variables(np.ones(1), False, FORBIDDEN)
        rows = model.rows(len(program.loads), -FORBIDDEN, self.compact.room / unit)
        model.terms(rows, program.loads, 1.0)
        model.terms(rows, np.repeat(above, len(rows)), -1.0)
        picks, answer = program.solve(self.deadline)
        if answer.reason == "infeasible":
            self.above = FORBIDDEN
            return True
        self.above = max(self.above, answer.bound * unit)
        if picks is not None:
            self._offer(picks)
        if answer.reason == "optimal" and self.plan is not None:
            self.above = self.peak - self.floor
        return answer.reason == "optimal"

    @cached_property
    def _limit(self) -> float:
        """More than the memory of all owners of slots."""
        compact = self.compact
        per_slot = np.bincount(compact.events.slots, np.abs(compact.events.values), compact.firsts[-1])
        return 10.0 * (1.0 + float(per_slot.sum()))

    def _weigh(self) -> None:
        """Weights on rows that sum to 1 make one number of all; its least is a bound. Multiplicative updates."""
        compact = self.compact
        messenger = Messenger(compact, self._limit)
        weights = np.full(len(compact.room), 1.0 / max(1, len(compact.room)))
        for _ in range(STEPS if len(weights) else 1):
            costs = messenger.costs(weights)
            self.above = max(self.above, messenger.settle(costs, 2) - float(weights @ compact.room))
            plan = messenger.plan(costs)
            self._offer(plan)
            if clock.now() >= self.deadline or not len(weights):
                return
            over = compact.load(plan) - compact.room
            weights = weights * np.exp(RATE * (over - over.max()) / max(1.0, float(np.ptp(over))))
            weights /= weights.sum()

    def _squeeze(self) -> None:
        """Halve what lies between the bound and the best plan, making plans fit by local search."""
        if self.plan is None:
            return
        low, picks = self.floor + self.above, self.shrunk.forward(self.plan)
        for _ in range(HALVINGS):
            if self.peak <= low * (1 + 1e-6) or clock.now() >= self.deadline:
                return
            middle = (low + self.peak) / 2
            local_search = LocalSearch(_with_room(self.compact, middle - self.floor), picks, self._limit)
            if local_search.repair(min(self.deadline, clock.now() + REPAIR_S)):
                self._offer(local_search.plan)
                picks = tuple(local_search.plan)
            if self.peak > middle:
                low = middle
