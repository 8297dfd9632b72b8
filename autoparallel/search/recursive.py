"""Double recursion: mesh axes from the slowest links to the fastest, and on each level the operator graph, exactly.

Outer recursion: one axis is decided at a time. What the axes below it will do is not known yet, so each level is solved
under several lookaheads ("they repeat the work", "they do the same as this axis", "they do what is cheapest by
itself"), and the best few plans are kept (the beam): looking at one level alone collapses to all data-parallel. Then
each axis, and each pair of axes where that is cheap, is solved again given the others, until nothing improves.
Inner recursion: a level's problem has one choice per row of one axis, and is decomposed and solved by elimination.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoparallel.search.elimination import Eliminator
from autoparallel.search.exact import Incumbent, affordable, solve_exact
from autoparallel.search.lagrange import raise_bound
from autoparallel.search.memory import least_peak, memory_of
from autoparallel.search.problem import FORBIDDEN, Label, MemoryLimitError, Pricer, Problem, evaluate

BEAM = 4
ROUNDS = 12
LEVEL_GAP = 1e-4
PAIR_WORK_CELLS = 2e9
POLISHED = 2
Plan = tuple[Label, ...]


@dataclass(frozen=True)
class State:
    """A whole plan with its rank: bytes over the limit first, then seconds."""

    rank: tuple[float, float]
    plan: Plan


class Recursion:
    """The search over one pricer; every state on the way is a plan for all axes."""

    def __init__(self, pricer: Pricer, deadline: float) -> None:
        self.pricer, self.deadline = pricer, deadline
        self.num_axes = len(pricer.axis_names)
        shared: dict[tuple[Label, ...], tuple[Label, ...]] = {}
        self._labels = [shared.setdefault(labels, labels) for labels
                        in (tuple(pricer.labels(v)) for v in range(pricer.num_nodes))]
        self._same_rows: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[Label, ...]] = {}
        self._closest: dict[tuple[int, Label, int], Label | None] = {}
        self.memory_bound = False
        self._wanted: list[dict[Label, None]] = [{} for _ in self._labels]

    def closest(self, v: int, wanted: Label, num_fixed: int) -> Label | None:
        """The label with ``wanted``'s rows on the first axes that agrees most on the others; ties by position."""
        labels = self._labels[v]
        key = id(labels), wanted, num_fixed
        if key not in self._closest:
            fits = [label for label in labels if label[:num_fixed] == wanted[:num_fixed]]
            agrees = [sum(x == y for x, y in zip(label, wanted, strict=True)) for label in fits]
            self._closest[key] = fits[agrees.index(max(agrees))] if fits else None
        return self._closest[key]

    def solve_allowed(self, allowed: Sequence[Sequence[Label]]) -> State | None:
        """The best plan of a restricted problem, None when it has none; memory by prices and repair."""
        problem = self.pricer.problem(allowed)
        eliminator = Eliminator.of(problem)
        if not affordable(eliminator, problem, PAIR_WORK_CELLS):
            return None
        memory = memory_of(problem if problem.limit == FORBIDDEN
                           else replace(problem, limit=max(problem.limit, least_peak(problem))))
        incumbent = Incumbent(problem, memory, self.deadline)
        self.memory_bound |= memory.binds
        dual = raise_bound(problem, memory, eliminator.solve, self.deadline, ROUNDS, incumbent.offer, LEVEL_GAP)
        plans = [*dual.plans, *([incumbent.choice] if incumbent.choice else [])]
        for plan in plans:
            for wanted, labels, pick in zip(self._wanted, allowed, plan, strict=True):
                wanted[labels[pick]] = None
        ranked = [(self._rank(problem, plan), plan) for plan in plans]
        if not ranked:
            return None
        rank, choice = min(ranked)
        if rank[1] == FORBIDDEN:
            return None
        return State(rank, tuple(labels[i] for labels, i in zip(allowed, choice, strict=True)))

    @staticmethod
    def _rank(problem: Problem, choice: Sequence[int]) -> tuple[float, float]:
        judged = evaluate(problem, choice)
        return max(0.0, judged.peak_bytes - problem.limit), judged.objective

    def level(self, axis: int, plan: Plan | None, lookahead: str) -> State | None:
        """Decide ``axis``; axes above it are as in ``plan``, axes below it follow the lookahead."""
        allowed = []
        for v in range(self.pricer.num_nodes):
            above = plan[v][:axis] if plan is not None else ()
            found: dict[Label, None] = {} if plan is None else {plan[v]: None}
            for row in self.pricer.rows(v, axis):
                below = tuple(row if lookahead == "same" else self.pricer.repeat_row(v, a)
                              for a in range(axis + 1, self.num_axes))
                label = self.closest(v, (*above, row, *below), axis + 1)
                if label is not None:
                    found[label] = None
            allowed.append(tuple(found))
        return self.solve_allowed(allowed)

    def descend_axes(self) -> list[State]:
        """The outer recursion: best few plans, all axes decided."""
        beam: list[State | None] = [None]
        for axis in range(self.num_axes):
            lookaheads = ("repeat", "same") if axis + 1 < self.num_axes else ("repeat",)
            found: dict[Plan, State] = {}
            for state, lookahead in itertools.product(beam, lookaheads):
                new = self.level(axis, state.plan if state else None, lookahead)
                for candidate in (new, state):
                    if candidate is not None:
                        found.setdefault(candidate.plan, candidate)
                if time.monotonic() >= self.deadline and found:
                    break
            if not found:
                return []
            beam = [*sorted(found.values(), key=lambda state: state.rank)[:BEAM]]
        return [state for state in beam if state is not None]

    def _agreeing(self, v: int, label: Label, fixed: tuple[int, ...]) -> tuple[Label, ...]:
        """The node's labels with the same rows on the fixed axes."""
        rows = tuple(label[a] for a in fixed)
        key = id(self._labels[v]), fixed, rows
        if key not in self._same_rows:
            self._same_rows[key] = tuple(x for x in self._labels[v] if tuple(x[a] for a in fixed) == rows)
        return self._same_rows[key]

    def resolve(self, state: State, axes: Sequence[int]) -> State:
        """Decide these axes again, the others as they are; never worse."""
        fixed = tuple(a for a in range(self.num_axes) if a not in axes)
        allowed = [self._agreeing(v, label, fixed) for v, label in enumerate(state.plan)]
        new = self.solve_allowed(allowed)
        return min(state, new, key=lambda s: s.rank) if new is not None else state

    def together(self, state: State) -> State:
        """Decide all axes at once among the labels that any level wanted at any price of memory; never worse."""
        for wanted, label in zip(self._wanted, state.plan, strict=True):
            wanted[label] = None
        allowed = [tuple(wanted) for wanted in self._wanted]
        problem = self.pricer.problem(allowed)
        eliminator = Eliminator.of(problem)
        if not affordable(eliminator, problem, PAIR_WORK_CELLS):
            return state
        try:
            found = solve_exact(problem, self.deadline, eliminator, lambda better: None, LEVEL_GAP)
        except MemoryLimitError:
            return state
        if found.choice is None:
            return state
        plan = tuple(labels[pick] for labels, pick in zip(allowed, found.choice, strict=True))
        return min(state, State(self._rank(problem, found.choice), plan), key=lambda s: s.rank)

    def polish(self, state: State, size: int) -> State:
        """Coordinate descent over groups of ``size`` axes until each was tried since the last improvement."""
        groups = list(itertools.combinations(range(self.num_axes), size))
        idle = 0
        for axes in itertools.cycle(groups):
            if idle == len(groups) or time.monotonic() >= self.deadline:
                return state
            new = self.resolve(state, axes)
            idle = 1 if new.rank < state.rank else idle + 1
            state = new
        return state


def search_axes(pricer: Pricer, deadline: float = FORBIDDEN) -> tuple[int, ...] | None:
    """The best plan found, as positions in each node's `labels`; None when none is allowed. It may exceed the limit.

    Per axis: a few eliminations with as many choices per node as the axis has rows; then coordinate descent.
    """
    search = Recursion(pricer, deadline)
    states = search.descend_axes()
    if not states:
        whole = search.solve_allowed([tuple(pricer.labels(v)) for v in range(pricer.num_nodes)])
        states = [whole] if whole is not None else []
    if not states:
        return None
    best = min((search.polish(state, 1) for state in states[:POLISHED]), key=lambda state: state.rank)
    if search.num_axes > 2:
        best = search.polish(best, 2)
    if search.memory_bound:
        best = search.together(best)
    return tuple(tuple(pricer.labels(v)).index(label) for v, label in enumerate(best.plan))
