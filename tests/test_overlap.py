"""Gathers of parameters and reductions of gradients overlap with compute, in buckets; prices match the program."""

from __future__ import annotations

import copy
import gc
import math
import time
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import autoparallel
from autoparallel.capture import capture
from autoparallel.errors import SearchError
from autoparallel.kernels import regather
from autoparallel.partition import split_batch
from autoparallel.planning import one_mesh
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer
from autoparallel.pricing.overlap_simulation import COMPUTE, RankStep, StepTasks, _Again
from autoparallel.schedule import async_windows
from autoparallel.schedule.async_windows import TOP
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster, Device, Link
from tests.models import CASES
from tests.ranks import mesh_of
from tests.reference import gradients_of


class Calls(TorchDispatchMode):
    """Counts ops."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def backward_twice(mesh_shape: tuple[int, ...], bucket_bytes: int, micro_batches: int) -> tuple[int, int]:
    """On each rank: all-reduces of one backward, one by one and in buckets; the gradients are the same."""
    case = CASES["bert"]
    args, kwargs = case.inputs(8)
    model, found, counts = case.build(), [], []
    for size in (0, bucket_bytes):
        async_windows.BUCKET_BYTES = size
        options: dict[str, Any] = {"micro_batches": micro_batches} if micro_batches else {}
        parallel = autoparallel.compile(copy.deepcopy(model), mesh_of(*mesh_shape), example_inputs=args,
                                        example_kwargs=kwargs, baseline="ddp", **options)
        if micro_batches:
            with Calls() as calls:
                parallel.step(*args, **kwargs)
        else:
            loss = case.loss(parallel(*args, **kwargs))
            with Calls() as calls:
                loss.backward()
        found.append(gradients_of(parallel))
        counts.append(calls.counts["all_reduce.default"] + calls.counts["all_reduce_.default"])
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6)
    return counts[0], counts[1]


@pytest.mark.parametrize(("mesh_shape", "bucket_bytes", "expected"), [
    ((4,), 25 * 2**20, 1), ((2, 2), 25 * 2**20, 2), ((4,), 40_000, None),
])
def test_gradients_of_data_parallelism_are_reduced_together(ranks: Any, mesh_shape: tuple[int, ...],
                                                            bucket_bytes: int, expected: int | None) -> None:
    parameters = sum(1 for _ in CASES["bert"].build().parameters())
    for one_by_one, in_buckets in ranks(4).run(backward_twice, mesh_shape, bucket_bytes, 0, timeout_s=100):
        assert one_by_one >= len(mesh_shape) * (parameters - 1)
        assert in_buckets == expected if expected else 1 < in_buckets < one_by_one / 4


POSTED = ("all_reduce_.default", "all_reduce.default", "all_gather_into_tensor_out.default",
          "reduce_scatter_tensor.default")


class Beside(TorchDispatchMode):
    """Counts matrix products that run while a collective is on its way, and while none is."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = self.beside = self.alone = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.pending += (func.__name__ in POSTED) - (func.__name__ == "wait_tensor.default")
        if func.__name__ in ("mm.default", "addmm.default", "bmm.default"):
            self.beside += self.pending > 0
            self.alone += self.pending == 0
        return func(*args, **(kwargs or {}))


