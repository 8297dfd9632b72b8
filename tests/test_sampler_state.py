"""A loader goes on in its sampler's order and with its random numbers, also where sampler, dataset or collator have
generators of their own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, RandomSampler, Sampler

import autoparallel
from autoparallel.errors import InputError
from tests.support.ranks import mesh_of


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


class OfItsOwn(Sampler[int]):
    """Draws from a generator that nobody can save."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(10), 10))


def seen(batches: Any) -> list[list[float]]:
    return [batch.full_tensor()[:, 0].tolist() for batch in batches]


def compiled(mesh: Any) -> Any:
    return autoparallel.compile(nn.Linear(4, 4), mesh, example_inputs=(torch.ones(2, 4),), baseline="ddp")


def goes_on(passes: int, taken: int, sets_epoch: bool) -> None:
    parallel = compiled(mesh_of(2))

    def loader() -> Any:
        sampler = RandomSampler(Numbers(), generator=torch.Generator().manual_seed(3))
        return parallel.dataloader(Numbers(), 2, sampler=sampler)

    def epochs(made: Any, first: int) -> list[list[float]]:
        batches = []
        for epoch in range(first, 3):
            if sets_epoch:
                made.set_epoch(epoch)
            batches += seen(made)
        return batches

    whole, broken, again = epochs(loader(), 0), loader(), loader()
    for epoch in range(passes + 1):
        if sets_epoch:
            broken.set_epoch(epoch)
        for number, _ in enumerate(broken, start=1):
            if (epoch, number) == (passes, taken):
                break
    again.load_state_dict(broken.state_dict())
    assert epochs(again, passes) == whole[passes * 5 + taken :]


@pytest.mark.ranks
@pytest.mark.parametrize("sets_epoch", [False, True])
def test_a_samplers_generator_goes_on(ranks: Any, sets_epoch: bool) -> None:
    for passes, taken in ((0, 2), (1, 3), (1, 5)):
        ranks(2).run(goes_on, passes, taken, sets_epoch)


def test_another_order_than_the_one_begun_is_refused(mesh_of_one: Any) -> None:
    parallel = compiled(mesh_of_one)
    loader, again = (parallel.dataloader(Numbers(), 2, sampler=OfItsOwn()) for _ in range(2))
    seen(loader)
    next(iter(loader))
    again.load_state_dict(loader.state_dict())
    with pytest.raises(InputError, match="the sampler gives another order than in the epoch that is to go on"):
        next(iter(again))


class Noisy(Dataset[Tensor]):
    """Samples with a number of a generator of the dataset's own."""

    def __init__(self) -> None:
        self.transforms = [np.random.default_rng(0)]

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), index + self.transforms[0].random() / 2)


class Masking:
    """A collator that masks by a generator of its own, made at its first use."""

    generator: torch.Generator | None = None

    def __call__(self, samples: list[Tensor]) -> Tensor:
        self.generator = self.generator or torch.Generator().manual_seed(3)
        return torch.stack(samples) + torch.rand(len(samples), 1, generator=self.generator) / 2


def masking() -> Any:
    own = random.Random(4)
    return lambda samples: torch.stack(samples) + own.random() / 2


def scaled(samples: list[Tensor], own: np.random.RandomState) -> Tensor:
    return torch.stack(samples) + own.rand() / 2


def test_generators_of_datasets_and_collators_go_on(mesh_of_one: Any) -> None:
    """Each run has the numbers of a run without a break; batches and epochs have other ones."""
    parallel = compiled(mesh_of_one)
    makers: list[Any] = [lambda: (Noisy(), None), lambda: (Numbers(), Masking()), lambda: (Numbers(), masking()),
                         lambda: (Numbers(), partial(scaled, own=np.random.RandomState(2)))]
    for make in makers:
        loaders = []
        for _ in range(3):
            dataset, collate = make()
            loaders.append(parallel.dataloader(dataset, 2, collate_fn=collate))
        whole, broken, again = loaders
        first = seen(whole)
        assert len({round(row - int(row), 9) for batch in first for row in batch}) > 3
        whole.set_epoch(1)
        second = seen(whole)
        assert first != second
        broken.set_epoch(1)
        for number, _ in enumerate(broken, start=1):
            if number == 2:
                break
        again.load_state_dict(broken.state_dict())
        assert seen(again) == second[2:]
