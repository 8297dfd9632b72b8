"""Recomputed blocks: the same losses and gradients, as many blocks as memory asks for."""

from __future__ import annotations

import dataclasses
import tempfile
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import autoparallel
from autoparallel.errors import InfeasibleError
from autoparallel.kernels.variants import causal_queries
from autoparallel.planning.recompute import fewest_recomputed, less_recomputed
from autoparallel.plans import Hybrid
from autoparallel.schedule.in_flight import in_flight
from cost_models import Cluster
from tests.support.captured import plan_of
from tests.support.models import CASES
from tests.support.plans import half_recomputed
from tests.support.ranks import mesh_of
from tests.support.reference import (
    assert_same_gradients,
    gradients_of,
    scalar,
    train_reference,
)
from tests.support.steps import STEPS, Options, assert_one_process
from tests.support.tiers import slow

ON_DISK = {"disk_path": tempfile.gettempdir()}


@pytest.mark.parametrize(("case_name", "options"), [
    slow("gpt2", {"recompute": "selective", "micro_batches": 2}),
    ("bert", {"recompute": "full", "micro_batches": 4, "zero_stage": 3}),
    slow("llama", {"recompute": "full", "micro_batches": 2, "pipeline_stages": 2, "schedule": "zero_bubble"}),
    slow("gpt2", {"recompute": "offload", "micro_batches": 2}),
    slow("bert", {"recompute": "offload", "micro_batches": 4, "zero_stage": 3}),
    slow("llama", {"recompute": "offload", "micro_batches": 4, "zero_stage": 3, "pipeline_stages": 2}),
    slow("llama", {"recompute": "offload", "micro_batches": 2, "pipeline_stages": 2, "schedule": "zero_bubble"}),
    ("llama", {"recompute": "selective", "saved_on": "host", "micro_batches": 4, "zero_stage": 3}),
    slow("mixtral", {"recompute": "selective", "saved_on": "host"}),
    ("bert", {"recompute": "offload", "saved_on": "disk", "micro_batches": 4, "pipeline_stages": 2, **ON_DISK}),
    slow("llama", {"recompute": "offload", "saved_on": "disk", "micro_batches": 2, "zero_stage": 3, **ON_DISK}),
])
def test_recompute(ranks: Any, case_name: str, options: Options) -> None:
    assert_one_process(ranks, case_name, (2, 2), options)


def called(case_name: str, options: Options) -> tuple[float, Any]:
    """By a call of the model, not by `step`: loss and gradients."""
    case = CASES[case_name]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(2, 2), example_inputs=args, example_kwargs=kwargs, **options)
    loss = case.loss(parallel(*args, **kwargs))
    loss.backward()
    return scalar(loss), gradients_of(parallel)


@pytest.mark.parametrize("options", [
    slow({"recompute": "offload"}), {"recompute": "offload", "zero_stage": 3, "baseline": "fsdp"},
    {"recompute": "selective", "saved_on": "disk", "zero_stage": 3, **ON_DISK},
    slow({"zero_stage": 3, "baseline": "fsdp"}), slow({"zero_stage": 3, "recompute": "full"}),
    slow({"recompute": "full"}), slow({"recompute": "selective"})])
def test_a_call_recomputes_and_gathers_again_too(ranks: Any, options: Options) -> None:
    reference = train_reference(CASES["gpt2"], "sgd", num_steps=STEPS)
    for loss, gradients in ranks(4).run(called, "gpt2", dict(options), timeout_s=100):
        assert loss == pytest.approx(reference.losses[0], rel=1e-5)
        assert_same_gradients(gradients, reference)


def test_stages_that_hold_more_recompute_more() -> None:
    """Of two stages the first holds two micro-batches: room for four blocks' values is two of its own, and all of the
    second's."""
    plan = half_recomputed(CASES["llama"], (2, 2))
    whole = dataclasses.replace(plan, hybrid=Hybrid(4, 2, 2, recompute="full"))
    tried = []

    def make(again: tuple[str, ...]) -> autoparallel.Plan:
        tried.append(again)
        kept = [sum(path not in again for path in of_stage) for of_stage in ("abcd", "efgh")]
        if 2 * kept[0] > 4 or kept[1] > 4:
            raise InfeasibleError("too much")
        seconds = whole.prediction.forward_s * (1 - sum(kept) / 100)
        faster = dataclasses.replace(whole.prediction, forward_s=seconds)
        hybrid = dataclasses.replace(whole.hybrid, recompute_blocks=again)
        return dataclasses.replace(whole, prediction=faster, hybrid=hybrid)

    best = fewest_recomputed(whole, [list("abcd"), list("efgh")], make)
    assert best.hybrid.recompute_blocks == ("a", "b") and len(tried) <= 3
    assert fewest_recomputed(whole, [list("abcd"), list("efgh")], make, deadline=0.0) is whole


