"""The part of a program on one pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass

#: A value: (decision, number of its output).
Value = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """The decisions of one stage, the values that it receives from the stage before and those that it sends to the
    next."""

    decisions: frozenset[int]
    received: tuple[Value, ...] = ()
    sent: tuple[Value, ...] = ()
