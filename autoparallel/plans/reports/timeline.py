"""The timeline of a predicted step, to be drawn or written as a trace: rows of boxes, one row for each stream.

Without a pipeline it is that of one rank, as the prediction simulates it, stretched evenly to the predicted step: hosts
that launch kernels late, or ahead of the device, change the whole step and no single task. With one, each rank's
micro-batches are simulated from the seconds of its stages (`plans.record.StageSeconds`) in the order of the schedule;
the prediction itself is in closed form, and differs a little (`Timeline.total_s` beside the step). A micro-batch's
exposed communication, which happens between its ops, is drawn in one piece at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autoparallel.errors import PlanError
from autoparallel.plans.plan import Plan
from autoparallel.plans.record import Record, StageSeconds
from autoparallel.schedule.step_config import Hybrid

SAID = {"F": "forward", "B": "backward", "W": "weight gradients"}
#: The stream of communication that nothing hides, in a pipeline.
EXPOSED = "exposed communication"
#: The kinds of boxes by the beginnings of their names.
KINDS = (("gather", "gather"), ("reduce", "reduce"), ("gradients of activations", "exchange"),
         ("activations", "exchange"), ("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer"),
         ("micro-batches", "forward"), ("send", "exchange"), ("once", "optimizer"),
         ("weight gradients", "backward"))


@dataclass(frozen=True)
class Box:
    """A task: what, when, and the numbers of the boxes (of other rows) that it waits for. ``told``: what else a trace
    says of it."""

    name: str
    kind: str
    row: int
    start_s: float
    end_s: float
    after: tuple[int, ...] = ()
    told: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A stream of a rank (of the pipeline axis)."""

    rank: int
    stream: str


@dataclass(frozen=True)
class Timeline:
    """Boxes in issue order, which on one row do not overlap (of a measured step they may nest). ``held``: by rank,
    (time, bytes) where the memory changes; empty where that is not known in time."""

    rows: tuple[Row, ...]
    boxes: tuple[Box, ...]
    total_s: float
    held: tuple[tuple[tuple[float, float], ...], ...] = ()

    @property
    def pipelined(self) -> bool:
        return len({row.rank for row in self.rows}) > 1


def timeline_of(plan: Plan) -> Timeline:
    """The timeline of a plan. Raises PlanError for plans without a record."""
    record = plan.known
    if record is None:
        raise PlanError("the plan has no timeline: it was written by an older version; plan again")
    if record.stages:
        return _of_pipeline(record.stages, plan.hybrid)
    if not record.spans:
        raise PlanError("the plan has no timeline")
    return _of_rank(record, plan.prediction.step_s - plan.prediction.fixed_s)


def kind_of(name: str) -> str:
    return next((kind for begin, kind in KINDS if name.startswith(begin)), "other")


def _of_rank(record: Record, step_s: float) -> Timeline:
    streams = sorted({stream for _, stream, *_ in record.spans}, key=lambda stream: (stream != "compute", stream))
    number = {stream: row for row, stream in enumerate(streams)}
    stretch = step_s / max(end_s for *_, end_s, _ in record.spans)
    boxes = tuple(Box(name, kind_of(name), number[stream], stretch * start_s, stretch * end_s, after)
                  for name, stream, start_s, end_s, after in record.spans)
    return Timeline(tuple(Row(0, stream) for stream in streams), boxes, step_s, _held(record, boxes))


def _held(record: Record, boxes: Sequence[Box]) -> tuple[tuple[tuple[float, float], ...], ...]:
    """The memory of a rank in time: places of forward and backward, by their share of each, between the first and last
    box of that kind of the last micro-batch."""
    memory = record.memory
    if memory is None:
        return ()
    ends = {kind: ([box.start_s for box in boxes if box.kind == kind and box.name.startswith(kind)],
                   [box.end_s for box in boxes if box.kind == kind]) for kind in ("forward", "backward")}
    if not all(starts for starts, _ in ends.values()):
        return ()
    (first, turn), (_, last) = ((min(starts), max(stops)) for starts, stops in ends.values())
    points = []
    for passed, row in zip(memory.passed, memory.num_bytes, strict=True):
        at = first + min(passed, 1.0) * (turn - first) + max(0.0, passed - 1.0) * (last - turn)
        points.append((at, sum(row)))
    return (tuple(points),)


# ------------------------------------------------------------------------------------------------- pipelines


def _of_pipeline(stages: Sequence[StageSeconds], hybrid: Hybrid) -> Timeline:
    from cost_models.timeline import Task, simulate

    orders = [list(_order(hybrid, rank)) for rank in range(hybrid.pipeline_ranks)]
    tasks, names, exchanged = list[Task](), list[str](), dict[int, float]()
    number = {(rank, *action): 0 for rank, actions in enumerate(orders) for action in actions}
    where = {action: rank for rank, actions in enumerate(orders) for action in actions}
    sends = _issue(stages, hybrid, orders, number)
    for rank, actions in enumerate(orders):
        for kind, stage, micro in actions:
            after = _before(kind, stage, micro, hybrid.stages, where, number, sends)
            tasks.append(Task(_seconds(kind, stages[stage], hybrid), "compute", after, rank))
            names.append(f"{SAID[kind]} of micro-batch {micro}, stage {stage}")
            exchanged[len(tasks) - 1] = _exchanged_s(kind, stages[stage])
            if (rank, kind, stage, micro) in sends:
                sent_s = stages[stage if kind == "F" else stage - 1].send_s
                tasks.append(Task(sent_s, "send", (len(tasks) - 1,), rank))
                names.append(f"send {'output' if kind == 'F' else 'gradient'} of micro-batch {micro}, stage {stage}")
        once_s = sum(stages[stage].once_s for stage in {stage for _, stage, _ in actions})
        tasks.append(Task(once_s, "compute", (), rank))
        names.append("once per step: parameters, gradients, optimizer")
    line = simulate(tasks)
    streams = ("compute", EXPOSED, "send") if any(exchanged.values()) else ("compute", "send")
    rows = tuple(Row(rank, stream) for rank in range(len(orders)) for stream in streams)
    boxes = [Box(name, kind_of(name), len(streams) * task.rank + streams.index(task.stream), float(start_s),
                 float(end_s), tuple(n for n in task.after
                                     if (tasks[n].rank, tasks[n].stream) != (task.rank, task.stream)))
             for name, task, start_s, end_s in zip(names, tasks, line.start_s, line.end_s, strict=True)]
    held = tuple(_held_by(len(streams) * rank, actions, stages, boxes) for rank, actions in enumerate(orders))
    boxes += [Box(f"{EXPOSED} in {box.name}", "exchange", box.row + 1, max(box.start_s, box.end_s - seconds), box.end_s)
              for box, seconds in ((boxes[at], seconds) for at, seconds in exchanged.items()) if seconds]
    return Timeline(rows, tuple(boxes), line.total_s, held)


