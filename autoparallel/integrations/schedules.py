"""accelerate's learning-rate schedules of a run that goes on, on another number of ranks.

accelerate steps a schedule once for each rank in a training step, since scripts count its steps in a rank's own
batches: a schedule that was saved after 8 steps on 4 ranks is at 32, where 2 ranks have 16.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from autoparallel.errors import InputError


def ranks_of_state(folder: Path) -> int:
    """Ranks that wrote a state of accelerate's: each has a file of its random numbers (0: none is there)."""
    return len(list(folder.glob("random_states_*.pkl")))


@dataclass(frozen=True)
class Begun:
    """A schedule as it was prepared: accelerate's wrapper of it, its state, its steps and the learning rates."""

    prepared: Any
    state: dict[str, Any]
    steps: int
    rates: list[float]

    @staticmethod
    def of(prepared: Any) -> Begun:
        scheduler = prepared.scheduler
        return Begun(prepared, deepcopy(scheduler.state_dict()), getattr(scheduler, "last_epoch", 0),
                     [group["lr"] for group in scheduler.optimizer.param_groups])


def moved(schedules: list[Begun], saved_on: int, ranks: int) -> None:
    """Set schedules that were loaded from a state of ``saved_on`` ranks where as many training steps have brought them
    on ``ranks``.

    Raises InputError for a schedule that training steps have not stepped by the number of ranks.
    """
    for begun in schedules:
        scheduler = begun.prepared.scheduler
        if begun.prepared.split_batches or not begun.prepared.step_with_optimizer or not isinstance(
                scheduler, LRScheduler):
            continue  # stepped once, whatever the ranks
        done, rest = divmod(scheduler.last_epoch, saved_on)
        if rest:
            raise InputError(f"{type(scheduler).__name__} was saved after {scheduler.last_epoch} steps on {saved_on} "
                             "ranks, which step it together: on another number of ranks it cannot go on\n  Load on "
                             f"{saved_on} ranks, or step the schedule that accelerator.prepare returns, once a step.")
        _replay(begun, done * ranks)


def _replay(begun: Begun, steps: int) -> None:
    """A new schedule after so many steps: by its formula, where it has one, else step by step."""
    scheduler: Any = begun.prepared.scheduler
    groups = scheduler.optimizer.param_groups
    scheduler.load_state_dict(begun.state)
    for group, rate in zip(groups, begun.rates, strict=True):
        group["lr"] = rate
    formula = getattr(scheduler, "_get_closed_form_lr", scheduler.get_lr if isinstance(scheduler, LambdaLR) else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps without the optimizer's, and of get_lr outside of step
        if formula is None:
            for _ in range(begun.steps, min(steps, getattr(scheduler, "total_steps", steps))):
                scheduler.step()
            return
        scheduler.last_epoch, scheduler._step_count = steps, steps + 1
        scheduler._last_lr = list(formula())
    for group, rate in zip(groups, scheduler._last_lr, strict=True):
        group["lr"] = rate


__all__ = ["Begun", "moved", "ranks_of_state"]
