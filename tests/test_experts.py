"""Mixtures of experts: one op, cut by tokens and by experts, equal to the model's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import autoparallel
from autoparallel.capture import OpGraph, capture
from autoparallel.capture.graph import Node
from autoparallel.kernels.expert_dispatch import dispatched_experts
from autoparallel.ops.routed_experts import routed_experts
from autoparallel.plans.roles import roles_of
from autoparallel.pricing import Prices, SpacePricer
from autoparallel.pricing.record import workload
from autoparallel.strategies.space import StrategySpace
from benchmarks.in_process import on_every_rank
from cost_models import Cluster
from tests.support.captured import graph_of, plan_of
from tests.support.models import CASES
from tests.support.ranks import mesh_of
from tests.support.reference import assert_same_gradients, gradients_of, scalar, train_reference
from tests.support.tiers import slow


def planned(mesh_shape: tuple[int, ...], strategy: tuple[str, ...]) -> autoparallel.Plan:
    """The search's plan, with another strategy for the mixtures."""
    plan = plan_of("mixtral", Cluster.load("local-cpu", num_devices=4), mesh_shape=mesh_shape)
    mixtures = {name: strategy for name in plan.strategies if name.startswith("routed_experts") and ":" not in name}
    assert len(mixtures) == 2
    return dataclasses.replace(plan, strategies={**plan.strategies, **mixtures})


def run_plan(mesh_shape: tuple[int, ...], plan: autoparallel.Plan) -> tuple[float, Any]:
    """On each rank: loss and gradients."""
    case = CASES["mixtral"]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(*mesh_shape), example_inputs=args, example_kwargs=kwargs,
                                    plan=dataclasses.replace(plan, axis_names=mesh_of(*mesh_shape).mesh_dim_names))
    loss = case.loss(parallel(*args, **kwargs))
    loss.backward()
    return scalar(loss), gradients_of(parallel)


@pytest.mark.parametrize(("mesh_shape", "strategy"), [
    slow((4,), ("e",)), ((2, 2), ("t", "e")), slow((4,), ("dispatch",)), ((2, 2), ("dispatch", "t")),
    *(pytest.param(mesh, strategy, marks=pytest.mark.slow) for mesh, strategy in [
        ((4,), ("t",)), ((2, 2), ("e", "t")), ((2, 2), ("e", "e")), ((2, 2), ("t", "dispatch")),
        ((2, 2), ("repeat", "dispatch"))]),
])
def test_a_mixture_is_cut_by_tokens_and_experts(ranks: Any, mesh_shape: tuple[int, ...], strategy: tuple[str, ...]
                                               ) -> None:
    reference = train_reference(CASES["mixtral"], "sgd", num_steps=1)
    for loss, gradients in ranks(4).run(run_plan, mesh_shape, planned(mesh_shape, strategy), timeout_s=100):
        assert loss == pytest.approx(reference.losses[0], rel=1e-5)
        assert_same_gradients(gradients, reference)


@pytest.mark.parametrize("by_hand", [slow("dp=4,ep=2,zero=1"), "dp=4,ep=2,zero=3"])
def test_experts_by_hand_with_zero_over_both_axes(ranks: Any, by_hand: str) -> None:
    """Weights of no expert are stored in shards over all four ranks; one step equals one process."""
    reference = train_reference(CASES["mixtral"], "sgd", num_steps=1)
    plan = plan_of("mixtral", Cluster.load("local-cpu", num_devices=4), by_hand=by_hand)
    assert all(stored[0] == "S" for stored in plan.strategies["model.layers.0.self_attn.q_proj.weight"])
    for loss, gradients in ranks(4).run(run_plan, plan.mesh_shape, plan, timeout_s=100):
        assert loss == pytest.approx(reference.losses[0], rel=1e-5)
        assert_same_gradients(gradients, reference)


