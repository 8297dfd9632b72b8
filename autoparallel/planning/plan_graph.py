"""A captured model's plan: by hand, by the joint search, or of one step on one mesh or the best of several."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from autoparallel.capture import OpGraph
from autoparallel.capture.outputs import loss_output
from autoparallel.errors import InfeasibleError, InputError, MeshError, SearchError
from autoparallel.garbage import collected_later
from autoparallel.planning.joint_plan import plan_jointly
from autoparallel.planning.meshes import best_of, mesh_shapes
from autoparallel.planning.offloading import first_that_fits
from autoparallel.planning.options import Options
from autoparallel.planning.plan_by_hand import plan_by_hand
from autoparallel.planning.usual import usual_plan
from autoparallel.plans import Plan
from autoparallel.search import clock
from cost_models import Cluster

#: The share of a joint search's time limit in which usual plans by hand are priced.
USUAL_SHARE = 0.25


def plan_graph(graph: OpGraph, cluster: Cluster, mesh_shape: Sequence[int] | None, axis_names: Sequence[str] | None,
               joint: bool, options: Options) -> Plan:
    """The plan that `autoparallel.plan` returns, with the same arguments and errors."""
    if options.offload == "auto":
        return first_that_fits(options, cluster,
                               lambda chosen: plan_graph(graph, cluster, mesh_shape, axis_names, joint, chosen))
    if options.by_hand is not None:
        return plan_by_hand(graph, cluster, options, options.by_hand)
    if joint:
        return _plan_jointly(graph, cluster, mesh_shape, options)
    return _plan_plainly(graph, cluster, mesh_shape, axis_names, options)


def _plan_plainly(graph: OpGraph, cluster: Cluster, mesh_shape: Sequence[int] | None, axis_names: Sequence[str] | None,
                  options: Options) -> Plan:
    """The best plan on the mesh given, or on any; where none fits and the options leave it open, with micro-batches,
    ZeRO and recompute."""
    shapes = [tuple(mesh_shape)] if mesh_shape is not None else \
        mesh_shapes(cluster.num_devices, options.stages, sum(options.replicas))
    shapes = [shape for shape in shapes if axis_names is None or len(shape) == len(axis_names)]
    if not shapes:
        raise MeshError(f"{cluster.num_devices} devices are not cut into {len(axis_names or ())} axes: give as many "
                        "axis_names as mesh_shape has axes")
    try:
        with collected_later():
            return best_of(graph, cluster, shapes, axis_names, options)
    except InfeasibleError as error:
        if not options.is_open:
            error.args = (f"{error} {_what_fits(graph, cluster, mesh_shape, options)}",)
            raise
        if axis_names is not None:
            raise
        return _plan_fitting(graph, cluster, mesh_shape, options, error)


def _plan_jointly(graph: OpGraph, cluster: Cluster, mesh_shape: Sequence[int] | None, options: Options) -> Plan:
    """The joint search's plan, or a usual plan by hand that the options allow, if that is faster.

    The search may have had too little time. The usual plans are priced in the first quarter of the time limit, as many
    as it is enough for."""
    ends = clock.now() + options.time_limit_s
    usual: tuple[str, Plan] | None = None
    if mesh_shape is None and not options.pins:
        with suppress(InfeasibleError):
            usual = usual_plan(graph, cluster, options, options.time_limit_s * USUAL_SHARE)
    within = replace(options, time_limit_s=max(0.0, ends - clock.now()))
    try:
        found = plan_jointly(graph, cluster, mesh_shape, within)
    except (InfeasibleError, SearchError):
        if usual is None:
            raise
        return _as_found(*usual, "the joint search found none")
    if usual is None or found.prediction.step_s <= usual[1].prediction.step_s:
        return found
    reason = f"faster than what the joint search found ({found.evidence.stop_reason})"
    return _as_found(*usual, reason, found.evidence.step_bound_s)


def _as_found(text: str, plan: Plan, reason: str, bound_s: float | None = None) -> Plan:
    """A usual plan by hand as the answer, with the reason in its evidence, and a bound on the step of any plan."""
    evidence = replace(plan.evidence, stop_reason=f"the usual plan by hand {text}: {reason}", step_bound_s=bound_s)
    return replace(plan, evidence=evidence)


def _plan_fitting(graph: OpGraph, cluster: Cluster, mesh_shape: Sequence[int] | None, options: Options,
                  error: InfeasibleError) -> Plan:
    """The best plan with micro-batches, ZeRO and recompute, where a plain step does not fit (``error``); without
    micro-batches, which run by `ParallelModule.step` only, where the call returns no scalar loss. Raises that error if
    nothing fits."""
    options = replace(options, pipeline_stages=1)
    if loss_output(graph) is None:
        options = replace(options, micro_batches=1)
    try:
        found = _plan_jointly(graph, cluster, mesh_shape, options)
    except (InfeasibleError, SearchError, InputError) as other:
        error.args = (f"{error} (This is of a step of one micro-batch without recompute; no plan was found with "
                      f"micro-batches, ZeRO and recompute either{_least(other)}.)",)
        raise error from None
    reason = ("a step of one micro-batch without recompute does not fit; "
              f"{found.evidence.stop_reason}")
    return replace(found, evidence=replace(found.evidence, stop_reason=reason))


#: Options that `Options.is_open` asks to be left out, and the seconds to find out what fits without them.
_RESTRICTING = ("pipeline_stages", "stage_replicas", "schedule", "recompute", "zero_stage", "baseline", "micro_batches")
_WHAT_FITS_S = 10.0


def _what_fits(graph: OpGraph, cluster: Cluster, mesh_shape: Sequence[int] | None, options: Options) -> str:
    """The part of an error that says which plan fits without the options that restrict the step."""
    given = {name: value for name in _RESTRICTING if (value := getattr(options, name)) is not None}
    named = ", ".join(f"{name}={value!r}" for name, value in given.items())
    others: dict[str, Any] = dict.fromkeys(given)
    free = replace(options, **{**others, "time_limit_s": min(options.time_limit_s, _WHAT_FITS_S)})
    if loss_output(graph) is None:
        free = replace(free, micro_batches=1)
    try:
        found = _plan_jointly(graph, cluster, mesh_shape, free)
    except (InfeasibleError, SearchError, InputError) as other:
        return f"(This is with {named}; without, by joint=True, no plan was found either{_least(other)}.)"
    how = found.hybrid
    return (f"(This is with {named}. By joint=True, without, {found.prediction.peak_bytes / 2**30:.3g} GiB a device "
            f"are enough: pipeline_stages={how.stages}, micro_batches={how.micro_batches}, "
            f"zero_stage={how.zero_stage}, recompute={how.recompute!r}.)")


def _least(error: Exception) -> str:
    """The least memory that plans need, where an error says so."""
    needed = getattr(error, "needed_bytes", None)
    return f": they need at least {needed / 2**30:.3g} GiB a device" if needed else ""


__all__ = ["plan_graph"]
