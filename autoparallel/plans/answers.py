"""Answers of a plan whose search is still at hand, and who answers (`planning.study.Study`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from autoparallel.plans.plan import Plan


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


class Study(Protocol):
    """Answers questions to a plan by searching its problem again."""

    def alternatives(self, k: int) -> list[Plan]:
        """The k best plans found that run many ops otherwise, cheapest first."""
        ...

    def explain(self, name: str) -> list[Choice]:
        """The cost of every strategy of an op, a parameter or an input; the chosen one first."""
        ...

    def sensitivity(self, factors: Sequence[float]) -> list[Sensitivity]:
        """The step with each link's bandwidth, and the memory limit, multiplied by each factor."""
        ...
