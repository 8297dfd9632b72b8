"""Activations' communication overlaps with compute of the same micro-batch; programs and prices agree on where."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import autoparallel
from autoparallel.capture import capture
from autoparallel.kernels.put_off import later, linear
from autoparallel.lower import emit
from autoparallel.lower.activation_pass import overlap_activations, windows_of
from autoparallel.lower.overlap_pass import overlap
from autoparallel.plans import Hybrid
from autoparallel.plans.reports.step_parts import OTHERS
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer
from autoparallel.pricing.overlap_simulation import RankStep
from autoparallel.pricing.rank_reads import COMPUTE
from autoparallel.runtime.op_ranges import OpRanges
from autoparallel.runtime.stage_module import gathered_blocks
from autoparallel.schedule import activation_windows
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster, Device, Link
from tests.support.captured import graph_of, plan_of
from tests.support.models import CASES
from tests.support.overlapped import POSTED
from tests.support.ranks import mesh_of
from tests.support.reference import gradients_of
from tests.support.tiers import slow

NOT_OVERLAPPED = patch.object(activation_windows, "overlaps_activations", lambda hybrid: False)
#: A slow network, beside which all compute can run.
DEVICE = Device("toy", {"float32": 2.5e9}, 1e12, 1.0, 1e12, 0.0, overlap_slowdown=1.0)
TOY = Cluster("toy", DEVICE, (Link("net", 4, 1e-6, 4e7),), 4)


class Collectives(TorchDispatchMode):
    """Counts collectives, and those between whose launch and wait a product runs."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: dict[int, bool] = {}
        self.count = self.beside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.__name__ in POSTED:
            self.count += 1
            self.pending[made.untyped_storage()._cdata] = False
        elif func.__name__ == "wait_tensor.default":
            self.beside += self.pending.pop(args[0].untyped_storage()._cdata, False)
        elif func.__name__ in ("mm.default", "addmm.default", "bmm.default"):
            self.pending = dict.fromkeys(self.pending, True)
        return made


