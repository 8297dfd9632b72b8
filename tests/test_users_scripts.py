"""Habits of training scripts: averaged copies, values swapped by ``.data``, parts named as methods are."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import autoparallel
from autoparallel.errors import InputError
from tests.support.ranks import mesh_of
from tests.support.reference import gathered
from tests.support.tiers import slow

X, Y = torch.linspace(-2, 2, 64).view(8, 8).cos(), torch.arange(8) % 4
Made = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        made = self.last(self.norm(self.first(x)).tanh())
        return made.square().sum() if y is None else F.cross_entropy(made, y)


class Named(nn.Module):
    """Parts, parameters and buffers that are called as methods and properties of `ParallelModule` are."""

    def __init__(self) -> None:
        super().__init__()
        self.program, self.profile = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))
        self.plan, self.verify = nn.Parameter(torch.ones(8)), 3.0
        self.register_buffer("step", torch.zeros(()))
        self.register_buffer("load", torch.zeros(8))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if self.training:
            self.step += 1
            self.load.lerp_(x.mean(0), 0.1)
        made = self.profile(self.program(x)) * self.plan + self.load * self.verify + self.step
        return made.square().mean() if y is None else F.cross_entropy(made, y)


def trained(model: Any, steps: int = 2, after: Callable[[], object] = lambda: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        optimizer.zero_grad()
        model(X + number, Y).backward()
        optimizer.step()
        after()


def state(prefix: str, model: Any) -> Made:
    return gathered((f"{prefix} {name}", value) for name, value in model.state_dict().items())


def averaged(model: Any) -> Made:
    """The averages begin after a step, whose gradients are there; batch norm's statistics of the data, or averaged."""
    trained(model, 1)
    with warnings.catch_warnings(action="error", category=FutureWarning):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    buffered = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True)
    trained(model, 3, lambda: (average.update_parameters(model), buffered.update_parameters(model)))
    update_bn([(X + 1,), (X + 2,)], average)
    return {**state("model", model), **state("average", average), "loss": average.eval()(X, Y).detach(),
            **state("buffered", buffered), "its loss": buffered.eval()(X, Y).detach()}


def swapped(model: Any) -> Made:
    """Averages are put in the place of the parameters, and these back, as is written in many scripts."""
    torch.manual_seed(5)
    nn.init.orthogonal_(model.last.weight)
    shadow = {name: p.data.clone() for name, p in model.named_parameters()}
    trained(model, 3)
    for name, parameter in model.named_parameters():
        shadow[name] = 0.5 * shadow[name] + 0.5 * parameter.data
    backup = {}
    for name, parameter in model.named_parameters():
        backup[name] = parameter.data
        parameter.data = shadow[name]
    losses = [model(X, Y).detach()]
    for name, parameter in model.named_parameters():
        parameter.data = backup[name]
    losses.append(model(X, Y).detach())
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.1, 0.1)
    trained(model)
    return {**state("model", model), **gathered(shadow.items()), "losses": torch.stack(losses)}


def copied(model: Any) -> Made:
    """A copy while there are gradients, which it has not; gradients, too, are copied. Each trains by itself."""
    model(X, Y).backward()
    other = copy.deepcopy(model)
    assert all(p.grad is None and isinstance(p, nn.Parameter) for p in other.parameters())
    made = gathered((f"gradient {name}", copy.deepcopy(p.grad)) for name, p in model.named_parameters())
    trained(other)
    return {**made, **state("model", model), **state("other", other), "loss": other(X, Y).detach()}


def named(model: Any) -> Made:
    trained(model)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    other = copy.deepcopy(model)
    trained(other)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return {**state("model", model), **state("other", other), "loss": model.eval()(X, Y).detach()}


def looked_at(model: Any) -> Made:
    """Backward under anomaly detection; an optimizer steps in backward."""
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(2):
        with torch.autograd.set_detect_anomaly(True):
            model(X + number, Y).backward()
    return state("model", model)


class Positive(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return F.softplus(weight)


class Parametrised(nn.Module):
    """Weights that are computed of others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16, bias=False), nn.Linear(16, 4)
        parametrizations.weight_norm(self.first, dim=1)
        parametrize.register_parametrization(self.last, "weight", Positive())

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        made = self.last(self.first(x).tanh())
        return made.square().sum() if y is None else F.cross_entropy(made, y)


def regularised(model: Any) -> Made:
    """Such weights are read outside of the model, in its loss."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), {}
    for number in range(2):
        optimizer.zero_grad()
        loss = model(X + number, Y) + 0.1 * model.first.weight.abs().sum() + 0.1 * model.last.weight.norm()
        loss.backward()
        optimizer.step()
        losses[f"loss {number}"] = loss.detach()
    return {**state("model", model), **gathered([*losses.items(), ("weight", model.first.weight.detach())])}


def is_equal_on(kind: type[nn.Module], baseline: str, script: Callable[[Any], Made]) -> None:
    torch.manual_seed(7)
    model = kind()
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of(2), baseline=baseline, example_inputs=(X, Y))
    found, expected = script(parallel), script(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(("kind", "script"), [
    (Net, averaged), slow(Net, swapped), (Net, copied), slow(Named, named), slow(Net, looked_at),
    (Parametrised, regularised)])
@pytest.mark.parametrize("baseline", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_script_is_equal_to_one_process(ranks: Any, kind: type[nn.Module], baseline: str,
                                          script: Callable[[Any], Made]) -> None:
    ranks(2).run(is_equal_on, kind, baseline, script)


def batched(baseline: str) -> None:
    x, vectors = X.clone().requires_grad_(), torch.tensor([1.0, 2.0])
    torch.manual_seed(7)
    parallel = autoparallel.compile(Net(), mesh_of(2), baseline=baseline, example_inputs=(X, Y))
    with pytest.raises(InputError, match="once for each vector"):
        torch.autograd.grad(parallel(x, Y), x, vectors, is_grads_batched=True)


@pytest.mark.parametrize("baseline", ["ddp", "tensor_parallel"])
def test_gradients_of_several_vectors_at_once_are_refused(ranks: Any, baseline: str) -> None:
    """What is sent of them was read before it was there."""
    ranks(2).run(batched, baseline)


def test_gradients_are_set_to_none_before_the_first_call(mesh_of_one: Any) -> None:
    """Loops that begin with `zero_grad` ended in an InputError."""
    model = Net()
    model(X, Y).backward()
    parallel = autoparallel.compile(model, mesh_of_one)
    parallel.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    parallel(X, Y).backward()
    assert all(p.grad is not None for p in parallel.parameters())
    parallel.zero_grad()
    assert all(p.grad is None for p in parallel.parameters())
