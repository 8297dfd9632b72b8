"""Micro-batches in flight on a pipeline stage."""

from __future__ import annotations

from autoparallel.schedule.step_config import Hybrid


def in_flight(hybrid: Hybrid, stage: int) -> int:
    """Micro-batches whose activations a stage holds when its rank holds most; without a pipeline, how many run at a
    time."""
    return hybrid.copies if hybrid.stages == 1 else hybrid.pipelining.in_flight(hybrid, stage)
