"""Rows of experts travel beside shared experts: where, in the order that is simulated, with one process's numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import autoparallel
from autoparallel.capture import OpGraph, capture
from autoparallel.kernels.expert_dispatch import dispatched_experts, run_experts, send_rows, take_results
from autoparallel.lower import emit
from autoparallel.lower.expert_pass import overlap_experts
from autoparallel.ops.routed_experts import routed_experts
from autoparallel.planning.faster_pieces import with_faster_experts
from autoparallel.planning.options import Options
from autoparallel.plans import Hybrid
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer
from autoparallel.pricing.hidden import hidden_s
from autoparallel.pricing.overlap_simulation import RankStep
from autoparallel.strategies.space import StrategySpace
from benchmarks.zoo import build, inputs_of
from cost_models import Cluster
from tests.support.captured import graph_of, plan_of
from tests.support.launch_order import drawn_of
from tests.support.models import CASES
from tests.support.ranks import mesh_of
from tests.support.reference import assert_same_gradients, gradients_of, scalar, train_reference
from tests.support.steps import assert_one_process
from tests.support.tiers import slow


@pytest.mark.parametrize("name", ["deepseek_v3", slow("qwen2_moe")])
def test_shared_experts_come_right_behind_the_routed_ones(name: str) -> None:
    """DeepSeek computes them after the routed ones, Qwen before; nothing that needs the mixture is between."""
    graph = graph_of(name) if name in CASES else capture(build(name), (), inputs_of(name))
    mixture = next(node for node in graph.of_kind("op") if node.target is routed_experts)
    reader = next(node.index for node in graph if mixture.index in {ref.node for ref in node.inputs})
    between = [node for node in graph if mixture.index < node.index < reader]
    assert sum(node.op_name == "aten.linear.default" for node in between) == {"deepseek_v3": 3, "qwen2_moe": 4}[name]
    assert all("shared_expert" in node.module_path or node.module_path.endswith("mlp") for node in between)
    assert all(ref.node < node.index for node in graph for ref in node.inputs)


def test_ops_that_others_need_earlier_stay() -> None:
    """Mixtral has no other branch: its ops, in their order, are those without the pass."""
    names = [node.op_name for node in graph_of("mixtral").of_kind("op")]
    mixture = names.index("autoparallel.routed_experts.default")
    assert names[mixture + 1 : mixture + 3] == ["aten.reshape.default", "aten.sum.dim_IntList"]


@pytest.mark.parametrize(("case_name", "mesh_shape", "hybrid"), [
    ("deepseek_v3", (2,), Hybrid()), slow("deepseek_v3", (2,), Hybrid(2, zero_stage=3, recompute="full")),
    slow("deepseek_v3", (2, 2), Hybrid(zero_stage=3)), slow("deepseek_v3", (2, 2), Hybrid(recompute="full")),
    slow("deepseek_v3", (2,), Hybrid(2, zero_stage=3)), slow("deepseek_v3", (2,), Hybrid(2, zero_stage=1)),
    slow("deepseek_v3", (2,), Hybrid(2)), slow("deepseek_v3", (2,), Hybrid(recompute="selective")),
    slow("deepseek_v3", (2,), Hybrid(zero_stage=3, recompute="selective")), slow("mixtral", (2, 2), Hybrid()),
    slow("deepseek_v3", (2,), Hybrid(2, copies=2)), slow("mixtral", (2,), Hybrid(zero_stage=3)),
    ("deepseek_v3", (2,), Hybrid(2, zero_stage=1, copies=2)),
    slow("deepseek_v3", (2,), Hybrid(2, zero_stage=3, copies=2)),
    slow("deepseek_v3", (2,), Hybrid(2, zero_stage=1, copies=2, recompute="full")),
    slow("deepseek_v3", (2,), Hybrid(2, copies=2, recompute="selective")),
    slow("deepseek_v3", (2,), Hybrid(4, 2, 2, "1f1b", zero_stage=1, copies=2)),
    slow("deepseek_v3", (2,), Hybrid(4, 2, 2, "1f1b")), slow("deepseek_v3", (2,), Hybrid(4, 2, 2, "zero_bubble")),
], ids=str)
def test_rows_are_launched_and_awaited_where_simulated(
    case_name: str, mesh_shape: tuple[int, ...], hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = drawn_of(case_name, mesh_shape, 1, hybrid, monkeypatch)
    drawn.take("dispatch")
    drawn.check()
    if hybrid.copies > 1 or hybrid.stages > 1:
        return    # of several stages one has the mixture
    step = RankStep(SpacePricer(drawn.prices, counts=ExecutionCounts(drawn.space, Hybrid())), drawn.strategies)
    opened = [one.window for one in step.activations.mixtures.values() if one.window.is_open]
    assert len(opened) == (case_name == "deepseek_v3")


def test_a_program_has_shared_experts_between_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = drawn_of("deepseek_v3", (2,), 1, Hybrid(), monkeypatch)
    drawn.take("dispatch")
    module = emit(drawn.space, drawn.strategies, drawn.prices.path, (0,)).module
    assert any(node.target is dispatched_experts for node in module.graph.nodes)
    targets = [node.target for node in overlap_experts(module, Hybrid()).graph.nodes]
    assert dispatched_experts not in targets
    send, run, take = map(targets.index, (send_rows, run_experts, take_results))
    linear = torch.ops.aten.linear.default
    assert targets[send:run].count(linear) == 2 and targets[run:take].count(linear) == 1
    untouched = overlap_experts(module, Hybrid(2, 2, 2, "zero_bubble"))
    assert untouched is module
    with_copies = [node.target for node in overlap_experts(module, Hybrid(2, copies=2)).graph.nodes]
    at = with_copies.index(send_rows)    # the parts follow each other: other copies run between
    assert with_copies[at + 1] is run_experts and linear not in with_copies[at : with_copies.index(take_results)]


def test_the_price_counts_what_shared_experts_hide() -> None:
    """The larger the shared experts, the more of the all-to-all they hide, and never more than all of it."""
    plan = plan_of("deepseek_v3", Cluster.load("h100-sxm", num_devices=2), by_hand="dp=2,ep=2")
    space, strategies = space_of(plan, graph_of("deepseek_v3"))
    prices = Prices(space, Cluster.load("h100-sxm", num_devices=2))
    pricer = SpacePricer(prices, counts=ExecutionCounts(space, Hybrid()))
    step = RankStep(pricer, strategies)
    (mixture,) = step.activations.mixtures.values()
    assert mixture.window.is_open
    with_windows, without = hidden_s(pricer, strategies), RankStep(pricer, strategies, activations=False)
    sent = 2 * sum(timed.seconds for timed in (*mixture.rows, *mixture.results))
    found = with_windows - without.hidden(prices.device.overlap_slowdown).total
    assert 0 < found <= sent


def on_two(**device: float) -> Cluster:
    cluster = Cluster.load("h100-sxm", num_devices=2)
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, **device), profile=None)


@pytest.mark.parametrize("slowdown", [slow(1.0), 2.0])
def test_a_plan_leaves_windows_out_where_they_do_not_pay(slowdown: float) -> None:
    """Where compute and communication at a time take twice as long each, rows are awaited at once."""
    cluster = on_two(overlap_slowdown=slowdown)
    plan = plan_of("deepseek_v3", cluster, by_hand="dp=2,ep=2")
    space, strategies = space_of(plan, graph_of("deepseek_v3"))
    prices = Prices(space, cluster)
    pricer = SpacePricer(prices, counts=ExecutionCounts(space, Hybrid()))
    chosen = with_faster_experts(pricer, strategies, plan.prediction.step_s, Options()).counts.hybrid
    assert chosen == Hybrid(experts_overlap=slowdown == 1.0)
    apart = SpacePricer(prices, counts=ExecutionCounts(space, Hybrid(experts_overlap=False)))
    saved_s = hidden_s(pricer, strategies) - hidden_s(apart, strategies)
    assert (saved_s > 1e-3 * plan.prediction.step_s) == chosen.experts_overlap
    module = emit(space, strategies, prices.path, (0,)).module
    targets = [node.target for node in overlap_experts(module, chosen).graph.nodes]
    assert (send_rows in targets) == chosen.experts_overlap
    kept = dataclasses.replace(plan, hybrid=chosen)
    assert autoparallel.Plan.from_json(kept.to_json()).hybrid == chosen
    assert ("experts' rows sent and awaited" in kept.summary() + kept.report()) != chosen.experts_overlap


def test_memory_of_rows_on_their_way_counts() -> None:
    """Of each of two ranks 4 of 8 samples of 16 tokens, for each 2 experts: sent and received, forward and backward."""
    cluster = on_two()
    plan = plan_of("deepseek_v3", cluster, by_hand="dp=2,ep=2")
    space, strategies = space_of(plan, graph_of("deepseek_v3"))
    pricer = SpacePricer(Prices(space, cluster), counts=ExecutionCounts(space, Hybrid()))
    (mixture,) = RankStep(pricer, strategies).activations.mixtures.values()
    held = [one for one in pricer.windows.held if one.what == "rows"]
    assert [one.use.source for one in held] == [mixture.index] * 2
    problem, choice = pricer.full(), pricer.choice_of(strategies)
    edges = {(edge.source, edge.target, edge.interval): edge for edge in problem.edges}
    sent = max(sum(timed.message.num_bytes for timed in part) for part in (mixture.rows, mixture.results))
    for one in held:
        usages = edges[one.use.source, one.use.target, one.interval].usages
        assert usages[choice[one.use.source], choice[one.use.target]] == 2 * sent > 0
    apart = SpacePricer(Prices(space, cluster), counts=ExecutionCounts(space, Hybrid(experts_overlap=False)))
    assert not any(one.what == "rows" for one in apart.windows.held)


def space_of(plan: autoparallel.Plan, graph: OpGraph) -> tuple[Any, Any]:
    space = StrategySpace(graph, plan.mesh_shape, plan.axis_names)
    return space, plan.strategies_on(space)


def run_plan(backend: str, plan: autoparallel.Plan) -> tuple[float, Any]:
    """On each rank: loss and gradients."""
    case = CASES["deepseek_v3"]
    args, kwargs = case.inputs(8)
    mesh = mesh_of(*plan.mesh_shape)
    parallel = autoparallel.compile(case.build(), mesh, example_inputs=args, example_kwargs=kwargs, backend=backend,
                                    plan=dataclasses.replace(plan, axis_names=mesh.mesh_dim_names))
    loss = case.loss(parallel(*args, **kwargs))
    loss.backward()
    return scalar(loss), gradients_of(parallel)


@pytest.mark.parametrize(("backend", "by_hand"), [
    ("eager", "dp=4,ep=4"),
    slow("eager", "dp=4,ep=2,zero=3"), slow("eager", "dp=2,ep=2,tp=2")])
def test_gradients_are_those_of_one_process(ranks: Any, backend: str, by_hand: str) -> None:
    reference = train_reference(CASES["deepseek_v3"], "sgd", num_steps=1)
    plan = plan_of("deepseek_v3", Cluster.load("local-cpu", num_devices=4), by_hand=by_hand)
    mixtures = [row for name, row in plan.strategies.items() if name.startswith("routed_experts") and ":" not in name]
    assert mixtures and all("dispatch" in row for row in mixtures)
    for loss, gradients in ranks(4).run(run_plan, backend, plan, timeout_s=200):
        assert loss == pytest.approx(reference.losses[0], rel=1e-5)
        assert_same_gradients(gradients, reference)


@pytest.mark.parametrize("by_hand", [
    "dp=4,ep=4,micro_batch=1", slow("dp=4,ep=4,micro_batch=1,zero=3,recompute=full"),
    slow("dp=4,ep=2,micro_batch=1,zero=2,recompute=selective"), slow("dp=2,ep=2,pp=2,micro_batch=1")])
def test_steps_are_those_of_one_process(ranks: Any, by_hand: str) -> None:
    plan = plan_of("deepseek_v3", Cluster.load("local-cpu", num_devices=4), by_hand=by_hand)
    pipeline = [plan.hybrid.pipeline_ranks] if plan.hybrid.stages > 1 else []
    mesh_shape = (*pipeline, *plan.mesh_shape)
    names = ("x", "y", "z")[len(pipeline) : len(mesh_shape)]
    assert_one_process(ranks, "deepseek_v3", mesh_shape, {"plan": dataclasses.replace(plan, axis_names=names)})
