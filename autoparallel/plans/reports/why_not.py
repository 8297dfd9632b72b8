"""Why no other plan: the best of each family, by hand or searched, and the fastest other one that the search found."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoparallel.plans.record import EXCLUDED, FAR_SLOWER, LATE, Alternative, LeftOut
from autoparallel.plans.reports.comparison import name_of, slower_str
from autoparallel.plans.reports.report import Answer, Memory, Report, Speed
from autoparallel.plans.reports.units import bytes_str, percent_str, seconds_str

#: The family of a plan that says none.
OTHER = "another"
#: What is said before faster plans.
FASTER = "by settings that the options fix or that this search does not vary"


@dataclass(frozen=True)
class WhyNot:
    """Other plans: those that are slower or not possible, ``apart``, and those that the error of predictions does not
    tell from this one, ``near`` (``near_to``: by which error); ``faster``: plans that are faster, by settings that this
    plan's options fix or its search does not vary; ``untried``: sentences on what was not looked at."""

    faster: tuple[str, ...]
    apart: tuple[str, ...]
    near: tuple[str, ...]
    near_to: str
    untried: tuple[str, ...]

    @property
    def line(self) -> str:
        """All in one line; empty if nothing is known of other plans."""
        said = [f"Faster, {FASTER}: {'; '.join(self.faster)}."] if self.faster else []
        said += [f"Why no other: {'; '.join(self.apart)}."] if self.apart else []
        said += [f"About as fast, {self.near_to}: {'; '.join(self.near)}."] if self.near else []
        return " ".join([*said, *self.untried])

    @property
    def answers(self) -> Iterator[Answer]:
        """The same for the first screen, where there is something to say."""
        yield Answer("faster", (f"{FASTER}:", *self.faster) if self.faster else ())
        yield Answer("why no other", self.apart)
        yield Answer("about as fast", (f"{self.near_to}:", *self.near) if self.near else ())
        yield Answer("not tried", self.untried)


def why_no_other(report: Report) -> WhyNot:
    """The best known plan of each family, by hand or searched, the fastest other one that the search found, and why no
    plan of other families was priced."""
    others = report.record.alternatives if report.record is not None else ()
    own = report.family if "by hand" in report.proof.reason else ""
    best = [(family, one) for family, one in _families(report, others) if family != own]
    named = [(one, _of_family(report, family, one)) for family, one in best]
    found = [one for one in others if not one.by_hand][:1]
    named += [(one, f"another that the search found: {_titled(one)}") for one in found
              if all(one is not other for _, other in best)]
    faster, near, apart = list[str](), list[str](), list[str]()
    for one, what in named:
        if not _fits(report.memory, one.peak_bytes):
            without = " without recompute" if one.by_hand and one.recompute == "none" else ""
            apart.append(f"{what}, needs {bytes_str(one.peak_bytes)} a device{without}")
        elif report.speed.not_told_apart([one.step_s]):
            near.append(_slower(report.speed, one, what))
        else:
            (faster if one.step_s < report.speed.step_s else apart).append(_slower(report.speed, one, what))
    apart += _impossible(report, {own, *(family for family, _ in best)})
    rest = [one.step_s for one in others if one not in [other for other, _ in named]
            and _fits(report.memory, one.peak_bytes)]
    more = len(report.speed.not_told_apart(rest))
    near += [f"{more} more of the other plans below"] if more else []
    near_to = f"within the typical error of predictions ({percent_str(report.speed.p50)})"
    return WhyNot(tuple(faster), tuple(apart), tuple(near), near_to, tuple(_untried(report)))


def _of_family(report: Report, family: str, one: Alternative) -> str:
    """The best plan of a family, by its text or title."""
    if not one.by_hand:
        return f"{family} by the search ({_titled(one)})"
    return f"{'the same kind' if family == report.family else family} by hand ({one.by_hand})"


