"""Tables with sparse gradients in a strategy graph: read as they are stored, for no rows are summed over ranks."""

from __future__ import annotations

import numpy as np

from autoparallel.strategies.space import StrategySpace, TensorUse


class SparseTables:
    """``density``: by decision of a table (parameter or shared read), the share of its rows that a call looks up; empty
    where nothing is trained."""

    def __init__(self, space: StrategySpace, training: bool = True) -> None:
        self.density: dict[int, float] = {}
        tables = space.graph.sparse_tables if training else {}
        for decision in space.decisions if tables else ():
            uses = space.uses_by.get(decision.index, ())
            if decision.kind == "parameter" and decision.path in tables:
                self.density[decision.index] = tables[decision.path]
            elif decision.kind == "shared_read" and uses and uses[0].source in self.density:
                self.density[decision.index] = self.density[uses[0].source]

    def share(self, index: int, micro_batches: int = 1) -> float:
        """The share of a parameter's rows that have a gradient after so many calls; 1 where it is dense."""
        return min(1.0, micro_batches * self.density.get(index, 1.0))


def as_stored(space: StrategySpace, use: TensorUse) -> np.ndarray:
    """Whether the reader of a table takes it as it is stored; by (source strategy, target strategy)."""
    stored = space.strategy_sets[use.source].outputs[use.output]
    read = space.strategy_sets[use.target].inputs[use.position]
    return np.asarray(stored[:, None] == read[None])


__all__ = ["SparseTables", "as_stored"]
