"""The joint search: bounds lie below estimates, promising candidates come first, the plan computes the same."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from typing import Any
from unittest import mock

import pytest
import torch

import autoparallel
from autoparallel import clock
from autoparallel.capture import capture
from autoparallel.errors import InfeasibleError, PlanError
from autoparallel.partition import Splits, split_batch
from autoparallel.partition.stages import stages_of
from autoparallel.planning import joint_candidates
from autoparallel.planning.candidates import Candidate, CandidateSpace, Fixed
from autoparallel.planning.estimate_order import HALF_FULL, EstimateOrder
from autoparallel.planning.joint_candidates import MOST_MIXED, WORTH, JointSearch
from autoparallel.planning.joint_plan import plan_jointly
from autoparallel.planning.options import Options
from autoparallel.planning.plan_graph import as_found
from autoparallel.planning.reduced_model import reduced_model
from autoparallel.plans import Hybrid
from autoparallel.plans.reports.units import percent_up
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer
from autoparallel.search import evaluate, solve
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster
from tests.support import reported
from tests.support.captured import graph_of, plan_of
from tests.support.models import CASES
from tests.support.steps import assert_one_process
from tests.support.tiers import slow


@pytest.mark.parametrize("shape", [(4,), slow((2, 2))])
def test_a_reduced_model_has_the_price_of_the_model(shape: tuple[int, ...]) -> None:
    """Six layers as three: the reduced model's price is the whole's, where equal layers get equal strategies."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=6,
                         num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    args, kwargs = CASES["llama"].inputs(8)
    graph = capture(LlamaForCausalLM(config), args, kwargs)
    small = reduced_model(graph)
    assert len(small.graph) < 0.7 * len(graph) and set(small.stands_for.values()) == {1, 4}
    cluster = Cluster.load("h100-sxm", num_devices=4)
    whole = SpacePricer(Prices(StrategySpace(graph, shape), cluster))
    space = StrategySpace(small.graph, shape)
    part = SpacePricer(Prices(space, cluster), counts=ExecutionCounts(space, multiplicities=small.counts(space)))
    assert solve(part.full(), "exact").objective == pytest.approx(solve(whole.full(), "exact").objective, rel=0.02)


class _Activated(torch.nn.Module):
    """Layers with an activation between each two, outside of them; ``collects``: the loss is of all of their
    results."""

    def __init__(self, collects: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2048, 2048, bias=False) for _ in range(20))
        self.collects = collects

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        every = []
        for layer in self.layers:
            every.append(layer(x))
            x = torch.relu(every[-1])
        return torch.cat(every).square().mean() if self.collects else x.square().mean()


@pytest.mark.parametrize("collects", [False, slow(True)])
def test_ops_between_equal_blocks_count_as_these(collects: bool) -> None:
    """The price is a lower bound: what one layer gives is redistributed for the next one less often than in the model,
    which has no residual stream to keep its layout."""
    with torch.device("meta"):
        graph = capture(_Activated(collects), (torch.empty(512, 2048),))
    small, cluster = reduced_model(graph), Cluster.load("h100-sxm", num_devices=8, software="none")
    assert len(small.graph) < 25
    space, whole = StrategySpace(small.graph, (8,)), StrategySpace(graph, (8,))
    ops = [count for decision, count in zip(space.decisions, small.counts(space), strict=True) if decision.kind == "op"]
    assert sum(ops) == sum(decision.kind == "op" for decision in whole.decisions)
    part = SpacePricer(Prices(space, cluster), counts=ExecutionCounts(space, multiplicities=small.counts(space)))
    expected = solve(SpacePricer(Prices(whole, cluster)).full(), "exact").objective
    found = solve(part.full(), "exact").objective
    assert 0.75 * expected < found <= expected * (1 + 1e-9)
    made = autoparallel.plan(_Activated(collects).to("meta"), cluster, example_inputs=(torch.empty(
        512, 2048, device="meta"),), joint=True, micro_batches=1, pipeline_stages=1, time_limit_s=3.0)
    assert made.evidence.step_bound_s is not None and made.evidence.step_bound_s <= made.prediction.step_s


