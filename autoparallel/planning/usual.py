"""The usual plan by hand: the fastest that fits of those which people write first for a number of devices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress

from autoparallel.capture import OpGraph
from autoparallel.errors import AutoparallelError, InfeasibleError
from autoparallel.garbage import collected_later
from autoparallel.partition.microbatch import batch_size
from autoparallel.planning.by_hand import ByHand
from autoparallel.planning.options import Options
from autoparallel.planning.plan_by_hand import plan_by_hand
from autoparallel.plans import Hybrid, Plan
from autoparallel.search import clock
from cost_models import Cluster

EXPERTS = "routed_experts"


def recipes(devices: int, host_devices: int, experts: bool = False) -> Iterator[str]:
    """DDP, ZeRO-1 and FSDP (also in micro-batches, and with recompute); on several hosts also tensor parallelism inside
    a host, alone and with pipelines over hosts (with less recompute, or a smaller bubble); with experts also expert
    parallelism inside a host.

    >>> list(recipes(8, 8))[:4]
    ['dp=8', 'dp=8,zero=1', 'dp=8,zero=3', 'dp=8,zero=1,micro_batch=1']
    """
    yield from (f"dp={devices}{more}" for more in ("", ",zero=1", ",zero=3", ",zero=1,micro_batch=1",
                                                   ",zero=3,micro_batch=1", ",zero=3,recompute=full"))
    inner = min(devices, host_devices)
    if experts and inner > 1:
        yield f"dp={devices},ep={inner},zero=1"
    if devices <= host_devices or devices % host_devices:
        return
    tensor = f"tp={inner},zero=1,sequence_parallel"
    yield f"{tensor},recompute=selective"
    for stages in (stages for stages in (2, 4, 8, 16) if devices // inner % stages == 0):
        yield f"pp={stages},micro_batch=1,{tensor},recompute=selective"
        yield f"pp={stages},virtual=4,micro_batch=1,{tensor},recompute=full"


def usual_plan(graph: OpGraph, cluster: Cluster, options: Options, seconds: float = math.inf) -> tuple[str, Plan]:
    """The fastest of `recipes` that ``options`` allow and that fits into their memory limit, and its text. Recipes that
    the model does not allow, or whose weights and gradients do not fit, are passed over; once one fits, none is begun
    after so many seconds. Raises InfeasibleError if none fits."""
    ends, limit = clock.now() + seconds, options.limit_bytes(cluster)
    found, hybrids = dict[str, Plan](), set[tuple[Hybrid, object]]()
    experts = any(EXPERTS in node.op_name for node in graph.of_kind("op"))
    weights = sum(node.outputs[0].num_bytes for node in graph.of_kind("parameter"))
    fits = False
    with collected_later():
        for text in recipes(cluster.num_devices, cluster.links[0].num_devices, experts):
            with suppress(AutoparallelError):
                hand = ByHand.of(text).on(cluster.num_devices)
                hybrid = hand.hybrid(batch_size(graph) if hand.needs_batch else 1)
                may_fit = least_bytes(hand, weights) <= limit and (clock.now() < ends or (seconds > 0 and not fits))
                if may_fit and (hybrid, hand.mesh) not in hybrids and _allowed(hybrid, options):
                    hybrids.add((hybrid, hand.mesh))
                    plain = Options(optimizer=options.optimizer, reduce_dtype=options.reduce_dtype,
                                    bucket_bytes=options.bucket_bytes, by_hand=hand, offload=options.offload,
                                    offload_fraction=options.offload_fraction,
                                    host_memory_limit_bytes=options.host_memory_limit_bytes,
                                    disk_limit_bytes=options.disk_limit_bytes,
                                    time_limit_s=min(Options.time_limit_s, ends - clock.now()))
                    found[text] = plan_by_hand(graph, cluster, plain, hand)
                    fits = fits or found[text].prediction.peak_bytes <= limit
    fitting = {text: made for text, made in found.items() if made.prediction.peak_bytes <= limit}
    if not fitting:
        raise InfeasibleError(f"no usual plan by hand fits in {limit:,.0f} bytes a device, of {len(found)} priced: "
                              "name one to compare with, as --compare-by-hand dp=8,tp=8,pp=4")
    return min(fitting.items(), key=lambda item: item[1].prediction.step_s)


def least_bytes(hand: ByHand, weights: float) -> float:
    """A lower bound of a device's bytes under a plan by hand: of weights (so many bytes in all) and their gradients.

    >>> least_bytes(ByHand(dp=2, tp=4, zero=3), 8e9)
    2000000000.0
    """
    data = hand.dp or 1
    of_stage = weights / (hand.tp * hand.pp * hand.ep)
    return of_stage / (data if hand.zero == 3 else 1) + of_stage / (data if hand.zero >= 2 else 1)


def _allowed(hybrid: Hybrid, options: Options) -> bool:
    """Whether the options leave a step configuration open."""
    asked = {"micro_batches": options.micro_batches, "stages": options.pipeline_stages, "schedule": options.schedule,
             "recompute": None if options.recompute == "auto" else options.recompute,
             "zero_stage": options.zero_stage, "copies": options.copies}
    return options.stage_replicas is None and options.baseline is None and all(
        value is None or getattr(hybrid, name) == value for name, value in asked.items())


__all__ = ["recipes", "usual_plan"]
