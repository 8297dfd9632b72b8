"""The timeline of a predicted step, to be drawn or written as a trace: rows of boxes, one row for each stream.

Without a pipeline it is that of one rank, as the prediction simulates it, stretched evenly to the predicted step: hosts
that launch kernels late, or ahead of the device, change the whole step and no single task. With one, each rank's
micro-batches are simulated from the seconds of its stages (`plans.record.StageSeconds`) in the order of the schedule
(`schedule.pipeline_tasks`), as for the prediction. That is longer than `Timeline.total_s` where equal stages, of which
both at a cut wait for each message, would take longer.
A micro-batch's recompute is drawn in one piece at the begin of its backward, its exposed communication, which happens
between its ops, in one piece at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoparallel.errors import PlanError
from autoparallel.plans.plan import Plan
from autoparallel.plans.record import Record, StageSeconds
from autoparallel.schedule.pipeline_tasks import PipelineTasks, StageTimes
from autoparallel.schedule.schedules import Action
from autoparallel.schedule.step_config import Hybrid, as_rounds

SAID = {"F": "forward", "B": "backward", "W": "weight gradients"}
#: The stream of communication that nothing hides, in a pipeline.
EXPOSED = "exposed communication"
#: The fields of `StageSeconds` that are of one micro-batch.
OF_MICRO_BATCH = ("forward_s", "backward_s", "send_s", "activation_bytes", "forward_communication_s",
                  "backward_communication_s", "recompute_s")
#: The kinds of boxes by the beginnings of their names.
KINDS = (("gather", "gather"), ("reduce", "reduce"), ("gradients of activations", "exchange"),
         ("activations", "exchange"), ("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer"),
         ("micro-batches", "earlier"), ("send", "exchange"), ("weight gradients", "backward"),
         ("recompute", "recompute"))


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


def _of_pipeline(of_micro_batch: Sequence[StageSeconds], step: Hybrid) -> Timeline:
    from cost_models.timeline import simulate

    hybrid, stages = as_rounds(step), [_of_round(s, step.copies) for s in of_micro_batch]
    once_s = tuple(sum(stages[stage].once_s for stage in set(hybrid.stages_of(rank)))
                   for rank in range(hybrid.pipeline_ranks))
    pipeline = PipelineTasks(hybrid, tuple(StageTimes(s.forward_s, s.backward_s, s.send_s) for s in stages), once_s)
    tasks, line = pipeline.tasks, simulate(pipeline.tasks)
    split = [_split_s(rank, what, action, stages, hybrid) for rank, what, action in pipeline.issued]
    streams = ("compute", EXPOSED, "send") if any(exposed for _, exposed in split) else ("compute", "send")
    whole = [Box(name, kind_of(name), len(streams) * task.rank + streams.index(task.stream), float(start_s),
                 float(end_s), tuple(n for n in task.after
                                     if (tasks[n].rank, tasks[n].stream) != (task.rank, task.stream)))
             for name, task, start_s, end_s in zip([_name(one, step.copies) for one in pipeline.issued], tasks,
                                                   line.start_s, line.end_s, strict=True)]
    held = tuple(_held_by(len(streams) * rank, actions, stages, whole)
                 for rank, actions in enumerate(pipeline.orders))
    boxes, more = list[Box](), list[Box]()
    for box, (again_s, exposed_s) in zip(whole, split, strict=True):
        if box.kind == "optimizer":  # gradients are reduced before it
            turn = min(box.end_s, box.start_s + exposed_s)
            boxes.append(replace(box, start_s=turn))
            more.append(Box(f"{EXPOSED} of parameters and gradients, once a step", "exchange", box.row + 1, box.start_s,
                            turn))
            continue
        end = max(box.start_s, box.end_s - exposed_s)
        begin = min(end, box.start_s + again_s)
        boxes.append(replace(box, start_s=begin, end_s=end))
        more.append(Box(f"recompute in {box.name}", "recompute", box.row, box.start_s, begin))
        more.append(Box(f"{EXPOSED} in {box.name}", "exchange", box.row + 1, end, box.end_s))
    boxes += [box for box in more if box.end_s > box.start_s]
    rows = tuple(Row(rank, stream) for rank in range(hybrid.pipeline_ranks) for stream in streams)
    return Timeline(rows, tuple(boxes), line.total_s, held)


def _of_round(s: StageSeconds, copies: int) -> StageSeconds:
    """Of ``copies`` micro-batches, which run at a time, the seconds and bytes that ``s`` has of one."""
    return replace(s, **{name: copies * getattr(s, name) for name in OF_MICRO_BATCH})


def _name(issued: tuple[int, str, Action | None], copies: int) -> str:
    _, what, action = issued
    if action is None:
        return "optimizer"
    kind, stage, number = action
    of = f"micro-batch {number}" if copies == 1 else f"micro-batches {number * copies} to {(number + 1) * copies - 1}"
    if what == "send":
        return f"send {'output' if kind == 'F' else 'gradient'} of {of}, stage {stage}"
    return f"{SAID[kind]} of {of}, stage {stage}"


def _split_s(rank: int, what: str, action: Action | None, stages: Sequence[StageSeconds], hybrid: Hybrid
             ) -> tuple[float, float]:
    """Of the seconds of a task, recompute and exposed communication. Where backward is in two parts (`PipelineTasks`),
    each has half of its communication; the first has the recompute, as far as it is as long."""
    if action is None:
        return 0.0, sum(stages[stage].once_communication_s for stage in set(hybrid.stages_of(rank)))
    kind, stage, _ = action
    if what != "run":
        return 0.0, 0.0
    s = stages[stage]
    if kind == "F":
        return 0.0, s.forward_communication_s
    parts = 2 if hybrid.pipelining.splits_backward else 1
    exposed_s = s.backward_communication_s / parts
    again_s = min(s.recompute_s, s.backward_s / parts - exposed_s)
    return (again_s if kind == "B" else s.recompute_s - again_s), exposed_s


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
