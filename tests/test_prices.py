"""Prices are sums over what runs, whichever search chose it; limits are kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import autoparallel
from autoparallel import Cluster, Plan
from autoparallel.capture import capture
from autoparallel.layout import REPLICATE, Layout, shard
from autoparallel.partition import split_batch
from autoparallel.plans import Hybrid
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer, predict
from autoparallel.schedule.step_config import BUCKET_BYTES, LARGE_BYTES
from autoparallel.search import evaluate, solve
from autoparallel.strategies.space import StrategySpace
from cost_models import Device, Link, collectives, compute
from cost_models.links import UNLIMITED
from tests.support.captured import graph_of, plan_of
from tests.support.tiers import slow


@pytest.mark.parametrize(("search", "case_name"), [
    slow("exact", "resnet"), slow("ilp", "resnet"), ("recursive", "gpt2"), slow("ilp", "bert"),
    *(slow(search, "llama") for search in ("recursive", "exact", "ilp"))])
def test_the_price_is_the_sum_over_operations(case_name: str, search: str) -> None:
    """Objective = evaluate on the whole problem = parts of the report; the bound is below; searches agree."""
    cluster = Cluster.load("h100-sxm", num_devices=4, software="none")
    made = plan_of(case_name, cluster, mesh_shape=(2, 2), search=search)
    space = StrategySpace(graph_of(case_name), (2, 2))
    pricer = SpacePricer(Prices(space, cluster))
    judged = evaluate(pricer.full(), pricer.choice_of(made.strategies_on(space)))
    assert made.evidence.objective_s == judged.objective
    assert made.prediction.added_s == pytest.approx(judged.objective, rel=1e-9)
    assert made.evidence.lower_bound_s <= judged.objective
    optimum = plan_of(case_name, cluster, mesh_shape=(2, 2), search="exact")
    assert made.evidence.objective_s <= optimum.evidence.objective_s * (1.05 if search == "recursive" else 1 + 1e-6)
    assert optimum.evidence.lower_bound_s <= made.evidence.objective_s * (1 + 1e-9)


def test_a_memory_limit_is_kept_and_costs_time() -> None:
    cluster = Cluster.load("h100-sxm", num_devices=4, software="none")

    def at(limit: float | None) -> Plan:
        return plan_of("llama", cluster, mesh_shape=(4,), memory_limit_bytes=limit)

    free = at(None)
    limit = free.prediction.peak_bytes * 0.6
    bound = at(limit)
    assert bound.prediction.peak_bytes <= limit < free.prediction.peak_bytes
    assert bound.evidence.objective_s > free.evidence.objective_s


def test_a_bias_does_not_stand_in_for_the_gradient_of_an_input() -> None:
    """Backward of a layer whose input needs no gradient is one product, with a bias or without."""
    cluster = Cluster.load("h100-sxm", num_devices=1, software="none")
    x = torch.zeros(512, 4096)

    def backward_flops_s(bias: bool) -> float:
        layer = torch.nn.Linear(4096, 4096, bias=bias)
        space = StrategySpace(capture(layer, (x,), {}), (1,))
        (decision,) = [s for s in space.decisions if s.kind == "op"]
        return float(Prices(space, cluster).op(space.strategy_sets[decision.index]).backward_s[0])

    assert backward_flops_s(bias=True) == pytest.approx(backward_flops_s(bias=False), rel=0.01)


@pytest.mark.parametrize("times", [(0, 0), (0, 1), (1, 0), (2, 2)])
def test_where_there_is_no_path_the_price_is_infinite_however_often_it_runs(times: tuple[float, float]) -> None:
    """Also of what is hidden by overlap, thus counted zero times: 0 * infinity is no number, and warned of."""
    space = StrategySpace(graph_of("llama"), (2, 2))
    prices = Prices(space, Cluster.load("h100-sxm", num_devices=4, software="none")).redistribution
    with np.errstate(invalid="raise"):
        assert not any(np.isnan(prices.use_s(use, times)).any() for use in space.uses)
    assert any(np.isinf(prices.table(use).seconds).any() for use in space.uses)


def test_accumulating_gradients_of_micro_batches_takes_time() -> None:
    """Each micro-batch but the first reads two gradients and writes one: of whole parameters, or of stored shards."""
    cluster = Cluster.load("h100-sxm", num_devices=2, software="none")
    space = StrategySpace(split_batch(graph_of("llama"), 4).body, (2,))
    prices = Prices(space, cluster)
    use = next(k for k in space.uses if space.decisions[k.source].kind == "parameter" and k.meta.requires_grad)
    whole, local_shard = (
        float(compute.op_time_s("elementwise", 0.0, 3 * use.meta.num_bytes / n, "float32", cluster.device))
        for n in (1, 2)
    )

    def seconds(**options: Any) -> np.ndarray:
        return SpacePricer(prices, counts=ExecutionCounts(space, Hybrid(**options))).costs.sums_s(use)

    assert seconds(micro_batches=4, zero_stage=1).max() == pytest.approx(3 * whole)
    assert seconds(micro_batches=4, zero_stage=3).min() == pytest.approx(3 * local_shard)
    assert not seconds(micro_batches=1).any()
    once, four = (SpacePricer(prices, counts=ExecutionCounts(space, Hybrid(micro_batches=n))) for n in (1, 4))
    strategies = once.strategies_of(solve(once.full(), "exact").choice)
    costs = [evaluate(p.full(), p.choice_of(strategies)).objective for p in (once, four)]
    parts = predict(four, four.full(), strategies, 0.0)
    assert parts.step_s == pytest.approx(costs[1]) and costs[1] > costs[0]


def test_recompute_stops_where_backward_has_its_inputs() -> None:
    """Its last product is not made again: torch stops where that has its inputs. So it is with two layers here."""
    space = StrategySpace(graph_of("llama"), (2,))
    counts = ExecutionCounts(space, Hybrid(recompute="full"))
    last, rest = set(), set()
    for decision in (s for s in space.decisions if s.kind == "op" and counts.blocks.of[s.index] is not None):
        if "linear" in str(space.graph.nodes[decision.node].target):
            down = "down_proj" in space.graph.nodes[decision.node].module_path
            (last if down else rest).add(counts.op_times(decision.index))
    assert (last, rest) == ({(1, 1)}, {(2, 1)})
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU(), torch.nn.Linear(4, 4))
    with FlopCounterMode(display=False) as counted:
        checkpoint(layers, torch.ones(4, 4, requires_grad=True), use_reentrant=False).sum().backward()
    assert counted.get_total_flops() == (2 + 4 + 1) * 2 * 4**3


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y) * x


def test_backward_launches_are_counted() -> None:
    """A sum hands its gradient on, a product makes one for each factor, and a value read twice adds up two."""
    device = replace(Cluster.load("h100-sxm").device, launch_s=1.0)
    cluster = replace(Cluster.load("h100-sxm", num_devices=1, software="none"), device=device)
    values = tuple(torch.zeros(8, 8, requires_grad=True) for _ in range(2))
    space = StrategySpace(capture(Twice(), values, {}), (1,))
    prices = Prices(space, cluster)
    launches = {space.graph.nodes[s.node].target: round(float(prices.op(space.strategy_sets[s.index]).backward_s[0]))
                for s in space.decisions if s.kind == "op"}
    assert sorted(launches.values()) == [0, 2]
    pricer = SpacePricer(prices)
    (read,) = (decision.index for decision in space.decisions if decision.kind == "shared_read")
    assert round(float(pricer.costs.shared_read_s(read)[0])) == 1
    problem = pricer.full()
    strategies = pricer.strategies_of(solve(problem, "exact").choice)
    assert predict(pricer, problem, strategies, 0.0).added_s == pytest.approx(
        evaluate(problem, pricer.choice_of(strategies)).objective)


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, 4:], x[:, :4]], 1) ** 3 * y[:, :1]


def test_gradients_are_made_by_as_many_ops_as_torch_runs() -> None:
    """x^3 has g * (3 * x^2); a factor that was broadcast sums up what it gets; a part's gradient is put in its place,
    and that of what is joined is a view. As many launches as torch makes."""
    device = replace(Cluster.load("h100-sxm").device, launch_s=1.0)
    cluster = replace(Cluster.load("h100-sxm", num_devices=1, software="none"), device=device)
    values = tuple(torch.ones(8, 8, requires_grad=True) for _ in range(2))
    space = StrategySpace(capture(Scaled(), values, {}), (1,))
    prices = Prices(space, cluster)
    launches: dict[str, int] = {}
    for decision in (s for s in space.decisions if s.kind == "op"):
        name = str(space.graph.nodes[decision.node].target).split(".")[1]
        launches[name] = launches.get(name, 0) + round(
            float(prices.op(space.strategy_sets[decision.index]).backward_s[0])
        )
    assert launches == {"slice": 3, "cat": 0, "pow": 3, "mul": 3}
    result = Scaled()(*values)
    with torch.profiler.profile() as profile:
        result.backward(torch.ones_like(result))
    ran = [event.name for event in profile.events()]
    made = {name: ran.count(f"aten::{name}") for name in ("pow", "sum", "mul", "slice_backward", "cat")}
    assert made == {"pow": 1, "sum": 1, "mul": 4, "slice_backward": 3, "cat": 0}


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


@cache
def _deep(mesh_shape: tuple[int, ...]) -> StrategySpace:
    return StrategySpace(capture(Deep(), (torch.zeros(1024, 256),), {}), mesh_shape)


def _wires(bandwidth: float, alpha_s: float = 0.0) -> Cluster:
    device = Device("toy", {"float32": 3e10}, 1e11, 1.0, 1e12, 0.0)
    uses = (Link("inside", 4, alpha_s, bandwidth), Link("between", UNLIMITED, alpha_s, bandwidth))
    return Cluster("toy", device, uses, 8, ("ring",))


def _best(mesh_shape: tuple[int, ...], cluster: Cluster) -> tuple[float, set[Layout]]:
    """Seconds of the best plan, and how the results of layers lie in it."""
    space = _deep(mesh_shape)
    pricer = SpacePricer(Prices(space, cluster))
    solution = solve(pricer.full(), "exact")
    strategies = pricer.strategies_of(solution.choice)
    return solution.objective, {s.output_layout(strategy, 0) for decision, s, strategy
                                in zip(space.decisions, space.strategy_sets, strategies, strict=True)
                                if decision.kind == "op" and len(s.input_metas) == 2}


def test_defect_axes_searched_one_by_one_collapse_to_data_parallelism() -> None:
    """Each axis alone is best given to the batch; not both: activations are then smaller than weights."""
    found = {mesh_shape: _best(mesh_shape, _wires(1e9))[1] for mesh_shape in ((2,), (4,), (2, 4))}
    assert found[2,] == found[4,] == {(shard(0),)}
    assert len(found[2, 4]) > 1


@settings(max_examples=15)
@given(st.sampled_from([(2,), (2, 4)]), st.floats(1e7, 1e11), st.floats(1.0, 100.0), st.floats(0, 1e-3))
def test_a_slower_link_never_makes_the_best_plan_faster(mesh_shape: tuple[int, ...], bandwidth: float, times: float,
                                                        alpha_s: float) -> None:
    fast, slow = _wires(bandwidth), _wires(bandwidth / times, alpha_s)
    assert _best(mesh_shape, slow)[0] >= _best(mesh_shape, fast)[0] * (1 - 1e-6)


def test_small_gradients_share_a_bucket() -> None:
    """A gradient pays its share of a full bucket, and not a whole collective's latency; a large one is alone."""
    cluster = Cluster.load("local-cpu", num_devices=4)
    prices = Prices(StrategySpace(graph_of("mlp"), (4,)), cluster)
    full = float(collectives.all_reduce_s(BUCKET_BYTES, prices.groups[(0,)])
                 + collectives.copy_s(BUCKET_BYTES, cluster.device))
    single = prices.redistribution.single
    sixteenth = float(single.bucket_s(prices.groups[(0,)], np.array(BUCKET_BYTES / 16), BUCKET_BYTES))
    assert sixteenth == pytest.approx(full / 16)
    assert sixteenth < float(collectives.all_reduce_s(BUCKET_BYTES / 16, prices.groups[(0,)]))
    assert float(single.bucket_s(prices.groups[(0,)], np.array(2.0 * BUCKET_BYTES), BUCKET_BYTES)) == float(
        collectives.all_reduce_s(2 * BUCKET_BYTES, prices.groups[(0,)]))