def products_overlapped(mesh_shape: tuple[int, ...], bucket_bytes: int, options: dict[str, Any]
                    ) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of forward and backward: products beside a collective, and alone."""
    case = CASES["llama"]
    args, kwargs = case.inputs(8)
    async_windows.BUCKET_BYTES = bucket_bytes
    parallel = autoparallel.compile(case.build(), mesh_of(*mesh_shape), example_inputs=args, example_kwargs=kwargs,
                                    **options)
    with Beside() as forward:
        loss = case.loss(parallel(*args, **kwargs))
    with Beside() as backward:
        loss.backward()
    assert forward.pending == backward.pending == 0
    return (forward.beside, forward.alone), (backward.beside, backward.alone)


@pytest.mark.parametrize(("mesh_shape", "options"), [
    ((4,), {"baseline": "fsdp"}), ((2, 2), {"baseline": "fsdp"}), ((4,), {"baseline": "fsdp", "recompute": "full"}),
    ((4,), {"baseline": "fsdp", "zero_stage": 3}),
    ((2, 2), {"baseline": "fsdp", "zero_stage": 3, "recompute": "full"}),
])
def test_parameters_are_gathered_before_they_are_read(ranks: Any, mesh_shape: tuple[int, ...], options: dict[str, Any]
                                                      ) -> None:
    """All products but the first group's of forward and the last's of backward run beside a gather or a reduction."""
    for (beside, alone), (back, back_alone) in ranks(4).run(products_overlapped, mesh_shape, 0, options, timeout_s=100):
        assert beside > 4 * alone and back > 3 * back_alone


class GatheredBytes(TorchDispatchMode):
    """The most bytes of gathered tensors that are there at once (gloo's threads let go of them a moment later)."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.__name__ == "all_gather_into_tensor_out.default":
            storage = made.untyped_storage()
            self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            tries = 0
            while (now := self._now()) > self.most and (tries := tries + 1) < 20:
                time.sleep(0.01)
            self.most = max(self.most, now)
        return made

    def _now(self) -> int:
        self.alive = {key: found for key, found in self.alive.items() if not found[0].expired()}
        return sum(size for _, size in self.alive.values())


def most_gathered(mesh_shape: tuple[int, ...], options: dict[str, Any]) -> tuple[float, float]:
    """Bytes of gathered parameters at the fullest moment of a step: predicted, and as they are on this rank."""
    case, async_windows.BUCKET_BYTES = CASES["llama"], 0
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(*mesh_shape), example_inputs=args, example_kwargs=kwargs,
                                    **options)
    space = StrategySpace(capture(case.build(), args, kwargs), mesh_shape)
    prices = Prices(space, Cluster.load("local-cpu", num_devices=4), direct=True)
    pricer = SpacePricer(prices, counts=ExecutionCounts(space, parallel.plan.hybrid))
    problem, choice = pricer.full(), pricer.choice_of(parallel.plan.strategies_on(space))
    there = np.zeros(2 * len(space) + 2)
    for edge in problem.edges:
        if pricer.counts.of_parameter[edge.source] and edge.usages is not None:
            there[slice(*edge.interval)] += edge.usages[choice[edge.source], choice[edge.target]]
    with GatheredBytes() as gathered:
        case.loss(parallel(*args, **kwargs)).backward()
    return float(there.max()), float(gathered.most)


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_bytes_of_what_is_gathered_ahead_are_counted(ranks: Any, recompute: str, mesh_shape: tuple[int, ...]) -> None:
    """With ZeRO-3 those that are read and the next, far fewer than all; and pieces of which the next are gathered."""
    options = {"baseline": "fsdp", "zero_stage": 3, "recompute": recompute}
    whole = sum(p.numel() * p.element_size() for p in CASES["llama"].build().parameters())
    for predicted, found in ranks(4).run(most_gathered, mesh_shape, options, timeout_s=100):
        assert predicted == pytest.approx(found, rel=0.05)
        assert found < 0.8 * whole * (1.5 if len(mesh_shape) > 1 else 1.0)


