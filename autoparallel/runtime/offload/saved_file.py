"""Saved tensors on disk: one file of a rank, which grows as they come, is read and written past the page cache, and
has a checksum of each tensor. (`kernels.saved_on_disk` says when.)"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from autoparallel.errors import InputError
from autoparallel.runtime.offload.files import grow, made, requests
from autoparallel.runtime.offload.stores import sum_of
from autoparallel.schedule.tiers import BLOCK_BYTES, padded

#: What the file is for, in errors.
WHAT = "saved tensors of blocks"


class SavedFile:
    """Rooms for tensors in a file below ``folder``, which has ``num_bytes`` at first. A room is free again when it is
    let go of. ``used_bytes``: of all rooms. Raises InputError without room on the disk."""

    def __init__(self, folder: Path, num_bytes: int = 0) -> None:
        self.folder, self.used_bytes = folder, 0
        self._num_bytes = int(padded(max(num_bytes, BLOCK_BYTES), BLOCK_BYTES))
        self._file = made(folder, self._num_bytes, 1, WHAT)
        self._lock = threading.RLock()    # a room may be let go of, by the garbage collector, while one is taken
        self._free = defaultdict[int, list[int]](list)    # by size, where rooms begin

    def __deepcopy__(self, memo: dict[int, Any]) -> SavedFile:
        return SavedFile(self.folder)    # of a copied module

    def rooms(self, sizes: Sequence[int]) -> list[Room]:
        """A room for so many bytes for each size. Raises InputError where the disk has none."""
        with self._lock:
            return [self._room(int(padded(size, BLOCK_BYTES)), size) for size in sizes]

    def _room(self, whole: int, size: int) -> Room:
        if not self._free[whole]:
            begin, end = self.used_bytes, self.used_bytes + whole
            if end > self._num_bytes:
                grow(self._file, self.folder, self._num_bytes, end - self._num_bytes, WHAT)
                self._num_bytes = end
            self._free[whole].append(begin)
            self.used_bytes = end
        begin = self._free[whole].pop()
        room = Room(self._file, begin, whole, size)
        weakref.finalize(room, self._give_back, whole, begin).atexit = False
        return room

    def _give_back(self, whole: int, begin: int) -> None:
        with self._lock:
            self._free[whole].append(begin)


class Room:
    """``whole`` bytes of a file from ``begin`` on, for a flat tensor of ``size`` bytes, which is written once."""

    def __init__(self, file: IO[bytes], begin: int, whole: int, size: int) -> None:
        self._file, self._begin, self._whole, self._size = file, begin, whole, size
        self._sum = 0

    def write(self, value: Tensor) -> None:
        """Write a tensor of bytes in the memory of the host. Raises InputError where the disk fails."""
        memory = mmap.mmap(-1, self._whole)    # aligned, as direct I/O needs it
        torch.frombuffer(memory, dtype=torch.uint8, count=self._size).copy_(value)
        view = memoryview(memory)
        self._sum = sum_of(view)
        self._move(view, lambda part, at: os.pwrite(self._file.fileno(), part, at), "was not written whole")

    def read(self) -> Tensor:
        """The tensor, in new memory of the host. Raises InputError where it is not what was written."""
        memory = mmap.mmap(-1, self._whole)
        view = memoryview(memory)
        self._move(view, lambda part, at: os.preadv(self._file.fileno(), [part], at), "was not read whole")
        if sum_of(view) != self._sum:
            raise _failed("was read from disk otherwise than it was written")
        return torch.frombuffer(memory, dtype=torch.uint8, count=self._size)

    def _move(self, view: memoryview, move: Callable[[memoryview, int], int], wrong: str) -> None:
        """``move`` each part of the tensor, to or from its place in the file. Raises InputError where that fails."""
        for at, part in requests(view):
            try:
                moved = move(part, self._begin + at)
            except OSError as error:
                raise _failed(f"{wrong} ({error.strerror})") from error
            if moved != len(part):
                raise _failed(wrong)


def _failed(how: str) -> InputError:
    return InputError(f"a saved tensor {how}: the disk has failed\n  Load the last checkpoint.")


__all__ = ["Room", "SavedFile"]