@pytest.mark.parametrize(("by_hand", "roles"), [
    ("dp=2,ep=2,tp=2,zero=3,sequence_parallel", "expert 2 (in shards) x tensor 2 (norms along the sequence), ZeRO 3"),
    pytest.param("dp=2,ep=2,tp=2", "expert 2 x tensor 2", marks=pytest.mark.slow),
    pytest.param("dp=4,ep=4,zero=2", "expert 4 (in shards), ZeRO 2", marks=pytest.mark.slow)])
def test_expert_parallel_ranks_by_hand_share_the_work(ranks: Any, by_hand: str, roles: str) -> None:
    """Beside them, tensor-parallel ranks take other tokens, and ZeRO shards what is no expert over all of them."""
    plan = plan_of("mixtral", Cluster.load("h100-sxm", num_devices=4), by_hand=by_hand)
    assert str(roles_of(plan)) == roles and not roles_of(plan).departures and "depart" not in plan.evidence.stop_reason
    reference = train_reference(CASES["mixtral"], "sgd", num_steps=1)
    for loss, gradients in ranks(4).run(run_plan, plan.mesh_shape, plan, timeout_s=120):
        assert loss == pytest.approx(reference.losses[0], rel=1e-5)
        assert_same_gradients(gradients, reference)


def test_model_flops_of_experts_are_three_times_those_of_forward() -> None:
    graph = graph_of("mixtral")
    space = StrategySpace(graph, (2,))
    pricer = SpacePricer(Prices(space, Cluster.load("h100-sxm", num_devices=2)))
    first = [s.strategies[0] for s in space.strategy_sets]
    named = [(s, graph.nodes[d.node].op_name) for s, d in zip(space.strategy_sets, space.decisions, strict=True)]
    mixtures = [s for s, name in named if "routed_experts" in name]
    others = [s for s, name in named if "routed_experts" not in name and s.rule is not None
              and s.rule.op_class in ("matmul", "attention")]
    assert len(mixtures) == 2 and all(s.rule.flops > 0 for s in mixtures)
    wanted = 3 * sum(s.rule.flops for s in (*mixtures, *others))
    assert workload(pricer, first).model_flops == pytest.approx(wanted)


def test_a_rank_without_tokens_computes_others() -> None:
    """Its experts run rows of the other rank."""
    graph = graph_of("mixtral")
    node = next(n for n in graph.of_kind("op") if n.target is routed_experts)
    sizes = [graph.meta(ref).shape for ref in node.inputs]
    tokens, scores, up, down = (torch.randn(s) for s in (sizes[0], *sizes[2:]))
    ids, each = torch.randint(0, 4, sizes[1]), sizes[1][0] // sizes[0][0]

    def work(coordinate: tuple[int, ...]) -> torch.Tensor:
        (rank,) = coordinate
        count, own = (1 - rank) * len(tokens), slice(2 * rank, 2 * rank + 2)
        return dispatched_experts(node.args[0], tokens[:count], ids[:count * each], [scores[:count * each]],
                                  [up[own], down[own]], 2 * rank, axes=("x",))

    made = on_every_rank((2,), ("x",), work)
    torch.testing.assert_close(made[(0,)], routed_experts(node.args[0], tokens, ids, [scores], [up, down]))
    assert len(made[(1,)]) == 0


def test_experts_without_a_row() -> None:
    """A rank whose experts nobody chose: zeros, and zero gradients."""
    graph = graph_of("mixtral")
    node = next(n for n in graph.of_kind("op") if n.target is routed_experts)
    sizes = [graph.meta(ref).shape for ref in node.inputs]
    tokens, scores, up, down = (torch.randn(s, requires_grad=True) for s in (sizes[0], *sizes[2:]))
    ids = torch.randint(2, 4, sizes[1])
    whole = routed_experts(node.args[0], tokens, ids, [scores], [up, down])
    halves = [routed_experts(node.args[0], tokens, ids, [scores], [up[i:i + 2], down[i:i + 2]], i) for i in (0, 2)]
    assert not halves[0].any()
    torch.testing.assert_close(whole, halves[1])
    wanted = torch.autograd.grad(whole.square().sum(), (tokens, scores, up, down))
    found = torch.autograd.grad(sum(halves).square().sum(), (tokens, scores, up, down))  # type: ignore[union-attr]
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two)


