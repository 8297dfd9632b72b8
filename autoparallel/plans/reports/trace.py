"""A step in Chrome's trace format, for Perfetto (ui.perfetto.dev): a process for each rank (of the pipeline, where it
is predicted), a thread for each stream, arrows from what is awaited to what waits, a counter for the memory.

A file has the predicted step, the measured one, or both: then the measured ranks lie below the predicted rank of their
pipeline stages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoparallel.plans.plan import Plan
from autoparallel.plans.reports.step_parts import PREDICTED, predicted_parts
from autoparallel.plans.reports.timeline import Box, Timeline, timeline_of

#: Microseconds, the format's unit, are rounded to this many digits.
DIGITS = 3


#: The process number of measured rank 0; predicted ranks begin at 0.
FIRST_MEASURED = 1_000_000


@dataclass(frozen=True)
class Side:
    """A step to write: its timeline, predicted or measured (``name``), and its seconds by part
    (`step_parts.PARTS`). ``above``: by rank, the pipeline rank beside which it is shown (none: its own number)."""

    name: str
    line: Timeline
    parts: Mapping[str, float]
    above: Mapping[int, int] = field(default_factory=dict)

    def process(self, rank: int) -> int:
        return rank if self.name == PREDICTED else FIRST_MEASURED + rank

    def title(self, rank: int) -> str:
        if self.name == PREDICTED:
            return f"predicted, pipeline rank {rank}"
        return f"measured, rank {rank}"

    def order(self, rank: int) -> int:
        """The place of a rank from the top: each predicted rank, then the measured ones that run its stages."""
        return rank * FIRST_MEASURED if self.name == PREDICTED else self.above.get(rank, 0) * FIRST_MEASURED + rank + 1


def predicted_side(plan: Plan) -> Side:
    """Raises PlanError for a plan without a timeline."""
    return Side(PREDICTED, timeline_of(plan), predicted_parts(plan))


def trace_json(plan: Plan) -> str:
    """The predicted step as JSON. Raises PlanError for a plan without a timeline."""
    return sides_json(plan, [predicted_side(plan)])


def sides_json(plan: Plan, sides: Sequence[Side], **told: Any) -> str:
    """The trace of one or both sides of a plan's step as JSON; ``told``: further keys beside the events."""
    events = [event for side in sides for event in _events(side)]
    data = {"traceEvents": events, "displayTimeUnit": "ms",
            "otherData": {"cluster": plan.cluster, "fingerprint": plan.fingerprint,
                          "predicted_step_s": plan.prediction.step_s,
                          **{f"{side.name}_timeline_s": side.line.total_s for side in sides},
                          "parts": {side.name: dict(side.parts) for side in sides}, **told}}
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def _events(side: Side) -> Iterator[dict[str, Any]]:
    line = side.line
    yield from _names(side)
    place = [_micros(box.start_s) for box in line.boxes], [_micros(box.end_s) for box in line.boxes]
    for number, box in enumerate(line.boxes):
        row, begin, end = line.rows[box.row], place[0][number], place[1][number]
        yield {"ph": "X", "name": box.name, "cat": box.kind, "pid": side.process(row.rank), "tid": box.row,
               "ts": begin, "dur": round(end - begin, DIGITS), "args": {"stream": row.stream, **box.told}}
    flow = 0
    for number, box in enumerate(line.boxes):
        for other in box.after:
            if all(place[1][n] > place[0][n] for n in (number, other)):
                yield from _flow(side, flow, (other, number), place)
                flow += 1
    for rank, points in zip(sorted({row.rank for row in line.rows}), line.held, strict=False):
        for at, num_bytes in [*sorted(points, key=lambda point: point[0]), *((line.total_s, held) for _, held in
                                                                          points[-1:])]:
            yield {"ph": "C", "name": "memory", "pid": side.process(rank), "ts": _micros(at),
                   "args": {"GiB": num_bytes / 2**30}}


def _names(side: Side) -> Iterator[dict[str, Any]]:
    """Names and order of processes and threads."""
    for rank in sorted({row.rank for row in side.line.rows}):
        process = side.process(rank)
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": side.title(rank)}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": side.order(rank)}}
    for number, row in enumerate(side.line.rows):
        process = side.process(row.rank)
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": row.stream}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": number, "args": {"sort_index": number}}


def _flow(side: Side, flow: int, ends: tuple[int, int], place: tuple[list[float], list[float]]
          ) -> Iterator[dict[str, Any]]:
    """An arrow, whose ends lie inside of their boxes."""
    for phase, number in zip("sf", ends, strict=True):
        line = side.line
        box: Box = line.boxes[number]
        begin, end = place[0][number], place[1][number]
        at = begin + (end - begin) * (0.9 if phase == "s" else 0.1)
        event = {"ph": phase, "name": "awaits", "cat": "awaits", "id": flow,
                 "pid": side.process(line.rows[box.row].rank), "tid": box.row, "ts": at}
        yield event if phase == "s" else {**event, "bp": "e"}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, DIGITS)


__all__ = ["Side", "predicted_side", "sides_json", "trace_json"]
