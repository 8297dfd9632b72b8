"""Mesh axes of one rank: nothing is sent there, in the program as in the price, and nothing is a shard of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import autoparallel
from autoparallel.kernels.collectives import STEP_FUNCTIONS
from autoparallel.layout import PARTIAL, REPLICATE, invariant_on_unit_axes, shard
from autoparallel.lower import check, emit
from autoparallel.plans import Hybrid
from autoparallel.pricing import Prices
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster
from tests.support.captured import graph_of, plan_of
from tests.support.launch_order import check_order
from tests.support.overlapped import Tied, steps_on_ranks, two_steps
from tests.support.ranks import mesh_of
from tests.support.sent import Llama, Sent, second_step
from tests.support.tiers import slow, with_slow

BASELINES = ("ddp", "fsdp", "tensor_parallel", "sequence_parallel")


def test_no_path_changes_such_an_axis() -> None:
    space = StrategySpace(graph_of("mlp"), (2, 1))
    prices = Prices(space, Cluster.load("h100-sxm", num_devices=2)).redistribution
    use = next(use for use in space.uses if use.meta.requires_grad and len(use.meta.shape) == 2)
    one, other = (shard(0), PARTIAL), (REPLICATE, shard(1))
    assert [step.axes for step in prices.table(use).path(one, other)] == [(0,)]
    assert prices.table(use).path((shard(0), shard(1)), (shard(0), REPLICATE)) == []
    assert invariant_on_unit_axes(one, (2, 1)) == invariant_on_unit_axes((shard(0), REPLICATE), (2, 1))


@pytest.mark.parametrize("baseline", BASELINES)
def test_programs_of_one_rank_are_the_models_ops(baseline: str) -> None:
    """No redistribution, and no op that communicates within itself, though the plan cuts all that its baseline does."""
    plan = plan_of("gpt2", Cluster.load("h100-sxm", num_devices=1), mesh_shape=(1,), baseline=baseline)
    space = StrategySpace(graph_of("gpt2"), (1,), plan.axis_names)
    strategies = plan.strategies_on(space)
    cut = {s.names(strategy) for s, strategy in zip(space.strategy_sets, strategies, strict=True)}
    program = emit(space, strategies, Prices(space, Cluster.load("h100-sxm", num_devices=1)).path, (0,))
    check(program, space, (0,))
    targets = {node.target for node in program.module.graph.nodes if node.op == "call_function"}
    assert len(cut) > 3 and not targets & {*STEP_FUNCTIONS.values()}
    assert not any("axes" in node.kwargs for node in program.module.graph.nodes)


def test_nothing_is_unusual_on_such_an_axis() -> None:
    """Reports said of ops that they are computed by every rank of it."""
    plan = plan_of("llama", Cluster.load("h100-sxm", num_devices=4), mesh_shape=(4, 1), baseline="tensor_parallel")
    assert plan.summary().startswith("Data parallel 4 over NVLink 4.\n")


@pytest.mark.parametrize(("case_name", "mesh_shape", "hybrid"), [
    ("mlp", (2, 1), Hybrid()), ("mlp", (1,), Hybrid(2, zero_stage=1)), slow("gpt2", (1, 2), Hybrid(zero_stage=3)),
    slow("mixtral", (2, 1), Hybrid(zero_stage=3, bucket_bytes=20_000)), slow("llama", (1, 2, 1), Hybrid(2)),
], ids=str)
def test_simulated_collectives_are_those_of_the_run(case_name: str, mesh_shape: tuple[int, ...], hybrid: Hybrid,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(2):
        check_order(case_name, mesh_shape, seed, hybrid, monkeypatch)


def sent_in_a_step(mesh_shape: tuple[int, ...], options: dict[str, Any]) -> list[Sent]:
    return second_step(Llama(), mesh_shape, options)[0].sent


def pinned_on_an_axis_of_one_rank() -> tuple[Any, ...]:
    """The placements of a pinned parameter and of its gradient."""
    model, x = torch.nn.Linear(4, 6), torch.arange(16.0).view(4, 4)
    pins = {"weight": (Replicate(), Shard(1)), "input": (Shard(0), Shard(0))}
    parallel = autoparallel.compile(model, mesh_of(2, 1), example_inputs=(x,), pins=pins)
    out = parallel(x)
    out.sum().backward()
    weight = next(parallel.parameters())
    whole = out.full_tensor() if isinstance(out, DTensor) else out
    torch.testing.assert_close(whole, model(x))
    assert isinstance(weight.data, DTensor) and isinstance(weight.grad, DTensor)
    torch.testing.assert_close(weight.grad.full_tensor(), x.sum(0).expand(6, 4))
    return weight.data.placements, weight.grad.placements


def test_pins_on_such_an_axis_hold(ranks: Any) -> None:
    for placements, of_gradient in ranks(2).run(pinned_on_an_axis_of_one_rank):
        assert placements == of_gradient == (Replicate(), Shard(1))


@pytest.mark.parametrize("baseline", with_slow(BASELINES, "ddp", "tensor_parallel"))
def test_ranks_send_to_several_ranks_only(ranks: Any, baseline: str) -> None:
    """The collectives of a mesh without the axis of one rank, where the other axis has the same role there."""
    without, outer, inner = (ranks(2).run(sent_in_a_step, shape, {"baseline": baseline}, timeout_s=100)[0]
                             for shape in ((2,), (1, 2), (2, 1)))
    assert sorted(outer) == sorted(without)
    assert {group for _, group, _ in (*outer, *inner)} == {(0, 1)}


@pytest.mark.parametrize(("mesh_shape", "options"), [
    ((2, 1), {"baseline": "ddp"}), ((1, 2), {"baseline": "tensor_parallel"}),
    slow((2, 1), {"baseline": "tensor_parallel", "backend": "inductor"}),
    slow((1, 2), {"baseline": "fsdp", "zero_stage": 3, "micro_batches": 2}),
    slow((2, 1, 2), {"baseline": "fsdp", "pipeline_stages": 2, "micro_batches": 4}),
], ids=str)
def test_the_numbers_are_those_of_one_process(ranks: Any, mesh_shape: tuple[int, ...], options: dict[str, Any]) -> None:
    expected, names = two_steps(Tied(), None), set[str]()
    for found, _, _ in ranks(4 if len(mesh_shape) > 2 else 2).run(steps_on_ranks, mesh_shape, options, timeout_s=300):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        names |= set(found)
    assert names == set(expected)
