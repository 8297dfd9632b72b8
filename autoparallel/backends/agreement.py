"""Ranks compile a graph that they share once, and compare their collectives: a difference is an error, not a hang."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.fx import GraphModule

from autoparallel.backends.moving import Collective
from autoparallel.errors import LoweringError
from autoparallel.kernels import collectives
from autoparallel.kernels.groups import Axis, group_of

#: How long a rank waits for another to compile, before it compiles by itself.
LONGEST_WAIT_S = 1800.0


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
def one_first(graph: GraphModule) -> Iterator[None]:
    """Let one rank of each machine compile a graph before the others that have the same: the first rank to enter this
    context compiles, the others wait until it leaves and then find the code in Inductor's cache on disk. Ranks whose
    graphs differ (by the offset of a shard) compile at the same time, and so does a process without a process group."""
    if not dist.is_initialized():
        yield
        return
    inputs = [_form(node.meta.get("val")) for node in graph.graph.find_nodes(op="placeholder")]
    digest = sha256(f"{graph.graph.python_code('self').src}{inputs}".encode()).hexdigest()
    store, key = _get_default_store(), f"autoparallel/compiled/{socket.gethostname()}/{digest}"
    if store.add(f"{key}/ranks", 1) > 1:
        _await(store, key)
        yield
        return
    try:
        yield
    finally:
        store.set(key, "compiled")


def _await(store: dist.Store, key: str) -> None:
    """Wait until another rank has written the key. Raises PeerError once a rank is known to have failed or ended."""
    until = time.monotonic() + LONGEST_WAIT_S
    while time.monotonic() < until:
        with suppress(dist.DistStoreError):
            store.wait([key], timedelta(seconds=1))
            return
        collectives.on_failure(RuntimeError("another rank compiles"))


def _form(value: Any) -> object:
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, torch.Tensor) else value


def _gathered(value: Any, axis: Axis) -> list[Any]:
    found = [value] * axis.size
    if axis.size > 1:
        dist.all_gather_object(found, value, group=group_of(axis))
    return found