class Gathers(TorchDispatchMode):
    """Bytes of gathers, as they are posted and waited for; how many of them at once: with no product between."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, float]] = []
        self.pending: dict[int, float] = {}
        self.last, self.at_once = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.__name__ == "all_gather_into_tensor_out.default":
            self.last, num_bytes = made.untyped_storage()._cdata, float(made.untyped_storage().nbytes())
            self.pending[self.last] = num_bytes
            self.events.append(("issued", num_bytes))
        elif func.__name__ == "wait_tensor.default" and (key := args[0].untyped_storage()._cdata) in self.pending:
            self.events.append(("waited", self.pending.pop(key)))
            self.at_once += key == self.last
        elif func.__name__ in ("mm.default", "addmm.default", "bmm.default", "mul.Tensor"):
            self.last = 0
        return made


def gathers_of_a_step(options: dict[str, Any], bucket_bytes: float
                      ) -> tuple[list[Any], list[Any], int, dict[str, torch.Tensor]]:
    """As they are simulated, and as they run, how many of them are waited for at once; gradients."""
    case, async_windows.BUCKET_BYTES = CASES["llama"], bucket_bytes
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(2, 2), example_inputs=args, example_kwargs=kwargs, **options)
    micro_batches = options.get("micro_batches", 1)
    space = StrategySpace(split_batch(capture(case.build(), args, kwargs), micro_batches).body, (2, 2))
    prices = Prices(space, Cluster.load("local-cpu", num_devices=4), direct=True)
    plan = RankStep(
        SpacePricer(prices, counts=ExecutionCounts(space, parallel.plan.hybrid)), parallel.plan.strategies_on(space)
    )
    plan.reads.parameter_steps = [step._replace(again_s=(step.again_s > 0) * read.num_bytes)
                            for step, read in zip(plan.reads.parameter_steps, plan.reads.reads, strict=True)]
    again = _Again(step := StepTasks(), plan)
    told = [("issued" if begins else "waited", sum(plan.reads.reads[n].num_bytes for n in pair.steps))
            for place in (TOP, *range(len(space))) for begins, pair in plan.windows.events.get(place, ())
            if pair in plan.windows.gathered]
    waits = list[float]()
    step.issue = lambda seconds, stream, label: (
        told.append(("issued", seconds)) or waits.append(seconds) or len(waits) - 1
    )
    step.wait = lambda tasks: told.extend(("waited", waits[task]) for task in tasks)
    for index in reversed(range(len(space))):
        again.read(index)
    with Gathers() as gathers:
        if micro_batches > 1:
            parallel.step(*args, **kwargs)
        else:
            case.loss(parallel(*args, **kwargs)).backward()
    return micro_batches * told, gathers.events, gathers.at_once, gradients_of(parallel)


@pytest.mark.parametrize(("options", "bucket_bytes"), [
    ({}, 0), ({}, 20_000), ({"recompute": "full"}, 0), ({"recompute": "full", "micro_batches": 2}, 20_000),
    ({"micro_batches": 2}, 0), ({}, 80_000), ({"recompute": "full"}, 80_000),
])
def test_what_zero_3_gathers_is_priced_as_it_runs(ranks: Any, options: dict[str, Any], bucket_bytes: float) -> None:
    """On two axes: pieces and wholes, in the order in which they are posted and waited for, in each turn; most are
    waited for after others were posted. The gradients are those of one process."""
    options = {"baseline": "fsdp", "zero_stage": 3, **options}
    expected, case = CASES["llama"].build(), CASES["llama"]
    args, kwargs = case.inputs(8)
    case.loss(expected(*args, **kwargs)).backward()
    for told, found, at_once, gradients in ranks(4).run(gathers_of_a_step, options, bucket_bytes, timeout_s=100):
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
        assert told == found and len(found) > (80 if bucket_bytes < 20_000 else 16)
        assert at_once < len(found) / (16 if bucket_bytes < 20_000 else 4)


class _Aside(torch.nn.Module):
    """With a result that no loss needs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.begin, self.aside, self.head = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.begin(x).tanh()
        aside = self.aside(x)
        return self.head(x).square().mean(), aside


def gathered_for_nothing() -> tuple[int, int, dict[str, torch.Tensor]]:
    """Gathers of backward, those it leaves on their way, and its gradients."""
    async_windows.BUCKET_BYTES = 0
    x = torch.arange(64.0).view(8, 8) / 64
    parallel = autoparallel.compile(_Aside(), mesh_of(4), example_inputs=(x,), baseline="fsdp", zero_stage=3)
    loss, _ = parallel(x)
    with Beside() as beside, Calls() as calls:
        loss.backward()
    return calls.counts["all_gather_into_tensor_out.default"], beside.pending, gradients_of(parallel)


def test_what_backward_gathered_for_nothing_is_waited_for(ranks: Any) -> None:
    model = _Aside()
    model(torch.arange(64.0).view(8, 8) / 64)[0].backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gathers, left, gradients in ranks(4).run(gathered_for_nothing, timeout_s=100):
        assert (gathers, left) == (2, 0)
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient)


