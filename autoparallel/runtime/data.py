"""Data loaders: equal global batches on all ranks, of which each keeps its shards; the position can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from autoparallel.errors import InputError, shown
from autoparallel.kernels.rng import mix
from autoparallel.runtime.agree import decide_once
from autoparallel.runtime.batch_form import Form, Placing
from autoparallel.runtime.inputs import all_have, hash_of
from autoparallel.runtime.prefetch import CopyStream, copy_stream, placed
from autoparallel.runtime.reading import Batch, Parts, Reader, Starting, as_dicts, as_read, drawing
from autoparallel.runtime.resume import check_state

_VERSION = 1
#: Options of torch's DataLoader that have no effect here, and what to write instead.
_DECIDED_HERE = {
    "batch_sampler": "batches are batch_size samples each; give their order as a sampler",
    "generator": "the order is drawn from seed and the epoch, so that all ranks draw one: give seed",
    "in_order": "ranks must get the batches in one order",
}


@dataclass
class Draws:
    """What a sampler has drawn in an epoch: a hash of the order, and the states of the sampler's own generator before
    and after it. ``resumed``, ``expected``: the generator's state and the hash of the epoch to go on with."""

    order: int | None = None
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None
    resumed: torch.Tensor | None = None
    expected: int | None = None

    def take(self, order: list[int], before: torch.Tensor | None, after: torch.Tensor | None, begun: bool) -> None:
        """Note an order that was drawn. Raises InputError if the epoch was ``begun`` in another one."""
        self.order, self.before, self.after = hash_of(order), before, after
        expected, self.expected, self.resumed = self.expected, None, None
        if begun and expected not in (None, self.order):
            raise InputError("the sampler gives another order than in the epoch that is to go on: samples would come "
                             "twice and others not at all. Draw it from torch's, numpy's or Python's global "
                             "generators, which are seeded by the epoch, or from a torch.Generator, its attribute "
                             "generator, which is saved")

    def next_epoch(self) -> None:
        self.order, self.expected, self.before = None, None, self.after
        self.resumed = self.after if self.resumed is not None else None  # else the generator has it

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in (("order", self.order), ("before", self.before), ("after", self.after))
                if value is not None}

    def load(self, state: Mapping[str, Any]) -> None:
        self.order, self.before, self.after = state.get("order"), state.get("before"), state.get("after")
        self.expected, self.resumed = self.order, self.before


@dataclass
class Order:
    """Batches of a dataset's samples, equal on all ranks: in an order drawn from (seed, epoch), or the first rank's of
    a ``sampler``.

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
    sampler: Any = None
    epoch: int = field(default=0, init=False)
    start: int = field(default=0, init=False)
    draws: Draws = field(default_factory=lambda: Draws(), init=False)

    def __len__(self) -> int:
        full, rest = divmod(self.num_samples, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(self._drawn(), self.epoch, self.start)

    def _drawn(self) -> list[int]:
        """The samples' numbers in order. With a sampler all ranks call this."""
        if self.sampler is not None:
            found, before, after = decide_once(self._sampled)
            self.draws.take(found, before, after, begun=0 < self.start < self.num_samples)
            return found
        if not self.shuffle:
            return list(range(self.num_samples))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def _sampled(self) -> tuple[list[int], torch.Tensor | None, torch.Tensor | None]:
        """The sampler's order of this epoch, and the states of its generator before and after, if it has one; what it
        draws from torch's, numpy's or Python's generators is seeded."""
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(self.epoch)
        own = getattr(self.sampler, "generator", None)
        own = own if isinstance(own, torch.Generator) else None
        if own is not None and self.draws.resumed is not None:
            own.set_state(self.draws.resumed)
        before = None if own is None else own.get_state()
        with drawing() as seed:
            seed(mix(self.seed, self.epoch))
            found = [int(number) for number in self.sampler]
        if len(found) != self.num_samples:
            raise InputError(f"the sampler gives {len(found)} samples and says it has {self.num_samples}")
        return found, before, None if own is None else own.get_state()

    def _batches(self, order: list[int], epoch: int, start: int) -> Iterator[Batch]:
        for first in range(start, self.num_samples, self.batch_size):
            indices = tuple(order[first : first + self.batch_size])
            if len(indices) == self.batch_size or not self.drop_last:
                checked = self.are_checked and first == start
                yield Batch(indices, self.rows(len(indices)), mix(self.seed, epoch), checked)


