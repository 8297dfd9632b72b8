"""The benchmarks run, agree with themselves, and state their conditions."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from operator import truediv
from pathlib import Path

import pytest
import torch

from benchmarks import compiled_zoo, planning_time, search_quality, step_time
from benchmarks.measure import Spread, as_json, conditions, peak_memory_bytes


def test_spread() -> None:
    assert as_json(Spread.of([3.0, 1.0, 2.0])) == {"minimum_s": 1.0, "lower_s": 1.5, "median_s": 2.0, "upper_s": 2.5,
                                                   "maximum_s": 3.0, "repeats": 3}
    assert Spread.of([2.0]).upper_s == 2.0


def test_conditions_name_machine_and_versions() -> None:
    assert {"date", "cpu", "cores", "memory_gib", "python", "torch", "autoparallel"} <= set(conditions())
    assert peak_memory_bytes() > 2**27  # torch is loaded


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "llama3-70b", "small-llama"])
def test_configs_are_read(name: str) -> None:
    from autoparallel.models import load_model

    data = json.loads((planning_time.CONFIGS / f"{name}.json").read_text())
    model, _, _ = load_model(data, 1, 16, "bfloat16")
    parameters = {"gpt2": 124e6, "llama3-8b": 8.03e9, "llama3-70b": 70.6e9, "small-llama": 45e6}[name]
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)


@pytest.mark.slow
def test_planning_time_by_phase() -> None:
    (row,) = planning_time.run([planning_time.Case("gpt2", 2, (4,), 4, 128)], repeats=2)
    seconds = row["cpu_s"]
    phases = ("capture", "strategies", "pricing", "search", "report")
    for phase in (*phases, "emit", "check", "lowering", "import", "build"):
        assert 0 <= seconds[phase].minimum_s <= seconds[phase].median_s <= seconds[phase].maximum_s
        assert seconds[phase].repeats == 2
    assert sum(seconds[p].median_s for p in phases) == pytest.approx(seconds["plan"].median_s, rel=0.03)
    assert 0.1 < row["peak_gib"]["plan"] <= row["peak_gib"]["lowering"]
    assert 0 <= row["gap"] < 1
    json.dumps(as_json(row))


@pytest.mark.slow
def test_step_times_are_ratios_to_ours() -> None:
    rows = step_time.run(["wide_mlp"], repeats=2)
    by_name = {row["variant"]: row for row in rows}
    assert {"autoparallel", "DDP", "FSDP2", "tensor parallel by hand", "one process"} <= set(by_name)
    ours = by_name["autoparallel"]
    assert ours["ratio"] == (1, 1, 1)
    for row in rows:
        assert row["ratio"][1] == pytest.approx(sum(map(truediv, row["rounds_s"], ours["rounds_s"])) / 2)
        assert row["step"].repeats == len(row["rounds_s"]) == 2
        assert max(row["loss_difference"], row["gradient_norm_difference"]) <= step_time.TOLERANCE
    assert ours["predicted_s"] == min(ours["predicted_by_mesh_s"].values())
    assert ours["measured_over_predicted"] == pytest.approx(ours["step"].median_s / ours["predicted_s"])
    json.dumps(as_json(rows))


def test_a_variant_that_computes_something_else_fails_the_benchmark() -> None:
    once = {"autoparallel": [1.0], "DDP": [1.0], "one process": [1.0]}
    result = {"seconds": once, "processor": once,
              "losses": {"autoparallel": [2.0], "DDP": [2.0], "one process": [2.0]},
              "norms": {"autoparallel": 1.0, "DDP": 4.0, "one process": 1.0}, "predicted": {"4": 1.0}, "chosen": "4"}
    with pytest.raises(RuntimeError, match="DDP has a gradient_norm_difference from one process of 3"):
        step_time._rows("made up", result)


def test_the_regret_is_of_the_fastest_of_our_eager_plans() -> None:
    steps = {"autoparallel": 0.3, "autoparallel, mesh 4": 0.2, "autoparallel, inductor": 0.1, "DDP": 0.05}
    rows = [{"model": "net", "variant": name, "step": Spread.of([step])} for name, step in steps.items()]
    assert step_time.regrets(rows) == {"net": ("autoparallel, mesh 4", pytest.approx(1.5))}


def test_ratios_are_of_the_same_round() -> None:
    """Of a machine that becomes slower: not of the medians, 3 and 2."""
    rounds = {"autoparallel, baseline ddp": [1.0, 3.0, 40.0], "DDP": [2.0, 2.0, 100.0]}
    rows = [{"model": "net", "variant": name, "rounds_s": seconds, "rounds_cpu_s": [1.0, 1.0, 1.0]}
            for name, seconds in rounds.items()]
    (one,) = step_time.comparisons(rows)
    assert one == {"model": "net", "ours": "autoparallel, baseline ddp", "other": "DDP",
                    "ratio": pytest.approx((0.45, 0.5, 1.0)), "cpu_ratio": (1, 1, 1)}


def test_plans_are_as_good_as_proven() -> None:
    rows = list(search_quality.rows_of("llama", ["4"], ["auto", "recursive"], 20.0))
    assert [row.mesh for row in rows] == ["4"]
    for row in rows:
        assert row.limit is not None and row.least_bytes <= row.least_plan_bytes < row.limit < row.free_bytes
        for answers in (row.free, row.limited):
            best = answers["auto"]
            assert best.cost is not None and best.lower_bound is not None and best.gap is not None
            assert best.gap <= search_quality.GAP
            assert answers["recursive"].cost >= best.lower_bound  # type: ignore[operator]
        assert all(1 <= ratio <= search_quality.RATIO for ratio in row.ratios("recursive").values())
        peak, cost = row.limited["auto"].peak_bytes, row.limited["auto"].cost
        assert peak is not None and peak <= row.limit < row.free_bytes
        assert cost is not None and row.free["auto"].cost is not None and cost > row.free["auto"].lower_bound
    said = search_quality.summary(rows, ["auto", "recursive"])
    assert said["rows"] == said["limits"] == 1 and not said["gap above 0.1 %, or no plan"]
    json.dumps(said)


@pytest.mark.slow
def test_a_program_alone_is_the_same_optimum() -> None:
    (row,) = search_quality.rows_of("gpt2", ["2"], ["auto", "program"], 20.0)
    for answers in (row.free, row.limited):
        assert answers["program"].cost == pytest.approx(answers["auto"].cost, rel=search_quality.GAP)
        assert answers["program"].stop == "optimal"


@pytest.mark.slow
def test_steps_with_states_on_disk_beside_their_bound(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.offload", str(tmp_path), "--parameters", "3.4e7"],
                          capture_output=True, text=True, timeout=150, check=True)
    ratio = re.search(r"disk over bound: median ([0-9.]+)", done.stdout)
    assert ratio is not None and float(ratio[1]) > 0.3 and not any(tmp_path.iterdir())


@pytest.mark.ranks
@pytest.mark.slow
def test_compiled_architectures_are_held_to_one_process() -> None:
    row = compiled_zoo.examine("gpt2", (2,), "aot_eager")
    assert row.verdict == "equal" and row.error > 0 and row.plan


def test_differences_of_compiled_architectures_are_measured_against_the_largest_element() -> None:
    whole = torch.tensor([4.0, 2.0])
    assert compiled_zoo._error(torch.tensor([4.0, 2.5]), whole) == 0.125
    assert {compiled_zoo._error(wrong, whole) for wrong in (None, whole[:1], whole * math.nan)} == {math.inf}
