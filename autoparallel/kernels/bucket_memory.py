"""Memory of gradient buckets on CPU ranks, kept from step to step: the system maps fresh memory page by page, which
took a tenth of a small model's step. Devices with a caching allocator need none of this."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoparallel.kernels.tracing import is_traced

#: References to a storage that nobody but its tensor here uses: the tensor's, and that of the question.
_UNUSED = 2


class BucketMemory:
    """Flat tensors for buckets, one for each bucket of a step; those of other sizes are let go."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parts (of one dtype and device) as one flat tensor, whose memory nobody else holds."""
        flat = [part.reshape(-1) for part in parts]
        if flat[0].device.type != "cpu" or is_traced():
            return torch.cat(flat)
        return torch.cat(flat, out=self._taken(sum(part.numel() for part in flat), flat[0]))

    def _taken(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor [count] of the dtype of ``like``; a kept one if no gradient of it is left."""
        unused = [kept for kept in self._kept if torch._C._storage_Use_Count(kept.untyped_storage()._cdata) == _UNUSED]
        for kept in unused:
            if kept.dtype == like.dtype and kept.numel() == count:
                return kept
        self._kept = [kept for kept in self._kept if not any(kept is old for old in unused)]
        self._kept.append(like.new_empty(count))
        return self._kept[-1]


__all__ = ["BucketMemory"]
