"""Gathers of parameters and reductions of gradients overlap with compute, in buckets; prices match the program."""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import autoparallel
from autoparallel.kernels import regather
from autoparallel.partition import split_batch
from autoparallel.pricing import ExecutionCounts, Prices, SpacePricer
from autoparallel.pricing.overlap_simulation import RankStep
from autoparallel.pricing.step_tasks import Launch, Wait
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster
from tests.support.captured import graph_of
from tests.support.models import CASES
from tests.support.overlapped import Beside, Calls, Tied, backward_twice, products_overlapped, steps_on_ranks, two_steps
from tests.support.ranks import mesh_of
from tests.support.reference import gradients_of
from tests.support.tiers import slow


@pytest.mark.parametrize(("mesh_shape", "bucket_bytes", "expected"), [
    slow((4,), 25 * 2**20, 1), ((2, 2), 25 * 2**20, 1), ((4,), 40_000, None),
])
def test_gradients_of_data_parallelism_are_reduced_together(ranks: Any, mesh_shape: tuple[int, ...],
                                                            bucket_bytes: int, expected: int | None) -> None:
    parameters = sum(1 for _ in CASES["bert"].build().parameters())
    for one_by_one, in_buckets in ranks(4).run(backward_twice, mesh_shape, bucket_bytes, 0, timeout_s=100):
        assert one_by_one >= parameters - 1    # on all axes at once
        assert in_buckets == expected if expected else 1 < in_buckets < one_by_one / 4


@pytest.mark.parametrize(("mesh_shape", "options"), [
    slow((4,), {"baseline": "fsdp"}), slow((2, 2), {"baseline": "fsdp"}),
    slow((4,), {"baseline": "fsdp", "recompute": "full"}), slow((4,), {"baseline": "fsdp", "zero_stage": 3}),
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
    case = CASES["llama"]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(*mesh_shape), example_inputs=args, example_kwargs=kwargs,
                                    bucket_bytes=0, **options)
    space = StrategySpace(graph_of("llama"), mesh_shape)
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


@pytest.mark.parametrize(("recompute", "mesh_shape"), [
    slow("none", (4,)), ("full", (2, 2)), slow("none", (2, 2)), slow("full", (4,))])
def test_prefetched_gathers_take_memory(ranks: Any, recompute: str, mesh_shape: tuple[int, ...]) -> None:
    """With ZeRO-3 those that are read and the next, far fewer than all; and shards of which the next are gathered."""
    options = {"baseline": "fsdp", "zero_stage": 3, "recompute": recompute}
    whole = sum(p.numel() * p.element_size() for p in CASES["llama"].build().parameters())
    for predicted, found in ranks(4).run(most_gathered, mesh_shape, options, timeout_s=100):
        assert predicted == pytest.approx(found, rel=0.05)
        assert found < 0.8 * whole * (1.5 if len(mesh_shape) > 1 else 1.0)


class Gathers(TorchDispatchMode):
    """Bytes of gathers, as they are issued and awaited; how many of them at once: with no product between."""

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
    """Gathers as simulated and as they run, the number of those awaited right after their launch; gradients."""
    case = CASES["llama"]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(2, 2), example_inputs=args, example_kwargs=kwargs,
                                    bucket_bytes=bucket_bytes, **options)
    micro_batches = options.get("micro_batches", 1)
    space = StrategySpace(split_batch(graph_of("llama"), micro_batches).body, (2, 2))
    prices = Prices(space, Cluster.load("local-cpu", num_devices=4), direct=True)
    plan = RankStep(
        SpacePricer(prices, counts=ExecutionCounts(space, parallel.plan.hybrid)), parallel.plan.strategies_on(space)
    )
    told, sizes = list[tuple[str, float]](), dict[int, float]()
    for event in plan.communication():
        if isinstance(event, Launch) and event.message.action == "all_gather":
            sizes[event.task] = event.message.num_bytes
            told.append(("issued", event.message.num_bytes))
        elif isinstance(event, Wait) and event.task in sizes:
            told.append(("waited", sizes.pop(event.task)))
    with Gathers() as gathers:
        if micro_batches > 1:
            parallel.step(*args, **kwargs)
        else:
            case.loss(parallel(*args, **kwargs)).backward()
    return told, gathers.events, gathers.at_once, gradients_of(parallel)


@pytest.mark.parametrize(("options", "bucket_bytes"), [
    slow({}, 20_000), ({"recompute": "full", "micro_batches": 2}, 20_000), slow({}, 80_000), slow({}, 0),
    slow({"recompute": "full"}, 0), slow({"micro_batches": 2}, 0), slow({"recompute": "full"}, 80_000),
])
def test_gathers_of_zero_3_are_priced_as_they_run(ranks: Any, options: dict[str, Any], bucket_bytes: float) -> None:
    """On two axes, in the order in which they are launched and awaited, in each micro-batch; most are awaited after
    others were launched. The gradients are those of one process."""
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
    x = torch.arange(64.0).view(8, 8) / 64
    parallel = autoparallel.compile(_Aside(), mesh_of(4), example_inputs=(x,), baseline="fsdp", zero_stage=3,
                                    bucket_bytes=0)
    loss, _ = parallel(x)
    with Beside() as beside, Calls() as calls:
        loss.backward()
    return calls.counts["all_gather_into_tensor_out.default"], beside.pending, gradients_of(parallel)