class Branches(torch.nn.Module):
    """Two perceptrons of one input, whose results are not added before they are whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.other_up, self.other_down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.down(self.up(x).relu()), self.other_down(self.other_up(x).relu())
        return (first.tanh() * second.tanh()).square().mean()


def step_of(model: Any, args: Any, kwargs: Any, loss: Any, micro_batches: int = 1) -> tuple[Any, Any, int, int]:
    """Loss, gradients, collectives in which a product runs, and all."""
    with Collectives() as found:
        if micro_batches > 1:
            value = model.step(*args, **kwargs)
        else:
            value = loss(model(*args, **kwargs))
            value.backward()
    assert not found.pending
    return value.detach(), gradients_of(model), found.beside, found.count


def with_and_without(name: str, mesh_shape: tuple[int, ...], options: dict[str, Any]) -> tuple[int, int, int]:
    """Collectives of a step in which products run, before and now, and all of them; the numbers are the same."""
    case = CASES[name]
    args, kwargs = case.inputs(8)
    found = []
    for overlapped in (False, True):
        parallel = autoparallel.compile(case.build(), mesh_of(*mesh_shape), example_inputs=args, example_kwargs=kwargs,
                                        **options)
        if overlapped:
            found.append(step_of(parallel, args, kwargs, case.loss, parallel.plan.hybrid.micro_batches))
        else:
            with NOT_OVERLAPPED:
                found.append(step_of(parallel, args, kwargs, case.loss, parallel.plan.hybrid.micro_batches))
    (before, old, few, count), (now, new, many, same) = found
    assert torch.equal(before, now) and count == same
    for key, gradient in old.items():
        assert torch.equal(new[key], gradient), key
    return few, many, count


@pytest.mark.parametrize(("name", "mesh_shape", "options", "expected"), [
    slow("llama", (4,), {"baseline": "tensor_parallel"}, 5),
    slow("llama", (4,), {"baseline": "sequence_parallel"}, 4),
    slow("llama", (4,), {"baseline": "tensor_parallel", "recompute": "full"}, 5),
    ("llama", (4,), {"baseline": "tensor_parallel", "micro_batches": 2}, 10),
    slow("llama", (4,), {"baseline": "tensor_parallel", "recompute": "selective"}, 5),
    slow("llama", (4,), {"baseline": "sequence_parallel", "recompute": "full"}, 3),
    slow("t5", (4,), {"baseline": "tensor_parallel"}, 10),
])
def test_weights_gradients_are_computed_while_their_inputs_travel(
    ranks: Any, name: str, mesh_shape: tuple[int, ...], options: dict[str, Any], expected: int,
) -> None:
    """To the bit the numbers of the program without; before, nothing ran beside a collective of activations."""
    for before, now, count in ranks(4).run(with_and_without, name, mesh_shape, options, timeout_s=100):
        assert (before, now) == (0, expected) and count > now


@pytest.mark.parametrize("by_hand", ["dp=2,tp=2,zero=3", slow("dp=2,tp=2,zero=1,micro_batch=2")])
def test_parameters_and_activations_overlap_together(ranks: Any, by_hand: str) -> None:
    """On an axis of each."""
    plan = plan_of("llama", Cluster.load("h100-sxm", num_devices=4), by_hand=by_hand)
    for before, now, _ in ranks(4).run(with_and_without, "llama", plan.mesh_shape, {"plan": plan}, timeout_s=100):
        assert now > before


def branches() -> tuple[Any, ...]:
    x = torch.arange(128.0).view(8, 16) / 128
    parallel = autoparallel.compile(Branches(), mesh_of(4), example_inputs=(x,), baseline="tensor_parallel")
    return step_of(parallel, (x,), {}, lambda loss: loss)


def test_branches_run_beside_each_others_collectives(ranks: Any) -> None:
    """The second one's products while the sum of the first one's results travels."""
    model, x = Branches(), torch.arange(128.0).view(8, 16) / 128
    loss = model(x)
    loss.backward()
    for found, gradients, beside, _ in ranks(4).run(branches, timeout_s=60):
        torch.testing.assert_close(found, loss.detach())
        assert beside == 1
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)


HYBRIDS = [Hybrid(), Hybrid(zero_stage=3), Hybrid(recompute="full")]


@pytest.mark.parametrize("mesh_shape", [slow((4,)), (2, 2)], ids=str)
@pytest.mark.parametrize("case_name", [
    "mlp", *map(slow, ("llama", "gpt2", "bert", "t5", "mixtral", "vit"))])
def test_windows_of_the_program_are_those_that_are_priced(case_name: str, mesh_shape: tuple[int, ...]) -> None:
    """Of drawn plans: which steps are begun ahead, where they are awaited, and which weights' gradients wait."""
    space, found = StrategySpace(graph_of(case_name), mesh_shape), Counter[str]()
    prices = Prices(space, Cluster.load("h100-sxm", num_devices=8))
    for seed in range(3):
        draw = random.Random(seed)
        strategies = tuple(draw.choice(strategy_set.strategies) for strategy_set in space.strategy_sets)
        for hybrid in HYBRIDS:
            module = emit(space, strategies, prices.path, (0,) * len(mesh_shape)).module
            windows = windows_of(overlap(module, hybrid, gathered_blocks(hybrid)), hybrid)
            ran = [(w.path[0].meta["decision"], w.reader.meta.get("decision"), w.after is not None,
                    tuple(layer.meta["decision"] for layer in w.put_off)) for w in windows]
            counts = ExecutionCounts(space, hybrid)
            told = RankStep(SpacePricer(prices, counts=counts), strategies).activations.described
            assert sorted(ran, key=str) == sorted(told, key=str)
            found += Counter(ahead=sum(one[2] for one in ran), put_off=sum(len(one[3]) for one in ran))
    one_branch = case_name in ("mlp", "gpt2")    # each product reads the one before; a residual is a shared read's
    assert found["put_off"] and bool(found["ahead"]) != one_branch


def planned(cluster: Cluster, model: Any = None, **options: Any) -> autoparallel.Plan:
    x = torch.zeros(256, 512)
    model = model or torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(6)))
    return autoparallel.plan(model, cluster, example_inputs=(x,), mesh_shape=(4,), baseline="tensor_parallel",
                             **options)


def test_what_runs_beside_is_priced() -> None:
    """Each of two sums of gradients in backward (the first layer's input has none) hides the product of a weight's
    gradient, and in micro-batches those of each; not where both take twice as long."""
    made, product_s = planned(TOY).prediction, 2.0 * 256 * 512 * 512 / 4 / 2.5e9
    assert made.hidden_s == pytest.approx(2 * product_s, rel=1e-3)
    assert planned(replace(TOY, device=replace(DEVICE, overlap_slowdown=2.0))).prediction.hidden_s < 1e-3 * product_s
    assert planned(TOY, micro_batches=4, zero_stage=0).prediction.hidden_s == pytest.approx(2 * product_s, rel=1e-3)
    with NOT_OVERLAPPED:
        assert planned(TOY).prediction.hidden_s == 0.0