def test_gradients_are_reduced_while_backward_goes_on(ranks: Any) -> None:
    for (beside, _), (back, alone) in ranks(4).run(
        products_overlapped, (4,), 20_000, {"baseline": "ddp"}, timeout_s=100
    ):
        assert beside == 0 and back > 3 * alone


def gradients_of_gradients(baseline: str) -> list[torch.Tensor]:
    """Of the squared norm of the gradients with respect to the inputs, by parameter."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    x = torch.randn(8, 8)
    if baseline:
        model = autoparallel.compile(model, mesh_of(4), example_inputs=(x,), baseline=baseline)
    out = model(x)
    out = out.full_tensor() if hasattr(out, "full_tensor") else out
    made = torch.autograd.grad(out.square().mean(), list(model.parameters()), create_graph=True)
    penalty = sum(g.square().sum() for g in made)
    penalty = penalty.full_tensor() if hasattr(penalty, "full_tensor") else penalty
    penalty.backward()
    return [p.grad.full_tensor() if baseline else p.grad for p in model.parameters()]


@pytest.mark.parametrize("baseline", ["ddp", "fsdp"])
def test_what_is_reduced_beside_can_be_differentiated_again(ranks: Any, baseline: str) -> None:
    expected = gradients_of_gradients("")
    for found in ranks(4).run(gradients_of_gradients, baseline, timeout_s=100):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("mesh_shape", "options"), [
    ((8,), {"baseline": "ddp"}), ((4, 2), {"baseline": "ddp"}), ((8,), {"baseline": "fsdp"}),
    ((4, 2), {"baseline": "fsdp", "recompute": "full"}), ((4, 2), {"baseline": "tensor_parallel", "zero_stage": 3}),
    ((8,), {"baseline": "fsdp", "recompute": "selective", "reduce_dtype": "bfloat16"}), ((4, 2), {}),
    ((4, 2), {"baseline": "ddp", "micro_batches": 2, "recompute": "full"}),
    ((8,), {"baseline": "fsdp", "micro_batches": 4, "reduce_dtype": "float32"}),
    ((4, 2), {"baseline": "fsdp", "micro_batches": 4, "zero_stage": 3, "recompute": "full"}),
    ((4, 2), {"baseline": "tensor_parallel", "micro_batches": 2, "zero_stage": 3}),
])
def test_no_part_of_a_step_is_lost(mesh_shape: tuple[int, ...], options: dict[str, Any],
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks that are simulated are the parts of the prediction; only communication is hidden, and no more than
    there is compute; what runs beside gains nothing where both take twice as long."""
    monkeypatch.setattr(async_windows, "BUCKET_BYTES", 20_000)
    case = CASES["llama"]
    args, kwargs = case.inputs(8)
    cluster = Cluster.load("h100-sxm", num_devices=8, software="none")
    made = autoparallel.plan(case.build(), cluster, example_inputs=args, example_kwargs=kwargs, mesh_shape=mesh_shape,
                             **options)
    graph = capture(case.build(), args, kwargs)
    space = StrategySpace(split_batch(graph, made.hybrid.micro_batches).body, mesh_shape)
    pricer = SpacePricer(Prices(space, cluster, direct=made.direct), counts=ExecutionCounts(space, made.hybrid))
    step, parts = RankStep(pricer, made.strategies_on(space)).step(), made.prediction
    assert sum(task.duration_s for task in step.tasks) == pytest.approx(parts.added_s)
    assert parts.added_s == pytest.approx(made.evidence.objective_s)
    assert parts.hidden_s == step.hidden_s(cluster.device.overlap_slowdown)
    assert parts.step_s == parts.added_s - parts.hidden_s
    communication = parts.forward_communication_s + parts.backward_communication_s
    assert (parts.hidden_s > 0) == (options.get("baseline") in ("ddp", "fsdp"))
    assert parts.hidden_s <= min(parts.forward_s + parts.backward_s, communication)
    assert parts.hidden_s <= step.hidden_s(1.0)
    assert step.hidden_s(2.0) == pytest.approx(0.0, abs=1e-3 * parts.added_s)


