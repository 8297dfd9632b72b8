"""The first lines of every report: what plan, how fast and how full, how sure, and why no other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from autoparallel.plans.reports.report import CROSSED, LAUNCHED, LOOKED_UP, Answer, Memory, Proof, Report, Speed
from autoparallel.plans.reports.units import (
    bytes_str,
    count_str,
    large_str,
    percent_str,
    percent_up,
    seconds_str,
    times_up,
)
from autoparallel.plans.reports.why_not import why_no_other
from autoparallel.plans.reports.words import AROUND_HEADS, HEADS

#: Parts of a step below this share are left out of the summary, but for exposed communication.
LEAST_SHARE = 0.005
#: Memory is tight if less than this share of the limit is left.
TIGHT = 0.01
#: Gaps above this share are told as loose bounds.
LOOSE = 0.5
#: Departures from the usual plan that are named, at most.
MOST_UNUSUAL = 3
#: Exposed communication of this share of the step is said by what it moves; of the second, this share at least.
MUCH_EXPOSED, MUCH_MOVED = 0.1, 0.2


def summary(report: Report) -> Report:
    """The report with its summary."""
    which, why = f"{report.title}." + _in_vain(report) + _unusual(report) + _shares(report), why_no_other(report)
    fast, full, costs = _speed(report), f"{_memory(report.memory)}{_state(report)}", tuple(_costs(report.speed))
    job, of_it = _job(report), _work(report)
    where, error = f"{_where(report)}.", _error(report.speed)
    proof = _proof(report.proof, any(axis.role == "pipeline" for axis in report.axes))
    lines = (which, " ".join([f"{fast[0]}{of_it}{fast[1]}; {full}.", *costs]),
             " ".join([f"Of the step: {where}", *error, proof]), why.line)
    screen = (Answer("job", (f"{job}.",) if job else ()), Answer("plan", (which,)),
              Answer("speed", (f"{''.join(fast)}.",)), Answer("memory", (f"{full}.",)),
              Answer("cost", costs), Answer("step", (where,)), Answer("how sure", (*error, proof)), *why.answers)
    return replace(report, summary=tuple(line for line in lines if line),
                   first_screen=tuple(answer for answer in screen if answer.entries))


def _in_vain(report: Report) -> str:
    """That more devices gain nothing, where all ranks compute the same."""
    roles = {axis.role for axis in report.axes if axis.size > 1}
    return " One device would be as fast." if roles == {"replicated"} else ""


def _unusual(report: Report) -> str:
    if not report.departures:
        return ""
    named = attention_first(report)[:MOST_UNUSUAL]
    more = f", and {len(report.departures) - len(named)} more" if len(report.departures) > len(named) else ""
    return f" Unusual: {'; '.join(named)}{more}."


def _shares(report: Report) -> str:
    """What each rank of the mesh's first axis gets, where devices are not equal."""
    shares = report.record.workload.shares if report.record is not None else ()
    if not shares:
        return ""
    if len(shares) == 1:
        searched = report.proof.combinations is not None
        more = "" if searched else " (joint=True also tries pipelines and micro-batches by their speed)"
        return f" Unequal devices: {shares[0].devices}; each op takes as long as on the slowest{more}."
    gets = [f"{count} micro-batch{'es' * (count > 1)}" for count in report.by_rank] or [
        f"{share.blocks} blocks" if share.blocks else f"{share.ops} ops" for share in shares]
    kind = "rank" if report.by_rank else "pipeline rank"
    each = "; ".join(f"{kind} {rank} on devices {share.numbers} ({share.devices}) has {what}"
                     for rank, (share, what) in enumerate(zip(shares, gets, strict=True)))
    unlike = len({share.memory_bytes for share in shares}) > 1
    return f" Unequal devices: {each}." + (" Bytes on a larger device are told as its share of the smallest one's "
                                           "memory." if unlike else "")


def attention_first(report: Report) -> list[str]:
    """The departures from the axes' roles, those of attention first; the summary names the first `MOST_UNUSUAL`."""
    return sorted(report.departures, key=lambda text: not any(said in text for said in (HEADS, AROUND_HEADS)))


# ------------------------------------------------------------------------------------------------- fast, full, dear


