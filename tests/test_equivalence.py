"""Equivalent ops are priced, planned and reported once: with the same result as one by one."""

from __future__ import annotations

import random
from dataclasses import asdict, replace

import numpy as np
import pytest

from autoparallel import Cluster, clock
from autoparallel.errors import SearchError
from autoparallel.partition import Splits, place_cuts, split_batch, stages_of
from autoparallel.partition.stages import numbers_alike
from autoparallel.plans import Hybrid
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer, decision_seconds, predict, redistribution_costs
from autoparallel.pricing.hidden import hidden
from autoparallel.pricing.prediction import means
from autoparallel.pricing.step_cost import Exposed
from autoparallel.search import Edge, Node, Problem, evaluate
from autoparallel.search.model.problem import Repeats
from autoparallel.strategies.space import StrategySpace
from tests.support.captured import graph_of
from tests.support.reported import graph
from tests.support.tiers import slow

PIPELINE = {"micro_batches": 4, "stages": 2, "pipeline_ranks": 2}


class OneByOne(SpacePricer):
    """Takes no two decisions, and no two tensor uses, for equivalent."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.costs.kinds.decisions = np.arange(len(self.space))
        self.costs.kinds.uses = np.arange(len(self.space.uses))


HYBRIDS = [
    Hybrid(), Hybrid(recompute="full"), Hybrid(4, recompute="offload"), Hybrid(zero_stage=3, recompute="selective"),
    Hybrid(2, zero_stage=1), Hybrid(4, zero_stage=2, reduce_dtype="float32"), Hybrid(2, zero_stage=3, recompute="full"),
    Hybrid(**PIPELINE), Hybrid(**PIPELINE, schedule="zero_bubble", recompute="full"),
    Hybrid(4, 4, 2, schedule="interleaved"), Hybrid(**{**PIPELINE, "pipeline_ranks": 3}, replicas=(2, 1)),
    Hybrid(**PIPELINE, recompute="offload", zero_stage=1),
]


@pytest.mark.parametrize(("case_name", "hybrid"), [
    ("gpt2", HYBRIDS[3]), ("llama", HYBRIDS[9]),
    *(slow("llama", hybrid) for number, hybrid in enumerate(HYBRIDS) if number != 9),
    *(slow("gpt2", hybrid) for number, hybrid in enumerate(HYBRIDS) if number != 3),
], ids=lambda given: given if isinstance(given, str) else "-".join(str(v) for v in asdict(given).values() if v))
def test_equivalent_ops_share_one_price(case_name: str, hybrid: Hybrid) -> None:
    hybrid = replace(hybrid, bucket_bytes=20_000)
    micro = split_batch(graph_of(case_name), hybrid.micro_batches)
    space = StrategySpace(micro.body, (2, 2))
    cluster = Cluster.load("h100-sxm", num_devices=4 * hybrid.pipeline_ranks)
    prices = Prices(space, cluster, stages=hybrid.pipeline_ranks)
    if hybrid.stages > 1:
        hybrid = replace(hybrid, cuts=place_cuts(prices, micro.loss, hybrid))
    stages = stages_of(space, micro.loss, hybrid)
    counts = ExecutionCounts(space, hybrid, stages.of_decisions(len(space)))
    pricer, other = SpacePricer(prices, counts=counts), OneByOne(prices, counts=counts)
    assert len(set(pricer.costs.kinds.decisions.tolist())) < len(space)
    made, whole = pricer.full(), other.full()
    for node, alone in zip((*made.nodes, *made.edges), (*whole.nodes, *whole.edges), strict=True):
        assert np.array_equal(node.costs, alone.costs)
        assert (node.usages is None) == (alone.usages is None)
        assert node.usages is None or np.array_equal(node.usages, alone.usages)
    assert [node.name for node in made.nodes] == [decision.name for decision in space.decisions]
    assert np.array_equal(made.intervals, whole.intervals) and np.array_equal(made.ends, whole.ends)
    hiding, alone = (p.exposing(Exposed(0.5, 0.25, 0.125)) for p in (pricer, other))
    for edge, one in zip(hiding.full_like(made).edges, alone.full().edges, strict=True):
        assert np.array_equal(edge.costs, one.costs)
    for seed in range(3):
        draw = random.Random(seed)
        strategies = [draw.choice(pricer.strategies(decision)) for decision in range(len(space))]
        judged = evaluate(made, pricer.choice_of(strategies))
        sends = stages.sent_bytes(space, strategies)
        told, by_one = (asdict(predict(p, problem, strategies, judged.peak_bytes, sends))
                        for p, problem in ((pricer, made), (other, whole)))
        uses, used = told.pop("collectives"), by_one.pop("collectives")
        assert told.pop("repeated_ops") == by_one.pop("repeated_ops") and told.pop("basis") == by_one.pop("basis")
        assert told == pytest.approx(by_one, rel=1e-9, abs=1e-12 * judged.objective)
        assert [tuple(use.values()) for use in uses] == [
            (*tuple(use.values())[:4], pytest.approx(use["num_bytes"]), pytest.approx(use["seconds"]),
             *tuple(use.values())[6:]) for use in used]
        for rank in range(hybrid.pipeline_ranks):
            own = hybrid.stages_of(rank)
            alone_s = hidden(other, strategies, own)
            assert hidden(pricer, strategies, own) == pytest.approx(alone_s, abs=1e-9 * judged.objective)
        assert pricer.strategies_of(pricer.choice_of(strategies)) == strategies


@pytest.mark.parametrize("held", [False, True])
def test_decisions_of_equal_multiplicity_are_equivalent(held: bool) -> None:
    space = StrategySpace(graph_of("llama"), (2, 2))
    counts = ExecutionCounts(space, Hybrid(2), multiplicities=[1 + decision.index % 3 for decision in space.decisions],
                  held=[decision.index % 2 / 2 for decision in space.decisions] if held else None)
    prices = Prices(space, Cluster.load("h100-sxm", num_devices=4))
    made, whole = SpacePricer(prices, counts=counts).full(), OneByOne(prices, counts=counts).full()
    for one, alone in zip((*made.nodes, *made.edges), (*whole.nodes, *whole.edges), strict=True):
        assert np.array_equal(one.costs, alone.costs)
        assert one.usages is alone.usages or np.array_equal(one.usages, alone.usages)


@pytest.mark.parametrize("hybrid", [
    Hybrid(4, 4, 4), slow(Hybrid(4, 4, 4, recompute="full")),
    Hybrid(4, 4, 4, "zero_bubble", zero_stage=3, recompute="full"), slow(Hybrid(4, 8, 4, "interleaved", zero_stage=1)),
    Hybrid(8, 3, 4, replicas=(1, 2, 1), recompute="selective"),
], ids=str)
def test_equal_blocks_are_priced_once_for_their_cuts(hybrid: Hybrid) -> None:
    """With the seconds of each decision on a stage of its own; also where the blocks' strategies differ."""
    micro = Splits(graph(8))(hybrid.micro_batches)
    space = StrategySpace(micro.body, (2,))
    prices, one_by_one = Prices(space, Cluster.load("h100-sxm", num_devices=8), stages=4), np.arange(len(space))
    draw, alike = random.Random(0), numbers_alike(space, hybrid)
    for share in (1.0, 0.5):    # of decisions that have the strategy of the first of their equals
        any_of = [draw.choice(s.strategies) for s in space.strategy_sets]
        strategies = [any_of[first] if draw.random() < share else any_of[index] for index, first in enumerate(alike)]
        alone = means(decision_seconds(prices, hybrid, strategies, one_by_one), alike)
        assert means(decision_seconds(prices, hybrid, strategies, alike), alike) == pytest.approx(alone, rel=1e-9)
        assert alone.max() > 0 and len(set(alike.tolist())) < 0.5 * len(space)


