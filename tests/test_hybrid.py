"""Steps in turns and stages compute the single-process step over the whole batch: loss, gradients, five updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import autoparallel
from autoparallel.capture import OpGraph, capture
from autoparallel.errors import InfeasibleError, InputError, PlanError
from autoparallel.hybrid import split_batch
from autoparallel.hybrid.stages import cut_evenly, flow_of
from autoparallel.plans import Hybrid
from autoparallel.rules.space import StrategySpace
from tests.models import CASES
from tests.ranks import mesh_of
from tests.reference import (
    SEED,
    Trained,
    assert_same_gradients,
    assert_same_parameters,
    gathered,
    gradients_of,
    make_optimizer,
    scalar,
    train_reference,
)

STEPS = 5
Options = Mapping[str, Any]


def train_by_step(case_name: str, mesh_shape: tuple[int, ...], options: Options, optimizer: str) -> Trained:
    """Run on each rank: what `parallel.step` leaves; parameters of other stages are missing."""
    case = CASES[case_name]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(*mesh_shape), example_inputs=args, example_kwargs=kwargs,
                                    **options)
    torch.manual_seed(SEED)
    stepper = make_optimizer(optimizer, parallel.parameters())
    losses, gradients = [], {}
    for step in range(STEPS):
        losses.append(scalar(parallel.step(*args, **kwargs)))
        if step == 0:
            gradients = gradients_of(parallel)
        stepper.step()
        stepper.zero_grad()
    return Trained(losses[0], losses, gradients, gathered(parallel.named_parameters()), {})


def assert_one_process(ranks: Any, case_name: str, mesh_shape: tuple[int, ...], options: Options,
                       optimizer: str = "sgd") -> None:
    """Every rank's loss is the one process's, and so is every tensor of every rank; together the ranks have all."""
    expected = train_reference(CASES[case_name], optimizer, num_steps=STEPS)
    found = ranks(int(torch.Size(mesh_shape).numel())).run(
        train_by_step, case_name, mesh_shape, dict(options), optimizer, timeout_s=200
    )
    for trained in found:
        assert trained.losses == pytest.approx(expected.losses, rel=1e-5)
        everything = Trained(0, [], expected.gradients | trained.gradients, expected.parameters | trained.parameters,
                             {})
        assert_same_gradients(everything.gradients, expected)
        assert_same_parameters(everything.parameters, expected, 1e-4 if optimizer == "adamw" else 1e-5)
    assert {name for trained in found for name in trained.parameters} == set(expected.parameters)
    assert {name for trained in found for name in trained.gradients} == set(expected.gradients)


@pytest.mark.parametrize(("case_name", "micro_batches"), [
    ("mlp", 2), ("transformer_encoder", 4), ("gpt2", 4), ("llama", 8), ("bert", 2), ("vit", 4),
])
def test_micro_batches(ranks: Any, case_name: str, micro_batches: int) -> None:
    assert_one_process(ranks, case_name, (2, 2), {"micro_batches": micro_batches})


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_zero_stages_with_micro_batches(ranks: Any, zero_stage: int) -> None:
    assert_one_process(ranks, "llama", (4,), {"micro_batches": 2, "zero_stage": zero_stage}, "adamw")


@pytest.mark.parametrize(("case_name", "mesh_shape", "options"), [
    ("mlp", (2, 2), {"schedule": "gpipe"}),
    ("llama", (2, 2), {"schedule": "gpipe", "micro_batches": 2}),
    ("llama", (2, 2), {"schedule": "1f1b", "micro_batches": 4}),
    ("gpt2", (2, 2), {"schedule": "1f1b", "micro_batches": 4}),
    ("bert", (4,), {"schedule": "1f1b", "micro_batches": 8, "pipeline_stages": 4}),
    ("llama", (2, 2), {"schedule": "interleaved", "micro_batches": 4, "pipeline_stages": 4}),
    ("llama", (2, 2), {"schedule": "zero_bubble", "micro_batches": 4}),
    ("gpt2", (2, 2), {"schedule": "zero_bubble", "micro_batches": 4, "pipeline_stages": 4}),
    ("resnet", (2, 2), {"schedule": "gpipe"}),
    ("gpt2", (2, 2), {"schedule": "1f1b", "micro_batches": 2, "zero_stage": 1}),
    ("gpt2", (2, 2), {"schedule": "1f1b", "micro_batches": 2, "zero_stage": 2}),
    ("gpt2", (2, 2), {"schedule": "1f1b", "micro_batches": 2, "zero_stage": 3}),
])
def test_pipelines(ranks: Any, case_name: str, mesh_shape: tuple[int, ...], options: Options) -> None:
    assert_one_process(ranks, case_name, mesh_shape, {"pipeline_stages": 2, **options})


@pytest.mark.parametrize(("case_name", "options"), [
    ("llama", {"recompute": "full"}),
    ("gpt2", {"recompute": "selective", "micro_batches": 2}),
    ("bert", {"recompute": "full", "micro_batches": 4, "zero_stage": 3}),
    ("llama", {"recompute": "full", "micro_batches": 2, "pipeline_stages": 2}),
    ("llama", {"recompute": "full", "micro_batches": 2, "pipeline_stages": 2, "schedule": "zero_bubble"}),
])
def test_recompute(ranks: Any, case_name: str, options: Options) -> None:
    assert_one_process(ranks, case_name, (2, 2), options)


@pytest.mark.parametrize(("options", "parts"), [
    ({"schedule": "gpip"}, ("unknown schedule 'gpip'", "gpipe")),
    ({"recompute": "some"}, ("unknown recompute 'some'", "selective")),
    ({"zero_stage": 4}, ("unknown zero_stage 4",)),
    ({"stages": 3, "pipeline_ranks": 2}, ("3 pipeline stages on 2 ranks", "a multiple of 2")),
    ({"stages": 4, "pipeline_ranks": 2, "micro_batches": 4}, ("one stage per rank", "interleaved")),
    ({"stages": 4, "pipeline_ranks": 4, "micro_batches": 3}, ("at least as many micro-batches", "gpipe")),
    ({"stages": 2, "pipeline_ranks": 2, "micro_batches": 3, "schedule": "zero_bubble"}, ()),
    ({"stages": 2, "pipeline_ranks": 2, "micro_batches": 5, "schedule": "zero_bubble"}, ("rounds of 2",)),
    ({"stages": 2, "pipeline_ranks": 2, "micro_batches": 2, "schedule": "zero_bubble", "recompute": "selective"},
     ("two parts", "'full'")),
])
def test_what_does_not_go_together_is_refused(options: Options, parts: tuple[str, ...]) -> None:
    if not parts:
        Hybrid(**options)
        return
    with pytest.raises(PlanError) as error:
        Hybrid(**options)
    assert all(part in str(error.value) for part in parts), error.value


def graph_of(case_name: str) -> OpGraph:
    case = CASES[case_name]
    args, kwargs = case.inputs(8)
    return capture(case.build(), args, kwargs)


def test_micro_batches_that_do_not_divide_name_those_that_do() -> None:
    with pytest.raises(InputError, match=r"3 micro-batches do not divide the batch of 8: take one of \[1, 2, 4, 8\]"):
        split_batch(graph_of("mlp"), 3)


def test_batch_norm_cannot_be_split() -> None:
    with pytest.raises(InfeasibleError, match=r"computes across its samples.*Use micro_batches=1"):
        split_batch(graph_of("resnet"), 2)


def test_more_stages_than_ops() -> None:
    micro = split_batch(graph_of("mlp"), 1)
    space = StrategySpace(micro.body, (2,))
    with pytest.raises(InfeasibleError, match="cannot be cut into 50 pipeline stages: take at most"):
        cut_evenly(flow_of(space, 0), np.ones(len(space)), 50)
