"""The first lines of every report: what plan, how fast and how full, how sure, and why no other."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from autoparallel.plans.record import EXCLUDED, LATE, Alternative, LeftOut
from autoparallel.plans.reports.report import Memory, Proof, Report, Speed
from autoparallel.plans.reports.units import bytes_str, count_str, percent_str, percent_up, seconds_str
from autoparallel.plans.reports.words import AROUND_HEADS, HEADS

#: Parts of a step below this share are left out of the summary, but for exposed communication.
LEAST_SHARE = 0.005
#: Gaps above this share are told as loose bounds.
LOOSE = 0.5
#: Departures from the usual plan that are named, at most.
MOST_UNUSUAL = 3
#: Exposed communication of this share of the step is said by kind.
MUCH_EXPOSED = 0.1
#: Families of plans by hand, with the options that their texts have; the first whose options a text has counts. Others
#: are `DDP`.
FAMILIES = (("pipeline and expert parallel", ("pp=", "ep=")), ("pipeline parallel", ("pp=",)),
            ("expert parallel", ("ep=",)), ("FSDP with tensor parallel", ("tp=", "zero=3")),
            ("tensor parallel", ("tp=",)), ("context parallel", ("cp=",)), ("FSDP", ("zero=3",)))
DDP = "DDP or ZeRO-1"
#: Names of what another plan lays out otherwise, and letters of each, at most.
MOST_NAMES, MOST_LETTERS = 3, 60
#: Plans slower by more than this share are told as so many times as slow.
TIMES = 1.0


def summary(report: Report) -> Report:
    """The report with its summary."""
    lines = (f"{report.title}." + _unusual(report),
             " ".join([f"{_speed(report)}; {_memory(report.memory)}{_state(report)}.", *_costs(report.speed)]),
             " ".join([_where(report) + _error(report.speed),
                       _proof(report.proof, any(axis.role == "pipeline" for axis in report.axes))]),
             _others(report))
    return replace(report, summary=tuple(line for line in lines if line))


def _unusual(report: Report) -> str:
    if not report.departures:
        return ""
    heads = (HEADS, AROUND_HEADS)  # attention first
    named = sorted(report.departures, key=lambda text: not any(said in text for said in heads))[:MOST_UNUSUAL]
    more = f", and {len(report.departures) - len(named)} more" if len(report.departures) > len(named) else ""
    return f" Unusual: {'; '.join(named)}{more}."


# ------------------------------------------------------------------------------------------------- fast, full, dear


def _speed(report: Report) -> str:
    speed = report.speed
    text = f"{seconds_str(speed.step_s)} a step{_work(report)}{_range(speed)}"
    if speed.per_device_per_s is not None:
        text += f" = {count_str(speed.per_device_per_s)} {speed.unit}/s per device"
    if speed.mfu is not None and speed.hfu is not None:
        text += f", {percent_str(speed.mfu)} MFU"
        same = percent_str(speed.hfu) == percent_str(speed.mfu)
        why = "recompute" if report.seconds_of("recompute") else "work that ranks repeat"
        text += "" if same else f" ({percent_str(speed.hfu)} HFU, with {why})"
    return text


def _work(report: Report) -> str:
    """What a step computes, on what, by which software."""
    if report.record is None or not report.record.workload.count:
        return ""
    work = report.record.workload
    which = f" (of {work.tokens_of})" if work.tokens_of else ""
    software = f" with {work.software}" if work.software else ""
    return f" of {work.count:,.0f} {work.unit}{which} on {work.devices:,} {work.device}{software}"


def _range(speed: Speed) -> str:
    """Between which seconds nine in ten of such steps lie."""
    if not speed.p90:
        return ""
    most = f"{seconds_str(speed.p90_s)}" if math.isfinite(speed.p90_s) else "any time"
    return f" (9 in 10 such predictions: measured between {seconds_str(speed.p90_least_s)} and {most})"


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
    whole = f", of {bytes_str(memory.device_bytes)} a device" if memory.device_bytes > memory.limit_bytes else ""
    return f"{peak} of the {bytes_str(memory.limit_bytes)} that tensors may take{whole} ({room}){host}"


def _state(report: Report) -> str:
    """The bytes that each element of a parameter trains with, which are the first thing that other software has
    otherwise."""
    state = report.record.workload.state_bytes if report.record is not None else {}
    return f", with {sum(state.values()):g} bytes of training state an element ({_parts(state)})" if state else ""


def _error(speed: Speed) -> str:
    """How far such predictions are off, and by what that is known."""
    return (f" Half of such predictions are within {percent_str(speed.p50)} of the measured step, above or below: "
            f"{speed.basis}.") if speed.p50 else ""


def state_said(state: Mapping[str, float]) -> str:
    """`Workload.state_bytes` as a sentence.

    >>> state_said({"parameter": 2.0, "gradient": 2.0, "adamw states": 4.0})
    'bytes of an element before sharding: parameter 2, gradient 2, adamw states 4'
    """
    return f"bytes of an element before sharding: {_parts(state)}"


def _parts(state: Mapping[str, float]) -> str:
    return ", ".join(f"{what} {num_bytes:g}" for what, num_bytes in state.items())


def _costs(speed: Speed) -> Iterator[str]:
    if speed.price_per_step is not None:
        per = f", {count_str(speed.price_per_1e12)} per 1e12 {speed.unit}" if speed.price_per_1e12 else ""
        yield f"Price {count_str(speed.price_per_step)} a step{per}."
    if speed.joules_per_step is not None:
        per = f", {count_str(speed.joules_per_unit)} J a {(speed.unit or '').removesuffix('s')}" \
            if speed.joules_per_unit else ""
        yield f"Energy {count_str(speed.joules_per_step / 3.6e6)} kWh a step{per}."


def _where(report: Report) -> str:
    """The shares of the step: compute, exposed communication, waits and the framework."""
    share = {name: sum(report.seconds_of(part) for part in parts) / (report.speed.step_s or 1.0)
             for name, parts in (("compute", ("forward compute", "recompute", "backward compute", "optimizer",
                                              "less what hosts launch ahead")),
                                 ("bubbles and waits", ("bubbles, sends, waits",)),
                                 ("framework", ("framework, per step and micro-batch",)))}
    said = [f"{name} {percent_str(value)}" for name, value in share.items() if value >= LEAST_SHARE]
    said.insert(1, f"communication exposed {percent_str(max(0.0, report.exposed_share))}{_mostly(report)}")
    return f"Of the step: {', '.join(said)}."


def _mostly(report: Report) -> str:
    """The kind of the communication that takes longest, where much is exposed."""
    seconds: dict[str, float] = {}
    for use in report.collectives if report.exposed_share >= MUCH_EXPOSED else ():
        kind = f"{use.kind} of {use.purpose}" if use.purpose else use.kind
        seconds[kind] = seconds.get(kind, 0.0) + use.seconds
    most, total_s = max(seconds, key=seconds.__getitem__, default=""), sum(seconds.values())
    return f" ({percent_str(seconds[most] / total_s)} of all communication is {most})" if total_s else ""


# ----------------------------------------------------------------------------------------------------- how sure


def _proof(proof: Proof, in_pipeline: bool) -> str:
    if proof.searched:
        said = _sharding(proof.within, "overlap and bubbles" if in_pipeline else "overlap")
    elif proof.combinations is not None:
        said = f"A usual plan ({proof.reason}), faster than all that the joint search planned"
    else:
        return f"Priced as given, not searched ({proof.reason})."
    if proof.within_any is None:
        other = "" if proof.combinations is not None else \
            "; other pipelines, micro-batches and recompute were not searched"
        return f"{said}{other}."
    if proof.within_any > LOOSE:
        return (f"{said}; the bound on all combinations is loose: this one is at most "
                f"{math.ceil(10 * (1 + proof.within_any)) / 10:g} times as slow as the best.")
    return f"{said}; at most {percent_up(proof.within_any)} slower than the best combination{_all_tried(proof)}."


def _sharding(within: float | None, less: str) -> str:
    if within is None:
        return "How near the best sharding is was not proven"
    if within < 5e-5:
        return f"Proven the best sharding of this configuration, by its cost without {less}"
    if within > LOOSE:
        return (f"Not proven near the best sharding of this configuration (its cost without {less} is "
                f"{1 + within:.2g} times the bound): more time may find a better one")
    return (f"Proven within {percent_up(within)} of the best sharding of this configuration, by its cost without "
            f"{less}")


def _all_tried(proof: Proof) -> str:
    """That a joint search left no combination out, where that is so."""
    tried = proof.combinations
    return "" if tried is None or tried.left else f", of which all {tried.total:,} were estimated or ruled out"


# -------------------------------------------------------------------------------------------------- why no other


def _others(report: Report) -> str:
    """The fastest other plan that the search found and the usual ones by hand, as far as they were priced, and why the
    others were not."""
    others = report.record.alternatives if report.record is not None else ()
    usual = list(_families(report, [one for one in others if one.by_hand]))
    found = [one for one in others if not one.by_hand][:1]
    named = [(one, f"{family} by hand ({one.by_hand})") for family, one in usual]
    named += [(one, f"another that the search found: {_titled(one)}") for one in found]
    near, apart = list[str](), list[str]()
    for one, what in named:
        if not _fits(report.memory, one.peak_bytes):
            apart.append(f"{what}, needs {bytes_str(one.peak_bytes)} a device")
        else:
            (near if report.speed.not_told_apart([one.step_s]) else apart).append(_slower(report.speed, one, what))
    apart += _impossible(report, {family for family, _ in usual})
    rest = [one.step_s for one in others if one not in [other for other, _ in named]
            and _fits(report.memory, one.peak_bytes)]
    said = f"Why no other: {'; '.join(apart)}." if apart else ""
    return f"{said}{_near(report.speed, near, rest)}{_untried(report)}".strip()


def _family(by_hand: str) -> str:
    return next((name for name, signs in FAMILIES if all(sign in by_hand for sign in signs)), DDP)


def _families(report: Report, by_hand: Sequence[Alternative]) -> Iterator[tuple[str, Alternative]]:
    """Of each family of plans by hand the fastest that fits, or else the smallest; the fastest family first."""
    families: dict[str, list[Alternative]] = {}
    for one in by_hand:
        families.setdefault(_family(one.by_hand), []).append(one)
    best = {}
    for family, some in families.items():
        fit = [one for one in some if _fits(report.memory, one.peak_bytes)]
        best[family] = min(fit, key=lambda one: one.step_s) if fit else min(some, key=lambda one: one.peak_bytes)
    yield from sorted(best.items(), key=lambda item: (not _fits(report.memory, item[1].peak_bytes), item[1].step_s))


def _impossible(report: Report, known: Collection[str]) -> Iterator[str]:
    """The families of usual plans of which none was priced, with the reason of the one that is nearest to possible;
    those that were not priced for lack of time, or by the options, together at the end."""
    families: dict[str, list[LeftOut]] = {}
    own = _family(report.proof.reason) if "by hand" in report.proof.reason else ""
    for one in report.record.left_out if report.record is not None else ():
        families.setdefault(_family(one.by_hand), []).append(one)
    alike: dict[str, list[str]] = {}
    for family, some in families.items():
        if family in known or family == own:
            continue
        whys = [one.why for one in some]
        if why := next((why for why in (LATE, EXCLUDED) if why in whys), ""):
            alike.setdefault(why, []).append(family)
            continue
        one = min(some, key=lambda one: one.least_bytes)
        yield f"{family} by hand ({one.by_hand}), not possible: {_left_out_why(report, one)}"
    yield from (f"{why}: {' and '.join(names)} by hand" for why, names in alike.items())


def _left_out_why(report: Report, one: LeftOut) -> str:
    """Why a usual plan by hand was not priced."""
    if not one.least_bytes:
        return one.why
    limit = report.memory.limit_bytes or report.memory.device_bytes
    of = f", and tensors may take {bytes_str(limit)}" if limit else ""
    return f"{one.why} take at least {bytes_str(one.least_bytes)} a device{of}"


def _near(speed: Speed, named: Sequence[str], rest_s: Sequence[float]) -> str:
    """The plans that the error of predictions does not tell apart from this one: those ``named``, and how many more."""
    count = len(speed.not_told_apart(rest_s))
    more = [f"{count} more plan{'s' if count > 1 else ''}"] if count else []
    if not (named or more):
        return ""
    return (f" Not told apart by the median error of predictions ({percent_str(speed.p50)}): "
            f"{'; '.join([*named, *more])}.")


def _untried(report: Report) -> str:
    """Combinations that were estimated faster, and not planned in full; how many were not looked at."""
    trials, step_s = report.record.trials if report.record is not None else (), report.speed.step_s
    faster = [trial.step_s for trial in trials if trial.estimated and not trial.too_large and trial.step_s < step_s]
    tried = report.proof.combinations
    left = "" if tried is None or not tried.left else (
        f" {tried.left:,} of {tried.total:,} combinations were left for lack of time.")
    if not faster:
        return left
    some = f"{len(faster)} combinations estimated faster" if len(faster) > 1 else "One combination estimated faster"
    return (f" {some}, by up to {percent_str(1 - min(faster) / step_s)}, {'were' if len(faster) > 1 else 'was'} not "
            f"planned in full.{left}")


def _fits(memory: Memory, peak_bytes: float) -> bool:
    limit = memory.limit_bytes or memory.device_bytes
    return not limit or peak_bytes <= limit


def _titled(one: Alternative) -> str:
    """A plan that the search found, in words: by its title, or by what is laid out in another way."""
    if one.title:
        return f"{one.title[:1].lower()}{one.title[1:]}"
    names = list(dict.fromkeys(_short(line.partition(":")[0]) for line in one.differences))
    named = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
    return f"the same with other layouts of {named}" if named else "the same with other layouts"


def _short(name: str) -> str:
    """The last two words of a decision's name that are no numbers.

    >>> _short("model.layers.3.self_attn.k_proj.weight"), _short("x")
    ('k_proj.weight', 'x')
    """
    return ".".join([part for part in name.split(".") if not part.isdigit()][-2:])[:MOST_LETTERS]


def _slower(speed: Speed, one: Alternative, name: str) -> str:
    """The name of another plan, and by how much it is slower."""
    slower = one.step_s / speed.step_s - 1 if speed.step_s else 0.0
    by = f"{percent_str(abs(slower))} {'slower' if slower >= 0 else 'faster'}"
    if slower > TIMES:
        by = f"{1 + slower:.2g} times as slow"
    return f"{name}, {seconds_str(one.step_s)}, {by}"


__all__ = ["state_said", "summary"]
