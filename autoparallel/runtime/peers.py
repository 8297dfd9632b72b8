"""Which ranks live: each tells the store so twice a second, and watches the next one.

A rank whose process is stopped, or has ended, sends no error that would name it: its peers see closed connections, or
nothing. Two threads of a rank work here. One writes its pulse to the store and reads the next rank's; the other sees
whether the first still gets answers, since calls of the store have no time limit of their own.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from weakref import WeakMethod, finalize

import torch.distributed as dist

#: Seconds after which a rank that shows no pulse is named, unless `compile` says otherwise.
LIMIT_S = 60.0
_PERIOD_S = 0.5
_PERIODS = 10
_ENDED = "ended"
_HOST = ("the store of the process group does not answer: the process that hosts it (rank 0, or the launcher) has "
         "ended or is stopped")
_GONE = "its process has ended or is stopped"


class Peers:
    """The other ranks of a process group, with the time since they last showed a pulse.

    ``limit_s``: after so many seconds without a pulse a rank is gone; ``calls``: collective calls that this rank has
    begun; ``met``: whether all ranks have begun to write pulses, so that none in the store is of an earlier process
    group. ``news``: a method that is called in a thread with (rank, reason) when a rank is found to be gone, and with
    None once a period.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, news: Callable[[tuple[int, str] | None], None]) -> None:
        self.rank, self.size, self.limit_s, self.calls, self.met = rank, size, LIMIT_S, 0, False
        self._here, self._news = store, WeakMethod(news)
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._pulse, self._stop = 0, threading.Event()
        self._store.set(_key(self.rank), f"-1 {self.calls}")
        self._threads = [threading.Thread(target=work, daemon=True, name=f"autoparallel {name}")
                         for work, name in ((self._tell, "pulse"), (self._time, "pulse limit"))]
        for thread in self._threads:
            thread.start()
        atexit.register(self.end)
        finalize(news.__self__, self.end).atexit = False  # type: ignore[attr-defined]

    def end(self) -> None:
        """Say that this rank has ended, and end the threads."""
        atexit.unregister(self.end)
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=2.0)

    @property
    def _period_s(self) -> float:
        return min(_PERIOD_S, self.limit_s / 10)

    def missing(self, waited: bool) -> tuple[int, str] | None:
        """(rank, reason) of a rank that is gone, or has ended its script, or, where this rank has ``waited`` in vain,
        has begun fewer calls than this one. None if there is none. Takes one to ten pulses."""
        try:
            before = self._pulses()
            still = before.keys() - {self.rank}
            for period in range(_PERIODS):  # a live rank of a busy machine may be late; more than one is seldom gone
                time.sleep(self._period_s)
                after = self._pulses()
                still = {rank for rank in still if after[rank] == before[rank] != _ENDED}
                if not still or (period >= 2 and len(still) == 1):
                    break
        except RuntimeError:
            return 0, _HOST
        if still:
            return min(still), _GONE
        others = {rank: pulse for rank, pulse in after.items() if rank != self.rank}
        for rank, pulse in others.items():
            if pulse == _ENDED:
                return rank, "its script has ended"
        calls = {rank: int(pulse.split()[1]) for rank, pulse in others.items()}
        if waited and calls and min(calls.values()) < self.calls:
            rank = min(calls, key=lambda r: calls[r])
            return rank, f"it has not come to call {self.calls}: it has begun {calls[rank]}"
        return None

    def _pulses(self) -> dict[int, str]:
        keys = {rank: _key(rank) for rank in range(self.size)}
        return {rank: self._here.get(key).decode() for rank, key in keys.items() if self._here.check([key])}

    def _tell(self) -> None:
        """Write this rank's pulse and read the next rank's, until the end."""
        watched, still = (self.rank + 1) % self.size, -1
        seen: str | None = None  # until ranks have met, it may be an earlier process group's: it counts once it changes
        try:
            while not self._stop.wait(self._period_s):
                self._store.set(_key(self.rank), f"{self._pulse} {self.calls}")
                self._pulse += 1
                now = self._store.get(_key(watched)).decode() if self._store.check([_key(watched)]) else ""
                counts = self.met or still >= 0 or seen not in (None, now)
                if counts and now == _ENDED and watched != self.rank:
                    watched, seen, still = (watched + 1) % self.size, None, -1
                    continue
                still = still + 1 if now == seen and counts else 0 if counts else -1
                seen = now
                gone = watched != self.rank and still * self._period_s >= self.limit_s
                self._say((watched, f"{_GONE}: no sign of it in {self.limit_s:g} s") if gone else None)
            self._store.set(_key(self.rank), _ENDED)
        except RuntimeError:  # whoever hosts the store has gone, maybe as it should: a call that needs it will tell
            self._stop.set()

    def _time(self) -> None:
        """Say so if the store stops to answer."""
        seen, still = -1, 0
        while not self._stop.wait(self._period_s):
            still = still + 1 if self._pulse == seen else 0
            seen = self._pulse
            if still * self._period_s >= self.limit_s:
                self._say((0, _HOST))

    def _say(self, gone: tuple[int, str] | None) -> None:
        if (news := self._news()) is not None:
            news(gone)


def _key(rank: int) -> str:
    return f"autoparallel/pulse/{rank}"


__all__ = ["LIMIT_S", "Peers"]
