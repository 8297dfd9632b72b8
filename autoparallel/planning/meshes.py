"""The best plan over the factorisations of a device count into mesh axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autoparallel import clock
from autoparallel.errors import AutoparallelError, InfeasibleError, PlanError
from autoparallel.partition import Splits
from autoparallel.planning.one_mesh import plan_on
from autoparallel.planning.options import Options
from autoparallel.plans import Plan
from autoparallel.search import INTERRUPTED, Progress
from cost_models import Cluster


def mesh_shapes(num_devices: int, stages: int = 1, pipeline_ranks: int = 0) -> list[tuple[int, ...]]:
    """All factorisations of a device count into one or two axes of at least two devices, behind a pipeline axis if
    there are stages, or ``pipeline_ranks`` of it are given. Raises PlanError if the stages cannot be divided evenly
    over some factor of the device count."""
    if stages == 1 and not pipeline_ranks:
        pairs = [(a, num_devices // a) for a in range(2, num_devices // 2 + 1) if num_devices % a == 0]
        return [(num_devices,), *pairs]
    ranks = [r for r in range(2, num_devices + 1) if num_devices % r == 0
             and (r == pipeline_ranks if pipeline_ranks else stages % r == 0)]
    if pipeline_ranks and not ranks:
        what = "stage_replicas" if stages > 1 else "micro_batches by rank"
        raise PlanError(f"{what} are of {pipeline_ranks} ranks, which do not divide {num_devices} devices")
    if not ranks:
        raise PlanError(f"{stages} pipeline stages cannot be dealt out evenly to {num_devices} devices: a number above "
                        "1 must divide both")
    return [(r, *shape) if num_devices > r else (r,) for r in ranks for shape in mesh_shapes(num_devices // r)]


def best_of(split: Splits, cluster: Cluster, shapes: Sequence[tuple[int, ...]], axis_names: Sequence[str] | None,
            options: Options, deadline: float = math.inf) -> Plan:
    """The fastest plan over mesh shapes; shapes on which nothing fits, or the pipeline cannot run, are passed over
    while another one does. After ``deadline`` (of `clock`), or an interrupt (Ctrl-C), no other shape is begun. Raises
    KeyboardInterrupt before the first plan."""
    plans: list[Plan] = []
    failures: list[AutoparallelError] = []
    unsearched: Sequence[tuple[int, ...]] = ()
    for number, shape in enumerate(shapes):
        if clock.now() >= deadline and (plans or failures):
            break
        try:
            within = replace(options, progress=_with_known(options.progress, plans))
            plans.append(_plan_of_shape(split, cluster, shape, axis_names, within))
        except KeyboardInterrupt:
            if not plans:
                raise
            unsearched = shapes[number:]
            break
        except (InfeasibleError, PlanError) as error:
            failures.append(error)
            continue
        if INTERRUPTED in plans[-1].evidence.stop_reason:
            unsearched = shapes[number + 1:]
            break
    if not plans:
        raise min(failures, key=lambda error: getattr(error, "needed_bytes", float("inf")))
    return _without(unsearched, _with_rivals(sorted(plans, key=lambda p: p.prediction.step_s)))


def _with_known(progress: Progress | None, plans: Sequence[Plan]) -> Progress | None:
    """``progress``, told of the best of these plans too, and of the least of their bounds."""
    if progress is None or not plans:
        return progress
    step_s, least_s = min(p.prediction.step_s for p in plans), min(p.evidence.lower_bound_s for p in plans)
    return lambda phase, best_s, bound_s: progress(phase, min(best_s, step_s), min(bound_s, least_s))


def _without(unsearched: Sequence[tuple[int, ...]], plan: Plan) -> Plan:
    """The plan, whose evidence names the meshes that an interrupt left out."""
    if not unsearched:
        return plan
    names = ", ".join("x".join(map(str, shape)) for shape in unsearched)
    reason = f"{plan.evidence.stop_reason}; {INTERRUPTED} before mesh {names}"
    return replace(plan, evidence=replace(plan.evidence, stop_reason=reason))


def _with_rivals(plans: Sequence[Plan]) -> Plan:
    """The fastest plan (the first), whose evidence names the meshes whose plans the prediction's error cannot tell from
    it."""
    best = plans[0]
    least, error = best.prediction.step_s, best.prediction.p50
    near = [f"{'x'.join(map(str, p.mesh_shape))} (+{p.prediction.step_s / least - 1:.1%})" for p in plans[1:]
            if p.prediction.step_s <= (1 + error) * least]
    if not near:
        return best
    reason = f"{best.evidence.stop_reason}; within the error of predictions: mesh {', '.join(near)}"
    return replace(best, evidence=replace(best.evidence, stop_reason=reason))


def _plan_of_shape(split: Splits, cluster: Cluster, shape: tuple[int, ...], axis_names: Sequence[str] | None,
                   options: Options) -> Plan:
    """The best plan on one mesh, whose first axis is the pipeline's if there are stages."""
    hybrid = options.hybrid(shape[0] if options.has_first_axis else 1)
    micro = split(hybrid.micro_batches)
    if not options.has_first_axis:
        return plan_on(micro, cluster, shape, axis_names, options, hybrid)
    names = axis_names[1:] if axis_names else None
    return plan_on(micro, cluster, shape[1:] or (1,), names, options, hybrid)


__all__ = ["best_of", "mesh_shapes"]
