"""Answers to questions about a plan, and the protocol of their source (implemented by `planning.study.Study`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from autoparallel.plans.plan import Plan


@dataclass(frozen=True)
class Choice:
    """One strategy of a decision (axis strategy names by mesh axis) and the search's cost with it, in seconds: a step
    without overlap, waits and the framework's own time.

    ``alone_s``: with all other decisions unchanged (inf: impossible). ``least_s``: a lower bound over all plans with
    it. ``resolved_s``: the best plan found with it (None: not searched; inf: none).
    """

    strategy: tuple[str, ...]
    alone_s: float
    least_s: float
    resolved_s: float | None


@dataclass(frozen=True)
class Sensitivity:
    """The step time with ``what`` (a link's bandwidth, or the memory limit) multiplied by ``factor``.

    ``held_s``: seconds of this plan (inf: it does not fit). ``best_s``: of the best plan (inf: none fits).
    ``num_others``: the number of ops with another strategy in the best plan. ``none_found``: the search ended without a
    plan and without a proof that none fits; ``best_s`` is then that of this plan.
    """

    what: str
    factor: float
    held_s: float
    best_s: float
    num_others: int
    none_found: bool = False


@dataclass(frozen=True)
class Row:
    """One line of a comparison; ``saved_s``: seconds that the first plan saves (None: no time)."""

    what: str
    texts: tuple[str, str]
    saved_s: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Two plans, named, line by line."""

    names: tuple[str, str]
    rows: tuple[Row, ...]


class Study(Protocol):
    """Answers questions about a plan by searching its problem again."""

    def alternatives(self, k: int) -> list[Plan]:
        """The ``k`` best plans found that differ in more than a few ops, cheapest first."""
        ...

    def explain(self, name: str) -> list[Choice]:
        """The cost of every strategy of an op, a parameter or an input; the chosen one first."""
        ...

    def sensitivity(self, factors: Sequence[float]) -> list[Sensitivity]:
        """The step time with each link's bandwidth, and the memory limit, multiplied by each factor."""
        ...
