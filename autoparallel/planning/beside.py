"""A background task of a search, in a forked process or interleaved with it, with equal results.

Search and task count their work on two clocks (`clock.counted`) that start together. A message is delivered `LATER_S`
counted seconds after it was sent, by the receiver's clock. So the messages known at each time, and with them all
results, do not depend on the number of cores or their load. The delay lets each side run ahead of the other.
"""

from __future__ import annotations

import gc
import math
import mmap
import os
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from contextvars import copy_context
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autoparallel import clock

#: Counted seconds after which the other side hears what was told.
LATER_S = 1.0
#: Counted seconds of a search from which on the work has a process of its own: making it takes some 50 ms.
FORK_S = 0.25
#: Seconds between looks at the other process; seconds in which its clock stands still until it counts as stuck.
POLL_S, STUCK_S = 2e-3, 600.0
#: How much sooner than this process the system ends that of the work where memory runs out, the most that there is.
FIRST_TO_END = "1000"

#: The work: a generator that is sent what it hears, and yields what it found after each piece (None: nothing is left to
#: do until it hears more). It begins with nothing heard.
Task = Generator[Sequence[Any] | None, Sequence[Any], None]


class Told(NamedTuple):
    """A message, and the time of its hearer's clock at which it is heard."""

    due_s: float
    message: Any


class _Failure(NamedTuple):
    """An error of the work in its process, and its traceback."""

    error: BaseException
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        trace = "".join(traceback.format_exception(error))
        return cls(error.with_traceback(None), trace)

    def raised(self) -> BaseException:
        self.error.add_note(f"In the process of the work beside the search:\n{self.trace}")
        return self.error


class _Worker:
    """The work with its clock, which stands at ``now_s``, and what it has not heard yet."""

    def __init__(self, work: Task, now_s: float) -> None:
        self.work, self.now_s, self.waiting = work, now_s, deque[Told]()
        self.begun = self.idle = self.done = False
        self.context = copy_context()

    def step(self, known_s: float) -> list[Told] | None:
        """Do one piece, and give back what it found; None: only when more is known than what is due before
        ``known_s``."""
        if self.idle:
            next_s = self.waiting[0].due_s if self.waiting else math.inf
            if next_s >= known_s:
                self.done = known_s == math.inf
                self.now_s = self.now_s if self.done else max(self.now_s, known_s)
                return None
            self.now_s = max(self.now_s, next_s)
        if self.now_s >= known_s:
            return None
        heard = []
        while self.waiting and self.waiting[0].due_s <= self.now_s:
            heard.append(self.waiting.popleft().message)
        found = None
        with clock.apart(self.now_s):
            try:
                found = self.context.run(self.work.send, heard) if self.begun else self.context.run(next, self.work)
            except StopIteration:
                self.done = True
            self.now_s = clock.now()
        self.begun, self.idle = True, found is None
        return [Told(self.now_s + LATER_S, message) for message in found or ()]


class _Process:
    """A worker in a process of its own, forked from this one. ``clocks``: of the search and of the work."""

    def __init__(self, worker: _Worker) -> None:
        self._memory = mmap.mmap(-1, 16)
        self.clocks = memoryview(self._memory).cast("d")
        self.clocks[0], self.clocks[1] = clock.now(), worker.now_s
        self.connection, theirs = Pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")    # of threads, which the child does without
            self.pid = os.fork()
        if not self.pid:
            self.connection.close()
            _serve(worker, theirs, self.clocks, parent)
        theirs.close()
        clock.show(self.clocks, 0)

    def tell(self, told: Told) -> bool:
        """Whether the process was there to be told."""
        try:
            self.connection.send(told)
        except OSError:
            return self.clocks[1] == math.inf    # it has done its work
        return True

    def take(self, until_s: float) -> tuple[list[Told], bool]:
        """All that is due by ``until_s`` and perhaps more, and whether that is all: else the process is gone, or
        stuck."""
        found, moved, seen = list[Told](), time.monotonic(), self.clocks[1]
        try:
            while True:
                known_s = self.clocks[1] + LATER_S    # read before what was told
                while self.connection.poll():
                    found.append(self.connection.recv())
                if known_s > until_s or known_s == math.inf:
                    return found, True
                if self.clocks[1] != seen:
                    moved, seen = time.monotonic(), self.clocks[1]
                elif time.monotonic() - moved > STUCK_S:
                    return found, False
                self.connection.poll(POLL_S)
        except (EOFError, OSError):
            return found, self.clocks[1] == math.inf    # it told all before its clock stood there

    def close(self) -> None:
        clock.show(None)
        self.connection.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _serve(worker: _Worker, connection: Connection, clocks: memoryview[float], parent: int) -> None:
    """The work in its process, which ends here."""
    try:
        gc.freeze()    # what this process got from the other is not its own to let go of
        signal.signal(signal.SIGINT, signal.SIG_IGN)    # the other process hears of it, too
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)    # the threads of the other process are not here
        _ends_first()
        clock.show(clocks, 1)
        try:
            while not worker.done and os.getppid() == parent:
                known_s = clocks[0] + LATER_S    # read before what was told
                while connection.poll():
                    worker.waiting.append(connection.recv())
                found = worker.step(known_s)
                for told in found or ():
                    connection.send(told)
                clocks[1] = worker.now_s
                if found is None and not worker.done:
                    time.sleep(POLL_S)
        except Exception as error:
            _send_failure(connection, error, worker.now_s)
        clocks[1] = math.inf
        connection.close()
    finally:
        os._exit(0)    # nothing of the other process's is cleaned up here