def _job(report: Report) -> str:
    """What is trained, on what, by which software ("": not known)."""
    if report.record is None or not report.record.workload.count:
        return ""
    work = report.record.workload
    return f"{large_str(work.parameters)} parameters in {work.dtype}, a step{_work(report)}"


def _speed(report: Report) -> tuple[str, str]:
    """Seconds of a step; and their range, rates and share of the peak."""
    speed = report.speed
    text = _range(speed)
    if speed.per_device_per_s is not None:
        text += f" = {count_str(speed.per_device_per_s)} {speed.unit}/s per device"
    if speed.mfu is not None and speed.hfu is not None:
        text += f", {percent_str(speed.mfu)} MFU"
        same = percent_str(speed.hfu) == percent_str(speed.mfu)
        why = "recompute" if report.seconds_of("recompute") else "work that ranks repeat"
        text += "" if same else f" ({percent_str(speed.hfu)} HFU, with {why})"
    return f"{seconds_str(speed.step_s)} a step", text


def _work(report: Report) -> str:
    """What a step computes, on what, by which software."""
    if report.record is None or not report.record.workload.count:
        return ""
    work = report.record.workload
    which = f" (of {work.tokens_of})" if work.tokens_of else ""
    software = f" with {work.software}" if work.software else ""
    unit = work.unit.removesuffix("s") if work.count == 1 else work.unit
    return f" of {work.count:,.0f} {unit}{which} on {work.devices:,} {work.device}{software}"


def _range(speed: Speed) -> str:
    """Between which seconds nine in ten of such steps lie."""
    if not speed.p90:
        return ""
    most = f"{seconds_str(speed.p90_s)}" if math.isfinite(speed.p90_s) else "any time"
    return f" (nine in ten are measured between {seconds_str(speed.p90_least_s)} and {most})"


def _memory(memory: Memory) -> str:
    peak = bytes_str(memory.peak_bytes)
    host = f", and {bytes_str(memory.host_bytes)} of the host's memory" if memory.host_bytes else ""
    host += f", and {bytes_str(memory.disk_bytes)} of disk" if memory.disk_bytes else ""
    if not memory.limit_bytes:
        fits = "" if memory.peak_bytes <= memory.device_bytes else "; does not fit"
        whole = f", of the {bytes_str(memory.device_bytes)} that it has{fits}" if memory.device_bytes else ""
        return f"{peak} a device{whole}{host}"
    margin = memory.margin_bytes
    room = f"{bytes_str(margin)} left" if margin >= 0 else f"does not fit: {bytes_str(-margin)} too much"
    if margin < 0 < memory.stepped_bytes <= memory.limit_bytes:
        room += f"; step_in_backward=True would take {bytes_str(memory.stepped_bytes)}, which fits"
    room += ": tight" if 0 <= margin < TIGHT * memory.limit_bytes else ""
    whole = f", of {bytes_str(memory.device_bytes)} a device" if memory.device_bytes > memory.limit_bytes else ""
    if 0 < memory.device_bytes < memory.limit_bytes:
        whole = f", more than the {bytes_str(memory.device_bytes)} that a device has"
    return f"{peak} of the {bytes_str(memory.limit_bytes)} that tensors may take{whole} ({room}){host}"


def _state(report: Report) -> str:
    """The bytes that each element of a parameter trains with, which are the first thing that other software has
    otherwise."""
    state = report.record.workload.state_bytes if report.record is not None else {}
    return f", with {sum(state.values()):g} bytes of training state an element ({_parts(state)})" if state else ""


def _error(speed: Speed) -> tuple[str, ...]:
    """How far such predictions are off, and by what that is known."""
    return (f"Typical error of such predictions {percent_str(speed.p50)}: {speed.basis}.",) if speed.p50 else ()


def state_said(state: Mapping[str, float]) -> str:
    """`Workload.state_bytes` as a sentence.

    >>> state_said({"parameter": 2.0, "gradient": 2.0, "adamw states": 4.0})
    'bytes of an element before sharding: parameter 2, gradient 2, adamw states 4, no float32 master weights'
    """
    return f"bytes of an element before sharding: {_parts(state)}"


