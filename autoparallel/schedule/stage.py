"""The part of a program that one pipeline stage runs."""

from __future__ import annotations

from dataclasses import dataclass

#: A value: output number ``[1]`` of site ``[0]``.
Value = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """What one program runs: its sites, the values that come from the part before and those that go to the next."""

    decisions: frozenset[int]
    received: tuple[Value, ...] = ()
    sent: tuple[Value, ...] = ()