@pytest.mark.parametrize(("stages", "ranks", "schedule", "recompute"), [
    (4, 4, "1f1b", "none"), (4, 2, "interleaved", "none"), (4, 2, "zero_bubble", "none"), (4, 2, "zero_bubble", "full"),
])
def test_a_reduced_model_has_the_bytes_of_a_rank(stages: int, ranks: int, schedule: str, recompute: str) -> None:
    """Of the fullest rank of the pipeline, with all its stages, whose cuts between ops are not quite even."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=12,
                         num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    args, kwargs = CASES["llama"].inputs(16)
    model, cluster = LlamaForCausalLM(config), Cluster.load("h100-sxm", num_devices=ranks)
    whole = autoparallel.plan(model, cluster, example_inputs=args, example_kwargs=kwargs, mesh_shape=(ranks,),
                              pipeline_stages=stages, schedule=schedule, micro_batches=8, recompute=recompute)
    small = reduced_model(capture(model, args, kwargs))
    space = StrategySpace(split_batch(small.graph, 8).body, (1,))
    hybrid = dataclasses.replace(whole.hybrid, cuts=())
    counts = ExecutionCounts(space, hybrid, multiplicities=small.counts(space), held=small.held(space, hybrid))
    problem = SpacePricer(Prices(space, cluster, stages=ranks), counts=counts).full()
    assert evaluate(problem, solve(problem, "exact").choice).peak_bytes == pytest.approx(whole.prediction.peak_bytes,
                                                                                         rel=0.2)
    assert whole.prediction.peak_bytes > 0.99 * (whole.prediction.state_bytes + whole.prediction.activation_bytes)


@pytest.mark.slow
def test_a_pipeline_without_a_mesh_shape() -> None:
    """Of all meshes whose first axis can take the stages, the one with the fastest step."""
    cluster = Cluster.load("h100-sxm", num_devices=8)

    def planned(shape: tuple[int, ...] | None) -> autoparallel.Plan:
        return plan_of("llama", cluster, mesh_shape=shape, pipeline_stages=4, schedule="gpipe", micro_batches=2)

    best = planned(None)
    assert best.hybrid.pipeline_ranks == 4 and best.hybrid.stages == 4
    assert best.prediction.step_s == pytest.approx(planned((4, 2)).prediction.step_s)


@pytest.mark.slow
def test_a_plan_with_a_stage_on_three_ranks() -> None:
    """It says so, comes back from JSON, and counts the gradients that these ranks add up."""
    cluster = Cluster.load("h100-sxm", num_devices=4)

    def planned(**options: Any) -> autoparallel.Plan:
        return plan_of("llama", cluster, batch=6, **options)

    made = planned(stage_replicas=(1, 3), micro_batches=6)
    assert (made.hybrid.stages, made.hybrid.pipeline_ranks, made.hybrid.replicas) == (2, 4, (1, 3))
    assert "Pipeline parallel 4 (1F1B, stages on 1 + 3 ranks)" in made.summary()
    assert autoparallel.Plan.from_json(made.to_json()).hybrid == made.hybrid
    space = StrategySpace(split_batch(graph_of("llama", 6), 6).body, made.mesh_shape)
    last = stages_of(space, 0, made.hybrid).parts[-1]
    learnt = [s.output_metas[0] for decision, s in zip(space.decisions, space.strategy_sets, strict=True)
              if decision.kind == "parameter" and decision.index in last.decisions]
    (shared,) = [use for use in made.prediction.collectives if use.axis == "pipeline"]
    assert (shared.kind, shared.direction, shared.count) == ("all_reduce", "backward", 3 * len(learnt))
    assert shared.num_bytes == 3 * sum(meta.num_bytes for meta in learnt) and shared.seconds > 0
    assert planned(pipeline_stages=4, stage_replicas=(1, 1, 1, 1), micro_batches=6).hybrid.replicas == ()
    with pytest.raises(PlanError, match="of 3 ranks, which do not divide 4 devices"):
        planned(stage_replicas=(1, 2), micro_batches=6)


class _Layers(torch.nn.Module):
    """Each layer's activation is outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


