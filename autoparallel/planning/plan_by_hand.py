"""The plan of a person, priced as it is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from autoparallel import clock
from autoparallel.capture.outputs import loss_output
from autoparallel.errors import InfeasibleError, InputError, PlanError
from autoparallel.partition import MicroBatches, Splits, stages_of
from autoparallel.partition.microbatch import batch_size
from autoparallel.planning.by_hand import AUTO, ByHand
from autoparallel.planning.departures import check_sequences
from autoparallel.planning.hand_layouts import HandEstimate, HandLayouts
from autoparallel.planning.one_mesh import study_as
from autoparallel.planning.options import Options
from autoparallel.planning.recompute import fewest_recomputed
from autoparallel.planning.study import Study, StudyByHand
from autoparallel.plans import Hybrid, Plan
from cost_models import Cluster
from cost_models.accuracy import usable_bytes


def plan_by_hand(split: Splits, cluster: Cluster, options: Options, hand: ByHand, usable: float | None = None) -> Plan:
    """The plan of a person, whose parameters and activations are laid out by the roles of its axes. ``usable``: the
    bytes of a device into which recompute="auto" brings it without a memory limit (default: what tensors may take)."""
    hybrid = _hybrid_of(split, options, hand)
    if hybrid.micro_batches > 1 and loss_output(split.graph) is None:
        raise InputError(f"by_hand: {hybrid.micro_batches} micro-batches need a scalar loss: return the loss from the "
                         "model, alone, first in a tuple, or as `loss` of a structure; or leave out micro_batch")
    try:
        micro = split(hybrid.micro_batches)
    except InfeasibleError as error:
        each = batch_size(split.graph) // (hand.dp or 1) if hand.needs_batch else 1
        raise PlanError(f"by_hand: {hybrid.micro_batches} micro-batches: {error} In by_hand that is micro_batch={each}"
                        ) from error
    limit = options.memory_limit_bytes
    free = usable_bytes(cluster, options.memory_confidence) if usable is None else usable
    layouts = HandLayouts(split, cluster, options, hand)
    made = layouts.plan(hybrid)
    if hand.recompute == AUTO and made.prediction.peak_bytes > (limit or free):
        made = _recomputing_enough(micro, layouts, options, made, limit or free)
    needed = made.prediction.peak_bytes
    if limit is None:  # it is priced whether it fits or not, and the report says so
        made = replace(made, prediction=replace(made.prediction, limit_bytes=free))
    if limit is not None and needed > limit:
        raise InfeasibleError(f"the plan by hand ({hand}) needs {needed:.4g} bytes on a device, and memory_limit_bytes "
                              f"is {limit:.4g}: without a limit it is priced all the same")
    elsewhere = replace(options, memory_limit_bytes=None, progress=None)
    fits_in = made.prediction.limit_bytes if needed <= (made.prediction.limit_bytes or math.inf) else math.inf

    def searched() -> Study:
        return study_as(layouts.prices(made.hybrid), split(made.hybrid.micro_batches), options, made, fits_in)

    def on(other: Cluster) -> Plan:
        return plan_by_hand(split, other, elsewhere, hand, usable)

    return replace(made, study=StudyByHand(made, cluster, on, searched))


def estimate_by_hand(split: Splits, cluster: Cluster, options: Options, hand: ByHand, usable: float
                     ) -> HandEstimate | None:
    """What `plan_by_hand` will find, in less time, for bytes ``usable`` of a device: of recompute="auto" the line
    between none and all. None where no time is gained. Raises what `plan_by_hand` does for what cannot be."""
    hybrid, layouts = _hybrid_of(split, options, hand), HandLayouts(split, cluster, options, hand)
    found = layouts.estimated(hybrid)
    if found is None or hand.recompute != AUTO or found.peak_bytes <= usable:
        return found
    whole = layouts.estimated(replace(hybrid, recompute="full"))
    return whole if whole is None else found.towards(whole, usable)


def _hybrid_of(split: Splits, options: Options, hand: ByHand) -> Hybrid:
    """The step configuration of a plan by hand under the options. Raises PlanError where the model has none."""
    check_sequences(split.graph, hand)
    return replace(hand.hybrid(batch_size(split.graph) if hand.needs_batch else 1), **_given(options, hand))


def _given(options: Options, hand: ByHand) -> dict[str, Any]:
    """What the options add to a plan by hand. Raises PlanError where both say where states live."""
    given = {name: value for name, value in options.given.items() if name != "saved_on"}    # which is by hand
    if hand.offload == "none":
        return given
    if options.offload is not None:
        raise PlanError(f"by_hand says offload={hand.offload}, and the options offload={options.offload!r}: leave one "
                        "of the two out")
    return {name: value for name, value in given.items() if name != "offload"}


def _recomputing_enough(micro: MicroBatches, layouts: HandLayouts, options: Options, none: Plan,
                        limit_bytes: float) -> Plan:
    """The plan that recomputes as few blocks as memory requires; all of them, where that does not fit either. ``none``:
    the plan without recompute."""
    full = replace(none.hybrid, recompute="full")

    def make(again: tuple[str, ...] | None) -> Plan:
        return layouts.plan(replace(full, recompute_blocks=again))

    whole = make(None)
    if whole.prediction.peak_bytes > limit_bytes:
        return whole
    space = layouts.prices(whole.hybrid).space
    known = replace(whole, prediction=replace(whole.prediction, limit_bytes=limit_bytes))
    return fewest_recomputed(known, stages_of(space, micro.loss, whole.hybrid).blocks(space), make,
                             clock.now() + options.time_limit_s, none.prediction.peak_bytes)


__all__ = ["estimate_by_hand", "plan_by_hand"]
