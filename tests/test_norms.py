"""Norms along a cut dim, where the ranks add up the statistics, compute what the whole computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import autoparallel
from autoparallel.capture import capture
from autoparallel.errors import CaptureError
from autoparallel.kernels.norm import batch_norm_of_shards, norm_of_shards
from autoparallel.ops.batch_norm import batch_norm
from autoparallel.pricing import Prices
from benchmarks.in_process import on_every_rank
from cost_models import Cluster
from tests.support.ranks import mesh_of
from tests.support.reference import gathered
from tests.support.rule_cases import case_of, strategies_that_hold
from tests.support.tiers import with_slow

aten = torch.ops.aten
OF_INSTANCES = (None, None, True, 0.1, 1e-5, False)

#: Op and arguments (a tuple is a tensor's shape), and the rows of dims that are normed along.
CASES: dict[str, tuple[tuple[Any, ...], set[str]]] = {
    "layer": ((aten.layer_norm.default, (2, 3, 12), [12], (12,), (12,)), {"norm d2"}),
    "layer, of two dims": ((aten.layer_norm.default, (2, 5, 6), [5, 6], (5, 6), (5, 6)), {"norm d1", "norm d2"}),
    "layer, without a scale": ((aten.layer_norm.default, (2, 9), [9], None, None, 0.1), {"norm d1"}),
    "RMS": ((aten.rms_norm.default, (2, 3, 12), [12], (12,)), {"norm d2"}),
    "RMS, of two dims": ((aten.rms_norm.default, (2, 5, 6), [5, 6], None, 0.1), {"norm d1", "norm d2"}),
    "group": ((aten.group_norm.default, (2, 4, 5, 6), 2, (4,), (4,)), {"norm d2", "norm d3"}),
    "group, without a scale": ((aten.group_norm.default, (3, 6, 7), 3), {"norm d2"}),
    "batch": ((batch_norm, (6, 4, 5), (4,), (4,), (4,), (4,), 0.3, 1e-5), {"batch norm d0", "batch norm d2"}),
    "batch, of vectors, without a scale": ((batch_norm, (9, 4), None, None, None, None, 0.1, 0.1), {"batch norm d0"}),
    "instance": ((aten.instance_norm.default, (2, 4, 6, 5), (4,), (4,), *OF_INSTANCES), {"norm d2", "norm d3"}),
}


@pytest.mark.parametrize("name", with_slow(CASES, "layer, of two dims", "RMS, of two dims", "group, without a scale",
                                           "batch, of vectors, without a scale", "instance"))
def test_norms_on_shards(name: str) -> None:
    """Even and uneven shards on 2, 3 and 4 ranks, forward and gradients."""
    arguments, rows = CASES[name]
    assert {row for row in strategies_that_hold(*arguments) if "norm" in row} == rows


def test_summed_statistics_are_priced() -> None:
    """Two numbers of each row, however many ranks there are: mean and deviation, and two sums for the gradient."""
    from autoparallel.strategies.space import StrategySpace

    case = case_of(aten.layer_norm.default, (2, 3, 64), [64], (64,), (64,))
    for num_ranks in (2, 4):
        space = StrategySpace(case.graph, (num_ranks,))
        prices = Prices(space, Cluster.load("h100-sxm", num_devices=num_ranks))
        decision = next(decision.index for decision in space.decisions if decision.kind == "op")
        inside = prices.op(space.strategy_sets[decision]).inside
        sent = {(i.exchange.forward, i.exchange.backward): float(i.num_bytes[i.seconds > 0].max()) for i in inside}
        assert sent == {(2, 0): 2 * 3 * 4.0, (0, 1): 2 * 2 * 3 * 4.0}


class _BatchNorms(nn.Module):
    """With and without scale, running statistics and a batch; one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.plain = nn.BatchNorm2d(6, momentum=0.3), nn.BatchNorm2d(6, affine=False)
        self.first, self.second = nn.Conv2d(4, 6, 3), nn.Conv2d(6, 6, 1)
        self.flat, self.head = nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.first(x)).relu()
        x = self.plain(self.twice(self.second(x)) * 2.0)
        return self.head(self.flat(x.mean((2, 3)))).square().mean()