class _Sum(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().sum()


@pytest.mark.slow
def test_bounds_lie_below_estimates() -> None:
    """So that what is bounded away cannot have been the best."""
    cluster = Cluster.load("h100-sxm", num_devices=8)
    options = Fixed(schedule="1f1b", micro_batches=4, recompute="none")
    search = JointSearch(graph_of("llama"), cluster, options, "adamw", float("inf"))
    survey = search.run(time.monotonic() + 60)
    estimated = [c for c in survey.candidates if c.estimate_s < float("inf")]
    assert len({c.mesh_shape for c in estimated}) >= 2 and len({c.hybrid for c in estimated}) > 2
    bounds = search.step_bounds
    assert all(bounds.step_s(c) <= bounds.estimate_s(c) <= c.estimate_s for c in estimated)
    assert 0 < survey.bound_s <= min(bounds.step_s(c) for c in estimated)
    for candidate in estimated[::7]:
        h = candidate.hybrid
        prices = search._prices_of(h.micro_batches, h.pipeline_ranks, candidate.mesh_shape)
        small = search.reduced_model
        counts = ExecutionCounts(
            prices.space, h, multiplicities=small.counts(prices.space), held=small.held(prices.space, h)
        )
        problem = SpacePricer(prices, counts=counts).full()
        peak = evaluate(problem, solve(problem, "exact").choice).peak_bytes
        assert 0 < search.bounds.least_bytes(candidate) <= peak


def test_bounds_of_plans_that_name_their_recomputed_blocks() -> None:
    """Usual plans by hand do; they are bounded as if they named none that memory does not force."""
    cluster, graph = Cluster.load("h100-sxm", num_devices=8), graph_of("llama")
    for limit in (float("inf"), 2e6):
        bounds = JointSearch(graph, cluster, Fixed(), "adamw", limit).step_bounds
        whole = Candidate(Hybrid(recompute="full"), (8,))
        some = dataclasses.replace(whole, hybrid=Hybrid(recompute="full", recompute_blocks=("model.layers.0",)))
        keeping = Candidate(Hybrid(), (8,))
        assert bounds.step_s(keeping) <= bounds.step_s(some) == bounds.estimate_s(some) <= bounds.estimate_s(whole)


def test_estimates_count_overlap() -> None:
    """An estimate on a slow network is the step that the plan in full is predicted to take."""
    machine = Cluster.load("a100-sxm", num_devices=4)
    slow = dataclasses.replace(machine.links[0], bandwidth_bytes_per_s=2e9)
    machine = dataclasses.replace(machine, links=(slow, *machine.links[1:]))
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, bias=False) for _ in range(3)], _Sum())
        x = torch.zeros(16384, 4096)
    search = JointSearch(capture(model, (x,)), machine, Fixed(), "adamw", float("inf"))
    for hybrid in (Hybrid(), Hybrid(micro_batches=4, zero_stage=1)):
        found = search.estimate(Candidate(hybrid, (4,)))
        made = autoparallel.plan(model, machine, example_inputs=(x,), mesh_shape=(4,), zero_stage=hybrid.zero_stage,
                                 micro_batches=hybrid.micro_batches)
        assert made.prediction.hidden_s > 0.02 * made.prediction.step_s
        assert found.estimate_s == pytest.approx(made.prediction.step_s, rel=0.01)


def test_hopeless_candidates_cost_a_bound_only() -> None:
    """Which lies below the estimate; a survey counts it as bounded away."""

    cluster = Cluster.load("h100-sxm", num_devices=8, software="none")
    search = JointSearch(graph_of("llama"), cluster, Fixed(), "adamw", float("inf"))
    candidate = Candidate(Hybrid(), (2, 4))
    made = search.estimate(candidate)
    assert not made.is_bound and not search.estimate(candidate, made.estimate_s).is_bound
    bound = search.estimate(candidate, made.estimate_s / WORTH / 2)
    assert bound.is_bound and made.estimate_s / 2 <= bound.estimate_s <= made.estimate_s
    search.known[candidate.key] = bound
    assert bound not in search.run(deadline=0.0).candidates


