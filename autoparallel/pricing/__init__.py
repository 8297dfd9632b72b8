"""Pricing: strategies x cost models -> the search problem. See README.md."""

from autoparallel.pricing.breakdown import equal_stages_s, predict, site_seconds, step_s
from autoparallel.pricing.prices import Prices
from autoparallel.pricing.problem import Faults, SpacePricer
from autoparallel.pricing.turns import Turns

__all__ = ["Faults", "Prices", "SpacePricer", "Turns", "equal_stages_s", "predict", "site_seconds", "step_s"]
