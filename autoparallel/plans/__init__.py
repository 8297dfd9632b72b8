"""Plans and pins. See README.md."""

from autoparallel.plans.hybrid import Hybrid
from autoparallel.plans.pins import apply_pins, pin_strings
from autoparallel.plans.plan import BlockLayouts, CollectiveUse, Evidence, Plan, Prediction

__all__ = ["BlockLayouts", "CollectiveUse", "Evidence", "Hybrid", "Plan", "Prediction", "apply_pins", "pin_strings"]
