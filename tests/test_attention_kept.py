"""Recompute of all but attention: numbers, prices and the search; and ring attention, whose result is kept whole."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

import autoparallel
from autoparallel.backends import aot
from autoparallel.capture import capture
from autoparallel.errors import InfeasibleError
from autoparallel.export import export_plan
from autoparallel.kernels import ring
from autoparallel.kernels.kept_results import once
from autoparallel.kernels.recomputed import Recomputed
from autoparallel.planning.candidates import Candidate, Fixed
from autoparallel.planning.joint_candidates import JointSearch
from autoparallel.planning.recompute import less_recomputed
from autoparallel.plans import Hybrid
from cost_models import Cluster
from tests.support.captured import plan_of
from tests.support.compiled import Way, check, differences
from tests.support.models import CASES
from tests.support.plans import half_recomputed
from tests.support.ranks import restores
from tests.support.tiers import slow

KEPT = {"recompute": "all_but_attention"}
H100 = Cluster.load("h100-sxm", num_devices=4)


@pytest.mark.parametrize(("case_name", "way"), [
    ("llama", ((2, 2), {**KEPT, "micro_batches": 2})),
    slow("llama", ((4,), {**KEPT, "baseline": "fsdp", "zero_stage": 3})),
    slow("gpt2", ((2, 2), KEPT)), slow("bert", ((4,), {**KEPT, "baseline": "tensor_parallel"})),
    slow("gpt2", ((2, 2), {**KEPT, "pipeline_stages": 2, "micro_batches": 4})),
    slow("deepseek_v3", ((2, 2), KEPT)), slow("t5", ((2, 2), KEPT)),
    slow("gpt2", ((2, 2), {**KEPT, "micro_batches": 4, "copies": 2})),
    ("llama", ((4,), {"by_hand": "cp=4,recompute=all_but_attention"})),
    slow("llama", ((4,), {"by_hand": "cp=4,recompute=selective"})),
    slow("llama", ((4,), {"by_hand": "cp=4,recompute=selective,saved_on=host"})),
    slow("llama", ((4,), {"by_hand": "cp=2,dp=2,zero=3,recompute=all_but_attention"})),
    ("llama", ((4,), {"by_hand": "cp=2,dp=2,zero=3"})), slow("llama", ((4,), {"by_hand": "cp=2,dp=2,recompute=full"})),
    slow("llama", ((4,), {"by_hand": "cp=2,dp=2,zero=3,recompute=selective"})),
], ids=str)
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("backend", [slow("eager"), "aot_eager", slow("inductor")])
def test_as_one_process(ranks: Any, case_name: str, way: Way, backend: str) -> None:
    check(ranks, case_name, way, backend=backend, alone=True, timeout_s=1800 if backend == "inductor" else 280)


@restores(ring, "HALVES")
def differences_in_one_chunk(way: Way) -> list[str]:
    ring.HALVES = 1
    return differences("llama", [way], "aot_eager", True)


@pytest.mark.parametrize("hand", ["cp=2,dp=2,zero=3", slow("cp=2,dp=2,recompute=full"),
                                  slow("cp=4,recompute=selective"),
                                  slow("cp=2,dp=2,zero=3,recompute=all_but_attention")])
def test_compiled_rings_of_shards_that_are_not_halved(ranks: Any, hand: str) -> None:
    """A rank that does not see the keys that it receives has the collectives of the others in their order."""
    for found in ranks(4).run(differences_in_one_chunk, ((4,), {"by_hand": hand}), timeout_s=280):
        assert not found


@restores(ring, "HALVES")
@restores(aot, "_as_it_is")
def attentions_in_backward(chunks: int) -> int:
    """Of a compiled ring with selective recompute, the calls of torch's attention in the backward graphs."""
    ring.HALVES, as_it_is, found = chunks, aot._as_it_is, list[int]()

    def read(graph: GraphModule) -> Any:
        targets = [str(node.target) for node in graph.graph.nodes] + [
            str(node.args[1]) for node in graph.graph.nodes if "run_with_rng_state" in str(node.target)]
        if any("flash_attention_for_cpu_backward" in target for target in targets):
            found.append(targets.count("aten._scaled_dot_product_flash_attention_for_cpu.default"))
        return as_it_is(graph)

    aot._as_it_is = read
    assert not differences("llama", [((2,), {"by_hand": "cp=2,recompute=selective"})], "aot_eager", True)
    assert found
    return sum(found)


@pytest.mark.parametrize("chunks", [1, 2])
def test_compiled_rings_whose_results_are_kept_do_not_run_again(ranks: Any, chunks: int) -> None:
    assert ranks(2).run(attentions_in_backward, chunks, timeout_s=280) == [0, 0]


@pytest.mark.parametrize(("traced", "dtype", "groups", "chunks"), [
    (True, torch.bfloat16, 2, 1), (True, torch.bfloat16, 4, 2), (True, torch.float32, 2, 2),
    (False, torch.bfloat16, 2, 2)])
