"""What the emitted program posts is what `pricing.beside` simulates; under random plans the numbers are the same."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import autoparallel
from autoparallel.capture import capture
from autoparallel.kernels.async_communication import begin_gathers, begin_reductions, end
from autoparallel.kernels.collectives import item
from autoparallel.lower import emit
from autoparallel.lower.overlap_pass import ended_together, overlap, reads_of
from autoparallel.lower.parameter_reads import gathers_parameter, split_reads
from autoparallel.partition import split_batch
from autoparallel.plans import Hybrid
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer
from autoparallel.pricing.overlap_simulation import RankStep, StepTasks
from autoparallel.runtime.stage_module import _recomputed, split_step
from autoparallel.schedule import async_windows
from autoparallel.schedule.async_windows import TOP, AsyncWindows, Read, ToAsk
from autoparallel.strategies.space import Strategy, StrategySpace
from benchmarks.model_zoo import Candidate, Ranks, truth, worst_error
from cost_models import Cluster
from tests.support.captured import graph_of, plan_of
from tests.support.programs import named

CLUSTER = Cluster.load("h100-sxm", num_devices=8)


@cache
def space_of(case_name: str, mesh_shape: tuple[int, ...]) -> StrategySpace:
    return StrategySpace(graph_of(case_name), mesh_shape)


def strategies_of(case_name: str, space: StrategySpace, options: dict[str, Any]) -> tuple[Strategy, ...]:
    if "seed" in options:
        draw = random.Random(options["seed"])
        return tuple(draw.choice(strategy_set.strategies) for strategy_set in space.strategy_sets)
    four = Cluster.load("h100-sxm", num_devices=4)
    made = plan_of(case_name, four, mesh_shape=space.mesh_shape, **options)
    return tuple(made.strategies_on(space))


def lines_of(module: torch.fx.GraphModule, ops: set[int]) -> list[object]:
    """Begins and ends in a program, and the sites of ops between them, in order."""
    nodes, sizes = list(module.graph.nodes), Counter[Any]()
    for node in nodes:
        if node.target is item and node.args[0].target is end:
            sizes[node.args[0].args[0]] += node.meta["num_bytes"]
    found: list[object] = []
    for node in nodes:
        if node.target in (begin_gathers, begin_reductions, end):
            begun = node.args[0] if node.target is end else node
            found.append((node is begun, begun.target is begin_gathers, sizes[begun]))
        elif node.op == "call_function" and "step" not in node.meta and node.meta["decision"] in ops:
            found.append(node.meta["decision"])
            ops = ops - {node.meta["decision"]}
    return found


def lines_priced(plan: RankStep) -> list[object]:
    """The same of a simulated step, and what it posts."""
    found: list[object] = []
    for place in (TOP, *range(len(plan.space))):
        for begins, pair in plan.windows.events.get(place, ()):
            reads = [plan.reads.reads[n] for n in pair.steps]
            found.append((begins, reads[0].kind == "gather", sum(read.num_bytes for read in reads)))
        if place >= 0 and plan.space.decisions[place].kind == "op":
            found.append(place)
    return found


@pytest.mark.parametrize(("case_name", "mesh_shape", "options", "hybrid"), [
    ("gpt2", (4,), {"baseline": "ddp"}, Hybrid()),
    ("gpt2", (4,), {"baseline": "fsdp"}, Hybrid()),
    ("llama", (4,), {"baseline": "fsdp"}, Hybrid(recompute="full")),
    ("llama", (2, 2), {"baseline": "ddp"}, Hybrid()),
    ("llama", (2, 2), {"baseline": "sequence_parallel"}, Hybrid()),
    ("gpt2", (2, 2), {"seed": 0}, Hybrid(zero_stage=3)),
    ("llama", (2, 2), {"baseline": "fsdp"}, Hybrid(zero_stage=3)),
    ("llama", (4,), {"baseline": "fsdp"}, Hybrid(zero_stage=3, recompute="full")),
    ("t5", (2, 2), {"seed": 1}, Hybrid(recompute="selective")),
    ("t5", (4,), {"seed": 2}, Hybrid()),
])
@pytest.mark.parametrize("bucket_bytes", [20_000, 1e9])
def test_what_is_priced_is_what_runs(case_name: str, mesh_shape: tuple[int, ...], options: dict[str, Any],
                                     hybrid: Hybrid, bucket_bytes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begins and ends, their kinds and bytes, between the same ops; and no other task of the simulation is posted.
    Buckets of a few parameters, and of a block each."""
    monkeypatch.setattr(async_windows, "BUCKET_BYTES", bucket_bytes)
    monkeypatch.setattr(async_windows, "FIRST_BUCKET_BYTES", 20_000)
    space = space_of(case_name, mesh_shape)
    strategies, ops = (
        strategies_of(case_name, space, options),
        {decision.index for decision in space.decisions if decision.kind == "op"},
    )
    prices = Prices(space, CLUSTER, direct="baseline" in options)
    plan = RankStep(SpacePricer(prices, counts=ExecutionCounts(space, hybrid)), strategies)
    program = emit(space, strategies, prices.path, (0,) * len(mesh_shape))
    block_of = _recomputed(hybrid)
    assert reads_of(program.module, block_of)[1] == plan.reads.reads
    written = lines_of(overlap(program.module, block_of), ops)
    assert written == lines_priced(plan)
    issued: list[float] = []
    monkeypatch.setattr(StepTasks, "work", lambda step, *rest: None)
    monkeypatch.setattr(StepTasks, "issue",
                        lambda step, seconds, stream, label: issued.append(seconds) or len(issued) - 1)
    plan.step()
    pairs = [event for event in written if isinstance(event, tuple)]
    again = sum(any(plan.reads.parameter_steps[n].again_s for n in pair.steps) for pair in plan.windows.gathered)
    assert len(issued) == sum(gather or not begins for begins, gather, _ in pairs) + again
    assert (again > 0) == (hybrid.zero_stage == 3)
    assert pairs