def _exchanged_s(kind: str, stage: StageSeconds) -> float:
    """Exposed communication of a forward or backward; that of the gradients of weights runs once a step."""
    return {"F": stage.forward_communication_s, "B": stage.backward_communication_s}.get(kind, 0.0)


def _seconds(kind: str, stage: StageSeconds, hybrid: Hybrid) -> float:
    """Zero bubble splits backward in two, here in equal parts: gradients of inputs, then of weights."""
    if kind == "F":
        return stage.forward_s
    return stage.backward_s / (2 if hybrid.schedule == "zero_bubble" else 1)


def _issue(stages: Sequence[StageSeconds], hybrid: Hybrid, orders: Sequence[Sequence[tuple[str, int, int]]],
           number: dict[tuple[int, str, int, int], int]) -> dict[tuple[int, str, int, int], int]:
    """Number all tasks in ``number``; returns the numbers of the sends, by what is sent."""
    sends, count = dict[tuple[int, str, int, int], int](), 0
    for rank, actions in enumerate(orders):
        for kind, stage, micro in actions:
            number[rank, kind, stage, micro] = count
            count += 1
            if (kind == "F" and stage < hybrid.stages - 1) or (kind == "B" and stage > 0):
                sends[rank, kind, stage, micro] = count
                count += 1
        count += 1
    return sends


def _before(kind: str, stage: int, micro: int, stages: int, where: dict[tuple[str, int, int], int],
            number: dict[tuple[int, str, int, int], int], sends: dict[tuple[int, str, int, int], int]
            ) -> tuple[int, ...]:
    """The task that a forward or backward of a stage waits for: the neighbour's send, or its own forward at the last
    stage."""
    if kind == "W":
        return ()
    other = ("F", stage - 1, micro) if kind == "F" else ("B", stage + 1, micro)
    if 0 <= other[1] < stages:
        return (sends[where[other], *other],)
    if kind == "B":
        own = "F", stage, micro
        return (number[where[own], *own],)
    return ()


def _order(hybrid: Hybrid, rank: int) -> Iterator[tuple[str, int, int]]:
    """(F, B or W, stage, micro-batch) of one rank of the pipeline axis, in order, as torch.distributed.pipelining runs
    them; W: the gradients of weights, where backward is in two parts."""
    from cost_models.pipeline import order, warm_up

    own, micro_batches = hybrid.stages_of(rank), hybrid.micro_batches_of(rank)
    if hybrid.schedule == "gpipe":
        yield from (("F", own[0], micro) for micro in micro_batches)
        yield from (("B", own[0], micro) for micro in micro_batches)
    elif hybrid.schedule == "1f1b":
        ahead = warm_up(hybrid.groups, own[0])
        yield from ((kind, own[0], micro) for kind, micro in order(ahead, micro_batches))
    else:
        yield from _interleaved(hybrid, rank, own)


def _interleaved(hybrid: Hybrid, rank: int, own: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """Interleaved 1F1B (Narayanan et al. 2021): micro-batches in rounds, each through all of a rank's stages. With zero
    bubble (Qi et al. 2023) the gradients of weights come later, in the order of backward."""
    ranks, late = hybrid.pipeline_ranks, hybrid.schedule == "zero_bubble"
    count, chunks = hybrid.micro_batches, len(own)
    per_round = count // max(1, count // ranks)
    total = count * chunks
    warm = min(total, (chunks - 1) * per_round + (1 if late else 2) * (ranks - 1 - rank))

    def action(kind: str, step: int) -> tuple[str, int, int]:
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


def _held_by(row: int, actions: Sequence[tuple[str, int, int]], stages: Sequence[StageSeconds], boxes: Sequence[Box]
             ) -> tuple[tuple[float, float], ...]:
    """The memory of a pipeline rank, whose compute is in this row, in time: state, and activations from forward to the
    end of the last part of backward."""
    last = "W" if any(kind == "W" for kind, _, _ in actions) else "B"
    own = [box for box in boxes if box.row == row and box.kind in ("forward", "backward")]
    held = sum(stages[stage].state_bytes for stage in {stage for _, stage, _ in actions})
    points = [(0.0, held)]
    for (kind, stage, _), box in zip(actions, own, strict=True):
        held += stages[stage].activation_bytes * {"F": 1, last: -1}.get(kind, 0)
        points.append((box.start_s if kind == "F" else box.end_s, held))
    return tuple(points)


__all__ = ["Box", "Row", "Timeline", "kind_of", "timeline_of"]
