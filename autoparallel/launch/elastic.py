"""A command that goes on with the ranks left when some are lost: torchrun's agent is started again with fewer."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoparallel.errors import printable

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Failed:
    """A rank of this host that has ended without success. ``exit_code``: below 0 the signal that ended it."""

    rank: int
    exit_code: int

    @property
    def is_lost(self) -> bool:
        """Whether a signal ended it (killed, out of memory, a crash), and no error of its program. SIGTERM does not
        count, since the agent sends it to the other ranks; SIGKILL does, also the agent's own after 30 s."""
        return self.exit_code < 0 and self.exit_code != -signal.SIGTERM


def keep_running(start: Callable[[int], Sequence[Failed]], ranks: int, min_ranks: int, max_restarts: int,
                 left: Callable[[int, Sequence[int]], int] = lambda ranks, lost: ranks) -> bool:
    """Start ``ranks`` ranks until all succeed; whether they did. Lost ranks are left out of the next start; where none
    is lost and some failed, as many start again.

    start: ``(number of ranks)`` -> the failed ranks, when all have ended.
    min_ranks: the fewest ranks that go on. max_restarts: starts after errors that lost no rank, at most.
    left: ``(ranks left, lost ranks)`` -> the number of ranks to start next.
    """
    errors = 0
    while failed := start(ranks):
        lost = [one.rank for one in failed if one.is_lost]
        errors += not lost
        if errors > max_restarts:
            _say(f"a rank failed, and max_restarts={max_restarts} allows no further start")
            return False
        if ranks - len(lost) < min_ranks:
            _say(f"{_named(failed)}: {ranks - len(lost)} ranks are left, and min_ranks is {min_ranks}")
            return False
        if lost:
            _say(f"{_named(failed)}: {ranks - len(lost)} of {ranks} ranks go on")
            ranks -= len(lost)
            _leave_out_gpus(lost)
            ranks = left(ranks, lost)
    return True


def _named(failed: Sequence[Failed]) -> str:
    def of(code: int) -> str:
        return signal.Signals(code).name if code in set(signal.Signals) else f"signal {code}"

    return ", ".join(f"rank {one.rank} was lost ({of(-one.exit_code)})" for one in failed if one.is_lost)


def _leave_out_gpus(lost: Sequence[int]) -> None:
    """Leave out the GPUs of lost ranks, one of which may have caused the loss."""
    import torch

    if not torch.cuda.is_available():
        return
    seen = [name for name in os.environ.get(VISIBLE, "").split(",") if name] or [
        str(number) for number in range(torch.cuda.device_count())]
    os.environ[VISIBLE] = ",".join(name for number, name in enumerate(seen) if number not in lost)


def _say(text: str) -> None:
    print(printable(f"autoparallel launch: {text}"), file=sys.stderr, flush=True)


__all__ = ["Failed", "keep_running"]