def _parts(state: Mapping[str, float]) -> str:
    """Bytes by what they are for; of parameters of less than four bytes also whether float32 master weights are
    missing."""
    parts = [f"{what} {num_bytes:g}" for what, num_bytes in state.items()]
    masters = state.get("parameter", 4.0) >= 4 or any("master" in what for what in state)
    return ", ".join(parts if masters else [*parts, "no float32 master weights"])


def _costs(speed: Speed) -> Iterator[str]:
    if speed.price_per_step is not None:
        per = f", {count_str(speed.price_per_1e12)} per 1e12 {speed.unit}" if speed.price_per_1e12 else ""
        yield f"Price {count_str(speed.price_per_step)} a step{per}."
    if speed.joules_per_step is not None:
        per = f", {count_str(speed.joules_per_unit)} J a {(speed.unit or '').removesuffix('s')}" \
            if speed.joules_per_unit else ""
        yield f"Energy {count_str(speed.joules_per_step / 3.6e6)} kWh a step{per}."


def _where(report: Report) -> str:
    """The shares of the step: compute, exposed communication, tables on the host, waits and the framework."""
    share = {name: sum(report.seconds_of(part) for part in parts) / (report.speed.step_s or 1.0)
             for name, parts in (("compute", ("forward compute", "recompute", "backward compute", "optimizer",
                                              LAUNCHED)),
                                 ("lookups on the host", (LOOKED_UP, CROSSED)),
                                 ("bubbles and waits", ("bubbles, sends, waits",)),
                                 ("framework", ("framework, per step and micro-batch",)))}
    said = [f"{name} {percent_str(value)}" for name, value in share.items() if value >= LEAST_SHARE]
    said.insert(1, f"communication exposed {percent_str(max(0.0, report.exposed_share))}{_mostly(report)}")
    return ", ".join(said)


def _mostly(report: Report) -> str:
    """What most of the communication moves, summed over collectives, where much is exposed: one purpose, or two if
    both take long."""
    seconds: dict[str, float] = {}
    for use in report.collectives if report.exposed_share >= MUCH_EXPOSED else ():
        what = use.purpose or use.kind
        seconds[what] = seconds.get(what, 0.0) + use.seconds
    total_s = sum(seconds.values())
    if not total_s:
        return ""
    most = sorted(seconds, key=seconds.__getitem__, reverse=True)[:2]
    said = [f"{percent_str(seconds[what] / total_s)} {'' if number else 'is '}for {what}"
            for number, what in enumerate(most) if not number or seconds[what] >= MUCH_MOVED * total_s]
    return f" (of all communication {', '.join(said)})"


# ----------------------------------------------------------------------------------------------------- how sure


def _proof(proof: Proof, in_pipeline: bool) -> str:
    """How near the best plan this one is: of all combinations, then of its own sharding."""
    if proof.searched:
        said = _sharding(proof.within, "overlap and bubbles" if in_pipeline else "overlap")
    elif proof.combinations is not None:
        said = f"It is a usual plan ({proof.reason}), faster than all that the search planned in full"
    else:
        return f"Priced as given, not searched ({proof.reason})."
    if proof.within_any is None:
        other = "" if proof.combinations is not None else \
            "; other pipelines, micro-batches and recompute were not searched"
        return f"{said}{other}."
    if proof.within_any > LOOSE:
        return (f"Not proven to be the best: a plan {times_up(1 + proof.within_any)} times as fast is not ruled out. "
                f"{said}.")
    tiers = " with training state in these tiers" if proof.in_tiers else ""
    return f"At most {percent_up(proof.within_any)} slower than the best combination{tiers}{_all_tried(proof)}. {said}."


def _sharding(within: float | None, less: str) -> str:
    if within is None:
        return "How near the best its sharding is was not proven"
    if within < 5e-5:
        return f"Its sharding is proven the best, by a cost without {less}"
    if within > LOOSE:
        return (f"Its sharding is not proven near the best (its cost without {less} is {times_up(1 + within)} times "
                "the bound): more time may find a better one")
    return f"Its sharding is proven within {percent_up(within)} of the best, by a cost without {less}"


def _all_tried(proof: Proof) -> str:
    """That a joint search left no combination out, where that is so."""
    tried = proof.combinations
    return "" if tried is None or tried.left else f", of which all {tried.total:,} were estimated or ruled out"


__all__ = ["attention_first", "state_said", "summary"]
