"""Losses outside of the model: targets that forward does not take come from the loader, laid out as the outputs."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import autoparallel
from autoparallel.errors import CaptureError, InputError
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

X = torch.linspace(-2, 2, 22 * 6).view(22, 6).sin()
Y = torch.arange(22) % 5
BATCH = 4    # the last batch has two samples


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = build()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.net(x)
        return made


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


def trained(model: Any, batches: Iterable[Any]) -> list[float]:
    """Losses of one epoch of SGD; the parameters of a parallel module are there after its first call."""
    losses, optimizer = [], None
    for batch in batches:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, Mapping) else batch
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
    return losses


def tuples(parallel: Any) -> Any:
    return parallel.dataloader(TensorDataset(X, Y), BATCH)


def streamed(parallel: Any) -> Any:
    return parallel.dataloader(Rows(), BATCH)


def collated(parallel: Any) -> Any:
    return parallel.dataloader(TensorDataset(X, Y), BATCH, collate_fn=torch.utils.data.default_collate)


def mappings(parallel: Any) -> Any:
    samples: Any = [{"id": f"sample {n}", "x": x, "y": y} for n, (x, y) in enumerate(zip(X, Y, strict=True))]
    return parallel.dataloader(samples, BATCH)


def encoded(samples: list[Any]) -> Any:
    """As collators of tokenizers return it: a mapping that is no dict."""
    x, y = torch.utils.data.default_collate(samples)
    return UserDict(x=x, y=y)


def tokenized(parallel: Any) -> Any:
    return parallel.dataloader(TensorDataset(X, Y), BATCH, collate_fn=encoded)


def tokenized_streams(parallel: Any) -> Any:
    return parallel.dataloader(Rows(), BATCH, collate_fn=encoded)


def by_shard_batch(parallel: Any) -> Any:
    return (parallel.shard_batch(batch) for batch in DataLoader(TensorDataset(X, Y), BATCH))


def local_rows(parallel: Any) -> Any:
    """Each rank's rows of whole batches, in rank order."""
    rank = parallel.mesh.get_local_rank(0)
    for x, y in DataLoader(TensorDataset(X, Y), BATCH):
        half = len(x) // 2
        yield parallel.shard_batch((x[rank * half :][:half], y[rank * half :][:half]))


def losses_of(batches: Callable[[Any], Any], baseline: str, options: dict[str, Any]) -> list[float]:
    parallel: Any = autoparallel.compile(Named(), mesh_of(2), baseline=baseline, **options)
    return trained(parallel, batches(parallel))


CASES: list[Any] = [(batches, "ddp", {}) for batches in (tuples, streamed, collated, mappings, by_shard_batch)]
CASES += [(batches, "tensor_parallel", {}) for batches in (collated, by_shard_batch)]
CASES += [slow(batches, "tensor_parallel", {}) for batches in (tuples, streamed, mappings)]
CASES += [(tuples, "fsdp", {"outputs": "whole"}), (streamed, "fsdp", {"outputs": "whole"})]
CASES += [slow(batches, "fsdp", {"outputs": "whole"}) for batches in (mappings, by_shard_batch)]
CASES += [(batches, "fsdp", {}) for batches in (tokenized, tokenized_streams)]
CASES += [(local_rows, "ddp", {"inputs": "local"}), (local_rows, "ddp", {"inputs": "local", "outputs": "whole"})]


@pytest.mark.parametrize(("batches", "baseline", "options"), CASES)
def test_losses_outside_of_the_model_are_those_of_one_process(ranks: Any, batches: Any, baseline: str,
                                                              options: dict[str, Any]) -> None:
    expected = trained(Named(), DataLoader(TensorDataset(X, Y), BATCH))
    for losses in ranks(2).run(losses_of, batches, baseline, options):
        assert losses == pytest.approx(expected, rel=1e-5)


def losses_of_loader(dataset: Any, batch_size: int) -> list[float]:
    parallel: Any = autoparallel.compile(Named(), mesh_of(4), baseline="ddp")
    return trained(parallel, parallel.dataloader(dataset, batch_size))


@pytest.mark.parametrize("dataset", [TensorDataset(X, Y), Rows()])
@pytest.mark.parametrize("batch_size", [4, 6])
def test_targets_of_a_last_batch_lie_as_its_own_outputs(ranks: Any, dataset: Any, batch_size: int) -> None:
    """Of 4 ranks, which have a row each of 4, and all of them 2 or 6."""
    expected = trained(Named(), DataLoader(TensorDataset(X, Y), batch_size))
    for losses in ranks(4).run(losses_of_loader, dataset, batch_size):
        assert losses == pytest.approx(expected, rel=1e-5)


def layouts() -> list[Any]:
    """The placements of a batch with rows cut, the rows that are read, and what comes of outputs that are whole."""
    mesh, read = mesh_of(2), list[int]()

    class Read(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return super().__getitem__(index)

    cut: Any = autoparallel.compile(Named(), mesh, baseline="ddp", example_inputs=(X[:BATCH],))
    loader = cut.dataloader(Read(X, Y), BATCH)
    read.clear()
    x, y = next(iter(loader))
    whole: Any = autoparallel.compile(Named(), mesh, baseline="ddp", outputs="whole")
    plain = next(iter(whole.dataloader(TensorDataset(X, Y), BATCH)))[1]
    texts = [batch["id"] for batch in mappings(cut)]
    assert texts[0] == [f"sample {n}" for n in range(BATCH)] and len(texts[-1]) == 2
    return [x.to_local().shape[0], y.to_local().tolist(), y.placements == x.placements, sorted(set(read)),
            not isinstance(plain, DTensor) and plain.tolist()]


def test_a_rank_reads_its_own_targets(ranks: Any) -> None:
    assert ranks(2).run(layouts) == [[2, [0, 1], True, [0, 1], [0, 1, 2, 3]], [2, [2, 3], True, [2, 3], [0, 1, 2, 3]]]


def test_batches_that_lack_an_argument_are_refused(mesh_of_one: Any) -> None:
    parallel: Any = autoparallel.compile(Named(), mesh_of_one)
    with pytest.raises(InputError, match=r"the batch has image, y, and Named.forward requires x\n"):
        parallel.shard_batch({"image": X[:BATCH], "y": Y[:BATCH]})


class Scaled(Named):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        made: Tensor = self.net(x) * scale
        return made


def test_a_target_taken_as_an_optional_argument_is_told(mesh_of_one: Any) -> None:
    parallel: Any = autoparallel.compile(Scaled(), mesh_of_one)
    with pytest.raises(CaptureError, match="Of the batch, forward gets entry 1 as scale"):
        parallel.shard_batch((X[:BATCH], Y[:BATCH]))
    with pytest.raises(CaptureError, match="Of the batch, forward gets entry 1 as scale"):
        parallel.dataloader(TensorDataset(X, Y), BATCH)
    assert parallel.shard_batch({"x": X[:BATCH], "y": Y[:BATCH]})["y"].tolist() == Y[:BATCH].tolist()


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_namedtuples_stay_such(mesh_of_one: Any) -> None:
    parallel: Any = autoparallel.compile(Named(), mesh_of_one)
    assert parallel.shard_batch(Pair(X[:BATCH], Y[:BATCH])).y.tolist() == Y[:BATCH].tolist()
