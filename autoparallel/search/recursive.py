"""Double recursion: one mesh axis after another (slowest links first), each level an exact elimination of the graph.

A level that only sees its own axis collapses to all data-parallel. Three things prevent it: each level is solved under
several guesses of what the later axes will do (nothing; the same as this one), the plans so found form a beam, and then

    re-solve     one axis at a time, the others held, until nothing improves
    recombine    each node may take its label in any plan of the beam; solved exactly, few labels per node

repeat in turn until neither helps. Every sub-problem has as many choices per node as one axis has rows, so time grows
with the sum of the axes' rows, not with their product.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from autoparallel.search.exact import Incumbent, Outcome, solve_exact, trivial_bound
from autoparallel.search.memory import memory_of
from autoparallel.search.problem import FORBIDDEN, Label, MemoryLimitError, Pricer, Problem

MAX_PASSES = 20
Labels = list[Label]


def solve_recursive(problem: Problem, pricer: Pricer, deadline: float = FORBIDDEN) -> Outcome:
    """A good plan in time linear in the axes; the lower bound is the trivial one.

    ``problem`` is the full problem, whose labels the pricer prices; plans are judged and repaired on it.
    """
    began = time.monotonic()
    search = _Recursion(problem, pricer, deadline)
    for lookahead in ("repeat", "same"):
        for order in search.orders():
            search.descend(order, lookahead)
    levels = time.monotonic() - began
    search.improve()
    seconds = {"levels": levels, "re-solve": time.monotonic() - began - levels}
    best = search.incumbent
    reason = "time limit" if time.monotonic() >= deadline else "nothing improves"
    return Outcome(best.choice, best.objective, trivial_bound(problem), reason, seconds)


class _Recursion:
    def __init__(self, problem: Problem, pricer: Pricer, deadline: float) -> None:
        self.problem, self.pricer, self.deadline = problem, pricer, deadline
        self.incumbent = Incumbent(problem, memory_of(problem), deadline)
        self.known = [tuple(pricer.labels(v)) for v in range(pricer.num_nodes)]
        self.position = [{label: i for i, label in enumerate(node.labels or ())} for node in problem.nodes]
        self.beam: list[Labels] = []

    def orders(self) -> list[tuple[int, ...]]:
        axes = tuple(range(len(self.pricer.axis_names)))
        return [axes] if len(axes) == 1 else [axes, axes[::-1]]

    def descend(self, order: Sequence[int], lookahead: str) -> None:
        """Decide axis by axis in ``order``; axes not decided yet repeat the work, or do the same as this one."""
        decided: dict[int, list[int]] = {}
        for axis in order:
            allowed = [self._level(v, axis, decided, lookahead) for v in range(self.pricer.num_nodes)]
            labels = self._solve(allowed, limited=len(decided) == len(order) - 1)
            if labels is None:
                return
            decided[axis] = [label[axis] for label in labels]
        self._offer(labels)

    def _level(self, v: int, axis: int, decided: dict[int, list[int]], lookahead: str) -> Sequence[Label]:
        """Labels of node v at this level: what was decided, any row here, a guess on the axes to come."""
        fitting = [x for x in self.known[v] if all(x[a] == rows[v] for a, rows in decided.items())]
        later = [a for a in range(len(self.pricer.axis_names)) if a != axis and a not in decided]

        def guess(label: Label, other: int) -> bool:
            if label[other] == self.pricer.repeat_row(v, other):
                return True
            return lookahead == "same" and label[other] == label[axis]

        guessed = [x for x in fitting if all(guess(x, a) for a in later)]
        return guessed or fitting or self.known[v]

    def improve(self) -> None:
        """Re-solve axes and recombine the beam until nothing improves."""
        axes = range(len(self.pricer.axis_names))
        for _ in range(MAX_PASSES):
            before = self.incumbent.objective
            for axis in axes:
                self._resolve(axis)
            self._recombine()
            if not self.incumbent.objective < before * (1 - 1e-9) or time.monotonic() >= self.deadline:
                return

    def _best(self) -> Labels | None:
        choice = self.incumbent.choice
        if choice is None:
            return None
        return [node.labels[c] for node, c in zip(self.problem.nodes, choice, strict=True)]  # type: ignore[index]

    def _resolve(self, axis: int) -> None:
        best = self._best()
        if best is None or len(self.pricer.axis_names) == 1:
            return
        allowed = [
            [x for x in known if x[:axis] == mine[:axis] and x[axis + 1 :] == mine[axis + 1 :]]
            for known, mine in zip(self.known, best, strict=True)
        ]
        self._offer(self._solve(allowed, limited=True))

    def _recombine(self) -> None:
        best = self._best()
        plans = self.beam[-6:] + ([best] if best is not None else [])
        if len(plans) > 1:
            self._offer(self._solve([list(dict.fromkeys(labels)) for labels in zip(*plans, strict=True)], limited=True))

    def _solve(self, allowed: Sequence[Sequence[Label]], limited: bool) -> Labels | None:
        """Exact answer of the problem with these labels; None when they cannot meet the memory limit."""
        part = self.pricer.problem(allowed)
        if not limited:
            part = replace(part, limit=FORBIDDEN)
        try:
            outcome = solve_exact(part, self.deadline)
        except MemoryLimitError:
            outcome = solve_exact(replace(part, limit=FORBIDDEN), self.deadline)
        if outcome.choice is None:
            return None
        return [node.labels[c] for node, c in zip(part.nodes, outcome.choice, strict=True)]  # type: ignore[index]

    def _offer(self, labels: Labels | None) -> None:
        if labels is not None:
            self.beam.append(labels)
            self.incumbent.offer(tuple(at[x] for at, x in zip(self.position, labels, strict=True)))
