"""Whether parameter servers would pay for a model: their traffic beside the step of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autoparallel.capture import OpGraph
from autoparallel.ops.embedding_bag import LOOKUPS
from autoparallel.partition.microbatch import batch_size
from autoparallel.plans import Prediction
from autoparallel.plans.reports.units import bytes_str, seconds_str
from cost_models import Cluster, Link
from cost_models.servers import ServerTraffic, server_step_s, stale_step_s

STALENESS, _STEPS = 4, 400
_LEAST = 0.1  # of the mean: the shortest step that a spread may draw


@dataclass(frozen=True)
class ServerAdvice:
    """``server_s``: a step with as many servers as workers, the best case, computed as by data parallelism, its
    communication not hidden. ``plan_s``: of the plan that it is compared with. Both for workers as uneven as was said.
    ``pays``: the servers' is shorter by more than the error of predictions (`Prediction.p50`)."""

    pays: bool
    traffic: ServerTraffic
    server_s: float
    plan_s: float
    why: str


def traffic_of(graph: OpGraph, workers: int) -> ServerTraffic:
    """What a worker with its share of the batch pulls. A parameter that only lookups read counts by the ids' rows, each
    at most once; others count whole."""
    dense = rows = ids = 0.0
    for node in graph.of_kind("parameter"):
        meta = node.outputs[0]
        if not meta.requires_grad:
            continue
        whole = float(meta.num_bytes)
        looked_up = _ids(graph, node.index)
        if looked_up is None:
            dense += whole
        else:
            touched = min(looked_up / workers, meta.shape[0])
            rows += touched * whole / meta.shape[0]
            ids += touched * 8
    return ServerTraffic(dense, rows, ids)


def _ids(graph: OpGraph, parameter: int) -> float | None:
    """Ids that lookups read a parameter's rows by; None if anything else reads it."""
    found = 0.0
    for ref, uses in graph.consumers.items():
        if ref.node != parameter:
            continue
        for reader, position in uses:
            node = graph.nodes[reader]
            if position != 0 or node.target not in LOOKUPS:
                return None
            found += graph.meta(node.inputs[1]).num_elements
    return found or None


def server_advice(graph: OpGraph, cluster: Cluster, data_parallel: Prediction, plan_s: float, spread: float
                  ) -> ServerAdvice | None:
    """``data_parallel``: the plan of which workers compute the same. ``spread``: standard deviation of a worker's step
    over its mean. None for one device, or a batch that the workers cannot share."""
    workers = cluster.num_devices
    if workers < 2 or batch_size(graph) % workers:
        return None
    traffic = traffic_of(graph, workers)
    compute_s = data_parallel.forward_s + data_parallel.backward_s + data_parallel.fixed_s
    moved_s = server_step_s(traffic, workers, workers, _link(cluster))
    even_s, uneven_s = (stale_step_s(_drawn(workers, spread), staleness) for staleness in (0, STALENESS))
    server_s, plan_s = (compute_s + moved_s) * uneven_s, plan_s * even_s
    pays = server_s * (1 + data_parallel.p50) < plan_s
    return ServerAdvice(pays, traffic, server_s, plan_s, _told(traffic, moved_s, server_s, plan_s, spread, pays))


def _link(cluster: Cluster) -> Link:
    """The outermost link that the devices cross, as fast as one device has it while all of its host send."""
    levels = enumerate(cluster.group((cluster.num_devices,), 0).levels)
    level, link = [(level, link) for level, (count, link) in levels if count > 1][-1]
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * cluster.share_of_wire(level))


def _drawn(workers: int, spread: float) -> np.ndarray:
    return np.maximum(_LEAST, 1.0 + spread * np.random.default_rng(0).standard_normal((workers, _STEPS)))


def _told(traffic: ServerTraffic, moved_s: float, server_s: float, plan_s: float, spread: float, pays: bool) -> str:
    share = traffic.dense_bytes / max(traffic.pulled_bytes, 1.0)
    moved = (f"a worker pulls and pushes {bytes_str(traffic.pulled_bytes)} each in {seconds_str(moved_s)}, {share:.0%} "
             "of it dense parameters")
    uneven = f", staleness {STALENESS}, workers' steps uneven by {spread:.0%}" if spread else ""
    reason = ("" if pays else "; the difference is within the error of predictions" if server_s < plan_s
              else "; a dense parameter crosses a link twice, in an all-reduce less often" if share > 0.5
              else "; the plan moves as little")
    return f"a step takes {seconds_str(server_s)} beside the plan's {seconds_str(plan_s)}{uneven}: {moved}{reason}"


__all__ = ["ServerAdvice", "server_advice", "traffic_of"]
