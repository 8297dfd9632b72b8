"""The simulated step: never shorter than its compute nor longer than the sum of its parts; plans compared by it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autoparallel
from autoparallel.capture import OpGraph, capture
from autoparallel.errors import SearchError
from autoparallel.partition import split_batch, stages_of
from autoparallel.planning import one_mesh
from autoparallel.plans import Hybrid
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer
from autoparallel.pricing.alike_stages import alike_stages
from autoparallel.pricing.hidden import hidden
from autoparallel.pricing.overlap_simulation import RankStep
from autoparallel.pricing.prediction import estimate
from autoparallel.pricing.rank_reads import COMPUTE, Message, Timed
from autoparallel.pricing.step_cost import ALL_EXPOSED, Exposed
from autoparallel.pricing.step_tasks import StepTasks
from autoparallel.schedule.async_windows import starts
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster, Device, Link
from tests.support.captured import graph_of, plan_of
from tests.support.tiers import slow


@pytest.mark.parametrize("most_bytes_per_s", [slow(1e12), 5e6])
def test_an_estimate_of_one_micro_batch_is_its_step(most_bytes_per_s: float) -> None:
    """On links that take far longer than compute, too, where two of them at once hide more than a micro-batch takes
    without communication of parameters."""
    cluster = Cluster.load("h100-sxm", num_devices=16, software="none")
    links = (replace(link, bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s, most_bytes_per_s))
             for link in cluster.links)
    cluster = replace(cluster, links=tuple(links))
    made = plan_of("llama", cluster, mesh_shape=(2, 8), baseline="fsdp", bucket_bytes=20_000)
    space = StrategySpace(split_batch(graph_of("llama"), 1).body, (2, 8))
    pricer = SpacePricer(Prices(space, cluster, direct=made.direct), counts=ExecutionCounts(space, made.hybrid))
    assert made.prediction.hidden_s > 0
    assert estimate(pricer, made.strategies_on(space)) == pytest.approx(made.prediction.step_s)


@pytest.mark.parametrize(("mesh_shape", "options"), [
    slow((4, 2), {"baseline": "ddp"}), ((8,), {"baseline": "fsdp"}), ((4, 2), {}),
    slow((4, 2), {"baseline": "tensor_parallel", "micro_batches": 2}),
    ((4, 2), {"baseline": "fsdp", "micro_batches": 4, "zero_stage": 3, "recompute": "full"}),
    *(pytest.param(*plan, marks=pytest.mark.slow) for plan in [
        ((8,), {"baseline": "ddp"}), ((4, 2), {"baseline": "fsdp", "recompute": "full"}),
        ((4, 2), {"baseline": "tensor_parallel"}), ((4, 2), {"baseline": "fsdp", "micro_batches": 4, "zero_stage": 2}),
        ((4, 2), {"baseline": "ddp", "micro_batches": 2, "recompute": "full"}),
        ((8,), {"baseline": "fsdp", "recompute": "selective", "reduce_dtype": "bfloat16"}),
        ((8,), {"baseline": "fsdp", "micro_batches": 4, "reduce_dtype": "float32"}),
        ((4, 2), {"baseline": "fsdp", "micro_batches": 2, "zero_stage": 3}),
    ]),
])
def test_no_part_of_a_step_is_lost(mesh_shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """The tasks that are simulated are the parts of the prediction, and the latency of buckets that are not full; only
    communication is hidden, and no more than there is compute; what runs beside gains nothing where both take twice as
    long."""
    cluster = Cluster.load("h100-sxm", num_devices=8, software="none")
    made = plan_of("llama", cluster, mesh_shape=mesh_shape, bucket_bytes=20_000, **options)
    space = StrategySpace(split_batch(graph_of("llama"), made.hybrid.micro_batches).body, mesh_shape)
    pricer = SpacePricer(Prices(space, cluster, direct=made.direct), counts=ExecutionCounts(space, made.hybrid))
    step, parts = RankStep(pricer, made.strategies_on(space)).step(each=True), made.prediction
    latency_s, tasks_s = step.extra_s, sum(task.duration_s for task in step.tasks)
    assert tasks_s - latency_s == pytest.approx(parts.added_s - parts.waiting_s)
    assert parts.added_s - parts.waiting_s == pytest.approx(made.evidence.objective_s)
    assert parts.hidden_s - parts.waiting_s == pytest.approx(step.hidden_s(cluster.device.overlap_slowdown))
    assert parts.step_s == parts.added_s - parts.hidden_s
    communication = parts.forward_communication_s + parts.backward_communication_s + latency_s
    saved_s = parts.hidden_s - parts.waiting_s + latency_s
    assert (saved_s > 1e-9) == ("baseline" in options)
    assert saved_s <= min(parts.forward_s + parts.backward_s, communication)
    assert parts.hidden_s - parts.waiting_s <= step.hidden_s(1.0)
    assert step.hidden_s(2.0) + latency_s == pytest.approx(0.0, abs=1e-3 * parts.added_s)


@pytest.mark.parametrize("options", [
    {"micro_batches": 4}, slow({"micro_batches": 4, "baseline": "fsdp", "schedule": "gpipe", "recompute": "full"}),
    {"micro_batches": 4, "schedule": "interleaved", "pipeline_stages": 4},
    slow({"micro_batches": 1, "schedule": "gpipe"}), slow({"micro_batches": 4, "baseline": "fsdp", "zero_stage": 2}),
    {"micro_batches": 4, "baseline": "fsdp", "zero_stage": 3},
    {"micro_batches": 4, "schedule": "zero_bubble", "pipeline_stages": 4},
])
def test_pipelines_hide_communication_of_parameters(options: dict[str, Any]) -> None:
    """Reductions of the last backward, or where each micro-batch reduces (ZeRO-2, which gathers once, and 3) those of
    all, and zero bubble's beside gradients of other weights: no more than there is, and than the compute that they run
    beside."""
    options = {"pipeline_stages": 2, "baseline": "ddp", "bucket_bytes": 20_000, **options}
    cluster = Cluster.load("h100-sxm", num_devices=8, software="none")
    links = tuple(replace(link, alpha_s=0.0) for link in cluster.links)    # else small buckets cost more than they hide
    quick = replace(cluster, links=links, device=replace(cluster.device, launch_s=1e-7))
    made = plan_of("gpt2", quick, batch=512, mesh_shape=(2, 4), **options)
    parts, each = made.prediction, made.hybrid.zero_stage >= 2
    assert parts.hidden_s > 0
    assert parts.step_s == parts.added_s - parts.hidden_s
    sent = sum(use.seconds for use in parts.collectives if each or use.direction == "backward")
    assert parts.hidden_s <= min(sent, (parts.forward_s + parts.backward_s) / (1 if each else options["micro_batches"]))


def test_only_uses_of_parameters_cost_otherwise_with_overlap() -> None:
    space = StrategySpace(graph_of("llama"), (4, 2))
    prices = Prices(space, Cluster.load("h100-sxm", num_devices=8, software="none"))
    whole, some = SpacePricer(prices), SpacePricer(prices, exposed=Exposed(0.3, 0.4))
    problem, made, anew = whole.full(), some.full_like(whole.full()), some.full()
    assert all(np.array_equal(a, b) for a, b in zip(made.costs, anew.costs, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(made.usages, anew.usages, strict=True))
    assert all(edge.costs is cost for edge, cost in zip(made.edges, made.costs[len(made.nodes):], strict=True))
    changed = [not np.array_equal(a.costs, b.costs) for a, b in zip(problem.edges, made.edges, strict=True)]
    of_parameter = [space.decisions[use.source].kind == "parameter" for use in space.uses]
    assert any(changed) and not any(c and not p for c, p in zip(changed, of_parameter, strict=False))


def test_the_faster_step_is_taken_and_not_the_smaller_sum() -> None:
    """Four ranks of a slow network, which products hide: gathering weights costs most where all is added up, and
    nothing where it runs beside them."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(6)))
    x = torch.zeros(320, 512)
    device = Device("toy", {"float32": 2.5e9}, 1e12, 1.0, 1e12, 0.0, overlap_slowdown=1.0)
    cluster = Cluster("toy", device, (Link("net", 4, 1e-6, 4e7),), 4)

    def planned(**options: Any) -> autoparallel.Plan:
        return autoparallel.plan(model, cluster, example_inputs=(x,), mesh_shape=(4,), **options)

    made, others = planned(), [planned(baseline=name) for name in ("ddp", "fsdp", "tensor_parallel")]
    assert made.prediction.step_s <= min(other.prediction.step_s for other in others) * (1 + 1e-9)
    assert made.evidence.stop_reason == "faster with overlap" and made.evidence.gap > 0
    assert made.evidence.objective_s == pytest.approx(made.prediction.added_s)
    assert made.evidence.objective_s > made.evidence.lower_bound_s
    together = replace(cluster, device=replace(device, overlap_slowdown=2.0))
    alone = autoparallel.plan(model, together, example_inputs=(x,), mesh_shape=(4,))
    assert alone.evidence.stop_reason == "optimal" and alone.prediction.added_s < made.prediction.added_s