def _send_failure(connection: Connection, error: Exception, now_s: float) -> None:
    failure = _Failure.of(error)
    try:
        connection.send(Told(now_s + LATER_S, failure))
    except (TypeError, AttributeError, ValueError):    # it cannot be pickled
        text = f"{type(error).__name__}: {error}"
        connection.send(Told(now_s + LATER_S, _Failure(RuntimeError(text), failure.trace)))


def _ends_first() -> None:
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_END)


def may_fork() -> bool:
    """Whether the work may have a process of its own: on Linux, with two processors for this process or more, where no
    libraries run that do not bear a fork, as those of GPUs and their networks may not."""
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
        return False
    return not (torch.cuda.is_initialized() or (dist.is_available() and dist.is_initialized()))


class Beside:
    """The background task that `begin` makes, for the search of this thread: a context manager within `clock.counted`.

    Both clocks start together. In short searches and on a single processor the task is interleaved with the search.
    If its process ends (out of memory, for example), the task is started again and interleaved. Its errors are raised
    by `hear` and `last`.
    """

    def __init__(self, begin: Callable[[], Task]) -> None:
        self.begin, self.started_s = begin, clock.now()
        self._worker: _Worker | None = _Worker(begin(), self.started_s)
        self._process: _Process | None = None
        self._may_fork = may_fork()
        self._told, self._found = list[Told](), deque[Told]()
        self._heard_s, self._found_s = -math.inf, self.started_s
        #: Messages of the work that were taken, and of those how many it finds again.
        self._taken = self._again = 0

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def tell(self, message: Any) -> None:
        """Tell the work."""
        told = Told(clock.now() + LATER_S, message)
        self._told.append(told)
        if self._worker is not None:
            self._worker.waiting.append(told)
        elif self._process is not None and not self._process.tell(told):
            self._begin_again()

    def hear(self) -> list[Any]:
        """The messages of the task that are delivered by now, in the order in which they were sent."""
        if (now := clock.now()) == self._heard_s:
            return []
        self._heard_s = now
        if self._worker is not None and self._may_fork and now - self.started_s >= FORK_S:
            self._fork()
        return self._due(now, now + LATER_S)

    def last(self) -> list[Any]:
        """The remaining messages of the task, which runs to its end; the clock then stands at that end."""
        if self._process is not None:
            self._process.clocks[0] = math.inf
            clock.show(None)
        heard = self._due(math.inf, math.inf)
        clock.wait_until(self._found_s)
        return heard

    def _due(self, now: float, known_s: float) -> list[Any]:
        if self._process is not None:
            found, is_all = self._process.take(now)
            self._take(found)
            if not is_all:
                self._begin_again()
        if self._worker is not None:
            while self._worker.now_s + LATER_S <= now and not self._worker.done:
                self._take(self._worker.step(known_s) or ())
        heard = []
        while self._found and self._found[0].due_s <= now:
            message = self._found.popleft().message
            if isinstance(message, _Failure):
                raise message.raised()
            heard.append(message)
        return heard

    def _take(self, found: Sequence[Told]) -> None:
        new = found[min(self._again, len(found)):]
        self._again -= len(found) - len(new)
        self._taken += len(new)
        self._found += new
        if new:
            self._found_s = new[-1].due_s - LATER_S

    def _fork(self) -> None:
        assert self._worker is not None
        self._may_fork = False
        try:
            self._process = _Process(self._worker)
        except OSError:    # no more processes, or no memory for one
            return
        self._worker = None

    def _begin_again(self) -> None:
        """The work in turn from its start, of which what it found before is left out."""
        assert self._process is not None
        self._process.close()
        self._process = None
        self._worker = _Worker(self.begin(), self.started_s)
        self._worker.waiting += self._told
        self._again = self._taken


__all__ = ["Beside", "Task", "Told", "may_fork"]
