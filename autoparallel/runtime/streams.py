"""Loaders of streams: datasets that are iterated, without length or items by number.

Every rank reads the whole stream and keeps its shards of each batch. (A stream cut by ranks would give other batches on
another number of ranks.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count as count_from
from itertools import islice
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from autoparallel.errors import InputError, shown
from autoparallel.kernels.rng import mix
from autoparallel.runtime.batch_form import Form, Placing
from autoparallel.runtime.inputs import all_have, digest, form_text
from autoparallel.runtime.prefetch import CopyStream, copy_stream, placed
from autoparallel.runtime.reading import as_dicts, drawing
from autoparallel.runtime.resume import check_state

_VERSION = 1
#: The values of so many first batches are compared over the ranks, and of every so many after; their shapes always.
FIRST_COMPARED, COMPARED_EVERY = 3, 100
#: Options of torch's DataLoader that streams cannot have, and what to write instead.
_NOT_OF_STREAMS = {
    "sampler": "a stream has one order: its own",
    "batch_sampler": "a stream has one order: its own",
    "generator": "give seed",
    "in_order": "ranks must get the batches in one order",
}


class Stream(IterableDataset[Any]):
    """Any iterable as torch's DataLoader takes it. Random numbers that it draws in this process are seeded."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


@dataclass
class StreamedLoader:
    """Iterates over a stream; batches have the structure of the model's call, with DTensors in the program's layouts.

    ``set_epoch(n)`` is passed to the dataset, if it has one. ``state_dict()`` is the position: the dataset's own, if it
    has one and no workers read ahead, else the number of samples, which are read and skipped after ``load_state_dict``.
    ``finish`` is called with each placed batch, and returns it as it is given out.
    """

    dataset: Any
    loader: DataLoader[Any]
    batch_size: int
    seed: int
    form_of: Callable[[Any], Form]
    device: torch.device
    as_dtensors: bool
    stream: CopyStream | None = None
    epoch: int = field(default=0, init=False)
    finish: Callable[[Any], Any] = field(default=lambda batch: batch, init=False)
    _placing: Placing | None = field(default=None, init=False)
    _position: int = field(default=0, init=False)
    _resumed: bool = field(default=False, init=False)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch at its first sample."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise InputError(f"epoch is {shown(epoch)}: give its number, 0 or more")
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        if epoch != self.epoch:
            self.epoch, self._position, self._resumed = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Epoch, samples read in it over all ranks, seed, and the dataset's own state; equal on all ranks."""
        own = {"dataset": self.dataset.state_dict()} if self._has_state else {}
        return {"version": _VERSION, "epoch": self.epoch, "samples": self._position, "seed": self.seed, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the state's position. Raises InputError for an invalid state."""
        check_state("the loader's state", state, _VERSION, ("epoch", "samples", "seed"))
        if ("dataset" in state) != self._has_state:
            saves = "saves" if "dataset" in state else "does not save"
            raise InputError(f"the loader's state is of a dataset that {saves} its own position: go on with that "
                             "dataset, and as many workers")
        self.set_epoch(state["epoch"])
        self.seed, self._position, self._resumed = state["seed"], state["samples"], True
        if self._has_state:
            self.dataset.load_state_dict(state["dataset"])

    @property
    def _has_state(self) -> bool:
        return self.loader.num_workers == 0 and all(
            callable(getattr(self.dataset, name, None)) for name in ("state_dict", "load_state_dict"))

    def __iter__(self) -> Iterator[Any]:
        if not self._resumed:
            self._position = 0
        skipped = 0 if self._has_state else self._position // self.batch_size
        self._resumed = False
        with drawing() as seed:
            seed(mix(self.seed, self.epoch))
            batches = iter(self.loader)
        read = self._read(islice(self._together(batches), skipped, None))
        for batch, count in placed(read, self._place, None if self._has_state else self.stream):
            self._position += count
            yield self.finish(batch)

    def _read(self, batches: Iterator[Any]) -> Iterator[tuple[Any, int]]:
        """The batches with their numbers of samples; the model is compiled for the first."""
        for batch in batches:
            if self._placing is None:
                self._placing = Placing(self.form_of(batch), self.device, self.as_dtensors)
            yield batch, self._count(batch)

    def _place(self, batch: Any, count: int) -> Any:
        return cast(Placing, self._placing).placed(batch, count)

    def _together(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches. Raises InputError on all ranks if one has another than the others, none, or an error."""
        for number in count_from(0):
            batch, error = None, None
            with drawing(self.loader.collate_fn) as seed:
                seed(mix(self.seed, self.epoch, number))
                try:
                    batch = as_dicts(next(batches, None))
                except Exception as raised:
                    error = raised
            compared = number < FIRST_COMPARED or number % COMPARED_EVERY == 0
            said = _said(batch, compared) if error is None else f"{type(error).__name__}: {error}"
            if (found := all_have(said, self.device)) is not None:
                raise InputError(f"ranks read different streams, at batch {number}: {found}\n  Give all ranks the "
                                 "whole dataset in one order (no shard by rank, and the same seed if it "
                                 "shuffles).") from error
            if error is not None:
                raise error
            if batch is None:
                return
            yield batch

    def _count(self, batch: Any) -> int:
        rows = {leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()}
        return rows.pop() if len(rows) == 1 else self.batch_size


def _said(batch: Any, compared: bool) -> str:
    """A batch as text: equal on ranks that have read the same."""
    if batch is None:
        return "no batch left"
    leaves, _ = pytree.tree_flatten_with_path(batch)
    said = [f"{pytree.keystr(path)} {form_text(leaf)}" for path, leaf in leaves]
    tensors = [leaf for _, leaf in leaves if isinstance(leaf, torch.Tensor)] if compared else []
    return ", ".join(said) + "".join(f", values {int(digest(leaf)):x}" for leaf in tensors)


def streamed_loader(dataset: Any, batch_size: int, form_of: Callable[[Any], Form], device: torch.device, *, seed: int,
                    collate: Callable[[list[Any]], Any] | None, drop_last: bool, as_dtensors: bool,
                    options: Mapping[str, Any]) -> StreamedLoader:
    """A loader of a stream. ``form_of``: the form of a batch, from the first one. Raises InputError for options of
    torch's DataLoader that it does not know or that streams cannot have."""
    given = dict(options)
    for name, instead in _NOT_OF_STREAMS.items():
        if given.pop(name, None if name != "in_order" else True) not in (None, True):
            raise InputError(f"{name} is not for a stream: {instead}")
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise InputError(f"batch_size is {batch_size!r}: give the samples of a batch over all ranks, 1 or more")
    source = dataset if isinstance(dataset, IterableDataset) else Stream(dataset)
    stream = copy_stream(device, bool(given.get("pin_memory")))
    given["pin_memory"] = stream is not None
    try:
        loader = DataLoader(cast(Any, source), batch_size, collate_fn=collate, drop_last=drop_last, **given)
    except (TypeError, ValueError) as error:
        raise InputError(f"torch's DataLoader does not take {dict(options)}: {error}") from error
    return StreamedLoader(dataset, loader, batch_size, seed, form_of, device, as_dtensors, stream)


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be iterated."""
    by_number = hasattr(dataset, "__getitem__")
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not by_number)


__all__ = ["StreamedLoader", "is_stream", "streamed_loader"]
