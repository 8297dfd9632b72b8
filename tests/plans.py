"""Plans for tests: drawn at random from the whole strategy space."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

from autoparallel.capture import capture
from autoparallel.plans import Evidence, Plan, Prediction
from autoparallel.rules.space import StrategySpace
from tests.models import ModelCase


@functools.cache
def _space(case: ModelCase, mesh_shape: tuple[int, ...], axis_names: tuple[str, ...], batch_size: int) -> StrategySpace:
    args, kwargs = case.inputs(batch_size)
    return StrategySpace(capture(case.build(), args, kwargs), mesh_shape, axis_names)


def random_plan(case: ModelCase, mesh_shape: Sequence[int], axis_names: Sequence[str], seed: int,
                batch_size: int = 8) -> Plan:
    """Every site takes any of its strategies; the same plan on every rank."""
    space = _space(case, tuple(mesh_shape), tuple(axis_names), batch_size)
    draw = random.Random(seed)
    strategies = {
        site.name: s.names(draw.choice(s.labels)) for site, s in zip(space.sites, space.strategies, strict=True)
    }
    nothing = Prediction(0, 0, 0, 0, 0, 0, 0, 0)
    return Plan(space.graph.fingerprint, space.mesh_shape, space.axis_names, strategies, "none",
                Evidence("drawn", 0, 0, 0, f"seed {seed}"), nothing)
