"""A captured model's plan: by hand, by the joint search, or of one step on one mesh or the best of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoparallel.capture import OpGraph
from autoparallel.errors import InfeasibleError, InputError, MeshError, PlanError, SearchError
from autoparallel.garbage import collected_later
from autoparallel.partition import split_batch
from autoparallel.partition.microbatch import batch_size, loss_output
from autoparallel.planning.by_hand import ByHand
from autoparallel.planning.joint_plan import plan_jointly
from autoparallel.planning.meshes import best_of, mesh_shapes
from autoparallel.planning.one_mesh import plan_on
from autoparallel.planning.options import Options
from autoparallel.plans import Plan
from cost_models import Cluster


def plan_graph(graph: OpGraph, cluster: Cluster, mesh_shape: Sequence[int] | None, axis_names: Sequence[str] | None,
               joint: bool, options: Options) -> Plan:
    """The plan that `autoparallel.plan` returns, with the same arguments and errors."""
    if options.by_hand is not None:
        return plan_by_hand(graph, cluster, options, options.by_hand)
    if joint:
        return plan_jointly(graph, cluster, mesh_shape, options)
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
        if axis_names is not None or not options.is_open:
            raise
        return _plan_fitting(graph, cluster, mesh_shape, options, error)


def _plan_fitting(graph: OpGraph, cluster: Cluster, mesh_shape: Sequence[int] | None, options: Options,
                  error: InfeasibleError) -> Plan:
    """The best plan with micro-batches, ZeRO and recompute, where a plain step does not fit (``error``); without
    micro-batches, which run by `ParallelModule.step` only, where the call returns no scalar loss. Raises that error if
    nothing fits."""
    options = replace(options, pipeline_stages=1)
    if loss_output(graph) is None:
        options = replace(options, micro_batches=1)
    try:
        found = plan_jointly(graph, cluster, mesh_shape, options)
    except (InfeasibleError, SearchError, InputError):
        error.args = (f"{error} (This is of a step of one micro-batch without recompute; no plan was found with "
                      "micro-batches, ZeRO and recompute either.)",)
        raise error from None
    reason = ("a step of one micro-batch without recompute does not fit; "
              f"{found.evidence.stop_reason}")
    return replace(found, evidence=replace(found.evidence, stop_reason=reason))


def plan_by_hand(graph: OpGraph, cluster: Cluster, options: Options, hand: ByHand) -> Plan:
    """The plan of a person, whose parameters and activations are laid out by the roles of its axes."""
    batch = batch_size(graph) if hand.needs_batch else 1
    hybrid = replace(hand.hybrid(batch), reduce_dtype=options.reduce_dtype)
    if hybrid.micro_batches > 1 and loss_output(graph) is None:
        raise InputError(f"by_hand: {hybrid.micro_batches} micro-batches need a scalar loss: return the loss from the "
                         "model, alone, first in a tuple, or as `loss` of a structure; or leave out micro_batch")
    shape, names, _ = hand.mesh
    try:
        micro = split_batch(graph, hybrid.micro_batches)
    except InfeasibleError as error:
        raise PlanError(f"by_hand: {hybrid.micro_batches} micro-batches: {error} In by_hand that is micro_batch="
                        f"{batch // (hand.dp or 1)}") from error
    made = plan_on(micro, cluster, shape, names, options, hybrid)
    limit, needed = options.memory_limit_bytes, made.prediction.peak_bytes
    if limit is not None and needed > limit:
        raise InfeasibleError(f"the plan by hand ({hand}) needs {needed:.4g} bytes on a device, and memory_limit_bytes "
                              f"is {limit:.4g}: without a limit it is priced all the same")
    return made


__all__ = ["plan_by_hand", "plan_graph"]