def test_gradients_of_all_parameters_are_priced_as_the_fewest_equal_buckets() -> None:
    """Data parallelism whose gradients together fill no bucket: one sum of them all, and its copy."""
    cluster, space = Cluster.load("local-cpu", num_devices=4), StrategySpace(graph_of("mlp"), (4,))
    total = sum(4.0 * s.output_metas[0].num_elements for d, s in zip(space.decisions, space.strategy_sets, strict=True)
                if d.kind == "parameter")
    for most, count in ((BUCKET_BYTES, 1), (total, 1), (total / 2, 2), (total / 2.5, 3)):
        counts = ExecutionCounts(space, Hybrid(bucket_bytes=most))
        assert counts.buckets.even(most) == total / count
    pricer = SpacePricer(Prices(space, cluster, direct=True))
    strategies = plan_of("mlp", cluster, mesh_shape=(4,), baseline="ddp").strategies_on(space)
    sums = sum(step.seconds[1] for move in pricer.costs.moves(strategies) for step in move.path
               if space.decisions[move.use.source].kind == "parameter")
    group, device = pricer.prices.groups[(0,)], pricer.prices.device
    assert sums == pytest.approx(float(collectives.all_reduce_s(total, group) + collectives.copy_s(total, device)))


@pytest.mark.parametrize(("hybrid", "together"), [
    (Hybrid(zero_stage=3), True), (Hybrid(2, zero_stage=3), True), (Hybrid(2, zero_stage=1), True),
    (Hybrid(2, zero_stage=2), True), (Hybrid(4, 2, 2, zero_stage=3), True),
    (Hybrid(4, 2, 2, "zero_bubble", zero_stage=2), True), (Hybrid(4, 2, 2, "zero_bubble", zero_stage=3), False)])
