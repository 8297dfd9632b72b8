"""Predictions beside measurements, by all rows or with each row under constants fitted without it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.published_runs import fit, report
from benchmarks.published_runs.predict import priced
from benchmarks.published_runs.report import Pair
from benchmarks.published_runs.rows import AbstainError, Row, read
from cost_models.profile import Table, load

#: Gives each sample the part of the samples that is left out with it.
Parts = Callable[[list[fit.Sample]], Sequence[object]]


def compare(rows: list[Row], table: Table) -> tuple[list[Pair], dict[tuple[str, str], int]]:
    """Predicted and measured, and how many rows of which source were not predicted, and why."""
    pairs, abstained = [], defaultdict[tuple[str, str], int](int)
    for row in rows:
        name, prediction = report.source(row), dict[str, Any]()
        try:
            prediction = priced(read(row), table)
        except AbstainError as reason:
            abstained[name, str(reason)] += 1
        pairs.append(Pair(row, name, report.measured_s(row), prediction.get("step_time_s"),
                          report.measured_bytes(row), prediction.get("peak_memory_bytes")))
    return pairs, abstained


def samples(rows: list[Row]) -> dict[int, fit.Sample]:
    """Those that can be predicted and were measured, by number of the row."""
    found = {}
    for number, row in enumerate(rows):
        seconds = report.measured_s(row)
        try:
            if seconds:
                found[number] = fit.Sample(read(row), seconds, report.source(row))
        except AbstainError:
            continue
    return found


def pairs_left_out(rows: list[Row], *partitions: Parts) -> list[list[Pair]]:
    """By partition every row under constants fitted without those of its part (`fit.Fitted.without`)."""
    known = samples(rows)
    fitted = fit.Fitted(list(known.values()), load())
    return [_without(rows, known, fitted, parts(list(known.values()))) for parts in partitions]


def _without(rows: list[Row], known: dict[int, fit.Sample], fitted: fit.Fitted, every: Sequence[object]) -> list[Pair]:
    pairs = list[Pair]()
    for part, table in fitted.without(every):
        theirs = [rows[number] for number, other in zip(known, every, strict=True) if other == part]
        pairs += compare(theirs, table)[0]
    return pairs