def test_sorts_outside_of_mixtures_stay() -> None:
    """Rows that look at one another in sorted order: nothing of it is moved."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            order = ids.sort()[1]
            rows = x[order // 2]
            back = torch.zeros_like(order).index_put((order,), torch.arange(8))
            return rows.cumsum(0)[back]

    graph = capture(Model(), (torch.randn(4, 3), torch.randint(0, 4, (8,))))
    names = [n.op_name for n in graph.of_kind("op")]
    assert "aten.sort.default" in names and not any("routed" in n for n in names)


def mixture_of(act: Any) -> list[str]:
    """Op names of a mixture written by hand as Hugging Face writes it, with ``act`` on the sorted rows."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(4, 8, 8)), nn.Parameter(torch.randn(4, 8, 3))

        def forward(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            experts, order = ids.sort()
            ends = torch.histc(experts.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
            scores = scores[order]
            made = torch.ops.transformers.grouped_mm_fallback(x[order // 2], self.up, ends)
            made = torch.ops.transformers.grouped_mm_fallback(act(made, scores), self.down, ends)
            back = torch.zeros_like(order)
            back[order] = torch.arange(8)
            return made[back]

    inputs = (torch.randn(4, 8), torch.randint(0, 4, (8,)), torch.randn(8))
    return [n.op_name for n in capture(Model(), inputs).of_kind("op")]


def test_rows_must_not_look_at_one_another() -> None:
    """Scores as a column meet their rows; as a row they meet all of them (there are as many rows as columns)."""
    import transformers.integrations.moe  # noqa: F401, it defines the op

    assert mixture_of(lambda rows, scores: rows.relu() * scores[:, None]) == ["autoparallel.routed_experts.default"]
    for mixing in (lambda rows, scores: rows * scores, lambda rows, scores: rows.cumsum(0),
                   lambda rows, scores: rows.softmax(0), lambda rows, scores: nn.functional.dropout(rows),
                   lambda rows, scores: rows - rows.mean(0, keepdim=True)):
        assert "aten.sort.default" in mixture_of(mixing)


def test_bytes_of_a_part_of_the_experts() -> None:
    """With half of the experts and rows dealt out evenly, backward keeps half of what the mixture makes inside."""
    graph = graph_of("mixtral")
    node = next(n for n in graph.of_kind("op") if n.target is routed_experts)
    space = StrategySpace(graph, (2,))
    decision = space.decision_named[node.name]
    strategy_set = space.strategy_sets[decision]
    assert strategy_set.rule is not None
    usages = SpacePricer(Prices(space, Cluster.load("local-cpu", num_devices=2))).full().nodes[decision].usages
    whole, half = (
        usages[[strategy_set.axis_strategies[strategy[0]].name for strategy in strategy_set.strategies].index(name)]
        for name in ("repeat", "e")
    )
    assert whole - half == strategy_set.rule.work_bytes / 2
    assert kept_bytes(graph, node, range(2)) == pytest.approx(kept_bytes(graph, node, range(4)) / 2)
    assert strategy_set.rule.work_bytes == pytest.approx(kept_bytes(graph, node, range(4)), rel=0.01)


def kept_bytes(graph: OpGraph, node: Node, experts: range) -> int:
    """Bytes that the op makes inside and backward keeps, of rows dealt out evenly to all experts."""
    metas = [graph.meta(ref) for ref in node.inputs]
    tokens, ids, scores, up, down = (torch.ones(m.shape, dtype=m.dtype, requires_grad=m.requires_grad) for m in metas)
    ids = torch.arange(len(ids)) % up.shape[0]
    up, down = (w.detach()[experts.start:experts.stop].requires_grad_() for w in (up, down))
    given = {x.untyped_storage().data_ptr() for x in (tokens, ids, scores, up, down)}
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in given and x.is_floating_point():
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        made = routed_experts(node.args[0], tokens, ids, [scores], [up, down], experts.start)
    assert made.requires_grad
    return sum(kept.values())
