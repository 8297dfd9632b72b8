"""Loaders whose functions look across the batch, draw random numbers, or a short last batch: as in one process."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

import autoparallel
from autoparallel.errors import AutoparallelError, InputError, PeerError
from autoparallel.runtime import failing, inputs
from autoparallel.runtime.batches import tell_of_rest
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

BATCH = 8
LENGTHS = [3, 7, 2, 5, 4, 8, 6, 3, 5, 2, 4, 5, 3, 3, 2, 4]


class Lines(Dataset[Tensor]):
    """Rows of numbers of different lengths."""

    def __init__(self, length: int = 24) -> None:
        self.length, self.read = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        return torch.full((LENGTHS[index % 16],), 1.0 + index)


def padded(samples: list[Tensor]) -> dict[str, Tensor]:
    """To the longest; ``top`` is the largest of the batch."""
    x = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"x": x, "top": x.amax()}


def cut(samples: list[Tensor]) -> dict[str, Tensor]:
    """Each sample alone."""
    return {"x": torch.stack([sample[:2] for sample in samples])}


def late_only(samples: list[Tensor]) -> dict[str, Tensor]:
    """The same, but for a batch that ends with an odd sample: what the first rank reads ends with an even one."""
    return {"x": cut(samples)["x"] + (1 if samples[-1][0] == 8 else 0)}


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, top: Tensor | None = None) -> Tensor:
        found = (x * self.scale).cos().sum(-1) + x.shape[-1]
        return (found if top is None else found / top).mean()


PINS = {"x": (Shard(0), Replicate())}


def padded_losses(shape: tuple[int, ...], options: dict[str, Any], workers: int) -> tuple[list[float], list[str]]:
    parallel = autoparallel.compile(Total(), mesh_of(*shape), **options)
    losses, kinds = [], []
    for batch in parallel.dataloader(Lines(), BATCH, collate_fn=padded, num_workers=workers, shuffle=True, seed=1):
        losses.append(float(parallel.step(**batch)))
        kinds += [type(value).__name__ for value in batch.values()]
    return losses, kinds


@pytest.mark.parametrize(("shape", "options", "workers"), [
    ((2, 2), {"pins": PINS}, 0), ((2, 2), {"pins": {"x": (Shard(1), Shard(0))}}, 1), ((2,), {"micro_batches": 2}, 0),
    ((2, 2), {"pins": PINS, "inputs": "local"}, 0), ((2,), {"micro_batches": 2, "inputs": "local"}, 0),
    ((2,), {"micro_batches": 2, "pipeline_stages": 2, "inputs": "local"}, 0),
])
def test_a_collate_fn_may_look_across_the_batch(ranks: Any, shape: tuple[int, ...], options: dict[str, Any],
                                                workers: int) -> None:
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1)).tolist()
    batches = list(DataLoader(Lines(), BATCH, sampler=order, collate_fn=padded))
    assert len({batch["x"].shape for batch in batches}) > 1, "batches have different lengths"
    expected = [Total()(**batch).item() for batch in batches]
    for losses, kinds in ranks(2 * len(shape)).run(padded_losses, shape, options, workers, timeout_s=100):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert set(kinds) == {"Tensor"} if options.keys() == {"micro_batches"} else "DTensor" in kinds


def promised(collate: Any, workers: int) -> tuple[str, list[float], list[int]]:
    """What is told of a function that is said to treat each sample alone."""
    dataset, losses = Lines(), []
    parallel = autoparallel.compile(Total(), mesh_of(2, 2), pins=PINS)
    try:
        loader = parallel.dataloader(dataset, BATCH, collate_fn=collate, per_sample=True, num_workers=workers)
        dataset.read.clear()
        losses = [float(parallel.step(**batch)) for batch in loader]
    except AutoparallelError as error:
        return f"{type(error).__name__}: {error}", losses, dataset.read
    return "no error", losses, dataset.read


def test_functions_that_keep_the_promise_read_their_rows_only(ranks: Any) -> None:
    expected = [Total()(**batch).item() for batch in DataLoader(Lines(), BATCH, collate_fn=cut)]
    for rank, (told, losses, read) in enumerate(ranks(4).run(promised, cut, 0)):
        assert told == "no error" and losses == pytest.approx(expected, rel=1e-5)
        first = 4 * (rank // 2)
        mine = [batch + row for batch in (0, 8, 16) for row in range(first, first + 4)]
        assert read == mine[:4] + list(range(8)) + mine[4:], "and the whole first batch, to check"


@pytest.mark.parametrize("workers", [0, 1])
def test_functions_that_break_the_promise_are_refused_by_name(ranks: Any, workers: int) -> None:
    """On all ranks, also where one alone could see it: rows 4 to 7 end as the whole batch does."""
    for told, losses, _ in ranks(4).run(promised, late_only, workers):
        assert told.startswith("InputError: collate_fn late_only does not treat each sample alone") and not losses
        assert "['x'] has other values of some of a batch's samples than of all (on ranks [0, 1])" in told
        assert "Leave out per_sample" in told


def test_samples_of_other_shapes_than_the_batch_s_are_refused(ranks: Any) -> None:
    for told, *_ in ranks(4).run(promised, ragged, 0):
        assert "has shape [4, 7] of 4 samples, and [8, 8] of all" in told and "on ranks [0, 1])" in told


def ragged(samples: list[Tensor]) -> dict[str, Tensor]:
    return {"x": padded(samples)["x"]}


def short_ones(shape: tuple[int, ...], options: dict[str, Any], collate: Any) -> tuple[list[float], int, list[Any]]:
    dataset = Lines(19)
    parallel = autoparallel.compile(Total(), mesh_of(*shape), **options)
    loader = parallel.dataloader(dataset, BATCH, collate_fn=collate, per_sample=collate is cut)
    losses, shapes = [], []
    for _ in range(2):
        for batch in loader:
            losses.append(float(parallel.step(**batch)))
            shapes.append((len(batch["x"]), len(batch["x"].to_local())))
    return losses, len(loader), shapes


@pytest.mark.parametrize(("shape", "options", "collate"), [
    ((4,), {"baseline": "ddp"}, cut), ((2, 2), {"baseline": "ddp"}, padded), ((2, 2), {"pins": PINS}, cut)])
def test_the_short_last_batch_is_a_batch(ranks: Any, shape: tuple[int, ...], options: dict[str, Any], collate: Any
                                        ) -> None:
    """Three samples, of which a rank of four has none; left out only if drop_last=True says so, as torch does."""
    expected = [Total()(**batch).item() for batch in DataLoader(Lines(19), BATCH, collate_fn=collate)]
    found = ranks(4).run(short_ones, shape, options, collate, timeout_s=100)
    for losses, length, rows in found:
        assert losses == pytest.approx(2 * expected, rel=1e-5) and length == 3 == len(expected)
        assert [whole for whole, _ in rows] == [8, 8, 3] * 2
    if options == {"baseline": "ddp"}:
        assert [rows[2][1] for *_, rows in found] == [1, 1, 1, 0]


def test_a_last_batch_that_micro_batches_do_not_divide_is_told_before(caplog: pytest.LogCaptureFixture) -> None:
    tell_of_rest(Lines(19), 8, 2)
    [told] = caplog.messages
    assert told.startswith("the last batch has 3 samples, which step's 2 micro-batches do not divide")
    assert told.endswith("parallel.dataloader(..., drop_last=True) leaves it out")
    tell_of_rest(Lines(20), 8, 2)
    tell_of_rest(iter(Lines(19)), 8, 2)  # of a length that is not known
    assert len(caplog.messages) == 1


class Noisy(Dataset[dict[str, Tensor]]):
    """Samples with noise from all that people draw from."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = torch.rand(4) + float(numpy.random.rand()) + random.random()
        return {"x": index + noise, "weight": noise[:1]}


