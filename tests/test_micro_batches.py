"""Models that treat samples apart are split into micro-batches: sums added to the loss, attention of flattened rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoparallel
from autoparallel.capture import capture
from autoparallel.errors import InfeasibleError, InputError
from autoparallel.partition import split_batch
from tests.support.messages import says
from tests.support.ranks import mesh_of
from tests.support.reference import SEED, gradients_of


class Penalised(nn.Module):
    """A loss to which weights, a number and a learnt scale are added."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = 1 - nn.functional.cosine_similarity(self.last(self.first(x).tanh()), x, dim=-1).mean()
        return loss * self.scale[0].exp() + self.scale.sum() + 0.01 * sum(p.square().sum() for p in self.parameters())


def penalised(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(SEED)
    model, x = Penalised(), torch.randn(8, 6)
    if not options:
        (loss := model(x)).backward()
        return {**gradients_of(model), "loss": loss.detach()}
    parallel = autoparallel.compile(model, mesh_of(2), example_inputs=(x,), **options)
    loss = parallel.step(x)
    return {**gradients_of(parallel), "loss": loss}


@pytest.mark.parametrize("options", [{"micro_batches": 4}, {"micro_batches": 2, "zero_stage": 3},
                                     {"micro_batches": 2, "pipeline_stages": 2}], ids=str)
def test_each_micro_batch_adds_its_share_of_what_all_have(ranks: Any, options: dict[str, Any]) -> None:
    expected = penalised({})
    for found in ranks(2).run(penalised, options):
        assert found.keys() == expected.keys() if "pipeline_stages" not in options else "loss" in found
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name])


def test_attention_that_flattens_tokens_before_the_batch_is_split() -> None:
    """As torch.nn.MultiheadAttention does, unless it gives no weights."""
    class Attends(nn.MultiheadAttention):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x, x, x)[0].square().mean()

    micro = split_batch(capture(Attends(12, 2, batch_first=True), (torch.randn(8, 5, 12),)), 2)
    assert [node.outputs[0].shape for node in micro.body.of_kind("input")] == [(4, 5, 12)]


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean().sqrt()


def test_losses_that_are_no_sums_and_empty_batches_are_told() -> None:
    says(InfeasibleError, "a loss that is a mean or sum over samples (not a root,",
         of=lambda: split_batch(capture(Root(), (torch.zeros(4, 4),)), 2))
    says(InputError, "2 micro-batches of an empty batch", "or give micro_batches=1",
         of=lambda: split_batch(capture(Root(), (torch.zeros(0, 4),)), 2))


def test_batch_norm_in_training_is_named() -> None:
    """Not what its mean is computed by, nor the loss."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 10), Mean())
    with pytest.raises(InfeasibleError, match=r"batch norm in training mode .*: 1\. Use micro_batches=1"):
        split_batch(capture(model, (torch.randn(16, 3, 8, 8),), {}), 2)
    split_batch(capture(model.eval(), (torch.randn(16, 3, 8, 8),), {}), 2)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), Mean()).eval()
    with pytest.raises(InfeasibleError, match=r"batch norm takes the mean .*: 1\. Use micro_batches=1, or group norm$"):
        split_batch(capture(model, (torch.randn(16, 4),), {}), 2)
    with pytest.raises(InfeasibleError, match=r"group norm$"):    # no search for what fits in memory says more
        autoparallel.plan(model, "h100-sxm", example_inputs=(torch.randn(16, 4),), mesh_shape=(8,), micro_batches=2)


class Rolled(Root):
    """A penalty of weights is added to the loss, each micro-batch's share of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x) * self.linear.weight.sum()
        return (h + h.roll(1, 0)).tanh().mean() + self.linear.weight.square().sum()


def test_the_op_that_reads_other_samples_is_named() -> None:
    """Not the first that is not linear after it, to which shares of the weights' products could be handed."""
    said = says(InfeasibleError, "computes across its samples: roll",
                of=lambda: split_batch(capture(Rolled(), (torch.zeros(4, 4),)), 2))
    assert "tanh_default" not in said.split("File")[0]


class Bags(nn.Module):
    """A recommender's table; ``dense`` comes first, so that the batch is known from it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.EmbeddingBag(32, 4, mode="mean", padding_idx=0), nn.Linear(4, 1)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        return (self.linear(self.table(ids, offsets)) * dense).square().mean()


@pytest.mark.parametrize("ids", [24, 8])
def test_bags_by_offsets_are_named(ids: int) -> None:
    """Not the loss, of which nothing is wrong; with as many ids as bags, too."""
    call = torch.zeros(8, 1), torch.arange(ids), torch.arange(8) * (ids // 8)
    says(InfeasibleError, "EmbeddingBag with offsets are one list", "embedding_bag", "Give it 2-d ids",
         of=lambda: split_batch(capture(Bags(), call), 2))
    padded = call[1].view(8, -1)
    assert split_batch(capture(Bags(), (call[0], padded)), 2).count == 2


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()