@dataclass
class ShardedLoader:
    """Iterates over an epoch; batches have the structure of the model's call, with DTensors in the program's layouts.

    ``set_epoch(n)`` draws another order. ``state_dict()`` is the position, also within an epoch; after
    ``load_state_dict`` the next iteration continues there, also on another number of ranks. With a ``stream`` batches
    are copied to the device one ahead; the position is that of the batches given out. ``finish`` is called with each
    placed batch, and returns it as it is given out.
    """

    loader: DataLoader[Any]
    order: Order
    placing: Placing
    collate_name: str
    in_parts: bool = False
    stream: CopyStream | None = None
    finish: Callable[[Any], Any] = field(default=lambda batch: batch, init=False)
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
            self.order.draws.next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Epoch, samples read in it (over all ranks), and the parameters of the order; equal on all ranks."""
        order = self.order
        return {"version": _VERSION, "epoch": order.epoch, "samples": self._position, "seed": order.seed,
                "shuffle": order.shuffle, "num_samples": order.num_samples,
                **order.draws.state()}

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
        order.draws.load(state)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Any]:
        order = self.order
        self._position, device = order.start, self.placing.device
        at = f"epoch {order.epoch}, seed {order.seed}, from sample {order.start}"
        of = f"batches of {order.batch_size} of {order.num_samples} samples, shuffle {order.shuffle}"
        if (found := all_have(f"{at}, {of}, drop_last {order.drop_last}", device)) is not None:
            raise InputError(f"ranks read different data: {found}\n  Make the loader with the same arguments on all "
                             "ranks, of the whole dataset, and call set_epoch on all.")
        read = self._read(iter(self.loader), order.start)
        order.start = 0
        for batch, count in placed(read, self.placing.placed, self.stream):
            self._position += count
            yield self.finish(batch)

    def _read(self, batches: Iterator[tuple[Any, str]], start: int) -> Iterator[tuple[Any, int]]:
        """(rows that this rank has read, samples of the batch) from sample ``start``; the first batch is checked."""
        order = self.order
        for number, (rows, wrong) in enumerate(batches):
            device = self.placing.device
            if number == 0 and order.are_checked and (found := all_have(wrong, device, "")) is not None:
                raise InputError(f"the dataset's {found}: the method `part` reads slices of what the dataset's items "
                                 "are" if self.in_parts else
                                 f"collate_fn {self.collate_name} does not treat each sample alone, as per_sample=True "
                                 f"promises: {found}\n  Leave out per_sample: each rank collates the whole batch then.")
            yield rows, min(order.batch_size, order.num_samples - start - number * order.batch_size)


def sharded_loader(dataset: Dataset[Any], form: Form, device: torch.device, batch_size: int, *, shuffle: bool,
                   seed: int, collate: Callable[[list[Any]], Any] | None, drop_last: bool, as_dtensors: bool,
                   options: Mapping[str, Any]) -> ShardedLoader:
    """A loader of batches of this form. ``options``: of torch's DataLoader; raises InputError for unknown ones and for
    those that have no effect here."""
    given = dict(options)
    sampler = _checked(given.pop("sampler", None), shuffle, batch_size)
    parts = _parts(dataset, form) if collate is None else None
    form = replace(form, in_parts=parts is not None)
    order = Order(len(cast(Sized, dataset if sampler is None else sampler)), batch_size, form.rows, shuffle, seed,
                  drop_last, parts is not None or (collate is not None and not form.whole), sampler)
    reader = Reader(dataset, collate, form.has_equal_cuts, parts)
    for name, instead in _DECIDED_HERE.items():
        if given.pop(name, None if name != "in_order" else True) not in (None, True):
            raise InputError(f"{name} is not for this loader: {instead}")
    starting = given.pop("worker_init_fn", None)
    stream = copy_stream(device, bool(given.get("pin_memory")))
    given["pin_memory"] = stream is not None
    try:
        loader = DataLoader(cast(Any, reader), batch_sampler=cast(Any, order), collate_fn=cast(Any, as_read),
                            worker_init_fn=Starting(starting), **given)
    except (TypeError, ValueError) as error:
        raise InputError(f"torch's DataLoader does not take {dict(options)}: {error}") from error
    return ShardedLoader(loader, order, Placing(form, device, as_dtensors),
                         getattr(collate, "__qualname__", shown(collate)), parts is not None, stream)


def _parts(dataset: Dataset[Any], form: Form) -> Parts | None:
    """The parts of samples that this rank reads, if the program cuts them and the dataset can read parts. (Leaves of
    which a batch makes several, such as texts, are not cut: then samples are read whole.)"""
    if form.whole or not any(form.parts) or not callable(getattr(dataset, "part", None)):
        return None
    with drawing(dataset) as seed:
        seed(0)
        leaves, spec = pytree.tree_flatten(dataset[0])
    return Parts(tuple(form.parts), spec) if len(leaves) == len(form.shapes) else None


def _checked(sampler: Any, shuffle: bool, batch_size: int) -> Any:
    """The sampler. Raises InputError for one that gives each rank its own samples, has no length or less than a batch,
    or with shuffle."""
    if isinstance(sampler, DistributedSampler):
        raise InputError("sampler is a DistributedSampler, which gives each rank other samples: leave it out, for the "
                         "loader deals out each batch itself (shuffle=True for another order in each epoch)")
    if sampler is not None and not (isinstance(sampler, Sized) and hasattr(sampler, "__iter__")):
        raise InputError(f"sampler is {shown(sampler)}: give an iterable of samples' numbers that has a length")
    if sampler is not None and shuffle:
        raise InputError("a sampler decides the order: leave out shuffle")
    if sampler is not None and len(sampler) < batch_size:
        raise InputError(f"the sampler has {len(sampler)} samples, fewer than one batch of {batch_size}")
    return sampler


def example_batch(dataset: Dataset[Any], batch_size: int, collate: Callable[[list[Any]], Any] | None, by_row: bool
                  ) -> Any:
    """An example batch made of copies of the first sample. ``by_row``: require one row per sample in each tensor.

    Raises InputError for a batch size below 1, a dataset without length or with too few samples, or a collated tensor
    without one row per sample.
    """
    if not isinstance(dataset, Sized):
        raise InputError(f"{type(dataset).__name__} has items by number and no length: give it one, __len__, or "
                         "__iter__ alone, for a stream")
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise InputError(f"batch_size is {batch_size!r}: give the samples of a batch over all ranks, 1 or more")
    if len(dataset) < batch_size:
        raise InputError(f"the dataset has {len(dataset)} samples, fewer than one batch of {batch_size}")
    with drawing(dataset, collate) as seed:
        seed(0)
        batch = as_dicts((collate or default_collate)([dataset[0]] * batch_size))
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
