"""`StepLog` as a callback of Lightning's Trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Callback

from autoparallel.errors import InputError
from autoparallel.runtime.module import ParallelModule
from autoparallel.runtime.step_log import StepLog, Writer


class AutoparallelLightningLog(Callback):
    """Counts the Trainer's optimizer steps in a `StepLog`: ``Trainer(..., callbacks=[AutoparallelLightningLog()])``.

    ``every``: steps of a line (None: the Trainer's ``log_every_n_steps``); ``writers``: as of `StepLog`, which is
    ``log`` after the first step; ``module``: the name of the submodule by whose plan steps are judged, where the
    LightningModule has several that are parallel. ``clock``: seconds, for tests.
    """

    def __init__(self, every: int | None = None, writers: Sequence[Writer] = (), module: str | None = None,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self.every, self.writers, self.module, self.clock = every, tuple(writers), module, clock
        self.log: StepLog | None = None
        self._counted = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A new run counts from its own first step, in which programs are compiled."""
        self.log, self._counted = None, int(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Raises InputError if no submodule is parallel, or several are and none is named."""
        if int(trainer.global_step) == self._counted:    # gradients are being accumulated
            return
        self._counted = int(trainer.global_step)
        if self.log is None:
            every = max(1, int(trainer.log_every_n_steps)) if self.every is None else self.every
            self.log = StepLog(self._parallel(pl_module), every, self.writers, self.clock)
        self.log.step()

    def _parallel(self, module: Any) -> ParallelModule:
        found = {name: child for name, child in module.named_children() if isinstance(child, ParallelModule)}
        if self.module is not None and self.module in found:
            return found[self.module]
        if len(found) == 1 and self.module is None:
            return next(iter(found.values()))
        raise InputError(f"AutoparallelLightningLog(module={self.module!r}): the parallel submodules are "
                         f"{sorted(found)}; name one of them (AutoparallelStrategy makes them parallel)")


__all__ = ["AutoparallelLightningLog"]