def test_a_plan_says_if_the_second_search_found_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan is taken then; and a search that has used all its time begins no second."""
    def planned(**options: Any) -> autoparallel.Plan:
        return plan_of("mlp", Cluster.load("h100-sxm", num_devices=4, software="none"), mesh_shape=(4,), **options)

    told = "; not searched with overlap: "
    assert told not in planned().evidence.stop_reason
    solve = one_mesh.solve

    def only_the_first(problem: Any, search: str, left: float, pricer: SpacePricer, *rest: Any) -> Any:
        if pricer.costs.exposed != ALL_EXPOSED:
            raise SearchError("no plan that fits was found")
        return solve(problem, search, left, pricer, *rest)

    monkeypatch.setattr(one_mesh, "solve", only_the_first)
    made = planned()
    assert f"{told}no plan that fits was found" in made.evidence.stop_reason
    assert "not searched with overlap" in " ".join(made.report().split())
    assert f"{told}the searches before it took the 0 s of all" in planned(time_limit_s=0.0).evidence.stop_reason


def test_an_interrupt_ends_both_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best so far comes back: the second search is not begun (it was), and one that has no plan yet loses none."""
    solve, begun = one_mesh.solve, list[tuple[float, float]]()

    def planned(interrupted: int) -> autoparallel.Plan:
        def stopped(problem: Any, search: str, left: float, pricer: SpacePricer, *rest: Any) -> Any:
            begun.append(pricer.costs.exposed)
            if len(begun) == 2 == interrupted:
                raise KeyboardInterrupt
            found = solve(problem, search, left, pricer, *rest)
            return replace(found, stop_reason="interrupted") if interrupted == 1 else found

        begun.clear()
        monkeypatch.setattr(one_mesh, "solve", stopped)
        return plan_of("mlp", Cluster.load("h100-sxm", num_devices=4, software="none"), mesh_shape=(4,))

    assert planned(1).evidence.stop_reason == "interrupted" and len(begun) == 1
    made = planned(2)
    assert made.evidence.stop_reason.endswith("not searched with overlap: interrupted")
    assert len(begun) == 2 and made.evidence.gap == 0


