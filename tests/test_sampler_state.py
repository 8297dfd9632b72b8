"""A loader with a user's sampler goes on in the epoch's order, also where the sampler has a generator of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

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
