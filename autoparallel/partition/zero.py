"""Storage layouts of parameters: as ops read them (ZeRO-0), or sharded over as many axes as possible (ZeRO-1 to 3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoparallel.layout import RedistributionTable
from autoparallel.layout.redistribution import ACTIONS
from autoparallel.strategies.space import StrategySpace, TensorUse


def stored_sharded(space: StrategySpace) -> dict[int, np.ndarray]:
    """The strategy numbers with the most sharded axes, by trainable parameter's decision; none along axes of one rank,
    where a shard is the whole, and its gather a copy in vain."""
    found, worth = {}, [1.0 if size > 1 else -0.1 for size in space.mesh_shape]
    for decision in space.decisions:
        s = space.strategy_sets[decision.index]
        if decision.kind == "parameter" and s.output_metas[0].requires_grad:
            sharded = np.array([sum(one for p, one in zip(s.output_layout(strategy), worth, strict=True) if p.is_shard)
                                for strategy in s.strategies])
            found[decision.index] = np.flatnonzero(sharded == sharded.max())
    return found


@dataclass(frozen=True, eq=False)
class Ungathered:
    """Penalties on gathers of parameters, for ZeRO-0 (see `pricing.Penalties`)."""

    space: StrategySpace

    def decision_penalties(self, index: int) -> np.ndarray:
        return np.zeros(len(self.space.strategy_sets[index].strategies))

    def use_penalties(self, use: TensorUse, table: RedistributionTable) -> np.ndarray:
        s, t = self.space.strategy_sets[use.source], self.space.strategy_sets[use.target]
        if self.space.decisions[use.source].kind != "parameter":
            return np.zeros((len(s.strategies), len(t.strategies)))
        gathers = table.sum_along(
            lambda axis, source, target, before, after:
            np.full(len(before), float(ACTIONS[source.kind, target.kind][0] == "all_gather"))
        )
        return np.minimum(gathers[np.ix_(s.outputs[use.output], t.inputs[use.position])], len(self.space.mesh_shape))
