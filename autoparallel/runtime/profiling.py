"""`ParallelModule.profile`: a step measured under the profiler, beside the prediction, in one trace."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoparallel.axis_names import apart
from autoparallel.backends import EAGER
from autoparallel.errors import InputError, printable, shown
from autoparallel.plans import Plan
from autoparallel.plans.reports.step_parts import MEASURED, PARTS, TraceComparison, compare_parts, predicted_parts
from autoparallel.plans.reports.timeline import Box, Row, Timeline
from autoparallel.plans.reports.trace import Side, predicted_side, sides_json
from autoparallel.plans.reports.units import seconds_str
from autoparallel.runtime.form import Compiled
from autoparallel.runtime.measured import MeasuredStep, measured_step
from autoparallel.runtime.op_ranges import OpRanges, named
from autoparallel.runtime.recorded import recorded
from autoparallel.runtime.verify import WARM_UP, _timed
from cost_models.files import write_whole

#: Ranks whose events are written where nothing else is asked for: of each part of a pipeline the first ones.
MOST_RANKS = 8
#: Steps whose median is the step without the profiler.
TIMED = 3


@dataclass(frozen=True)
class Profile:
    """A profiled step: the file, and predicted beside measured seconds by part; ``print`` shows them."""

    path: Path
    comparison: TraceComparison

    def __str__(self) -> str:
        return f"{self.comparison}\ntrace written to {self.path}, for ui.perfetto.dev"


def profiled(step: Callable[[], object], roots: Callable[[], Mapping[int, nn.Module]], compiled: Compiled,
             path: str | PathLike[str], ranks: Sequence[int] | None, position: tuple[int, int], device: torch.device
             ) -> Profile:
    """Run ``step``, and write the last run's events and the prediction to ``path`` on rank 0. Collective.

    ``roots``: the modules that run it, by stage, known after its first run; ``position``: this rank's coordinate on the
    pipeline axis, and that axis's length.
    """
    if not isinstance(path, (str, PathLike)):
        raise InputError(f"path is {shown(path)}: give the file to write")
    shown_ranks = _ranks(ranks, *position)
    for _ in range(WARM_UP):
        step()
    unprofiled = [_timed(step, device) for _ in range(TIMED)]
    ops, links = OpRanges(compiled.space), _links(compiled.plan)
    with compiled.op_by_op(), named(roots(), ops):
        step()  # finds the ops' names
        dist.barrier()
        recording = recorded(step, device)
    mine = measured_step(recording, ops.found, links)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (position[0], statistics.median(unprofiled), mine.parts,
                                   mine if dist.get_rank() in shown_ranks else None))
    unprofiled_s = max(one[1] for one in every)
    parts = {part: statistics.fmean(one[2].get(part, 0.0) for one in every) for part in PARTS}
    notes = tuple(_notes(compiled, unprofiled_s, parts, len(every), len(shown_ranks)))
    if dist.get_rank() == 0:
        side = Side(MEASURED, _timeline({rank: one[3] for rank, one in enumerate(every) if one[3] is not None}), parts,
                    {rank: one[0] for rank, one in enumerate(every)})
        text = sides_json(compiled.plan, [predicted_side(compiled.plan), side], unprofiled_s=unprofiled_s,
                          notes=list(notes))
        try:
            write_whole(Path(path), text)
        except (OSError, TypeError, ValueError) as error:
            raise InputError(f"cannot write the file {path}: {getattr(error, 'strerror', error)}") from error
    return Profile(Path(path), compare_parts(predicted_parts(compiled.plan), parts, unprofiled_s, notes))


def _ranks(asked: Sequence[int] | None, coordinate: int, length: int) -> frozenset[int]:
    """The ranks whose events are written: those asked for, or the first of each part of the pipeline."""
    world = dist.get_world_size()
    if asked is None:
        each = max(1, MOST_RANKS // length)
        per_part = world // length    # the pipeline is the mesh's first axis
        return frozenset(part * per_part + n for part in range(length) for n in range(min(each, per_part)))
    if not isinstance(asked, list | tuple | range | set | frozenset) or not asked or not all(
            isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < world for rank in asked):
        raise InputError(f"ranks is {shown(asked)}: give ranks from 0 to {world - 1}")
    return frozenset(asked)


def _links(plan: Plan) -> Mapping[str, str]:
    """By mesh axis, or several joined, the name of its row in the prediction."""
    record = plan.known
    found = record.workload.links.items() if record is not None else ()
    return {name: link for name, link in found if {*apart(name)} <= {*plan.axis_names}}


def _timeline(steps: Mapping[int, MeasuredStep]) -> Timeline:
    rows, boxes = list[Row](), list[Box]()
    for rank, step in steps.items():
        first = len(rows)
        rows += [Row(rank, stream) for stream in step.rows]
        boxes += [Box(printable(name), kind, first + row, start_s, end_s, (), told)
                  for name, kind, row, start_s, end_s, told in step.boxes]
    held = tuple(step.held for step in steps.values()) if any(step.held for step in steps.values()) else ()
    return Timeline(tuple(rows), tuple(boxes), max(step.total_s for step in steps.values()), held)


def _notes(compiled: Compiled, unprofiled_s: float, parts: Mapping[str, float], ranks: int, shown_ranks: int
           ) -> list[str]:
    """Remarks on the figures of a profile."""
    profiled_s = sum(parts.values())
    found = [f"a step took {seconds_str(unprofiled_s)} without the profiler, {seconds_str(profiled_s)} with it: what "
             "the profiler adds lies between the ops"]
    if compiled.backend != EAGER:
        found.append("compiled graphs have no names of layers within: kernels that Inductor makes count as "
                     "element-wise, calls of libraries by what they are; collectives within are not told apart")
    if shown_ranks < ranks:
        found.append(f"the trace shows {shown_ranks} of {ranks} ranks; the seconds are means over all")
    return found


__all__ = ["Profile", "profiled"]
