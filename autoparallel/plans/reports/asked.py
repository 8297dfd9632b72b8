"""Answers to questions about a plan, kept in its record, so that a saved plan still has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoparallel.errors import PlanError
from autoparallel.plans.plan import Plan
from autoparallel.plans.record import Alternative


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
        record = replace(record, alternatives=tuple(alternative_of(plan, other)
                                                    for other in plan.alternatives(alternatives)))
    if sensitivity:
        record = replace(record, sensitivities=tuple(plan.sensitivity()))
    return replace(plan, record=record)


def alternative_of(plan: Plan, other: Plan) -> Alternative:
    """Another plan by its differences, without the line that counts them; on another mesh by the step's configuration
    alone, since all strategies are others there."""
    lines = plan.diff(other).split("\n")[1:]
    if plan.mesh_shape != other.mesh_shape:
        lines = [line for line in lines if line.split(":")[0] not in plan.strategies]
    return Alternative(other.prediction.step_s, other.prediction.peak_bytes, tuple(lines))


__all__ = ["alternative_of", "ask"]
