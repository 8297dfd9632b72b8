"""How a search went, for the report: best and bound after each phase."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from autoparallel import clock
from autoparallel.plans import Plan
from autoparallel.plans.record import Record

if TYPE_CHECKING:
    from autoparallel.search import Progress

#: Points that a record keeps, at most: the last ones.
MOST_POINTS = 500


@dataclass
class SearchHistory:
    """Records the calls of a search's ``progress`` callback, and passes them on to the user's. ``points``: (seconds of
    work as counted, phase, best, bound)."""

    progress: Progress | None = None
    points: list[tuple[float, str, float, float]] = field(default_factory=list)

    def __call__(self, phase: str, best_s: float, bound_s: float) -> None:
        self.points.append((round(clock.spent_s(), 3), phase, best_s, bound_s))
        if self.progress is not None:
            self.progress(phase, best_s, bound_s)

    def told(self, plan: Plan) -> Record | None:
        """The plan's record with the points at which both best and bound were known."""
        if (record := plan.known) is None:
            return None
        finite = [point for point in self.points if math.isfinite(point[2]) and math.isfinite(point[3])]
        return replace(record, search=tuple(finite[-MOST_POINTS:]))
