"""Threads of an optimizer's step on the host: the cores of a host over the ranks that share them.

torchrun sets OMP_NUM_THREADS=1 where nothing else is set, with which a step on the host takes one core."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from autoparallel.errors import InputError, shown
from autoparallel.runtime.failing import reached

_LOG = logging.getLogger("autoparallel")
#: The host of a rank, and the cores that it may run on.
Place = tuple[str, frozenset[int]]


def share_of(places: Sequence[Place], rank: int) -> int:
    """Of ranks at these places, the threads of one: its cores, over the ranks of its host that may run on some of them.

    >>> four = frozenset(range(4))
    >>> share_of([("a", four), ("a", four), ("b", four)], 0), share_of([("a", four), ("a", frozenset([9]))], 0)
    (2, 4)
    """
    host, cores = places[rank]
    return max(1, len(cores) // sum(other == host and bool(cores & theirs) for other, theirs in places))


def step_threads(given: int | None) -> int:
    """The threads of this rank's steps: ``given``, or its share of the host's cores, if that is more than torch has.
    All ranks call this. Raises InputError for a count that is none."""
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise InputError(f"threads is {shown(given)}: give a whole number, 1 or more, or None")
    places: list[Place] = [("", frozenset())] * dist.get_world_size()
    with reached():
        dist.all_gather_object(places, (socket.gethostname(), frozenset(os.sched_getaffinity(0))))
    if given is not None:
        return given
    own, share = torch.get_num_threads(), share_of(places, dist.get_rank())
    if share > own and dist.get_rank() == 0:
        told = os.environ.get("OMP_NUM_THREADS")
        _LOG.warning("steps of the optimizer on the host take %d threads on each rank, its share of the host's cores; "
                     "torch has %d%s\n  To have others: parallel.optimizer(..., threads=%d).", share, own,
                     f" (OMP_NUM_THREADS={told})" if told else "", own)
    return max(own, share)


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """With so many threads for ops that this thread calls."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


__all__ = ["share_of", "step_threads", "with_threads"]
