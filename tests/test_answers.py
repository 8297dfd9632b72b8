"""Answers about plans by hand, and about joint searches whose answer is one; a question without an answer loses no
plan."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import autoparallel
from autoparallel.cli import app
from autoparallel.errors import InfeasibleError, InputError, PlanError
from autoparallel.partition import Splits
from autoparallel.plan_cli import Progress
from autoparallel.planning import plan_graph
from autoparallel.planning.by_hand import ByHand
from autoparallel.planning.one_mesh import plan_on
from autoparallel.planning.options import Options, options_of
from autoparallel.planning.plan_by_hand import plan_by_hand
from autoparallel.planning.study import check_names
from autoparallel.plans import Plan
from autoparallel.plans.reports.asked import ask
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster
from tests.support.captured import plan_of
from tests.support.reported import graph, made
from tests.support.tiers import slow

CLUSTER = Cluster.load("h100-sxm", num_devices=4)
OPTIONS = Options(time_limit_s=10.0)


def by_hand(text: str) -> Plan:
    return plan_by_hand(Splits(graph()), CLUSTER, OPTIONS, ByHand.of(text))


def test_a_plan_by_hand_explains_what_each_strategy_costs() -> None:
    """The first is its own, and others may cost less: no search has compared them."""
    plan = by_hand("dp=2,tp=2")
    name = "layers.0.mlp.0.weight"
    first, *others = plan.explain(name)
    assert first.strategy == plan.strategies[name] and first.alone_s == first.resolved_s
    least = min(one.alone_s for one in others)
    assert math.isclose(first.alone_s, plan.evidence.objective_s) and least < math.inf
    assert any(one.resolved_s is not None and one.resolved_s < first.alone_s for one in others)


def test_a_module_is_named_with_its_ops() -> None:
    plan = by_hand("dp=4")
    with pytest.raises(PlanError, match=r"'head' is a module: ask for one of its ops, linear"):
        plan.explain("head")
    with pytest.raises(PlanError, match=r"no op, parameter or input 'heads'; is it one of"):
        plan.explain("heads")


@pytest.mark.slow
def test_a_joint_search_that_a_usual_plan_beats_answers_as_any_other() -> None:
    """Its alternatives are the plans that the search found; those of the usual plan alone are refused."""
    usual = by_hand("dp=4,zero=1")
    with pytest.raises(PlanError, match="this plan is by hand"):
        usual.alternatives(2)
    found = made(joint=True, compare_by_hand=None)
    answer = plan_graph.as_found(usual, math.inf, found)
    others = answer.alternatives(3)
    assert others[0].prediction.step_s == found.prediction.step_s
    assert [one.prediction.step_s for one in others] == sorted(one.prediction.step_s for one in others)
    asked = ask(answer, ["layers.0.mlp.0.weight"], 2, sensitivity=True)
    assert len(asked.known.alternatives) == 2 and asked.known.sensitivities and asked.known.explanations
    with pytest.raises(PlanError, match="say how many"):
        answer.alternatives(0)


def test_a_question_without_an_answer_loses_no_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = CliRunner().invoke(app, ["plan", "tests.support.reported:factory", "--devices", "2", "--by-hand", "dp=2",
                                    "--alternatives", "2", "--output", str(file)])
    assert isinstance(done.exception, PlanError) and "this plan is by hand" in str(done.exception)
    assert "predicted step" in done.output and f"plan written to {file}" in done.output and file.exists()


def test_a_wrong_name_is_refused_before_the_search(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    asked = ["plan", "tests.support.reported:factory", "--devices", "2", "--output", str(file), "--explain"]
    done = CliRunner().invoke(app, [*asked, "nothing"])
    assert isinstance(done.exception, PlanError) and "no op, parameter or input 'nothing'" in str(done.exception)
    assert not done.stdout and not file.exists()


@pytest.mark.parametrize(("baseline", "zero"), [
    ("ddp", 1), ("tensor_parallel", 3), ("sequence_parallel", 2), ("fsdp", 0)])
def test_a_baseline_is_refused_with_a_zero_stage_that_it_has_not(baseline: str, zero: int) -> None:
    """They made a plan that was neither."""
    with pytest.raises(PlanError, match=f"which zero_stage={zero} has not"):
        options_of({"baseline": baseline, "zero_stage": zero})
    assert options_of({"baseline": baseline, "zero_stage": 0 if zero else 3}).baseline == baseline
    with pytest.raises(PlanError, match="take baseline='fsdp', or"):
        options_of({"baseline": "ddp", "offload": "parameters"})


def test_an_interrupted_plan_says_that_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), Progress(1.0):
        raise KeyboardInterrupt
    assert "nothing is written" in capsys.readouterr().err


@pytest.mark.parametrize("phase", [slow("usual plans"), "planned in full"])
def test_an_interrupt_takes_the_best_plan_of_a_joint_search(phase: str) -> None:
    known = list[float]()

    def progress(told: str, best_s: float, bound_s: float) -> None:
        known.append(best_s)
        if phase in told:
            raise KeyboardInterrupt

    plan = plan_of("mlp", Cluster.load("a100-sxm", num_devices=4), joint=True, time_limit_s=5, progress=progress)
    assert plan.prediction.step_s <= min(known) < math.inf
    assert ("interrupted" in plan.evidence.stop_reason) == (phase == "planned in full")


def test_an_interrupt_takes_the_best_plan_of_the_meshes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said to take the best, and nothing was written; or the next mesh was searched."""
    begun, told = list[tuple[int, ...]](), list[tuple[str, float, float]]()
    cluster = Cluster.load("a100-sxm", num_devices=4)

    def interrupted(micro: Any, cluster: Cluster, shape: tuple[int, ...], names: Any, options: Any, hybrid: Any) -> Any:
        begun.append(shape)
        if len(begun) == 2:
            options.progress("bound", math.inf, math.inf)
            raise KeyboardInterrupt
        return plan_on(micro, cluster, shape, names, options, hybrid)

    monkeypatch.setattr("autoparallel.planning.meshes.plan_on", interrupted)
    plan = plan_of("mlp", cluster, progress=lambda *one: told.append(one))
    assert begun == [(4,), (2, 2)] and plan.mesh_shape == (4,)
    assert told[-1] == ("bound", plan.prediction.step_s, plan.evidence.lower_bound_s)
    assert plan.evidence.stop_reason.endswith("; interrupted before mesh 2x2")

    def stop(phase: str, best_s: float, bound_s: float) -> None:
        if best_s < math.inf:
            raise KeyboardInterrupt

    begun.clear()
    assert plan_of("mlp", cluster, progress=stop).mesh_shape == (4,) and begun == [(4,)]


