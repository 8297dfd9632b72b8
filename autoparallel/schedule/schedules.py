"""The pipeline schedules: for each the order of its actions, its memory, its limits and its names, in one table.

All other rooms ask `SCHEDULES`, by `Hybrid.pipelining`; none knows a schedule by its name.

    >>> SCHEDULES["zero_bubble"].title, SCHEDULES["zero_bubble"].splits_backward
    ('zero bubble', True)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoparallel.schedule.step_config import Hybrid

#: Forward ("F"), backward ("B") or gradients of weights ("W"), with the stage and the micro-batch.
Action = tuple[str, int, int]
#: Of values sent and the gradients received for them; of values received and the gradients sent for them.
Buffers = tuple[int, int]


def counted_in_flight(hybrid: Hybrid, stage: int) -> int:
    """The micro-batches whose activations a stage holds, from their forward to the last part of their backward, when
    its rank holds most of all its stages; counted in the rank's order of actions."""
    how, rank = hybrid.pipelining, hybrid.ranks_of(stage)[0]
    last, held, most, found = "W" if how.splits_backward else "B", Counter[int](), 0, 0
    for kind, at, _ in how.order(hybrid, rank):
        held[at] += (kind == "F") - (kind == last)
        if held.total() > most:
            most, found = held.total(), held[stage]
    return found


@dataclass(frozen=True)
class Schedule:
    """One pipeline schedule.

    ``name``: as options and plan files have it. ``title``: in reports. ``torch_name``: of the class in
    torch.distributed.pipelining, without "Schedule"; torchtitan's name is the same.

    ``order(hybrid, rank)``: the actions of a rank of the pipeline axis, in order. ``several_stages``: a rank runs one
    stage or more; else one. ``in_rounds``: micro-batches go in equal rounds of as many as the pipeline has ranks, or
    more. ``fills``: needs as many micro-batches as stages. ``all_forwards``: all forwards run before the first
    backward. ``splits_backward``: the gradients of weights come later than those of inputs, in actions "W".
    ``bubble_parts``: the pipeline's bubble in seconds is that of 1F1B divided by this, and by the stages per rank.

    ``in_flight(hybrid, stage)``: micro-batches whose activations the stage holds when its rank holds most, in closed
    form; left out, `counted_in_flight`. ``deferred(hybrid, stage)``: micro-batches whose weight gradients
    the stage puts off at most. ``pending(hybrid, stage, in_flight, deferred)``: the largest number of send and receive
    buffers beyond those of micro-batches in flight, of a stage with so many in flight and deferred.

    ``searched``: joint searches try it. ``frameworks``: of "megatron" and "deepspeed" those that have it.
    """

    name: str
    title: str
    torch_name: str
    order: Callable[[Hybrid, int], Iterator[Action]]
    in_flight: Callable[[Hybrid, int], int] = counted_in_flight
    deferred: Callable[[Hybrid, int], int] = lambda hybrid, stage: 0
    pending: Callable[[Hybrid, int, int, int], Buffers] = lambda hybrid, stage, in_flight, deferred: (0, 0)
    several_stages: bool = False
    in_rounds: bool = False
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
    from cost_models.pipeline import order, warm_up  # not above: the command line shows names without numpy

    (stage, *_), micro_batches = hybrid.stages_of(rank), hybrid.micro_batches_of(rank)
    yield from ((kind, stage, micro) for kind, micro in order(warm_up(hybrid.groups, stage), micro_batches))


def _per_round(hybrid: Hybrid) -> int:
    """Micro-batches that a stage of a rank runs before the rank's next stage begins."""
    return hybrid.micro_batches // max(1, hybrid.micro_batches // hybrid.pipeline_ranks)


def _first_forwards(hybrid: Hybrid, rank: int, late: bool) -> int:
    """Forwards of a rank before its first backward, of all its stages."""
    chunks, later = hybrid.stages // hybrid.pipeline_ranks, hybrid.pipeline_ranks - 1 - rank
    return min(hybrid.micro_batches * chunks, (chunks - 1) * _per_round(hybrid) + (1 if late else 2) * later)


def _in_rounds(hybrid: Hybrid, rank: int, late: bool) -> Iterator[Action]:
    """Interleaved 1F1B (Narayanan et al. 2021): micro-batches in rounds, each through all of a rank's stages. ``late``:
    as ZB-H1 (Qi et al. 2023), the gradients of weights come later, in the order of backward."""
    own, per_round = hybrid.stages_of(rank), _per_round(hybrid)
    chunks = len(own)
    total, warm = hybrid.micro_batches * chunks, _first_forwards(hybrid, rank, late)

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


