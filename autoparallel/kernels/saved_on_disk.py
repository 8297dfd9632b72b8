"""Saved tensors of blocks in files: a thread writes them while forward goes on, another reads them during backward.

From a device they go by way of pinned host memory. A block waits until that before the last is written, so that the
host holds two at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Protocol

import torch

from autoparallel.kernels import host_copies
from autoparallel.kernels.host_copies import HOST, Copies, Values


class Files(Protocol):
    """Room for tensors in files that are mapped into memory."""

    def rooms(self, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """A tensor of so many bytes for each size. Raises InputError without room."""


_files: ContextVar[Files | None] = ContextVar("files_of_saved_tensors", default=None)


@contextmanager
def use_files(files: Files | None) -> Iterator[None]:
    """Set the files of the tensors that one call saves on disk."""
    token = _files.set(files)
    try:
        yield
    finally:
        _files.reset(token)


class OnDisk:
    """Copies on disk of the ``sources``, flat tensors of bytes: as `Copies` of ``begin(..., held=True)``. Made within
    `use_files`. The caller holds the sources until `free_sources`."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        files = _files.get()
        assert files is not None, "a plan with saved_on='disk' has files"
        self._device = sources[0].device
        self._rooms = files.rooms([source.nbytes for source in sources])
        self._copies = None if self._device.type == "cpu" else host_copies.begin(sources, HOST, held=True)
        self._written = _thread("writes").submit(_write, self._rooms, sources, self._copies)

    def free_sources(self) -> None:
        """Wait until all is written; then the caller may drop the sources. Raises errors of the disk."""
        self._written.result()
        if self._copies is not None:
            self._copies.free_sources()
            self._copies = None    # and the host's memory

    def free_source(self, source: torch.Tensor) -> None:
        """The caller may drop one source, which is held until it is written."""
        if self._copies is not None:
            self._copies.free_source(source)

    def back(self, which: Sequence[int]) -> FromDisk:
        """Begin to read some of these to the device that they came from, in memory of its current stream."""
        rooms = [self._rooms[number] for number in which]
        return FromDisk(_thread("reads").submit(
            _read, rooms, self._written, self._device, host_copies.current(self._device)))


class FromDisk:
    """Tensors that are read from disk."""

    def __init__(self, read: Future[Copies]) -> None:
        self._read = read

    def ready(self) -> Values:
        """The tensors, for the current stream, when they are read. Raises errors of the disk."""
        return self._read.result().ready()


def _write(rooms: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], copies: Copies | None) -> None:
    for room, value in zip(rooms, sources if copies is None else copies.ready(), strict=True):
        room.copy_(value)


def _read(rooms: Sequence[torch.Tensor], written: Future[None], device: torch.device, stream: torch.Stream | None
          ) -> Copies:
    written.result()
    if device.type == "cpu":
        return Copies(tuple(room.clone() for room in rooms))
    there = [host_copies.host_memory(room) for room in rooms]
    with host_copies.under(stream):
        return host_copies.begin(there, device, held=True)


@cache
def _thread(of: str) -> ThreadPoolExecutor:
    """The one thread of a process for ``of``, "writes" or "reads"."""
    return ThreadPoolExecutor(1, f"autoparallel-saved-{of}")


__all__ = ["FromDisk", "OnDisk", "use_files"]
