"""Global batches: a loader as written for one rank of data parallelism, for all ranks together.

In such a script each of N ranks takes batches of its own; here a batch is what all ranks take in a step, and every rank
reads it (the parallel module keeps its part).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from autoparallel.errors import InputError
from autoparallel.runtime.generators import as_they_were
from autoparallel.runtime.reading import drawing


class JoinedBatches(BatchSampler):
    """``count`` batches of a batch sampler as one. An incomplete last one is left out with ``drop_last``."""

    def __init__(self, batch_sampler: Any, count: int, drop_last: bool) -> None:
        self.batch_sampler, self.count, self.drop_last = batch_sampler, count, drop_last
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]
        size = getattr(batch_sampler, "batch_size", None)
        self.batch_size = None if size is None else size * count  # type: ignore[assignment]

    def __iter__(self) -> Iterator[list[int]]:
        batches = (batch for batch in self.batch_sampler)  # (Lightning's sampler begins again at each iter())
        while together := list(islice(batches, self.count)):
            if len(together) == self.count or not self.drop_last:
                yield [index for batch in together for index in batch]

    def __len__(self) -> int:
        whole, rest = divmod(len(self.batch_sampler), self.count)
        return whole + (rest > 0 and not self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)


def joined_loader(loader: DataLoader[Any], count: int, around: Callable[[Any], Any] = lambda joined: joined
                  ) -> DataLoader[Any]:
    """A loader whose batches are ``count`` of the given one's; ``around`` makes another batch sampler of the joined
    one's. Raises InputError for one without batches."""
    if count == 1:
        return loader
    kept: dict[str, Any] = {name: getattr(loader, name) for name in (
        "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
        "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order")}
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            raise InputError("the loader's dataset is iterable and the loader has no batch_size: the batches of all "
                             "ranks cannot be joined; give batch_size to the DataLoader")
        return DataLoader(loader.dataset, batch_size=loader.batch_size * count, drop_last=loader.drop_last, **kept)
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    if batches is None:
        raise InputError("the loader has batch_size=None: the batches of all ranks cannot be joined; give batch_size "
                         "or a batch_sampler to the DataLoader")
    drop_last = bool(getattr(batches, "drop_last", loader.drop_last))
    sampler: Any = getattr(batches, "sampler", None)
    if isinstance(size := getattr(sampler, "batch_size", None), int):
        sampler.batch_size = size * count  # one that groups samples for batches, as transformers' by length
    return DataLoader(loader.dataset, batch_sampler=around(JoinedBatches(batches, count, drop_last)), **kept)


def first_batches(loader: DataLoader[Any], count: int) -> list[Any]:
    """The first ``count`` batches, read in advance; those of a shuffled loader need not be the first of its next epoch.
    The loader's batches and all random generators stay as they were. Raises InputError for a stream that can be read
    only once."""
    collate: Callable[[list[Any]], Any] = loader.collate_fn
    with drawing(), as_they_were(loader):
        if isinstance(loader.dataset, IterableDataset):
            samples, size = _stream(loader.dataset), loader.batch_size or 1
            parts = [list(islice(samples, size)) for _ in range(count)]
        else:
            batches: Any = loader.batch_sampler
            parts = [[loader.dataset[index] for index in batch] for batch in islice(iter(batches), count)]
        return [collate(part) for part in parts if part]


def _stream(dataset: IterableDataset[Any]) -> Iterator[Any]:
    samples = iter(dataset)
    if isinstance(samples, Generator) and iter(dataset) is samples:
        raise InputError(f"the stream {type(dataset).__name__} can be read once only, as its __iter__ returns the same "
                         "generator each time: the first batch, for which the model is compiled, would be lost\n"
                         "  Make a new generator in __iter__, as `def __iter__(self): yield from ...` does.")
    return samples


def equal_on_ranks(value: torch.Tensor, group: Any = None) -> bool:
    """Whether all ranks of the group have the same value; they call this together, with tensors of one shape."""
    mine = value.detach().contiguous().reshape(-1).view(torch.uint8)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    return all(torch.equal(one, found[0]) for one in found)


def rows_of(batch: Any) -> int | None:
    """The number of samples: the first dim of the first tensor with dims."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, Sequence) else [batch]
    return next((len(value) for value in values if isinstance(value, torch.Tensor) and value.dim() > 0), None)


def one_of(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Batches one after another as one; None if their tensors do not fit (other lengths), or are not all there is."""
    first = batches[0]
    if len(batches) == 1:
        return dict(first)
    forms = [{name: (value.shape[1:], value.dtype) if isinstance(value, torch.Tensor) and value.dim() > 0 else None
              for name, value in batch.items()} for batch in batches]
    if any(form != forms[0] for form in forms) or None in forms[0].values():
        return None
    return {name: torch.cat([batch[name] for batch in batches]) for name in first}


__all__ = ["JoinedBatches", "equal_on_ranks", "first_batches", "joined_loader", "one_of", "rows_of"]
