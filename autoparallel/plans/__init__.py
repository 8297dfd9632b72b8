"""Plans and pins. See README.md."""

from autoparallel.plans.pins import apply_pins, pin_strings
from autoparallel.plans.plan import BlockLayouts, CollectiveUse, Evidence, Plan, Prediction
from autoparallel.schedule.step_config import Hybrid

__all__ = ["BlockLayouts", "CollectiveUse", "Evidence", "Hybrid", "Plan", "Prediction", "apply_pins", "pin_strings"]
