"""Random ops: equal bits where ranks hold the same value, other numbers on other shards, the right distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributions import Beta, Gamma

import autoparallel
from autoparallel.layout import INVARIANT
from tests.support.models import CASES
from tests.support.ranks import mesh_of
from tests.support.tiers import slow


class Drop(nn.Module):
    """Dropout of a parameter times ones: the output shows the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * self.weight, 0.25, self.training)


def masks(layout: str) -> list[torch.Tensor]:
    """The local outputs of two calls, with the output as pinned."""
    placement = Shard(0) if layout == "sharded" else Replicate()
    x = torch.ones(64, 256)
    parallel = autoparallel.compile(Drop(), mesh_of(4), example_inputs=(x,),
                                    pins={"weight": placement, "x": placement})
    outputs = [parallel(x) for _ in range(2)]
    return [(o.to_local() if isinstance(o, DTensor) else o).detach() for o in outputs]


def test_replicated_ranks_draw_the_same_bits(ranks: Any) -> None:
    results = ranks(4).run(masks, "whole")
    whole = [r for r in results if r[0].shape == (64, 256)]
    assert len(whole) == 4
    for first, second in whole[1:]:
        assert torch.equal(first, whole[0][0]) and torch.equal(second, whole[0][1])
    assert not torch.equal(whole[0][0], whole[0][1]), "two calls draw different numbers"


def test_shards_draw_different_numbers_at_the_right_rate(ranks: Any) -> None:
    results = ranks(4).run(masks, "sharded")
    firsts = [r[0] for r in results]
    assert all(f.shape == (16, 256) for f in firsts)
    assert not any(torch.equal(firsts[0], other) for other in firsts[1:])
    everything = torch.cat(firsts)
    dropped = float((everything == 0).float().mean())
    assert abs(dropped - 0.25) < 4 * (0.25 * 0.75 / everything.numel()) ** 0.5  # four standard deviations
    assert torch.allclose(everything[everything != 0], torch.tensor(1 / 0.75))


class Drawn(nn.Module):
    """Samples of a gamma distribution of shape 2, a beta of (2, 3), or random slopes, each times a weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight, self.slopes = kind, nn.Parameter(torch.ones(64, 256)), nn.RReLU(0.25, 0.75)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "gamma":
            return Gamma(2 * self.weight, x).rsample()
        return Beta(2 * self.weight, 3 * x).rsample() if self.kind == "beta" else self.slopes(-x * self.weight)


@pytest.mark.parametrize(("kind", "mean", "variance", "backend"), [
    ("gamma", 2.0, 2.0, "eager"), slow("gamma", 2.0, 2.0, "aot_eager"), slow("beta", 0.4, 0.04, "eager"),
    ("beta", 0.4, 0.04, "aot_eager"), slow("slopes", -0.5, 0.25 / 12, "eager"),
    ("slopes", -0.5, 0.25 / 12, "aot_eager")])
def test_samples_that_depend_on_values(mesh_of_one: DeviceMesh, kind: str, mean: float, variance: float, backend: str
                                       ) -> None:
    """The trace refused Gamma's samples, and compiled programs random slopes."""
    x = torch.ones(64, 256)
    parallel = autoparallel.compile(Drawn(kind), mesh_of_one, example_inputs=(x,), backend=backend)
    drawn, again = parallel(x), parallel(x)
    drawn.sum().backward()
    values, (gradient,) = drawn.detach(), [p.grad.to_local() for p in parallel.parameters()]
    few = 5 / values.numel() ** 0.5                                         # five standard deviations
    assert abs(float(values.mean()) - mean) < few * variance ** 0.5 and not torch.equal(values, again)
    assert abs(float(values.var()) / variance - 1) < 3 * few
    if kind == "slopes":
        assert torch.equal(gradient, values)                                # of -x w with x = w = 1
    else:
        assert float(gradient.min()) > 0 and torch.isfinite(gradient).all()


@pytest.mark.parametrize(("kind", "op"), [("gamma", "_standard_gamma"), ("slopes", "rrelu")])
def test_samples_are_cut_as_what_they_depend_on(kind: str, op: str) -> None:
    plan = autoparallel.plan(Drawn(kind), autoparallel.Cluster.load("local-cpu", num_devices=2), mesh_shape=(2,),
                             example_inputs=(torch.ones(64, 256),), pins={"weight": (Shard(0),), "x": (Shard(0),)})
    assert plan.strategies[op] == ("d0",)


def losses(baseline: str, num_calls: int) -> tuple[list[float], bool]:
    """Losses of many calls of GPT-2 with dropout, and whether replicated parameters stay equal in a step."""
    case = CASES["gpt2_dropout"]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(4), example_inputs=args, example_kwargs=kwargs,
                                    baseline=baseline)
    found = []
    with torch.no_grad():
        for _ in range(num_calls):
            found.append(float(case.loss(parallel(*args, **kwargs))))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    case.loss(parallel(*args, **kwargs)).backward()
    optimizer.step()
    return found, all(same_on_all_ranks(p) for p in parallel.parameters())


def same_on_all_ranks(parameter: Any) -> bool:
    import torch.distributed as dist

    from autoparallel.layout import from_torch

    if from_torch(tuple(parameter.placements)) != (INVARIANT,):
        return True
    local = parameter.to_local().detach()
    first = local.clone()
    dist.broadcast(first, 0)
    return torch.equal(first, local)


@pytest.mark.slow
def test_dropout_in_a_model_is_equal_in_distribution(ranks: Any) -> None:
    """The mean loss over calls agrees with one process's within four standard errors of the difference."""
    case = CASES["gpt2_dropout"]
    model = case.build()
    args, kwargs = case.inputs(8)
    torch.manual_seed(1)
    with torch.no_grad():
        one = torch.tensor([float(case.loss(model(*args, **kwargs))) for _ in range(60)])
    for baseline in ("ddp", "tensor_parallel"):
        results = ranks(4).run(losses, baseline, 60, timeout_s=120)
        assert all(found == results[0][0] for found, _ in results), "the loss is one number for all ranks"
        assert all(same for _, same in results), "replicas stay replicas"
        many = torch.tensor(results[0][0])
        assert many.std() > 0
        spread = float((one.var() / 60 + many.var() / 60) ** 0.5)
        assert abs(float(one.mean() - many.mean())) < 4 * spread
