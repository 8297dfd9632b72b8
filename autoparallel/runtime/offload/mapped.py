"""Parameters and gradients on disk: tensors in a file without a name that is mapped into memory.

The system reads what is used, keeps of it what memory is free, and writes back what was changed; none of it counts as
memory of the process's own. There are no checksums, since they could not tell whoever writes to a tensor in place from
a disk that fails; one that reports an error ends the process (SIGBUS)."""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoparallel.runtime.offload.files import made
from autoparallel.schedule.tiers import BLOCK_BYTES, padded


class MappedFiles:
    """Room for tensors of ``sizes`` bytes below ``folder``, allocated at once. A tensor's room is free again when it is
    let go of; where more are kept than there is room for, files are added. Raises InputError without room on the disk.
    """

    def __init__(self, folder: Path, sizes: Iterable[int]) -> None:
        self.folder, self.num_bytes, self._lock = folder, 0, threading.RLock()
        self._mapped: list[tuple[int, int]] = []    # address and bytes
        self._free = defaultdict[int, list[memoryview]](list)
        self._add([_room(size) for size in sizes])

    def __deepcopy__(self, memo: dict[int, Any]) -> MappedFiles:
        """Of a copied module: a file for each of its parameters and gradients, allocated when it comes."""
        made = memo[id(self)] = MappedFiles(self.folder, ())
        return made

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor on disk, with any values."""
        count, width = math.prod(shape), dtype.itemsize
        if not count:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            if not self._free[size := _room(count * width)]:
                self._add([size])
            room = self._free[size].pop()
        taken = room[:]    # which lives as long as the tensor's memory
        weakref.finalize(taken, self._give_back, room).atexit = False
        return torch.frombuffer(taken, dtype=dtype, count=count).view(shape)

    def copy_of(self, value: Tensor) -> Tensor:
        """A copy on disk."""
        return self.empty(value.shape, value.dtype).copy_(value.detach())

    def holds(self, value: Tensor) -> bool:
        """Whether a tensor's memory is in these files."""
        return any(begin <= value.data_ptr() < begin + size for begin, size in self._mapped)

    def _give_back(self, room: memoryview) -> None:
        with self._lock:
            self._free[len(room)].append(room)

    def _add(self, sizes: list[int]) -> None:
        """A file with rooms of these sizes."""
        if not (whole := sum(sizes)):
            return
        with made(self.folder, whole, 1, "parameters and gradients") as file:
            memory = memoryview(mmap.mmap(file.fileno(), whole))
        self.num_bytes += whole
        self._mapped.append((torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr(), whole))
        for size in sizes:
            self._free[size].append(memory[:size])
            memory = memory[size:]


def _room(num_bytes: int) -> int:
    return int(padded(num_bytes, BLOCK_BYTES))


__all__ = ["MappedFiles"]
