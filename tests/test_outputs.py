"""Outputs of a parallel module as the plan lays them out, or whole (``outputs="whole"``), for losses outside of it."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoparallel
from autoparallel.errors import PlanError
from tests.support.ranks import mesh_of
from tests.support.reference import gathered, gradients_of

X, Y = torch.linspace(-2, 2, 60).view(6, 10).cos(), torch.arange(6) % 5


def assert_gradients(parallel: nn.Module, model: nn.Module, **tolerances: Any) -> None:
    """The parallel module's gradients are the model's."""
    expected = gradients_of(model)
    for name, gradient in gathered((n, p.grad) for n, p in parallel.named_parameters()).items():  # type: ignore[misc]
        torch.testing.assert_close(gradient, expected[name], **tolerances)


class Made(NamedTuple):
    logits: Tensor
    others: dict[str, Any]


class Net(nn.Module):
    """Outputs in a structure, among them sums over the batch, a number and, in training, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Made:
        hidden = self.norm(self.first(x)).tanh()
        logits = self.last(hidden)
        return Made(logits, {"hidden": [hidden, hidden.sum(0)], "n": 3, "loss": logits.square().mean()})


def loss_of(made: Made) -> Tensor:
    """What users write of plain tensors: of plain targets, with masks, numbers, and written in place."""
    logits, (hidden, sums) = made.logits, made.others["hidden"]
    weights = torch.ones(len(logits), dtype=logits.dtype)
    weights[logits.argmax(1) == Y] = 0.5
    accuracy = (logits.argmax(1) == Y).float().mean().item()
    return ((F.cross_entropy(logits, Y, reduction="none") * weights).mean() + 0.1 * made.others["loss"] + accuracy
            + F.mse_loss(hidden, X.to(hidden.dtype).repeat(1, 2)[:, :16]) + sums[2:5].norm() + made.others["n"])


