"""Requests that wait for other workers without a thread each: all are tried again after each change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import Any

from torch.futures import Future

#: (kind, value): "done"; "wait", the worker asks again; "input", "refused" and "lost", errors.
Answer = tuple[str, Any]
#: Seconds after which a waiting request is answered "wait", so that its caller can say for whom.
PATIENCE_S = 2.0


class NotYet(Exception):  # noqa: N818
    """The request must wait; says for what. Raised before anything is changed."""


class Refused(Exception):  # noqa: N818
    """The request is answered by an error."""

    def __init__(self, kind: str, value: Any) -> None:
        self.answer = (kind, value)


@dataclass(frozen=True)
class _Request:
    attempt: Callable[[], Any]
    until: float
    future: Future


class Requests:
    """``lock``: held during every attempt. ``changes``: to be counted up by what may let others go on. ``fail``: called
    with an error that is none of the two above: nothing more may be acknowledged."""

    def __init__(self, fail: Callable[[Exception], str]) -> None:
        self.lock, self.changes = Lock(), 0
        self._fail, self._waiting = fail, list[_Request]()

    def add(self, attempt: Callable[[], Any]) -> Future:
        """A future of the attempt's answer: when it neither waits any more, nor has waited for `PATIENCE_S`."""
        future: Future = Future()
        self.go_on(_Request(attempt, monotonic() + PATIENCE_S, future))
        return future

    def go_on(self, *new: _Request) -> None:
        """Try all until none changes anything. Futures are completed outside the lock: that sends their answers."""
        answered: list[tuple[Future, Answer]] = []
        with self.lock:
            self._waiting += new
            before = -1
            while before != self.changes:
                before, tried, self._waiting = self.changes, self._waiting, []
                for request in tried:
                    answer = self._tried(request)
                    if answer is None:
                        self._waiting.append(request)
                    else:
                        answered.append((request.future, answer))
        for future, answer in answered:
            future.set_result(answer)

    def _tried(self, request: _Request) -> Answer | None:
        try:
            return "done", request.attempt()
        except NotYet as reason:
            return ("wait", str(reason)) if monotonic() > request.until else None
        except Refused as error:
            return error.answer
        except Exception as error:  # the state may be half changed
            return "refused", self._fail(error)


__all__ = ["PATIENCE_S", "Answer", "NotYet", "Refused", "Requests"]
