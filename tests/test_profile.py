"""`parallel.profile` and ``autoparallel compare-trace``: a measured step in the rows and parts of the predicted one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import autoparallel
from autoparallel.cli import app
from autoparallel.errors import InputError, PlanError
from autoparallel.plans import Plan
from autoparallel.plans.reports import step_parts as parts
from autoparallel.plans.reports.step_parts import compare_traces, predicted_parts
from autoparallel.plans.reports.trace import FIRST_MEASURED, trace_json
from autoparallel.runtime.measured import _lanes, measured_step
from autoparallel.runtime.op_ranges import OP, RUN, OpRange
from autoparallel.runtime.recorded import Recorded, Recording
from tests.support.models import CASES
from tests.support.ranks import mesh_of
from tests.support.tiers import with_slow


def event(name: str, start: float, end: float, kind: str = "cpu_op", **more: Any) -> Recorded:
    return Recorded(name, kind, more.pop("thread", 1), start, end, **more)


def annotation(name: str, start: float, end: float) -> Recorded:
    return event(name, start, end, "user_annotation")


OPS = [OpRange("layers.0 mm", "layers.0", parts.PRODUCTS), OpRange("all_reduce for x", "", parts.OTHERS, "model"),
         OpRange("begin_gathers of 2 parameters", "", parts.OTHERS, "data", True)]


def test_a_step_is_divided_into_its_parts() -> None:
    """A product, forward and backward; an all-reduce that is awaited; a gather beside the product; a hole of 1 s."""
    events = [
        annotation(f"{RUN}0 0", 0.0, 7.0),
        annotation(f"{OP}2", 0.0, 0.5), event("c10d::_allgather_base_", 0.0, 0.5),
        annotation(f"{OP}0", 1.0, 4.0), event("aten::mm", 1.0, 3.0, sequence=5), event("aten::add", 3.0, 4.0),
        annotation(f"{OP}1", 4.0, 7.0), event("c10d::allreduce_", 4.0, 4.1),
        event("_c10d_functional::wait_tensor", 4.1, 7.0),
        event("autograd::engine::evaluate_function: MmBackward0", 8.0, 9.5, sequence=5),
        event("aten::mm", 8.0, 9.5),
        event("gloo:all_gather", 0.1, 2.0, "user_annotation", thread=2),
        event("gloo:all_reduce", 4.05, 7.0, "user_annotation", thread=3),
        event("gloo:recv", 7.0, 8.0, "user_annotation"),
    ]
    found = measured_step(Recording(tuple(sorted(events, key=lambda e: (e.start_s, -e.end_s))), 10.0), OPS,
                      {"data": "network", "model": "NVLink"})
    said = {part: seconds for part, seconds in found.parts.items() if seconds}
    assert said == pytest.approx({
        parts.PRODUCTS: 4.5, "collectives of parameters": 1.9, "collectives of activations": 2.95,
        parts.OVERLAPPED: -1.0, parts.IDLE: 10.0 - 3.9 - 2.95 - 1.5})
    assert sum(found.parts.values()) == pytest.approx(found.total_s)
    names = {(name, found.rows[row]): told for name, _, row, _, _, told in found.boxes}
    assert names["layers.0 mm", "compute"]["block"] == "layers.0"
    assert names["backward of layers.0 mm", "compute"]["direction"] == "backward"
    assert ("gloo:all_gather (begin_gathers of 2 parameters)", "network") in names
    assert ("forward of micro-batch 0, stage 0", "compute") in names and ("receive", "receive") in names
    assert ("backward of micro-batch 0, stage 0", "compute") in names


def test_a_collective_is_of_the_kind_that_was_asked_for() -> None:
    """gloo runs a reduce-scatter as an all-reduce, and records that."""
    events = [annotation(f"{OP}1", 0.0, 0.5), event("c10d::reduce_scatter_tensor_coalesced_", 0.1, 0.4),
              event("gloo:all_reduce", 0.2, 1.0, "user_annotation", thread=2),
              event("gloo:all_gather", 1.0, 1.5, "user_annotation", thread=2)]
    found = measured_step(Recording(tuple(events), 2.0), OPS, {"model": "network"})
    assert {kind: calls.count for kind, calls in found.collectives.items()} == {"reduce_scatter": 1, "all_gather": 1}


def test_kernels_take_the_decision_of_the_op_that_launched_them() -> None:
    events = [annotation(f"{OP}0", 0.0, 0.2), event("aten::mm", 0.0, 0.1, link=7),
              annotation(f"{OP}1", 0.2, 0.3), event("c10d::allreduce_", 0.2, 0.3, link=8),
              event("sm90_gemm", 0.5, 2.0, "kernel", link=7, stream=7),
              event("ncclDevKernel_AllReduce", 1.5, 3.0, "kernel", link=8, stream=9)]
    found = measured_step(Recording(tuple(events), 4.0), OPS, {"model": "NVLink"})
    assert {part: s for part, s in found.parts.items() if s} == pytest.approx({
        parts.PRODUCTS: 1.5, "collectives of activations": 1.5, parts.OVERLAPPED: -0.5, parts.IDLE: 1.5})
    assert {(found.rows[row], name) for name, _, row, *_ in found.boxes} == {
        ("compute", "layers.0 mm: sm90_gemm"), ("NVLink", "ncclDevKernel_AllReduce (all_reduce for x)")}


def test_boxes_that_overlap_without_nesting_get_rows_of_their_own() -> None:
    rows, found = _lanes([("a", "", "link", 0.0, 2.0, {}), ("b", "", "link", 1.0, 3.0, {}),
                          ("inner", "", "link", 0.5, 1.5, {}), ("later", "", "link", 3.0, 4.0, {})])
    assert rows == ("link", "link (2)")
    assert {name: row for name, _, row, *_ in found} == {"a": 0, "inner": 0, "b": 1, "later": 0}


# ------------------------------------------------------------------------------------------------ predicted parts


@pytest.fixture(scope="module")
def plan() -> Plan:
    with torch.device("meta"):
        model, x = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()), torch.zeros(4096, 512)
    return autoparallel.plan(model, "h100-sxm", example_inputs=(x,), by_hand="dp=8,zero=3")


def test_predicted_parts_add_up_to_the_step(plan: Plan) -> None:
    found = predicted_parts(plan)
    p = plan.prediction
    assert sum(found.values()) == pytest.approx(p.step_s - p.optimizer_s)
    assert found[parts.PRODUCTS] > 0 and found[parts.OTHERS] > 0 and found["collectives of gradients"] > 0


def test_compare_trace_prints_the_parts(plan: Plan, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "predicted.json", tmp_path / "measured.json"
    ours.write_text(trace_json(plan))
    told = json.loads(ours.read_text())
    told["otherData"]["parts"] = {"measured": {parts.PRODUCTS: 1.0}}
    theirs.write_text(json.dumps(told))
    found = compare_traces(ours, theirs)
    assert found.step.measured_s == 1.0 and found.rows[0].part == parts.PRODUCTS
    run = CliRunner().invoke(app, ["compare-trace", str(ours), str(theirs)])
    assert run.exit_code == 0 and "matrix products" in run.stdout and "1 s" in run.stdout
    data = json.loads(CliRunner().invoke(app, ["compare-trace", str(ours), str(theirs), "--json"]).stdout)
    assert data["schema"] == "autoparallel.trace_comparison" and data["rows"][-1]["measured_s"] == 1.0


def test_files_without_such_a_step_are_refused(plan: Plan, tmp_path: Path) -> None:
    ours, other = tmp_path / "a.json", tmp_path / "b.json"
    ours.write_text(trace_json(plan))
    with pytest.raises(PlanError, match="no measured step"):
        compare_traces(ours, ours)
    told = json.loads(ours.read_text())
    told["otherData"].update(fingerprint="other", parts={"measured": {parts.PRODUCTS: 1.0}})
    for text, match in ((json.dumps(told), "give traces of one model"), ("[]", "does not tell"), ("{", "cannot read"),
                        (json.dumps({**told, "otherData": {"fingerprint": "", "parts": {"measured": {"a": "b"}}}}),
                         "no seconds")):
        other.write_text(text)
        with pytest.raises(PlanError, match=match):
            compare_traces(ours, other)


# ------------------------------------------------------------------------------------------------ on ranks


def _profiled(folder: str, name: str, backend: str, options: dict[str, Any]) -> tuple[str, bool]:
    """The comparison as text, and whether gradients and run state stayed."""
    case, mesh = CASES["mlp" if backend == "inductor" else "llama"], mesh_of(2)
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh, example_inputs=args, example_kwargs=kwargs, backend=backend,
                                    cluster="local-cpu", **options)
    before = parallel.run_state()
    found = parallel.profile(f"{folder}/{name}.json", *args, **kwargs)
    with pytest.raises(InputError, match="ranks"):
        parallel.profile(f"{folder}/{name}.json", *args, ranks=[7], **kwargs)
    return str(found), parallel.run_state() == before and all(p.grad is None for p in parallel.parameters())


JOBS = {
    "zero3": ("eager", {"zero_stage": 3, "micro_batches": 2, "recompute": "full"}),
    "fsdp": ("eager", {"baseline": "fsdp"}),
    "zero2": ("eager", {"baseline": "fsdp", "zero_stage": 2, "micro_batches": 2}),
    "pipeline": ("eager", {"pipeline_stages": 2, "micro_batches": 4, "schedule": "1f1b"}),
    "inductor": ("inductor", {"baseline": "fsdp"}),
}


@pytest.mark.parametrize("name", with_slow(JOBS, "fsdp", "zero2"))
def test_measured_and_predicted_steps_share_rows(ranks: Any, tmp_path: Path, name: str) -> None:
    for text, same in ranks(2).run(_profiled, str(tmp_path), name, *JOBS[name], timeout_s=200.0):
        assert same and "without the profiler" in text
        assert ("no names of layers" in text) == (name == "inductor")
    path = tmp_path / f"{name}.json"
    found = compare_traces(path, path)
    measured = {row.part: row.measured_s for row in found.rows}
    assert measured[parts.PRODUCTS] > 0 and measured[parts.IDLE] > 0
    purposes = [row for row in found.rows if row.part in parts.COLLECTIVES.values()]
    assert purposes or name == "pipeline"
    if name == "inductor":
        assert measured[parts.INSIDE] > 0
    else:
        assert measured[parts.ATTENTION] > 0
        assert all(row.predicted_s > 0 and row.measured_s > 0 for row in purposes)
    data = json.loads(path.read_text())
    check_nesting(data["traceEvents"])
    mine = [e for e in data["traceEvents"] if e["ph"] == "X" and e["pid"] >= FIRST_MEASURED]
    assert {e["pid"] for e in mine} == {FIRST_MEASURED, FIRST_MEASURED + 1}
    said = {e["name"] for e in mine}
    if name != "inductor":
        assert any("layers.1" in one and one.startswith("backward of ") for one in said)
    if name == "zero3":
        assert any(one.startswith("again: ") for one in said)
    if name == "pipeline":
        theirs = {e["name"] for e in data["traceEvents"] if e["ph"] == "X" and e["pid"] < FIRST_MEASURED}
        runs = {one for one in theirs if "of micro-batch" in one and not one.startswith("send")}
        assert len(runs) == 16 and runs <= said


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Slices of a thread nest, as Perfetto wants them."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in events:
        if one["ph"] == "X":
            assert one["dur"] >= 0
            threads.setdefault((one["pid"], one["tid"]), []).append((one["ts"], one["ts"] + one["dur"]))
    for some in threads.values():
        ends = list[float]()
        for start, end in sorted(some, key=lambda s: (s[0], -s[1])):
            while ends and ends[-1] <= start + 1e-3:
                ends.pop()
            assert not ends or end <= ends[-1] + 2e-3
            ends.append(end)
