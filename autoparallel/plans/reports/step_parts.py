"""A step by kind of op, predicted or measured, in the same parts, and the table that sets one beside the other.

The parts add up to the step: what runs beside something else is counted in its own part, and taken away once more in
`OVERLAPPED`. Seconds are those of a rank, in a pipeline the mean over its ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoparallel.errors import PlanError, printable
from autoparallel.plans.plan import Plan
from autoparallel.plans.reports.units import seconds_str

PRODUCTS, ATTENTION, OTHERS = "matrix products", "attention", "element-wise and other ops"
OVERLAPPED, IDLE = "of these at the same time", "bubbles, sends, waits, host"
#: The collectives' parts by purpose (`plan.CollectiveUse.purpose`).
COLLECTIVES = {purpose: f"collectives of {purpose}" for purpose in ("parameters", "gradients", "activations")}
CHECKS = "collectives that compare calls, and others"
INSIDE = "collectives in compiled graphs"
PARTS = (PRODUCTS, ATTENTION, OTHERS, *COLLECTIVES.values(), INSIDE, CHECKS, OVERLAPPED, IDLE)
#: The sides of a comparison, as traces name them.
PREDICTED, MEASURED = "predicted", "measured"


def predicted_parts(plan: Plan) -> dict[str, float]:
    """Seconds of the predicted step by part, without the optimizer, which is not part of `ParallelModule.step`. Empty
    for plans whose record does not tell."""
    p, record = plan.prediction, plan.known
    if record is None or not record.compute_s:
        return {}
    products_s, attention_s = (record.compute_s.get(kind, 0.0) for kind in ("matmul", "attention"))
    uses = p.collectives_on_a_rank(plan.hybrid.pipeline_ranks)
    by_purpose = {name: sum(use.seconds for use in uses if use.purpose == purpose)
                  for purpose, name in COLLECTIVES.items()}
    rest_s = p.forward_communication_s + p.backward_communication_s - p.crossings_s - sum(by_purpose.values())
    return {PRODUCTS: products_s, ATTENTION: attention_s,
            OTHERS: max(0.0, p.forward_s + p.backward_s + p.crossings_s - products_s - attention_s), **by_purpose,
            CHECKS: rest_s if rest_s > 1e-9 * p.step_s else 0.0, OVERLAPPED: -p.hidden_s if p.hidden_s else 0.0,
            IDLE: p.waiting_s + p.fixed_s}


@dataclass(frozen=True)
class PartRow:
    """A part of the step on both sides, in seconds."""

    part: str
    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        return self.measured_s - self.predicted_s


@dataclass(frozen=True)
class TraceComparison:
    """The parts of a step, predicted and measured, and what else the traces say: ``unprofiled_s``, the measured step
    without the profiler (None: not told); ``notes``."""

    rows: tuple[PartRow, ...]
    unprofiled_s: float | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [f"{'seconds of a step on a rank':46}{'predicted':>12}{'measured':>12}{'difference':>12}"]
        rows += [f"{row.part:46}{seconds_str(row.predicted_s):>12}{seconds_str(row.measured_s):>12}"
                 f"{seconds_str(row.difference_s):>12}" for row in (*self.rows, self.step)]
        return "\n".join([*rows, *self.notes])

    @property
    def step(self) -> PartRow:
        return PartRow("step, without the optimizer", sum(row.predicted_s for row in self.rows),
                       sum(row.measured_s for row in self.rows))


def compare_parts(predicted: Mapping[str, float], measured: Mapping[str, float], unprofiled_s: float | None = None,
                  notes: tuple[str, ...] = ()) -> TraceComparison:
    rows = tuple(PartRow(part, predicted.get(part, 0.0), measured.get(part, 0.0))
                 for part in PARTS if predicted.get(part) or measured.get(part))
    return TraceComparison(rows, unprofiled_s, notes)


def compare_traces(predicted: str | Path, measured: str | Path) -> TraceComparison:
    """Compare two traces, written by ``--trace`` and by `ParallelModule.profile`; both may be one file. Raises
    PlanError for files that tell no such step, or that belong to different programs."""
    ours, theirs = _told(predicted), _told(measured)
    for path, data, side in ((predicted, ours, PREDICTED), (measured, theirs, MEASURED)):
        if not data["parts"].get(side):
            wanted = "autoparallel plan ... --trace" if side == PREDICTED else "parallel.profile(path, **batch)"
            raise PlanError(f"{path} has no {side} step: give a trace that {wanted} has written")
    if ours["fingerprint"] != theirs["fingerprint"]:
        raise PlanError(f"{predicted} is of program {ours['fingerprint']}, {measured} of {theirs['fingerprint']}: give "
                        "traces of one model with one batch and one plan")
    return compare_parts(ours["parts"][PREDICTED], theirs["parts"][MEASURED], theirs.get("unprofiled_s"),
                         tuple(map(printable, theirs.get("notes", ()))))


def _told(path: str | Path) -> dict[str, Any]:
    """The data that a trace file has beside its events, checked."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise PlanError(f"cannot read the trace {path}: {why}; give a file that autoparallel plan ... --trace, or "
                        "parallel.profile, has written") from error
    told = data.get("otherData") if isinstance(data, dict) else None
    if not isinstance(told, dict) or not isinstance(told.get("parts"), dict) or "fingerprint" not in told:
        raise PlanError(f"{path} does not tell the parts of a step: give a trace that this version of autoparallel "
                        "has written")
    for parts in told["parts"].values():
        if not isinstance(parts, dict) or not all(
                isinstance(s, (int, float)) and not isinstance(s, bool) and math.isfinite(s) for s in parts.values()):
            raise PlanError(f"{path} has parts of a step that are no seconds")
    step_s, notes = told.get("unprofiled_s"), told.get("notes", [])
    if not (step_s is None or isinstance(step_s, (int, float))) or not (
            isinstance(notes, list) and all(isinstance(note, str) for note in notes)):
        raise PlanError(f"{path} is no trace of autoparallel: unprofiled_s or notes have another type")
    return told


__all__ = ["ATTENTION", "CHECKS", "COLLECTIVES", "IDLE", "INSIDE", "MEASURED", "OTHERS", "OVERLAPPED", "PARTS",
           "PREDICTED", "PRODUCTS", "PartRow", "TraceComparison", "compare_parts", "compare_traces", "predicted_parts"]
