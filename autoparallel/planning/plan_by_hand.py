"""The plan of a person, priced as it is."""

from __future__ import annotations

from dataclasses import replace

from autoparallel.capture.outputs import loss_output
from autoparallel.errors import InfeasibleError, InputError, PlanError
from autoparallel.partition import Splits
from autoparallel.partition.microbatch import batch_size
from autoparallel.planning.by_hand import ByHand
from autoparallel.planning.departures import check_sequences
from autoparallel.planning.one_mesh import plan_on
from autoparallel.planning.options import Options
from autoparallel.planning.study import StudyByHand
from autoparallel.plans import Plan
from cost_models import Cluster
from cost_models.accuracy import usable_bytes


def plan_by_hand(split: Splits, cluster: Cluster, options: Options, hand: ByHand) -> Plan:
    """The plan of a person, whose parameters and activations are laid out by the roles of its axes."""
    graph = split.graph
    check_sequences(graph, hand)
    batch = batch_size(graph) if hand.needs_batch else 1
    hybrid = replace(hand.hybrid(batch), **options.given)
    if hybrid.micro_batches > 1 and loss_output(graph) is None:
        raise InputError(f"by_hand: {hybrid.micro_batches} micro-batches need a scalar loss: return the loss from the "
                         "model, alone, first in a tuple, or as `loss` of a structure; or leave out micro_batch")
    shape, names, _ = hand.mesh
    try:
        micro = split(hybrid.micro_batches)
    except InfeasibleError as error:
        raise PlanError(f"by_hand: {hybrid.micro_batches} micro-batches: {error} In by_hand that is micro_batch="
                        f"{batch // (hand.dp or 1)}") from error
    made = plan_on(micro, cluster, shape, names, options, hybrid)
    limit, needed = options.memory_limit_bytes, made.prediction.peak_bytes
    if limit is None:  # it is priced whether it fits or not, and the report says so
        free = usable_bytes(cluster, options.memory_confidence)
        made = replace(made, prediction=replace(made.prediction, limit_bytes=free))
    if limit is not None and needed > limit:
        raise InfeasibleError(f"the plan by hand ({hand}) needs {needed:.4g} bytes on a device, and memory_limit_bytes "
                              f"is {limit:.4g}: without a limit it is priced all the same")
    elsewhere = replace(options, memory_limit_bytes=None, progress=None)
    return replace(made, study=StudyByHand(made, cluster,
                                           lambda other: plan_by_hand(split, other, elsewhere, hand)))


__all__ = ["plan_by_hand"]