def test_ranks_keep_activations_where_the_fewest_are_in_flight() -> None:
    """Of a rank with several stages first the later ones; at most as many as memory takes, with few plans tried."""
    plan = half_recomputed(CASES["llama"], (2, 2))
    blocks = [[f"{stage}.{block}" for block in range(4)] for stage in range(8)]
    hybrid = Hybrid(16, 8, 2, schedule="interleaved", recompute="full")
    held = [in_flight(hybrid, stage) for stage in range(8)]
    limit, tried = 24.0, list[list[int]]()

    def made(again: tuple[str, ...] | None) -> autoparallel.Plan:
        kept = [0 if again is None else sum(path not in again for path in of_stage) for of_stage in blocks]
        peaks = [sum(kept[s] * held[s] for s in hybrid.stages_of(rank)) for rank in range(2)]
        if max(peaks) > limit:
            raise InfeasibleError("too much")
        prediction = dataclasses.replace(plan.prediction, limit_bytes=limit, peak_bytes=float(max(peaks)),
                                         forward_s=plan.prediction.forward_s * (1 - sum(kept) / 100))
        tried.append(kept)
        return dataclasses.replace(plan, prediction=prediction,
                                   hybrid=dataclasses.replace(hybrid, recompute_blocks=again))

    best = fewest_recomputed(made(None), blocks, made)
    kept = tried[-1]
    assert held == sorted(held, reverse=True) and held[0] > held[-1]
    assert all(kept[s] <= kept[s + 2] for s in range(6)) and best.prediction.peak_bytes > limit - held[0]
    assert len(tried) <= 5 and not set(best.hybrid.recompute_blocks or ()) & {"7.3", "6.3"}


@pytest.mark.parametrize(("micro_batches", "stages"), [slow(2, 1), (4, 2)])
def test_recompute_of_some_blocks(ranks: Any, micro_batches: int, stages: int) -> None:
    made = half_recomputed(CASES["llama"], (2, 2), micro_batches, stages)
    assert_one_process(ranks, "llama", (2, 2), {"plan": made})


def test_selective_recompute_of_a_shard_of_causal_queries() -> None:
    """Under the mode of torch's selective checkpoint: the second half of the queries, over all keys."""
    q, k, v = (torch.randn(2, 2, 8, 4, requires_grad=True) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, :, 4:]
    shard = partial(causal_queries, start=4)
    found = checkpoint(shard, q[:, :, 4:], k, v, use_reentrant=False,
                       context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]))
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for gradient, other in zip(torch.autograd.grad(found.square().sum(), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize(("factor", "shared", "how"), [slow(100, False, "offload"), slow(0.01, False, "full"),
                                                       slow(100, True, "full")])
def test_saved_tensors_go_to_the_host_where_recompute_costs_more(factor: float, shared: bool, how: str) -> None:
    """With offload="auto": over a fast link; over a slow one blocks are recomputed, and where host and device are one
    memory, which gains no room."""
    machine = Cluster.load("h100-sxm", num_devices=4, software="none")
    host = dataclasses.replace(machine.host, disk_read_bytes_per_s=0.0,
                               from_device_bytes_per_s=machine.host.from_device_bytes_per_s * factor,
                               to_device_bytes_per_s=machine.host.to_device_bytes_per_s * factor, shared_memory=shared)
    planned = partial(plan_of, "llama", dataclasses.replace(machine, host=host), batch=64,
                      mesh_shape=(4,))
    kept, again = (planned(recompute=recompute).prediction for recompute in ("none", "full"))
    limit = (kept.peak_bytes + again.peak_bytes) / 2
    found = planned(memory_limit_bytes=limit, recompute="auto", offload="auto")
    assert found.hybrid.recompute == how and found.prediction.peak_bytes <= limit
    assert (found.prediction.host_bytes > 0) == (found.hybrid.offload.is_away or how == "offload")


@pytest.mark.parametrize(("fitting", "tier"), [
    ("host", "host"), slow("disk", "disk"), slow("", "device")])
def test_what_is_saved_goes_to_the_first_tier_with_room(fitting: str, tier: str) -> None:
    """All of it, or what selective recompute keeps, whichever is faster: of as few blocks as memory requires."""
    plan, blocks = half_recomputed(CASES["llama"], (2, 2)), [list("abcd")]
    seconds = {"full": 9.0, "all_but_attention": 9.0, "offload": 8.0, "selective": 7.0}

    def make(hybrid: Hybrid) -> autoparallel.Plan:
        some = len(hybrid.recompute_blocks or "abcd")
        if some < 3 or (hybrid.saved_on != "device" and hybrid.saved_on != fitting):
            raise InfeasibleError("too much")
        took = dataclasses.replace(plan.prediction, forward_s=seconds[hybrid.recompute] + some, recompute_s=1.0)
        return dataclasses.replace(plan, prediction=took, hybrid=hybrid)

    best = less_recomputed(make(Hybrid(recompute="full")), blocks, make, saved_tiers=("host", "disk"))
    assert best.hybrid.saved_on == tier and best.hybrid.recompute == ("selective" if fitting else "full")
    assert best.hybrid.recompute_blocks == tuple("abc")
