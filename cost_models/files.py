"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | Path, text: str) -> None:
    """Write a text file through a temporary one in its folder: where that fails, an old file stays as it was.

    A link is followed. Raises OSError when it cannot be written, UnicodeEncodeError for text that UTF-8 has not.
    """
    target = Path(os.path.realpath(path))
    data = text.encode("utf-8")
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


__all__ = ["write_whole"]
