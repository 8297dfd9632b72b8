"""Saved tensors of blocks in a file: threads write them while forward goes on, others read them during backward.

From a device they go by way of pinned host memory. A block waits until that before the last is written, so that the
host holds two at most.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any, Protocol, TypeVar

import torch

from autoparallel.kernels import host_copies
from autoparallel.kernels.host_copies import HOST, Copies, Values

T = TypeVar("T")
#: Threads that write, and that read.
THREADS = 2


class Room(Protocol):
    """Room on disk for one tensor of bytes."""

    def write(self, value: torch.Tensor) -> None:
        """Write a tensor in the memory of the host. Raises InputError where the disk fails."""

    def read(self) -> torch.Tensor:
        """The tensor, in new memory of the host. Raises InputError where the disk fails."""


class File(Protocol):
    """What gives rooms, each until it is let go of."""

    def rooms(self, sizes: Sequence[int]) -> Sequence[Room]:
        """A room for so many bytes for each size. Raises InputError where the disk has none."""


#: Pending writes of copies that nobody will read: backward used their sources.
_dropped: list[Future[None]] = []
_file: ContextVar[File | None] = ContextVar("file_of_saved_tensors", default=None)


@contextmanager
def use_file(file: File | None) -> Iterator[None]:
    """Set the file of the tensors that one call saves on disk."""
    token = _file.set(file)
    try:
        yield
    finally:
        _file.reset(token)


class OnDisk:
    """Copies on disk of the ``sources``, flat tensors of bytes: as `Copies` of ``begin(..., held=True)``. Made within
    `use_file`. The caller holds the sources until `free_sources`."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        file = _file.get()
        assert file is not None, "a plan with saved_on='disk' has a file"
        with suppress(IndexError):    # of the last one
            while True:
                wait([_dropped.pop()])    # its room is free then, so that the file grows no further than it must
        self._device = sources[0].device
        self._rooms = file.rooms([source.nbytes for source in sources])
        self._copies = None if self._device.type == "cpu" else host_copies.begin(sources, HOST, held=True)
        self._written = [_submit("writes", _write, room, source, number, self._copies)
                         for number, (room, source) in enumerate(zip(self._rooms, sources, strict=True))]
        weakref.finalize(self, _dropped.extend, self._written).atexit = False

    def free_sources(self) -> None:
        """Wait until all is written; then the caller may drop the sources. Raises errors of the disk."""
        for one in self._written:
            one.result()
        if self._copies is not None:
            self._copies.free_sources()
            self._copies = None    # and the host's memory

    def free_source(self, source: torch.Tensor) -> None:
        """The caller may drop one source, which is held until it is written."""
        if self._copies is not None:
            self._copies.free_source(source)

    def back(self, which: Sequence[int]) -> FromDisk:
        """Begin to read some of these to the device that they came from, in memory of its current stream."""
        stream = host_copies.current(self._device)
        return FromDisk([_submit("reads", _read, self._rooms[number], self._written[number], self._device, stream)
                         for number in which])


class FromDisk:
    """Tensors that are read from disk."""

    def __init__(self, read: Sequence[Future[Copies]]) -> None:
        self._read = read

    def ready(self) -> Values:
        """The tensors, for the current stream, when they are read. Raises errors of the disk."""
        return tuple(value for one in self._read for value in one.result().ready())


def _write(room: Room, source: torch.Tensor, number: int, copies: Copies | None) -> None:
    room.write(source if copies is None else copies.ready()[number])


def _read(room: Room, written: Future[None], device: torch.device, stream: torch.Stream | None) -> Copies:
    written.result()
    there = room.read()
    if device.type == "cpu":
        return Copies((there,))
    with host_copies.under(stream):
        return host_copies.begin([host_copies.host_memory(there)], device, held=True)


def _submit(of: str, call: Callable[..., T], *args: Any) -> Future[T]:
    """``call(*args)`` in a thread, which lets go of the arguments before its future is done: then a room is free, and
    the next micro-batch takes it. (An executor alone lets go of them some time later.)"""
    arguments = [args]
    return _threads(of).submit(lambda: call(*arguments.pop()))


@cache
def _threads(of: str) -> ThreadPoolExecutor:
    """The threads of a process for ``of``, "writes" or "reads": several requests are on their way."""
    return ThreadPoolExecutor(THREADS, f"autoparallel-saved-{of}")


__all__ = ["FromDisk", "OnDisk", "use_file"]
