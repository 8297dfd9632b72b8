"""The order in which multi-copy runs several micro-batches at a time.

Each copy's program is a sequence of segments: compute, ended by redistribution steps of activations that communicate.
The copies alternate. A copy awaits the steps that ended its previous segment, computes one segment, and begins the
steps that end it, which travel while the other copies compute. Backward runs the same order in reverse.

Where blocks are recomputed, or their parameters are gathered for each use (ZeRO-3) or fetched from the host, segments
also end with blocks: a block's parameters serve all copies, then those of the next. A recomputed block in which copies
alternate is recomputed for all of them together, in which they alternate too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from autoparallel.schedule.step_config import Hybrid

Step = TypeVar("Step")


def segment_order(segments: int, copies: int) -> Iterator[tuple[int, int]]:
    """Pairs (segment, copy) in the order in which they run.

        >>> list(segment_order(segments=2, copies=2))
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    return itertools.product(range(segments), range(copies))


def runs_by_block(hybrid: Hybrid) -> bool:
    """Whether several micro-batches at a time run block by block: each block is recomputed, or its parameters are
    gathered for all of them and then freed (ZeRO-3)."""
    return hybrid.copies > 1 and (hybrid.recompute != "none" or hybrid.zero_stage == 3)


def ends_every_block(hybrid: Hybrid) -> bool:
    """Whether a segment ends with each block, with sends inside or not: a recomputed block is a part of its own."""
    return hybrid.copies > 1 and hybrid.recompute != "none"


def block_ends(blocks: Sequence[object], communicates: Sequence[bool]) -> set[int]:
    """The numbers of the ops before which a segment ends with a block. ``blocks``: by op, its block; ``communicates``:
    whether a segment ends before it anyway, to send activations. A block with such ends inside does not end another.

        >>> sorted(block_ends(["a", "a", "b", "b", "c"], [False] * 5))
        [2, 4]
        >>> sorted(block_ends(["a", "a", "b", "b", "c"], [False, False, False, True, False]))
        [2]
    """
    found, inside = set[int](), False
    for number, (block, sends) in enumerate(zip(blocks, communicates, strict=True)):
        if number and block != blocks[number - 1]:
            if not inside:
                found.add(number)
            inside = False
        inside |= sends
    return found


def rounds_of(paths: Sequence[Sequence[Step]], communicates: Callable[[Step], bool]
              ) -> list[tuple[list[Step], list[Step]]]:
    """The redistribution steps before one op in rounds: (steps that run at once, steps that are then begun together).
    Those of a later round read results of the one before. ``paths``: the steps of each operand.

        >>> rounds_of([["gather", "slice"], ["gather"], ["slice"]], lambda step: step == "gather")
        [(['slice'], ['gather', 'gather']), (['slice'], [])]
    """
    found = list[tuple[list[Step], list[Step]]]()
    for path in paths:
        number = 0
        for step in path:
            while len(found) <= number:
                found.append(([], []))
            if communicates(step):
                found[number][1].append(step)
                number += 1
            else:
                found[number][0].append(step)
    return found
