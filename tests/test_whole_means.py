"""Losses, norms and answers of DTensors on a parallel module's mesh are those of the whole, and so are gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import autoparallel
from tests.support.ranks import mesh_of
from tests.support.reference import gathered, gradients_of

X, Y = torch.linspace(-2, 2, 35).view(5, 7).cos() * 3, torch.linspace(1, 4, 35).view(5, 7).sin()
CLASSES, WEIGHT = torch.tensor([3, -100, -100, 0, 6]), torch.linspace(0.1, 5, 7)

Losses = dict[str, Callable[[Any, Any, Any, Any], Any]]
LOSSES: Losses = {
    "mse": lambda x, y, c, w: F.mse_loss(x, y), "huber": lambda x, y, c, w: F.huber_loss(x, y, delta=0.4),
    "smooth": lambda x, y, c, w: F.smooth_l1_loss(x, y, beta=0.3) * 2, "mse root": lambda x, y, c, w:
        F.mse_loss(x, y).sqrt(), "summed": lambda x, y, c, w: F.mse_loss(x, y, reduction="sum"),
    "bce": lambda x, y, c, w: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), weight=y.abs()),
    "logits": lambda x, y, c, w: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=w),
    "margin": lambda x, y, c, w: F.soft_margin_loss(x, y.sign()),
    "classes": lambda x, y, c, w: F.cross_entropy(x, c), "weighted": lambda x, y, c, w: F.cross_entropy(x, c, w),
    "nll": lambda x, y, c, w: F.nll_loss(x.log_softmax(1), c.abs() % 7, w),
    "cosine": lambda x, y, c, w: F.cosine_embedding_loss(x, y, c.sign()),
}
SUMS: Losses = {
    "norms": lambda x, y, c, w: x.norm(dim=0).sum() + x.norm(dim=1).sum(),
    "any": lambda x, y, c, w: (x > 1).any(1).sum(), "any of a column": lambda x, y, c, w: (x > 1).any(0).sum(),
    "share": lambda x, y, c, w: (x > 1).any(1).float().mean() + (x > 1).any(0).float().mean(),
    "filled": lambda x, y, c, w: x.sum(0).fill_(1.5),
}


def net() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def compare_on_shards(dim: int) -> None:
    """Forward and, of losses, gradient, on shards that are unequal."""
    mesh = autoparallel.compile(net(), mesh_of(2), example_inputs=(X,)).mesh

    def shards(value: Tensor) -> Any:
        return distribute_tensor(value, mesh, [Shard(min(dim, value.dim() - 1))], src_data_rank=None)

    for name, function in {**LOSSES, **SUMS}.items():
        ours, expected = shards(X).requires_grad_(), X.clone().requires_grad_()
        found, one = function(ours, shards(Y), shards(CLASSES), shards(WEIGHT)), function(expected, Y, CLASSES, WEIGHT)
        torch.testing.assert_close(whole(found), one, msg=lambda text, name=name: f"{name}: {text}")
        if name in LOSSES:
            found.backward()
            one.backward()
            torch.testing.assert_close(whole(ours.grad), expected.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dim", [0, 1])
def test_losses_and_sums_are_those_of_the_whole(ranks: Any, dim: int) -> None:
    """torch divides their gradients by the elements of a shard, and averages means of unequal shards."""
    ranks(2).run(compare_on_shards, dim)


def train_on_outputs() -> None:
    """A loss outside of the model, of sharded outputs and a sharded batch: of rows that divide, and that do not."""
    model, parallel = net(), autoparallel.compile(net(), mesh_of(2), baseline="ddp", example_inputs=(X,))
    for rows in (4, 5):
        model.zero_grad()
        parallel.zero_grad()
        (batch,) = parallel.shard_batch((X[:rows],))
        assert batch.shape == (rows, 7)
        output = parallel(batch)
        assert isinstance(output, DTensor) and output.placements == (Shard(0),)
        F.mse_loss(output, distribute_tensor(Y[:rows], output.device_mesh, output.placements)).backward()
        F.mse_loss(model(X[:rows]), Y[:rows]).backward()
        expected = gradients_of(model)
        for name, gradient in gathered((n, p.grad) for n, p in parallel.named_parameters()).items():
            torch.testing.assert_close(gradient, expected[name])


def test_a_loss_of_sharded_outputs_trains_as_in_one_process(ranks: Any) -> None:
    ranks(2).run(train_on_outputs)
