"""Multi-copy: micro-batches that alternate compute what one after the other does, and are simulated as they run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import autoparallel
from autoparallel.errors import PlanError
from autoparallel.planning.candidates import Candidate, CandidateSpace, Fixed
from autoparallel.plans import Hybrid, Plan
from autoparallel.plans.reports.timeline import timeline_of
from cost_models import Cluster
from tests.support.captured import plan_of
from tests.support.launch_order import check_order
from tests.support.models import CASES
from tests.support.ranks import mesh_of
from tests.support.tiers import slow


@pytest.mark.parametrize(("case_name", "mesh_shape", "hybrid"), [
    slow("gpt2", (2, 2), Hybrid(2, zero_stage=1, copies=2)), slow("llama", (4,), Hybrid(4, zero_stage=0, copies=2)),
    slow("bert", (2, 2), Hybrid(2, copies=2)), ("mlp", (2, 2), Hybrid(2, zero_stage=3, copies=2)),
    slow("gpt2", (4,), Hybrid(4, zero_stage=3, copies=2, bucket_bytes=20_000)),
    slow("bert", (2, 2), Hybrid(4, zero_stage=1, copies=4)), ("mlp", (4,), Hybrid(2, zero_stage=0, copies=2)),
    slow("gpt2", (2,), Hybrid(2, zero_stage=1, copies=2, recompute="selective")),
    slow("gpt2", (2, 2), Hybrid(4, zero_stage=3, copies=2, recompute="full")),
    slow("llama", (4,), Hybrid(4, zero_stage=1, copies=4, recompute="selective")),
    ("mlp", (2,), Hybrid(8, 2, 2, "1f1b", zero_stage=1, copies=2)),
    slow("mlp", (2,), Hybrid(8, 2, 2, "gpipe", zero_stage=2, copies=2)),
    slow("gpt2", (2,), Hybrid(8, 4, 2, "interleaved", zero_stage=1, copies=2)),
    slow("gpt2", (2,), Hybrid(8, 2, 2, "1f1b", zero_stage=3, copies=2)),
    slow("gpt2", (2,), Hybrid(8, 2, 2, "1f1b", zero_stage=2, copies=2)),
    ("mlp", (2,), Hybrid(4, zero_stage=1, copies=2, recompute="full")),
    slow("bert", (2,), Hybrid(4, zero_stage=2, copies=2, recompute="full")),
    slow("llama", (2,), Hybrid(4, zero_stage=0, copies=4, recompute="all_but_attention")),
], ids=str)
def test_simulated_collectives_of_copies_are_those_of_the_run(
    case_name: str, mesh_shape: tuple[int, ...], hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_order(case_name, mesh_shape, 0, hybrid, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", [Hybrid(2, zero_stage=stage, copies=2) for stage in (1, 2, 3)]
                         + [Hybrid(4, zero_stage=3, copies=2, bucket_bytes=20_000), Hybrid(4, zero_stage=3, copies=4)]
                         + [Hybrid(4, zero_stage=stage, copies=2, recompute=how) for stage in (0, 2, 3)
                            for how in ("full", "selective")],
                         ids=str)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@pytest.mark.parametrize("case_name", ["mlp", "gpt2", "bert", "llama", "vit", "gpt2_dropout"])
def test_simulated_collectives_of_copies_in_each_model(
    case_name: str, mesh_shape: tuple[int, ...], hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in (1, 2, 3):
        check_order(case_name, mesh_shape, seed, hybrid, monkeypatch)


Way = tuple[str, tuple[int, ...], dict[str, Any]]
WAYS: list[Way] = [
    ("gpt2_dropout", (2, 2), {"micro_batches": 2, "copies": 2, "baseline": "tensor_parallel"}),
    ("gpt2_dropout", (4,), {"micro_batches": 4, "copies": 4, "baseline": "fsdp", "zero_stage": 3, "recompute": "full"}),
    ("gpt2_dropout", (2, 2), {"micro_batches": 4, "copies": 2, "pipeline_stages": 2}),
]
MORE_WAYS: list[Way] = [
    ("llama", (4,), {"micro_batches": 4, "copies": 2, "baseline": "fsdp", "zero_stage": 3}),
    ("gpt2", (2, 2), {"by_hand": "dp=2,tp=2,micro_batch=1,copies=2,zero=1,sequence_parallel"}),
    ("gpt2", (4,), {"micro_batches": 4, "copies": 2, "baseline": "sequence_parallel", "zero_stage": 0}),
    ("deepseek_v3", (2, 2), {"micro_batches": 4, "copies": 4, "zero_stage": 2}),
    ("bert", (4,), {"micro_batches": 4, "copies": 2, "baseline": "fsdp", "zero_stage": 2}),
    ("vit", (2, 2), {"micro_batches": 4, "copies": 2, "baseline": "tensor_parallel"}),
    ("gpt2_dropout", (2, 2), {"micro_batches": 4, "copies": 4, "zero_stage": 2, "recompute": "selective"}),
    ("deepseek_v3", (4,), {"micro_batches": 4, "copies": 2, "zero_stage": 3, "recompute": "full"}),
    ("llama", (2, 2), {"micro_batches": 4, "copies": 2, "zero_stage": 1, "recompute": "offload"}),
    ("llama", (2, 2), {"micro_batches": 8, "copies": 2, "pipeline_stages": 4, "schedule": "interleaved"}),
    ("bert", (2, 2), {"micro_batches": 8, "copies": 4, "pipeline_stages": 2, "zero_stage": 3, "schedule": "gpipe"}),
    ("t5", (2, 2), {"micro_batches": 4, "copies": 2, "pipeline_stages": 2, "zero_stage": 2, "recompute": "full"}),
    ("gpt2", (4,), {"by_hand": "dp=1,tp=4,micro_batch=2,copies=2,zero=1,sequence_parallel,recompute=full"}),
    ("llama", (4,), {"by_hand": "dp=1,tp=4,micro_batch=2,copies=2,zero=1,recompute=selective"}),
    ("deepseek_v3", (4,), {"by_hand": "dp=4,ep=4,micro_batch=1,copies=2,zero=1,recompute=all_but_attention"}),
    ("deepseek_v3", (4,), {"by_hand": "dp=2,pp=2,ep=2,micro_batch=1,copies=2,zero=1"}),
]


def step_and_gradients(case_name: str, mesh_shape: tuple[int, ...], options: dict[str, Any]
                       ) -> tuple[float, dict[str, torch.Tensor], Plan]:
    """Loss and gradients of a step, and its plan."""
    case = CASES[case_name]
    args, kwargs = case.inputs(8)
    if by_hand := options.get("by_hand"):
        options = {"plan": autoparallel.plan(case.build(), Cluster.load("local-cpu", num_devices=4),
                                             example_inputs=args, example_kwargs=kwargs, by_hand=by_hand)}
    mesh = 4 if "plan" in options else mesh_of(*mesh_shape)
    parallel = autoparallel.compile(case.build(), mesh, example_inputs=args, example_kwargs=kwargs, **options)
    torch.manual_seed(0)
    loss = float(parallel.step(*args, **kwargs))
    return loss, {n: p.grad.full_tensor().double() for n, p in parallel.named_parameters() if p.grad is not None}, \
        parallel.plan


def difference_from_one_at_a_time(case_name: str, mesh_shape: tuple[int, ...], options: dict[str, Any]
                                  ) -> tuple[float, float]:
    """How far loss and gradients (2-norm) of multi-copy are from those of one after the other, by the same plan."""
    loss, gradients, plan = step_and_gradients(case_name, mesh_shape, options)
    alone = replace(plan, hybrid=replace(plan.hybrid, copies=1))
    expected_loss, expected, _ = step_and_gradients(case_name, mesh_shape, {"plan": alone})
    assert plan.hybrid.copies > 1 and set(gradients) == set(expected)
    wrong = sum(float((gradients[name] - expected[name]).square().sum()) for name in expected)
    return abs(loss - expected_loss), (wrong / sum(float(g.square().sum()) for g in expected.values())) ** 0.5


@pytest.mark.parametrize(("case_name", "mesh_shape", "options"),
                         [*WAYS, *(slow(*way) for way in MORE_WAYS)], ids=str)
def test_copies_compute_what_one_after_the_other_does(ranks: Any, case_name: str, mesh_shape: tuple[int, ...],
                                                      options: dict[str, Any]) -> None:
    """Dropout draws the same numbers; sums are in another order."""
    found = ranks(4).run(difference_from_one_at_a_time, case_name, mesh_shape, options, timeout_s=100)
    for loss, gradients in found:
        assert loss < 1e-5 and gradients < 1e-5


class LargeLoss(torch.nn.Module):
    """In float16, in which the losses of two micro-batches can be written, and their sum cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)]).half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return (x - x + 2000.0).sum()


