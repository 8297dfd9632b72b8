"""Loaders of scripts of other libraries: a batch read ahead, to compile for, and batches joined for all ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from autoparallel.errors import InputError
from autoparallel.integrations.batches import first_batches, joined_loader


class Rows(Dataset[torch.Tensor]):
    """Ten rows: the number of the sample, and what ``draw`` gives."""

    def __init__(self, draw: Any) -> None:
        self.draws = [draw]

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), self.draws[0]()])


class Drawn:
    """A number of a generator of its own, made at its first use."""

    def __init__(self, make: Any, draw: str) -> None:
        self.make, self.name, self.generator = make, draw, None

    def __call__(self) -> float:
        self.generator = self.generator or self.make()
        return float(getattr(self.generator, self.name)())


class Masked:
    """A collator that draws from a torch generator of its own, as transformers' for masked language models."""

    generator = None

    def __call__(self, rows: list[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(3)
        return torch.stack(rows) * scale + torch.rand(1, generator=self.generator)


def _none() -> float:
    return 0.0


def _loaders() -> dict[str, Any]:
    return {
        "torch": lambda: DataLoader(Rows(lambda: float(torch.rand(()))), 4, shuffle=True),
        "python": lambda: DataLoader(Rows(random.random), 4),
        "numpy": lambda: DataLoader(Rows(np.random.random), 4),
        "order by a generator": lambda: DataLoader(Rows(_none), 4, shuffle=True, generator=torch.Generator()),
        "python's own": lambda: DataLoader(Rows(Drawn(lambda: random.Random(1), "random")), 4),
        "numpy's own": lambda: DataLoader(Subset(Rows(Drawn(lambda: np.random.default_rng(1), "random")), range(9)), 4),
        "numpy's old": lambda: DataLoader(Rows(Drawn(lambda: np.random.RandomState(1), "rand")), 4),
        "a collator's own": lambda: DataLoader(Rows(_none), 4, collate_fn=Masked()),
        "a partial collator's": lambda: DataLoader(Rows(_none), 4, collate_fn=partial(Masked(), scale=2.0)),
        "a method's": lambda: DataLoader(Rows(_none), 4, collate_fn=Masked().__call__),
    }


@pytest.mark.parametrize("kind", _loaders())
@pytest.mark.parametrize("begun", [False, True], ids=["new", "in its second epoch"])
def test_the_first_batch_is_read_beside_the_loader(kind: str, begun: bool) -> None:
    def batches(ahead: int) -> list[torch.Tensor]:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        loader = _loaders()[kind]()
        before = list(loader) if begun else []
        read = first_batches(loader, ahead)
        found = [*before, *loader]
        assert [batch.shape for batch in read] == [batch.shape for batch in found[len(before):][:ahead]]
        return found

    assert all(torch.equal(a, b) for a, b in zip(batches(2), batches(0), strict=True))


class Stream(IterableDataset[torch.Tensor]):
    """Ten rows; ``once``: of one generator."""

    def __init__(self, once: bool) -> None:
        self.rows = self._made() if once else None

    def _made(self) -> Iterator[torch.Tensor]:
        return (torch.full((2,), float(n)) for n in range(10))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self._made() if self.rows is None else self.rows


def test_a_stream_that_can_be_read_once_only_is_refused() -> None:
    loader = DataLoader(Stream(once=False), 4)
    assert torch.equal(first_batches(loader, 1)[0], next(iter(loader)))
    with pytest.raises(InputError, match="the stream Stream can be read once only"):
        first_batches(DataLoader(Stream(once=True), 4), 1)


def test_joined_batches_of_like_lengths_are_those_of_one_process() -> None:
    """transformers' sampler sorts by length within so many batches."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    lengths = [int(n) for n in torch.randint(1, 30, (44,), generator=torch.Generator().manual_seed(0))]

    def batches(size: int, count: int) -> list[list[int]]:
        sampler = LengthGroupedSampler(size, lengths=lengths, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(range(44), size, sampler=sampler)  # type: ignore[arg-type]
        return [batch.tolist() for batch in joined_loader(loader, count)]

    assert batches(2, 4) == batches(8, 1)
