"""The pipeline schedules: for each the order of its actions, its memory, its limits and its names, in one table.

All other rooms ask `SCHEDULES`, by `Hybrid.pipelining`; none knows a schedule by its name.

    >>> SCHEDULES["zero_bubble"].title, SCHEDULES["zero_bubble"].splits_backward
    ('zero bubble', True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cost_models.pipeline import order, warm_up

if TYPE_CHECKING:
    from autoparallel.schedule.step_config import Hybrid

#: Forward ("F"), backward ("B") or gradients of weights ("W"), with the stage and the micro-batch.
Action = tuple[str, int, int]
#: Of values sent and the gradients received for them; of values received and the gradients sent for them.
Buffers = tuple[int, int]


@dataclass(frozen=True)
class Schedule:
    """One pipeline schedule.

    ``name``: as options and plan files have it. ``title``: in reports. ``torch_name``: of the class in
    torch.distributed.pipelining, without "Schedule"; torchtitan's name is the same.

    ``order(hybrid, rank)``: the actions of a rank of the pipeline axis, in order. ``several_stages``: a rank runs one
    stage or more, and micro-batches in rounds of as many as the pipeline has ranks; else one stage. ``all_forwards``:
    all forwards run before the first backward. ``fills``: needs as many micro-batches as stages. ``splits_backward``:
    the gradients of weights come later than those of inputs. ``bubble_parts``: the bubble is divided by this.

    ``held``: its name in `cost_models.memory.in_flight_micro_batches`. ``pending(hybrid, stage, in_flight, late)``: the
    largest number of send and receive buffers beyond those of micro-batches in flight, of a stage that has so many in
    flight and puts off the weight gradients of ``late``.

    ``searched``: joint searches try it. ``frameworks``: of "megatron" and "deepspeed" those that have it.
    """

    name: str
    title: str
    torch_name: str
    order: Callable[[Hybrid, int], Iterator[Action]]
    held: str
    pending: Callable[[Hybrid, int, int, int], Buffers]
    several_stages: bool = False
    all_forwards: bool = False
    fills: bool = False
    splits_backward: bool = False
    bubble_parts: int = 1
    searched: bool = True
    frameworks: frozenset[str] = frozenset()

    @property
    def torch_class(self) -> str:
        """The name of the class in torch.distributed.pipelining."""
        return f"Schedule{self.torch_name}"


# ------------------------------------------------------------------------------------------------------------- orders


def _all_forwards_first(hybrid: Hybrid, rank: int) -> Iterator[Action]:
    (stage, *_), micro_batches = hybrid.stages_of(rank), hybrid.micro_batches_of(rank)
    yield from (("F", stage, micro) for micro in micro_batches)
    yield from (("B", stage, micro) for micro in micro_batches)


def _one_forward_one_backward(hybrid: Hybrid, rank: int) -> Iterator[Action]:
    (stage, *_), micro_batches = hybrid.stages_of(rank), hybrid.micro_batches_of(rank)
    yield from ((kind, stage, micro) for kind, micro in order(warm_up(hybrid.groups, stage), micro_batches))


def _interleaved(hybrid: Hybrid, rank: int) -> Iterator[Action]:
    """Interleaved 1F1B (Narayanan et al. 2021): micro-batches in rounds, each through all of a rank's stages."""
    yield from _in_rounds(hybrid, rank, hybrid.stages_of(rank), late=False)


def _zero_bubble(hybrid: Hybrid, rank: int) -> Iterator[Action]:
    """ZB-H1 (Qi et al. 2023): as interleaved; the gradients of weights come later, in the order of backward."""
    yield from _in_rounds(hybrid, rank, hybrid.stages_of(rank), late=True)


def _in_rounds(hybrid: Hybrid, rank: int, own: Sequence[int], late: bool) -> Iterator[Action]:
    ranks, count, chunks = hybrid.pipeline_ranks, hybrid.micro_batches, len(own)
    per_round = count // max(1, count // ranks)
    total = count * chunks
    warm = min(total, (chunks - 1) * per_round + (1 if late else 2) * (ranks - 1 - rank))

    def action(kind: str, step: int) -> Action:
        chunk, within = step // per_round % chunks, step % per_round
        micro = step // (per_round * chunks) * per_round + within
        return kind, own[chunk if kind == "F" else chunks - 1 - chunk], micro

    yield from (action("F", step) for step in range(warm))
    for step in range(total):
        if warm + step < total:
            yield action("F", warm + step)
        yield action("B", step)
        if late and step >= rank:
            yield ("W", *action("B", step - rank)[1:])
    for step in range(max(0, total - rank), total) if late else ():
        yield ("W", *action("B", step)[1:])


# ------------------------------------------------------------------------------------------------------------ buffers


def _none_pending(hybrid: Hybrid, stage: int, in_flight: int, late: int) -> Buffers:
    return 0, 0


def _last_of_each_kind(hybrid: Hybrid, stage: int, in_flight: int, late: int) -> Buffers:
    """In its steady state torch's 1F1B keeps the last message of each kind until the next."""
    return (2, 1) if hybrid.micro_batches > in_flight else (0, 0)


def _one_of_a_rank(hybrid: Hybrid, stage: int, in_flight: int, late: int) -> Buffers:
    """Of the interleaved stages of a rank one has a message pending."""
    ranks = hybrid.pipeline_ranks
    rank, again = stage % ranks, hybrid.micro_batches > ranks
    last = stage >= hybrid.stages - ranks and rank > 0
    return int(stage == rank and (again or rank > 0)), (1 + again) * last


def _of_late_weights(hybrid: Hybrid, stage: int, in_flight: int, late: int) -> Buffers:
    """A zero-bubble stage keeps the output gradients of deferred weight gradients."""
    ranks = hybrid.pipeline_ranks
    rank, again = stage % ranks, hybrid.micro_batches > ranks
    return late + (rank == 0 and again), int(stage >= hybrid.stages - ranks and rank > 0)


# -------------------------------------------------------------------------------------------------------------- table

#: By name; joint searches try them in this order.
SCHEDULES = {schedule.name: schedule for schedule in (
    Schedule("1f1b", "1F1B", "1F1B", _one_forward_one_backward, "1f1b", _last_of_each_kind, fills=True,
             frameworks=frozenset({"megatron", "deepspeed"})),
    Schedule("gpipe", "GPipe", "GPipe", _all_forwards_first, "gpipe", _none_pending, all_forwards=True, searched=False),
    Schedule("zero_bubble", "zero bubble", "InterleavedZeroBubble", _zero_bubble, "zero-bubble", _of_late_weights,
             several_stages=True, splits_backward=True, bubble_parts=3),
    Schedule("interleaved", "interleaved 1F1B", "Interleaved1F1B", _interleaved, "interleaved-1f1b", _one_of_a_rank,
             several_stages=True, frameworks=frozenset({"megatron"})),
)}


def usual(stages_per_rank: int = 1) -> str:
    """The name of the schedule that is taken where none is asked for."""
    return "interleaved" if stages_per_rank > 1 else "1f1b"


__all__ = ["SCHEDULES", "Action", "Schedule", "usual"]