def test_unused_gathers_of_backward_are_awaited(ranks: Any) -> None:
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


@pytest.mark.parametrize("baseline", [slow("ddp"), "fsdp"])
def test_overlapped_reductions_can_be_differentiated_twice(ranks: Any, baseline: str) -> None:
    expected = gradients_of_gradients("")
    for found in ranks(4).run(gradients_of_gradients, baseline, timeout_s=100):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_micro_batches_reduce_gradients_once(ranks: Any) -> None:
    for one_by_one, in_buckets in ranks(4).run(backward_twice, (4,), 25 * 2**20, 2, timeout_s=100):
        assert in_buckets < one_by_one / 4


@pytest.mark.parametrize(("mesh_shape", "options"), [
    slow((4,), {"baseline": "ddp", "micro_batches": 2}),
    ((2, 2), {"baseline": "ddp", "micro_batches": 4, "recompute": "full"}),
    slow((2, 2), {"baseline": "fsdp", "micro_batches": 2, "reduce_dtype": "float32"}),
    ((4,), {"baseline": "fsdp", "micro_batches": 2, "zero_stage": 3}),
])
def test_the_last_micro_batch_overlaps_its_reductions(ranks: Any, mesh_shape: tuple[int, ...], options: dict[str, Any]
                                                     ) -> None:
    """With tied, frozen and unused parameters, over two steps that add up, clipped: the numbers of one process."""
    expected = two_steps(Tied(), None)
    for found, beside, alone in ranks(4).run(steps_on_ranks, mesh_shape, options, timeout_s=200):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        assert alone > 0 and beside > 0


class _WhereMeant(torch.autograd.Function):
    """Its scale has no gradient where no row is valid."""

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


def test_gradients_of_the_last_micro_batch_alone_are_reduced(ranks: Any) -> None:
    """Backward comes to it after those that are reduced with it have been issued."""
    expected = learnt_late(split_step=False)
    for found in ranks(2).run(learnt_late, True):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name])


def learnt_by_one_rank(shared: bool) -> list[dict[str, torch.Tensor]]:
    """Gradients of two steps: the scale has no gradient in the first, one of the ranks that share it in the second."""
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


def test_unused_shared_parameters_have_no_gradient(ranks: Any) -> None:
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
    slow((2, 2), {"baseline": "ddp", "micro_batches": 4, "pipeline_stages": 2}),
    ((2, 2), {"baseline": "fsdp", "micro_batches": 4, "pipeline_stages": 2, "schedule": "gpipe", "zero_stage": 1}),
    slow((2, 2), {"baseline": "ddp", "micro_batches": 2, "pipeline_stages": 4, "schedule": "interleaved",
                  "recompute": "full"}),
    ((3, 2), {"baseline": "ddp", "micro_batches": 4, "stage_replicas": (1, 2)}),
    ((2, 2), {"baseline": "ddp", "micro_batches": 4, "pipeline_stages": 4, "schedule": "zero_bubble"}),
])
def test_pipelines_reduce_beside_their_last_backward(ranks: Any, mesh_shape: tuple[int, ...], options: dict[str, Any]
                                                    ) -> None:
    """On ranks with several products to run backward; zero bubble beside the gradients of other weights."""
    expected, names, counts = two_steps(Tied(), None), set[str](), Counter[str]()
    for found, beside, alone in ranks(math.prod(mesh_shape)).run(steps_on_ranks, mesh_shape, options,
                                                                 timeout_s=200):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        counts += Counter(beside=beside, alone=alone)
        names |= set(found)
    assert counts["alone"] and counts["beside"]
    assert names == set(expected)


def test_a_forward_whose_gathers_are_gathered_further_is_let_go_with_its_last_reference() -> None:
    """Not when the collector comes by, which may be after many steps."""
    with regather.regathering(25e6):
        run = regather._run.get()
        assert run is not None
        local_shard = torch.ones(2)
        first = regather._Gather(lambda numbers, sources: lambda: sources, (local_shard,), place=0)
        run.add(local_shard, first, 0)
        kept = regather._kept(local_shard)
        second = regather._Gather(lambda numbers, sources: lambda: sources, (kept,), place=1)
        for gathered in (first, second):
            run.gathers.add(gathered)
        assert second.stages() == [[second], [first]]
    seen = weakref.ref(run)
    gc.disable()
    try:
        del run, first, second, gathered, kept
        assert seen() is None
    finally:
        gc.enable()
