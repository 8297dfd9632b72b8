"""Gradients of parameters are those of plain torch where autograd gives two parameters one tensor, or the user's; and
what is asked of autograd holds: hooks, frozen parameters, values that were written to."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import autoparallel
from autoparallel.errors import InputError
from tests.support.ranks import mesh_of
from tests.support.tiers import slow


class Sum(nn.Module):
    """A layer whose weight is a sum of two parameters, which have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.full((4, 4), 0.5)), nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (self.a + self.b)).square().sum()


X = torch.arange(8.0).reshape(2, 4) / 8


def added(q: Any) -> None:
    (q(X) + q.a.square().sum()).backward()


def in_one_backward(q: Any) -> None:
    (q(X) + q(2 * X)).backward()


def accumulated(q: Any) -> None:
    for factor in (1, 2, 3):
        q(factor * X).backward()


def repeated(q: Any) -> None:
    loss = q(X)
    loss.backward(retain_graph=True)
    loss.backward()


def clipped(q: Any) -> None:
    q(X).backward()
    nn.utils.clip_grad_norm_(q.parameters(), 0.5)


def frozen(q: Any) -> None:
    loss = q(X)
    q.a.requires_grad_(False)
    loss.backward()


def doubled(q: Any) -> None:
    """By a hook of the node that accumulates."""
    node: Any = get_gradient_edge(q.a).node
    node.register_prehook(lambda gradients: (2 * gradients[0],))
    q(X).backward()


def whole(value: Tensor | None) -> Tensor | None:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("does", [added, in_one_backward, accumulated, repeated, clipped, frozen, doubled])
def test_gradients_are_torchs(mesh_of_one: DeviceMesh, does: Callable[[Any], None]) -> None:
    plain = Sum()
    parallel = autoparallel.compile(copy.deepcopy(plain), mesh_of_one, example_inputs=(X,), cluster="h200")
    does(plain)
    does(parallel)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(whole(parallel.get_parameter(name).grad), p.grad)


def test_the_users_gradient_stays_his(mesh_of_one: DeviceMesh) -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.w + x

    parallel, v = autoparallel.compile(Shift(), mesh_of_one, example_inputs=(X,), cluster="h200"), torch.ones(2, 4)
    parallel(X).backward(v)
    with torch.no_grad():
        parallel.get_parameter("w").grad.mul_(7)    # type: ignore[union-attr]
    assert torch.equal(v, torch.ones(2, 4))


def test_values_that_were_written_to_are_refused(mesh_of_one: DeviceMesh) -> None:
    """As torch does; backward would take the new ones."""
    parallel = autoparallel.compile(Sum(), mesh_of_one, example_inputs=(X,), cluster="h200")
    loss = parallel(X)
    with torch.no_grad():
        parallel.get_parameter("a").mul_(3)
    with pytest.raises(InputError, match=r"a parameter \[4, 4\] was written to between forward and backward"):
        loss.backward()


class TwoHeads(nn.Module):
    """The loss reads one of two heads; the other's result is an output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x).tanh()
        return {"loss": self.one(y).square().mean(), "beside": self.other(y)}


def without_gradient(shape: tuple[int, ...], options: dict[str, Any]) -> dict[str, bool]:
    """By parameter, whether it has a gradient after a step."""
    parallel = autoparallel.compile(TwoHeads(), mesh_of(*shape), example_inputs=(torch.ones(8, 8),), **options)
    if options.get("micro_batches"):
        parallel.step(torch.ones(8, 8))
        return {name: p.grad is not None for name, p in parallel.named_parameters()}
    first, second = parallel(torch.ones(8, 8)), parallel(torch.zeros(8, 8))
    second["beside"].sum().backward()
    assert [name for name, p in parallel.named_parameters() if p.grad is None] == ["one.weight", "one.bias"]
    parallel.zero_grad()
    first["loss"].backward()
    return {name: p.grad is not None for name, p in parallel.named_parameters()}


@pytest.mark.ranks
@pytest.mark.parametrize(("shape", "options"), [
    slow((2, 2), {"zero_stage": 1}), ((2, 2), {"zero_stage": 3}), ((2,), {"baseline": "fsdp", "zero_stage": 2}),
    slow((2, 2), {"zero_stage": 1, "micro_batches": 2}), ((2,), {"baseline": "fsdp", "backend": "aot_eager"}),
    ((2,), {"baseline": "fsdp", "zero_stage": 1, "micro_batches": 2, "backend": "aot_eager"}),
])
def test_what_the_loss_does_not_need_has_no_gradient(ranks: Any, shape: tuple[int, ...], options: dict[str, Any]
                                                     ) -> None:
    """None, as in one process, and no zeros, by which weight decay would change it."""
    expected = {f"{name}.{what}": name != "other" for name in ("body", "one", "other") for what in ("weight", "bias")}
    assert all(found == expected for found in ranks(math.prod(shape)).run(without_gradient, shape, options))
