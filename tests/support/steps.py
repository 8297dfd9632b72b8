"""Five training steps on ranks, compared with one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import autoparallel
from tests.support.models import CASES
from tests.support.ranks import mesh_of
from tests.support.reference import (
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


def train_by_step(case_name: str, mesh_shape: tuple[int, ...], options: Options, optimizer: str, batch: int
                  ) -> Trained:
    """Run on each rank: what `parallel.step` leaves; parameters of other stages are missing."""
    case = CASES[case_name]
    args, kwargs = case.inputs(batch)
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
                       optimizer: str = "sgd", batch: int = 8) -> None:
    """Every rank's loss is the one process's, and so is every tensor of every rank; together the ranks have all."""
    expected = train_reference(CASES[case_name], optimizer, num_steps=STEPS, batch_size=batch)
    found = ranks(int(torch.Size(mesh_shape).numel())).run(
        train_by_step, case_name, mesh_shape, dict(options), optimizer, batch, timeout_s=200
    )
    for trained in found:
        assert trained.losses == pytest.approx(expected.losses, rel=1e-5)
        everything = Trained(0, [], expected.gradients | trained.gradients, expected.parameters | trained.parameters,
                             {})
        assert_same_gradients(everything.gradients, expected)
        assert_same_parameters(everything.parameters, expected, 1e-4 if optimizer == "adamw" else 1e-5)
    assert {name for trained in found for name in trained.parameters} == set(expected.parameters)
    assert {name for trained in found for name in trained.gradients} == set(expected.gradients)
