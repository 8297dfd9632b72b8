"""The promise: every plan computes what one process computes: loss, every gradient, parameters after five steps.

Each job compiles one model on one mesh in many ways and returns what differs; nothing may. The default run takes each
model on (2, 2) and (4,); the slow run is the whole table of meshes, searches, baselines and twenty random plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import autoparallel
from autoparallel.planning.baselines import NAMES as BASELINES
from tests.support.models import CASES
from tests.support.plans import random_plan
from tests.support.ranks import mesh_of
from tests.support.reference import (
    assert_same_buffers,
    assert_same_gradients,
    assert_same_loss,
    assert_same_parameters,
    train,
    train_reference,
)
from tests.support.tiers import slow

MODELS = ["mlp", "transformer_encoder", "gpt2", "llama", "bert", "vit", "resnet"]
#: Those of the default run; `test_the_whole_table` has all.
FEW = ["mlp", "llama"]
SEARCHES = ["ilp", "recursive", "exact"]
STEPS = 5
Way = tuple[str, Any]


def compiled(case_name: str, mesh_shape: Sequence[int], way: Way) -> Any:
    """The case's model, compiled by a search, a baseline, or a random plan."""
    case = CASES[case_name]
    mesh = mesh_of(*mesh_shape)
    model = case.build()
    args, kwargs = case.inputs(8)
    kind, value = way
    options: dict[str, Any] = {kind: value} if kind in ("search", "baseline") else {}
    if kind == "random":
        options["plan"] = random_plan(case, mesh_shape, mesh.mesh_dim_names or (), value)
    return autoparallel.compile(model, mesh, example_inputs=args, example_kwargs=kwargs, **options)


def differences(case_name: str, mesh_shape: Sequence[int], ways: Sequence[Way], optimizers: Sequence[str]) -> list[str]:
    """Run on each rank: what differs from one process, way by way; each optimizer starts from the first weights."""
    case = CASES[case_name]
    found = []
    for way in ways:
        parallel = compiled(case_name, mesh_shape, way)
        for optimizer in optimizers:
            expected = train_reference(case, optimizer, num_steps=STEPS)
            try:
                actual = train(parallel, case, optimizer, num_steps=STEPS)
                assert_same_loss(actual, expected)
                assert_same_gradients(actual.gradients, expected)
                assert_same_parameters(actual.parameters, expected, 1e-4 if optimizer == "adamw" else 1e-5)
                assert_same_buffers(actual.buffers, expected)
            except AssertionError as error:
                found.append(f"{case_name} on {tuple(mesh_shape)} by {way}, {optimizer}: {error}")
            parallel.load_state_dict(case.build().state_dict())
    return found


def check(ranks: Any, case_name: str, mesh_shape: Sequence[int], ways: Sequence[Way], *optimizers: str,
          timeout_s: float = 280) -> None:
    pool = ranks(int(np.prod(mesh_shape)))
    for found in pool.run(differences, case_name, tuple(mesh_shape), list(ways), optimizers, timeout_s=timeout_s):
        assert not found, "\n".join(found)


@pytest.mark.parametrize("case_name", FEW)
def test_chosen_plan_baselines_and_random_plans(ranks: Any, case_name: str) -> None:
    ways = [("search", "auto"), *(("baseline", b) for b in BASELINES), ("random", 0)]
    check(ranks, case_name, (2, 2), ways, "sgd")


@pytest.mark.parametrize("case_name", ["mlp", pytest.param("llama", marks=pytest.mark.slow)])
def test_searches_on_one_axis_with_adamw(ranks: Any, case_name: str) -> None:
    check(ranks, case_name, (4,), [("search", s) for s in SEARCHES] + [("random", 3)], "adamw")


@pytest.mark.parametrize("num_ranks", [3, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case_name", ["mlp", *(pytest.param(x, marks=pytest.mark.slow) for x in ("llama", "bert"))])
def test_uneven_shards(ranks: Any, case_name: str, num_ranks: int) -> None:
    """Nothing in these models divides by three."""
    check(ranks, case_name, (num_ranks,), [("search", "auto"), ("baseline", "fsdp"), ("random", 0)], "sgd")


def test_vocabulary_of_50257_on_four_ranks(ranks: Any) -> None:
    """Real GPT-2 vocabulary, tied embeddings: uneven shards of 12565, 12565, 12565 and 12562 rows."""
    check(ranks, "gpt2_full_vocab", (4,), [("baseline", "tensor_parallel"), ("baseline", "fsdp")], "sgd")


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (2, 2, 2)])
@pytest.mark.parametrize("case_name", MODELS)
def test_the_whole_table(ranks: Any, case_name: str, mesh_shape: tuple[int, ...]) -> None:
    """Each search, each baseline and 20 random plans, with SGD and with AdamW."""
    ways: list[Way] = [("search", s) for s in SEARCHES] + [("baseline", b) for b in BASELINES]
    ways += [("random", seed) for seed in range(20)]
    for at in range(0, len(ways), 6):
        check(ranks, case_name, mesh_shape, ways[at : at + 6], "sgd", "adamw", timeout_s=900)


def bfloat16_errors(case_name: str, mesh_shape: Sequence[int], baseline: str | None) -> tuple[float, float]:
    """(error in parallel, error of one process) of all bfloat16 gradients against float32, relative in 2-norm."""
    case = CASES[case_name]
    exact = train_reference(case, "sgd").gradients
    one = train(case.build().bfloat16(), case, "sgd", dtype=torch.bfloat16).gradients
    args, kwargs = case.inputs(8)
    cast = [a.bfloat16() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    parallel = autoparallel.compile(case.build().bfloat16(), mesh_of(*mesh_shape), example_inputs=cast,
                                    example_kwargs=kwargs, baseline=baseline)
    many = train(parallel, case, "sgd", dtype=torch.bfloat16).gradients

    def error(gradients: dict[str, torch.Tensor]) -> float:
        top = sum(float((gradients[n].float() - g).square().sum()) for n, g in exact.items())
        return float((top / sum(float(g.square().sum()) for g in exact.values())) ** 0.5)

    return error(many), error(one)


@pytest.mark.parametrize("baseline", [None, slow("ddp"), slow("tensor_parallel")])
def test_bfloat16_rounds_no_worse_than_one_process(ranks: Any, baseline: str | None) -> None:
    """Sums over ranks add at most log2(4) = 2 roundings to the many of one process: three times its error is ample."""
    for many, one in ranks(4).run(bfloat16_errors, "llama", (2, 2), baseline):
        assert 0 < one < 0.1
        assert many < 3 * one
