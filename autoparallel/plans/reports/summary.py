"""The first three lines of every report: what plan, how fast and how full, how sure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoparallel.plans.reports.report import Memory, Proof, Report, Speed
from autoparallel.plans.reports.units import bytes_str, count_str, percent_str, seconds_str


def summary(report: Report) -> Report:
    """The report with its summary."""
    first = f"{report.title}." + _unusual(report)
    second = f"{_speed(report.speed)}; {_memory(report.memory)}."
    third = " ".join(_sure(report))
    return replace(report, summary=(first, second, third))


def _unusual(report: Report) -> str:
    if not report.departures:
        return ""
    more = f", and {len(report.departures) - 2} more" if len(report.departures) > 2 else ""
    return f" Unusual: {'; '.join(report.departures[:2])}{more}."


def _speed(speed: Speed) -> str:
    up_to = f" (p90 {seconds_str(speed.p90_s)})" if speed.p90 else ""
    text = f"{seconds_str(speed.step_s)} a step{up_to}"
    if speed.per_device_per_s is not None:
        text += f" = {count_str(speed.per_device_per_s)} {speed.unit}/s per device"
    if speed.mfu is not None and speed.hfu is not None:
        text += f", {percent_str(speed.mfu)} MFU"
        same = percent_str(speed.hfu) == percent_str(speed.mfu)
        text += "" if same else f" ({percent_str(speed.hfu)} HFU)"
    return text


def _memory(memory: Memory) -> str:
    peak = bytes_str(memory.peak_bytes)
    host = f", and {bytes_str(memory.host_bytes)} of the host's memory" if memory.host_bytes else ""
    host += f", and {bytes_str(memory.disk_bytes)} of disk" if memory.disk_bytes else ""
    if not memory.limit_bytes:
        fits = "" if memory.peak_bytes <= memory.device_bytes else "; does not fit"
        whole = f", of the {bytes_str(memory.device_bytes)} that it has{fits}" if memory.device_bytes else ""
        return f"{peak} a device{whole}{host}"
    margin = memory.margin_bytes
    room = f"margin {bytes_str(margin)}" if margin >= 0 else f"does not fit: {bytes_str(-margin)} too much"
    return f"{peak} of {bytes_str(memory.limit_bytes)} ({room}){host}"


def _sure(report: Report) -> Iterator[str]:
    yield f"Communication exposed {percent_str(max(0.0, report.exposed_share))} of the step."
    yield _proof(report.proof)
    speed = report.speed
    if near := speed.not_told_apart([one.step_s for one in report.record.alternatives] if report.record else ()):
        many = f"{len(near)} other plans are" if len(near) > 1 else "Another plan is"
        yield (f"{many} within the error of predictions ({percent_str(speed.p50)}): the next is "
               f"{percent_str(max(0.0, near[0] / speed.step_s - 1))} slower.")
    if speed.price_per_step is not None:
        per = f", {count_str(speed.price_per_1e12)} per 1e12 {speed.unit}" if speed.price_per_1e12 else ""
        yield f"Price {count_str(speed.price_per_step)} a step{per}."
    if speed.joules_per_step is not None:
        per = f", {count_str(speed.joules_per_unit)} J a {(speed.unit or '').removesuffix('s')}" \
            if speed.joules_per_unit else ""
        yield f"Energy {count_str(speed.joules_per_step / 3.6e6)} kWh a step{per}."


def _proof(proof: Proof) -> str:
    if not proof.searched:
        return f"Priced as given, not searched ({proof.reason})."
    if proof.within is None:
        sharding = "How near the best sharding is was not proven"
    elif proof.within < 5e-5:
        sharding = "Proven the best sharding of this configuration, by its cost without overlap"
    else:
        sharding = (f"Proven within {percent_str(proof.within)} of the best sharding of this configuration, by its "
                    "cost without overlap")
    if proof.within_any is None:
        return f"{sharding}; other pipelines, micro-batches and recompute were not searched."
    return f"{sharding}; at most {percent_str(proof.within_any)} above any combination."
