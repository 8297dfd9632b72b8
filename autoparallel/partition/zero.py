"""Where parameters are stored: as ops read them (ZeRO-0), or each in as many pieces as it can be cut into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoparallel.layout import RedistributionTable
from autoparallel.layout.redistribution import ACTIONS
from autoparallel.strategies.space import Link, StrategySpace


def stored_in_pieces(space: StrategySpace) -> dict[int, np.ndarray]:
    """For each parameter that learns, its choices with the most axes sharded."""
    found = {}
    for site in space.sites:
        s = space.strategies[site.index]
        if site.kind == "parameter" and s.output_metas[0].requires_grad:
            sharded = np.array([sum(p.is_shard for p in s.output_layout(label)) for label in s.labels])
            found[site.index] = np.flatnonzero(sharded == sharded.max())
    return found


@dataclass(frozen=True, eq=False)
class Ungathered:
    """Faults of gathering a parameter (see `pricing.Faults`): it is stored as the ops read it."""

    space: StrategySpace

    def site_faults(self, index: int) -> np.ndarray:
        return np.zeros(len(self.space.strategies[index].labels))

    def link_faults(self, link: Link, table: RedistributionTable) -> np.ndarray:
        s, t = self.space.strategies[link.source], self.space.strategies[link.target]
        if self.space.sites[link.source].kind != "parameter":
            return np.zeros((len(s.labels), len(t.labels)))
        gathers = table.sum_along(
            lambda axis, source, target, before, after:
            np.full(len(before), float(ACTIONS[source.kind, target.kind][0] == "all_gather"))
        )
        return np.minimum(gathers[np.ix_(s.outputs[link.output], t.inputs[link.position])], len(self.space.mesh_shape))
