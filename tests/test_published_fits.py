"""Constants fitted to published runs, and reports of predictions."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published_runs import report
from benchmarks.published_runs.__main__ import compare, line
from benchmarks.published_runs.fit import (
    FREE,
    PRIORS,
    SHARES,
    SPREAD,
    Fitted,
    Sample,
    concerns,
    fit,
    folds,
    inward,
    log_errors,
    lookup,
    outward,
)
from benchmarks.published_runs.predict import profile_of
from benchmarks.published_runs.price import Pricer
from benchmarks.published_runs.report import Pair, contradicted
from benchmarks.published_runs.rows import read
from cost_models.profile import dump, load
from tests.support.published_rows import EXPERTS, FSDP, row


def test_constants_belong_to_no_row_and_no_source() -> None:
    kinds = {"devices", "stacks", "networks"}
    assert {kind for kind, _, _ in FREE} == kinds == set(load())
    text = json.dumps(load())
    assert not any(word in text for word in ("korth", "bigsci", "vtrain", "mbridge", "mpt"))


def test_committed_constants_are_within_physics() -> None:
    table = load()
    for kind, entry, name in FREE:
        value = lookup(table, (kind, entry, name))
        assert 0 < value < (1 if name in SHARES else math.inf)
        off = (inward(name, value) - inward(name, lookup(load(PRIORS), (kind, entry, name)))) / SPREAD[name]
        assert abs(off) < 4, f"{entry}'s {name} is {off:.1f} standard deviations off its prior"


def test_the_fit_recovers_known_constants(tmp_path: Path) -> None:
    """Times priced with other constants, then fitted from the priors: little is left of the errors."""
    truth = load(PRIORS)
    truth["devices"]["a100"]["share"] = 0.78
    truth["stacks"]["megatron-2022"]["passes"] = 1.1
    runs = [read(row(plan__recompute=how, plan__micro_batch=mb)) for how in ("full", "selective") for mb in (1, 2)]
    made = [Sample(run, Pricer(run, profile_of(run, truth)).step().step_s, "made") for run in runs]
    before = abs(log_errors(load(PRIORS), made)).max()
    after = abs(log_errors(fit(made), made)).max()
    assert after < 0.02 and after < before / 3, (before, after)
    file = tmp_path / "constants.toml"
    file.write_text(dump(truth, "a test"), "utf-8")
    assert load(file) == truth


@pytest.mark.slow
def test_constants_leave_alone_the_runs_that_they_do_not_concern() -> None:
    """Which the fit prices no second time."""
    runs = [read(row()), read(row(**FSDP)), read(row(model__moe=EXPERTS, source__title="NeMo", plan__tp=1, plan__dp=8)),
            read(row(hardware__gpu="H100-80GB", plan__precision="fp8", plan__tp=1, plan__pp=1, plan__dp=1,
                     hardware__n_gpus=1, plan__virtual_stages=1, source__title="torchtitan"))]
    made, before = [Sample(run, 1.0, "") for run in runs], load()
    for free in FREE:
        table = {kind: {entry: dict(values) for entry, values in entries.items()} for kind, entries in before.items()}
        table[free[0]].setdefault(free[1], {})[free[2]] = 0.9 * lookup(before, free)
        changed = log_errors(table, made) != log_errors(before, made)
        assert not [run for run, moved in zip(runs, changed, strict=True) if moved and not concerns(free, run)], free


def test_a_source_left_out_does_not_count() -> None:
    """A constant that only its rows determine goes back to its prior; others stay where the rest puts them."""
    other = "MosaicML llm-foundry MPT training benchmarks"
    runs = [(read(row()), "first"), (read(row(**FSDP, source__title=other)), "second")]
    made = [Sample(run, 1.1 * Pricer(run, profile_of(run, load(PRIORS))).step().step_s, name) for run, name in runs]
    fitted = fit(made)
    mine, theirs = ("stacks", "megatron-2022", "passes"), ("stacks", "composer", "passes")
    left = dict(Fitted(made, fitted).without(["first", "second"]))
    priors = load(PRIORS)
    beyond = [lookup(table, mine) / lookup(table, ("stacks", "megatron", "passes"))
              for table in (left["first"], fitted)]
    assert beyond[0] == pytest.approx(1, abs=0.01) and beyond[1] > 1.03
    assert lookup(left["first"], theirs) > 1.01 * lookup(priors, theirs)


def test_parts_by_chance_hold_as_much_of_every_source() -> None:
    one = Sample(read(row()), 1.0, "")
    made = [replace(one, source=source) for source in "a" * 13 + "b" * 7 + "c" * 2]
    parts = folds(made, 5)
    assert parts == folds(made, 5) != folds(made, 5, seed=1)
    for source, least in (("a", 2), ("b", 1), ("c", 0)):
        counts = [sum(part == number for part, sample in zip(parts, made, strict=True) if sample.source == source)
                  for number in range(5)]
        assert set(counts) <= {least, least + 1}
    assert sorted(map(parts.count, range(5))) == [4, 4, 4, 5, 5]


@pytest.mark.slow
def test_a_common_error_moves_unmeasured_constants() -> None:
    """Products slower than the prior on one machine make every machine's slower, its own most."""
    truth = load(PRIORS)
    for entry, values in truth["devices"].items():
        values["share"] = 0.6 if entry == "a100" else values.get("share", 0.8)
    runs = [read(row(plan__micro_batch=mb, plan__global_batch=64 * mb)) for mb in (1, 2, 4)]
    made = [Sample(run, Pricer(run, profile_of(run, truth)).step().step_s, f"made {n}") for n, run in enumerate(runs)]
    fitted, priors = fit(made), load(PRIORS)
    drop = {entry: inward("share", lookup(priors, ("devices", entry, "share")))
            - inward("share", lookup(fitted, ("devices", entry, "share"))) for entry in ("a100", "gb200-nvl72")}
    assert 0.05 < drop["gb200-nvl72"] < drop["a100"]


