"""Layouts of plans by hand: searched on a model of reduced depth, as on the whole; what plans share; their kinds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from autoparallel import clock
from autoparallel.partition import Splits
from autoparallel.planning import hand_layouts, usual
from autoparallel.planning.baselines import by_roles
from autoparallel.planning.by_hand import ByHand
from autoparallel.planning.options import Options
from autoparallel.planning.plan_by_hand import estimate_by_hand, plan_by_hand
from autoparallel.planning.usual import pricing_of, usual_plans
from autoparallel.plans import Plan
from autoparallel.plans.record import FAR_SLOWER, SLOWER
from autoparallel.plans.roles import roles_of
from autoparallel.pricing import Prices, SpacePricer
from autoparallel.pricing.problem import FAULT_S
from autoparallel.search import solve
from autoparallel.search.model.problem import Problem, Solution
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster
from tests.support.reported import SEQUENCE, TOKENS, graph
from tests.support.tiers import slow, with_slow

BATCH = TOKENS // SEQUENCE
#: The latency of buckets that are not full, as a share of these steps at most.
LATENCY = 3e-3
LAYERS, CLUSTER = 8, Cluster.load("h100-sxm", num_devices=4)
#: In the last a block leaves sums pending, which the next one, of the reduced-depth model, need not take.
HANDS = ("dp=4", "dp=4,zero=1,micro_batch=4", "dp=2,pp=2,micro_batch=4,recompute=full", "dp=2,tp=2,zero=3")


def priced(split: Splits, text: str) -> Plan:
    hand = ByHand.of(text).on(4)
    return plan_by_hand(split, CLUSTER, Options(by_hand=hand), hand)


@pytest.mark.parametrize("text", with_slow(HANDS, *HANDS[1:-1]))
def test_equal_blocks_are_laid_out_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search sees three blocks; the whole model only where these cost more there. Both give one plan."""
    sizes = list[int]()

    def counting(problem: Problem, *given: Any) -> Solution:
        sizes.append(len(problem.nodes))
        return solve(problem, *given)

    monkeypatch.setattr(hand_layouts, "solve", counting)
    small = priced(Splits(graph(LAYERS)), text)
    monkeypatch.setattr(hand_layouts, "APART", -2.0)    # whatever it costs, it is too much
    whole = priced(Splits(graph(LAYERS)), text)
    first, *more = sizes
    assert more[-2:] == [first, max(sizes)] and max(sizes) > 1.8 * first
    assert more[:-2] == ([] if text != HANDS[-1] else [max(sizes)])
    assert (small.strategies, small.hybrid, small.prediction) == (whole.strategies, whole.hybrid, whole.prediction)


def test_equal_blocks_share_the_costs_of_their_redistributions() -> None:
    """With the penalties of roles too, which are those of each use by itself."""
    space = StrategySpace(graph(LAYERS), (2, 2))
    roles = by_roles("by hand", space, ("data", "tensor"))
    pricers = [SpacePricer(Prices(space, CLUSTER, direct=True), penalties=some) for some in (roles, None)]
    (nodes, edges), (plain, moves) = ((p.full().nodes, p.full().edges[: len(space.uses)]) for p in pricers)
    assert len({id(edge.costs) for edge in edges}) < 0.7 * len(edges) and len({id(n.costs) for n in nodes}) < len(nodes)
    for node, free, index in zip(nodes, plain, range(len(nodes)), strict=True):
        assert (node.costs == free.costs + FAULT_S * roles.decision_penalties(index)[pricers[0].choices(index)]).all()
    table = pricers[0].prices.redistribution.table
    for use, edge, free in zip(space.uses, edges, moves, strict=True):
        fresh = by_roles("by hand", space, ("data", "tensor")).use_penalties(use, table(use))
        rows, columns = pricers[0].choices(use.source), pricers[0].choices(use.target)
        assert (edge.costs == free.costs + FAULT_S * fresh[rows[:, None], columns]).all()


