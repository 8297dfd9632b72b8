"""Sums of single numbers over ranks, as one all-reduce: which go together, in which order, with equal results."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

import autoparallel
from autoparallel.capture import capture
from autoparallel.kernels import collectives, groups
from autoparallel.lower import emit
from autoparallel.lower.number_sums import sum_numbers_together
from autoparallel.pricing import Prices
from autoparallel.strategies.space import StrategySpace
from benchmarks.in_process import on_every_rank
from tests.support.ranks import mesh_of


class Losses(nn.Module):
    """Two losses with counts, one of other numbers than the first, and one that needs the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.first(x)
        loss = nn.functional.cross_entropy(rows, labels, ignore_index=0)
        other = nn.functional.cross_entropy(self.second(rows.tanh()), labels, ignore_index=1)
        return loss + other, (rows * loss).square().sum()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(8, 4, generator=generator), torch.randint(0, 6, (8,), generator=generator)


def programs(mesh_shape: tuple[int, ...]) -> tuple[GraphModule, GraphModule]:
    """The program of rank 0, data parallel over all axes, before and after."""
    model, args = Losses(), inputs()
    cluster = autoparallel.Cluster.load("h100-sxm", num_devices=4)
    plan = autoparallel.plan(model, cluster, example_inputs=args, mesh_shape=mesh_shape, baseline="ddp")
    space = StrategySpace(capture(model, args), plan.mesh_shape, plan.axis_names)
    before = emit(space, plan.strategies_on(space), Prices(space, cluster).path, (0,) * len(mesh_shape)).module
    return before, sum_numbers_together(before)


def sums_of(program: GraphModule) -> Counter[tuple[str, int]]:
    """The sums of activations by axis, and how many numbers each has."""
    found = Counter[tuple[str, int]]()
    for node in program.graph.nodes:
        if node.target is collectives.all_reduce:
            found[node.args[1], 1] += 1
        elif node.target is collectives.all_reduce_numbers:
            found[node.args[0], len(node.args) - 3] += 1
    return found


def test_numbers_that_do_not_need_each_other_are_one_sum() -> None:
    """The last loss needs the first: it is summed by itself."""
    before, after = programs((4,))
    assert sums_of(before) == {("axis0", 1): 5}
    assert sums_of(after) == {("axis0", 4): 1, ("axis0", 1): 1}
    before, after = programs((2, 2))
    assert sums_of(before) == {("axis0", 1): 5, ("axis1", 1): 5}
    assert sums_of(after) == {(axis, count): 1 for axis in ("axis0", "axis1") for count in (4, 1)}


def _kernel(coordinate: tuple[int, ...]) -> list[Any]:
    """Sums of three numbers, of which one has no gradient, together and apart, with gradients."""
    found = []
    for together in (True, False):
        values = [torch.tensor(float(n + coordinate[0]), requires_grad=n != 1).view(shape)
                  for n, shape in enumerate([(), (1,), (1, 1)])]
        made = collectives.all_reduce_numbers("x", "P", "R", *values) if together else [
            collectives.all_reduce(value, "x", "P", "R") for value in values]
        assert [x.shape for x in made] == [x.shape for x in values]
        assert [x.requires_grad for x in made] == [True, False, True]
        graded = [values[0], values[2]]
        gradients = torch.autograd.grad((made[0] * 2.0).sum() + (made[2] * (coordinate[0] + 1.0)).sum(), graded)
        found.append([x.detach() for x in (*made, *gradients)])
    assert groups.current("x").size == 4
    return found


def test_gradients_are_those_of_sums_by_themselves() -> None:
    for together, apart in on_every_rank((4,), ("x",), _kernel).values():
        assert all(map(torch.equal, together, apart))


def _steps(backend: str, mesh_shape: tuple[int, ...]) -> tuple[int, Any]:
    """Results, gradients, and the number of sums that have several numbers."""
    args = inputs()
    parallel = autoparallel.compile(Losses(), mesh_of(*mesh_shape), example_inputs=args, baseline="ddp",
                                    backend=backend)
    loss, other = parallel(*args)
    (loss + other).backward()
    loss += 1.0    # a loss is the caller's own memory
    gradients = [p.grad.full_tensor() for p in parallel.parameters()]
    program = parallel.trace(args, step=False).forward
    count = sum(node.target is collectives.all_reduce_numbers for module in program.modules()
                if isinstance(module, GraphModule) for node in module.graph.nodes)
    return count, [loss.detach(), other.detach(), *gradients]


def test_losses_and_gradients_are_those_of_one_process(ranks: Any) -> None:
    model = Losses()
    loss, other = model(*inputs())
    (loss + other).backward()
    expected = [loss.detach() + 1.0, other.detach(), *(p.grad for p in model.parameters())]
    for mesh_shape in ((4,), (2, 2)):
        for count, found in ranks(4).run(_steps, "eager", mesh_shape, timeout_s=60):
            assert count > 0
            for mine, right in zip(found, expected, strict=True):
                torch.testing.assert_close(mine.full_tensor() if hasattr(mine, "full_tensor") else mine, right)
    for _, found in ranks(4).run(_steps, "aot_eager", (2, 2), timeout_s=60):
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.full_tensor() if hasattr(mine, "full_tensor") else mine, right)
