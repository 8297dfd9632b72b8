"""Loaders of streams, of a sampler's order, and of padded samples: the batches of one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import autoparallel
from autoparallel.errors import AutoparallelError, InputError
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

BATCH, SAMPLES, WIDTH = 4, 22, 3


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).cos().sum(-1).mean()


def sample(number: int) -> dict[str, Tensor]:
    return {"x": torch.full((WIDTH,), 1.0 + number)}


class Numbers(IterableDataset[Any]):
    """``length`` samples; the epoch is added to each."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in range(self.length):
            yield sample(number + 100 * self.epoch)


class Saving:
    """A stream that saves its own position, and counts what is read; no dataset of torch's."""

    def __init__(self) -> None:
        self.at, self.read = 0, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.at < SAMPLES:
            self.at += 1
            self.read += 1
            yield sample(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def expected(epoch: int = 0, drop_last: bool = True) -> list[float]:
    dataset = Numbers()
    dataset.set_epoch(epoch)
    return [Total()(**batch).item() for batch in DataLoader(dataset, BATCH, drop_last=drop_last)]


def streamed(shape: tuple[int, ...], options: dict[str, Any], dataset: Any, drop_last: bool, workers: int
             ) -> tuple[list[float], set[str], int]:
    """Losses of two epochs, what batches are, and the samples read of the second."""
    parallel = autoparallel.compile(Total(), mesh_of(*shape), **options)
    loader = parallel.dataloader(dataset, BATCH, drop_last=drop_last, num_workers=workers)
    losses, kinds = [], set()
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            losses.append(float(parallel.step(**batch)))
            kinds.add(type(batch["x"]).__name__)
    return losses, kinds, loader.state_dict()["samples"]


@pytest.mark.parametrize(("shape", "options", "drop_last", "workers"), [
    slow((2, 2), {}, True, 0), ((4,), {"baseline": "ddp"}, False, 1), ((2,), {"micro_batches": 2}, True, 0)])
def test_every_rank_has_its_shards_of_the_stream(ranks: Any, shape: tuple[int, ...], options: dict[str, Any],
                                                 drop_last: bool, workers: int) -> None:
    both = expected(0, drop_last) + expected(1, drop_last)
    count = 2 if shape == (2,) else 4
    for losses, kinds, samples in ranks(count).run(streamed, shape, options, Numbers(), drop_last, workers):
        assert losses == pytest.approx(both, rel=1e-5)
        assert kinds == {"Tensor" if options.get("micro_batches") else "DTensor"}
        assert samples == (SAMPLES if not drop_last else SAMPLES // BATCH * BATCH)


def resumed(kind: type[Any]) -> tuple[list[float], int]:
    """Losses of an epoch that is left after two batches and gone on with by another loader, and of the next; samples
    that the second stream read in the former."""
    parallel = autoparallel.compile(Total(), mesh_of(2))
    first, dataset = parallel.dataloader(kind(), BATCH), kind()
    losses = []
    for _, batch in zip(range(2), first, strict=False):
        losses.append(float(parallel(**batch)))
    state = first.state_dict()
    second = parallel.dataloader(dataset, BATCH)
    second.load_state_dict(state)
    losses += [float(parallel(**batch)) for batch in second]
    read = getattr(dataset, "read", 0)
    return losses + [float(parallel(**batch)) for batch in second], read


@pytest.mark.parametrize("kind", [Numbers, Saving])
def test_a_run_goes_on_in_the_middle_of_a_stream(ranks: Any, kind: type[Any]) -> None:
    for losses, read in ranks(2).run(resumed, kind):
        assert losses == pytest.approx(expected(drop_last=False) * 2, rel=1e-5)
        assert read == (SAMPLES - 2 * BATCH if kind is Saving else 0), "its own state skips nothing"


class ByRank(IterableDataset[Any]):
    """As of a DDP script: each rank has other samples, or more of them; or one fails."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rank = dist.get_rank()
        for number in range(SAMPLES - (2 * BATCH * rank if self.kind == "shorter" else 0)):
            if self.kind == "failing" and rank and number == 9:
                raise OSError("no such file")
            yield sample(number + (1000 * rank if self.kind == "other" else 0))


def refused(kind: str) -> str:
    parallel = autoparallel.compile(Total(), mesh_of(2))
    try:
        for batch in parallel.dataloader(ByRank(kind), BATCH):
            parallel(**batch)
    except (AutoparallelError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(("kind", "said"), [
    ("other", "at batch 0"), ("shorter", "at batch 3: "), ("failing", "OSError: no such file")])
def test_ranks_that_read_different_streams_are_refused(ranks: Any, kind: str, said: str) -> None:
    for found in ranks(2).run(refused, kind):
        assert found.startswith("InputError: ranks read different streams") and said in found


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return sample(number)


class Drawn:
    """Draws an order from a generator of this rank's own, or from Python's."""

    def __init__(self, own: bool) -> None:
        self.own = own

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        draw = random.Random(dist.get_rank()) if self.own else random
        return iter(draw.sample(range(SAMPLES), 12))


def in_order(own: bool) -> tuple[list[list[float]], list[str]]:
    """The samples of two epochs, the first resumed after a batch; what is said of samplers that cannot be."""
    parallel = autoparallel.compile(Total(), mesh_of(2))
    loader = parallel.dataloader(Rows(), BATCH, sampler=Drawn(own))

    def numbers(batch: Any) -> list[float]:
        return batch["x"].full_tensor()[:, 0].tolist()

    first = [numbers(batch) for batch in loader]
    again = parallel.dataloader(Rows(), BATCH, sampler=Drawn(own))
    batches = iter(again)
    next(batches)
    later = parallel.dataloader(Rows(), BATCH, sampler=Drawn(own))
    later.load_state_dict(again.state_dict())
    assert [numbers(batch) for batch in later] == first[1:]
    loader.set_epoch(1)
    second = [numbers(batch) for batch in loader]
    said = []
    for options in ({"sampler": DistributedSampler(Rows(), 2, 0)}, {"sampler": Drawn(own), "shuffle": True},
                    {"sampler": iter([1, 2])}):
        with pytest.raises(InputError) as error:
            parallel.dataloader(Rows(), BATCH, **options)
        said.append(str(error.value))
    return [list(chain(*first)), list(chain(*second))], said


@pytest.mark.parametrize("own", [True, False])
def test_all_ranks_take_the_first_ranks_order(ranks: Any, own: bool) -> None:
    (epochs, said), (others, _) = ranks(2).run(in_order, own)
    assert epochs == others and all(len(set(epoch)) == 12 for epoch in epochs)
    assert (epochs[0] == epochs[1]) == own, "what draws from Python's generator draws anew in each epoch"
    assert "gives each rank other samples" in said[0] and "leave out shuffle" in said[1] and "has a length" in said[2]


# ------------------------------------------------------------------------------------------------------------ padding


def padded_forms() -> tuple[list[tuple[int, ...]], int]:
    parallel = autoparallel.compile(Total(), mesh_of(2))
    samples = [{"x": torch.ones(length)} for length in (2, 3, 1, 2, 5, 8, 1, 1, 3, 3, 3, 4)]
    loader = parallel.dataloader(samples, BATCH, collate_fn=autoparallel.padded_to((4, 8), x=0.0))
    shapes = []
    for batch in loader:
        parallel(**batch)
        shapes.append(tuple(batch["x"].shape))
    return shapes, len(parallel._state.forms)


def test_few_call_forms_of_many_lengths(ranks: Any) -> None:
    for shapes, forms in ranks(2).run(padded_forms):
        assert shapes == [(4, 4), (4, 8), (4, 4)] and forms == 2


@pytest.mark.parametrize(("lengths", "values", "samples", "said"), [
    ((), {"x": 0}, [], "lengths are"), ((4,), {}, [], "number to pad with"), ((4, 0), {"x": 0}, [], "lengths are"),
    ((4,), {"x": 0}, [{"x": [1] * 5}], "has 5 tokens"), ((4,), {"y": 0}, [{"x": [1]}], "values for \\['y'\\]"),
    ((4,), {"x": 0}, [{"x": [1]}, {"y": [1]}], "different keys")])
def test_data_that_cannot_be_padded_is_refused(lengths: Any, values: Any, samples: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        autoparallel.padded_to(lengths, **values)(samples)


def test_padding_keeps_dtypes_and_stacks_the_rest() -> None:
    collate = autoparallel.padded_to((2, 4), x=-1)
    batch = collate([{"x": torch.ones(3, 2, dtype=torch.int32), "label": 1}, {"x": torch.ones(1, 2, dtype=torch.int32),
                                                                           "label": 2}])
    assert batch["x"].dtype is torch.int32 and batch["x"].shape == (2, 4, 2) and batch["label"].tolist() == [1, 2]
    assert batch["x"][1, 1:].unique().tolist() == [-1]