def large_loss(copies: int) -> float:
    inputs = (torch.zeros(16, 8, dtype=torch.float16),)
    parallel = autoparallel.compile(LargeLoss(), mesh_of(2), example_inputs=inputs, pipeline_stages=2, micro_batches=8,
                                    copies=copies)
    return float(parallel.step(*inputs))


def test_losses_of_a_round_are_summed_in_float64(ranks: Any) -> None:
    assert ranks(2).run(large_loss, 4) == ranks(2).run(large_loss, 1) == [8 * 32_000.0] * 2


@pytest.mark.parametrize(("options", "message"), [
    ({"micro_batches": 3, "copies": 2}, "3 micro-batches do not run 2 at a time"),
    ({"micro_batches": 4, "copies": 2, "pipeline_stages": 2, "schedule": "zero_bubble"}, "backward in two parts"),
    ({"micro_batches": 2, "copies": 2, "pipeline_stages": 2}, "at least as many groups of 2 micro-batches"),
    ({"copies": 0}, "copies is 0"),
])
def test_copies_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of("mlp", Cluster.load("h100-sxm", num_devices=4), 12, mesh_shape=(2, 2), **options)


def test_copies_hide_activations_and_hold_more_of_them() -> None:
    """Tensor-parallel micro-batches, one after the other and two at a time, with the same layouts."""
    cluster = Cluster.load("h100-sxm", num_devices=4)
    alone, two = (plan_of("llama", cluster, by_hand=f"tp=4,dp=1,micro_batch=2,copies={copies}") for copies in (1, 2))
    assert alone.strategies == two.strategies
    now, before = two.prediction, alone.prediction
    assert now.forward_communication_s == before.forward_communication_s
    assert now.hidden_s > before.hidden_s and now.step_s < before.step_s
    assert now.activation_bytes > before.activation_bytes and now.state_bytes == before.state_bytes
    assert "4 micro-batches, of which 2 at a time interleave" in two.summary()
    line = timeline_of(two)
    assert line.total_s == pytest.approx(now.step_s - now.fixed_s, rel=1e-6)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_copies_in_a_pipeline_hide_activations(recompute: str) -> None:
    """Each stage runs two tensor-parallel micro-batches at a time, in the layouts of one at a time."""
    cluster, hand = Cluster.load("h100-sxm", num_devices=8), f"tp=4,dp=1,pp=2,micro_batch=1,recompute={recompute}"
    alone, two = (plan_of("llama", cluster, by_hand=f"{hand},copies={copies}") for copies in (1, 2))
    assert alone.strategies == two.strategies and alone.hybrid.cuts == two.hybrid.cuts
    now, before = two.prediction, alone.prediction
    assert now.forward_communication_s == before.forward_communication_s
    assert now.exposed_s < before.exposed_s and now.activation_bytes > before.activation_bytes
    stages = [plan.record.stages for plan in (two, alone)]
    exposed_s = [[stage.forward_communication_s for stage in some] for some in stages]
    assert all(mine < other for mine, other in zip(*exposed_s, strict=True))
    names = {box.name for box in timeline_of(two).boxes}
    assert "forward of micro-batches 2 to 3, stage 1" in names


