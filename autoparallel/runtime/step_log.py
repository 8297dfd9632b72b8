"""A line for every so many steps of a run: seconds of a step, tokens per second, MFU, exposed communication and memory
beside the plan's."""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from autoparallel.errors import InputError, shown
from autoparallel.kernels.collectives import waited
from autoparallel.plans import Plan
from autoparallel.plans.reports.build import rates, times_of
from autoparallel.plans.reports.units import bytes_str, count_str, percent_str, seconds_str

if TYPE_CHECKING:
    from autoparallel.runtime.module import ParallelModule

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepLine:
    """``steps`` counted so far; mean seconds of a step since the last line, and ``over_plan``, their ratio to the
    plan's less 1; tokens or samples (``unit``) per second of all devices, and MFU (None: the plan does not know the
    work); seconds of a step in which this rank waited for collectives (``exposed_s``; None: not counted, on devices
    other than the CPU and in compiled graphs), and the plan's; peak bytes that tensors took on this rank's device
    (None: not counted there), and the plan's; the share of ids looked up in caches of tables on the host whose row was
    there (None: no lookups), and the share that their pins give, by ids. All by the plan of the first form of call, and
    its batch."""

    steps: int
    step_s: float
    plan_s: float
    over_plan: float
    unit: str | None = None
    per_s: float | None = None
    mfu: float | None = None
    peak_bytes: float | None = None
    plan_bytes: float = 0.0
    exposed_s: float | None = None
    plan_exposed_s: float = 0.0
    hits: float | None = None
    plan_hits: float | None = None

    def __str__(self) -> str:
        parts = [f"step {self.steps}: {seconds_str(self.step_s)} ({self.over_plan:+.1%} of the plan)"]
        if self.per_s is not None:
            parts.append(f"{count_str(self.per_s)} {self.unit}/s")
        if self.mfu is not None:
            parts.append(f"{percent_str(self.mfu)} MFU")
        if self.exposed_s is not None:
            parts.append(f"communication exposed {seconds_str(self.exposed_s)} (plan "
                         f"{seconds_str(self.plan_exposed_s)})")
        if self.peak_bytes is not None:
            parts.append(f"peak {bytes_str(self.peak_bytes)} (plan {bytes_str(self.plan_bytes)})")
        if self.hits is not None and self.plan_hits is not None:
            parts.append(f"{percent_str(self.hits)} of lookups on the device (given {percent_str(self.plan_hits)})")
        return ", ".join(parts)


class _Mark(NamedTuple):
    """The end of a step: its number, the time, and so far waits for collectives and their seconds, and ids looked up in
    caches, hits, and hits as given."""

    steps: int
    at_s: float
    waits: int
    waited_s: float
    lookups: tuple[float, float, float]


class Writer(Protocol):
    """Takes each line, on rank 0."""

    def write(self, line: StepLine) -> None: ...


class JsonLines:
    """A writer of `StepLog`: appends each line to the file ``path`` as one JSON object."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write(self, line: StepLine) -> None:
        """Append a line of the log."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(line)) + "\n")


class TensorBoard:
    """A writer of `StepLog`: the numbers of each line as scalars under ``autoparallel/``.

    ``writer``: a SummaryWriter, or another object with ``add_scalar``; or a folder, for which tensorboard must be
    installed.
    """

    def __init__(self, writer: Any) -> None:
        if isinstance(writer, (str, Path)):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise InputError("writing into a folder needs tensorboard: pip install tensorboard, or give a writer "
                                 "with add_scalar") from error
            writer = SummaryWriter(str(writer))
        self.writer = writer

    def write(self, line: StepLine) -> None:
        """Write the numbers of a line of the log."""
        for name, value in asdict(line).items():
            if name != "steps" and isinstance(value, (int, float)):
                self.writer.add_scalar(f"autoparallel/{name}", value, line.steps)