def _families(report: Report, others: Sequence[Alternative]) -> Iterator[tuple[str, Alternative]]:
    """Of each family of plans the fastest that fits, or else the smallest; the fastest family first. Of the family of
    the report's plan those by hand alone: the search's best is the plan itself."""
    families: dict[str, list[Alternative]] = {}
    for one in others:
        if one.by_hand or one.family not in ("", report.family):
            families.setdefault(one.family or OTHER, []).append(one)
    best = {}
    for family, some in families.items():
        fit = [one for one in some if _fits(report.memory, one.peak_bytes)]
        best[family] = min(fit, key=lambda one: one.step_s) if fit else min(some, key=lambda one: one.peak_bytes)
    yield from sorted(best.items(), key=lambda item: (not _fits(report.memory, item[1].peak_bytes), item[1].step_s))


def _impossible(report: Report, known: Collection[str]) -> Iterator[str]:
    """The families of usual plans of which none was priced, with the plan that is nearest to possible, a text for each
    reason; what was left for lack of time, or by the options, together at the end."""
    families: dict[str, list[LeftOut]] = {}
    for one in report.record.left_out if report.record is not None else ():
        families.setdefault(one.family or OTHER, []).append(one)
    alike: dict[str, list[str]] = {}
    for family, some in families.items():
        whys = [one.why for one in some]
        if family in known or not {LATE, EXCLUDED, FAR_SLOWER}.isdisjoint(whys):
            continue
        one = min(some, key=lambda one: one.least_bytes)
        least = f": at least {bytes_str(one.least_bytes)} a device" if one.least_bytes else ""
        alike.setdefault(_left_out_why(report, one), []).append(f"{family} by hand ({one.by_hand}{least})")
    yield from (f"not possible, {why}: {', '.join(names)}" for why, names in alike.items())
    for why in (LATE, EXCLUDED, FAR_SLOWER):
        if names := list(_not_priced(families, known, why)):
            yield f"{why}: {', '.join(names)}"


def _not_priced(families: Mapping[str, Sequence[LeftOut]], known: Collection[str], why: str) -> Iterator[str]:
    """The families of which no plan was priced for this reason, and, for lack of time, how many more of others."""
    counts = {family: sum(one.why == why for one in some) for family, some in families.items()}
    none = [family for family, count in counts.items() if count and family not in known
            and (why == LATE or all(one.why != LATE for one in families[family]))]
    yield from [f"by hand {', '.join(none)}"] if none else []
    if why == LATE:
        yield from (f"{count} more of {family}" for family, count in counts.items() if count and family in known)


def _left_out_why(report: Report, one: LeftOut) -> str:
    """Why a usual plan by hand was not priced."""
    if not one.least_bytes:
        return f"since {one.why}"
    limit = report.memory.limit_bytes or report.memory.device_bytes
    of = f" than the {bytes_str(limit)} that tensors may take" if limit else ""
    return f"since {one.why} take more{of}"


def _untried(report: Report) -> Iterator[str]:
    """Combinations that were estimated faster, and not planned in full; how many were not looked at."""
    trials, step_s = report.record.trials if report.record is not None else (), report.speed.step_s
    faster = [trial.step_s for trial in trials if trial.estimated and not trial.too_large and trial.step_s < step_s]
    tried = report.proof.combinations
    if faster:
        some = f"{len(faster)} combinations estimated faster" if len(faster) > 1 else "One combination estimated faster"
        yield (f"{some}, by up to {percent_str(1 - min(faster) / step_s)}, {'were' if len(faster) > 1 else 'was'} not "
               "planned in full.")
    if tried is not None and tried.left:
        yield f"{tried.left:,} of {tried.total:,} combinations were left for lack of time."


def _fits(memory: Memory, peak_bytes: float) -> bool:
    limit = memory.limit_bytes or memory.device_bytes
    return not limit or peak_bytes <= limit


def _titled(one: Alternative) -> str:
    """A plan that the search found, in words within a sentence."""
    said = name_of(one)
    return f"{said[:1].lower()}{said[1:]}"


def _slower(speed: Speed, one: Alternative, name: str) -> str:
    """The name of another plan, and by how much it is slower."""
    slower = one.step_s / speed.step_s - 1 if speed.step_s else 0.0
    by = slower_str(abs(slower))
    by = by if by.endswith("slow") else f"{by} {'slower' if slower >= 0 else 'faster'}"
    return f"{name}, {seconds_str(one.step_s)}, {by}"


__all__ = ["why_no_other"]
