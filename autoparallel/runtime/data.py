"""Data loaders: equal global batches on all ranks, of which each keeps its shards; the position can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.utils._pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from autoparallel.errors import InputError, shown
from autoparallel.kernels.rng import mix
from autoparallel.layout import INVARIANT, Layout, local_box
from autoparallel.runtime import initialise
from autoparallel.runtime.inputs import all_have
from autoparallel.runtime.reading import Batch, Reader, Starting, as_read, drawing, seed_all
from autoparallel.runtime.resume import check_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_VERSION = 1
#: Options of torch's DataLoader that have no effect here, and what to write instead.
_DECIDED_HERE = {
    "sampler": "all ranks draw one order from shuffle, seed and the epoch; of a sampler, give the dataset in its order "
               "(torch.utils.data.Subset)",
    "batch_sampler": "batches are batch_size samples each, in an order that shuffle, seed and the epoch decide",
    "generator": "the order is drawn from seed and the epoch, so that all ranks draw one: give seed",
    "in_order": "ranks must get the batches in one order",
}


@dataclass
class Order:
    """Batches of a dataset's samples in an order drawn from (seed, epoch), equal on all ranks.

    ``rows``: number of samples of a batch -> rows that this rank reads. ``are_checked``: check the first batch of each
    iteration (see `Batch.checked`). ``start``: samples that the next iteration skips.
    """

    num_samples: int
    batch_size: int
    rows: Callable[[int], range]
    shuffle: bool
    seed: int
    drop_last: bool
    are_checked: bool
    epoch: int = field(default=0, init=False)
    start: int = field(default=0, init=False)

    def __len__(self) -> int:
        full, rest = divmod(self.num_samples, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(self.epoch, self.start)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        order = list(range(self.num_samples))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.num_samples, generator=generator).tolist()
        for first in range(start, self.num_samples, self.batch_size):
            indices = tuple(order[first : first + self.batch_size])
            if len(indices) == self.batch_size or not self.drop_last:
                checked = self.are_checked and first == start
                yield Batch(indices, self.rows(len(indices)), mix(self.seed, epoch), checked)


@dataclass(frozen=True)
class Form:
    """Structure of a batch and the layouts in which the program reads it, by leaf number.

    ``whole``: each rank reads whole batches; else only the rows of its shards.
    """

    layouts: Mapping[int, Layout]
    shapes: Sequence[tuple[int, ...] | None]
    spec: Any
    mesh: DeviceMesh
    whole: bool

    @staticmethod
    def of(batch: Any, layouts: Mapping[int, Layout], mesh: DeviceMesh, whole: bool) -> Form:
        leaves, spec = pytree.tree_flatten(batch)
        shapes = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        return Form(layouts, shapes, spec, mesh, whole or not layouts)

    @property
    def is_cut_alike(self) -> bool:
        """Whether all tensors are cut along dim 0 over the same axes: two ranks read the same rows or disjoint ones."""
        return len({tuple(p.is_shard and p.dim == 0 for p in layout) for layout in self.layouts.values()}) < 2

    def box(self, number: int, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offsets, lengths) of this rank's shard of leaf ``number`` with global shape ``shape``."""
        return local_box(shape, self.layouts[number], self.mesh.shape, self.mesh.get_coordinate() or ())

    def rows(self, num_samples: int) -> range:
        """The rows of a batch that this rank reads: at least one, also if its shards are empty."""
        if self.whole:
            return range(num_samples)
        found = []
        for number in self.layouts:
            (first, *_), (length, *_) = self.box(number, (num_samples, *cast(Any, self.shapes[number])[1:]))
            if length:
                found.append(range(first, first + length))
        return range(min(r.start for r in found), max(r.stop for r in found)) if found else range(1)

    def fits(self, leaves: Sequence[Any], spec: Any) -> bool:
        """Whether a batch has the example's structure and numbers of dims; lengths may differ."""
        dims = [leaf.dim() if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        return bool(spec == self.spec) and dims == [None if shape is None else len(shape) for shape in self.shapes]


@dataclass
class ShardedLoader:
    """Iterates over an epoch; batches have the structure of the model's call, with DTensors in the program's layouts.

    ``set_epoch(n)`` draws another order. ``state_dict()`` is the position, also within an epoch; after
    ``load_state_dict`` the next iteration continues there, also on another number of ranks.
    """

    loader: DataLoader[Any]
    order: Order
    form: Form
    device: torch.device
    collate_name: str
    as_dtensors: bool
    _position: int = field(default=0, init=False)

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self.order.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch from which the order is drawn. A new epoch starts at its first sample."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise InputError(f"epoch is {shown(epoch)}: give its number, 0 or more")
        if epoch != self.order.epoch:
            self.order.epoch, self.order.start, self._position = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Epoch, samples read in it (over all ranks), and the parameters of the order; equal on all ranks."""
        order = self.order
        return {"version": _VERSION, "epoch": order.epoch, "samples": self._position, "seed": order.seed,
                "shuffle": order.shuffle, "num_samples": order.num_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the state's position. Raises InputError for an invalid state, or another dataset's or order's."""
        order = self.order
        check_state("the loader's state", state, _VERSION, ("epoch", "samples", "seed", "num_samples"), ("shuffle",))
        for name, mine in (("shuffle", order.shuffle), ("num_samples", order.num_samples)):
            if state[name] != mine:
                raise InputError(f"the loader's state has {name} {state[name]}, this loader {mine}: it goes on in the "
                                 "same dataset and order only")
        if state["samples"] > order.num_samples:
            raise InputError(f"the loader's state has {state['samples']} samples of {order.num_samples} read")
        order.epoch, order.seed = state["epoch"], state["seed"]
        order.start = self._position = state["samples"]

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Any]:
        order = self.order
        self._position, at = order.start, f"epoch {order.epoch}, seed {order.seed}, from sample {order.start}"
        of = f"batches of {order.batch_size} of {order.num_samples} samples, shuffle {order.shuffle}"
        if (found := all_have(f"{at}, {of}, drop_last {order.drop_last}", self.device)) is not None:
            raise InputError(f"ranks read different data: {found}\n  Make the loader with the same arguments on all "
                             "ranks, of the whole dataset, and call set_epoch on all.")
        batches, order.start = iter(self.loader), 0
        for number, (rows, wrong) in enumerate(batches):
            if number == 0 and order.are_checked and (found := all_have(wrong, self.device, "")) is not None:
                raise InputError(f"collate_fn {self.collate_name} does not treat each sample alone, as per_sample=True "
                                 f"promises: {found}\n  Leave out per_sample: each rank collates the whole batch then.")
            left = order.num_samples - self._position
            count = min(order.batch_size, left)
            self._position += count
            yield self._placed(rows, count)

    def _placed(self, rows: Any, count: int) -> Any:
        leaves, spec = pytree.tree_flatten(rows)
        if fits := self.form.fits(leaves, spec):
            leaves = [self._shard(i, leaf, count) if i in self.form.layouts else leaf for i, leaf in enumerate(leaves)]
        elif not self.form.whole:
            raise InputError(f"a batch has another structure than the dataset's first sample makes: {spec}, not "
                             f"{self.form.spec}\n  Give samples of one structure, or a collate_fn that makes it.")
        return pytree.tree_unflatten([self._whole(leaf) for leaf in leaves], spec) if fits or self.form.whole else rows

    def _shard(self, number: int, value: torch.Tensor, count: int) -> torch.Tensor:
        read = self.form.rows(count)
        shape = tuple(value.shape) if self.form.whole else (count, *value.shape[1:])
        offsets, lengths = self.form.box(number, shape)
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            before = 0 if self.form.whole or dim else read.start
            value = value.narrow(dim, offset - before if length else 0, length)
        return initialise.as_dtensor(value.to(self.device).contiguous(), self.form.mesh, self.form.layouts[number],
                                     torch.Size(shape))

    def _whole(self, value: Any) -> Any:
        """A leaf that is not cut, on the device; as a replicated DTensor if plain tensors mean this rank's rows."""
        if not isinstance(value, torch.Tensor) or isinstance(value, initialise.DTensor):
            return value
        value = value.to(self.device)
        mesh = self.form.mesh
        return initialise.as_dtensor(value, mesh, (INVARIANT,) * mesh.ndim) if self.as_dtensors else value


