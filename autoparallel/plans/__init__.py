"""Plans and pins. See README.md. Pins are imported when first used: they need torch, plans do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoparallel.plans.plan import BlockLayouts, CollectiveUse, Combinations, Evidence, Plan, Prediction
from autoparallel.schedule.step_config import Hybrid

if TYPE_CHECKING:
    from autoparallel.plans.pins import apply_pins, pin_strings

__all__ = ["BlockLayouts", "CollectiveUse", "Combinations", "Evidence", "Hybrid", "Plan", "Prediction", "apply_pins",
           "pin_strings"]


def __getattr__(name: str) -> Any:
    if name in ("apply_pins", "pin_strings"):
        from autoparallel.plans import pins

        return getattr(pins, name)
    raise AttributeError(f"module 'autoparallel.plans' has no attribute {name!r}")
