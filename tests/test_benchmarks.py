"""The benchmarks run, agree with themselves, and state their conditions."""

from __future__ import annotations

import pytest

from benchmarks import planning_time, step_time
from benchmarks.measure import Spread, as_json, conditions


def test_spread() -> None:
    assert as_json(Spread.of([3.0, 1.0, 2.0])) == {"minimum_s": 1.0, "median_s": 2.0, "maximum_s": 3.0, "repeats": 3}


def test_conditions_name_machine_and_versions() -> None:
    assert {"date", "cpu", "cores", "python", "torch", "autoparallel"} <= set(conditions())


def test_planning_time_by_phase() -> None:
    (row,) = planning_time.run([planning_time.Case("gpt2", 2, (4,), 4, 128)])
    assert {"capture", "strategies", "pricing", "search"} <= set(row["phases_cpu_s"])
    assert sum(row["phases_cpu_s"].values()) <= row["plan_cpu_s"] * 1.05
    assert row["peak_gib"] > 0.1 and 0 <= row["gap"] < 1


def test_step_times_are_ratios_to_ours() -> None:
    rows = step_time.run(["wide_mlp"], repeats=2)
    by_name = {row["variant"]: row for row in rows}
    assert set(by_name) == {"autoparallel", "DDP", "FSDP2", "tensor parallel by hand", "one process"}
    ours = by_name["autoparallel"]["step"].median_s
    for row in rows:
        assert row["ratio"] == pytest.approx(row["step"].median_s / ours)
