"""Send and receive buffers of pipeline stages: how many copies of each value that crosses a cut a stage holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from autoparallel.schedule.step_config import as_rounds
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
    received for them, of values received and of the gradients sent for them). A replicated stage has one in each
    direction."""
    h, held = counts.hybrid, counts.in_flight[stage]
    if h.replicas:
        return (1, 1) if h.micro_batches_on(stage) > held else (0, 0)
    sent, received = h.pipelining.pending(as_rounds(h), stage, held // h.copies, counts.deferred_of(stage))
    return h.copies * sent, h.copies * received
