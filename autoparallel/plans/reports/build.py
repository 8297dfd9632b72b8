"""Plan -> `Report`: each number once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from autoparallel.axis_names import apart, together
from autoparallel.plans.plan import Plan, Prediction
from autoparallel.plans.record import MemoryProfile, Record, Workload
from autoparallel.plans.reports.blocks import block_rows
from autoparallel.plans.reports.report import (
    CROSSED,
    LAUNCHED,
    LOOKED_UP,
    PURPOSES,
    Collectives,
    Memory,
    Proof,
    Report,
    Speed,
    Time,
)
from autoparallel.plans.reports.summary import summary
from autoparallel.plans.reports.words import AxisWords, axis_words, title
from autoparallel.plans.roles import parameters_of, roles_of
from autoparallel.schedule.tiers import BUCKETS_IN_FLIGHT


def report_of(plan: Plan) -> Report:
    """The report of a plan, searched or read from a file."""
    record, p = plan.known, plan.prediction
    axes = axis_words(plan, record.workload if record else None)
    labels = {axis.name: axis.label for axis in axes}
    times = times_of(p)
    found = Report(
        (), (), title(plan, axes), plan.cluster, plan.fingerprint, axes, _departures(axes),
        _speed(p, record.workload if record else None), _memory(plan, record), times,
        (p.exposed_s - p.crossings_s) / p.step_s if p.step_s else 0.0,
        tuple(_collectives(plan, labels)), block_rows(plan, axes),
        _proof(plan), tuple(plan.pins.items()), plan.hybrid.cuts,
        plan.hybrid.recompute_blocks or (), p.repeated_ops, record, roles_of(plan).family, _interleaved(plan),
        plan.hybrid.by_rank,
    )
    return summary(found)


def _interleaved(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Parameters in interleaved shards, with ``*`` for numbers in their names, and their layouts."""
    found = {(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), "·".join(layout))
             for name, layout in parameters_of(plan).items() if any(";" in placement for placement in layout)}
    return tuple(sorted(found))


def _departures(axes: Iterable[AxisWords]) -> tuple[str, ...]:
    found: dict[str, list[str]] = {}
    for axis in axes:
        for text in axis.departures:
            found.setdefault(text, []).append(axis.label)
    return tuple(f"{text} ({'axis' if len(labels) == 1 else 'axes'} {', '.join(labels)})"
                 for text, labels in found.items())


def _speed(p: Prediction, work: Workload | None) -> Speed:
    least_s, most_s = p.nine_in_ten_s
    sure = p.step_s, p.p50, p.p90, most_s, p.basis, least_s
    if work is None or not p.step_s:
        return Speed(*sure)
    device_s = p.step_s * work.devices
    per_s, mfu, hfu = rates(work, p.step_s)
    price = device_s / 3600 * work.price_per_hour if work.price_per_hour else None
    energy = device_s * work.watts if work.watts else None
    return Speed(
        *sure, work.unit, work.count / device_s, per_s, mfu, hfu,
        price, None if price is None or not work.count else 1e12 * price / work.count,
        energy, None if energy is None or not work.count else energy / work.count,
    )


def rates(work: Workload, step_s: float) -> tuple[float, float | None, float | None]:
    """Tokens or samples a second, MFU and HFU of steps that take ``step_s`` (the last two None: no FLOPs are known)."""
    peak = step_s * work.devices * work.peak_flops_per_s
    if not work.model_flops:
        return work.count / step_s, None, None
    return work.count / step_s, work.model_flops / peak, work.hardware_flops / peak


def _memory(plan: Plan, record: Record | None) -> Memory:
    p = plan.prediction
    plain = p.peak_bytes, p.limit_bytes, p.state_bytes, p.activation_bytes, p.host_bytes, p.disk_bytes
    if record is None or record.memory is None or not record.memory.num_bytes:
        return Memory(*plain, (("parameters, gradients and optimizer state", p.state_bytes),
                               ("activations at the end of forward", p.activation_bytes)),
                      device_bytes=record.workload.memory_bytes if record else 0.0)
    table = record.memory
    at = max(range(len(table.at)), key=lambda n: sum(table.num_bytes[n]))
    return Memory(*plain, tuple(zip(table.kinds, table.num_bytes[at], strict=True)), table.at[at],
                  record.workload.memory_bytes, _stepped_bytes(plan, table, record.workload))


def _stepped_bytes(plan: Plan, table: MemoryProfile, work: Workload) -> float:
    """The peak without gradients of parameters but for those of `BUCKETS_IN_FLIGHT` buckets, or of as many times the
    largest whole parameter. (Those of several micro-batches add up, whatever steps them.)"""
    hybrid, away = plan.hybrid, plan.hybrid.offload
    if not hybrid.is_plain or away.in_backward or away.is_away or "gradients" not in table.kinds:
        return 0.0
    largest = max(map(math.prod, plan.model.parameters.values()), default=0) * work.state_bytes.get("gradient", 0.0)
    column, most = table.kinds.index("gradients"), BUCKETS_IN_FLIGHT * max(hybrid.bucket_bytes, largest)
    return max(sum(row) - max(0.0, row[column] - most) for row in table.num_bytes)


def times_of(p: Prediction) -> tuple[Time, ...]:
    """The parts of a step: compute, recompute, tables on the host, communication that is exposed and that is hidden,
    launches, the bubble, the framework."""
    return (
        Time("forward compute", p.forward_s - p.recompute_s - p.lookups_forward_s), Time("recompute", p.recompute_s),
        Time("backward compute", p.backward_s - p.lookups_backward_s), Time("optimizer", p.optimizer_s),
        Time(LOOKED_UP, p.lookups_forward_s + p.lookups_backward_s),
        Time(CROSSED, p.crossings_s),
        Time("exposed communication", p.exposed_s - p.crossings_s),
        Time(LAUNCHED, p.hidden_communication_s - p.hidden_s),
        Time("bubbles, sends, waits", p.waiting_s),
        Time("framework, per step and micro-batch", p.fixed_s),
        Time("hidden communication", p.hidden_communication_s, beside=True),
    )


def _collectives(plan: Plan, labels: dict[str, str]) -> list[Collectives]:
    """Of one rank, by purpose, the most expensive first."""
    found = [Collectives(use.purpose, use.kind, together(labels.get(axis, axis) for axis in apart(use.axis)),
                         use.direction, use.count, use.num_bytes, use.seconds)
             for use in plan.prediction.collectives_on_a_rank(plan.hybrid.pipeline_ranks)]
    order = {purpose: number for number, purpose in enumerate(PURPOSES)}
    return sorted(found, key=lambda use: (order.get(use.purpose, len(order)), -use.seconds))


def _proof(plan: Plan) -> Proof:
    e, step_s = plan.evidence, plan.prediction.step_s
    searched = not any(part.startswith(("by hand", "baseline", "zero_stage=0")) for part in e.stop_reason.split("; "))
    within = e.objective_s / e.lower_bound_s - 1 if searched and 0 < e.lower_bound_s < float("inf") else None
    within_any = step_s / e.step_bound_s - 1 if e.step_bound_s and 0 < e.step_bound_s <= step_s else None
    phases = tuple((name, seconds) for name, seconds in e.seconds.items() if not name.startswith("search:"))
    return Proof(searched, e.solver, e.objective_s, e.lower_bound_s, e.stop_reason,
                 None if within is None else max(0.0, within), within_any, e.step_bound_s, phases, e.combinations,
                 plan.hybrid.offload.is_away or bool(plan.hybrid.on_host))


__all__ = ["rates", "report_of", "times_of"]
