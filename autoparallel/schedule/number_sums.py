"""Which sums of single numbers over ranks, such as a loss and its count, go in one all-reduce.

A message of one number costs what its threads take to wake up, on each rank. `lower.number_sums` applies the rule to
the nodes of a program and `pricing.number_sums` to the decisions of a plan, so that what is simulated is what runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Item(NamedTuple):
    """A node of a program, in order. ``reads``: the numbers of earlier items; ``kind``: of a sum of one number (None:
    no such sum), of which those of equal kind can be merged; ``of_numbers``: it makes one number and can come later."""

    reads: Sequence[int]
    kind: Hashable = None
    of_numbers: bool = False


def summed_together(items: Sequence[Item]) -> list[tuple[int, ...]]:
    """The items in the order in which they run, sums of one message as one group. Sums that do not need each other run
    where the last of them is; only numbers are computed later for it, and all else keeps its order.

        >>> first, second, reader = Item((), "x"), Item((), "x"), Item((0,), of_numbers=True)
        >>> summed_together([first, reader, second])
        [(0, 2), (1,)]
        >>> summed_together([first, reader, Item((1,), "x")])           # the second needs the first
        [(0,), (1,), (2,)]
    """
    order, done = [(number,) for number in range(len(items))], set[int]()
    found = list[tuple[int, ...]](order)
    for number, item in enumerate(items):
        if item.kind is None or number in done:
            continue
        members, later = _together(items, number, found)
        done.update(members)
        if len(members) > 1:
            moved, last = {*members, *later}, members[-1]
            found = [group for old in found for group in (
                [tuple(members), *((one,) for one in later)] if old == (last,) else [] if moved & {*old} else [old])]
    return found


def _together(items: Sequence[Item], first: int, order: Sequence[tuple[int, ...]]) -> tuple[list[int], list[int]]:
    """The sums that can be merged with the first one, and the items between them that need one of these sums."""
    members, later, between = [first], list[int](), list[int]()
    for group in order[order.index((first,)) + 1 :]:
        known = {*members, *later, *between}
        if any(known & {*items[number].reads} for number in group):
            if not all(items[number].of_numbers for number in group) or len(group) > 1:
                break
            between += group
        elif len(group) == 1 and items[group[0]].kind == items[first].kind:
            members += group
            later += between
            between.clear()
    return members, later


__all__ = ["Item", "summed_together"]
