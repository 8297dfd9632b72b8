"""When Python collects garbage: not while much is made and nearly all of it stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: New objects from which a full collection is considered.
FEW = 100_000
_unseen = 0         # objects taken for old since the last full collection
_looked_at = FEW    # the number of them from which all objects are counted
_are_frozen = False  # objects that others froze; asked no more then, as `gc.get_freeze_count` goes through all of them


@contextmanager
def collected_later() -> Iterator[None]:
    """The collector waits until the end, if it is on, and takes what was made for old then; also a decorator.

    It looks at all objects of the process whenever those that are new are a quarter of them, and torch brings about a
    million: with Llama-3-8B that was a third of the time of capture, and of all that follows. It does not count what it
    took for old: once that is half of all objects, it looks at them here, or a process that plans again and again
    would keep the garbage of all its plans. Where others froze objects, it takes nothing for old from then on.
    """
    global _are_frozen
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            _are_frozen = _are_frozen or gc.get_freeze_count() > 0
            if not _are_frozen:  # what is new goes to the old, unseen: nearly all of it stays
                _take_for_old()
            gc.enable()


def _take_for_old() -> None:
    """Counting all objects takes as long as a small plan, so a count is of use until half of it is new."""
    global _unseen, _looked_at
    _unseen += gc.get_count()[0]
    gc.freeze()
    if _unseen > _looked_at:
        _looked_at = max(FEW, gc.get_freeze_count() // 2)
    gc.unfreeze()
    if _unseen > _looked_at:
        gc.collect()
        _unseen, _looked_at = 0, FEW


__all__ = ["collected_later"]