def train_on_whole_outputs(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """In float64: three steps of batch norm of six rows turn rounding into 1e-4."""
    torch.manual_seed(1)
    model, x = Net().double(), X.double()
    parallel: Any = autoparallel.compile(copy.deepcopy(model), mesh_of(*shape), outputs="whole", example_inputs=(x,),
                                         **options)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, parallel)]
    for step in range(3):
        losses = []
        for module, optimizer in zip((model, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            made = module(x + step)
            assert not any(isinstance(v, DTensor) for v in (made.logits, *made.others["hidden"], made.others["loss"]))
            losses.append(loss_of(made))
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0])
        assert_gradients(parallel, model, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
    for mode in (torch.no_grad(), torch.inference_mode(), nullcontext()):
        with mode:
            found, expected_made = parallel.eval()(x), model.eval()(x)
        for ours, one in zip((found.logits, *found.others["hidden"]),
                             (expected_made.logits, *expected_made.others["hidden"]), strict=True):
            assert type(ours) is Tensor
            torch.testing.assert_close(ours, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("shape", "options"), [
    ((2,), {"baseline": "ddp"}), ((2,), {"baseline": "tensor_parallel"}), ((2,), {"baseline": "fsdp"}),
    ((2,), {"baseline": "ddp", "micro_batches": 2}), ((2, 2), {}),
])
def test_a_loss_of_plain_targets_trains_as_in_one_process(ranks: Any, shape: tuple[int, ...], options: dict[str, Any]
                                                          ) -> None:
    """Under every plan; in evaluation, too."""
    ranks(2 * len(shape)).run(train_on_whole_outputs, shape, options)


def write_to_outputs(baseline: str) -> None:
    """As is done to logits: a temperature, and answers that are not allowed."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 5))
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of(2), outputs="whole", baseline=baseline)
    for module in (model, parallel):
        logits = module(X).div_(2)
        logits[:, 1] = -9.0
        F.cross_entropy(logits.masked_fill_(X[:, :1] > 0.5, -3.0), Y).backward()
    assert_gradients(parallel, model)


@pytest.mark.parametrize("baseline", ["ddp", "tensor_parallel"])
def test_whole_outputs_are_written_in_place(ranks: Any, baseline: str) -> None:
    ranks(2).run(write_to_outputs, baseline)


def penalise() -> None:
    """Gradients of the inputs, of which the loss has the norm."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of(2), outputs="whole", baseline="ddp")
    for module in (model, parallel):
        x = X.clone().requires_grad_()
        output = module(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        (output.square().mean() + gradient.square().sum(1).mean()).backward()
    assert_gradients(parallel, model)


def test_gradients_of_whole_outputs_are_differentiated(ranks: Any) -> None:
    ranks(2).run(penalise)


def differentiate_thrice(outputs: str) -> None:
    """A Hessian by a vector of the inputs, and what its norm means for the parameters."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of(2), outputs=outputs, baseline="ddp")
    found = list[Tensor]()
    for module in (model, parallel):
        x = X.clone().requires_grad_()
        energy = module(x).square().sum()
        for _ in range(2):
            (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
            energy = (gradient * Y[:, None]).sum() + gradient.square().sum()
        energy.backward()
        product = torch.autograd.functional.hvp(lambda x, module=module: module(x).square().sum(), X, X.sin())[1]
        found += [product, x.grad]
    torch.testing.assert_close(found[2:], found[:2])
    assert_gradients(parallel, model)


@pytest.mark.parametrize("outputs", ["whole", "layout"])
def test_gradients_are_differentiated_twice_more(ranks: Any, outputs: str) -> None:
    ranks(2).run(differentiate_thrice, outputs)


def weigh_the_gradient() -> None:
    """Gradients of the weights that a backward from a sharded output was given."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 5))
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of(2), baseline="ddp")
    found = list[Tensor]()
    for module in (model, parallel):
        x, weights = X.clone().requires_grad_(), torch.ones(6, 5, requires_grad=True)
        (gradient,) = torch.autograd.grad(module(x), x, weights, create_graph=True)
        found += torch.autograd.grad(gradient.square().sum(), (weights, module[0].weight))
    torch.testing.assert_close(found[2], found[0])
    torch.testing.assert_close(found[3].full_tensor(), found[1])


def test_the_gradient_given_to_a_sharded_output_is_differentiated(ranks: Any) -> None:
    ranks(2).run(weigh_the_gradient)


def regularise(plan: str) -> None:
    """A plain loss with terms of the parameters, which are DTensors, in each order."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 5))
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of(2), outputs="whole", baseline=plan)
    scales: list[Any] = []
    for module in (model, parallel):
        loss, scale = F.cross_entropy(module(X), Y), torch.tensor(0.3, requires_grad=True)
        terms = sum(p.norm() for p in module.parameters()) * (1 - scale) / scale.exp()
        (loss - 0.1 * terms + module[0].weight.abs().sum() * scale - loss * terms + sum([loss, terms])).backward()
        assert type(scale.grad) is Tensor
        scales.append(scale.grad)
    torch.testing.assert_close(*scales)
    assert_gradients(parallel, model, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_terms_of_parameters_are_added_to_a_plain_loss(ranks: Any, plan: str) -> None:
    ranks(2).run(regularise, plan)


def clip_with_a_head(plan: str) -> None:
    """A parallel backbone and a plain head, clipped together by torch's function."""
    torch.manual_seed(1)
    model, head = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 5)), nn.Linear(5, 5)
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of(2), outputs="whole", baseline=plan)
    norms, heads = [], (head, copy.deepcopy(head))
    for backbone, own in zip((model, parallel), heads, strict=True):
        F.cross_entropy(own(backbone(X)), Y).backward()
        norms.append(nn.utils.clip_grad_norm_([*backbone.parameters(), *own.parameters()], 0.01))
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(heads[0].weight.grad, heads[1].weight.grad)
    assert_gradients(parallel, model, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_gradients_of_a_plain_head_are_clipped_together(ranks: Any, plan: str) -> None:
    ranks(2).run(clip_with_a_head, plan)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.first(x).relu()), y)


def step_in_stages() -> None:
    torch.manual_seed(1)
    model = Loss()
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of(2), outputs="whole", pipeline_stages=2,
                                    micro_batches=2, example_inputs=(X, Y))
    torch.testing.assert_close(parallel.step(X, Y), model(X, Y).detach())


def test_every_rank_of_a_pipeline_gets_the_loss(ranks: Any) -> None:
    ranks(2).run(step_in_stages)


@pytest.mark.parametrize("outputs", ["local", None, 3, ["whole"]])
def test_other_outputs_are_refused(outputs: Any) -> None:
    with pytest.raises(PlanError, match=r"unknown outputs .*; there are \['layout', 'whole'\]"):
        autoparallel.compile(Loss(), 2, outputs=outputs)
