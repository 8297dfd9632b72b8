"""`StepLog` as a callback of transformers' Trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from transformers import TrainerCallback

from autoparallel.errors import InputError
from autoparallel.runtime.module import ParallelModule
from autoparallel.runtime.step_log import StepLog, Writer


class AutoparallelTrainerLog(TrainerCallback):
    """Counts the Trainer's optimizer steps in a `StepLog`: ``Trainer(..., callbacks=[AutoparallelTrainerLog()])``.

    ``every``: steps of a line (None: the Trainer's ``logging_steps``); ``writers``: as of `StepLog`, which is ``log``
    after the first step. ``clock``: seconds, for tests.
    """

    def __init__(self, every: int | None = None, writers: Sequence[Writer] = (),
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self.every, self.writers, self.clock = every, tuple(writers), clock
        self.log: StepLog | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A new run counts from its own first step, in which programs are compiled."""
        self.log = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises InputError if the Trainer's model is no parallel module."""
        if self.log is None:
            model = kwargs.get("model")
            if not isinstance(model, ParallelModule):
                raise InputError("AutoparallelTrainerLog needs a Trainer that trains a parallel module: "
                                 "autoparallel.integrations.AutoparallelTrainer")
            every = max(1, int(args.logging_steps)) if self.every is None else self.every
            self.log = StepLog(model, every, self.writers, self.clock)
        self.log.step()


__all__ = ["AutoparallelTrainerLog"]