def test_traced_rings_that_sum_groups_are_not_halved(traced: bool, dtype: torch.dtype, groups: int, chunks: int,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of such sums have other strides than AOTAutograd traces."""
    found = list[int]()
    monkeypatch.setattr(ring, "is_traced", lambda: traced)
    monkeypatch.setattr(ring.groups, "current", lambda name: None)
    monkeypatch.setattr(ring._Attention, "apply", lambda q, k, v, one: found.append(one.chunks))
    q, k = (torch.zeros(1, heads, 4, 8, dtype=dtype) for heads in (4, groups))
    ring.ring_attention(q, k, k, is_causal=True, axes=("x",))
    assert found == [chunks]


class _Twice(torch.autograd.Function):
    """x @ x @ x, whose two products are one kept result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        made = once(lambda: x @ x @ x)
        ctx.save_for_backward(x, made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, made = ctx.saved_tensors
        assert torch.equal(made, x @ x @ x)
        return gradient @ (x @ x).mT + x.mT @ gradient @ x.mT + (x @ x).mT @ gradient


class Products(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(_twice(torch.tanh(x) @ y) @ y).sin() @ y


def _twice(x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _Twice.apply(x)
    return made


torch.fx.wrap("_twice")


@pytest.mark.parametrize("mode", ["selective", "all_but_attention", "full"])
def test_products_after_a_result_that_is_kept_whole(mode: str) -> None:
    """torch's selective checkpoint finds a kept product by its number in the block, and must not count those inside of
    a result that is kept whole."""
    torch.manual_seed(0)
    given = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    expected = torch.autograd.grad(Products()(*given).square().sum(), given)
    made = Recomputed(symbolic_trace(Products()), mode)(*given)
    for gradient, other in zip(torch.autograd.grad(made.square().sum(), given), expected, strict=True):
        torch.testing.assert_close(gradient, other)


# ------------------------------------------------------------------------------------------------ prices and the search


def test_recompute_without_attention_takes_less_time_and_its_results_a_little_memory() -> None:
    none, all_but, full = (plan_of("gpt2", H100, 64, mesh_shape=(4,), recompute=how).prediction
                           for how in ("none", "all_but_attention", "full"))
    assert 0 < all_but.recompute_s < full.recompute_s and none.recompute_s == 0
    assert full.activation_bytes < all_but.activation_bytes < none.activation_bytes


def test_auto_keeps_attention_where_it_fits() -> None:
    """With GPT-2's vocabulary it takes no more memory at the peak."""
    planned = partial(plan_of, "gpt2", H100, 64, mesh_shape=(4,), baseline="ddp")
    plans = {how: planned(recompute=how) for how in ("all_but_attention", "full")}
    for kept in plans.values():
        found = planned(recompute="auto", memory_limit_bytes=kept.prediction.peak_bytes * 1.0001)
        assert found.hybrid.recompute == "all_but_attention"
        assert found.prediction.step_s <= plans["all_but_attention"].prediction.step_s < plans["full"].prediction.step_s
    assert "recompute of all but attention on all 2 blocks" in plans["all_but_attention"].summary()


@pytest.mark.parametrize(("saved", "expected"), [(0.5, "all_but_attention"), (0.96, "full")])
def test_attention_is_kept_if_that_saves_enough(saved: float, expected: str) -> None:
    """Its memory may ask for recompute of more blocks."""
    plan, blocks = half_recomputed(CASES["llama"], (2, 2)), [list("abcd")]

    def make(hybrid: Hybrid) -> autoparallel.Plan:
        some = len(hybrid.recompute_blocks or "abcd")
        if some < 2:
            raise InfeasibleError("too much")
        again_s = some * (saved if hybrid.recompute == "all_but_attention" else 1.0)
        took = dataclasses.replace(plan.prediction, forward_s=9.0 + again_s, recompute_s=again_s)
        return dataclasses.replace(plan, prediction=took, hybrid=hybrid)

    best = less_recomputed(make(Hybrid(recompute="full")), blocks, make)
    assert best.hybrid.recompute == expected and best.hybrid.recompute_blocks == tuple("ab")
    put_off = Hybrid(4, 2, 2, "zero_bubble", recompute="full")    # whose blocks run again once, for both parts
    assert less_recomputed(make(put_off), [["a", "b"], ["c", "d"]], make).hybrid.recompute == "full"


def test_bounds_hold_for_plans_that_keep_attention() -> None:
    """A combination's recompute is bounded as that of its plans which recompute the least."""
    case = CASES["gpt2"]
    bounds = JointSearch(capture(case.build(), *case.inputs(64)), H100, Fixed(), "adamw", 1e9).bounds
    whole, all_but, none = (Candidate(Hybrid(4, recompute=how), (4,)) for how in ("full", "all_but_attention", "none"))
    bounds.limit = (bounds.least_bytes(whole) + bounds.least_bytes(none)) / 2
    work_s = bounds.work_s(whole)
    assert bounds.again_s(whole, "all_but_attention") == bounds.again_s(all_but) < bounds.again_s(whole)
    assert 0 < bounds.forced_again_s(whole, work_s) <= bounds.forced_again_s(all_but, work_s)


@pytest.mark.parametrize("to", ["megatron", "torchtitan", "deepspeed"])
def test_other_frameworks_recompute_whole_blocks_instead(to: str) -> None:
    said = export_plan(plan_of("gpt2", H100, 64, by_hand="dp=4,recompute=all_but_attention"), to)
    assert "recompute of all but attention" in [one.what for one in said.lost] and said.by_hand.recompute != "none"


def test_fsdp2_keeps_attention() -> None:
    said = export_plan(plan_of("gpt2", H100, 64, by_hand="dp=4,zero=3,recompute=all_but_attention"), "fsdp2")
    assert not [one for one in said.lost if "attention" in one.what]
    [text] = said.files.values()
    assert 'kept = ("aten._scaled_dot_product",)' in text and "Attention is kept" in text
    compile(text, "fsdp2", "exec")