def test_a_joint_search_without_a_loss_leaves_pipelines_out() -> None:
    """They need one: the search raised their error, and `replan` and `fit` lost the plans that they had found."""
    model, x = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)), torch.zeros(8, 32)
    for_two = partial(autoparallel.plan, model, Cluster.load("local-cpu", num_devices=2), example_inputs=(x,),
                      joint=True, time_limit_s=2)
    found = for_two()
    assert (found.hybrid.stages, found.hybrid.micro_batches) == (1, 1) and found.evidence.combinations is not None
    with pytest.raises(InfeasibleError, match="micro-batches were not tried, since they need a scalar loss"):
        for_two(memory_limit_bytes=1e3)
    with pytest.raises(InputError, match="a pipeline needs a scalar loss"):
        for_two(pipeline_stages=2)


def test_a_time_limit_of_0_is_not_told_as_the_wall_clock_s() -> None:
    plan = plan_of("mlp", Cluster.load("a100-sxm", num_devices=4), mesh_shape=(4,), time_limit_s=0)
    assert "wall clock" not in plan.evidence.stop_reason


def test_each_name_of_a_plan_in_micro_batches_may_be_asked_of() -> None:
    split = Splits(graph())
    check_names(split.graph, list(StrategySpace(split(2).body, (2,)).decision_named))
