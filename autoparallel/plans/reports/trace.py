"""The predicted step in Chrome's trace format, for Perfetto (ui.perfetto.dev): a process for each rank of the pipeline,
a thread for each stream, arrows from what is awaited to what waits, a counter for the memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autoparallel.plans.plan import Plan
from autoparallel.plans.reports.timeline import Box, Timeline, timeline_of

#: Microseconds, the format's unit, are rounded to this many digits.
DIGITS = 3


def trace_json(plan: Plan) -> str:
    """The trace as JSON. Raises PlanError for a plan without a timeline."""
    line = timeline_of(plan)
    data = {"traceEvents": list(_events(line)), "displayTimeUnit": "ms",
            "otherData": {"cluster": plan.cluster, "fingerprint": plan.fingerprint,
                          "predicted_step_s": plan.prediction.step_s, "timeline_s": line.total_s}}
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def _events(line: Timeline) -> Iterator[dict[str, Any]]:
    yield from _names(line)
    place = [_micros(box.start_s) for box in line.boxes], [_micros(box.end_s) for box in line.boxes]
    for number, box in enumerate(line.boxes):
        row, begin, end = line.rows[box.row], place[0][number], place[1][number]
        yield {"ph": "X", "name": box.name, "cat": box.kind, "pid": row.rank, "tid": box.row, "ts": begin,
               "dur": round(end - begin, DIGITS), "args": {"stream": row.stream}}
    flow = 0
    for number, box in enumerate(line.boxes):
        for other in box.after:
            if all(place[1][n] > place[0][n] for n in (number, other)):
                yield from _flow(line, flow, (other, number), place)
                flow += 1
    for rank, points in enumerate(line.held):
        for at, num_bytes in sorted(points, key=lambda point: point[0]):
            yield {"ph": "C", "name": "memory", "pid": rank, "ts": _micros(at), "args": {"GiB": num_bytes / 2**30}}
        if points:
            yield {"ph": "C", "name": "memory", "pid": rank, "ts": _micros(line.total_s),
                   "args": {"GiB": points[-1][1] / 2**30}}


def _names(line: Timeline) -> Iterator[dict[str, Any]]:
    """Names and order of processes and threads."""
    for rank in sorted({row.rank for row in line.rows}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"predicted, pipeline rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for number, row in enumerate(line.rows):
        yield {"ph": "M", "name": "thread_name", "pid": row.rank, "tid": number, "args": {"name": row.stream}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": row.rank, "tid": number, "args": {"sort_index": number}}


def _flow(line: Timeline, flow: int, ends: tuple[int, int], place: tuple[list[float], list[float]]
          ) -> Iterator[dict[str, Any]]:
    """An arrow, whose ends lie inside of their boxes."""
    for phase, number in zip("sf", ends, strict=True):
        box: Box = line.boxes[number]
        begin, end = place[0][number], place[1][number]
        at = begin + (end - begin) * (0.9 if phase == "s" else 0.1)
        event = {"ph": phase, "name": "awaits", "cat": "awaits", "id": flow, "pid": line.rows[box.row].rank,
                 "tid": box.row, "ts": at}
        yield event if phase == "s" else {**event, "bp": "e"}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, DIGITS)


__all__ = ["trace_json"]