def test_step_configurations_share_what_redistributions_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their problems are those of prices of their own; what is kept is let go once other prices are asked."""
    space, cluster = StrategySpace(graph_of("llama"), (2, 2)), Cluster.load("h100-sxm", num_devices=4)
    prices, cells = Prices(space, cluster), dict[Hybrid, float]()
    did = clock.did

    def counting(unit: str, amount: float = 1.0) -> None:
        cells[hybrid] = cells.get(hybrid, 0.0) + amount * (unit == "cells priced")
        did(unit, amount)

    monkeypatch.setattr(clock, "did", counting)
    for hybrid in (Hybrid(), Hybrid(zero_stage=1), Hybrid(zero_stage=3)):
        shared, alone = (SpacePricer(one, counts=ExecutionCounts(space, hybrid)).full()
                         for one in (prices, Prices(space, cluster)))
        assert all(np.array_equal(a.costs, b.costs) for a, b in zip(shared.edges, alone.edges, strict=True))
    first, again, other = cells.values()    # of shared prices and others each
    assert first > 0 and again < 0.9 * first and other < 0.9 * first
    redistribution = prices.redistribution
    assert redistribution._uses
    others = [Prices(space, cluster) for _ in range(redistribution_costs.MOST_RECENT)]
    for one in others:
        SpacePricer(one).full()
    assert not redistribution._uses


def test_repeated_nodes_and_edges_are_as_if_each_were_made() -> None:
    two, three = (Node("", np.arange(float(n)), np.ones(n), strategies=tuple((i,) for i in range(n))) for n in (2, 3))
    light, heavy = Edge(0, 1, np.ones((2, 3))), Edge(0, 1, np.zeros((2, 3)), np.full((2, 3), 8.0))
    nodes = Repeats([two, three], np.array([0, 1, 0, 1]), name=list("abcd"), interval=[(0, 5), (1, 3), (3, 3), (4, 9)])
    edges = Repeats([light, heavy], np.array([0, 1, 1]), source=[0, 0, 2], target=[1, 3, 3],
                    interval=[(0, 1), (1, 2), (2, 6)])
    edges = edges.followed_by([Edge(2, 1, np.ones((2, 3)), np.ones((2, 3)), (0, 4))])
    problem, made = Problem(nodes, edges, 100.0), Problem(tuple(nodes), tuple(edges), 100.0)
    assert [node.name for node in problem.nodes] == list("abcd") and problem.nodes[1:3][0].interval == (1, 3)
    assert (edges[2].source, edges[2].target, edges[2].interval) == (2, 3, (2, 6))
    for what in ("sizes", "ends", "intervals", "device_classes", "has_strategies"):
        assert np.array_equal(getattr(problem, what), getattr(made, what))
    for what in ("costs", "usages"):
        assert all(a is b for a, b in zip(getattr(problem, what), getattr(made, what), strict=True))
    assert evaluate(problem, (1, 2, 0, 1)) == evaluate(made, (1, 2, 0, 1))
    with pytest.raises(SearchError, match=r"edge 0 \(0 -> 2\) has a table of \(2, 3\) for nodes with \(2, 2\)"):
        Problem(nodes, Repeats([light], np.array([0]), source=[0], target=[2]))
    with pytest.raises(SearchError, match="edge 1 names node 4; there are 4 nodes"):
        Problem(nodes, Repeats([light], np.array([0, 0]), source=[0, 0], target=[1, 4]))
