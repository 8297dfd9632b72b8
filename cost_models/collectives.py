"""Seconds of collectives by bytes and group: hierarchical alpha-beta, vectorised over arrays of bytes.

A group has c_l members on level l, n in all; W_l is the bandwidth that its members in one domain of that level have
together (`Group.crossed`). Each link's slow-down for the collective multiplies its alpha and divides its bandwidth.
For b bytes, one direction:

    ring           sum_l (steps on l) alpha_l  +  (n - 1)/n b max_l P_l
    hierarchical   sum_l ((c_l - 1) alpha_l  +  (c_l - 1)/c_l b/W_l)                                  even groups only
    tree           2 ((c_0 - 1) alpha_0 + sum_{l>0} log2(c_l) alpha_l)  +  2 b max_l P_l              all-reduce only

A ring over n ranks in H hosts takes n - 1 steps, H - 1 of them between hosts, and passes every host boundary once, so
that all of a host's NICs carry it together. Its pace P_l is 1/W_l, and not below 1/(W_l with no other group on the
link) + `Link.relay_s_per_byte`: a ring works shard by shard, and only another one fills its gaps. Reduce-scatter
and all-gather are one ring; all-reduce is both. The cheapest valid algorithm by the cheapest protocol counts. Every
call adds the cluster's time of a call (the protocol's; the device's launch time where none is known); a group of one is
free. Where the outermost link crossed saves up what it does not send (`Link.burst_bytes`), a collective's messages (M
seconds) and its bytes (B seconds, of all but a burst) do not add up, but take sqrt(M^2 + B^2): the longer of the two,
smoothly, as latencies vary. The call adds to that: before its first byte no more than a burst is saved up.

Sources: Thakur, Rabenseifner, Gropp 2005 (ring; reduce-scatter plus all-gather); NCCL src/graph/tuning.cc (steps of
rings and trees inside and between hosts; a tree is a chain inside a host; protocols); Cho et al. 2019, "BlueConnect"
(level by level).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cost_models.compute import op_time_s
from cost_models.devices import Device
from cost_models.links import Group, Link

Bytes = Any


def all_reduce_s(nbytes: Bytes, group: Group) -> Any:
    """``nbytes``: one rank's whole tensor. A ring both ways; a tree; or level by level."""
    return _cheapest(nbytes, group, "all_reduce", _all_reduce)


def all_gather_s(nbytes: Bytes, group: Group) -> Any:
    """``nbytes``: the gathered tensor, whole, of which (n - 1)/n arrive. A ring; or level by level."""
    return _cheapest(nbytes, group, "all_gather", _one_way)


def reduce_scatter_s(nbytes: Bytes, group: Group) -> Any:
    """``nbytes``: one rank's whole input, of which (n - 1)/n leave. A ring; or level by level."""
    return _cheapest(nbytes, group, "reduce_scatter", _one_way)


def broadcast_s(nbytes: Bytes, group: Group) -> Any:
    """``nbytes``: the tensor. A pipelined chain, ring steps + b max_l P_l; or a tree on each level,
    ceil(log2(c_l)) (alpha_l + b/W_l)."""
    return _cheapest(nbytes, group, "broadcast", _broadcast)


def all_to_all_s(nbytes: Bytes, group: Group) -> Any:
    """``nbytes``: one rank's tensor, of which (n - 1)/n leave.

    All levels carry their part at the same time; the slowest counts. Of a rank's b bytes, the share of peers that are
    reached by level l crosses it, for all members of a domain together; from the first level between hosts on
    (`Group.network`) also the share that goes further out, by the same NIC. One message per peer domain and level, as
    NCCL gathers what leaves a host by rail (PXN, NCCL 2.12).
    """
    return _cheapest(nbytes, group, "all_to_all", _all_to_all)


def send_recv_s(nbytes: Bytes, over: Link | Group, launch_s: float = 0.0) -> Any:
    """One message of ``nbytes`` by a link; or between neighbours along a group's axis, all of them sending at once."""
    if isinstance(over, Group):
        return _cheapest(nbytes, over, "send_recv", _neighbours)
    b, ways = np.asarray(nbytes, dtype=float), (None, *over.protocols)
    links = [over.seen_by("send_recv", way) for way in ways]
    return launch_s + _least([link.alpha_s + b * link.beta_s_per_byte for link in links])