def sharded_loader(dataset: Dataset[Any], form: Form, device: torch.device, batch_size: int, *, shuffle: bool,
                   seed: int, collate: Callable[[list[Any]], Any] | None, drop_last: bool, as_dtensors: bool,
                   options: Mapping[str, Any]) -> ShardedLoader:
    """A loader of batches of this form. ``options``: of torch's DataLoader; raises InputError for unknown ones and for
    those that have no effect here."""
    order = Order(len(cast(Sized, dataset)), batch_size, form.rows, shuffle, seed, drop_last,
                  collate is not None and not form.whole)
    reader = Reader(dataset, collate, form.is_cut_alike)
    given = dict(options)
    for name, instead in _DECIDED_HERE.items():
        if given.pop(name, None if name != "in_order" else True) not in (None, True):
            raise InputError(f"{name} is not for this loader: {instead}")
    starting = given.pop("worker_init_fn", None)
    try:
        loader = DataLoader(cast(Any, reader), batch_sampler=cast(Any, order), collate_fn=cast(Any, as_read),
                            worker_init_fn=Starting(starting), **given)
    except (TypeError, ValueError) as error:
        raise InputError(f"torch's DataLoader does not take {dict(options)}: {error}") from error
    return ShardedLoader(loader, order, form, device, getattr(collate, "__qualname__", shown(collate)), as_dtensors)


def example_batch(dataset: Dataset[Any], batch_size: int, collate: Callable[[list[Any]], Any] | None, by_row: bool
                  ) -> Any:
    """An example batch made of copies of the first sample. ``by_row``: require one row per sample in each tensor.

    Raises InputError for a batch size below 1, a dataset without length or with too few samples, or a collated tensor
    without one row per sample.
    """
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise InputError(f"{type(dataset).__name__} has no length or no items by number: give a map-style dataset")
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise InputError(f"batch_size is {batch_size!r}: give the samples of a batch over all ranks, 1 or more")
    if len(dataset) < batch_size:
        raise InputError(f"the dataset has {len(dataset)} samples, fewer than one batch of {batch_size}")
    with drawing():
        seed_all(0)
        batch = (collate or default_collate)([dataset[0]] * batch_size)
    for leaf in pytree.tree_leaves(batch):
        if by_row and isinstance(leaf, torch.Tensor) and (leaf.dim() == 0 or leaf.shape[0] != batch_size):
            raise InputError(f"a collated tensor of shape {list(leaf.shape)} has not one row for each of {batch_size} "
                             "samples")
    return batch


def check_options(**options: Any) -> None:
    """Raises InputError for loader options of the wrong type."""
    for name, value in options.items():
        if name == "seed":
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputError(f"seed is {shown(value)}: give a whole number, the same on all ranks")
        elif name == "collate_fn":
            if value is not None and not callable(value):
                raise InputError(f"collate_fn is {shown(value)}: give a function that makes a batch of samples")
        elif not isinstance(value, bool):
            raise InputError(f"{name} is {shown(value)}: give True or False")
