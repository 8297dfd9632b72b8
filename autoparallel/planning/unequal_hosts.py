"""Plans on unequal clusters: micro-batches by speed, the order in which a pipeline takes the hosts, and what each of
its ranks gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autoparallel.partition import Stages
from autoparallel.plans import Plan
from autoparallel.plans.record import Share
from autoparallel.pricing import SpacePricer
from cost_models import Cluster, unequal


def by_speed(micro_batches: int, paces: Sequence[float]) -> tuple[int, ...]:
    """So many micro-batches divided among ranks, one or more each, so that the last is done as early as can be.
    ``paces``: micro-batches that each rank runs in the same time.

    >>> by_speed(8, [2.0, 2.0, 1.0, 1.0]), by_speed(6, [2.0, 2.0, 1.0, 1.0])
    ((3, 3, 1, 1), (2, 2, 1, 1))
    """
    found = [1] * len(paces)
    for _ in range(micro_batches - len(paces)):
        first = min(range(len(paces)), key=lambda rank: ((found[rank] + 1) / paces[rank], -paces[rank], rank))
        found[first] += 1
    return tuple(found)


def divisions(batches: Sequence[int], paces: Sequence[float]) -> list[tuple[int, ...]]:
    """Micro-batches by rank (`by_speed`), unequal ones, for those of the numbers ``batches`` with which a step takes no
    longer than with any smaller one.

    >>> divisions([1, 2, 4, 8, 16], [2.0, 2.0, 1.0, 1.0])
    [(3, 3, 1, 1), (6, 6, 2, 2)]
    """
    found, least = list[tuple[int, ...]](), math.inf
    for count in sorted(batches):
        if count < len(paces):
            continue
        divided = by_speed(count, paces)
        share = max(some / pace for some, pace in zip(divided, paces, strict=True)) / count
        if share <= least * (1 + 1e-9):
            least = min(least, share)
            found.append(divided)
    return [divided for divided in found if min(divided) < max(divided)]


def on_grouped_hosts(cluster: Cluster, make: Callable[[Cluster], Plan]) -> Plan:
    """The plan that ``make`` finds where equal hosts are neighbours (`cost_models.unequal.grouped`), so that slow ones
    share stages, or micro-batches by rank. `Plan.devices` says which devices the plan takes, in order; without such an
    axis all wait for the slowest in any order."""
    hosts = unequal.grouped(cluster)
    if hosts == tuple(range(len(hosts))):
        return make(cluster)
    found, each = make(unequal.in_order(cluster, hosts)), cluster.devices_per_host
    if found.hybrid.pipeline_ranks == 1:
        return found
    devices = tuple(host * each + number for host in hosts for number in range(each))
    placed, record = replace(found, devices=devices), found.known
    if record is None:
        return placed
    size = math.prod(found.mesh_shape)
    shares = tuple(replace(share, numbers=unequal.told(devices[rank * size : (rank + 1) * size]))
                   for rank, share in enumerate(record.workload.shares))
    return replace(placed, record=replace(record, workload=replace(record.workload, shares=shares)))


def shares_of(pricer: SpacePricer, stages: Stages) -> tuple[Share, ...]:
    """By rank of the pipeline axis, its devices and the blocks and ops of its stages; empty on an equal cluster."""
    cluster, hybrid, space = pricer.prices.cluster, pricer.counts.hybrid, pricer.space
    if not cluster.is_unequal:
        return ()
    size, blocks, found = math.prod(space.mesh_shape), stages.blocks(space), []
    for rank in range(hybrid.pipeline_ranks):
        numbers, own = range(rank * size, (rank + 1) * size), hybrid.stages_of(rank)
        ops = sum(space.decisions[index].kind == "op" for stage in own for index in stages.parts[stage].decisions)
        found.append(Share(unequal.told(numbers), unequal.described(cluster, numbers),
                           sum(len(blocks[stage]) for stage in own), ops,
                           min(kind.device.memory_bytes for kind in cluster.kinds(numbers))))
    return tuple(found)


__all__ = ["by_speed", "divisions", "on_grouped_hosts", "shares_of"]
