"""When Python collects garbage: not while much is made and nearly all of it stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later() -> Iterator[None]:
    """The collector waits until the end, if it is on, and takes what was made for old then; also a decorator.

    It looks at all objects of the process whenever those that are new are a quarter of them, and torch brings about a
    million: with Llama-3-8B that was a third of the time of capture, and of all that follows.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # what is new goes to the old, unseen: nearly all of it stays
                gc.freeze()
                gc.unfreeze()
            gc.enable()
