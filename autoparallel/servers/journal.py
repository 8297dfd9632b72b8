"""A server's state on disk: generations of a whole state and a log of the events after it.

    state-00000002.pt     the state at the beginning of this generation, renamed into place when it is whole
    log-00000002.bin      events since, each with length and checksum; what a crash cut off at its end is dropped

An event is acknowledged after `append` has returned. ``durability``: "fsync", the log is on the disk by then, so that
the machine may fail; "log", it is with the operating system, so that the process may be killed; "checkpoint", there is
no log, and what came after the last whole state is lost.
"""

from __future__ import annotations

import fcntl
import io
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from autoparallel.errors import ServerError

DURABILITY = ("fsync", "log", "checkpoint")
Event = tuple[str, list[Any]]
_HEAD = struct.Struct("<QII")  # bytes of the event, its checksum, and the checksum of these two


class Journal:
    """Of one server, in a folder of its own, which is locked meanwhile. Raises ServerError if another process has it,
    or it cannot be written."""

    def __init__(self, folder: Path, durability: str) -> None:
        self.folder, self._durability = folder, durability
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ServerError(f"another server writes to {folder}: end it, or give another checkpoint_dir") from error
        except OSError as error:
            raise ServerError(f"cannot write to {folder}: {error}\n  Give a checkpoint_dir on a disk with space, for "
                              "which this process has the rights") from error
        for leftover in folder.glob("*.tmp"):
            leftover.unlink()
        self._log: BinaryIO | None = None

    def generations(self) -> list[int]:
        """Numbers of whole states, newest first."""
        return sorted((int(path.stem.split("-")[1]) for path in self.folder.glob("state-*.pt")), reverse=True)

    def state(self, generation: int) -> dict[str, Any]:
        return dict(torch.load(self._state(generation), weights_only=True))

    def events(self, generation: int) -> Iterator[Event]:
        """The log of a generation, and of later ones (which a crash, or a return to an earlier state, may leave)."""
        newest = max([generation, *self.generations()])
        for number in range(generation, newest + 1):
            yield from _read(self._log_path(number))

    def begin(self, state: dict[str, Any], kept: int = 2) -> None:
        """A new generation: write the whole state, start its log, drop the generations before the last ``kept``."""
        number = max(self.generations(), default=0) + 1
        path = self._state(number)
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        self.close_log()
        self._log_path(number).unlink(missing_ok=True)
        self._log = self._log_path(number).open("ab")
        temporary.replace(path)
        self._sync_folder()
        for old in self.generations()[kept:]:
            self._state(old).unlink()
            self._log_path(old).unlink(missing_ok=True)

    def resume(self, generation: int) -> None:
        """Go on with the log of a generation: its end, where a crash cut an event, is cut off."""
        path = self._log_path(generation)
        path.touch()
        whole = sum(_HEAD.size + size for size in _sizes(path))
        os.truncate(path, whole)
        self._log = path.open("ab")

    def append(self, name: str, arguments: list[Any]) -> None:
        """Write an event; returns when it is as safe as ``durability`` says."""
        if self._durability == "checkpoint":
            return
        assert self._log is not None
        buffer = io.BytesIO()
        torch.save((name, arguments), buffer)
        data = buffer.getvalue()
        self._log.write(_head(data) + data)
        self._log.flush()
        if self._durability == "fsync":
            os.fsync(self._log.fileno())

    def close_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def close(self) -> None:
        """Close the log and give up the folder."""
        self.close_log()
        self._lock.close()

    def _state(self, generation: int) -> Path:
        return self.folder / f"state-{generation:08d}.pt"

    def _log_path(self, generation: int) -> Path:
        return self.folder / f"log-{generation:08d}.bin"

    def _sync_folder(self) -> None:
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _head(data: bytes) -> bytes:
    size, checksum = len(data), zlib.crc32(data)
    return _HEAD.pack(size, checksum, zlib.crc32(struct.pack("<QI", size, checksum)))


def _records(path: Path) -> Iterator[bytes]:
    """The whole records of a log. Raises ServerError for one in its middle that is not what was written."""
    if not path.exists():
        return
    end, at = path.stat().st_size, 0
    with path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            size, checksum, own = _HEAD.unpack(head)
            known = own == zlib.crc32(struct.pack("<QI", size, checksum))
            data = file.read(size) if known else file.read()
            at += _HEAD.size + len(data)
            if known and len(data) == size and zlib.crc32(data) == checksum:
                yield data
            elif at == end and (known or not any(head + data)):
                return  # cut off by a crash before it was acknowledged
            else:
                raise ServerError(f"{path} is damaged before byte {at}: restore the folder from a copy, or start anew "
                                  "in another one")


def _sizes(path: Path) -> Iterator[int]:
    return (len(data) for data in _records(path))


def _read(path: Path) -> Iterator[Event]:
    for data in _records(path):
        name, arguments = torch.load(io.BytesIO(data), weights_only=True)
        yield name, arguments


__all__ = ["DURABILITY", "Event", "Journal"]
