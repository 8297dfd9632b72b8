"""Gradient scaling: all ranks skip a step in which one of them overflows, under every plan, with every rank's scale."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import autoparallel
from autoparallel.errors import InputError
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

STEPS = 5


class Net(nn.Module):
    """Of which a gradient overflows when ``x`` is large in one feature: that of some columns of ``second`` only."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.first(x))).square().mean() + self.second(x).mean()


def batch(number: int) -> Tensor:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(number))
    x[:, 7] = 1e-3 if number % 2 else 1e7  # gradients of the last column: too large every other time
    return x


def scaler_of(kind: Any) -> Any:
    return kind("cpu", init_scale=2.0**120, growth_interval=2)


def trained_alone(micro_batches: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model, losses, scales = Net(), [], []
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), scaler_of(torch.amp.GradScaler)
    for number in range(STEPS):
        loss = torch.stack([model(part) / micro_batches for part in batch(number).chunk(micro_batches)]).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales, model.state_dict()


def trained(kind: str, shape: tuple[int, ...], options: dict[str, Any], by_step: bool, explicit: bool) -> Any:
    parallel = autoparallel.compile(Net(), mesh_of(*shape), example_inputs=(batch(0),), **options)
    scaler = scaler_of(autoparallel.GradScaler if kind == "ours" else torch.amp.GradScaler)
    optimizer, losses, scales = torch.optim.SGD(parallel.parameters(), lr=0.01), [], []
    for number in range(STEPS):
        if by_step:
            with scaler.scaling():
                loss = parallel.step(batch(number))
        else:
            loss = parallel(batch(number))
            scaler.scale(loss).backward()
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss))
        scales.append(scaler.get_scale())
    placements = {p.placements for p in parallel.parameters()}
    return losses, scales, {name: p.full_tensor() for name, p in parallel.state_dict().items()}, len(placements)


#: The first gradient is whole on all ranks, another one is cut: torch looks at the first.
MIXED = {"pins": {"first.weight": (Replicate(), Replicate()), "second.weight": (Shard(1), Shard(0)),
                  "third.weight": (Replicate(), Shard(0))}, "zero_stage": 0}


@pytest.mark.parametrize(("kind", "shape", "options", "by_step"), [
    slow("ours", (2, 2), MIXED, False),
    ("torch", (2, 2), MIXED, False),
    ("ours", (2, 2), MIXED, True),
    ("ours", (2, 2), {"micro_batches": 2, "baseline": "fsdp", "zero_stage": 3}, True),
    ("ours", (2, 2), {"micro_batches": 4, "pipeline_stages": 2}, True),
    ("ours", (2,), {"micro_batches": 4, "pipeline_stages": 2, "schedule": "zero_bubble"}, True),
])
def test_an_overflow_on_one_rank_skips_all(ranks: Any, kind: str, shape: tuple[int, ...], options: dict[str, Any],
                                           by_step: bool) -> None:
    micro_batches = options.get("micro_batches", 1)
    losses, scales, parameters = trained_alone(micro_batches)
    assert len({a > b for a, b in pairwise(scales)}) == 2, "some steps are skipped, some not"
    names = set[str]()
    for found, its_scales, state, placements in ranks(math.prod(shape)).run(trained, kind, shape, options, by_step,
                                                                            by_step):
        assert options is not MIXED or placements > 1
        assert found == pytest.approx(losses, rel=1e-4) and its_scales == scales
        for name, value in state.items():
            torch.testing.assert_close(value, parameters[name], rtol=1e-4, atol=1e-6)
        names |= set(state)
    assert names == set(parameters)


def one_infinite(kind: str) -> list[tuple[bool, float]]:
    """Whether this rank skips when one rank alone, each in turn, has an infinite gradient; and its scale."""
    parallel = autoparallel.compile(Net(), mesh_of(2, 2), example_inputs=(batch(1),), **MIXED)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    scaler, found = (autoparallel.GradScaler if kind == "ours" else torch.amp.GradScaler)("cpu", init_scale=8.0), []
    for guilty in range(4):
        scaler.scale(parallel(batch(1))).backward()
        if dist.get_rank() == guilty:
            parallel.second.weight.grad.to_local()[0, 0] = torch.inf
        before = parallel.first.bias.full_tensor().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((torch.equal(before, parallel.first.bias.full_tensor()), scaler.get_scale()))
    return found


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_an_infinite_gradient_of_one_rank_is_everybodys(ranks: Any, kind: str) -> None:
    for found in ranks(4).run(one_infinite, kind):
        assert found == [(True, 4.0), (True, 2.0), (True, 1.0), (True, 0.5)]


def torchs_in_a_pipeline() -> tuple[str, list[float]]:
    parallel = autoparallel.compile(Net(), mesh_of(2), example_inputs=(batch(1),), micro_batches=2, pipeline_stages=2)
    optimizer, scaler = torch.optim.SGD(parallel.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    parallel.step(batch(1))
    scaler.scale(torch.zeros(()))
    before = [p.grad.full_tensor().sum().item() for p in parallel.parameters()]
    with pytest.raises(InputError) as error:
        scaler.step(optimizer)
    assert before == [p.grad.full_tensor().sum().item() for p in parallel.parameters()]
    off = autoparallel.GradScaler("cpu", enabled=False)
    with off.scaling():
        loss = parallel.step(batch(1))
    return str(error.value), [float(loss), off.get_scale()]


def test_torchs_own_is_refused_in_a_pipeline(ranks: Any) -> None:
    for told, (loss, scale) in ranks(2).run(torchs_in_a_pipeline):
        assert "Use autoparallel.GradScaler" in told and "one pipeline stage" in told
        assert loss == pytest.approx(torch.stack([Net()(x) / 2 for x in batch(1).chunk(2)]).sum().item()) and scale == 1


def a_stage_without_gradients() -> list[float]:
    scaler = autoparallel.GradScaler("cpu", init_scale=4.0)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    loss = scaler.scale((parameter * torch.tensor([1.0, math.inf])).sum())
    if dist.get_rank() == 0:
        loss.backward()
    scaler.step(optimizer)
    scaler.update()
    return [scaler.get_scale(), *parameter.tolist()]


def test_ranks_without_gradients_hear_of_others(ranks: Any) -> None:
    assert ranks(2).run(a_stage_without_gradients) == [[2.0, 1.0, 1.0]] * 2
