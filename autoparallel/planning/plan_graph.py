"""A captured model's plan: by hand, by the joint search, or of one step on one mesh or the best of several."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from autoparallel import clock
from autoparallel.capture import OpGraph
from autoparallel.capture.outputs import loss_output
from autoparallel.errors import InfeasibleError, InputError, MeshError, PlanError, SearchError
from autoparallel.garbage import collected_later
from autoparallel.partition import Splits
from autoparallel.planning.bounding import Bounding
from autoparallel.planning.by_hand import ByHand
from autoparallel.planning.facts import block_paths, told_of_gradients, whole_state
from autoparallel.planning.joint_candidates import bounding_of
from autoparallel.planning.joint_plan import fixed_by, plan_jointly
from autoparallel.planning.meshes import best_of, mesh_shapes
from autoparallel.planning.offloading import fastest_tier
from autoparallel.planning.options import Options
from autoparallel.planning.plan_by_hand import plan_by_hand
from autoparallel.planning.study import JointStudy
from autoparallel.planning.tier_bounds import TierBounds
from autoparallel.planning.tuned import tuned
from autoparallel.planning.usual import UsualPlans, pricing_of, usual_plans
from autoparallel.plans import Plan
from autoparallel.plans.record import Record
from autoparallel.plans.reports.asked import alternative_of
from autoparallel.plans.reports.units import bytes_str
from autoparallel.search import Progress
from autoparallel.search.model.problem import MemoryLimitError
from autoparallel.strategies.host_lookups import tables_of
from cost_models import Cluster

_LOG = logging.getLogger("autoparallel")
#: The shares of a joint search's time limit in which usual plans by hand are priced, the best of each family is tuned,
#: and a plain step is planned; the most seconds of the last.
USUAL_SHARE, TUNING_SHARE, PLAIN_SHARE, MOST_PLAIN_S = 0.25, 0.12, 0.125, 4.0
#: Usual plans that are estimated to take longer than the fastest by more than this factor are not priced, but for one
#: of each kind.
NEAR = 1.05
#: Most usual plans that the joint search begins with.
MOST_STARTS = 2


def plan_graph(graph: OpGraph, cluster: Cluster, mesh_shape: Sequence[int] | None, axis_names: Sequence[str] | None,
               joint: bool, options: Options) -> Plan:
    """The plan that `autoparallel.plan` returns, with the same arguments and errors.

    Its search counts work in place of time (`clock`), so that an equal call finds an equal plan.
    """
    with clock.counted(options.time_limit_s):
        return _told(_compared(graph, cluster, mesh_shape, axis_names, joint, options), options)


def _told(plan: Plan, options: Options) -> Plan:
    """The plan; where the wall clock ended its search, it says so."""
    if not clock.was_late() or not options.time_limit_s:    # of 0 s, which are over at once
        return plan
    reason = (f"ended by the wall clock, after {clock.EMERGENCY:g} times time_limit_s={options.time_limit_s:g}: a "
              "machine with less to do may find a better plan")
    _LOG.warning("the search was %s", reason)
    return replace(plan, evidence=replace(plan.evidence, stop_reason=f"{plan.evidence.stop_reason}; {reason}"))


def _compared(graph: OpGraph, cluster: Cluster, mesh_shape: Sequence[int] | None, axis_names: Sequence[str] | None,
              joint: bool, options: Options) -> Plan:
    """The plan, with usual plans by hand or the one that is asked for in its record."""
    split, options = Splits(graph), options.with_tables(graph)
    made = _planned(split, cluster, mesh_shape, axis_names, joint, options)
    hand = options.compare_by_hand
    if isinstance(hand, ByHand):
        theirs = plan_by_hand(split, cluster, pricing_of(options, hand), hand)
        return _noting(UsualPlans({str(hand): theirs}, (), math.inf), made)
    if hand is not None and (made.evidence.combinations is None or mesh_shape is not None or options.pins):
        free = Options(memory_limit_bytes=options.memory_limit_bytes, memory_confidence=options.memory_confidence,
                       optimizer=options.optimizer, reduce_dtype=options.reduce_dtype,
                       bucket_bytes=options.bucket_bytes, buckets=options.buckets)
        made = _noting(usual_plans(split, cluster, free, options.time_limit_s * USUAL_SHARE), made)
    return made


def _planned(split: Splits, cluster: Cluster, mesh_shape: Sequence[int] | None, axis_names: Sequence[str] | None,
             joint: bool, options: Options) -> Plan:
    if options.offload == "auto":
        return fastest_tier(options, cluster,
                            lambda chosen: _planned(split, cluster, mesh_shape, axis_names, joint, chosen),
                            lambda chosen: whole_state(split.graph, cluster, chosen),
                            TierBounds(split, cluster, tuple(mesh_shape) if mesh_shape is not None else None)
                            if joint and options.by_hand is None else None, block_paths(split.graph),
                            tables_of(split.graph) if options.by_hand is None else ())
    if options.by_hand is not None:
        return plan_by_hand(split, cluster, options, options.by_hand)
    if mesh_shape is None and options.fusion.axis_bytes:
        raise PlanError(f"bucket_bytes={options.bucket_bytes} is of mesh axes, and the mesh is searched: give "
                        "mesh_shape (--mesh) too, or one number, or 'auto'")
    if joint:
        return _plan_jointly(split, cluster, mesh_shape, options)
    return _plan_plainly(split, cluster, mesh_shape, axis_names, options)


def _plan_plainly(split: Splits, cluster: Cluster, mesh_shape: Sequence[int] | None, axis_names: Sequence[str] | None,
                  options: Options) -> Plan:
    """The best plan on the mesh given, or on any; where none fits and the options leave it open, with micro-batches,
    ZeRO and recompute."""
    shapes = [tuple(mesh_shape)] if mesh_shape is not None else \
        mesh_shapes(cluster.num_devices, options.stages, len(options.by_rank) or sum(options.replicas))
    shapes = [shape for shape in shapes if axis_names is None or len(shape) == len(axis_names)]
    if not shapes:
        raise MeshError(f"{cluster.num_devices} devices are not cut into {len(axis_names or ())} axes: give as many "
                        "axis_names as mesh_shape has axes")
    try:
        with collected_later():
            return best_of(split, cluster, shapes, axis_names, options)
    except MemoryLimitError as error:
        if not options.is_open:
            error.args = (f"{error} {_what_fits(split, cluster, mesh_shape, options)}",)
            raise
        if axis_names is not None:
            raise
        return _plan_fitting(split, cluster, mesh_shape, options, error)


@collected_later()
def _plan_jointly(split: Splits, cluster: Cluster, mesh_shape: Sequence[int] | None, options: Options) -> Plan:
    """The joint search's plan, or what is faster of a usual plan by hand and the best plan of a plain step, as far as
    the options allow these.

    The joint search plans few combinations in full, and may have had too little time. The usual plans are priced in
    `USUAL_SHARE` of the time limit, as many as it is enough for, and the best of each family is tuned in
    `TUNING_SHARE`; then a plain step is planned, if one of them fits. The joint search has the rest, and begins with
    the fastest usual plans that fit. An interrupt (Ctrl-C) ends all of it with the best plan that there is."""
    searched = _without_loss(split.graph, options)
    try:
        with bounding_of(split.graph, cluster, fixed_by(searched, mesh_shape, cluster), searched) as bounding:
            return _plan_bounded(split, cluster, mesh_shape, options, bounding)
    except InfeasibleError as error:
        if searched != options:
            error.args = (f"{error} (Pipelines and several micro-batches were not tried, since they need a scalar "
                          "loss: return the loss from the model, alone, first in a tuple, or as `loss` of a "
                          "structure.)",)
        raise


def _without_loss(graph: OpGraph, options: Options) -> Options:
    """The options, without pipelines and several micro-batches where a model has no scalar loss, which these need.
    Where they are given, they stay, and are refused."""
    if loss_output(graph) is not None:
        return options
    stages = 1 if options.stage_replicas is None and options.pipeline_stages is None else options.pipeline_stages
    return replace(options, pipeline_stages=stages, micro_batches=options.micro_batches or 1)


def _plan_bounded(split: Splits, cluster: Cluster, mesh_shape: Sequence[int] | None, options: Options,
                  bounding: Bounding) -> Plan:
    """`_plan_jointly`, beside which bounds are raised."""
    started, others, best = clock.now(), list[Plan](), None
    usual, ends = UsualPlans({}, (), options.limit_bytes(cluster)), started + options.time_limit_s
    try:
        if mesh_shape is None and not options.pins and not options.on_host:
            usual = usual_plans(split, cluster, options, options.time_limit_s * USUAL_SHARE, near=NEAR,
                                tell=bounding.best)
            if options.progress is not None and usual.fastest is not None:
                options.progress("usual plans", usual.fastest[1].prediction.step_s, -math.inf)
            usual = tuned(usual, split, cluster, options, clock.now() + options.time_limit_s * TUNING_SHARE)
        if usual.plain_fits and options.is_open:
            others = _plain(split, cluster, options)
        best = _fastest(usual, others)
        tell = _below(options.progress, math.inf if best is None else best.prediction.step_s)
        within = replace(_without_loss(split.graph, options), time_limit_s=max(0.0, ends - clock.now()), progress=tell)
        seconds = {"usual plans and plain step": clock.now() - started}
        found = plan_jointly(split, cluster, mesh_shape, within, [plan for _, plan in usual.fitting[:MOST_STARTS]],
                             usual.combinations, bounding)
        found = replace(found, evidence=replace(found.evidence, seconds={**found.evidence.seconds, **seconds}))
    except (InfeasibleError, SearchError, KeyboardInterrupt):
        if (best := _fastest(usual, others)) is None:
            raise
        return _noting(usual, as_found(best, usual.limit_bytes, None))
    if best is None or found.prediction.step_s <= best.prediction.step_s:
        return _noting(usual, found)
    return _noting(usual, as_found(best, usual.limit_bytes, found))


def _fastest(usual: UsualPlans, others: Sequence[Plan]) -> Plan | None:
    """The fastest of the usual plans that fit and of other plans."""
    plans = [*([usual.fastest[1]] if usual.fastest is not None else []), *others]
    return min(plans, key=lambda plan: plan.prediction.step_s, default=None)


def _below(progress: Progress | None, known_s: float) -> Progress | None:
    """``progress``, told of ``known_s`` until something better is found; at once, if that is finite."""
    if progress is None:
        return None
    if known_s < math.inf:
        progress("tuned usual plans", known_s, -math.inf)
    return lambda phase, best_s, bound_s: progress(phase, min(best_s, known_s), bound_s)


def _plain(split: Splits, cluster: Cluster, options: Options) -> list[Plan]:
    """The best plan of a plain step, if one is found, over the meshes for which the time is enough: first those whose
    last axis is nearest to the devices of a host."""
    seconds = min(MOST_PLAIN_S, options.time_limit_s * PLAIN_SHARE)
    host = cluster.devices_on_host
    shapes = sorted(mesh_shapes(cluster.num_devices), key=lambda shape: abs(math.log(shape[-1] / host)))
    each = replace(options, time_limit_s=seconds / 2, progress=None)
    with suppress(InfeasibleError, SearchError), collected_later():
        return [best_of(split, cluster, shapes, None, each, clock.now() + seconds)]
    return []


def as_found(plan: Plan, limit_bytes: float, slower: Plan | None) -> Plan:
    """A plan as the answer of a joint search that found a ``slower`` one, or none: with the memory limit, and with the
    search's bound on the step of any plan. That is no more than this plan's step, whose mesh the search may not have
    among its combinations."""
    prediction = replace(plan.prediction, limit_bytes=limit_bytes)
    if slower is None:
        return replace(plan, prediction=prediction)
    searched = slower.evidence
    bound_s = None if searched.step_bound_s is None else min(searched.step_bound_s, prediction.step_s)
    evidence = replace(plan.evidence, step_bound_s=bound_s, combinations=searched.combinations,
                       seconds={**searched.seconds, **plan.evidence.seconds})
    others = (slower, *(slower.study.others if isinstance(slower.study, JointStudy) else ()))
    recorder = None if plan.recorder is None else partial(_after, plan, plan.recorder, slower, others)
    study = None if plan.study is None else JointStudy(plan.study, others)
    return replace(plan, prediction=prediction, evidence=evidence, recorder=recorder, study=study)


def _after(plan: Plan, recorder: Callable[[], Record], slower: Plan, others: Sequence[Plan]) -> Record:
    """The record of a plan, with what the joint search tried, and its best plans."""
    tried, record = slower.known, recorder()
    if tried is None:
        return record
    return replace(record, trials=tried.trials, search=tried.search,
                   alternatives=tuple(alternative_of(plan, other) for other in others))


def _noting(usual: UsualPlans, plan: Plan) -> Plan:
    """The plan, whose record also has the usual plans by hand."""
    if plan.recorder is None or not usual.priced:
        return plan
    return replace(plan, recorder=partial(_noted, usual, plan, plan.recorder))


def _noted(usual: UsualPlans, plan: Plan, recorder: Callable[[], Record]) -> Record:
    return usual.noted(recorder(), plan)


def _plan_fitting(split: Splits, cluster: Cluster, mesh_shape: Sequence[int] | None, options: Options,
                  error: InfeasibleError) -> Plan:
    """The best plan with micro-batches, ZeRO and recompute, where a plain step does not fit (``error``); without
    micro-batches, which run by `ParallelModule.step` only, where the call returns no scalar loss. Raises that error if
    nothing fits."""
    options = replace(options, pipeline_stages=1)
    if loss_output(split.graph) is None:
        options = replace(options, micro_batches=1)
    try:
        found = _plan_jointly(split, cluster, mesh_shape, options)
    except (InfeasibleError, SearchError, InputError) as other:
        error.args = (f"{error} (This is of a step of one micro-batch without recompute; no plan was found with "
                      f"micro-batches, ZeRO and recompute either{_least(other)}. Pipelines were not tried: "
                      f"joint=True tries them.){told_of_gradients(error, split.graph, cluster, options)}",)
        raise error from None
    reason = ("a step of one micro-batch without recompute does not fit; "
              f"{found.evidence.stop_reason}")
    return replace(found, evidence=replace(found.evidence, stop_reason=reason))


#: Options that `Options.is_open` asks to be left out, and the seconds to find out what fits without them.
_RESTRICTING = ("pipeline_stages", "stage_replicas", "schedule", "recompute", "zero_stage", "baseline", "micro_batches")
_WHAT_FITS_S = 10.0


def _what_fits(split: Splits, cluster: Cluster, mesh_shape: Sequence[int] | None, options: Options) -> str:
    """The part of an error that says which plan fits without the options that restrict the step."""
    given = {name: value for name in _RESTRICTING if (value := getattr(options, name)) is not None}
    named = ", ".join(f"{name}={value!r}" for name, value in given.items())
    others: dict[str, Any] = dict.fromkeys(given)
    free = replace(options, **{**others, "time_limit_s": min(options.time_limit_s, _WHAT_FITS_S)})
    if loss_output(split.graph) is None:
        free = replace(free, micro_batches=1)
    try:
        found = _plan_jointly(split, cluster, mesh_shape, free)
    except (InfeasibleError, SearchError, InputError) as other:
        return f"(This is with {named}; without, by joint=True, no plan was found either{_least(other)}.)"
    how = found.hybrid
    return (f"(This is with {named}. By joint=True, without, {bytes_str(found.prediction.peak_bytes)} a device "
            f"are enough: pipeline_stages={how.stages}, micro_batches={how.micro_batches}, "
            f"zero_stage={how.zero_stage}, recompute={how.recompute!r}.)")


def _least(error: Exception) -> str:
    """The least memory that plans need, where an error says so."""
    needed = getattr(error, "needed_bytes", None)
    return f": they need at least {bytes_str(needed)} a device" if needed else ""


__all__ = ["as_found", "plan_graph"]