@given(st.floats(0.01, 0.99))
def test_scales_go_there_and_back(value: float) -> None:
    for name in ("share", "host_s"):
        assert outward(name, inward(name, value)) == pytest.approx(value)


def test_the_report_counts_what_it_says() -> None:
    rows = [row(measured__step_time_s=13.0), row(plan__recompute="full", measured__step_time_s=18.0),
            row(plan__recompute="none", measured__step_time_s=13.5, measured__peak_memory_gb=60.0),
            row(model__hidden=None)]
    pairs, abstained = compare(rows, load())
    assert list(abstained.values()) == [1]
    found = report.summary(pairs)
    assert (found["rows"], found["predicted"], found["memory_rows"], found["jobs"]) == (4, 3, 1, 1)
    errors = [abs(pair.error) for pair in pairs if pair.error is not None]
    assert found["mean"] == pytest.approx(sum(errors) / 3)
    times = [pair.predicted_s for pair in pairs[:3]]
    assert found["regret"] == pytest.approx([13.0, 18.0, 13.5][times.index(min(times))] / 13.0 - 1)
    assert "GiB" in line(pairs[2])
    assert report.table({"korth": found}).count("\n") == 2


def test_contradicting_rows_are_reported() -> None:
    """Four sequences in less time than two, and wider layers in less than narrow ones; not what differs otherwise."""
    cases = [({"plan__micro_batch": 2, "plan__global_batch": 16}, 3.0),
             ({"plan__micro_batch": 4, "plan__global_batch": 32}, 2.0),     # contradicts the first
             ({"plan__micro_batch": 8, "plan__global_batch": 64}, 4.0),
             ({"plan__micro_batch": 8, "plan__global_batch": 32}, 1.0),     # fewer of them
             ({"plan__micro_batch": 8, "plan__global_batch": 64, "plan__tp": 4}, 1.0)]
    pairs = [Pair(row(**changes), "a", seconds, None) for changes, seconds in cases]
    assert contradicted(pairs) == {0, 1}
    wide = replace(pairs[2], row=row(**cases[2][0], model__hidden=25600), measured_s=3.5)
    assert contradicted([*pairs, wide]) == {0, 1, 2, 5}
    assert contradicted([pairs[0], replace(pairs[1], source="b")]) == set()


def test_ranks_share_ties() -> None:
    assert report.spearman([1, 1, 2], [1, 1, 2]) == pytest.approx(1)
    assert report.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert math.isnan(report.spearman([1, 1], [1, 2]))
