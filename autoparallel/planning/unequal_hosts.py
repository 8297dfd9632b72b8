"""Plans on unequal clusters: the order in which a pipeline takes the hosts, and what each of its ranks gets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from autoparallel.partition import Stages
from autoparallel.plans import Plan
from autoparallel.plans.record import Share
from autoparallel.pricing import SpacePricer
from cost_models import Cluster, unequal


def on_grouped_hosts(cluster: Cluster, make: Callable[[Cluster], Plan]) -> Plan:
    """The plan that ``make`` finds where equal hosts are neighbours (`cost_models.unequal.grouped`), so that slow ones
    share stages. A pipeline's `Plan.devices` says which devices it takes, in order; without a pipeline all wait for the
    slowest in any order."""
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


__all__ = ["on_grouped_hosts", "shares_of"]
