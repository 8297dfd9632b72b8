"""TODO."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """One strategy of a site: names by axis, and seconds of the step if only this site changes (inf: it cannot alone),
    that no plan with it is below, and of the best plan with it."""

    strategy: tuple[str, ...]
    alone_s: float
    least_s: float
    resolved_s: float | None


@dataclass(frozen=True)
class Sensitivity:
    """What a step becomes where ``what`` (a link's bandwidth, or the memory limit) is ``factor`` times what it is:
    seconds of this plan (inf: it does not fit) and of the best plan (inf: there is none), and how many ops that runs
    otherwise. ``none_found``: the search for the best plan ended without one, and cannot say that none fits; the best
    is this plan, then, if it fits."""

    what: str
    factor: float
    held_s: float
    best_s: float
    num_others: int
    none_found: bool = False
