"""Reports: what they say is what the plan says, in every form; names from models and files stay text."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autoparallel
from autoparallel.capture import capture
from autoparallel.cli import app, main
from autoparallel.errors import PlanError
from autoparallel.partition import Splits
from autoparallel.planning import plan_graph
from autoparallel.planning.by_hand import ByHand
from autoparallel.planning.joint_plan import plan_jointly
from autoparallel.planning.options import Options
from autoparallel.planning.usual import recipes, usual_plans
from autoparallel.plans import Plan
from autoparallel.plans.record import Alternative, Trial, check_record
from autoparallel.plans.reports import text
from autoparallel.plans.reports.asked import ask
from autoparallel.plans.reports.build import report_of
from autoparallel.plans.reports.comparison import compare, explained
from autoparallel.plans.reports.data import report_json
from autoparallel.plans.reports.page import page
from autoparallel.plans.reports.pictures import timeline_pictures
from autoparallel.plans.reports.report import Report
from autoparallel.plans.reports.timeline import timeline_of
from autoparallel.plans.reports.trace import trace_json
from autoparallel.plans.reports.units import bytes_str, percent_str, seconds_str
from autoparallel.schedule.tiers import offload_of
from cost_models import Cluster
from cost_models.accuracy import error_bar
from tests.support.reported import (
    HIDDEN,
    LAYERS,
    NAMES,
    PIPELINES,
    SEQUENCE,
    TOKENS,
    VOCABULARY,
    WEIGHT,
    Transformer,
    another,
    made,
)


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_a_report_add_up(plans: dict[str, Plan], name: str) -> None:
    plan, report = plans[name], report_of(plans[name])
    assert sum(time.seconds for time in report.times if not time.beside) == pytest.approx(plan.prediction.step_s)
    assert sum(count for _, count in report.memory.kinds) == pytest.approx(plan.prediction.peak_bytes, rel=1e-4)
    assert plan.hybrid.pipeline_ranks * sum(use.seconds for use in report.collectives) == pytest.approx(
        sum(use.seconds for use in plan.prediction.collectives))
    assert {use.purpose for use in report.collectives} <= {"parameters", "gradients", "activations"}
    assert report.speed.unit == "tokens"
    assert report.speed.per_s == pytest.approx(TOKENS / plan.prediction.step_s)
    assert report.speed.per_device_per_s == pytest.approx(TOKENS / plan.prediction.step_s / 4)


def test_model_flops_are_those_of_the_formula(plans: dict[str, Plan]) -> None:
    weights = LAYERS * (4 * HIDDEN**2 + 8 * HIDDEN**2) + HIDDEN * VOCABULARY
    attention = LAYERS * 2 * TOKENS * SEQUENCE * HIDDEN  # of scores and of values, causal: the half
    for plan in plans.values():
        work, step_s = plan.record.workload, plan.prediction.step_s
        assert work.model_flops == pytest.approx(6 * TOKENS * weights + 3 * attention, rel=1e-6)
        assert work.hardware_flops >= work.model_flops
        assert report_of(plan).speed.mfu == pytest.approx(work.model_flops / (step_s * 4 * 67e12))
    assert plans["fsdp"].record.workload.parameters == sum(p.numel() for p in Transformer().parameters())


def test_error_bars_are_wider_for_plans_unlike_the_published_runs() -> None:
    profile = Cluster.load("h100-sxm").profile
    plain = error_bar(profile, None, ["pipeline"], 64)
    assert plain == error_bar(profile) and "published runs" in plain.basis
    experts, far = error_bar(profile, None, ["expert"], 64), error_bar(profile, None, [], 16384)
    assert experts.p90 == far.p90 == 1.5 * plain.p90
    assert "none of them with expert parallelism" in experts.basis and "on 512 devices at most" in far.basis
    assert "none of them" not in made(by_hand="dp=2,tp=2").prediction.basis


def test_gradients_that_nobody_needs_are_no_model_flops() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(64, 128, bias=False), torch.zeros(4096, 64)
    plan = autoparallel.plan(model, "h100-sxm", example_inputs=(x,), by_hand="dp=8")
    assert plan.record.workload.model_flops == 2 * 2 * 4096 * 64 * 128  # forward, and the weight's gradient
    assert (plan.record.workload.unit, plan.record.workload.count) == ("samples", 4096)


def test_recompute_is_in_hfu_only(plans: dict[str, Plan]) -> None:
    again = made(by_hand="dp=4,zero=3,recompute=full").record.workload
    assert again.model_flops == plans["fsdp"].record.workload.model_flops
    assert again.hardware_flops > 1.2 * plans["fsdp"].record.workload.hardware_flops


def test_price_and_energy(plans: dict[str, Plan], tmp_path: Path) -> None:
    file = tmp_path / "priced.toml"
    file.write_text('based_on = "h100-sxm"\nname = "priced"\n[device]\nprice_per_hour = 2.5\nwatts = 1000\n')
    report = report_of(made(cluster=Cluster.load(file, num_devices=4), by_hand="dp=4"))
    hours = 4 * report.speed.step_s / 3600
    assert report.speed.price_per_step == pytest.approx(2.5 * hours)
    assert report.speed.price_per_1e12 == pytest.approx(2.5 * hours / TOKENS * 1e12)
    assert report.speed.joules_per_step == pytest.approx(1000 * 3600 * hours)
    assert "Price " in report.summary[1] and "kWh" in report.summary[1]
    assert "Price " not in plans["fsdp"].summary()


@pytest.mark.parametrize(("name", "words"), [
    ("fsdp", "Data parallel 4 with ZeRO-3 (FSDP) over NVLink 4"),
    ("tensor", "Data parallel 2 with ZeRO-1 over NVLink 4, tensor parallel 2"),
    ("1f1b", "pipeline parallel 2 (1F1B) over NVLink 4, 8 micro-batches"),
    ("interleaved", "pipeline parallel 2 (interleaved 1F1B, 2 stages a rank)"),
])
def test_the_first_line_names_the_plan(plans: dict[str, Plan], name: str, words: str) -> None:
    assert words in plans[name].summary().split("\n")[0]


def test_the_other_lines_say_how_fast_how_full_and_how_sure(plans: dict[str, Plan]) -> None:
    plan = plans["searched"]
    p, (_, fast, sure) = plan.prediction, plan.summary().split("\n")
    ends = f"{seconds_str(p.step_s / (1 + p.p90))} and {seconds_str(p.step_s / (1 - p.p90))}"
    assert fast.startswith(f"{seconds_str(p.step_s)} a step of 4,096 tokens on 4 H100 SXM5 80GB with torch-eager "
                           f"(nine in ten are measured between {ends}) = ")
    assert "tokens/s per device" in fast and "% MFU" in fast
    assert f"{bytes_str(p.peak_bytes)} of the {bytes_str(p.limit_bytes)} that tensors may take, of 80 GiB" in fast
    assert sure.startswith("Of the step: compute ") and "communication exposed" in sure
    assert "Its sharding is proven" in sure
    assert "not searched" in plans["fsdp"].summary().split("\n")[2]


def test_plans_within_the_error_of_predictions_are_called_so(plans: dict[str, Plan]) -> None:
    plan = plans["searched"]
    step_s, record = plan.prediction.step_s, plan.record
    assert record is not None
    others = tuple(Alternative(factor * step_s, 1.0, ("x: a -> b",)) for factor in (1.02, 1.1, 1.3))
    close = replace(plan, prediction=replace(plan.prediction, p50=0.05), record=replace(record, alternatives=others))
    assert "the same with other layouts of x, " in close.summary() and "2.0 % slower" in close.summary()
    assert "About as fast, within the typical error of predictions (5.0 %): another that the search" in close.summary()
    assert "more of the other" not in close.summary()
    wide = replace(close, prediction=replace(plan.prediction, p50=0.2))
    assert "2.0 % slower; 1 more of the other plans below." in wide.summary()
    exact = replace(close, prediction=replace(plan.prediction, p50=0.01))
    assert "within the median error" not in exact.summary()
    table = text.alternatives_table(report_of(close))
    assert list(table.columns[2].cells) == ["2.0 %, within the error", "10 %", "30 %"]
    assert list(table.columns[0].cells) == ["The same with other layouts of x"] * 3


def test_the_summary_says_why_no_other_plan(plans: dict[str, Plan]) -> None:
    plan = plans["searched"]
    step_s, peak, record = plan.prediction.step_s, plan.prediction.peak_bytes, plan.record
    assert record is not None and len(plan.summary().split("\n")) == 3
    others = (another(1.2 * step_s, 1.0, "Data parallel 4", "dp=4"),
              another(0.9 * step_s, 4 * peak, "Tensor parallel 4", "tp=4"),
              another(1.5 * step_s, 1.0, "Of stages", family="pipeline parallel"))
    told = replace(plan, prediction=replace(plan.prediction, limit_bytes=2 * peak, p50=0.05),
                   record=replace(record, alternatives=others)).summary().split("\n")[3]
    assert told.startswith("Why no other: the same kind by hand (dp=4), ")
    assert "20 % slower" in told
    assert f"tensor parallel by hand (tp=4), needs {bytes_str(4 * peak)} a device" in told
    assert "; pipeline parallel by the search (of stages), " in told and "50 % slower" in told
    both = replace(record, alternatives=(another(2.2 * step_s, 1.0, "", "tp=2,zero=3"),))
    told = replace(plan, record=both).summary()
    assert "FSDP with tensor parallel by hand (tp=2,zero=3), " in told and "2.2 times as slow" in told


def test_the_bytes_that_an_element_trains_with_are_said(plans: dict[str, Plan]) -> None:
    assert plans["fsdp"].record.workload.state_bytes == {"parameter": 4.0, "gradient": 4.0, "adamw states": 8.0}
    assert "before sharding: parameter 4, gradient 4, adamw states 8" in text.text_report(plans["fsdp"], width=200)
    assert "before sharding: parameter 4, gradient 4, adamw states 8" in page(plans["fsdp"])
    with_masters = made(cluster=Cluster.load("h100-sxm", num_devices=4, software="megatron-core"), by_hand="dp=4")
    assert sum(with_masters.record.workload.state_bytes.values()) >= 16.0


def test_usual_plans_are_compared_and_kept_in_the_file(tmp_path: Path) -> None:
    plan = made(compare_by_hand="usual")
    found = plan.record.comparisons[0]
    assert found.names[0] == "this plan" and found.names[1].startswith("by hand dp=4")
    (step,) = [row for row in found.rows if row.what == "whole step"]
    usual = min((one for one in plan.record.alternatives if one.by_hand), key=lambda one: one.step_s)
    assert step.saved_s == pytest.approx(usual.step_s - plan.prediction.step_s)
    parts = [row.saved_s for row in found.rows if row.saved_s is not None and row is not step]
    assert sum(parts) == pytest.approx(step.saved_s, abs=1e-3 * plan.prediction.step_s)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.record.comparisons == plan.record.comparisons
    assert f"Beside the plan {found.names[1]}" in page(again)
    assert json.loads(report_json(report_of(again)))["record"]["comparisons"][0]["names"] == list(found.names)
    told = CliRunner().invoke(app, ["show", str(tmp_path / "plan.json")])
    assert f"this plan beside {found.names[1]}" in " ".join(told.stdout.split())


@pytest.mark.slow
def test_a_usual_plan_that_a_joint_search_returns_is_not_called_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    def slower(*args: Any, **options: Any) -> Plan:
        found = plan_jointly(*args, **options)
        return replace(found, prediction=replace(found.prediction, waiting_s=1.0))

    monkeypatch.setattr(plan_graph, "plan_jointly", slower)
    monkeypatch.setattr(plan_graph, "_plain", lambda *_: [])
    plan = made(joint=True)
    assert plan.evidence.stop_reason.startswith("by hand: dp=4")
    report = report_of(plan)
    assert not report.proof.searched and report.proof.combinations is not None
    assert "It is a usual plan (by hand: dp=4" in plan.summary() and "proven" not in plan.summary()
    assert report.memory.limit_bytes > 0 and any(not one.by_hand for one in plan.record.alternatives)
    late = replace(plan, evidence=replace(plan.evidence, stop_reason=f"does not fit; {plan.evidence.stop_reason}"))
    assert not report_of(late).proof.searched


def test_jobs_that_do_not_fit_are_reported(plans: dict[str, Plan]) -> None:
    plan = plans["fsdp"]
    tight = replace(plan, prediction=replace(plan.prediction, limit_bytes=plan.prediction.peak_bytes / 2))
    assert "does not fit" in tight.summary()


def test_vocabulary_and_departures_are_said(plans: dict[str, Plan]) -> None:
    plan = plans["fsdp"]
    (outside, *_), others = plan.blocks[0].lines, plan.blocks[1:]
    lines = tuple((n, "n", "S(2)") if n == "head linear" else (n, s, o) for n, s, o in plan.blocks[0].lines)
    odd = replace(plan, blocks=(replace(plan.blocks[0], lines=lines), *others))
    assert outside[0] == "embed embedding"
    assert "Unusual: head is tensor parallel (axis dp)" in odd.summary()


def test_blocks_are_folded_by_part(plans: dict[str, Plan]) -> None:
    (_, equal), (_, layers, *_) = (report_of(plans[name]).blocks for name in ("fsdp", "tensor"))
    assert (equal.title, equal.count) == ("layers.0-1 (2 equal blocks)", LAYERS)
    parts = {row.part: row for row in layers.rows}
    assert {"norms", "attention", "MLP"} <= set(parts)
    assert "batch" in parts["MLP"].cut_by[0] and "weights" in parts["MLP"].cut_by[1]
    assert sum(row.ops for row in layers.rows) == len(layers.lines)


@pytest.mark.parametrize(("value", "text"), [(1.7e-8, "0 %"), (0.0004, "0.04 %"), (0.0351, "3.5 %"), (0.0999, "10 %")])
def test_percent(value: float, text: str) -> None:
    assert percent_str(value) == text


def test_a_saved_plan_tells_the_same(plans: dict[str, Plan], tmp_path: Path) -> None:
    for name, plan in plans.items():
        plan.save(tmp_path / f"{name}.json")
        read = Plan.load(tmp_path / f"{name}.json")
        assert read == plan and report_of(read) == report_of(plan)
        assert page(read) == page(plan) and trace_json(read) == trace_json(plan)


def test_plans_without_a_record_are_reported(plans: dict[str, Plan], tmp_path: Path) -> None:
    data = json.loads(plans["fsdp"].to_json())
    del data["record"]
    for use in data["prediction"]["collectives"]:
        del use["purpose"]
    old = Plan.from_json(json.dumps(data))
    assert "tokens" not in old.summary() and old.report() and page(old)
    with pytest.raises(PlanError, match="older version"):
        old.save_trace(tmp_path / "trace.json")


@pytest.mark.parametrize(("path", "value", "says"), [
    (("workload", "count"), float("nan"), "workload.count"), (("workload", "devices"), 0, "needs a device"),
    (("spans", 0, 3), -1.0, r"spans\[0\]"), (("spans", 0, 4), [99999], r"spans\[0\]"),
    (("memory", "num_bytes", 0), [1.0], "each kind in every row"),
    (("memory", "passed", 0), float("inf"), "memory row"),
])
def test_records_that_cannot_be_are_refused(plans: dict[str, Plan], path: tuple[object, ...], value: object, says: str
                                           ) -> None:
    data = json.loads(plans["fsdp"].to_json())
    place = data["record"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(PlanError, match=says):
        Plan.from_json(json.dumps(data))


@pytest.fixture(scope="module")
def asked(plans: dict[str, Plan]) -> Plan:
    return ask(plans["searched"], (WEIGHT,), 1, True)


def test_answers_are_kept(asked: Plan) -> None:
    told = asked.record
    check_record(told)
    rows = explained(told.explanations[WEIGHT])
    assert rows[0][0].endswith("(chosen)") and all(row[1][0] in "+-n" for row in rows[1:])
    assert len(told.alternatives) <= 1 and {s.what for s in told.sensitivities} >= {"memory limit"}
    assert "Sensitivity" in page(asked) and "(chosen)" in page(asked)


def test_comparisons_say_what_is_saved(plans: dict[str, Plan]) -> None:
    ours, theirs = (report_of(plans[name]) for name in ("fsdp", "tensor"))
    rows = {row.what: row for row in compare(ours, theirs).rows}
    assert rows["whole step"].saved_s == pytest.approx(theirs.speed.step_s - ours.speed.step_s)
    assert any(what.startswith("MLP of") for what in rows)
    parts = [time.part for time in ours.times if not time.beside]
    saved = sum(rows[part].saved_s or 0.0 for part in parts if part in rows)  # little things are left out
    assert saved == pytest.approx(rows["whole step"].saved_s, abs=1e-3 * theirs.speed.step_s)


def test_seconds_of_other_work_are_not_saved(plans: dict[str, Plan]) -> None:
    ours, theirs = report_of(plans["fsdp"]), report_of(plans["tensor"])
    half = replace(theirs.record, workload=replace(theirs.record.workload, count=TOKENS / 2))
    found = compare(ours, replace(theirs, record=half))
    assert all(row.saved_s is None for row in found.rows)
    (job,) = [row for row in found.rows if row.what == "work of a step"]
    assert job.texts[0].startswith("4,096 tokens") and job.texts[1].startswith("2,048 tokens")


def test_json_is_finite_documented_and_has_a_version(plans: dict[str, Plan]) -> None:
    plan = plans["searched"]
    odd = replace(plan, evidence=replace(plan.evidence, gap=math.inf, lower_bound_s=-math.inf))
    data = json.loads(report_json(report_of(odd)), parse_constant=lambda text: pytest.fail(text))
    assert (data["schema"], data["version"], data["proof"]["lower_bound_s"]) == ("autoparallel.report", 1, None)
    text = (Path(__file__).parents[1] / "docs/report_schema.md").read_text()
    for field in fields(Report):
        assert f"`{field.name}`" in text and field.name in data
    for part in (data["speed"], data["memory"], data["proof"], *data["axes"]):
        assert all(f"`{key}`" in text for key in part)


@pytest.mark.slow
def test_a_joint_plan_keeps_the_plans_of_other_combinations(tmp_path: Path) -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)), torch.zeros(4096, 512)
    plan = autoparallel.plan(model, Cluster.load("h100-sxm", num_devices=4), example_inputs=(x,), joint=True,
                             time_limit_s=5)
    kept = plan.known.alternatives
    assert kept and [one.step_s for one in kept] == sorted(one.step_s for one in kept)
    assert all(one.step_s >= plan.prediction.step_s * (1 - 1e-9) and one.differences for one in kept)
    assert any(line.split(":")[0] in ("mesh", "micro_batches", "stages", "zero_stage", "recompute")
               for one in kept for line in one.differences)
    plan.save(tmp_path / "plan.json")
    told = CliRunner().invoke(app, ["alternatives", str(tmp_path / "plan.json")])
    assert told.exit_code == 0 and "slower by" in told.stdout
    times = [other.prediction.step_s for other in plan.alternatives(2)]
    assert len(times) == 2 and times == sorted(times)


@pytest.mark.parametrize("name", ["fsdp", PIPELINES[0]])
def test_plots_draw_the_pages_shapes(plans: dict[str, Plan], name: str, tmp_path: Path) -> None:
    plan = replace(plans[name], axis_names=tuple(f"$x^{n}$" for n in range(len(plans[name].axis_names))))
    (area,) = plan.plot.timeline().axes
    (picture,) = timeline_pictures(timeline_of(plan), plan.prediction.step_s)
    assert len(area.patches) == len(picture.shapes)
    assert [label.get_text() for label in area.get_yticklabels()] == list(picture.rows)
    plan.plot.memory().savefig(tmp_path / "memory.png")
    with pytest.raises(PlanError, match="joint=True"):
        plan.plot.pareto()
    tried = replace(plan, record=replace(plan.known, trials=(Trial("one", 1.0, 2e9), Trial("two", 2.0, 1e9))))
    assert len(tried.plot.pareto().axes[0].patches) in (2, 3)


def test_show_and_diff(plans: dict[str, Plan], tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.json" for name in ("fsdp", "tensor")}
    for name, file in files.items():
        plans[name].save(file)
    call = CliRunner().invoke
    told = call(app, ["show", str(files["fsdp"])])
    assert told.exit_code == 0 and "what is cut by what" in told.stdout
    quiet = " ".join(call(app, ["show", str(files["fsdp"]), "--quiet"]).stdout.split())
    screen = report_of(plans["fsdp"]).first_screen
    assert quiet == " ".join(" ".join([answer.label, *answer.entries]) for answer in screen)
    assert json.loads(call(app, ["show", str(files["fsdp"]), "--json"]).stdout)["schema"] == "autoparallel.report"
    written = call(app, ["show", str(files["fsdp"]), "--html", str(tmp_path / "a.html"), "--trace",
                         str(tmp_path / "a.trace")])
    assert written.exit_code == 0 and (tmp_path / "a.html").read_text() == page(plans["fsdp"])
    assert json.loads((tmp_path / "a.trace").read_text())["traceEvents"]
    same, other = (call(app, ["diff", str(files["fsdp"]), str(files[name])]) for name in files)
    assert (same.exit_code, other.exit_code) == (0, 1) and "whole step" in other.stdout
    data = json.loads(call(app, ["diff", str(files["fsdp"]), str(files["tensor"]), "--json"]).stdout)
    assert data["schema"] == "autoparallel.comparison"


def test_saved_answers_and_those_that_nobody_asked_for(plans: dict[str, Plan], asked: Plan, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    file, other = tmp_path / "plan.json", tmp_path / "other.json"
    asked.save(file)
    plans["fsdp"].save(other)
    call = CliRunner().invoke
    told = " ".join(call(app, ["explain", str(file), WEIGHT]).stdout.split())
    assert "without overlap and waits" in told and "(chosen)" in told
    assert WEIGHT in call(app, ["explain", str(file)]).stdout
    assert "memory limit" in call(app, ["sensitivity", str(file)]).stdout
    for words in (["alternatives", str(other)], ["sensitivity", str(other)], ["explain", str(file), "other"]):
        monkeypatch.setattr("sys.argv", ["autoparallel", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2 and "plan ... --" in capsys.readouterr().err


def test_version_and_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout.strip() == f"autoparallel {autoparallel.__version__}"
    monkeypatch.setattr("sys.argv", ["autoparallel", "plan", "tests.support.reported:factory", "--mesh", "2",
                                     "--memory-limit", "1KiB", "--time-limit", "2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3


def test_the_doctor_finds_what_is_needed() -> None:
    from autoparallel.doctor import findings

    found = list(findings())
    assert {"torch", "planning", "process groups (gloo)"} <= {one.what for one in found}
    assert not [one for one in found if one.needed and not one.works]


@pytest.mark.parametrize("name", NAMES)
def test_collectives_of_a_rank_add_up_to_its_communication(plans: dict[str, Plan], name: str) -> None:
    """In pipelines too, where a plan has the sums over ranks. (Slicing and padding are communication's, too.)"""
    p, told = plans[name].prediction, report_of(plans[name]).collectives
    communication_s = p.forward_communication_s + p.backward_communication_s
    assert 0.95 * communication_s < sum(use.seconds for use in told) <= communication_s * (1 + 1e-9)


@pytest.mark.parametrize(("bound", "of_all", "told"), [
    (0.9, 0.8, "sharding is proven within 12 % of the best"), (0.3, 0.8, "sharding is not proven near the best"),
    (0.9, 0.25, "a plan 4 times as fast is not ruled out"), (0.9, 0.8, "At most 25 % slower than the best combination"),
])
def test_loose_bounds_are_called_so(plans: dict[str, Plan], bound: float, of_all: float, told: str) -> None:
    plan = plans["searched"]
    evidence = replace(plan.evidence, lower_bound_s=bound * plan.evidence.objective_s,
                       step_bound_s=of_all * plan.prediction.step_s)
    assert told in replace(plan, evidence=evidence).summary()
    away = replace(plan, evidence=evidence, hybrid=replace(plan.hybrid, offload=offload_of("host")))
    assert ("best combination with training state in these tiers" in away.summary()) == (of_all > 0.5)


def test_notebooks_show_the_summary_as_text(plans: dict[str, Plan]) -> None:
    odd = replace(plans["fsdp"], evidence=replace(plans["fsdp"].evidence, stop_reason="by hand <b>"))
    assert "&lt;b&gt;" in odd._repr_html_() and "<b>" not in odd._repr_html_()


@pytest.mark.parametrize(("devices", "host", "experts", "some"), [
    (8, 8, False, "dp=8,zero=3"), (8, 8, False, "tp=8,sequence_parallel,recompute=auto"),
    (8, 8, False, "pp=2,micro_batch=1,zero=1,recompute=auto"),
    (16, 8, False, "pp=2,micro_batch=1,tp=8,zero=1,sequence_parallel,recompute=selective"),
    (16, 8, True, "dp=16,ep=8,zero=1"), (1, 8, True, "dp=1"), (12, 8, False, "dp=12"),
    (64, 8, True, "pp=8,micro_batch=1,ep=8,zero=1,recompute=full"),
    (16, 8, False, "tp=8,zero=3,sequence_parallel,recompute=auto"), (3, 1, True, "dp=3"),
])
def test_usual_recipes_use_all_devices(devices: int, host: int, experts: bool, some: str) -> None:
    assert some in recipes(devices, host, experts)
    for count in range(1, 40):    # of any number, also on hosts of one device, and where they do not divide it
        found = list(recipes(count, host, experts))
        hands = [ByHand.of(recipe).on(count) for recipe in found]
        assert len(set(found)) == len(found) and all((h.dp or 1) * h.tp * h.pp == count for h in hands)


@pytest.mark.slow
def test_the_usual_plan_is_the_fastest_of_them_that_fits() -> None:
    with torch.device("meta"):
        model, ids = Transformer(), torch.zeros(TOKENS // SEQUENCE, SEQUENCE, dtype=torch.int64)
    split, cluster = Splits(capture(model, (ids, ids), {})), Cluster.load("h100-sxm", num_devices=4)
    text, plan = (usual := usual_plans(split, cluster, Options())).fastest
    assert text in recipes(4, 4) and plan.evidence.stop_reason.startswith("by hand")
    assert plan.prediction.step_s == min(one.prediction.step_s for one in usual.priced.values())
    _, smaller = usual_plans(split, cluster, Options(memory_limit_bytes=plan.prediction.peak_bytes - 1)).fastest
    assert smaller.prediction.peak_bytes < plan.prediction.peak_bytes
    assert smaller.prediction.step_s >= plan.prediction.step_s
    none = usual_plans(split, cluster, Options(memory_limit_bytes=1.0))
    assert none.fastest is None and [one.by_hand for one in none.left_out] == list(recipes(4, 4))


def test_a_plan_by_hand_says_how_sensitive_it_is_and_that_it_was_not_searched() -> None:
    plan = made(by_hand="dp=4,zero=1")
    found = {(one.what, one.factor): one for one in plan.sensitivity((0.5, 1.0, 2.0))}
    link = next(what for what, _ in found if what.startswith("bandwidth"))
    assert found[link, 0.5].held_s > found[link, 1.0].held_s > found[link, 2.0].held_s
    assert found[link, 1.0].held_s == pytest.approx(plan.prediction.step_s)
    assert found["memory limit", 2.0].held_s == plan.prediction.step_s
    with pytest.raises(PlanError, match="this plan is by hand"):
        plan.alternatives(2)
    with pytest.raises(PlanError, match="above 0"):
        plan.sensitivity((0.0,))


def test_collectives_are_hidden_or_exposed(plans: dict[str, Plan]) -> None:
    """What the tables of collectives take in all is what hides under compute and what the summary calls exposed."""
    for name, plan in plans.items():
        report = report_of(plan)
        every, hidden, exposed = (seconds for _, seconds in report.collectives_s)
        assert every > 0 and every == pytest.approx(hidden + exposed, rel=1e-9), name
        assert exposed == pytest.approx(report.exposed_share * report.speed.step_s, rel=1e-9), name
        shown = text.text_report(plan, width=200)
        for what, seconds in report.collectives_s:
            assert re.search(rf"{what} .*{re.escape(seconds_str(seconds))} ", shown), (name, what)
            assert f'colspan="6">{what}</th><td class="n">{seconds_str(seconds)}</td>' in page(plan), (name, what)
    assert any(report_of(plan).collectives_s[1][1] > 0 for plan in plans.values())
