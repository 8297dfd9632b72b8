"""The usual plan by hand: the fastest that fits of those which people write first for a number of devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from autoparallel.capture import OpGraph
from autoparallel.errors import AutoparallelError, InfeasibleError
from autoparallel.garbage import collected_later
from autoparallel.planning.by_hand import ByHand
from autoparallel.planning.options import Options
from autoparallel.planning.plan_graph import plan_graph
from autoparallel.plans import Plan
from cost_models import Cluster

EXPERTS = "routed_experts"


def recipes(devices: int, host_devices: int, experts: bool = False) -> Iterator[str]:
    """DDP, ZeRO-1 and FSDP (with and without recompute); on several hosts also tensor parallelism inside a host, alone
    and with pipelines over hosts; with experts also expert parallelism inside a host.

    >>> list(recipes(8, 8))
    ['dp=8', 'dp=8,zero=1', 'dp=8,zero=3', 'dp=8,zero=3,recompute=full']
    """
    yield from (f"dp={devices}{more}" for more in ("", ",zero=1", ",zero=3", ",zero=3,recompute=full"))
    inner = min(devices, host_devices)
    if experts and inner > 1:
        yield f"dp={devices},ep={inner},zero=1"
    if devices <= host_devices or devices % host_devices:
        return
    tensor = f"tp={inner},zero=1,recompute=selective,sequence_parallel"
    yield tensor
    yield from (f"pp={stages},micro_batch=1,{tensor}" for stages in (2, 4, 8, 16) if devices // inner % stages == 0)


def usual_plan(graph: OpGraph, cluster: Cluster, options: Options) -> tuple[str, Plan]:
    """The fastest of `recipes` that fits into the memory limit of ``options``, and its text. Recipes that the model
    does not allow are passed over. Raises InfeasibleError if none fits."""
    limit, plain = options.limit_bytes(cluster), Options(optimizer=options.optimizer, reduce_dtype=options.reduce_dtype)
    found = dict[str, Plan]()
    experts = any(EXPERTS in node.op_name for node in graph.of_kind("op"))
    with collected_later():
        for text in recipes(cluster.num_devices, cluster.links[0].num_devices, experts):
            with suppress(AutoparallelError):
                hand = ByHand.of(text).on(cluster.num_devices)
                found[text] = plan_graph(graph, cluster, None, None, False, replace(plain, by_hand=hand))
    fitting = {text: made for text, made in found.items() if made.prediction.peak_bytes <= limit}
    if not fitting:
        raise InfeasibleError(f"no usual plan by hand fits in {limit:,.0f} bytes a device, of {len(found)} priced: "
                              "name one to compare with, as --compare-by-hand dp=8,tp=8,pp=4")
    return min(fitting.items(), key=lambda item: item[1].prediction.step_s)


__all__ = ["recipes", "usual_plan"]
