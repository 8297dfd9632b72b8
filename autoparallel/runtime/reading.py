"""Reading a batch's samples in the loader's workers, with a random seed per sample and per batch, also for generators
that the dataset and the collate function keep.

Ranks that read the same sample, and a resumed run, thus get the same augmented values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch.utils.data import Dataset, default_collate, get_worker_info

from autoparallel.kernels.rng import mix
from autoparallel.runtime.generators import generators_of, restoring, seed_generator


@dataclass(frozen=True)
class Batch:
    """Sample numbers of a global batch, and the rows of it that this rank reads.

    ``seed``: of the epoch. ``checked``: collate the whole batch as well and compare.
    """

    indices: tuple[int, ...]
    rows: range
    seed: int
    checked: bool = False

    @property
    def whole(self) -> Batch:
        """The batch with all rows."""
        return replace(self, rows=range(len(self.indices)))


@dataclass(frozen=True)
class Parts:
    """The part of each sample that a rank reads: slices by leaf of the sample (None: all of it), and its structure."""

    leaves: tuple[tuple[slice, ...] | None, ...]
    spec: Any

    @property
    def slices(self) -> Any:
        """A structure like a sample's, with a tuple of slices or None in place of each leaf."""
        return pytree.tree_unflatten(self.leaves, self.spec)

    def difference(self, index: int, part: Any, whole: Any) -> str:
        """How the part that was read of sample ``index`` differs from that part of the whole; "" if it does not."""
        leaves, spec = pytree.tree_flatten_with_path(part)
        wholes, whole_spec = pytree.tree_flatten(whole)
        if spec != whole_spec:
            return f"part({index}, ...) has another structure than sample {index}"
        for (path, mine), other, slices in zip(leaves, wholes, self.leaves, strict=True):
            expected = other if slices is None else other[slices]
            name = f"part({index}, ...){pytree.keystr(path)}"
            if isinstance(mine, torch.Tensor) and mine.shape != expected.shape:
                return f"{name} has shape {list(mine.shape)}, and {list(expected.shape)} was asked for: {slices}"
            if isinstance(mine, torch.Tensor) and not torch.equal(mine, expected):
                return f"{name} has other values than sample {index} has there: {slices}"
        return ""


@dataclass(frozen=True)
class Reader:
    """A dataset for torch's DataLoader whose item is a collated batch.

    ``at_once``: use the dataset's ``__getitems__`` if it has one; then the samples share one seed. ``parts``: read only
    these of each sample, by the dataset's method ``part(index, slices)``.
    """

    dataset: Dataset[Any]
    collate: Callable[[list[Any]], Any] | None
    at_once: bool
    parts: Parts | None = None

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitems__(self, batch: Batch) -> tuple[Any, str]:
        """(collated rows, how they differ from the whole batch's or "")."""
        collated = self._collated(batch)
        wrong = self._wrong_part(batch, self.parts) if batch.checked and self.parts is not None else ""
        if batch.checked and self.parts is None and len(batch.rows) < len(batch.indices):
            wrong = difference(collated, self._collated(batch.whole), batch.rows)
        return collated, wrong

    def _collated(self, batch: Batch) -> Any:
        indices = [batch.indices[row] for row in batch.rows]
        with drawing(self.dataset, self.collate) as seed:
            if self.parts is None and self.at_once and callable(read := getattr(self.dataset, "__getitems__", None)):
                seed(mix(batch.seed, 1, *indices))
                samples = read(indices)
            else:
                samples = []
                for index in indices:
                    seed(mix(batch.seed, 0, index))
                    samples.append(self._sample(index))
            seed(mix(batch.seed, 2, *batch.indices))
            return as_dicts((self.collate or default_collate)(samples))

    def _sample(self, index: int) -> Any:
        if self.parts is None:
            return self.dataset[index]
        return self.dataset.part(index, slices=self.parts.slices)  # type: ignore[attr-defined]

    def _wrong_part(self, batch: Batch, parts: Parts) -> str:
        """How the first sample's part differs from that part of the whole sample; "" if it does not."""
        index, found = batch.indices[batch.rows.start], list[Any]()
        with drawing(self.dataset) as seed:
            for read in (partial(self.dataset.part, slices=parts.slices), self.dataset.__getitem__):  # type: ignore[attr-defined]
                seed(mix(batch.seed, 0, index))
                found.append(read(index))
        return parts.difference(index, *found)


@dataclass(frozen=True)
class Starting:
    """The worker_init_fn: `get_worker_info` then has the user's dataset; calls the user's worker_init_fn."""

    user: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # its own __setattr__ refuses
        if self.user is not None:
            self.user(worker)


def as_dicts(batch: Any) -> Any:
    """The batch with mappings of other libraries (transformers' BatchEncoding) as dicts: torch's pytrees know these."""
    return pytree.tree_map(lambda leaf: {name: as_dicts(value) for name, value in leaf.items()}
                           if isinstance(leaf, Mapping) else leaf, batch)


def as_read(batch: tuple[Any, str]) -> tuple[Any, str]:
    """The DataLoader's collate function: identity, since `Reader` collates."""
    return batch


def difference(part: Any, whole: Any, rows: range) -> str:
    """How the collated rows ``part`` differ from rows ``rows`` of the collated batch ``whole``; "" if they do not."""
    parts, spec = pytree.tree_flatten_with_path(part)
    wholes, whole_spec = pytree.tree_flatten_with_path(whole)
    if spec != whole_spec:
        return "it makes another structure of some of a batch's samples than of all"
    for (path, mine), (_, other) in zip(parts, wholes, strict=True):
        name = pytree.keystr(path) or "the batch"
        if not isinstance(mine, torch.Tensor):
            if not isinstance(other, torch.Tensor) and not _same(mine, other):
                return f"{name} is {mine!r} of some of a batch's samples, and {other!r} of all"
            continue
        expected = other[rows.start : rows.stop] if other.dim() else other
        if mine.shape != expected.shape:
            return f"{name} has shape {list(mine.shape)} of {len(rows)} samples, and {list(other.shape)} of all"
        if not torch.equal(mine, expected) and not torch.allclose(mine, expected, rtol=0, atol=0, equal_nan=True):
            return f"{name} has other values of some of a batch's samples than of all"
    return ""


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or a is b
    except (RuntimeError, ValueError, TypeError):
        return False


@contextmanager
def drawing(*holders: Any) -> Iterator[Callable[[int], None]]:
    """Within, random numbers may be drawn: afterwards the states of torch (CPU), Python and numpy, and of generators
    that ``holders`` keep, are restored. Gives a function that seeds all of these."""
    own = generators_of(*holders)
    before = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    give_back = [restoring(generator) for generator in own]

    def seed_all(seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        for number, generator in enumerate(own):
            seed_generator(generator, mix(seed, number))

    try:
        yield seed_all
    finally:
        torch.default_generator.set_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
        for restore in give_back:
            restore()
