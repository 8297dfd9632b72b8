"""When Python collects garbage: not while much is made and nearly all of it stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: New objects from which a full collection is considered.
FEW = 100_000
_unseen = 0


@contextmanager
def collected_later() -> Iterator[None]:
    """The collector waits until the end, if it is on, and takes what was made for old then; also a decorator.

    It looks at all objects of the process whenever those that are new are a quarter of them, and torch brings about a
    million: with Llama-3-8B that was a third of the time of capture, and of all that follows. It does not count what it
    took for old: once that is half of all objects, it looks at them here, or a process that plans again and again
    would keep the garbage of all its plans.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # what is new goes to the old, unseen: nearly all of it stays
                _take_for_old()
            gc.enable()


def _take_for_old() -> None:
    global _unseen
    _unseen += gc.get_count()[0]
    gc.freeze()
    all_objects = gc.get_freeze_count() if _unseen > FEW else 0
    gc.unfreeze()
    if _unseen > FEW and 2 * _unseen > all_objects:
        gc.collect()
        _unseen = 0


__all__ = ["collected_later"]