def test_a_timeline_shows_it() -> None:
    """Of the simulation: the product begins with the sum that it runs beside."""
    spans = planned(TOY).record.spans
    sums = [(begin, end) for name, stream, begin, end, _ in spans if stream != COMPUTE and "gradients" in name]
    beside = [name for name, stream, begin, end, _ in spans if stream == COMPUTE and any(
        begin < other_end and end > other for other, other_end in sums)]
    assert len(sums) == 2 and len(beside) >= 2 and all(name.startswith("backward") for name in beside)


def held(space: StrategySpace, made: autoparallel.Plan, cluster: Cluster) -> tuple[list[float], list[float], Any]:
    """Bytes of results and of gradients that windows hold in a plan of four ranks, and its windows."""
    pricer = SpacePricer(Prices(space, cluster, direct=True), counts=ExecutionCounts(space, made.hybrid))
    problem, strategies = pricer.full(), made.strategies_on(space)
    choice = pricer.choice_of(strategies)
    bytes_of = {"result": list[float](), "gradient": list[float]()}
    edges = {(edge.source, edge.target, edge.interval): edge for edge in list(problem.edges)[len(space.uses):]}
    for use, what, interval in pricer.windows.held:
        if (edge := edges.get((use.source, use.target, interval))) is not None and edge.usages is not None:
            bytes_of[what].append(float(edge.usages[choice[use.source], choice[use.target]]))
    some = [[num_bytes for num_bytes in bytes_of[what] if num_bytes] for what in ("result", "gradient")]
    return some[0], some[1], RankStep(pricer, strategies).activations.described


def test_memory_of_what_is_held_counts() -> None:
    """The gradients of the outputs of layers behind the first reader of their input, until the input's is sent; the sum
    of the first branch's results, while the second one runs."""
    made = plan_of("llama", cluster := Cluster.load("h100-sxm", num_devices=4), mesh_shape=(4,),
                   baseline="tensor_parallel")
    _, gradients_held, windows = held(StrategySpace(graph_of("llama"), (4,)), made, cluster)
    behind = sum(layer != reader for _, reader, _, put_off in windows for layer in put_off)
    assert len(gradients_held) == behind > 2
    model, x = Branches(), torch.zeros(8, 16)
    made = autoparallel.plan(model, TOY, example_inputs=(x,), mesh_shape=(4,), baseline="tensor_parallel")
    results, _, windows = held(StrategySpace(capture(model, (x,)), (4,)), made, TOY)
    assert results == [8 * 16 * 4] and sum(ahead for *_, ahead, _ in windows) == 1


def gradients(forward: Any, *values: torch.Tensor, twice: bool = False) -> list[torch.Tensor]:
    leaves = [value.clone().requires_grad_() for value in values]
    made = torch.autograd.grad(forward(*leaves).square().sum(), leaves, create_graph=twice)
    if twice:
        made = torch.autograd.grad(sum(one.square().sum() for one in made), leaves)
    return list(made)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_whose_weights_gradient_comes_later(bias: bool, twice: bool) -> None:
    """It is the layer, to the bit, also where gradients are differentiated and where backward runs again."""
    torch.manual_seed(0)
    values = torch.randn(2, 3, 4), torch.randn(5, 4), *([torch.randn(5)] if bias else [])
    found = gradients(lambda x, *parameters: linear(x, later(*parameters)), *values, twice=twice)
    for one, other in zip(found, gradients(torch.nn.functional.linear, *values, twice=twice), strict=True):
        assert torch.equal(one, other)
    x, weight = (value.clone().requires_grad_() for value in values[:2])
    loss = linear(x, later(weight)).square().sum()
    loss.backward(retain_graph=True)
    once = weight.grad.clone()
    loss.backward()
    assert torch.equal(weight.grad, 2 * once)
    (alone,) = torch.autograd.grad(linear(x, later(weight)).square().sum(), [weight])
    assert torch.equal(alone, once)


def test_a_profile_tells_what_travels_from_products() -> None:
    model, x = Branches(), torch.zeros(8, 16)
    made = autoparallel.plan(model, TOY, example_inputs=(x,), mesh_shape=(4,), baseline="tensor_parallel")
    space = StrategySpace(capture(model, (x,)), (4,))
    program = emit(space, made.strategies_on(space), Prices(space, TOY, direct=True).path, (0,))
    nodes, ranges = overlap_activations(program.module, made.hybrid).graph.nodes, OpRanges(space)
    told = [(one.name.split()[0], one.part, one.axis) for one in (
        ranges._described(node, None) for node in nodes if node.op == "call_function") if "_step" in one.name]
    assert told == [("begin_step", OTHERS, "axis0"), ("end_step", OTHERS, "axis0")]