class StepLog:
    """Counts steps, and after every ``every`` of them gives a line on rank 0, by logging (INFO) and to the ``writers``.

        log = autoparallel.StepLog(parallel, every=20, writers=[autoparallel.JsonLines("steps.jsonl")])
        for batch in loader:
            loss = parallel.step(**batch)
            optimizer.step()
            log.step()                                     # once a step, on every rank or on rank 0 alone

    ``parallel``: the parallel module, or the plan with which the lines are compared. The first step, in which programs
    are compiled, is left out. Where the lines' median lies outside of what nine in ten predictions of the plan's kind
    allow (`Prediction.nine_in_ten_s`), a warning says so once, with the plan's parts. The device is waited for at each
    line only. ``clock``: seconds, for tests.
    """

    def __init__(self, parallel: ParallelModule | Plan, every: int = 10, writers: Sequence[Writer] = (),
                 clock: Callable[[], float] = time.perf_counter) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise InputError(f"every is {shown(every)}: give a number of steps, 1 or more")
        if not isinstance(writers, list | tuple) or not all(hasattr(writer, "write") for writer in writers):
            raise InputError(f"writers is {shown(writers)}: give a list, for example [JsonLines(path)]")
        self.parallel, self.every, self.writers, self.clock = parallel, every, tuple(writers), clock
        self.steps, self.warned = 0, False
        self._marks: list[_Mark] = []
        self.last: StepLine | None = None

    def step(self) -> StepLine | None:
        """Count a step; returns the line that it completes, if any."""
        if dist.is_initialized() and dist.get_rank():
            return None
        self.steps += 1
        if self.steps == 1 or (self.steps - 1) % self.every == 0:
            _finish()
            self._marks.append(_Mark(self.steps, self.clock(), waited.calls, waited.seconds, self._lookups()))
        if len(self._marks) < 2 or self._marks[-1].steps != self.steps:
            return None
        self.last = self._line()
        _LOG.info("%s", self.last)
        for writer in self.writers:
            writer.write(self.last)
        self._warn()
        return self.last

    def _plan(self) -> Plan:
        return self.parallel if isinstance(self.parallel, Plan) else self.parallel.plan

    def _line(self) -> StepLine:
        before, now = self._marks[-2:]
        steps, plan = now.steps - before.steps, self._plan()
        step_s, p, record = (now.at_s - before.at_s) / steps, plan.prediction, plan.record
        exposed_s = (now.waited_s - before.waited_s) / steps if now.waits > before.waits else None
        found = StepLine(self.steps, step_s, p.step_s, step_s / p.step_s - 1 if p.step_s else 0.0,
                         peak_bytes=_peak_bytes(), plan_bytes=p.peak_bytes, exposed_s=exposed_s,
                         plan_exposed_s=p.exposed_s)
        ids, hits, given = (b - a for a, b in zip(before.lookups, now.lookups, strict=True))
        if ids > 0:
            found = replace(found, hits=hits / ids, plan_hits=given / ids)
        if record is None or not step_s:
            return found
        per_s, mfu, _ = rates(record.workload, step_s)
        return replace(found, unit=record.workload.unit, per_s=per_s, mfu=mfu)

    def _lookups(self) -> tuple[float, float, float]:
        """Ids looked up in caches on this rank, hits, and hits at the rates that pins give."""
        given = {one.name: one.hits for one in self._plan().hybrid.cached}
        if isinstance(self.parallel, Plan) or not given:
            return 0.0, 0.0, 0.0
        found = self.parallel.table_lookups()
        return (sum(one.ids for one in found.values()), sum(one.hits for one in found.values()),
                sum(given.get(name, one.hit_rate) * one.ids for name, one in found.items()))

    def _warn(self) -> None:
        """Once: where the median of the lines so far is outside `Prediction.nine_in_ten_s`."""
        p, (least_s, most_s) = self._plan().prediction, self._plan().prediction.nine_in_ten_s
        step_s = statistics.median([(b.at_s - a.at_s) / (b.steps - a.steps) for a, b in pairwise(self._marks)])
        over = step_s / p.step_s - 1 if p.step_s else 0.0
        if not self.warned and p.p90 and over and not least_s <= step_s <= most_s:
            self.warned = True
            _LOG.warning("steps take %s, %s %s than the plan's %s; nine in ten predictions of its kind were within %s "
                         "of the measured step, here %s to %s. %s parallel.profile('step.json', **batch) says which "
                         "part differs; parallel.verify(**batch) gives a cluster for the next plan",
                         seconds_str(step_s), percent_str(abs(over)), "more" if over > 0 else "less",
                         seconds_str(p.step_s), percent_str(p.p90), seconds_str(least_s), seconds_str(most_s),
                         self._expected())

    def _expected(self) -> str:
        """The plan's parts of a step, and the memory beside it, where that was counted."""
        plan = self._plan()
        parts = [f"{seconds_str(time.seconds)} {time.part}" for time in times_of(plan.prediction)
                 if time.seconds > 0 and not time.beside]
        peak = self.last.peak_bytes if self.last is not None else None
        memory = "" if peak is None else f" Peak {bytes_str(peak)}, the plan's {bytes_str(plan.prediction.peak_bytes)}."
        return f"The plan has, on {plan.cluster}: {', '.join(parts)}.{memory}"


def _finish() -> None:
    """Wait for the device, so that a line counts whole steps."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _peak_bytes() -> float | None:
    """The most that tensors took since the process began; None where nobody counts."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return float(torch.cuda.max_memory_allocated())
    return None


__all__ = ["JsonLines", "StepLine", "StepLog", "TensorBoard"]