@pytest.mark.parametrize("options", [
    {"micro_batches": 4}, {"micro_batches": 4, "baseline": "fsdp", "schedule": "gpipe", "recompute": "full"},
    {"micro_batches": 4, "schedule": "interleaved", "pipeline_stages": 4}, {"micro_batches": 1, "schedule": "gpipe"},
    {"micro_batches": 4, "baseline": "fsdp", "zero_stage": 2},
    {"micro_batches": 4, "schedule": "zero_bubble", "pipeline_stages": 4},
])
def test_a_pipeline_hides_what_its_last_backward_reduces(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
                                                         ) -> None:
    """And no more: not without turns before it, nor where each turn reduces, nor where gradients of weights are put
    off; less than what is reduced once, and than a rank's compute of a turn."""
    monkeypatch.setattr(async_windows, "BUCKET_BYTES", 20_000)
    case, options = CASES["gpt2"], {"pipeline_stages": 2, "baseline": "ddp", **options}
    args, kwargs = case.inputs(32)
    cluster = Cluster.load("h100-sxm", num_devices=8, software="none")
    made = autoparallel.plan(case.build(), cluster, example_inputs=args, example_kwargs=kwargs, mesh_shape=(2, 4),
                             **options)
    parts, reduces_early = made.prediction, options["micro_batches"] > 1 and "zero_stage" not in options
    assert (parts.hidden_s > 0) == (reduces_early and options.get("schedule") != "zero_bubble")
    assert parts.step_s == parts.added_s - parts.hidden_s
    reduced = sum(use.seconds for use in parts.collectives if use.direction == "backward")
    assert parts.hidden_s <= min(reduced, (parts.forward_s + parts.backward_s) / options["micro_batches"])


def test_links_of_parameters_alone_cost_otherwise_beside_compute() -> None:
    case = CASES["llama"]
    space = StrategySpace(capture(case.build(), *case.inputs(8)), (4, 2))
    prices = Prices(space, Cluster.load("h100-sxm", num_devices=8, software="none"))
    whole, some = SpacePricer(prices), SpacePricer(prices, exposed=(0.3, 0.4))
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
    x = torch.zeros(256, 512)
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
    case = CASES["mlp"]
    args, kwargs = case.inputs(8)

    def planned(**options: Any) -> autoparallel.Plan:
        cluster = Cluster.load("h100-sxm", num_devices=4, software="none")
        return autoparallel.plan(case.build(), cluster, example_inputs=args, example_kwargs=kwargs, mesh_shape=(4,),
                                 **options)

    told = "; not searched with overlap: "
    assert told not in planned().evidence.stop_reason
    solve = one_mesh.solve

    def only_the_first(problem: Any, search: str, left: float, pricer: SpacePricer, *rest: Any) -> Any:
        if pricer.costs.exposed != (1.0, 1.0):
            raise SearchError("no plan that fits was found")
        return solve(problem, search, left, pricer, *rest)

    monkeypatch.setattr(one_mesh, "solve", only_the_first)
    made = planned()
    assert f"{told}no plan that fits was found" in made.evidence.stop_reason
    assert "not searched with overlap" in " ".join(made.report().split())
    assert f"{told}the first search took the 0 s" in planned(time_limit_s=0.0).evidence.stop_reason


