"""Pricing: strategies x cost models -> the search problem. See README.md."""

from autoparallel.pricing.counts import Turns
from autoparallel.pricing.prediction import equal_stages_s, predict, site_seconds, step_s
from autoparallel.pricing.problem import Faults, SpacePricer
from autoparallel.pricing.unit_costs import Prices

__all__ = ["Faults", "Prices", "SpacePricer", "Turns", "equal_stages_s", "predict", "site_seconds", "step_s"]