@pytest.mark.parametrize(("case_name", "recompute"), [("gpt2", "none"), ("llama", "full"), ("t5", "none")])
def test_what_is_priced_is_what_runs_in_each_turn_of_zero_3(case_name: str, recompute: str,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what is read before the turns: of plans at random, steps before the first that communicates."""
    monkeypatch.setattr(async_windows, "BUCKET_BYTES", 20_000)
    hybrid = Hybrid(2, zero_stage=3, recompute=recompute)
    space = StrategySpace(split_batch(graph_of(case_name), 2).body, (2, 2))
    strategies, ops = (
        strategies_of(case_name, space, {"seed": 0}),
        {decision.index for decision in space.decisions if decision.kind == "op"},
    )
    prices = Prices(space, CLUSTER)
    plan = RankStep(SpacePricer(prices, counts=ExecutionCounts(space, hybrid)), strategies)
    micro_batch = split_reads(emit(space, strategies, prices.path, (0, 0)), gathers_parameter).micro_batch
    assert reads_of(micro_batch, _recomputed(hybrid))[1] == plan.reads.reads
    written = lines_of(overlap(micro_batch, _recomputed(hybrid)), ops)
    assert written == lines_priced(plan) and any(isinstance(event, tuple) for event in written)


@pytest.mark.parametrize(("baseline", "mesh_shape"), [("ddp", (2, 2)), ("fsdp", (4,))])
def test_what_is_priced_is_what_runs_in_turns(baseline: str, mesh_shape: tuple[int, ...]) -> None:
    hybrid = Hybrid(2, zero_stage=1)
    space = StrategySpace(split_batch(graph_of("gpt2"), 2).body, mesh_shape)
    strategies = strategies_of("gpt2", space, {"baseline": baseline, "micro_batches": 2})
    prices = Prices(space, CLUSTER, direct=True)
    plan = RankStep(SpacePricer(prices, counts=ExecutionCounts(space, hybrid)), strategies)
    reads = split_step(emit(space, strategies, prices.path, (0,) * len(mesh_shape)), hybrid).reads
    assert reads_of(reads, lambda node: None)[1] == plan.reads.reads
    pairs = (*plan.windows.reduced, *plan.windows.gathered)
    early = [pair for pair in pairs if all(map(plan.windows.is_last, pair.steps))]
    assert len(early) == len(ended_together(overlap(reads))) > 0
    hubs = [step.target for step in plan.reads.parameter_steps if space.decisions[step.target].kind == "shared_read"]
    assert hubs and all(space.decisions[plan.reads.first_reader(shared_read)].kind == "op" for shared_read in hubs)


SHAPES = {"p0": (4, 6), "p1": (6,), "p2": (6, 4), "p3": (4,), "p4": (4, 6)}
CHAIN = named("""x = F.linear(x, p2, p1.detach() + p1)
                 x = F.linear(x * p1, p0, p3)
                 x = F.linear(x.tanh(), p2, p1)
                 x = F.linear(x, p4 * p0, p3 * p3) + x @ p2
                 loss = x.square().mean()""", (8, 8, 4), SHAPES, {})


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), pytest.param((2, 2, 2), marks=pytest.mark.slow)])
def test_plans_that_overlap(mesh_shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Random ones and data parallelism: parameters read twice, over one to three axes, in buckets of any size."""
    torch.set_num_threads(1)
    model, inputs = CHAIN.model(), CHAIN.values()
    inputs["x"].requires_grad_(False)
    expected, space = truth(model, inputs), StrategySpace(capture(model, (), inputs), mesh_shape)
    made = autoparallel.plan(model, CLUSTER, example_kwargs=inputs, mesh_shape=mesh_shape, baseline="ddp")
    plans = [made.strategies_on(space), *(strategies_of("", space, {"seed": seed}) for seed in range(3))]
    for number, strategies in enumerate(plans):
        for size in (0, 300, 1e9) if not number else (300,):
            monkeypatch.setattr(async_windows, "BUCKET_BYTES", size)
            ranks = Ranks(Candidate(space, strategies, direct=not number), CLUSTER)
            ranks.programs = {at: replace(p, module=overlap(p.module)) for at, p in ranks.programs.items()}
            model.zero_grad()
            error, name = worst_error(expected, ranks.step(model, inputs))
            assert error <= 1e-9, (name, number, size)


def test_gathers_of_a_block_go_together() -> None:
    """And with the small ones before it; not those of another dtype, nor more than a bucket holds. The bucket whose
    gradients come first is small."""
    sizes, large = (1000, 3e6, 4e6, 2000, 5e6, 20e6, 9e6), "float32"
    blocks = (None, 0, 0, 0, 1, 1, None)
    reads = [Read(None, "gather", "x", "bfloat16" if n == 3 else large, size, 10 * n, block)
             for n, (size, block) in enumerate(zip(sizes, blocks, strict=True))]
    told = [(pair.steps, pair.begin, pair.end) for pair in AsyncWindows(reads).gathered]
    assert sorted(told) == [((0, 1, 2), TOP, 0), ((3,), 0, 30), ((4, 5), 30, 40), ((6,), 40, 60)]
    reads = [Read(None, "reduction", "x", large, size, 10 * n) for n, size in enumerate((20e6, 20e6, 6e5, 4e5))]
    assert [pair.steps for pair in AsyncWindows(reads).reduced] == [(0,), (1,), (2, 3)]


def test_a_second_reduction_does_not_wait_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parameters whole on two axes: backward posts the second behind the next bucket's first; a reduction before a
    gather begins backward where that is waited for."""
    monkeypatch.setattr(async_windows, "BUCKET_BYTES", 4)
    ways = [[(None, "reduction", "y"), (0, "reduction", "x")] for _ in range(3)]
    reads = [Read(2 * n if after is not None else None, kind, axis, "f", 4, 10 * n + 1)
             for n, way in enumerate(ways) for after, kind, axis in way]
    told = {pair.steps: (pair.begin, pair.end) for pair in AsyncWindows(reads).reduced}
    assert told == {(0,): (TOP, TOP), (1,): (TOP, 1), (2,): (TOP, 1), (3,): (1, 11), (4,): (TOP, 11), (5,): (11, 21)}
    backward = [(event.action == "launch", event.pair.steps) for event in reversed(AsyncWindows(reads).events[11])]
    assert backward == [(False, (3,)), (True, (5,)), (False, (4,))]
    reads = [Read(2 * n if number else None, ("reduction", "gather")[number], "yx"[number], "f", 4, 10 * n + 1)
             for n in range(3) for number in range(2)]
    gathering = AsyncWindows(reads)
    told = {pair.steps: (pair.begin, pair.end) for pair in gathering.reduced}
    assert told == {(0,): (TOP, TOP), (2,): (TOP, 1), (4,): (TOP, 11)}
    assert [(pair.begin, pair.end) for pair in gathering.gathered] == [(TOP, 1), (1, 11), (11, 21)]


def test_gathers_of_one_way_are_all_posted_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two gathers one after the other the first ends where the second begins; a reduction behind it waits."""
    monkeypatch.setattr(async_windows, "BUCKET_BYTES", 4)
    reads = [Read(after, "gather", axis, "f", size, 10 * n) for n in range(4)
             for after, axis, size in ((None, "x", 4), (2 * n, "y", 8))] + [Read(0, "reduction", "y", "f", 8, 5)]
    told = AsyncWindows(reads)
    assert {pair.steps: (pair.begin, pair.end) for pair in told.gathered} == {
        (1,): (TOP, 0), (3,): (0, 10), (5,): (10, 20), (7,): (20, 30),
        (0,): (TOP, TOP), (2,): (TOP, 0), (4,): (0, 10), (6,): (10, 20)}
    assert not told.reduced and dict(told.waited()) == {8: None} and told.gather_stages(7) == [7, 6]
    events = {place: [(event.action == "launch", *event.pair.steps) for event in found] for place, found in told.events.items()}
    assert events[TOP] == [(True, 0), (False, 0), (True, 1), (True, 2)]
    assert events[0] == [(False, 2), (False, 1), (True, 3), (True, 4)]
    assert events[20] == [(False, 6), (False, 5), (True, 7)]


def test_backward_posts_what_it_asks_for_next_and_what_that_is_gathered_of() -> None:
    """The first gathers of a way as many places earlier as there are others behind them."""
    left = set(range(5))
    small, large = (ToAsk[int](lambda n: n in left, lambda n, size=size: size) for size in (8.0, 1e9))
    for number, place in enumerate((0, 10, 20, 20, 30)):
        small.add(number, place)
        large.add(number, place)
    assert [small.at(30, gather_stage) for gather_stage in range(5)] == [[4, 2, 3, 1, 0], [2, 3, 1, 0], [1, 0], [0], []]
    assert [large.at(30, gather_stage) for gather_stage in range(5)] == [[4, 2, 3], [2, 3, 1], [1, 0], [0], []]
    assert [large.at(25, gather_stage) for gather_stage in range(3)] == [[2, 3], [2, 3, 1], [1, 0]]
    left -= {1, 4}
    assert [large.at(30, gather_stage) for gather_stage in range(3)] == [[2, 3], [2, 3, 0], [0]]
    assert [small.at(5, gather_stage) for gather_stage in range(2)] == [[0], [0]] and not small.at(-1)
