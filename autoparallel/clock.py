"""The clock of planning: all deadlines of `search/`, `pricing/`, `partition/` and `planning/` are times of this clock.

Within `counted` it counts work in place of time: an equal search ends at an equal place on every machine, however busy.
A background task (`planning.beside`) counts on its own clock, which starts with the search's (`apart`). A limit is
one of the longer of both clocks, so that it is roughly wall time on two cores. Elsewhere it is mostly CPU time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

#: Seconds of a unit of work on one core. Fitted to joint searches (docs/measurements/planning.md), which had too little
#: of the last six kinds to tell: these are estimates. Work that is not listed is taken as in proportion to what is.
RATES: Mapping[str, float] = {
    "decisions read": 2e-5,  # of a strategy graph, into a search problem
    "combinations judged": 8e-3,  # each estimate and each bound, in addition to all other work
    "decisions made": 6e-5,  # by a program cut into micro-batches
    "ops priced": 2e-4,      # distinct ones of a strategy graph
    "cells priced": 2.5e-7,  # of an edge's table
    "tasks simulated": 8.5e-6,
    "nodes laid out": 1.1e-5, # for elimination, and edges
    "tables named": 3.5e-6,
    "tables made": 8e-5,     # in an elimination
    "cells added": 3.5e-9,   # in them
    "messages sent": 9.5e-6,
    "moves tried": 1e-5,     # by local search
    "cells passed": 3.5e-8,  # by a round of local search, or of merging nodes
    "rows compared": 1e-6,
    "cells compared": 2.5e-9,
    "nodes judged": 1e-6,    # of a plan, and edges
    "variables branched": 1e-6,  # by HiGHS, at a node of its search tree
    "rows pivoted": 1e-8,
}
#: Time limits that are not given: of a joint search, and of others.
JOINT_LIMIT_S, LIMIT_S = 20.0, 60.0
#: Outside of `counted`, the share of wall time in a second of the clock; the rest is CPU time. Whatever else runs on
#: the machine, a limit of so many seconds is over after ten times as many.
WALL_SHARE = 0.1
#: Within `counted`, time is up after so many times the limit by the wall clock; then each look at the clock takes
#: `LATE_S` counted seconds.
EMERGENCY, LATE_S = 40.0, 1.0


class Shown(Protocol):
    """Where counted seconds are shown, by place."""

    def __setitem__(self, place: int, seconds: float, /) -> None: ...


class _Clock(threading.local):
    """``waited_s``: seconds in which this thread waited for a process that works for it, as if it worked itself.
    ``counted_s``: counted seconds, from the begin of `counted` on; ``until``: the wall clock's time of an emergency,
    None outside of `counted`. ``shown``: where another process reads the counted seconds, at ``place``."""

    waited_s = 0.0
    counted_s = 0.0
    until: float | None = None
    is_late = False
    shown: Shown | None = None
    place = 0


_clock = _Clock()


def now() -> float:
    """Seconds since a moment that is the same for all calls by one thread."""
    if _clock.until is None:
        return (1 - WALL_SHARE) * (time.thread_time() + _clock.waited_s) + WALL_SHARE * time.monotonic()
    if time.monotonic() > _clock.until:
        _clock.is_late = True
        _clock.counted_s += LATE_S
    return _clock.counted_s


def did(unit: str, amount: float = 1.0) -> None:
    """Count so many units of work, of `RATES`."""
    _clock.counted_s += RATES[unit] * amount
    if _clock.shown is not None:
        _clock.shown[_clock.place] = _clock.counted_s


def show(shown: Shown | None, place: int = 0) -> None:
    """Keep ``shown[place]`` at the counted seconds of this thread, for another process; None: no longer."""
    _clock.shown, _clock.place = shown, place


@contextmanager
def apart(from_s: float) -> Iterator[None]:
    """Within `counted`: count the work in here from a time of this clock on, and go on afterwards as if it were not."""
    own_s, _clock.counted_s = _clock.counted_s, from_s
    try:
        yield
    finally:
        _clock.counted_s = own_s


def wait_until(time_s: float) -> None:
    """Within `counted`: go on at a time of this clock, unless that is over."""
    _clock.counted_s = max(_clock.counted_s, time_s)


def limit_s(joint: bool) -> float:
    """The time limit of a search for which none is given."""
    return JOINT_LIMIT_S if joint else LIMIT_S


@contextmanager
def counted(limit_s: float) -> Iterator[None]:
    """Count work in here, in place of time, for a search of so many seconds. The count starts at 0, so that equal
    searches have equal rounding."""
    if _clock.until is not None:  # within another
        yield
        return
    _clock.until, _clock.is_late, _clock.counted_s = time.monotonic() + EMERGENCY * limit_s, False, 0.0
    try:
        yield
    finally:
        _clock.until = None


def is_counted() -> bool:
    """Whether this thread is within `counted`."""
    return _clock.until is not None


def emergency_s() -> float:
    """Seconds of the wall clock until all time is up, within `counted`."""
    return 0.0 if _clock.until is None else max(0.0, _clock.until - time.monotonic())


def spent_s() -> float:
    """Seconds that were counted within this thread's present, or last, `counted`."""
    return _clock.counted_s


def was_late() -> bool:
    """Whether this thread's last search within `counted` was ended by the wall clock."""
    return _clock.is_late


@contextmanager
def waiting() -> Iterator[None]:
    """Count the wall time in here, in which another process works for this thread, as this thread's CPU time; within
    `counted` not at all."""
    wall, cpu = time.monotonic(), time.thread_time()
    try:
        yield
    finally:
        _clock.waited_s += max(0.0, time.monotonic() - wall - (time.thread_time() - cpu))


__all__ = ["apart", "counted", "did", "emergency_s", "is_counted", "limit_s", "now", "show", "spent_s", "wait_until",
           "waiting", "was_late"]
