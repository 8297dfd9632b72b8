"""Lines of a run's steps beside the plan."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import autoparallel
from autoparallel.errors import InputError
from autoparallel.kernels.collectives import Waited
from autoparallel.plans import Plan
from autoparallel.runtime import step_log
from autoparallel.runtime.step_log import StepLine
from tests.support.ranks import RankPool


@pytest.fixture(scope="module")
def plan() -> Plan:
    with torch.device("meta"):
        model, x = torch.nn.Linear(512, 512), torch.zeros(4096, 512)
    return autoparallel.plan(model, "h100-sxm", example_inputs=(x,), by_hand="dp=8")


def run(plan: Plan, seconds: list[float], **options: object) -> list[StepLine]:
    """The lines of steps that take so long each."""
    now = [0.0]
    log = autoparallel.StepLog(plan, clock=lambda: now[0], **options)
    found = []
    for step_s in seconds:
        now[0] += step_s
        found.append(log.step())
    return [line for line in found if line is not None]


def test_lines_leave_out_the_first_step_and_count_what_the_plan_knows(plan: Plan) -> None:
    first, second = run(plan, [100.0, *[0.5] * 4, *[1.0] * 4], every=4)
    work = plan.record.workload
    assert (first.steps, first.step_s, second.steps, second.step_s) == (5, 0.5, 9, 1.0)
    assert second.over_plan == pytest.approx(1.0 / plan.prediction.step_s - 1)
    assert (second.unit, second.per_s) == ("samples", 4096.0)
    assert second.mfu == pytest.approx(work.model_flops / (8 * work.peak_flops_per_s))
    assert "4,100 samples/s" in str(second) and "step 9: 1 s (+" in str(second)


def test_writers_get_each_line(plan: Plan, tmp_path: Path) -> None:
    scalars: list[tuple[str, float, int]] = []

    class Board:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.append((name, value, step))

    file = tmp_path / "steps.jsonl"
    lines = run(plan, [1.0] * 5, every=2, writers=[autoparallel.JsonLines(file), autoparallel.TensorBoard(Board())])
    told = [json.loads(text) for text in file.read_text().splitlines()]
    assert [one["steps"] for one in told] == [3, 5] and told[1]["mfu"] == lines[1].mfu
    assert ("autoparallel/step_s", 1.0, 5) in scalars


def test_exposed_communication_is_told_where_collectives_were_awaited(plan: Plan, monkeypatch: pytest.MonkeyPatch
                                                                     ) -> None:
    meter = Waited()
    monkeypatch.setattr(step_log, "waited", meter)
    log = autoparallel.StepLog(plan, every=2)
    lines = []
    for _ in range(5):
        meter.calls, meter.seconds = meter.calls + 3, meter.seconds + 0.25
        lines += [line] if (line := log.step()) is not None else []
    assert [line.exposed_s for line in lines] == [0.25, 0.25]
    assert lines[0].plan_exposed_s == plan.prediction.exposed_s
    assert "communication exposed 250 ms (plan" in str(lines[0])
    assert run(plan, [1.0] * 3, every=1)[0].exposed_s is None    # nothing was awaited


def test_lines_go_to_the_trackers_of_an_accelerator(plan: Plan) -> None:
    from autoparallel.integrations import AcceleratorWriter

    told: list[tuple[dict[str, float], int]] = []
    tracker = SimpleNamespace(log=lambda values, step: told.append((values, step)))
    run(plan, [1.0] * 3, every=2, writers=[AcceleratorWriter(tracker)])  # type: ignore[arg-type]
    ((values, step),) = told
    assert step == 3 and values["autoparallel/step_s"] == 1.0 and "autoparallel/unit" not in values


def test_a_run_slower_than_nine_in_ten_predictions_were_off_warns_once(plan: Plan, caplog: pytest.LogCaptureFixture
                                                                      ) -> None:
    least_s, most_s = plan.prediction.nine_in_ten_s
    assert abs(plan.prediction.step_s / most_s - 1) == pytest.approx(plan.prediction.p90)  # of the measured step
    with caplog.at_level(logging.WARNING):
        run(plan, [9.0, *[0.99 * most_s] * 8], every=2)
        assert not caplog.records
        run(plan, [9.0, *[1.01 * most_s] * 8], every=2)
    (record,) = caplog.records
    message = record.getMessage()
    assert "parallel.profile" in message and " more than the plan's" in message and "forward compute" in message
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        run(plan, [9.0, *[0.99 * least_s] * 8], every=2)
    assert " less than the plan's" in caplog.text


def test_callbacks_count_optimizer_steps(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a job: a parallel module that has its plan already."""
    from autoparallel.integrations import AutoparallelLightningLog, AutoparallelTrainerLog
    from autoparallel.runtime.module import ParallelModule

    monkeypatch.setattr(ParallelModule, "plan", plan)
    parallel = ParallelModule.__new__(ParallelModule)
    now = iter(range(100))
    hugging = AutoparallelTrainerLog(clock=lambda: float(next(now)))
    hugging.on_train_begin(None, None, None)
    for _ in range(5):
        hugging.on_step_end(SimpleNamespace(logging_steps=2), None, None, model=parallel)
    assert (hugging.log.steps, hugging.log.last.steps, hugging.log.last.step_s) == (5, 5, 0.5)
    with pytest.raises(InputError, match="AutoparallelTrainer"):
        AutoparallelTrainerLog().on_step_end(SimpleNamespace(logging_steps=2), None, None, model=torch.nn.Linear(1, 1))

    trainer, module = SimpleNamespace(global_step=0, log_every_n_steps=1), torch.nn.Module()
    module.add_module("net", torch.nn.Linear(1, 1))
    light = AutoparallelLightningLog(clock=lambda: float(next(now)))
    light.on_train_start(trainer, module)
    trainer.global_step = 1
    with pytest.raises(InputError, match="parallel submodules are"):
        light.on_train_batch_end(trainer, module, None, None, 0)
    monkeypatch.setattr(light, "_parallel", lambda module: parallel)
    for step in (2, 2, 3, 3):    # gradients of two batches are accumulated
        trainer.global_step = step
        light.on_train_batch_end(trainer, module, None, None, 0)
    assert light.log.steps == 2 and light.log.last.step_s == 1.0


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_is_a_number_of_steps(plan: Plan, every: object) -> None:
    with pytest.raises(InputError, match="1 or more"):
        autoparallel.StepLog(plan, every=every)  # type: ignore[arg-type]


def _train() -> tuple[bool, int, bool]:
    torch.manual_seed(0)
    parallel = autoparallel.compile(torch.nn.Linear(8, 4), 2, cluster="local-cpu", baseline="ddp")
    log = autoparallel.StepLog(parallel, every=1)
    lines = []
    for _ in range(3):
        parallel(torch.ones(4, 8)).sum().backward()
        lines.append(log.step())
    exposed_s = log.last.exposed_s if log.last is not None else None
    return (parallel.plan.record is not None, sum(line is not None for line in lines),
            exposed_s is not None and 0 < exposed_s <= log.last.step_s)


def test_all_ranks_know_the_work_and_rank_0_tells(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(_train, timeout_s=200.0) == [(True, 2, True), (True, 0, False)]