#: What a program does with its device and two links: works, issues, awaits the n-th of what it issued; quarters of
#: a second.
PROGRAMS = st.lists(st.one_of(
    st.tuples(st.just("work"), st.integers(0, 9), st.sampled_from([COMPUTE, "inner", "outer"])),
    st.tuples(st.just("issue"), st.integers(0, 9), st.sampled_from(["inner", "outer"])),
    st.tuples(st.just("wait"), st.integers(0, 9), st.just(""))), max_size=12)


def simulated(program: list[tuple[str, int, str]], slower: float = 1.0) -> StepTasks:
    """The step of such a program, its inner link ``slower``; it waits for all at the end."""
    step, issued = StepTasks(), []
    for what, number, stream in program:
        duration_s = number / 4 * (slower if stream == "inner" else 1.0)
        timed = Timed(duration_s, stream, Message("all_reduce", stream, 0.0) if stream != COMPUTE else None)
        if what == "work":
            step.run(timed)
        elif what == "issue":
            issued.append(step.issue([timed]))
        elif issued:
            step.wait([issued[number % len(issued)]])
    step.wait(issued)
    step.flush()
    return step


def alone_s(step: StepTasks, stream: str = "") -> float:
    return sum(task.duration_s for task in step.tasks if stream in ("", task.stream))


@given(PROGRAMS, st.floats(1.0, 2.0))
def test_a_step_is_never_shorter_than_its_compute_nor_longer_than_its_parts(
        program: list[tuple[str, int, str]], slowdown: float) -> None:
    step = simulated(program)
    taken_s = alone_s(step) - step.hidden_s(slowdown)
    assert step.hidden_s(slowdown) >= 0.0
    assert taken_s >= max(alone_s(step, stream) for stream in (COMPUTE, "inner", "outer")) - 1e-9
    assert step.hidden_s(2.0) <= step.hidden_s(1.0) + 1e-9


@given(PROGRAMS, st.floats(1.0, 4.0), st.sampled_from([1.0, 1.3, 2.0]))
def test_a_slower_link_never_makes_a_simulated_step_faster(
        program: list[tuple[str, int, str]], slower: float, slowdown: float) -> None:
    fast, slow = simulated(program), simulated(program, slower)
    assert alone_s(slow) - slow.hidden_s(slowdown) >= alone_s(fast) - fast.hidden_s(slowdown) - 1e-9