@pytest.mark.parametrize("left_s", [slow(0.0), -5.0])
def test_a_lack_of_time_does_not_change_the_layouts(left_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Usual plans are priced until one fits, also after their time: the search for layouts has its own."""
    limits = list[float]()

    def timed(problem: Problem, kind: str, limit_s: float, *given: Any) -> Solution:
        limits.append(limit_s)
        return solve(problem, kind, limit_s, *given)

    monkeypatch.setattr(hand_layouts, "solve", timed)
    hand = ByHand.of(HANDS[0]).on(4)
    late = plan_by_hand(Splits(graph(LAYERS)), CLUSTER, pricing_of(Options(), hand, left_s), hand)
    in_time = priced(Splits(graph(LAYERS)), HANDS[0])
    assert (late.strategies, late.prediction) == (in_time.strategies, in_time.prediction)
    assert set(limits) == {hand_layouts.LAYOUTS_S}


def test_plans_on_one_mesh_share_their_strategy_graph_and_prices() -> None:
    """The second takes two thirds of the work of the first; of a plan that is priced again no layouts are searched."""
    split, spent = Splits(graph(LAYERS)), list[float]()
    for text in ("dp=4", "dp=4,zero=1", "dp=4"):
        with clock.counted(60.0):
            priced(split, text)
            spent.append(clock.spent_s())
    assert 0 < spent[1] < 0.7 * spent[0] and spent[2] < 0.6 * spent[1], spent


def test_further_counts_of_micro_batches_take_half_of_the_work() -> None:
    """Placements along the batch are found for a count's smallest factor; a program does not depend on other counts
    that were asked for before."""
    split, spent = Splits(graph(LAYERS)), list[float]()
    for count in (2, 4, 8):
        with clock.counted(60.0):
            split(count)
            spent.append(clock.spent_s())
    assert 0 < max(spent[1:]) < 0.5 * spent[0], spent
    assert str(split(8).body.nodes) == str(Splits(graph(LAYERS))(8).body.nodes)
    parts = [node.outputs[0].shape[:1] for node in split(8).body.of_kind("input") if node.outputs[0].shape]
    assert parts == [(BATCH // 8,)] * 2


@pytest.mark.parametrize("text", [
    *HANDS, slow("dp=4,zero=3"), "dp=2,cp=2", slow("dp=2,cp=2,zero=1"), slow("dp=2,tp=2,sequence_parallel"),
    slow("dp=4,zero=3,shards=2"), "tp=4"])
def test_a_plan_is_of_the_kind_that_its_text_says(text: str) -> None:
    """Recognised from the layouts of the plan, and from the degrees of one that is not priced."""
    plan = priced(Splits(graph()), text)
    said = {"pp=2": "pipeline parallel", "tp=": "tensor parallel", "cp=2": "context parallel", "zero=3": "FSDP",
            "zero=1": "ZeRO-1", "dp=4": "DDP"}
    kind = "FSDP with tensor parallel" if text == HANDS[-1] else next(kind for key, kind in said.items() if key in text)
    assert roles_of(plan).family == ByHand.of(text).on(4).family == kind


@pytest.mark.parametrize("text", ["dp=4", slow("dp=4,zero=1,micro_batch=8,recompute=full"),
                                  "dp=4,zero=1,micro_batch=8,recompute=selective",
                                  slow("dp=4,zero=3,micro_batch=8")])
def test_an_estimate_of_three_blocks_is_the_plan_s_step_and_bytes(text: str) -> None:
    """Without a pipeline: also of the gradients in backward, which equal blocks hold one after the other. Estimates
    leave out what buckets that are not equal take more or less."""
    split, hand = Splits(graph(LAYERS)), ByHand.of(text).on(4)
    found, made = estimate_by_hand(split, CLUSTER, Options(), hand, math.inf), priced(split, text).prediction
    assert found is not None and found.step_s == pytest.approx(made.step_s, rel=LATENCY)
    assert found.peak_bytes == pytest.approx(made.peak_bytes, rel=1e-6)
    assert estimate_by_hand(Splits(graph(3)), CLUSTER, Options(), hand, math.inf) is None    # takes as long as the plan


@pytest.mark.parametrize(("text", "slower"), [slow("dp=4,zero=3", 40), ("dp=4,zero=3,micro_batch=2", 40),
                                              ("dp=4,zero=3,micro_batch=8,recompute=full", 60)])
def test_equal_blocks_hide_what_they_gather_among_one_another(text: str, slower: float) -> None:
    """On links on which gathers take about as long as compute: the simulated step of three blocks hides the least part
    of those of the blocks between, which the plan's step hides."""
    links = tuple(dataclasses.replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / slower)
                  for link in CLUSTER.links)
    cluster, split, hand = dataclasses.replace(CLUSTER, links=links), Splits(graph(16)), ByHand.of(text).on(4)
    made = plan_by_hand(split, cluster, Options(by_hand=hand), hand).prediction
    found = estimate_by_hand(split, cluster, Options(by_hand=hand), hand, math.inf)
    assert found is not None and found.step_s == pytest.approx(made.step_s, rel=0.05)
    assert made.hidden_s - made.ahead_s > 0.1 * made.step_s    # without it the estimate would be further off


