"""Samples of different lengths in batches of a few lengths, so that few forms of the call are compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from autoparallel.errors import InputError, shown


@dataclass(frozen=True)
class PaddedTo:
    """A ``collate_fn``: see `padded_to`."""

    lengths: tuple[int, ...]
    values: Mapping[str, float]

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not all(isinstance(sample, Mapping) and sample.keys() == samples[0].keys() for sample in samples):
            raise InputError("samples have different keys, or are no mappings: give dicts with the same keys")
        if missing := sorted(self.values.keys() - samples[0].keys()):
            raise InputError(f"padded_to has values for {missing}; samples have {sorted(samples[0])}")
        rows = {name: [torch.as_tensor(sample[name]) for sample in samples] for name in self.values}
        longest = max((row.shape[0] for found in rows.values() for row in found), default=0)
        fitting = [length for length in self.lengths if length >= longest]
        if not fitting:
            raise InputError(f"a sample has {longest} tokens, and the longest batch is of {self.lengths[-1]}: truncate "
                             "it, or give a larger length")
        found = {name: torch.stack([self._padded(row, fitting[0], self.values[name]) for row in rows[name]])
                 for name in rows}
        others = [name for name in samples[0] if name not in rows]
        return {name: found[name] if name in found else default_collate([sample[name] for sample in samples])
                for name in [*rows, *others]}

    @staticmethod
    def _padded(row: torch.Tensor, length: int, value: float) -> torch.Tensor:
        try:
            more = row.new_full((length - row.shape[0], *row.shape[1:]), value)
        except (RuntimeError, OverflowError) as error:
            raise InputError(f"padded_to has {value}, which {row.dtype} has not: {error}") from error
        return torch.cat([row, more])


def padded_to(lengths: Sequence[int], **values: float) -> PaddedTo:
    """A ``collate_fn`` that pads samples along dim 0 to the least of ``lengths`` that holds the longest of the batch.

    Each length is compiled once, when its first batch comes. Samples are mappings; ``values`` has the number to pad
    with for each key whose lengths differ; the others are stacked.

    >>> collate = padded_to((4, 8), input_ids=0, labels=-100)
    >>> batch = collate([{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [3, 4, 5], "labels": [3, 4, 5]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[1, 2, 0, 0], [3, 4, 5, 0]], [[1, 2, -100, -100], [3, 4, 5, -100]])

    Raises InputError for lengths that are no numbers of tokens, or without values; when called, for a sample that is
    too long.
    """
    if not isinstance(lengths, list | tuple) or not lengths or any(
            isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in lengths):
        raise InputError(f"lengths are {shown(lengths)}: give numbers of tokens, 1 or more")
    if not values or any(isinstance(v, bool) or not isinstance(v, int | float) for v in values.values()):
        raise InputError("padded_to needs a number to pad with for each key whose lengths differ: "
                         "padded_to((128, 512), input_ids=0, attention_mask=0, labels=-100)")
    return PaddedTo(tuple(sorted(set(lengths))), values)


__all__ = ["PaddedTo", "padded_to"]