def _three_steps(model: nn.Module) -> dict[str, torch.Tensor]:
    """Losses of three steps, then all parameters and buffers."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), {}
    for number in range(3):
        x = torch.randn(8, 4, 6, 5, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        found[f"loss {number}"] = loss.detach().clone()
    return {**found, **gathered([*model.named_parameters(), *model.named_buffers()])}


def _steps_of_program(options: dict[str, Any]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The functions by which a program runs batch norms; what three steps make."""
    parallel = autoparallel.compile(_BatchNorms(), mesh_of(2), example_inputs=(torch.zeros(8, 4, 6, 5),), **options)
    found = _three_steps(parallel)
    names = [str(node.target) for node in parallel.program().graph.nodes if "batch_norm" in str(node.target)]
    return names, found


@pytest.mark.parametrize(("options", "cut"), [
    ({"pins": {"x": (Replicate(),), "*": (Replicate(),)}}, False),
    ({"pins": {"x": (Replicate(),), "*": (Replicate(),)}, "recompute": "full"}, False),
    ({"pins": {"first": (Shard(1),), "twice.weight": (Shard(0),)}}, False),
    ({"baseline": "ddp"}, True),
    ({"baseline": "fsdp", "zero_stage": 3}, True),
])
def test_batch_norm_is_one_op(ranks: Any, options: dict[str, Any], cut: bool) -> None:
    """Torch's own where a rank has all samples, and else one that sums over the ranks; both with the numbers of one
    process, whose running statistics are those of all samples."""
    expected = _three_steps(_BatchNorms())
    for names, found in ranks(2).run(_steps_of_program, options, timeout_s=100):
        assert len(names) == 4 and all(("of_shards" in name) == cut for name in names)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


class _ReadsStatistics(nn.Module):
    """Reads running statistics before and after norms that update them, and norms by them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batch, self.instance = nn.BatchNorm2d(4), nn.InstanceNorm2d(4, track_running_stats=True)
        self.first = nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.batch
        norm.running_mean.mul_(0.5)
        x = self.first(x) * (1.0 + norm.running_var.sum())
        x = norm(x) + norm.running_mean.view(1, -1, 1, 1)
        x = norm(2.0 * x + 1.0) * norm.running_var.view(1, -1, 1, 1)
        x = x + nn.functional.batch_norm(x, norm.running_mean, norm.running_var)
        x = self.instance(x) + self.instance.running_mean.view(1, -1, 1, 1)
        return x.square().mean()


def _steps_that_read(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    example = torch.zeros(8, 4, 6, 5)
    return _three_steps(autoparallel.compile(_ReadsStatistics(), mesh_of(2), example_inputs=(example,), **options))


def test_what_is_read_behind_a_norm_is_its_new_statistics(ranks: Any) -> None:
    expected = _three_steps(_ReadsStatistics())
    for found in ranks(2).run(_steps_that_read, {"baseline": "ddp"}, timeout_s=60):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def synced(inputs: str) -> None:
    """As scripts for DDP convert it, which torch runs on GPUs only."""
    torch.manual_seed(2)
    model, mesh = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), mesh_of(2)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    rows = torch.linspace(-1, 1, 48).view(8, 6).cos().cumsum(0)
    mine = rows.chunk(2)[mesh.get_rank()] if inputs == "local" else rows
    parallel = autoparallel.compile(converted, mesh, baseline="ddp", inputs=inputs, outputs="whole",
                                    example_inputs=(mine,))
    for module, batch in ((model, rows), (parallel, mine)):
        module(batch).square().mean().backward()
        module.eval()
    torch.testing.assert_close(parallel(mine), model(rows))
    torch.testing.assert_close(parallel[0].weight.grad.full_tensor(), model[0].weight.grad)


@pytest.mark.parametrize("inputs", ["global", "local"])
def test_synced_batch_norm_is_batch_norm(ranks: Any, inputs: str) -> None:
    ranks(2).run(synced, inputs)


def test_synced_batch_norm_of_some_ranks_is_refused() -> None:
    model = nn.SyncBatchNorm(4, process_group=SimpleNamespace(size=lambda: 2))
    with pytest.MonkeyPatch.context() as patched, pytest.raises(CaptureError, match="2 of 4 ranks"):
        patched.setattr(torch.distributed, "get_world_size", lambda: 4)
        capture(model, (torch.ones(8, 4),))


def test_an_eps_that_is_not_given_is_that_of_the_type_in_which_torch_computes() -> None:
    """Of bfloat16 float32's, which small values show."""
    x = 1e-3 * torch.randn(3, 8, dtype=torch.bfloat16)
    made = norm_of_shards(x, [8], op=aten.rms_norm.default, axes=(), dims=(), sizes=())
    torch.testing.assert_close(made, torch.nn.functional.rms_norm(x, (8,)))


