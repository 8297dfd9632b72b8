"""Plans for tests: drawn at random from the whole strategy space, or with recompute of some blocks."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

from autoparallel.partition import split_batch
from autoparallel.planning.one_mesh import Options, plan_on
from autoparallel.plans import Evidence, Hybrid, Plan, Prediction
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster
from tests.support.captured import graph_of
from tests.support.models import ModelCase


@functools.cache
def _space(case: ModelCase, mesh_shape: tuple[int, ...], axis_names: tuple[str, ...], batch_size: int) -> StrategySpace:
    return StrategySpace(graph_of(case.name, batch_size), mesh_shape, axis_names)


def random_plan(case: ModelCase, mesh_shape: Sequence[int], axis_names: Sequence[str], seed: int,
                batch_size: int = 8) -> Plan:
    """Every decision takes any of its strategies; the same plan on every rank."""
    space = _space(case, tuple(mesh_shape), tuple(axis_names), batch_size)
    draw = random.Random(seed)
    strategies = {
        decision.name: s.names(draw.choice(s.strategies))
        for decision, s in zip(space.decisions, space.strategy_sets, strict=True)
    }
    nothing = Prediction(0, 0, 0, 0, 0, 0, 0, 0)
    return Plan(space.graph.fingerprint, space.mesh_shape, space.axis_names, strategies, "none",
                Evidence("drawn", 0, 0, 0, f"seed {seed}"), nothing)


def half_recomputed(case: ModelCase, mesh_shape: tuple[int, ...], micro_batches: int = 1, stages: int = 1) -> Plan:
    """The best plan that recomputes the first of the model's two blocks; of several stages the mesh's first axis is
    the pipeline's."""
    micro = split_batch(graph_of(case.name), micro_batches)
    hybrid = Hybrid(micro_batches, stages, stages, recompute="full", recompute_blocks=("model.layers.0",),
                    zero_stage=2 if micro_batches == 1 else 1)
    inner, names = (mesh_shape, ("x", "y", "z")) if stages == 1 else (mesh_shape[1:], ("y", "z"))
    return plan_on(micro, Cluster.load("local-cpu", num_devices=4), inner, names[: len(inner)],
                    Options(memory_limit_bytes=float("inf")), hybrid)
