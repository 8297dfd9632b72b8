"""Values that are the same in every call: rows of constant masks are of a known number, and numbers may be read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import autoparallel
from autoparallel.capture import Ref, capture
from autoparallel.errors import CaptureError
from autoparallel.runtime.interpret import values_of
from tests.support.ranks import mesh_of
from tests.support.reference import gathered, gradients_of

ROWS, WIDTH = 8, 6


class Model(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.arange(WIDTH) != 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def simclr(m: Any, x: Tensor) -> Tensor:
    """As the contrastive loss of many repositories is written."""
    features = F.normalize(m.layer(x), dim=1)
    labels = torch.cat([torch.arange(ROWS // 2) for _ in range(2)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    similar = torch.matmul(features, features.T)
    mask = torch.eye(labels.shape[0], dtype=torch.bool)
    labels = labels[~mask].view(labels.shape[0], -1)
    similar = similar[~mask].view(similar.shape[0], -1)
    positives = similar[labels.bool()].view(labels.shape[0], -1)
    negatives = similar[~labels.bool()].view(similar.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1) / 0.07
    return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


def pairs(m: Any, x: Tensor) -> Tensor:
    z = m.layer(x)
    left, right = torch.where(torch.ones(ROWS, ROWS).triu(1) > 0)
    return (z[left] * z[right]).sum(-1).sort()[0][:3].sum()


def columns(m: Any, x: Tensor) -> Tensor:
    mask = torch.ones(WIDTH, dtype=torch.bool)
    mask[1] = False
    return m.layer(x)[:, mask].view(ROWS, WIDTH - 1).prod(-1).sum()


def beside_another(m: Any, x: Tensor) -> Tensor:
    return (m.layer(x)[torch.arange(ROWS) % 2 == 0, torch.arange(ROWS // 2)] ** 2).sum()


def dims_in_a_list(m: Any, x: Tensor) -> Tensor:
    """As MONAI's losses name the dims of an image."""
    x = m.layer(x)[..., None]
    dims = torch.arange(1, len(x.shape)).tolist()
    rates = [rate.item() for rate in torch.linspace(0, 0.3, 3)]
    return (x.sum(dim=dims) * rates[1] + int(torch.ones(3).sum())).square().sum()


def settled_branch(m: Any, x: Tensor) -> Tensor:
    steps = torch.linspace(0, 1, 5)
    return m.layer(x).sum() * (2 if bool((steps[1:] > steps[:-1]).all()) else 3)


@pytest.mark.parametrize("function", [simclr, pairs, columns, beside_another, dims_in_a_list, settled_branch])
def test_masks_of_no_input_are_constants(function: Any) -> None:
    torch.manual_seed(0)
    model = Model(function)
    graph = capture(model, (torch.randn(ROWS, WIDTH),))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constant_tensors}
    x = torch.randn(ROWS, WIDTH)
    known = {Ref(n.index): x for n in graph.of_kind("input")}
    known |= {Ref(n.index): state[n.path] for kind in ("parameter", "buffer") for n in graph.of_kind(kind)}
    made = values_of(graph, graph.outputs, known, torch.device("cpu"))[graph.outputs[0]]
    torch.testing.assert_close(made, model(x))
    parameters = list(model.parameters())
    for ours, theirs in zip(torch.autograd.grad(made, parameters), torch.autograd.grad(model(x), parameters),
                            strict=True):
        torch.testing.assert_close(ours, theirs)


def of_an_input(m: Any, x: Tensor) -> Tensor:
    mask = torch.ones(WIDTH, dtype=torch.bool)
    mask[1] = x[0, 0] > 0
    return m.layer(x)[:, mask].view(ROWS, -1).prod(-1).sum()


def written_through_a_view(m: Any, x: Tensor) -> Tensor:
    mask = torch.zeros(WIDTH)
    part = mask[1:]
    part.copy_(x[0, 1:])
    return m.layer(x)[:, mask > 0].view(ROWS, -1).prod(-1).sum()


def drawn(m: Any, x: Tensor) -> Tensor:
    return m.layer(x)[:, torch.rand(WIDTH) > 0.5].view(ROWS, -1).prod(-1).sum()


def buffer(m: Any, x: Tensor) -> Tensor:
    """Which a state dict may change."""
    return m.layer(x)[:, m.kept].view(ROWS, -1).prod(-1).sum()


@pytest.mark.parametrize("function", [of_an_input, written_through_a_view, drawn, buffer])
def test_masks_of_the_call_are_not(function: Any) -> None:
    with pytest.raises(CaptureError, match="the data say in another shape"):
        capture(Model(function), (torch.ones(ROWS, WIDTH),))


def on_ranks() -> float:
    """The largest error of the loss and of gradients on two ranks."""
    torch.manual_seed(0)
    model = Model(simclr).double()
    parallel = autoparallel.compile(copy.deepcopy(model), mesh_of(2), baseline="ddp")
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    expected, found = model(x), parallel(x)
    expected.backward()
    found.backward()
    made = {**gathered([("loss", found)]), **gradients_of(parallel)}
    wanted = {**gathered([("loss", expected)]), **gradients_of(model)}
    assert made.keys() == wanted.keys()
    return max(float((made[name] - wanted[name]).abs().max()) for name in wanted)


@pytest.mark.ranks
def test_the_contrastive_loss_on_ranks(ranks: Any) -> None:
    assert max(ranks(2).run(on_ranks, timeout_s=100)) < 1e-12