def _batch_norms_of_shards(x: torch.Tensor, lengths: tuple[int, int], *rest: Any) -> list[torch.Tensor]:
    """Result and running statistics of batch norm on shards of samples, as one process has them."""
    def on_rank(coordinate: tuple[int, ...]) -> Any:
        return batch_norm_of_shards(x.split(lengths)[coordinate[0]], *rest, op=batch_norm, axes=("x",), dims=(0,),
                                    sizes=((len(x), len(x)),))

    found = on_every_rank((2,), ("x",), on_rank)
    for first, second in zip(found[0,][1:], found[1,][1:], strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    return [torch.cat([found[0,][0], found[1,][0]]), *found[0,][1:]]


@pytest.mark.parametrize(("dtype", "offset"), [(torch.float32, 0.0), (torch.float32, 1e3), (torch.bfloat16, 0.0)])
def test_sums_over_ranks_are_as_precise_as_those_of_one(dtype: torch.dtype, offset: float) -> None:
    """Also where the mean is a thousand times the deviation, which a difference of sums in float32 would not see."""
    x = (torch.randn(11, 3, 4) + torch.arange(11).view(-1, 1, 1) % 3 + offset).to(dtype)
    vectors = torch.rand(4, 3) + 0.5
    made = _batch_norms_of_shards(x, (5, 6), *vectors, 0.3, 1e-5)
    for found, expected in zip(made, batch_norm(x, *vectors, 0.3, 1e-5), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-3)


@pytest.mark.parametrize("op", [aten.layer_norm.default, aten.rms_norm.default])
def test_gradients_along_a_cut_dim_can_be_differentiated(op: Any) -> None:
    """A loss with the norm of its gradient in it, of uneven shards."""
    lengths = 5, 7
    case = case_of(op, (3, 12), [12], (12,))
    x, weight = case.draws[0]

    def gradients(norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *values: torch.Tensor) -> list[Any]:
        leaves = [value.clone().requires_grad_() for value in values]
        loss = norm(*leaves).sin().sum()
        made = torch.autograd.grad(loss, leaves, create_graph=True)
        (loss + sum(g.square().sum() for g in made)).backward()
        return [leaf.grad for leaf in leaves]

    def on_rank(coordinate: tuple[int, ...]) -> list[Any]:
        shards = [value.split(lengths, -1)[coordinate[0]] for value in (x, weight)]
        return gradients(lambda x, w: norm_of_shards(x, [12], w, op=op, axes=("x",), dims=(1,), sizes=((12, 12),)),
                         *shards)

    expected = gradients(lambda x, w: op(x, [12], w), x, weight)
    found = on_every_rank((2,), ("x",), on_rank)
    for number, value in enumerate(expected):
        torch.testing.assert_close(torch.cat([found[0,][number], found[1,][number]], -1), value)


def test_gradients_of_batch_norm_on_shards_can_be_differentiated() -> None:
    """Those of x; of weight and bias, of which each rank has a summand, once."""
    x, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((7, 3, 2), (3,), (3,)))
    rest = None, None, 0.0, 1e-5

    def gradients(norm: Callable[..., torch.Tensor], *values: torch.Tensor) -> list[Any]:
        leaves = [value.clone().requires_grad_() for value in values]
        loss = norm(*leaves).sin().sum()
        made = torch.autograd.grad(loss, leaves, create_graph=True)
        again = torch.autograd.grad(made[0].square().sum(), leaves[0])
        return [*(one.detach() for one in made), *again]

    def on_rank(coordinate: tuple[int, ...]) -> list[Any]:
        return gradients(lambda *values: batch_norm_of_shards(
            *values, *rest, op=batch_norm, axes=("x",), dims=(0,), sizes=((7, 7),))[0],
            x.split((3, 4))[coordinate[0]], weight, bias)

    expected = gradients(lambda *values: batch_norm(*values, *rest)[0], x, weight, bias)
    first, second = on_every_rank((2,), ("x",), on_rank).values()
    found = [torch.cat([first[0], second[0]]), first[1] + second[1], first[2] + second[2],
             torch.cat([first[3], second[3]])]
    torch.testing.assert_close(found, expected)