def test_an_interrupt_ends_both_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best so far comes back: the second search is not begun (it was), and one that has no plan yet loses none."""
    case = CASES["mlp"]
    args, kwargs = case.inputs(8)
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
        cluster = Cluster.load("h100-sxm", num_devices=4, software="none")
        return autoparallel.plan(case.build(), cluster, example_inputs=args, example_kwargs=kwargs, mesh_shape=(4,))

    assert planned(1).evidence.stop_reason == "interrupted" and len(begun) == 1
    made = planned(2)
    assert made.evidence.stop_reason.endswith("not searched with overlap: interrupted")
    assert len(begun) == 2 and made.evidence.gap == 0


def test_a_step_in_turns_reduces_together(ranks: Any) -> None:
    for one_by_one, in_buckets in ranks(4).run(backward_twice, (4,), 25 * 2**20, 2, timeout_s=100):
        assert in_buckets < one_by_one / 4


class Tied(torch.nn.Module):
    """A weight that is read twice, one that is frozen, one never used, and one under no_grad only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(20, 12), torch.nn.Linear(12, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.layers = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(5))
        self.layers[1].weight.requires_grad_(False)
        self.unused = torch.nn.Parameter(torch.randn(12))
        self.shift = torch.nn.Parameter(torch.randn(12))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        with torch.no_grad():
            shift = self.shift.sin()
        x = x + shift
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def two_steps(model: Any, calls: Beside | None) -> dict[str, torch.Tensor]:
    """Two steps of which the first adds to the second's gradients, clipped: losses, norm, gradients and parameters by
    name; a rank of a pipeline has the parameters of its stages."""
    ids = torch.arange(8 * 6).view(8, 6) % 19
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), {}
    for number in range(2):
        if calls is not None:
            with calls:
                found[f"loss {number}"] = model.step(ids, ids + 1)
        else:
            found[f"loss {number}"] = model(ids, ids + 1)
            found[f"loss {number}"].backward()
    clip = model.clip_grad_norm_ if calls else lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
    found["norm"] = clip(0.05)
    optimizer.step()
    for name, p in model.named_parameters():
        found |= {name: p.detach()} | ({} if p.grad is None else {f"gradient of {name}": p.grad})
    return {name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach() for name, x in found.items()}


def steps_on_ranks(mesh_shape: tuple[int, ...], options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int, int]:
    """What they make; products beside a collective, and alone."""
    async_windows.BUCKET_BYTES = 1000
    ids = torch.arange(8 * 6).view(8, 6) % 19
    parallel = autoparallel.compile(Tied(), mesh_of(*mesh_shape), example_inputs=(ids, ids + 1), **options)
    made = two_steps(parallel, calls := Beside())
    assert calls.pending == 0
    return made, calls.beside, calls.alone


@pytest.mark.parametrize(("mesh_shape", "options"), [
    ((4,), {"baseline": "ddp", "micro_batches": 2}),
    ((2, 2), {"baseline": "ddp", "micro_batches": 4, "recompute": "full"}),
    ((2, 2), {"baseline": "fsdp", "micro_batches": 2, "reduce_dtype": "float32"}),
    ((4,), {"baseline": "fsdp", "micro_batches": 2, "zero_stage": 3}),
])
def test_the_last_turn_reduces_beside_its_backward(ranks: Any, mesh_shape: tuple[int, ...], options: dict[str, Any]
                                                   ) -> None:
    """With tied, frozen and unused parameters, over two steps that add up, clipped: the numbers of one process."""
    expected = two_steps(Tied(), None)
    for found, beside, alone in ranks(4).run(steps_on_ranks, mesh_shape, options, timeout_s=200):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        assert alone > 0 and beside > 0


