"""Two plans side by side: what differs, and the seconds that each part saves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autoparallel.plans.answers import Choice, Comparison, Row
from autoparallel.plans.record import Alternative, Trial
from autoparallel.plans.reports.blocks import BlockRows
from autoparallel.plans.reports.report import Report
from autoparallel.plans.reports.units import bytes_str, count_str, large_str, percent_str, seconds_str

OUTSIDE = "outside blocks"
#: Names of what another plan lays out otherwise, and letters of each, at most.
MOST_NAMES, MOST_LETTERS = 3, 60
#: Plans slower by more than this share are told as so many times as slow.
TIMES = 1.0
#: Savings below this share of the step are none.
LEAST_SAVED = 1e-4


def compare(ours: Report, theirs: Report, names: tuple[str, str] = ("this plan", "the other")) -> Comparison:
    """How two plans differ: step, rates, memory, parts of the step, communication by purpose, and what they do
    differently. Seconds are saved only where both do the same work."""
    jobs, rates = [_job(one) for one in (ours, theirs)], [_rate(one) for one in (ours, theirs)]
    rows = [Row("plan", (ours.title, theirs.title)),
            _seconds("whole step", ours.speed.step_s, theirs.speed.step_s)]
    rows += [Row("work of a step", (jobs[0], jobs[1]))] if jobs[0] != jobs[1] else []
    rows += [Row(f"{ours.speed.unit} a second", (rates[0], rates[1]))] if all(rates) else []
    if ours.speed.mfu is not None and theirs.speed.mfu is not None:
        rows.append(Row("MFU", (percent_str(ours.speed.mfu), percent_str(theirs.speed.mfu))))
    rows.append(Row("peak memory", (bytes_str(ours.memory.peak_bytes), bytes_str(theirs.memory.peak_bytes))))
    rows += [_seconds(a.part, a.seconds, b.seconds) for a, b in zip(ours.times, theirs.times, strict=True)
             if a.seconds or b.seconds]
    rows += [row for purpose in dict.fromkeys(use.purpose for use in (*ours.collectives, *theirs.collectives))
             if (row := _purpose(purpose, ours, theirs)) is not None]
    rows += other_layouts(ours.blocks, theirs.blocks)
    small = LEAST_SAVED * max(ours.speed.step_s, theirs.speed.step_s)
    return Comparison(names, tuple(
        replace(row, saved_s=None) if jobs[0] != jobs[1] or abs(row.saved_s or 0.0) < small else row for row in rows))


def _job(report: Report) -> str:
    """The work of a step."""
    if report.record is None:
        return "not known"
    work = report.record.workload
    return f"{work.count:,.0f} {work.unit}, {large_str(work.parameters)} parameters"


def _rate(report: Report) -> str:
    return count_str(report.speed.per_s) if report.speed.per_s is not None else ""


def _seconds(what: str, ours_s: float, theirs_s: float) -> Row:
    beside = what == "hidden communication"
    return Row(what, (seconds_str(ours_s), seconds_str(theirs_s)), None if beside else theirs_s - ours_s)


def _purpose(purpose: str, ours: Report, theirs: Report) -> Row | None:
    """Communication of one purpose, before overlap, so without savings."""
    totals = [sum(use.seconds for use in one.collectives if use.purpose == purpose) for one in (ours, theirs)]
    if not purpose or not any(totals):
        return None
    return Row(f"communication of {purpose}, with what is hidden", (seconds_str(totals[0]), seconds_str(totals[1])))


def other_layouts(ours: Sequence[BlockRows], theirs: Sequence[BlockRows]) -> list[Row]:
    """Parts of the repeated blocks, and of what is outside them, that are cut by something else."""
    tables = [_cuts(one) for one in (ours, theirs)]
    return [Row(f"{part} {where} cut by", texts) for where, part in dict.fromkeys((*tables[0], *tables[1]))
            if len(set(texts := (_counted(tables[0].get((where, part))), _counted(tables[1].get((where, part)))))) > 1]


def _cuts(blocks: Sequence[BlockRows]) -> dict[tuple[str, str], Counter[str]]:
    """By place and part: what it is cut by on the axes, and in how many blocks."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for block in blocks:
        where = block.title if block.title == OUTSIDE else "of the blocks"
        for row in block.rows:
            found.setdefault((where, row.part), Counter())[" x ".join(dict.fromkeys(row.cut_by))] += block.count
    return found


