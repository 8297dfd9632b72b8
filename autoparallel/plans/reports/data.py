"""A report as JSON for programs. Its schema is documented in docs/report_schema.md, and has a version."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from autoparallel.plans.answers import Comparison
from autoparallel.plans.reports.report import Report
from autoparallel.plans.reports.step_parts import TraceComparison

SCHEMA = "autoparallel.report"
COMPARISON = "autoparallel.comparison"
TRACE_COMPARISON = "autoparallel.trace_comparison"
#: Raised where a reader of an older version would misunderstand; new keys alone do not raise it.
VERSION = 1


def report_data(report: Report) -> dict[str, Any]:
    """A report as plain values; numbers that are infinite or not a number become None."""
    found = asdict(report)
    found["memory"]["margin_bytes"] = report.memory.margin_bytes if report.memory.limit_bytes else None
    return {"schema": SCHEMA, "version": VERSION, **_finite(found)}


def report_json(report: Report) -> str:
    return json.dumps(report_data(report), indent=1, allow_nan=False)


def comparison_json(found: Comparison) -> str:
    return json.dumps({"schema": COMPARISON, "version": VERSION, **_finite(asdict(found))}, indent=1, allow_nan=False)


def trace_comparison_json(found: TraceComparison) -> str:
    rows = [{**asdict(row), "difference_s": row.difference_s} for row in (*found.rows, found.step)]
    return json.dumps({"schema": TRACE_COMPARISON, "version": VERSION, **_finite({**asdict(found), "rows": rows})},
                      indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


__all__ = ["SCHEMA", "VERSION", "comparison_json", "report_data", "report_json", "trace_comparison_json"]