def test_recompute_of_as_few_blocks_as_needed_is_estimated_between_none_and_all() -> None:
    split, text = Splits(graph(LAYERS)), "dp=4,zero=1,micro_batch=8"
    none, full = (priced(split, f"{text},recompute={kind}").prediction for kind in ("none", "full"))
    limit = (none.peak_bytes + full.peak_bytes) / 2
    hand = ByHand.of(f"{text},recompute=auto").on(4)
    found = estimate_by_hand(split, CLUSTER, Options(), hand, limit)
    assert found == (pytest.approx((none.step_s + full.step_s) / 2, rel=LATENCY), pytest.approx(limit))
    for limit, made in ((full.peak_bytes / 2, full), (2 * none.peak_bytes, none)):
        found = estimate_by_hand(split, CLUSTER, Options(), hand, limit)
        assert found is not None and found.step_s == pytest.approx(made.step_s, rel=LATENCY)


@pytest.mark.slow
def test_usual_plans_near_the_fastest_are_priced_and_one_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are left out, and say why; the fastest is that of all. Combinations of both are told. Of a kind that
    is estimated to be much slower none is priced."""
    monkeypatch.setattr(usual, "FAR", math.inf)
    cluster = Cluster.load("h100-sxm", num_devices=16)
    every = usual_plans(Splits(graph(LAYERS)), cluster, Options())
    some = usual_plans(Splits(graph(LAYERS)), cluster, Options(), near=1.05)
    assert every.fastest is not None and some.fastest is not None and some.fastest[0] == every.fastest[0]
    step_s, left = some.fastest[1].prediction.step_s, {one.by_hand: one for one in some.left_out}
    slower = [text for text, one in left.items() if one.why == SLOWER]
    assert len(slower) > 3 and len(some.priced) + len(slower) >= len(every.priced) - 1
    assert all(every.priced[text].prediction.step_s > step_s for text in slower if text in every.priced)
    families = [{ByHand.of(text).on(16).family for text in found.priced} for found in (every, some)]
    assert families[0] == families[1]
    told = {(one.hybrid.micro_batches, one.mesh_shape, one.hybrid.zero_stage) for one in some.combinations}
    assert {(hand.micro_batches, plan.mesh_shape, hand.zero_stage) for text in slower
            if "auto" not in text and (plan := every.priced.get(text)) for hand in [plan.hybrid]} <= told
    monkeypatch.setattr(usual, "FAR", 1.05)
    fewer = usual_plans(Splits(graph(LAYERS)), cluster, Options(), near=1.05)
    far = {ByHand.of(one.by_hand).on(16).family for one in fewer.left_out if one.why == FAR_SLOWER}
    assert far and far.isdisjoint(ByHand.of(text).on(16).family for text in fewer.priced)
    assert fewer.fastest is not None and fewer.fastest[0] == every.fastest[0]
    plain = usual_plans(Splits(graph(3)), cluster, Options(), near=1.05)    # no block stands for others
    assert not [one for one in plain.left_out if one.why == SLOWER] and len(plain.priced) > len(some.priced)
