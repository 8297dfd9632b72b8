"""A pricer made of a problem whose nodes carry labels: sub-problems by selection, nothing priced anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoparallel.errors import SearchError
from autoparallel.search.presolve import select
from autoparallel.search.problem import Label, Problem


class LabelledPricer:
    """Implements `Pricer` on one problem. The first row of an axis counts as the one that repeats the work."""

    def __init__(self, problem: Problem, axis_names: Sequence[str] | None = None) -> None:
        unlabelled = [node.name for node in problem.nodes if node.labels is None]
        if unlabelled:
            raise SearchError(f"recursive search needs a label per choice; {unlabelled[0]!r} has none")
        self._problem = problem
        self._labels: list[tuple[Label, ...]] = [node.labels or () for node in problem.nodes]
        axes = len(self._labels[0][0]) if self._labels else 0
        self.axis_names = tuple(axis_names or (f"axis{a}" for a in range(axes)))
        self._rows = [[sorted({x[a] for x in labels}) for a in range(axes)] for labels in self._labels]

    @property
    def num_nodes(self) -> int:
        return len(self._labels)

    def rows(self, node: int, axis: int) -> Sequence[int]:
        return self._rows[node][axis]

    def labels(self, node: int) -> Sequence[Label]:
        return self._labels[node]

    def repeat_row(self, node: int, axis: int) -> int:
        return self._rows[node][axis][0]

    def problem(self, allowed: Sequence[Sequence[Label]]) -> Problem:
        """The problem with exactly these labels of each node."""
        kept = []
        for labels, wanted in zip(self._labels, allowed, strict=True):
            place = {x: i for i, x in enumerate(labels)}
            kept.append(np.array([place[tuple(x)] for x in wanted], dtype=np.int64))
        return select(self._problem, kept)
