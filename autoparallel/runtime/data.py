"""Dataset sharding: each rank reads the samples that its piece of the batch is made of, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch.utils.data import Dataset, default_collate

from autoparallel.errors import InputError
from autoparallel.layout import Layout, local_box
from autoparallel.runtime import initialise

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import DataLoader


@dataclass
class RowSampler:
    """Indices of rows ``rows`` of each global batch, in an order that all ranks draw alike from (seed, epoch)."""

    num_samples: int
    batch_size: int
    rows: range
    shuffle: bool
    seed: int
    epoch: int = field(default=0, init=False)

    def __len__(self) -> int:
        return self.num_samples // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.num_samples))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator).tolist()
        for batch in range(len(self)):
            first = batch * self.batch_size
            yield [order[first + row] for row in self.rows]


@dataclass
class ShardedLoader:
    """Iterates over an epoch; batches have the structure of the model's call, with DTensors as the program reads them.

    ``set_epoch(n)`` draws another order. Of the last samples those that fill no batch are left out.
    """

    loader: DataLoader[Any]
    sampler: RowSampler
    layouts: Mapping[int, Layout]
    mesh: DeviceMesh
    device: torch.device

    def set_epoch(self, epoch: int) -> None:
        self.sampler.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        for rows in self.loader:
            leaves, spec = pytree.tree_flatten(rows)
            yield pytree.tree_unflatten([self._placed(i, leaf) for i, leaf in enumerate(leaves)], spec)

    def _placed(self, number: int, value: Any) -> Any:
        layout = self.layouts.get(number)
        if layout is None:
            return value.to(self.device) if isinstance(value, torch.Tensor) else value
        shape = (self.sampler.batch_size, *value.shape[1:])
        offsets, lengths = local_box(shape, layout, self.mesh.shape, self.mesh.get_coordinate() or ())
        value = value.narrow(0, offsets[0] - self.sampler.rows.start, lengths[0])
        for dim in range(1, len(shape)):
            value = value.narrow(dim, offsets[dim], lengths[dim])
        return initialise.as_dtensor(value.to(self.device).contiguous(), self.mesh, layout, torch.Size(shape))


def example_batch(dataset: Dataset[Any], batch_size: int, collate: Callable[[list[Any]], Any] | None) -> Any:
    """A batch of the right form, made of the first sample.

    Raises InputError for a batch size below 1, when the dataset has no length or too few samples, or a collated tensor
    has no row per sample.
    """
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise InputError(f"{type(dataset).__name__} has no length or no items by number: give a map-style dataset")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"batch_size is {batch_size!r}: give the samples of a batch over all ranks, 1 or more")
    if len(dataset) < batch_size:
        raise InputError(f"the dataset has {len(dataset)} samples, fewer than one batch of {batch_size}")
    batch = (collate or default_collate)([dataset[0]] * batch_size)
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and (leaf.dim() == 0 or leaf.shape[0] != batch_size):
            raise InputError(f"a collated tensor of shape {list(leaf.shape)} has not one row for each of {batch_size} "
                             "samples")
    return batch


def rows_read(leaves: Sequence[torch.Tensor], layouts: Mapping[int, Layout], mesh: DeviceMesh, batch_size: int
              ) -> range:
    """The rows of a batch that this rank's pieces are cut from; ``layouts`` by the number of the leaf."""
    found = []
    for number, layout in layouts.items():
        offsets, lengths = local_box(tuple(leaves[number].shape), layout, mesh.shape, mesh.get_coordinate() or ())
        found.append(range(offsets[0], offsets[0] + lengths[0]))
    return range(min(r.start for r in found), max(r.stop for r in found)) if found else range(batch_size)