# ------------------------------------------------------------------------------------------------- memory and buffers


def _all(hybrid: Hybrid, stage: int) -> int:
    return hybrid.micro_batches_on(stage)


def _warm_up(hybrid: Hybrid, stage: int) -> int:
    from cost_models.pipeline import warm_up

    return min(warm_up(hybrid.groups, stage), hybrid.micro_batches_on(stage))


def _in_flight_of_rounds(hybrid: Hybrid, stage: int, late: bool) -> int:
    """A rank is fullest after its first forwards and one more. With ZB-H1 (``late``) it then holds those as well whose
    weight gradients it puts off. Of a round, its first stage has all micro-batches before the next one has any."""
    ranks, chunks, per_round = hybrid.pipeline_ranks, hybrid.stages // hybrid.pipeline_ranks, _per_round(hybrid)
    chunk, rank = divmod(stage, ranks)
    held = min(_first_forwards(hybrid, rank, late) + 1 + late * rank, hybrid.micro_batches * chunks)
    rounds, rest = divmod(held, chunks * per_round)
    return rounds * per_round + min(max(rest - chunk * per_round, 0), per_round)


def _of_earlier_ranks(hybrid: Hybrid, stage: int) -> int:
    """A rank of ZB-H1 puts off the weight gradients of as many micro-batches as ranks are before it."""
    return min(stage % hybrid.pipeline_ranks, hybrid.micro_batches)


def _last_of_each_kind(hybrid: Hybrid, stage: int, in_flight: int, deferred: int) -> Buffers:
    """In its steady state torch's 1F1B keeps the last message of each kind until the next."""
    return (2, 1) if hybrid.micro_batches > in_flight else (0, 0)


def _one_of_a_rank(hybrid: Hybrid, stage: int, in_flight: int, deferred: int) -> Buffers:
    """Of the interleaved stages of a rank one has a message pending."""
    ranks = hybrid.pipeline_ranks
    rank, again = stage % ranks, hybrid.micro_batches > ranks
    last = stage >= hybrid.stages - ranks and rank > 0
    return int(stage == rank and (again or rank > 0)), (1 + again) * last


def _of_deferred(hybrid: Hybrid, stage: int, in_flight: int, deferred: int) -> Buffers:
    """A zero-bubble stage keeps the output gradients of deferred weight gradients."""
    ranks = hybrid.pipeline_ranks
    rank, again = stage % ranks, hybrid.micro_batches > ranks
    return deferred + (rank == 0 and again), int(stage >= hybrid.stages - ranks and rank > 0)


# -------------------------------------------------------------------------------------------------------------- table

#: By name; joint searches try them in this order.
SCHEDULES = {schedule.name: schedule for schedule in (
    Schedule("1f1b", "1F1B", "1F1B", _one_forward_one_backward, _warm_up, pending=_last_of_each_kind, fills=True,
             frameworks=frozenset({"megatron", "deepspeed"})),
    Schedule("gpipe", "GPipe", "GPipe", _all_forwards_first, _all, all_forwards=True, searched=False),
    Schedule("zero_bubble", "zero bubble", "InterleavedZeroBubble", partial(_in_rounds, late=True),
             partial(_in_flight_of_rounds, late=True), _of_earlier_ranks, _of_deferred, several_stages=True,
             in_rounds=True, splits_backward=True, bubble_parts=3),
    Schedule("interleaved", "interleaved 1F1B", "Interleaved1F1B", partial(_in_rounds, late=False),
             partial(_in_flight_of_rounds, late=False), pending=_one_of_a_rank, several_stages=True,
             in_rounds=True, frameworks=frozenset({"megatron"})),
)}


def usual(stages_per_rank: int = 1) -> str:
    """The name of the schedule that is taken where none is asked for."""
    return "interleaved" if stages_per_rank > 1 else "1f1b"


def names_of(wanted: Callable[[Schedule], bool] = lambda how: True) -> str:
    """The names of the wanted schedules (all, if nothing is said), for messages: ``'a' or 'b'``."""
    return " or ".join(repr(how.name) for how in SCHEDULES.values() if wanted(how))


__all__ = ["SCHEDULES", "Action", "Schedule", "counted_in_flight", "names_of", "usual"]
