"""Answers to questions about a plan, kept in its record, so that a saved plan still has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoparallel.errors import PlanError
from autoparallel.plans.answers import Row
from autoparallel.plans.plan import Plan
from autoparallel.plans.record import Alternative, Record
from autoparallel.plans.reports.blocks import block_rows
from autoparallel.plans.reports.build import report_of
from autoparallel.plans.reports.comparison import compare, other_layouts
from autoparallel.plans.reports.words import axis_words, title
from autoparallel.plans.roles import roles_of

#: Parts that tell an alternative apart, at most.
MOST_PARTS = 2


def ask(plan: Plan, explain: Sequence[str] = (), alternatives: int = 0, sensitivity: bool = False) -> Plan:
    """The plan with the answers in its record: what the strategies of some decisions cost, other plans, and what
    slower or faster links and less or more memory would mean.

    Raises PlanError for unknown names, and for plans without a search behind them.
    """
    record = plan.known
    if record is None:
        raise PlanError("the plan has no record to keep answers in: plan again with this version")
    if explain:
        record = replace(record, explanations={**record.explanations,
                                               **{name: tuple(plan.explain(name)) for name in explain}})
    if alternatives:
        found = [alternative_of(plan, other) for other in plan.alternatives(alternatives)]
        record = replace(record, alternatives=(*found, *(one for one in record.alternatives if one.by_hand)))
    if sensitivity:
        record = replace(record, sensitivities=tuple(plan.sensitivity()))
    return replace(plan, record=record)


def with_comparison(record: Record, plan: Plan, other: Plan, name: str) -> Record:
    """The record of ``plan`` with its comparison with ``other``."""
    ours = report_of(replace(plan, record=record))
    return replace(record, comparisons=(*record.comparisons, compare(ours, report_of(other), ("this plan", name))))


def alternative_of(plan: Plan, other: Plan, by_hand: str = "") -> Alternative:
    """Another plan by its title and its differences; on another mesh by those of the step's configuration alone, since
    all strategies are others there. Where its title is the same it is told by its axes, or by what it cuts by something
    else. Stage cuts and recomputed blocks are left out: they follow from the rest. ``by_hand``: its text, of a plan by
    hand."""
    lines = plan.diff(other).split("\n")[1:]
    said = {"cuts", "recompute_blocks", *(plan.strategies if plan.mesh_shape != other.mesh_shape else ())}
    lines = [line for line in lines if line.split(":")[0] not in said]
    axes = [axis_words(one, None) for one in (plan, other)]
    own, its = (title(one, words) for one, words in zip((plan, other), axes, strict=True))
    if own == its and plan.mesh_shape != other.mesh_shape:
        swapped = (" x ".join(f"{axis.label} {axis.size}" for axis in words) for words in axes)
        its = "The same with the axes {1}, not {0}, slowest links first".format(*swapped)
    elif own == its:
        its = _laid_out(other_layouts(block_rows(plan, axes[0]), block_rows(other, axes[1])))
    return Alternative(other.prediction.step_s, other.prediction.peak_bytes, tuple(lines), its, by_hand,
                       roles_of(other).family, other.hybrid.recompute)


def _laid_out(rows: Sequence[Row]) -> str:
    """A plan with the same title, by the first parts that it cuts by something else; "" if these are small parts."""
    said = [f"{row.what} {row.texts[1]} (here {row.texts[0]})" for row in rows[:MOST_PARTS]]
    more = [f"{len(rows) - MOST_PARTS} more part{'s' if len(rows) > MOST_PARTS + 1 else ''} cut by something else"]
    return f"The same but {'; '.join([*said, *(more if len(rows) > MOST_PARTS else [])])}" if rows else ""


__all__ = ["alternative_of", "ask", "with_comparison"]
