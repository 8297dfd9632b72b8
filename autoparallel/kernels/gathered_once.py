"""ZeRO-2 in micro-batches: parameters are gathered once for all of them, and each one's backward reduces gradients.

Gathers of stored parameters are issued before the first micro-batch (`issue_gathers`), for which the later stages of a
pipeline wait anyway. Micro-batches run the same program. Under `keeping`, its `begin_gathers` and `gather` keep in
forward what they have gathered, and take that from the second time on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from autoparallel.kernels import async_communication, groups
from autoparallel.kernels.async_communication import Begun, Gradients, Moved, Sending, Values
from autoparallel.kernels.collectives import Sizes
from autoparallel.layout import Placement


@dataclass
class Kept:
    """The gathers of a step, by their number in the program: their results, and functions that await those issued."""

    gathered: dict[int, Values] = field(default_factory=dict)
    issued: dict[int, Callable[[], Values]] = field(default_factory=dict)

    def clear(self) -> None:
        self.gathered.clear()
        self.issued.clear()


_kept: ContextVar[Kept | None] = ContextVar("kept", default=None)


@contextmanager
def keeping(kept: Kept) -> Iterator[None]:
    """Run a forward that takes what is in ``kept``, and adds to it what it gathers."""
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)


@dataclass(frozen=True)
class _Once:
    """Communication ``sending`` of which forward runs once: its results are ``kept`` under ``number``."""

    sending: Sending
    kept: Kept
    number: int

    def forward(self, values: Values) -> Callable[[], Values]:
        if (made := self.kept.gathered.get(self.number)) is not None:
            return lambda: made
        finish = self.kept.issued.pop(self.number, None) or self.sending.forward(values)

        def finished() -> Values:
            self.kept.gathered[self.number] = finish()
            return self.kept.gathered[self.number]

        return finished

    def backward(self, gradients: Gradients) -> Callable[[], Gradients]:
        return self.sending.backward(gradients)

    def backward_at_once(self, gradients: Gradients) -> Gradients:
        return self.sending.backward_at_once(gradients)


def _kept_here() -> Kept:
    kept = _kept.get()
    assert kept is not None, "a program of micro-batches runs under `keeping`"
    return kept


def _once(sending: Sending, number: int) -> Sending:
    return _Once(sending, _kept_here(), number)


def issue_gathers(axis: str, steps: Sequence[tuple[str, str, Sizes]], *values: torch.Tensor, number: int) -> None:
    """Issue gather ``number``, which `begin_gathers` then takes."""
    with torch.no_grad():
        _kept_here().issued[number] = async_communication.gathers(axis, steps, None).forward(values)


def begin_gathers(axis: str, steps: Sequence[tuple[str, str, Sizes]], *values: torch.Tensor, number: int,
                  sum_dtype: torch.dtype | None = None) -> Begun:
    """`async_communication.begin_gathers`, once per step; ``number``: of the gather in its program."""
    return async_communication.begin(_once(async_communication.gathers(axis, steps, sum_dtype), number), *values)


def gather(value: torch.Tensor, axis: str, source: str, target: str, source_sizes: Sizes = (),
           target_sizes: Sizes = (), sum_dtype: torch.dtype | None = None, *, number: int) -> torch.Tensor:
    """`collectives.redistribute` of a parameter, in forward once per step; ``number``: as of `begin_gathers`."""
    moved = Moved(groups.current(axis), Placement.parse(source), Placement.parse(target), source_sizes, target_sizes,
                  sum_dtype)
    return async_communication.end_step(async_communication.begin(_once(moved, number), value))


__all__ = ["Kept", "begin_gathers", "gather", "issue_gathers", "keeping"]