class NoisyTogether(Noisy):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        noise = float(torch.rand(()))
        return [{"x": torch.full((4,), index + noise), "weight": torch.full((1,), noise)} for index in indices]


def masked(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = default_collate(samples)
    return {**batch, "x": batch["x"] * torch.rand(len(samples), 1)}


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, weight: Tensor, x: Tensor) -> Tensor:
        return (x * weight * self.scale).sum()


def noisy_batches(shape: tuple[int, ...], kind: type[Noisy], options: dict[str, Any]) -> tuple[list[Any], float]:
    """The whole batches of two epochs, whether replicas hold the same, and a random number of the user's own."""
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    pins = {"x": Shard(0), "weight": Replicate()} if len(shape) == 1 else \
        {"x": (Shard(0), Shard(0)), "weight": (Shard(0), Replicate())}
    parallel = autoparallel.compile(Weighted(), mesh_of(*shape), pins=pins)
    loader, found = parallel.dataloader(kind(), BATCH, shuffle=True, seed=2, **options), []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            for name, value in batch.items():
                assert isinstance(value, DTensor)
                everywhere = [torch.zeros_like(value.to_local()) for _ in range(dist.get_world_size())]
                dist.all_gather(everywhere, value.to_local()) if name == "weight" else None
                assert name == "x" or any(torch.equal(other, value.to_local()) for rank, other in enumerate(everywhere)
                                          if rank != dist.get_rank())
            found.append({name: value.full_tensor() for name, value in batch.items()})
    torch.manual_seed(dist.get_rank())
    return found, float(torch.rand(()))


