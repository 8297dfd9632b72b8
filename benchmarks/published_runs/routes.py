"""The two routes to a prediction, the closed form of a transformer and plans of captured models, side by side."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.published_runs import report
from benchmarks.published_runs.by_plan import plan_of
from benchmarks.published_runs.predict import priced
from benchmarks.published_runs.rows import AbstainError, Row, read
from cost_models.profile import load


@dataclass(frozen=True)
class Both:
    """A run's step time by both routes and, where it was measured, in truth; seconds."""

    name: str
    source: str
    measured_s: float | None
    closed_s: float
    plan_s: float


def compare(rows: list[Row], each: int, seed: int = 0) -> list[dict[str, Any]]:
    """``each`` rows of every source, drawn by chance among those that both routes price (rows that cannot be written as
    a plan by hand are passed over)."""
    by_source, draw = defaultdict[str, list[Row]](list), random.Random(seed)
    for row in rows:
        by_source[report.source(row)].append(row)
    found: list[Both] = []
    for source, known in by_source.items():
        taken = 0
        for row in draw.sample(known, len(known)):
            if taken < each and (both := _priced(row, source)) is not None:
                found.append(both)
                taken += 1
    return [asdict(both) for both in found]


def _priced(row: Row, source: str) -> Both | None:
    from autoparallel.errors import AutoparallelError

    try:
        run = read(row)
        planned = plan_of(run).prediction.step_s
        closed = priced(run, load())["step_time_s"]
    except (AbstainError, AutoparallelError):    # a plan that this project's steps cannot express
        return None
    return Both(str(row.get("id")), source, report.measured_s(row), closed, planned)


def table(found: list[dict[str, Any]]) -> str:
    """Medians of |plan / closed - 1| and of both routes' errors, by source and of all, in percent."""
    lines = ["| source | rows | plan over closed form | within 3 % | plan over measured | closed form over measured |",
             "|---|---|---|---|---|---|"]
    sources = list(dict.fromkeys(both["source"] for both in found))
    for name, kept in [*((s, [b for b in found if b["source"] == s]) for s in sources), ("all", found)]:
        apart = np.abs([b["plan_s"] / b["closed_s"] - 1 for b in kept])
        cells = [name, len(kept), f"{100 * np.median(apart):.1f}", f"{np.mean(apart <= 0.03):.0%}",
                 *(_median(kept, key) for key in ("plan_s", "closed_s"))]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _median(kept: list[dict[str, Any]], key: str) -> str:
    errors = [abs(b[key] / b["measured_s"] - 1) for b in kept if b["measured_s"]]
    return f"{100 * np.median(errors):.1f}" if errors else ""
