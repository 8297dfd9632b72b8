"""Random ops: replicas draw equal numbers, shards different ones.

The seed of a random op is a hash of the run's seed (rank 0's), the number of the call, the op and the shard. The global
generator keeps its state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_call_seeds: ContextVar[tuple[int, ...]] = ContextVar("call_seeds", default=(0,))


@contextmanager
def use_seed(*seeds: int) -> Iterator[None]:
    """Set the seed of the random ops of one call; of each copy, with multi-copy."""
    token = _call_seeds.set(seeds)
    try:
        yield
    finally:
        _call_seeds.reset(token)


def call_seeds() -> tuple[int, ...]:
    """The seeds set by `use_seed`; (0,) outside."""
    return _call_seeds.get()


def mix(*parts: int) -> int:
    """A 63-bit hash of integers, the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def random_op(op: Any, decision: int, local_shard: int, *args: Any, of_copy: int = 0, **kwargs: Any) -> Any:
    """Run a random op with the seed of (call, decision, shard). ``of_copy``: the number of the call among the
    micro-batches that multi-copy runs at a time."""
    return with_seed(mix(_call_seeds.get()[of_copy], decision, local_shard), op, *args, **kwargs)


def with_seed(seed: int, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a random op with this seed."""
    device = next((a.device for a in args if isinstance(a, torch.Tensor)), torch.device("cpu"))
    devices = [] if device.type in ("cpu", "meta") else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        return op(*args, **kwargs)
