"""Micro-batches in flight on a pipeline stage."""

from __future__ import annotations

from autoparallel.schedule.step_config import Hybrid
from cost_models.memory import in_flight_micro_batches
from cost_models.pipeline import warm_up


def in_flight(hybrid: Hybrid, stage: int) -> int:
    """The largest number of micro-batches whose activations a stage holds at once."""
    if hybrid.stages == 1:
        return hybrid.copies
    if hybrid.replicas:
        micro_batches = hybrid.micro_batches_on(stage)
        return micro_batches if hybrid.pipelining.all_forwards else min(warm_up(hybrid.replicas, stage), micro_batches)
    ranks, count = hybrid.pipeline_ranks, hybrid.stages // hybrid.pipeline_ranks
    chunk, rank = divmod(stage, ranks)
    held = in_flight_micro_batches(hybrid.pipelining.held, rank, ranks, hybrid.micro_batches, count)
    micro_batches = min(ranks, hybrid.micro_batches)  # run by one stage of the rank before the next of its stages
    rounds, rest = divmod(held, count * micro_batches)
    return rounds * micro_batches + min(max(rest - chunk * micro_batches, 0), micro_batches)
