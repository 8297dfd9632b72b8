"""Files for states: made without a name, past the page cache; the folder that they are in is checked first."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from autoparallel.errors import InputError
from autoparallel.schedule.tiers import BLOCK_BYTES

_LOG = logging.getLogger("autoparallel")
#: Bytes of one read or write, and of a measurement (docs/measurements/offload.md).
REQUEST_BYTES, PROBE_BYTES = 2**23, 2**24
#: File systems of other machines, by the beginnings of their names in /proc/mounts.
NETWORK = ("nfs", "cifs", "smb", "fuse.", "lustre", "ceph", "gpfs", "beegfs", "9p", "afs", "glusterfs")
MOUNTS = Path("/proc/mounts")


def made(folder: Path, num_bytes: int, count: int, of: str = "optimizer states") -> IO[bytes]:
    """A file without a name of so many bytes on disk; ``count`` of them are made. Raises InputError without room."""
    try:
        file = tempfile.TemporaryFile(dir=folder, prefix="autoparallel-", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise _no_room(folder, of, count * num_bytes, error) from error
    grow(file, folder, 0, max(BLOCK_BYTES, num_bytes), of, count)
    with suppress(OSError):  # a file system without direct I/O goes by the page cache
        fcntl.fcntl(file.fileno(), fcntl.F_SETFL, fcntl.fcntl(file.fileno(), fcntl.F_GETFL) | os.O_DIRECT)
    return file


def grow(file: IO[bytes], folder: Path, begin: int, num_bytes: int, of: str, count: int = 1) -> None:
    """Let a file below ``folder`` have so many bytes from ``begin`` on. Raises InputError without room."""
    try:
        os.posix_fallocate(file.fileno(), begin, num_bytes)
    except OSError as error:
        raise _no_room(folder, of, count * num_bytes, error) from error


def _no_room(folder: Path, of: str, num_bytes: int, error: OSError) -> InputError:
    return InputError(f"disk_path {folder} has no room for {of} of {num_bytes:,} bytes on this rank: {error.strerror}"
                      "\n  Give another folder as disk_path, or take more devices, whose shards are smaller.")


def requests(memory: memoryview) -> list[tuple[int, memoryview]]:
    """Parts of at most `REQUEST_BYTES`, with where they begin."""
    return [(at, memory[at : at + REQUEST_BYTES]) for at in range(0, len(memory), REQUEST_BYTES)]


def check_folder(folder: Path) -> None:
    """Raises InputError if no files can be made in the folder; of a network file system a warning is logged, with the
    speed measured."""
    write = "give an existing folder of a local disk that this process may write to"
    if not folder.is_dir():
        found = "a file" if folder.exists() else "not there"
        raise InputError(f"disk_path {folder} is {found}: {write}")
    try:
        tempfile.TemporaryFile(dir=folder, prefix="autoparallel-").close()
    except OSError as error:
        told = "read-only" if error.errno == errno.EROFS else f"not writable ({error.strerror})"
        raise InputError(f"disk_path {folder} is {told}: {write}") from error
    if (kind := file_system(folder)).startswith(NETWORK):
        write_rate, read_rate = speed(folder)
        _LOG.warning("disk_path %s is on a network file system (%s): %.3g MB/s written, %.3g MB/s read by this rank; a "
                     "local disk is usually faster", folder, kind, write_rate / 1e6, read_rate / 1e6)


def file_system(folder: Path) -> str:
    """The type of the file system of a folder, as /proc/mounts has it ("": not known)."""
    with suppress(OSError):
        here = folder.resolve()
        mounts = [line.split() for line in MOUNTS.read_text().splitlines()]
        found = [(Path(where), kind) for _, where, kind, *_ in mounts if here.is_relative_to(where)]
        return max(found, key=lambda mount: len(mount[0].parts), default=(here, ""))[1]
    return ""


def speed(folder: Path) -> tuple[float, float]:
    """Bytes per second written and read, of `PROBE_BYTES` in one file."""
    memory, rates = memoryview(mmap.mmap(-1, PROBE_BYTES)), []
    with made(folder, PROBE_BYTES, 1) as file:
        for move in (lambda at, part: os.pwrite(file.fileno(), part, at),
                     lambda at, part: os.preadv(file.fileno(), [part], at)):
            begun = time.perf_counter()
            for at, part in requests(memory):
                move(at, part)
            rates.append(PROBE_BYTES / (time.perf_counter() - begun))
    return rates[0], rates[1]


__all__ = ["check_folder", "file_system", "grow", "made", "requests", "speed"]
