"""Pricing: strategies x cost models -> the search problem. See README.md."""

from autoparallel.pricing.counts import ExecutionCounts
from autoparallel.pricing.prediction import decision_seconds, equal_stages_s, predict, step_s
from autoparallel.pricing.problem import Penalties, SpacePricer
from autoparallel.pricing.unit_costs import Prices

__all__ = [
    "ExecutionCounts",
    "Penalties",
    "Prices",
    "SpacePricer",
    "decision_seconds",
    "equal_stages_s",
    "predict",
    "step_s",
]