@pytest.mark.parametrize("collate", [slow(None), masked])
def test_random_samples_are_the_same_on_every_mesh(ranks: Any, collate: Any) -> None:
    """Ranks that hold the same rows drew other numbers for them; now a sample's depend on seed, epoch and sample."""
    options = {"collate_fn": collate}
    first = ranks(4).run(noisy_batches, (2, 2), Noisy, options)
    by_workers = ranks(2).run(noisy_batches, (2,), Noisy, {**options, "num_workers": 2}, timeout_s=200)
    for batches, _ in (*first, *by_workers, *ranks(2).run(noisy_batches, (2,), Noisy, options)):
        assert all(torch.equal(batch[name], expected[name])
                   for batch, expected in zip(batches, first[0][0], strict=True) for name in batch)
    values = torch.cat([batch["weight"] for batch in first[0][0]])
    assert len(values.unique()) == 32, "each sample of each epoch has its own"
    together = ranks(4).run(noisy_batches, (2, 2), NoisyTogether, options)
    assert all(torch.equal(batch["x"], other["x"]) for batches, _ in together
               for batch, other in zip(batches, together[0][0], strict=True))


class Worker(Noisy):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        info = get_worker_info()
        assert info is not None and type(info.dataset) is Worker
        return {"x": torch.full((4,), float(info.dataset.opened)), "weight": torch.ones(1)}  # type: ignore[attr-defined]


