"""Plans for tests: drawn at random from the whole strategy space."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import nn

from autoparallel.capture import capture
from autoparallel.plans import Evidence, Plan, Prediction
from autoparallel.rules.space import StrategySpace
from tests.models import ModelCase


def random_plan(case: ModelCase, model: nn.Module, mesh_shape: Sequence[int], axis_names: Sequence[str], seed: int,
                batch_size: int = 8) -> Plan:
    """Every site takes any of its strategies; the same plan on every rank."""
    args, kwargs = case.inputs(batch_size)
    space = StrategySpace(capture(model, args, kwargs), mesh_shape, axis_names)
    draw = random.Random(seed)
    strategies = {
        site.name: s.names(draw.choice(s.labels)) for site, s in zip(space.sites, space.strategies, strict=True)
    }
    nothing = Prediction(0, 0, 0, 0, 0, 0, 0, 0)
    return Plan(space.graph.fingerprint, tuple(mesh_shape), tuple(axis_names), strategies, "none",
                Evidence("drawn", 0, 0, 0, f"seed {seed}"), nothing)