def copy_s(nbytes: Bytes, device: Device) -> Any:
    """Reading and writing ``nbytes`` in device memory: what slices and shards of a dim other than the first pay."""
    return op_time_s("copy", 0.0, 2.0 * np.asarray(nbytes, dtype=float), "float32", device)


def _cheapest(nbytes: Bytes, group: Group, collective: str, cost: Callable[[Any, Group], Any]) -> Any:
    b = np.asarray(nbytes, dtype=float)
    if group.size == 1:
        return np.zeros_like(b)
    least = _least([_together(b, variant, cost) for variant in group.seen_by(collective)])
    return group.slower * (group.late_s + least)


def _together(b: Any, group: Group, cost: Callable[[Any, Group], Any]) -> Any:
    """The call, the messages and the bytes."""
    if not group.burst_bytes:
        return group.launch_s + cost(b, group)
    messages_s = cost(np.zeros_like(b), group)
    crossing = np.maximum(cost(b, group.outside), 1e-9)
    share = np.maximum(1.0 - group.burst_bytes / crossing, 0.0)
    return group.launch_s + np.hypot(messages_s, share * cost(b, group.prompt))


def _least(costs: list[Any]) -> Any:
    least = costs[0]
    for cost in costs[1:]:
        least = np.minimum(least, cost)
    return least


def _ring(b: Any, group: Group) -> Any:
    return group.ring_alpha_s + (group.size - 1) / group.size * b * group.pace_s_per_byte


def _by_levels(b: Any, group: Group) -> Any:
    """One direction level by level: b/inside bytes at W/inside for each rank of every level."""
    return sum((count - 1) * link.alpha_s + (count - 1) / count * b / bandwidth
               for count, link, bandwidth in group.crossed)


def _ways(b: Any, group: Group) -> list[Any]:
    """One direction by each algorithm that the library has and that is valid for the group."""
    ways = [_ring(b, group)] if "ring" in group.algorithms else []
    if "hierarchical" in group.algorithms and group.even and len(group.crossed) > 1:
        ways.append(_by_levels(b, group))
    return ways


def _one_way(b: Any, group: Group) -> Any:
    return _least(_ways(b, group) or [_ring(b, group)])


def _all_reduce(b: Any, group: Group) -> Any:
    ways = [2 * way for way in _ways(b, group)]
    if "tree" in group.algorithms:
        ways.append(2 * _tree_alpha_s(group) + 2 * b * group.pace_s_per_byte)
    return _least(ways or [2 * _ring(b, group)])


def _tree_alpha_s(group: Group) -> float:
    """A chain inside a host, double binary trees above."""
    seconds = 0.0
    for level, (count, link) in enumerate(group.levels):
        seconds += (count - 1 if level == 0 and len(group.levels) > 1 else math.log2(count)) * link.alpha_s
    return seconds


def _broadcast(b: Any, group: Group) -> Any:
    chain = group.ring_alpha_s + b * group.pace_s_per_byte
    tree = sum(math.ceil(math.log2(count)) * (link.alpha_s + b / bandwidth) for count, link, bandwidth in group.crossed)
    return np.minimum(chain, tree)


def _all_to_all(b: Any, group: Group) -> Any:
    alpha_s, slowest_beta, inside = 0.0, 0.0, 1
    network = group.network % len(group.levels)
    for level, ((count, link), lanes) in enumerate(zip(group.levels, group.lanes, strict=True)):
        reached = min(inside * count, group.size)
        passing = (group.size if level >= network else reached) - inside
        slowest_beta = max(slowest_beta, inside * passing / group.size / (link.bandwidth_bytes_per_s * lanes))
        alpha_s, inside = alpha_s + (count - 1) * link.alpha_s, reached
    return alpha_s + b * slowest_beta


def _neighbours(b: Any, group: Group) -> Any:
    """The slowest hop: between hosts only one member of the group sends, and has no more than a NIC to itself."""
    seconds: Any = 0.0
    for _, link, bandwidth in group.crossed:
        seconds = np.maximum(seconds, link.alpha_s + b / min(bandwidth, link.bandwidth_bytes_per_s))
    return seconds