def _counted(cuts: Counter[str] | None) -> str:
    """The most frequent ways first, two of them.

    >>> _counted(Counter({"batch": 30, "weights": 2}))
    'batch (30 blocks), weights (2 blocks)'
    """
    if not cuts:
        return "-"
    if len(cuts) == 1:
        return next(iter(cuts))
    said = [f"{cut} ({count} block{'' if count == 1 else 's'})" for cut, count in cuts.most_common(2)]
    return ", ".join([*said, "..."] if len(cuts) > 2 else said)


def trials_of(report: Report) -> list[Trial]:
    """What was tried: combinations of the joint search, usual plans by hand, and the report's own plan."""
    record = report.record
    if record is None:
        return []
    hand = [Trial(f"by hand {one.by_hand}", one.step_s, one.peak_bytes) for one in record.alternatives if one.by_hand]
    return [*record.trials, *hand, Trial("this plan", report.speed.step_s, report.memory.peak_bytes)]


#: A row of the table of other plans: name, step, by how much it is slower, peak memory, and the first of the
#: differences.
OtherRow = tuple[str, str, str, str, str]


def other_rows(report: Report) -> list[tuple[Alternative, OtherRow]]:
    """The alternatives and their table rows: first those within the memory limit, each group by step time."""
    others = report.record.alternatives if report.record is not None else ()
    limit = report.memory.limit_bytes or report.memory.device_bytes or math.inf
    return [(one, _other_row(report, one))
            for one in sorted(others, key=lambda one: (one.peak_bytes > limit, one.step_s))]


def _other_row(report: Report, one: Alternative) -> OtherRow:
    more = f", and {len(one.differences) - 3} more" if len(one.differences) > 3 else ""
    differs = "; ".join(one.differences[:3]) + more
    name = _by_hand(one.by_hand) if one.by_hand else name_of(one)
    slower = slower_str(one.step_s / report.speed.step_s - 1) if report.speed.step_s else "-"
    limit = report.memory.limit_bytes or report.memory.device_bytes
    if limit and one.peak_bytes > limit:
        slower += ", does not fit"
    elif report.speed.not_told_apart([one.step_s]):
        slower += ", within the error"
    return name, seconds_str(one.step_s), slower, bytes_str(one.peak_bytes), differs


def slower_str(share: float) -> str:
    """By which share of a step another plan is slower, or how many times as slow it is.

    >>> slower_str(0.25), slower_str(-0.02), slower_str(2.5)
    ('25 %', '-2.0 %', '3.5 times as slow')
    """
    return percent_str(share) if share <= TIMES else f"{1 + share:.3g} times as slow"


def name_of(one: Alternative) -> str:
    """A plan that the search found, by its title, or by what is laid out in another way."""
    names = list(dict.fromkeys(_short(line.partition(":")[0]) for line in one.differences))
    named = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
    return one.title or "The same with other layouts" + (f" of {named}" if named else "")


def _short(name: str) -> str:
    """The last two words of a decision's name that are no numbers.

    >>> _short("model.layers.3.self_attn.k_proj.weight"), _short("x")
    ('k_proj.weight', 'x')
    """
    return ".".join([part for part in name.split(".") if not part.isdigit()][-2:])[:MOST_LETTERS]


def left_out_rows(report: Report) -> list[tuple[str, str, str]]:
    """Usual plans by hand that were not priced: their names, why, and the bytes that they need at least ("": not
    known)."""
    return [(_by_hand(one.by_hand), "state does not fit" if one.least_bytes else one.why,
             f"{bytes_str(one.least_bytes)} or more" if one.least_bytes else "")
            for one in (report.record.left_out if report.record else ())]


def _by_hand(text: str) -> str:
    return f"by hand {text.replace(',', ', ')}"


def explained(choices: Sequence[Choice]) -> list[tuple[str, str, str, str]]:
    """Strategies of a decision, the chosen one first: (name, seconds with all else unchanged, seconds of the best plan
    with it, lower bound); those of others as differences from the chosen one."""
    own_s = choices[0].alone_s if choices else 0.0

    def said(seconds: float, none: str) -> str:
        if not math.isfinite(seconds):
            return none
        return f"{'-' if seconds < own_s else '+'}{seconds_str(abs(seconds - own_s))}"

    found = []
    for number, c in enumerate(choices):
        name = "·".join(c.strategy)
        if not number and math.isfinite(own_s):
            found.append((f"{name} (chosen)", seconds_str(own_s), seconds_str(own_s), seconds_str(c.least_s)))
        else:
            resolved = "" if c.resolved_s is None else said(c.resolved_s, "none")
            found.append((name, said(c.alone_s, "not possible"), resolved, said(c.least_s, "none")))
    return found


__all__ = ["compare", "explained", "left_out_rows", "name_of", "other_layouts", "other_rows", "slower_str",
           "trials_of"]
