"""Tables with sparse gradients in a strategy graph: read as they are stored, for no rows are summed over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from autoparallel.errors import InfeasibleError
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


def check_read_as_stored(space: StrategySpace, tables: Iterable[int], allowed: Mapping[int, np.ndarray]) -> None:
    """Raises InfeasibleError for a table whose pins allow layouts alone in which one of its readers cannot take it."""
    stored_as = {index: space.strategy_sets[index].outputs[0][allowed[index]] for index in tables if index in allowed}
    pinned = {index: index for index in stored_as}    # by table or shared read of it, the table
    for use in space.uses if pinned else ():
        if (table := pinned.get(use.source)) is None:
            continue
        if space.decisions[use.target].kind == "shared_read":
            pinned[use.target] = table
        elif not np.isin(stored_as[table], space.strategy_sets[use.target].inputs[use.position]).any():
            path, reader = space.decisions[table].path, space.graph.nodes[space.decisions[use.target].node]
            where = f"\n  at {reader.source}" if reader.source else ""
            raise InfeasibleError(
                f"{path} is looked up as it is stored (sparse=True, or on the host), and {reader} cannot look it up as "
                f"its pin lays it out{where}\n  Rows are cut of tables whose bags are sums, or means of "
                f"bags of one length without padding_idx. Pin {path!r} by columns, Shard(1), or whole, Replicate().")


__all__ = ["SparseTables", "as_stored", "check_read_as_stored"]
