"""Micro-batches in flight on a pipeline stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from autoparallel.schedule.step_config import Hybrid, as_rounds


def in_flight(hybrid: Hybrid, stage: int) -> int:
    """Micro-batches whose activations a stage holds when its rank holds most; without a pipeline, how many run at a
    time."""
    rounds = as_rounds(hybrid)
    return hybrid.copies * (1 if hybrid.stages == 1 else hybrid.pipelining.in_flight(rounds, stage))


def in_flight_by_bytes(hybrid: Hybrid, saved_bytes: Sequence[float]) -> list[int]:
    """By stage, the micro-batches whose activations it holds when its rank holds most bytes; of several such moments,
    at that of most micro-batches. ``saved_bytes``: by stage, of one micro-batch's activations. Where gradients of
    weights are put off, always at that of most micro-batches, to which `Schedule.deferred` belongs.

        >>> step = Hybrid(micro_batches=8, stages=4, pipeline_ranks=2, schedule="interleaved")
        >>> [in_flight(step, stage) for stage in range(4)], in_flight_by_bytes(step, [6.0, 1.0, 1.0, 6.0])
        ([3, 2, 2, 1], [4, 2, 1, 1])
    """
    found = [in_flight(hybrid, stage) for stage in range(hybrid.stages)]
    how = hybrid.pipelining
    for rank in range(hybrid.pipeline_ranks if how.several_stages and not how.splits_backward else 0):
        stages = hybrid.stages_of(rank)
        sizes = [saved_bytes[stage] for stage in stages]
        if min(sizes) < max(sizes):
            held = max([[found[stage] for stage in stages], *_moments(hybrid, rank)], key=lambda moment: sum(
                size * count for size, count in zip(sizes, moment, strict=True)))
            for stage, count in zip(stages, held, strict=True):
                found[stage] = count
    return found


@lru_cache(256)
def _moments(hybrid: Hybrid, rank: int) -> tuple[tuple[int, ...], ...]:
    """The micro-batches in flight on each stage of a rank, after every forward of a step (each combination once)."""
    stages, held, found = hybrid.stages_of(rank), Counter[int](), dict[tuple[int, ...], None]()
    for kind, at, _ in hybrid.pipelining.order(as_rounds(hybrid), rank):
        held[at] += hybrid.copies * ((kind == "F") - (kind == "B"))
        if kind == "F":
            found[tuple(held[stage] for stage in stages)] = None
    return tuple(found)
