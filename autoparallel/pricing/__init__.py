"""Pricing: strategies x cost models -> the search problem. See README.md."""

from autoparallel.pricing.breakdown import predict, site_seconds
from autoparallel.pricing.prices import Prices
from autoparallel.pricing.problem import Faults, SpacePricer
from autoparallel.pricing.turns import Turns

__all__ = ["Faults", "Prices", "SpacePricer", "Turns", "predict", "site_seconds"]
