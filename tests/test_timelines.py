"""Timelines and traces of a predicted step: one event at a time on a row, in torch's order of micro-batches."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from autoparallel.plans import Plan
from autoparallel.plans.reports.timeline import timeline_of
from autoparallel.plans.reports.trace import trace_json
from autoparallel.schedule.pipeline_tasks import PipelineTasks, StageTimes, simulated_s
from autoparallel.schedule.schedules import SCHEDULES
from autoparallel.schedule.step_config import Hybrid, as_rounds
from cost_models.pipeline import pipeline_s
from cost_models.timeline import equal_slowdown, simulate
from tests.support.reported import NAMES, PIPELINES


@pytest.mark.parametrize("name", NAMES)
def test_a_timeline_has_no_overlap_on_a_row_and_ends_with_the_step(plans: dict[str, Plan], name: str) -> None:
    line, plan = timeline_of(plans[name]), plans[name]
    for number in range(len(line.rows)):
        boxes = sorted((box for box in line.boxes if box.row == number), key=lambda box: box.start_s)
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in pairwise(boxes))
    for box in line.boxes:
        assert all(line.boxes[other].end_s <= box.start_s + 1e-12 for other in box.after)
    rel = 0.04 if name in PIPELINES else 1e-6
    assert line.total_s == pytest.approx(plan.prediction.step_s - plan.prediction.fixed_s, rel=rel)
    if plan.hybrid.stages > plan.hybrid.pipeline_ranks:  # no less is predicted than the order of micro-batches takes
        assert line.total_s <= (plan.prediction.step_s - plan.prediction.fixed_s) * (1 + 1e-9)


def test_stages_that_are_not_equal_wait_for_one_another() -> None:
    hybrid = Hybrid(8, 4, 2, "interleaved", ("a", "b", "c"))
    equal = simulated_s(hybrid, [StageTimes(1.0, 2.0)] * 4)
    assert equal == pytest.approx(pipeline_s([6.0, 6.0], 8, 2))
    pairs = replace(hybrid, micro_batches=16, copies=2)    # as long as eight micro-batches of twice the length
    assert simulated_s(pairs, [StageTimes(1.0, 2.0)] * 4) == pytest.approx(2 * equal)
    unequal = simulated_s(hybrid, [StageTimes(f, 2 * f) for f in (0.5, 0.5, 1.5, 1.5)])
    assert unequal > equal * 1.01  # each rank has the same work
    many = replace(hybrid, micro_batches=64)
    assert simulated_s(many, [StageTimes(1.0, 2.0)] * 4) == pytest.approx(pipeline_s([6.0, 6.0], 64, 2))


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_order_that_is_kept_holds_for_all_seconds(name: str) -> None:
    """Of two pipelines that differ in what their stages take: the end by events, where overlap slows nothing down."""
    hybrid = Hybrid(8, 4 if SCHEDULES[name].several_stages else 2, 2, name)
    draw = random.Random(name)
    for _ in range(3):
        times = tuple(StageTimes(*(draw.uniform(0.1, 3.0) for _ in range(3))) for _ in range(hybrid.stages))
        by_events = simulate(PipelineTasks(hybrid, times).tasks, equal_slowdown(["compute", "send"], 1.0))
        assert simulated_s(hybrid, times) == by_events.total_s


@pytest.mark.parametrize(("group", "chunks", "count"), [(2, 2, 4), (4, 2, 8), (4, 4, 32), (8, 1, 8), (4, 3, 12)])
@pytest.mark.parametrize("late", [False, True])
def test_the_order_of_micro_batches_is_torchs(group: int, chunks: int, count: int, late: bool) -> None:
    cuts = tuple(f"op{n}" for n in range(group * chunks - 1))
    hybrid = Hybrid(count, group * chunks, group, "zero_bubble" if late else "interleaved", cuts)
    per_round = count // max(1, count // group)
    for rank in range(group):
        warm = torch_schedules._get_warmup_ops(rank, chunks, per_round, group, count, multiply_factor=1 if late else 2)
        rest = count * chunks - warm
        ops = torch_schedules._get_1f1b_rank_ops(
            chunks, group, warm, rest, count * chunks - rest, rank,
            lambda step, rank=rank: step // per_round % chunks * group + rank,
            lambda step, rank=rank, warm=warm: (chunks - 1 - (step - warm) // per_round % chunks) * group + rank,
            num_1f1b_microbatches=rank, enable_zero_bubble=late)
        kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
        expected = [(kinds[op[1].name], op[0], op[2]) for op in ops if op is not None]
        assert list(hybrid.pipelining.order(hybrid, rank)) == expected


@pytest.mark.parametrize("name", PIPELINES)
def test_exposed_communication_of_micro_batches_has_a_row(plans: dict[str, Plan], name: str) -> None:
    plan, line = plans[name], timeline_of(plans[name])
    stages = plan.record.stages
    wanted = sum(plan.hybrid.micro_batches * (s.forward_communication_s + s.backward_communication_s)
                 + s.once_communication_s for s in stages)
    rows = {number for number, row in enumerate(line.rows) if row.stream == "exposed communication"}
    drawn = sum(box.end_s - box.start_s for box in line.boxes if box.row in rows)
    assert drawn == pytest.approx(wanted) and len(rows) == (plan.hybrid.pipeline_ranks if wanted else 0)
    assert all(s.forward_communication_s <= s.forward_s and s.backward_communication_s <= s.backward_s for s in stages)


@pytest.mark.parametrize("name", PIPELINES)
def test_boxes_of_pipelines_add_up_to_the_tables(plans: dict[str, Plan], name: str) -> None:
    """Forward, recompute, backward and optimizer, each the mean over ranks; all work of a step but hidden seconds."""
    plan, line = plans[name], timeline_of(plans[name])
    p, ranks, drawn = plan.prediction, plan.hybrid.pipeline_ranks, Counter[str]()
    for box in line.boxes:
        if not box.name.startswith("send"):
            drawn[box.kind] += (box.end_s - box.start_s) / ranks
    stages, many = plan.record.stages, plan.hybrid.micro_batches
    again_s = sum(many * s.recompute_s for s in stages) / ranks
    assert drawn["recompute"] == pytest.approx(again_s) and (again_s > 0) == (plan.hybrid.recompute != "none")
    assert drawn["optimizer"] == pytest.approx(p.optimizer_s)
    assert drawn["forward"] + drawn["recompute"] + drawn["backward"] == pytest.approx(
        p.forward_s + p.backward_s - p.ahead_s)
    assert drawn["forward"] / drawn["backward"] == pytest.approx((p.forward_s - p.recompute_s) / p.backward_s, rel=0.05)
    not_full_s = 1e-5 if plan.hybrid.copies > 1 else 1e-9    # latency of buckets, of which copies hide other seconds
    assert drawn["exchange"] == pytest.approx(p.exposed_s, abs=not_full_s)


@pytest.mark.parametrize("name", PIPELINES)
def test_each_micro_batch_runs_once_on_each_stage(plans: dict[str, Plan], name: str) -> None:
    hybrid = as_rounds(plans[name].hybrid)
    actions = [action for rank in range(hybrid.pipeline_ranks) for action in hybrid.pipelining.order(hybrid, rank)]
    kinds = "FBW" if hybrid.puts_off_weights else "FB"
    assert sorted(actions) == sorted((kind, stage, micro) for kind in kinds for stage in range(hybrid.stages)
                                     for micro in range(hybrid.micro_batches))


@pytest.mark.parametrize("name", NAMES)
def test_traces_follow_the_rules_of_perfetto(plans: dict[str, Plan], name: str) -> None:
    data = json.loads(trace_json(plans[name]))
    events = data["traceEvents"]
    assert {event["ph"] for event in events} <= set("XMCsf")
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["tid"], int)
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "process_sort_index", "thread_sort_index")
    for some in slices.values():
        some.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(some))
    begins, ends = ({e["id"]: e for e in events if e["ph"] == kind} for kind in "sf")
    assert begins.keys() == ends.keys() and begins
    for number, begin in begins.items():
        end = ends[number]
        assert (begin["cat"], begin["name"], end["bp"]) == (end["cat"], end["name"], "e") and begin["ts"] <= end["ts"]
        for event in (begin, end):
            assert any(a < event["ts"] < b for a, b in slices[event["pid"], event["tid"]])
    counters = [e for e in events if e["ph"] == "C"]
    for pid in {event["pid"] for event in counters}:
        mine = [event for event in counters if event["pid"] == pid]
        assert all(a["ts"] <= b["ts"] for a, b in pairwise(mine))
        assert all(len(e["args"]) == 1 and e["args"]["GiB"] >= 0 for e in mine)
    peak = max(event["args"]["GiB"] for event in counters) * 2**30
    assert peak == pytest.approx(plans[name].prediction.peak_bytes, rel=0.25 if name in PIPELINES else 1e-6)