def opened(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.opened = 3 + worker  # type: ignore[attr-defined]


def with_workers() -> float:
    parallel = autoparallel.compile(Weighted(), mesh_of(2), example_kwargs={"x": torch.ones(BATCH, 4),
                                                                            "weight": torch.ones(BATCH, 1)})
    dataset = Worker()
    Worker.__getitem__, kept = Noisy.__getitem__, Worker.__getitem__  # type: ignore[method-assign]
    loader = parallel.dataloader(dataset, BATCH, num_workers=1, worker_init_fn=opened, persistent_workers=True)
    Worker.__getitem__ = kept  # type: ignore[method-assign]
    return sum(float(parallel(**batch).detach()) for _ in range(2) for batch in loader)


def test_workers_know_the_users_dataset(ranks: Any) -> None:
    assert ranks(2).run(with_workers) == [4 * 3 * 4 * BATCH] * 2


class Features(Dataset[Tensor]):
    """What a parallel module makes of each sample, asked in the worker."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return self.model(torch.ones(1, 4))  # type: ignore[no-any-return]


def called_in_a_worker() -> None:
    parallel = autoparallel.compile(nn.Linear(4, 4), mesh_of(2), example_inputs=(torch.ones(1, 4),))
    with pytest.raises(InputError, match="called in another process than the one that compiled it"):
        list(DataLoader(Features(parallel), num_workers=1, multiprocessing_context="fork"))
    parallel(torch.ones(1, 4))


def test_a_call_in_a_worker_is_refused(ranks: Any) -> None:
    """(It waited for ranks that do not answer a worker.)"""
    ranks(2).run(called_in_a_worker)


def complaints() -> list[str]:
    parallel = autoparallel.compile(Total(), mesh_of(2), pins={"x": Shard(0)})
    found = []

    def told(**options: Any) -> None:
        try:
            loader = parallel.dataloader(Lines(), BATCH, **{"collate_fn": cut, **options})
            if dist.get_rank() == 1 and options.get("seed") == 0:
                loader.set_epoch(1)
            found.append(f"no error: {len(list(loader))}")
        except AutoparallelError as error:
            found.append(f"{type(error).__name__}: {error}")

    for options in ({"shuffle": "yes"}, {"seed": 0.5}, {"drop_last": None}, {"collate_fn": 3}, {"per_sample": 1},
                    {"generator": torch.Generator()}, {"in_order": False}, {"sampler": [0]}, {"batch_sampler": [[0]]},
                    {"wrong": 1}, {"prefetch_factor": 0}, {"seed": dist.get_rank() + 1}, {"seed": 0},
                    {"in_order": True, "generator": None, "pin_memory": False}):
        told(**options)
    return found


def test_options_that_cannot_be_are_refused(ranks: Any) -> None:
    for found in ranks(2).run(complaints):
        shuffle, seed, last, collate, alone, generator, order, sampler, batches, *found = found
        wrong, factor, seeds, epochs, fine = found
        assert shuffle.startswith("InputError: shuffle is 'yes'") and "seed is 0.5" in seed
        assert "drop_last is None" in last and "collate_fn is 3" in collate and "per_sample is 1" in alone
        assert "generator is not for this loader" in generator and "give seed" in generator
        assert "in_order is not for this loader" in order
        assert "the sampler has 1 samples, fewer than one batch" in sampler
        assert "batch_sampler is not for this loader" in batches and "wrong" in wrong and "prefetch_factor" in factor
        assert "InputError: ranks read different data: epoch 0, seed 1, from sample 0" in seeds
        assert "(on ranks [1])" in seeds and "epoch 1, seed 0, from sample 0" in epochs and "set_epoch" in epochs
        assert fine == "no error: 3"


class Images(Dataset[dict[str, Any]]):
    """Images of 7 x 8 and their classes. ``read`` counts elements of images; ``wrong``: parts have other values."""

    def __init__(self, wrong: bool = False) -> None:
        self.read, self.wrong = 0, wrong

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.part(index, {"x": (slice(None),) * 3, "label": None}, wrong=False)

    def part(self, index: int, slices: dict[str, Any], wrong: bool | None = None) -> dict[str, Any]:
        assert slices["label"] is None
        image = (index + torch.arange(112.0).view(2, 7, 8))[slices["x"]]
        self.read += image.numel()
        return {"x": image + (self.wrong if wrong is None else wrong), "label": index % 3}


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.conv(x).sin().mean((2, 3))), label)


#: The batch over the first axis, heights over the second: 7 rows on four ranks are 2, 2, 2 and 1.
HEIGHTS = {"x": (Shard(0), Shard(2))}


def losses_of_parts(workers: int) -> tuple[list[float], int]:
    """Losses of an epoch, and the elements of images that this rank has read."""
    torch.manual_seed(1)
    parallel, images = autoparallel.compile(Convolution(), mesh_of(1, 4), pins=HEIGHTS), Images()
    loader = parallel.dataloader(images, BATCH, num_workers=workers)
    images.read = 0
    return [float(parallel(**batch).detach()) for batch in loader], images.read


def test_ranks_read_their_parts_of_samples(ranks: Any) -> None:
    torch.manual_seed(1)
    model, images = Convolution(), Images()
    expected = [float(model(**batch).detach()) for batch in DataLoader(images, BATCH)]
    for rank, (losses, read) in enumerate(ranks(4).run(losses_of_parts, 0)):
        rows = (2, 2, 2, 1)[rank]
        assert losses == pytest.approx(expected, rel=1e-5)
        assert read == 16 * rows * 16 + 16 * rows + 112  # the samples, one of them again and whole, to be compared


def wrong_parts() -> str:
    parallel = autoparallel.compile(Convolution(), mesh_of(1, 4), pins=HEIGHTS)
    with pytest.raises(AutoparallelError) as found:
        next(iter(parallel.dataloader(Images(wrong=True), BATCH)))
    return str(found.value)


def test_a_part_that_is_no_part_is_refused_on_all_ranks(ranks: Any) -> None:
    for message in ranks(4).run(wrong_parts):
        assert "part(0, ...)['x'] has other values than sample 0 has there" in message


def test_a_rank_that_left_is_named_where_loaders_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between calls of the module, whose own errors name it."""

    def closed(*_: object) -> bool:
        raise RuntimeError("Connection closed by peer")

    def lost(error: BaseException) -> None:
        raise PeerError("rank 1 failed: its script has ended", 1) from error

    monkeypatch.setattr(inputs, "is_same", closed)
    monkeypatch.setattr(failing, "lost", lost)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(PeerError, match="its script has ended"):
        inputs.all_have("step 4", torch.device("cpu"))
