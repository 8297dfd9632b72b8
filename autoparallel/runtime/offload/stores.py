"""Stores of optimizer states between steps: in memory, and in files. States of a tile are flat tensors by state name,
views of memory that holds them during the step."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from autoparallel.errors import InputError
from autoparallel.runtime.offload.files import made, requests
from autoparallel.runtime.offload.tiles import Region, Tile
from autoparallel.schedule.tiers import BLOCK_BYTES, BUFFERS

#: By state name, the states of a region.
States = Mapping[str, Tensor]


class Store(Protocol):
    """States of one range of bytes (`tiles`), for each state name."""

    names: Sequence[str]

    def read(self, tile: Tile, filled: bool) -> None:
        """Bring the states of a tile into memory; ``filled``: some have been written."""

    def views(self, tile: Tile, region: Region, dtype: torch.dtype) -> States:
        """The memory of the states of a region of the tile that was read."""

    def write(self, tile: Tile) -> None:
        """Keep the states of a tile; its memory may be used by the tile that is read `BUFFERS` later."""

    def whole(self, region: Region, dtype: torch.dtype) -> States:
        """The states of a region of any size; writes to them reach the store only by `load_state_dict`."""

    def tier_bytes(self) -> Mapping[str, int]:
        """Bytes by tier."""

    def close(self) -> None:
        """Free memory and files."""


class Memory:
    """States in the memory of a device or of the host, as one tensor of ``num_bytes`` for each state name."""

    def __init__(self, names: Sequence[str], num_bytes: int, device: torch.device, tier: str) -> None:
        self.names, self.tier = names, tier
        pinned = tier == "host" and torch.accelerator.is_available()
        self._kept = {name: torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
                      for name in names}

    def read(self, tile: Tile, filled: bool) -> None:
        """Nothing to do: the states are in memory."""

    def write(self, tile: Tile) -> None:
        """Nothing to do: `views` are the states themselves."""

    def views(self, tile: Tile, region: Region, dtype: torch.dtype) -> States:
        return self.whole(region, dtype)

    def whole(self, region: Region, dtype: torch.dtype) -> States:
        return {name: _alone(kept, region, dtype) for name, kept in self._kept.items()}

    def tier_bytes(self) -> Mapping[str, int]:
        return {self.tier: sum(kept.untyped_storage().nbytes() for kept in self._kept.values())}

    def close(self) -> None:
        self._kept.clear()


class Disk:
    """States in a file for each state name, in ``folder``, and `BUFFERS` tiles of them in memory.

    The files have no name: they are gone when the process ends, however it ends. They are read and written past the
    page cache where the file system can (O_DIRECT). Each tile has a checksum, the sum of its 64-bit words.
    Raises InputError if the disk has no room for ``num_bytes`` for each name.
    """

    def __init__(self, names: Sequence[str], num_bytes: int, tile_bytes: int, folder: Path) -> None:
        self.names, self._stride = names, min(num_bytes, tile_bytes)
        self._files, self._sums = [made(folder, num_bytes, len(names)) for _ in names], dict[tuple[int, int], int]()
        self._buffers = [mmap.mmap(-1, max(1, len(names)) * max(BLOCK_BYTES, self._stride)) for _ in range(BUFFERS)]
        self._pool = ThreadPoolExecutor(2 * max(1, len(names)), "autoparallel-disk")  # reads and writes at once
        self._maps: list[mmap.mmap] | None = None
        self._slots, self._taken = dict[int, int](), 0    # by number of a tile in memory, its buffer; of all so far

    def read(self, tile: Tile, filled: bool) -> None:
        self._buffer(tile)
        if filled:
            list(self._pool.map(lambda number: self._read(tile, number), range(len(self.names))))

    def write(self, tile: Tile) -> None:
        list(self._pool.map(lambda number: self._write(tile, number), range(len(self.names))))
        self._slots.pop(tile.number, None)

    def views(self, tile: Tile, region: Region, dtype: torch.dtype) -> States:
        buffer = self._buffer(tile)
        return {name: _tensor(buffer, dtype, number * self._stride + region.offset - tile.begin, region.size)
                for number, name in enumerate(self.names)}

    def whole(self, region: Region, dtype: torch.dtype) -> States:
        if self._maps is None:
            self._maps = [mmap.mmap(file.fileno(), 0) for file in self._files]
        return {name: _tensor(mapped, dtype, region.offset, region.size)
                for name, mapped in zip(self.names, self._maps, strict=True)}

    def tier_bytes(self) -> Mapping[str, int]:
        return {"host": sum(map(len, self._buffers)), "disk": sum(os.fstat(f.fileno()).st_size for f in self._files)}

    def close(self) -> None:
        self._pool.shutdown()
        for file in self._files:
            file.close()
        self._buffers, self._maps = [], None

    def _read(self, tile: Tile, number: int) -> None:
        memory = self._memory(tile, number)
        for at, part in requests(memory):
            if os.preadv(self._files[number].fileno(), [part], tile.begin + at) != len(part):
                raise InputError(f"the file of the optimizer's {self.names[number]} ended early: its disk has failed, "
                                 "or the file was written to\n  Load the last checkpoint.")
        if sum_of(memory) != self._sums.get((tile.number, number)):
            raise InputError(f"the optimizer's {self.names[number]} was read from disk otherwise than it was written "
                             f"(tile {tile.number}): the disk has failed, or a tensor of state_dict() was written "
                             "to\n  Load the last checkpoint; change states by load_state_dict.")

    def _write(self, tile: Tile, number: int) -> None:
        memory = self._memory(tile, number)
        self._sums[tile.number, number] = sum_of(memory)
        for at, part in requests(memory):
            if os.pwrite(self._files[number].fileno(), part, tile.begin + at) != len(part):
                raise InputError(f"the file of the optimizer's {self.names[number]} was not written whole: the disk "
                                 "has failed\n  Load the last checkpoint.")

    def _memory(self, tile: Tile, number: int) -> memoryview:
        begin = number * self._stride
        return memoryview(self._buffer(tile))[begin : begin + tile.end - tile.begin]

    def _buffer(self, tile: Tile) -> mmap.mmap:
        """The memory of a tile: from when it is read, or first filled, until it is written."""
        if tile.number not in self._slots:
            self._slots[tile.number] = self._taken % BUFFERS
            self._taken += 1
        return self._buffers[self._slots[tile.number]]


def sum_of(memory: memoryview) -> int:
    """A checksum: of 64-bit words."""
    return int(np.frombuffer(memory, np.int64).sum())  # numpy's: torch's would take threads of the step's


def _alone(kept: Tensor, region: Region, dtype: torch.dtype) -> Tensor:
    """A region's memory as a storage of its own: `torch.save` writes whole storages, and takes no DTensor of a shard
    that begins within one."""
    own = kept.untyped_storage()[region.offset : region.end]
    return torch.empty(0, dtype=dtype, device=kept.device).set_(own, 0, (region.size,), (1,))


def _tensor(memory: mmap.mmap, dtype: torch.dtype, offset: int, count: int) -> Tensor:
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