class _WhereMeant(torch.autograd.Function):
    """Its scale has no gradient where nothing is meant."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale, mask)
        return x * scale * mask

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scale, mask = ctx.saved_tensors
        of_scale = (gradient * x * mask).sum(0) if mask.any() else None
        return gradient * scale * mask, of_scale, None


class _TrainableLate(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.layer = torch.nn.Parameter(torch.randn(6)), torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.layer(_WhereMeant.apply(x, self.scale, mask)).square().sum()


def learnt_late(split_step: bool) -> dict[str, torch.Tensor]:
    """Gradients of a step whose second half alone has one of the scale."""
    model, x = _TrainableLate(), torch.arange(48.0).view(8, 6) / 48
    inputs = x, torch.cat([torch.zeros(4, 1), torch.ones(4, 1)])
    if not split_step:
        model(*inputs).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    parallel = autoparallel.compile(model, mesh_of(2), example_inputs=inputs, baseline="ddp", micro_batches=2)
    parallel.step(*inputs)
    return gradients_of(parallel)


def test_what_only_the_last_turn_has_a_gradient_of_is_reduced_too(ranks: Any) -> None:
    """Backward comes to it after those that are reduced with it have been posted."""
    expected = learnt_late(split_step=False)
    for found in ranks(2).run(learnt_late, True):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name])


def learnt_by_one_rank(shared: bool) -> list[dict[str, torch.Tensor]]:
    """Gradients of two steps: nothing learns the scale in the first, one of the ranks that share it in the second."""
    model, found = _TrainableLate(), []
    x = torch.arange(48.0).view(8, 6) / 48
    masks = torch.zeros(8, 1), torch.tensor([0.0, 0, 1, 1, 0, 0, 1, 1])[:, None]
    parallel: Any = autoparallel.compile(
        model, mesh_of(3), example_inputs=(x, masks[0]), micro_batches=4, stage_replicas=(2, 1)) if shared else model
    for mask in masks:
        parallel.zero_grad(set_to_none=True)
        if shared:
            parallel.step(x, mask)
        else:
            model(x, mask).backward()
        found.append(gradients_of(parallel))
    return found


def test_what_no_rank_that_shares_it_learns_has_no_gradient(ranks: Any) -> None:
    """Nor is one lost that a single one of them has, in a later step."""
    expected = learnt_by_one_rank(shared=False)
    assert ["scale" in gradients for gradients in expected] == [False, True]
    seen: list[set[str]] = [set(), set()]
    for found in ranks(3).run(learnt_by_one_rank, True):
        for gradients, others, names in zip(found, expected, seen, strict=True):
            names |= set(gradients)
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, others[name])
    assert seen == [set(gradients) for gradients in expected]


@pytest.mark.parametrize(("mesh_shape", "options"), [
    ((2, 2), {"baseline": "ddp", "micro_batches": 4, "pipeline_stages": 2}),
    ((2, 2), {"baseline": "fsdp", "micro_batches": 4, "pipeline_stages": 2, "schedule": "gpipe", "zero_stage": 1}),
    ((2, 2), {"baseline": "ddp", "micro_batches": 2, "pipeline_stages": 4, "schedule": "interleaved",
              "recompute": "full"}),
    ((3, 2), {"baseline": "ddp", "micro_batches": 4, "stage_replicas": (1, 2)}),
    ((2, 2), {"baseline": "ddp", "micro_batches": 4, "pipeline_stages": 4, "schedule": "zero_bubble"}),
])
def test_pipelines_reduce_beside_their_last_backward(ranks: Any, mesh_shape: tuple[int, ...], options: dict[str, Any]
                                                     ) -> None:
    """On ranks with several products to run backward; but for zero bubble, which puts gradients of weights off."""
    expected, names, counts = two_steps(Tied(), None), set[str](), Counter[str]()
    for found, beside, alone in ranks(math.prod(mesh_shape)).run(steps_on_ranks, mesh_shape, options,
                                                                 timeout_s=200):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        counts += Counter(beside=beside, alone=alone)
        names |= set(found)
    assert counts["alone"] and bool(counts["beside"]) == (options.get("schedule") != "zero_bubble")
    assert names == set(expected)


#: What a program does with its device and two links: works, posts, waits for the n-th of what it posted; quarters of
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
        if what == "work":
            step.work(duration_s, stream)
        elif what == "issue":
            issued.append(step.issue(duration_s, stream))
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


def test_a_forward_whose_gathers_are_gathered_further_is_let_go_with_its_last_reference() -> None:
    """Not when the collector comes by, which may be after many steps."""
    with regather.regathering():
        run = regather._run.get()
        assert run is not None
        local_shard = torch.ones(2)
        first = regather._Gathered(lambda numbers, sources: lambda: sources, (local_shard,), place=0)
        run.add(local_shard, first, 0)
        kept = regather._kept(local_shard)
        second = regather._Gathered(lambda numbers, sources: lambda: sources, (kept,), place=1)
        for gathered in (first, second):
            run.add_prefetched(gathered)
        assert second.gather_stages() == [[second], [first]]
    seen = weakref.ref(run)
    gc.disable()
    try:
        del run, first, second, gathered, kept
        assert seen() is None
    finally:
        gc.enable()