def test_parameters_are_expected_to_be_cut_along_the_inner_axis_only() -> None:
    """Unless ZeRO-3 cuts them along all. Experts are, along both."""
    cluster = Cluster.load("h100-sxm", num_devices=16)
    dense = sum(p.numel() * p.element_size() for p in CASES["llama"].build().parameters())
    search = JointSearch(graph_of("llama"), cluster, Fixed(), "adamw", 2 * dense)
    of = {zero: Candidate(Hybrid(2, zero_stage=zero), (16,)) for zero in (1, 3)}
    assert search._fullness(of[1]) == pytest.approx(HALF_FULL)
    assert search._fullness(of[3]) == search.bounds.fullness(of[3])
    experts = JointSearch(graph_of("mixtral"), cluster, Fixed(), "adamw", 1e9)
    of_experts = {n for n, _ in CASES["mixtral"].build().named_parameters() if ".experts." in n}
    whole = sum(p.numel() * p.element_size() for n, p in CASES["mixtral"].build().named_parameters()
                if n not in of_experts)
    assert of_experts and experts._dense_bytes == whole


def test_a_low_bound_lowers_an_estimate_little() -> None:
    """Not to the bound of a search that ended early."""
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(6)]
    graph, cluster = capture(torch.nn.Sequential(*blocks, _Sum()), (torch.ones(8, 64),)), "h100-sxm"
    search = JointSearch(graph, Cluster.load(cluster, num_devices=4), Fixed(), "adamw", float("inf"))
    plan_within, made = joint_candidates.plan_within, list[float]()
    for part in (1.0, MOST_MIXED, 0.1):
        def found(*given: Any, part: float = part) -> Any:
            one = plan_within(*given)
            return dataclasses.replace(one, lower_bound=part * one.objective)

        with mock.patch.object(joint_candidates, "plan_within", found):
            made.append(search.estimate(Candidate(Hybrid(), (4,))).estimate_s)
    assert made[0] > made[1] == made[2] == pytest.approx(MOST_MIXED * made[0])


def test_what_takes_far_longer_than_the_best_is_searched_once() -> None:
    """Not again with other parts of overlap."""
    machine = Cluster.load("a100-sxm", num_devices=4)
    with torch.device("meta"):
        model, x = torch.nn.Sequential(torch.nn.Linear(4096, 4096), _Sum()), torch.zeros(16384, 4096)
    search = JointSearch(capture(model, (x,)), machine, Fixed(), "adamw", float("inf"))
    with mock.patch.object(joint_candidates, "plan_within", wraps=joint_candidates.plan_within) as searched:
        made = search.estimate(Candidate(Hybrid(), (4,)))
        several, best_s = searched.call_count, made.estimate_s / WORTH / 1.01
        with mock.patch.object(search, "_judged", return_value=made):
            assert search.estimate(Candidate(Hybrid(), (4,)), best_s) == made
    assert searched.call_count - several == 1 < several


