"""A pricer made of a problem whose nodes have strategies: sub-problems by selection, nothing priced anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoparallel.errors import SearchError
from autoparallel.search.model.dominance import select
from autoparallel.search.model.problem import Pricer, Problem, Strategy


class ProblemPricer:
    """Implements `Pricer` on one problem; nodes without strategies get one axis, whose strategies are their choices.

    Which row repeats the work is asked of another pricer where there is one; else it is a node's first.
    """

    def __init__(self, problem: Problem, pricer: Pricer | None = None) -> None:
        self._problem = problem
        self._strategies = [node.strategies or tuple((i,) for i in range(len(node.costs))) for node in problem.nodes]
        widths = sorted({len(strategy) for strategies in self._strategies for strategy in strategies}) or [1]
        if len(widths) > 1:
            raise SearchError(f"{problem.name}: strategies have {widths} axes; those of all nodes must have the same")
        self._pricer = pricer if pricer is not None and len(pricer.axis_names) == widths[0] else None
        self.axis_names = (self._pricer.axis_names if self._pricer is not None
                           else tuple(f"axis{a}" for a in range(widths[0])))
        self._rows = [
            [sorted({strategy[a] for strategy in strategies}) for a in range(widths[0])]
            for strategies in self._strategies
        ]
        self._place = [{strategy: i for i, strategy in enumerate(strategies)} for strategies in self._strategies]

    @property
    def num_nodes(self) -> int:
        return len(self._strategies)

    def axis_strategies(self, node: int, axis: int) -> Sequence[int]:
        return self._rows[node][axis]

    def strategies(self, node: int) -> Sequence[Strategy]:
        return self._strategies[node]

    def repeat_strategy(self, node: int, axis: int) -> int:
        known = self._pricer is not None and node < self._pricer.num_nodes
        return self._pricer.repeat_strategy(node, axis) if known and self._pricer else self._rows[node][axis][0]

    def problem(self, allowed: Sequence[Sequence[Strategy]]) -> Problem:
        """The problem with exactly these strategies of each node."""
        return select(self._problem, [np.array([place[strategy] for strategy in strategies], np.int64)
                                      for place, strategies in zip(self._place, allowed, strict=True)])
