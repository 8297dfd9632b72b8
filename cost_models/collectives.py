"""Seconds of collectives by bytes and group: hierarchical alpha-beta, vectorised over arrays of bytes.

With c ranks on a link of alpha and beta, a ring moves b bytes in

    all_gather, reduce_scatter   (c - 1) alpha + (c - 1)/c b beta            (Thakur et al. 2005)
    all_reduce                   2 (c - 1) alpha + 2 (c - 1)/c b beta

and a tree all-reduces in 2 log2(c) alpha + 2 b beta. A group over several levels either runs one ring at its slowest
link, or level by level (reduce-scatter inside, the outer collective on 1/c of the bytes, all-gather inside); the
cheaper one counts, as NCCL's choice would. Every call adds the device's launch time; a group of one is free.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cost_models.cluster import Device, Group, Link

Bytes = Any


def all_reduce_s(nbytes: Bytes, group: Group) -> Any:
    """``nbytes``: one rank's whole tensor."""
    return _call(nbytes, group, _all_reduce)


def all_gather_s(nbytes: Bytes, group: Group) -> Any:
    """``nbytes``: the gathered tensor, whole."""
    return _call(nbytes, group, lambda b, g: _one_way(b, g, "all_gather"))


def reduce_scatter_s(nbytes: Bytes, group: Group) -> Any:
    """``nbytes``: one rank's whole input."""
    return _call(nbytes, group, lambda b, g: _one_way(b, g, "reduce_scatter"))


def broadcast_s(nbytes: Bytes, group: Group) -> Any:
    """``nbytes``: the tensor; a tree."""
    slow = group.slowest
    return _call(nbytes, group, lambda b, g: math.log2(g.size) * slow.alpha_s + b * slow.beta_s_per_byte)


def all_to_all_s(nbytes: Bytes, group: Group) -> Any:
    """``nbytes``: one rank's tensor, of which 1/n stays. Each level carries the pieces that cross it."""

    def cost(b: Any, g: Group) -> Any:
        seconds: Any = 0.0
        reached = 1
        for count, link in g.levels:
            share = (count - 1) * reached / g.size
            slow = link.slowdown.get("all_to_all", 1.0)
            seconds = seconds + (count - 1) * link.alpha_s + share * b * link.beta_s_per_byte * slow
            reached *= count
        return seconds

    return _call(nbytes, group, cost)


def send_recv_s(nbytes: Bytes, link: Link, launch_s: float = 0.0) -> Any:
    """One message of ``nbytes`` over one link."""
    return launch_s + link.alpha_s + np.asarray(nbytes, dtype=float) * link.beta_s_per_byte


def copy_s(nbytes: Bytes, device: Device) -> Any:
    """Reading and writing ``nbytes`` in device memory: what slices and shards of a later dim pay."""
    speed = device.memory_bandwidth_bytes_per_s * device.memory_bandwidth_efficiency
    return device.launch_s + 2.0 * np.asarray(nbytes, dtype=float) / speed


def _call(nbytes: Bytes, group: Group, cost: Any) -> Any:
    b = np.asarray(nbytes, dtype=float)
    if group.size == 1:
        return np.zeros_like(b)
    return group.launch_s + cost(b, group)


def _ring(b: Any, count: int, link: Link, kind: str) -> Any:
    slow = link.slowdown.get(kind, 1.0)
    return (count - 1) * link.alpha_s + (count - 1) / count * b * link.beta_s_per_byte * slow


def _one_way(b: Any, group: Group, kind: str) -> Any:
    """all_gather or reduce_scatter: one ring, or level by level with ever smaller pieces outwards."""
    flat = _ring(b, group.size, group.slowest, kind)
    nested: Any = 0.0
    inside = 1
    for count, link in group.levels:
        nested = nested + (_ring(b / inside, count, link, kind) if count > 1 else 0.0)
        inside *= count
    return np.minimum(flat, nested)


def _all_reduce_level(b: Any, count: int, link: Link) -> Any:
    slow = link.slowdown.get("all_reduce", 1.0)
    ring = 2 * (count - 1) * link.alpha_s + 2 * (count - 1) / count * b * link.beta_s_per_byte * slow
    tree = 2 * math.log2(count) * link.alpha_s + 2 * b * link.beta_s_per_byte * slow
    return np.minimum(ring, tree)


def _all_reduce(b: Any, group: Group) -> Any:
    flat = _all_reduce_level(b, group.size, group.slowest)
    crossed = [(count, link) for count, link in group.levels if count > 1]
    nested: Any = 0.0
    inside = 1
    for count, link in crossed[:-1]:
        nested = nested + _ring(b / inside, count, link, "reduce_scatter")
        nested = nested + _ring(b / inside, count, link, "all_gather")
        inside *= count
    return np.minimum(flat, nested + _all_reduce_level(b / inside, *crossed[-1]))