def test_zero_3_gathers_a_block_ahead_with_or_without_recompute() -> None:
    """Op by op, gathers hid behind the op before alone, and recompute, which reads whole blocks, made a step faster."""
    cluster, ends = Cluster.load("h100-sxm", num_devices=8), dict[str, set[int]]()
    for recompute in ("none", "full"):
        made = plan_of("llama", cluster, by_hand=f"dp=8,zero=3,recompute={recompute}", bucket_bytes=20_000)
        space = StrategySpace(graph_of("llama"), made.mesh_shape)
        pricer = SpacePricer(Prices(space, cluster), counts=ExecutionCounts(space, made.hybrid))
        ends[recompute] = {pair.end for pair in RankStep(pricer, made.strategies_on(space)).reads.windows.gathered}
    assert ends["none"] == ends["full"]


def test_small_gathers_among_large_ones_are_launched_as_early() -> None:
    """An early gather takes no memory where gathered parameters stay: an expert's second weight is with its first."""
    sizes = [5e7, 5e8, 2.5e8] * 4
    ahead = [sum(sizes[before + 1:number + 1]) for number, before in enumerate(starts(sizes, 25 * 2**20, stays=True))]
    assert min(ahead[3:]) >= sum(sizes[:3])


class Decoder(torch.nn.Module):
    """Equal layers between an embedding and the loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 32)
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(
            torch.nn.LayerNorm(32), torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32))
            for _ in range(layers))
        self.head = torch.nn.Linear(32, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().mean()


@functools.cache
def captured_decoder() -> OpGraph:
    return capture(Decoder(12), (torch.zeros(64, 8, dtype=torch.long),))


@pytest.mark.parametrize("options", [
    {"zero_stage": 1}, {"zero_stage": 2, "recompute": "full"}, {"zero_stage": 3, "recompute": "selective"},
    {"zero_stage": 3, "recompute": "full", "schedule": "interleaved", "pipeline_ranks": 2},
    {"zero_stage": 2, "recompute": "full", "recompute_blocks": ("layers.2",)},
])
def test_of_stages_that_run_alike_one_is_simulated(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers each, in six stages: those between are alike, unless one recomputes other blocks, or has another
    plan. What overlap saves on them is what it saves on the one that is simulated."""
    micro = split_batch(captured_decoder(), 8)
    space, cluster = StrategySpace(micro.body, (2, 2)), Cluster.load("h100-sxm", num_devices=24)
    named = [(block, d.name) for d, block in zip(space.decisions, space.blocks, strict=True) if d.kind == "op"]
    firsts = dict(reversed(named))
    cuts = tuple(firsts[f"layers.{2 * n}"] for n in range(1, 6))
    hybrid = Hybrid(micro_batches=8, stages=6, bucket_bytes=2_000, **{"pipeline_ranks": 6, **options, "cuts": cuts})
    stages = stages_of(space, micro.loss, hybrid)
    counts = ExecutionCounts(space, hybrid, stages.of_decisions(len(space)))
    pricer = SpacePricer(Prices(space, cluster), counts=counts)
    strategies = [max(s.strategies, key=lambda one, s=s: sum(p.is_shard for p in s.output_layout(one)))
                  for s in space.strategy_sets]
    alike = list(alike_stages(pricer, strategies))
    assert alike[0] == 0 and alike[-1] == 5 and alike[4] == alike[3]
    assert (alike[2] == alike[1]) == ("recompute_blocks" not in options)
    each = [RankStep(pricer, strategies, stage).hidden(cluster.device.overlap_slowdown) for stage in range(6)]
    assert each == [each[first] for first in alike] and (options["zero_stage"] < 2 or any(one.total for one in each))
    other = [*strategies]
    at = next(d.index for d in space.decisions if d.path.startswith("layers.7.") and d.kind == "parameter")
    other[at] = next(one for one in space.strategy_sets[at].strategies if one != strategies[at])
    assert alike_stages(pricer, other)[3] == 3 and alike_stages(pricer, other)[4] != 3
    simulated = list[int]()
    monkeypatch.setattr("autoparallel.pricing.hidden._hidden_on", lambda pricer, strategies, stage: (
        simulated.append(stage) or each[stage]))
    assert hidden(pricer, strategies, range(6)).total == pytest.approx(sum(one.total for one in each))
    assert sorted(simulated) == sorted(set(alike))