@pytest.mark.parametrize("width", [256, slow(4096)])
def test_parameters_of_a_block_are_gathered_and_reduced_together_with_a_copy_of_small_ones(
        width: int, hybrid: Hybrid, together: bool) -> None:
    """Each by itself where the program does so: with ZeRO-3 and zero bubble."""
    with torch.device("meta"):
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(4)]
    model = torch.nn.Sequential(torch.nn.Sequential(*layers[:2]), torch.nn.Sequential(*layers[2:]))
    cluster = Cluster.load("h100-sxm", num_devices=8, software="none")
    space = StrategySpace(capture(model, (torch.zeros(8, width),)), (8,))
    prices = Prices(space, cluster).redistribution
    use = next(use for use in space.uses if space.decisions[use.source].kind == "parameter")
    (step,) = prices.steps(use, (shard(0),), (REPLICATE,), ExecutionCounts(space, hybrid).summing(use))
    size, group = float(width * width * 4), prices.single.groups[(0,)]
    copied = float(collectives.copy_s(size, prices.single.device)) if size < LARGE_BYTES else 0.0
    assert prices.single.block_bytes == 2 * size
    for seconds, collective in zip(step.seconds, (collectives.all_gather_s, collectives.reduce_scatter_s), strict=True):
        wanted = float(collective(2 * size, group)) / 2 + copied if together else float(collective(size, group))
        assert seconds == pytest.approx(wanted)


def test_steps_that_wait_for_the_host_say_so() -> None:
    """Few rows a launch: an op takes what the host takes to launch it, and the error bar is that of hosts."""
    def plan(rows: int) -> Plan:
        with torch.device("meta"):
            model = _Blocks(nn.Linear(1024, 1024) for _ in range(16))
            return autoparallel.plan(model, Cluster.load("h100-sxm", num_devices=1), mesh_shape=(1,),
                                     example_inputs=(torch.empty(rows, 1024),))

    few, many = plan(8), plan(2**17)
    host_op_s = Cluster.load("h100-sxm").profile.host_op_s  # type: ignore[union-attr]
    assert few.prediction.forward_s == pytest.approx(16 * host_op_s, rel=0.15)
    assert "a host half as fast at launching adds" in few.prediction.basis and few.prediction.p90 > 0.4
    assert "host" not in many.prediction.basis and many.prediction.p90 < 0.2


class _Blocks(nn.Module):
    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
