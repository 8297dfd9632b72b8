"""Micro-batches in flight on a pipeline stage."""

from __future__ import annotations

from autoparallel.schedule.step_config import Hybrid
from cost_models.memory import in_flight_micro_batches
from cost_models.pipeline import warm_up

#: Names of `Hybrid.schedule` in `cost_models.memory`.
SCHEDULES = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "interleaved-1f1b", "zero_bubble": "zero-bubble"}


def in_flight(hybrid: Hybrid, stage: int) -> int:
    """The largest number of micro-batches whose activations a stage holds at once."""
    if hybrid.stages == 1:
        return hybrid.copies
    if hybrid.replicas:
        micro_batches = hybrid.micro_batches_on(stage)
        return micro_batches if hybrid.schedule == "gpipe" else min(warm_up(hybrid.replicas, stage), micro_batches)
    ranks, count = hybrid.pipeline_ranks, hybrid.stages // hybrid.pipeline_ranks
    chunk, rank = divmod(stage, ranks)
    held = in_flight_micro_batches(SCHEDULES[hybrid.schedule], rank, ranks, hybrid.micro_batches, count)
    micro_batches = min(ranks, hybrid.micro_batches)  # run by one stage of the rank before the next of its stages
    rounds, rest = divmod(held, count * micro_batches)
    return rounds * micro_batches + min(max(rest - chunk * micro_batches, 0), micro_batches)
