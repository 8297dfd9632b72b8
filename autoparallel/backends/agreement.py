"""Ranks of a mesh compile in turn, and compare what they made, so that a difference is an error instead of a hang."""

from __future__ import annotations

import itertools
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from autoparallel.backends.moving import Collective
from autoparallel.errors import LoweringError
from autoparallel.kernels.groups import Axis, group_of

#: How long a rank waits for another to compile, before it compiles by itself.
LONGEST_WAIT = timedelta(minutes=30)
#: Compilations so far, by process group.
_compiled = Counter[str]()


def check_order(order: Sequence[Collective], axes: Iterable[Axis]) -> None:
    """Raises LoweringError on all ranks of an axis along which a rank has other collectives, or another order."""
    for axis in axes:
        found = _gathered([collective.seen_by(axis.group_name) for collective in order], axis)
        for rank, theirs in enumerate(found):
            pairs = enumerate(itertools.zip_longest(found[0], theirs, fillvalue="none"))
            different = next(((n, *pair) for n, pair in pairs if pair[0] != pair[1]), None)
            if different is not None:
                raise LoweringError("collective {} of a compiled graph is {} on rank 0 of axis {!r}, and {} on rank {}"
                                    "\n  Run this model with backend=\"eager\".".format(
                                        *different[:2], axis.name, different[2], rank))


@contextmanager
def one_first(axes: Iterable[Axis]) -> Iterator[None]:
    """Let one rank of each machine compile before the others: the first rank to enter this context compiles, the others
    wait until it leaves and then find the code in Inductor's cache on disk. On meshes of several axes all compile at
    once: the code has names of process groups, which differ over the ranks there."""
    several = [axis for axis in axes if axis.size > 1]
    if len(several) != 1:
        yield
        return
    name, store = several[0].group_name, _get_default_store()
    _compiled[name] += 1
    key = f"autoparallel/compiled/{socket.gethostname()}/{name}/{_compiled[name]}"
    if store.add(f"{key}/ranks", 1) > 1:
        with suppress(dist.DistStoreError):  # its error, if it has one, is told elsewhere
            store.wait([key], LONGEST_WAIT)
        yield
        return
    try:
        yield
    finally:
        store.set(key, "compiled")


def _gathered(value: Any, axis: Axis) -> list[Any]:
    found = [value] * axis.size
    if axis.size > 1:
        dist.all_gather_object(found, value, group=group_of(axis))
    return found
