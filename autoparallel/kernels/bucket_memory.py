"""Memory of gradient buckets on CPU ranks, kept from step to step: the system maps fresh memory page by page, which
took a tenth of a small model's step. Devices with a caching allocator need none of this."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from autoparallel.kernels.tracing import is_traced


class BucketMemory:
    """Flat tensors for buckets, one for each bucket of a step; those of other sizes are let go."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parts (of one dtype and device) as one flat tensor, whose memory nobody else holds."""
        flat = [part.reshape(-1) for part in parts]
        if flat[0].device.type != "cpu" or is_traced():
            return torch.cat(flat)
        # a tensor of its own, which holds the memory while the bucket is on its way
        return torch.cat(flat, out=self._taken(sum(part.numel() for part in flat), flat[0])).view(-1)

    def _taken(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor [count] of the dtype of ``like``; a kept one if no gradient of it is left."""
        for kept in self._kept:
            if kept.dtype == like.dtype and kept.numel() == count and not is_held(kept):
                return kept
        self._kept = [*filter(is_held, self._kept), like.new_empty(count)]
        return self._kept[-1]


def is_held(tensor: torch.Tensor) -> bool:
    """Whether another tensor has this one's memory: a view, a gradient, a result that an op saved for its backward, or
    a collective's."""
    return _references(tensor) > _own_references()


def _references(tensor: torch.Tensor) -> int:
    """References to a tensor's storage, with that of this question."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@cache
def _own_references() -> int:
    """`_references` of a tensor that nobody shares."""
    return _references(torch.empty(1))


__all__ = ["BucketMemory", "is_held"]
