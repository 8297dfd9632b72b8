"""Dataset sharding: the same batches as in one process, of which each rank reads its own samples only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.data import DataLoader, Dataset

import autoparallel
from autoparallel.errors import AutoparallelError
from tests.support.ranks import mesh_of

BATCH = 8


class Numbered(Dataset[dict[str, Tensor]]):
    """Samples that tell by their values which they are; notes which were read."""

    def __init__(self, length: int = 27) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        return {"x": torch.full((6, 4), float(index)), "weight": torch.tensor(index / self.length)}


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)

    def forward(self, weight: Tensor, x: Tensor) -> Tensor:
        return (self.layer(x).square().mean((1, 2)) * weight).sum()


def epochs(pins: dict[str, Any] | None, options: dict[str, Any]) -> tuple[list[float], list[int], int]:
    """Losses of two epochs, which samples this rank read in them, and the loader's length."""
    dataset = Numbered()
    parallel = autoparallel.compile(Weighted(), mesh_of(2, 2), pins=pins, **options)
    loader = parallel.dataloader(dataset, BATCH, shuffle=True, seed=5, drop_last=True)
    dataset.read.clear()
    losses = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            losses.append(float(parallel.step(**batch)))
    return losses, dataset.read, len(loader)


def alone() -> list[float]:
    losses = []
    for epoch in range(2):
        order = torch.randperm(27, generator=torch.Generator().manual_seed(5 + epoch)).tolist()[:24]
        for batch in DataLoader(Numbered(), BATCH, sampler=order):
            losses.append(Weighted()(**batch).item())
    return losses


@pytest.mark.parametrize(("pins", "options", "share"), [
    ({"x": (Shard(0), Shard(0)), "weight": (Shard(0), Shard(0))}, {}, 4),
    ({"x": (Shard(0), Shard(1)), "weight": (Shard(0), Replicate())}, {}, 2),
    ({"x": (Shard(1), Replicate()), "weight": (Shard(0), Replicate())}, {}, 1),
    (None, {"micro_batches": 2}, 1),
])
def test_each_rank_reads_its_part(ranks: Any, pins: dict[str, Any] | None, options: dict[str, Any], share: int) -> None:
    """Samples over both axes; over one, whose shards are cut along the sequence too; not at all; and in turns."""
    found = ranks(4).run(epochs, pins, options)
    for losses, read, length in found:
        assert losses == pytest.approx(alone(), rel=1e-5) and length == 3
        assert len(read) == 2 * 24 // share
    for epoch in range(2):
        half = [read[epoch * len(read) // 2 : (epoch + 1) * len(read) // 2] for _, read, _ in found]
        assert len({index for part in half for index in part}) == 24


def complaints() -> list[str]:
    parallel = autoparallel.compile(Weighted(), mesh_of(4))
    found = []
    for dataset, collate in ((Numbered(5), None), (iter([1]), None), (Numbered(), lambda samples: samples[0])):
        try:
            parallel.dataloader(dataset, BATCH, collate_fn=collate, per_sample=True)
        except AutoparallelError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_loaders_that_cannot_be_sharded_are_refused(ranks: Any) -> None:
    few, stream, collated = ranks(4).run(complaints)[0]
    assert few == "InputError: the dataset has 5 samples, fewer than one batch of 8"
    assert "a stream has one order, and is read whole: leave out per_sample" in stream
    assert "has not one row for each of 8 samples" in collated
