"""Files that are written whole or not at all; regular files of some size that are read; names nearest to others."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any


def read_regular(path: Any, most_bytes: int) -> bytes:
    """The bytes of a regular file, without waiting for a pipe or device. Raises OSError where it cannot be read,
    ValueError where it is none, or has more bytes."""
    with os.fdopen(os.open(Path(path), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        found = file.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return found


def is_nested(data: Any, most: int) -> bool:
    """Whether lists and tables lie in one another more than ``most`` deep."""
    level = [data]
    for _ in range(most):
        level = [value for one in level if isinstance(one, (dict, list))
                 for value in (one.values() if isinstance(one, dict) else one)]
    return bool(level)


def nearest(name: str, known: Collection[str]) -> str:
    """`` (is it 'cuts'?)``: of the known names that which is nearest, if any is near; first those of which this is the
    beginning, up to a dash."""
    close = [each for each in known if name and each.startswith(f"{name}-")] or \
        difflib.get_close_matches(name, known, n=1)
    return f" (is it {' or '.join(map(repr, close))}?)" if close else ""


def write_whole(path: str | Path, text: str | bytes) -> None:
    """Write a file, text as UTF-8, through a temporary one in its folder: where that fails, an old file stays as it
    was.

    A link is followed. Raises OSError when it cannot be written, UnicodeEncodeError for text that UTF-8 cannot hold.
    """
    target = Path(os.path.realpath(path))
    data = text.encode("utf-8") if isinstance(text, str) else text
    if target.exists() and not target.is_file():  # a pipe, a terminal: nothing to keep
        target.write_bytes(data)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o7777)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


__all__ = ["is_nested", "nearest", "read_regular", "write_whole"]