def test_the_search_begins_near_the_plans_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their mesh and micro-batches; then comes one combination of the other pipeline length."""
    cluster = Cluster.load("h100-sxm", num_devices=16)
    start = Candidate(Hybrid(8, 2, 2, zero_stage=1), (4, 2), 10.0)
    search = JointSearch(graph_of("llama", 64), cluster, Fixed(), "adamw", float("inf"), starts=[start])
    order: list[Candidate] = []

    def estimate(candidate: Candidate, best_s: float) -> Candidate:
        order.append(candidate)
        if len(order) > 2:
            raise KeyboardInterrupt
        return dataclasses.replace(candidate, estimate_s=math.inf)

    monkeypatch.setattr(search, "estimate", estimate)
    with pytest.raises(KeyboardInterrupt):
        search.run()
    assert order[0].mesh == start.mesh and order[0].hybrid.micro_batches == 8
    assert [c.hybrid.pipeline_ranks for c in order[:2]] == [2, 1]


def test_the_second_round_tries_neighbours_of_the_best() -> None:

    search = JointSearch(graph_of("llama"), Cluster.load("h100-sxm", num_devices=16), Fixed(), "adamw", float("inf"))
    best = Candidate(Hybrid(4, 2, 2, zero_stage=1), (2, 4))
    near = {(c.hybrid.micro_batches, c.mesh_shape) for c in search.space.around(best)}
    assert {(2, (2, 4)), (8, (2, 4)), (4, (4, 2))} <= near
    assert near <= set(itertools.product((2, 4, 8), [(4, 2), (2, 4), (1, 8)]))
    assert {"1f1b", "zero_bubble"} <= {c.hybrid.schedule for c in search.space.around(best)}
    only = Fixed(micro_batches=4, schedule="1f1b", recompute="none", zero_stage=1, pipeline_stages=2)
    fixed = JointSearch(graph_of("llama"), search.cluster, only, "adamw", float("inf"))
    assert {c.hybrid for c in fixed.space.around(best)} == {best.hybrid}


@pytest.mark.slow
def test_a_search_begins_with_a_plan_that_recomputes_some_blocks() -> None:
    """As `recompute=auto` of the usual plans by hand leaves it."""
    peaks = [reported.made(by_hand=f"dp=4,zero=3,recompute={how}").prediction.peak_bytes for how in ("full", "none")]
    limit = sum(peaks) / 2
    start = reported.made(by_hand="dp=4,zero=3,recompute=auto", memory_limit_bytes=limit)
    assert start.hybrid.recompute_blocks is not None
    options = Options(memory_limit_bytes=limit, time_limit_s=2.0)
    with clock.counted(options.time_limit_s):
        found = plan_jointly(Splits(reported.graph()), Cluster.load("h100-sxm", num_devices=4), None, options, [start])
    assert found.prediction.step_s <= start.prediction.step_s
    assert found.evidence.step_bound_s is not None and found.evidence.step_bound_s <= found.prediction.step_s


class Deep(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda value, layer: layer(value).relu().sin(), self.layers, x).square().mean()


@pytest.mark.parametrize("saved_on", ["host", slow("disk")])
def test_saved_tensors_are_where_the_options_say(saved_on: str) -> None:
    """Also where a usual plan by hand, which saves on the device, is faster."""
    with torch.device("meta"):
        model, call = Deep(512), (torch.empty(8192, 512),)
    found = autoparallel.plan(model, Cluster.load("h100-sxm", num_devices=2), example_inputs=call, joint=True,
                              recompute="selective", saved_on=saved_on)
    assert found.hybrid.saved_on == saved_on


def test_promising_candidates_are_estimated_first() -> None:
    """What lies near an expensive estimate comes last, unless nothing else is left and there is patience."""

    near, far = (Candidate(Hybrid(m), (8,)) for m in (2, 64))
    order = EstimateOrder([near, far], lambda c: 0.99 + 0.01 * c.hybrid.micro_batches, lambda c: 0.0, lambda c: 0.0)
    order.learn(Candidate(Hybrid(1), (8,), 3.0))
    assert order.next(2.0, 1.0) is far
    assert order.next(2.0, 1.0) is None
    assert order.next(2.0, float("inf")) is near and order.next(2.0, float("inf")) is None


def test_stages_of_blocks_that_no_pipeline_divides() -> None:
    """A rank may have a stage more than full rounds of blocks fill (61 blocks on 16 ranks), and the first round takes
    the number of stages that spreads blocks best, then the largest."""
    space = CandidateSpace(Cluster.load("h100-sxm", num_devices=16), Fixed(), num_blocks=61, batch=64)
    assert {h.stages for h in space.hybrids(16, 64)} == {16, 64}
    best = Candidate(Hybrid(64, 16, 16, zero_stage=1), (1,))
    assert {c.hybrid.stages for c in space.around(best)} == {16, 32, 48, 64}
    assert [c.hybrid.stages for c in space.in_other_stages(best)] == [32, 48, 64]
    fixed = CandidateSpace(space.cluster, Fixed(pipeline_stages=16), num_blocks=61, batch=64)
    assert not list(fixed.in_other_stages(best))


def test_zero_bubble_is_among_the_first_where_micro_batches_are_few() -> None:
    """Without recompute, which it holds too much for, and with as many stages on a rank as the others have."""
    space = CandidateSpace(Cluster.load("h100-sxm", num_devices=16), Fixed(), num_blocks=8, batch=64)
    of = {m: {(h.stages, h.recompute, h.zero_stage) for h in space.hybrids(4, m) if h.schedule == "zero_bubble"}
          for m in (4, 8)}
    assert of == {4: {(8, "none", 1)}, 8: set()}
    assert not any(h.puts_off_weights for h in space.hybrids(1, 1))


def test_known_plans_are_tried_with_other_numbers_of_stages() -> None:
    """They are as long as the plan but for the bubble: 1 + 1/16 in place of 1 + 1/8 of the work."""
    cluster = Cluster.load("h100-sxm", num_devices=4)
    search = JointSearch(capture(Deep(8), (torch.ones(64, 8),)), cluster, Fixed(), "adamw", float("inf"))
    start = Candidate(Hybrid(8, 2, 2, zero_stage=1), (2,), 9.0, lambda space: [])
    [other] = search.in_other_stages(start)
    assert other.estimate_s == pytest.approx(8.5) and other.first is start.first
    assert (other.hybrid.stages, other.hybrid.schedule, other.mesh_shape) == (4, "interleaved", (2,))


def test_micro_batches_of_a_batch_that_is_no_power_of_two() -> None:
    """Whole rounds over the pipeline's ranks where there are any."""
    space = CandidateSpace(Cluster.load("h100-sxm", num_devices=8), Fixed(), num_blocks=2, batch=280)
    assert space.micro_batches(35) == [35, 70, 140, 280] and space.micro_batches(1) == [1, 2, 4, 8]
    assert space.micro_batches(3) == [4, 5, 7] and space.micro_batches(16)[0] >= 16