@pytest.mark.parametrize(("fixed", "hybrid", "expected"), [
    (Fixed(), Hybrid(zero_stage=2), {2}), (Fixed(), Hybrid(4, zero_stage=1, recompute="full"), {4, 8}),
    (Fixed(micro_batches=4), Hybrid(4, zero_stage=1), {4}), (Fixed(copies=1), Hybrid(4, zero_stage=1), set()),
    (Fixed(recompute="full"), Hybrid(4, zero_stage=1, recompute="full"), set()),
    (Fixed(), Hybrid(4, 2, 2, zero_stage=1), set()),
], ids=str)
def test_joint_search_tries_copies_near_the_best(fixed: Fixed, hybrid: Hybrid, expected: set[int]) -> None:
    space = CandidateSpace(Cluster.load("h100-sxm", num_devices=8), fixed, num_blocks=4, batch=16)
    found = [c.hybrid for c in space.around(Candidate(hybrid, (8 // hybrid.pipeline_ranks,)))]
    assert {h.micro_batches for h in found if h.copies == 2} == expected


@pytest.mark.parametrize(("fixed", "hybrid", "expected"), [
    (Fixed(), Hybrid(4, 2, 2, zero_stage=1), {4, 8}), (Fixed(), Hybrid(2, 2, 2, zero_stage=1), {4}),
    (Fixed(micro_batches=4), Hybrid(4, 2, 2, recompute="full"), {4}),
    (Fixed(), Hybrid(4, 2, 2, "zero_bubble", zero_stage=1), set()), (Fixed(copies=1), Hybrid(4, 2, 2), set()),
    (Fixed(), Hybrid(4), set()),
], ids=str)
def test_joint_search_tries_the_best_pipeline_in_pairs(fixed: Fixed, hybrid: Hybrid, expected: set[int]) -> None:
    space = CandidateSpace(Cluster.load("h100-sxm", num_devices=8), fixed, num_blocks=4, batch=16)
    found = [c.hybrid for c in space.in_pairs(Candidate(hybrid, (8 // hybrid.pipeline_ranks,)))]
    assert {h.micro_batches for h in found} == expected and all(h.copies == 2 for h in found)
