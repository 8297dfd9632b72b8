"""The clock of the search: mostly CPU time, so that a busy machine finds the same plan, only later.

All deadlines of `autoparallel.search` and `autoparallel.planning` are times of this clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: The share of wall time in a second of the clock; the rest is CPU time. Whatever else runs on the machine, a limit of
#: so many seconds is over after ten times as many.
WALL_SHARE = 0.1


class _Waited(threading.local):
    """Seconds in which this thread waited for a process that works for it: they count as if it worked itself."""

    seconds = 0.0


_waited = _Waited()


def now() -> float:
    """Seconds since a moment that is the same for all calls by one thread: its CPU time, and a tenth of wall time."""
    return (1 - WALL_SHARE) * (time.thread_time() + _waited.seconds) + WALL_SHARE * time.monotonic()


@contextmanager
def waiting() -> Iterator[None]:
    """Count the wall time in here, in which another process works for this thread, as this thread's CPU time."""
    wall, cpu = time.monotonic(), time.thread_time()
    try:
        yield
    finally:
        _waited.seconds += max(0.0, time.monotonic() - wall - (time.thread_time() - cpu))


__all__ = ["now", "waiting"]