class _Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))).square().mean()


def test_a_model_that_computes_across_samples_is_planned_in_one_micro_batch() -> None:
    """Batch norm in training: combinations with more have no plan, and no block is recomputed, as there is none."""
    model = _Normed()
    cluster, x = Cluster.load("h100-sxm", num_devices=4), torch.zeros(16, 8)
    search = JointSearch(capture(model, (x,)), cluster, Fixed(), "adamw", float("inf"))
    several, whole = Candidate(Hybrid(4), (2, 2)), Candidate(Hybrid(), (2, 2))
    assert search.step_bounds.tighten(several) and search.step_bounds.tighten(several)    # of 1, and of 2
    assert search.estimate(several).estimate_s == math.inf > search.estimate(whole).estimate_s
    while search.step_bounds.tighten(several):
        pass
    assert search.step_bounds.step_s(several) == search.step_bounds.estimate_s(several) == math.inf
    survey = search.run()
    assert 0 < survey.bound_s < math.inf and survey.candidates[0].hybrid.micro_batches == 1
    assert {c.hybrid.recompute for c in search.space.first_round()} == {"none"}
    plan = autoparallel.plan(model, cluster, example_inputs=(x,), joint=True, time_limit_s=0.5)
    assert plan.hybrid.micro_batches == 1 and "recompute" not in plan.summary().split("\n")[1]
    with pytest.raises(InfeasibleError, match="batch norm in training mode takes the mean over all of its samples"):
        autoparallel.plan(model, cluster, example_inputs=(x,), joint=True, time_limit_s=0.5, micro_batches=2)


def test_an_empty_batch_is_one_micro_batch() -> None:
    """On six devices, too, which no usual plan by hand cuts it over."""
    cluster, model = Cluster.load("h100-sxm", num_devices=6), torch.nn.Sequential(torch.nn.Linear(8, 8), _Sum())
    plan = autoparallel.plan(model, cluster, example_inputs=(torch.zeros(0, 8),), joint=True, time_limit_s=1)
    assert plan.hybrid.micro_batches == 1 and 0 < plan.prediction.step_s < math.inf


