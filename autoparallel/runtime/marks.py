"""Which batch a DTensor is of: ranks compare it when they call with one, so that a rank that is a batch ahead of the
others, or has made its shards of other values, is told."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from autoparallel.runtime.failing import OF_SHARD_BATCH
from autoparallel.runtime.inputs import Inputs, hash_of_values


class Marks:
    """Marks of the DTensors of batches, as long as these live. Batches and loaders are counted on each rank."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._batches, self._loaders = count(1), count(1)
        self._marks = WeakIdKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> Marks:
        return Marks(self._inputs)

    def mark_sharded(self, made: Any, batch: Any) -> Any:
        """``made`` by `shard_batch` of ``batch``, whose values are hashed as often as those of calls are compared."""
        number = next(self._batches)
        values = "" if self._inputs.are_local or not self._inputs.is_compared(number) else \
            f" with values {hash_of_values(batch):x}"
        return self._marked(made, f"batch {number} {OF_SHARD_BATCH}{values}")

    def mark_read(self, batch: Any, loader: int, number: int) -> Any:
        """The batch of this number that a loader of this number has given out."""
        return self._marked(batch, f"batch {number} of loader {loader}")

    def next_loader(self) -> int:
        return next(self._loaders)

    def of(self, leaves: Sequence[Any]) -> tuple[str, ...]:
        """The marks among the arguments of a call, in order; "" for others."""
        return tuple([self._marks.get(leaf, "") if isinstance(leaf, DTensor) else "" for leaf in leaves])

    def _marked(self, batch: Any, mark: str) -> Any:
        for leaf in pytree.tree_leaves(batch):
            if isinstance(leaf, DTensor):
                self._marks[leaf] = mark
        return batch


__all__ = ["Marks"]
