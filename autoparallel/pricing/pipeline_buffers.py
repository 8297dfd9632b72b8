"""Send and receive buffers of pipeline stages: how many copies of each value that crosses a cut a stage holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from autoparallel.strategies.space import TensorUse

if TYPE_CHECKING:
    from autoparallel.pricing.counts import ExecutionCounts


class Buffer(NamedTuple):
    """Send and receive buffers on a stage: ``copies`` of the value that ``use`` reads."""

    use: TensorUse
    stage: int
    copies: int


def stage_buffers(counts: ExecutionCounts) -> tuple[Buffer, ...]:
    """The buffers of every value that crosses a cut, on each stage that sends or receives it.

    One per micro-batch in flight, plus pending ones (`_pending`). A stage that forwards a value has both kinds.
    """
    crossing = sorted((k for k in counts.space.uses if counts.crosses(k)), key=lambda k: counts.stages_of[k.target])
    last = {(k.source, k.output): k for k in crossing}
    found = []
    for use in last.values():
        first, end = counts.stages_of[use.source][0], counts.stages_of[use.target][0]
        for stage in range(first, end + 1):
            sent, received = _pending(counts, stage)
            held = counts.in_flight[stage]
            copies = (stage < end) * (held + sent) + (stage > first) * (held + received)
            found.append(Buffer(use, stage, copies))
    return tuple(found)


def _pending(counts: ExecutionCounts, stage: int) -> tuple[int, int]:
    """The largest number of buffers beyond those of micro-batches in flight: (of values sent and of the gradients
    received for them, of values received and of the gradients sent for them).

    In its steady state torch's 1F1B keeps the last message of each kind until the next. Of the interleaved stages
    of a rank one has a message pending; a replicated stage has one in each direction. A zero-bubble stage keeps the
    output gradients of deferred weight gradients.
    """
    h, ranks = counts.hybrid, counts.hybrid.pipeline_ranks
    rank, again = stage % ranks, h.micro_batches > ranks
    if h.replicas:
        return (1, 1) if h.micro_batches_on(stage) > counts.in_flight[stage] else (0, 0)
    if h.schedule == "1f1b":
        return (2, 1) if h.micro_batches > counts.in_flight[stage] else (0, 0)
    if h.schedule == "interleaved":
        return int(stage == rank and (again or rank > 0)), (1 + again) * (stage >= h.stages - ranks and rank > 0)
    if h.schedule == "zero_bubble":
        return counts.late_of(stage) + (rank == 0 and again), int(stage >= h.stages - ranks and rank > 0)
    if h.schedule == "gpipe":
        return 0, 0
    raise NotImplementedError(f"schedule {h.schedule!r}: say here which buffers are pending in it")