def test_recompute_that_takes_no_time_is_left_out() -> None:
    """Each layer is a block in which nothing is left to be recomputed."""
    cluster = Cluster.load("h100-sxm", num_devices=8)
    plan = autoparallel.plan(_Layers(), cluster, example_inputs=(torch.zeros(8, 64),), joint=True, time_limit_s=1)
    assert plan.hybrid.recompute == "none"


def test_a_plan_outside_of_the_combinations_is_not_below_the_bound() -> None:
    """A plain step on a mesh of 5 x 5 devices, which the joint search does not try, may be faster than all it tries."""
    plan = autoparallel.plan(torch.nn.Linear(8, 8), Cluster.load("h100-sxm", num_devices=2), mesh_shape=(2,),
                             example_inputs=(torch.zeros(8, 8),), joint=True, time_limit_s=1)
    step_s = plan.prediction.step_s
    for bound_s in (0.5 * step_s, 2 * step_s):
        slower = dataclasses.replace(plan, evidence=dataclasses.replace(plan.evidence, step_bound_s=bound_s))
        assert as_found(plan, math.inf, slower).evidence.step_bound_s == min(bound_s, step_s)


def test_stages_that_the_user_fixed_may_be_more_than_blocks() -> None:
    """As in a search that is not joint; of itself it takes no more pipeline ranks than blocks."""
    cluster = Cluster.load("h100-sxm", num_devices=8)
    assert max(ranks for ranks, _ in CandidateSpace(cluster, Fixed(), 2, 8).shapes()) == 2
    assert {ranks for ranks, _ in CandidateSpace(cluster, Fixed(pipeline_stages=4), 0, 8).shapes()} == {2, 4}
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)), _Sum())
    plan = autoparallel.plan(model, cluster, example_inputs=(torch.zeros(8, 8),), joint=True, time_limit_s=2,
                             stage_replicas=(2, 2), micro_batches=4)
    assert plan.hybrid.replicas == (2, 2)


@pytest.mark.parametrize(("limit_share", "time_limit_s"), [(1.0, 5), slow(1.0, 15), slow(0.6, 15), slow(0.35, 15)])
def test_joint_plans_compute_one_process_s_step(ranks: Any, limit_share: float, time_limit_s: float) -> None:
    """Under three memory limits: none, and shares of what the plan without a limit takes."""
    cluster = Cluster.load("a100-sxm", num_devices=4)

    def best(limit: float) -> autoparallel.Plan:
        return plan_of("llama", cluster, joint=True, memory_limit_bytes=limit, time_limit_s=time_limit_s)

    free = made = best(float("inf"))
    if limit_share < 1:
        made = best(limit_share * free.prediction.peak_bytes)
    assert made.prediction.peak_bytes <= limit_share * free.prediction.peak_bytes
    bound_s = made.evidence.step_bound_s
    assert bound_s is not None and 0 < free.evidence.step_bound_s <= bound_s <= made.prediction.step_s
    most = percent_up(made.prediction.step_s / bound_s - 1)
    assert f"At most {most} slower than the best combination" in made.summary()
    mesh = (made.hybrid.pipeline_ranks, *made.mesh_shape) if made.hybrid.stages > 1 else made.mesh_shape
    mesh = mesh[:-1] if made.hybrid.stages > 1 and made.mesh_shape == (1,) else mesh
    assert_one_process(ranks, "llama", mesh, {"plan": made})


def test_inner_axes_are_parts_of_hosts() -> None:
    """Also of hosts of six devices, and of few devices in all."""
    eights = Cluster.load("h100-sxm", num_devices=48)
    sixes = dataclasses.replace(eights, host=dataclasses.replace(eights.host, devices=6))

    def shapes(cluster: Cluster, count: int) -> set[tuple[int, ...]]:
        space = CandidateSpace(dataclasses.replace(cluster, num_devices=count), Fixed(), 1, 8)
        return {shape for ranks, shape in space.shapes() if ranks == 1}

    assert shapes(eights, 9) == {(3, 3), (9,)} and (2, 6) in shapes(eights, 12)
    assert (8, 6) in shapes(sixes, 48) and (8, 6) not in shapes(eights, 48)
