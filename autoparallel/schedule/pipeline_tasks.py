"""A pipeline's micro-batches as tasks: the order of forwards and backwards on each rank, as
torch.distributed.pipelining runs it, with what each waits for; and the seconds that they take together.

    rank 0    F0 F1 F2 F3 ...          B0 ...      (kind, stage, micro-batch): F forward, B backward,
    rank 1       F0 F1 F2 B0 F3 B1 ...             W the gradients of weights, where backward is in two parts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from autoparallel.schedule.schedules import Action
from autoparallel.schedule.step_config import Hybrid, as_rounds
from cost_models.timeline import InOrder, Task

#: Micro-batches per pipeline rank that are simulated, the fewer and the more; beyond, each takes as long as those
#: between.
FEWER, MORE = 4, 6


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage: forward and backward of a micro-batch, and sending its output, or the gradient of that,
    over the cut to the next stage."""

    forward_s: float
    backward_s: float
    send_s: float = 0.0


@dataclass(frozen=True)
class PipelineTasks:
    """The tasks of all ranks of a pipeline, in issue order. ``once_s``: by rank, what is done once per step, at its
    end."""

    hybrid: Hybrid
    stages: tuple[StageTimes, ...]
    once_s: tuple[float, ...] = ()

    @cached_property
    def orders(self) -> list[list[Action]]:
        """The actions of each rank, in order."""
        how = self.hybrid.pipelining
        return [list(how.order(self.hybrid, rank)) for rank in range(self.hybrid.pipeline_ranks)]

    @cached_property
    def issued(self) -> list[tuple[int, str, Action | None]]:
        """Of each task the rank, what it is ("run", "send" or "once"), and its action (None: "once")."""
        found = list[tuple[int, str, Action | None]]()
        for rank, actions in enumerate(self.orders):
            for action in actions:
                found.append((rank, "run", action))
                if self._is_sent(action):
                    found.append((rank, "send", action))
            if self.once_s:
                found.append((rank, "once", None))
        return found

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks on the streams "compute" and "send" of each rank."""
        number = {(what, action): place for place, (_, what, action) in enumerate(self.issued)}
        return [self._task(at, number) for at in range(len(self.issued))]

    @cached_property
    def seconds(self) -> list[float]:
        """Of all stages the seconds of a forward, of a backward (of its two equal parts each, gradients of inputs and
        of weights, where it is split) and of a send; then of all ranks what is done once."""
        parts = 2 if self.hybrid.pipelining.splits_backward else 1
        return [*(stage.forward_s for stage in self.stages), *(stage.backward_s / parts for stage in self.stages),
                *(stage.send_s for stage in self.stages), *self.once_s]

    @cached_property
    def places(self) -> list[int]:
        """The place of each task's seconds among these."""
        count = self.hybrid.stages

        def place(rank: int, what: str, action: Action | None) -> int:
            if action is None:
                return 3 * count + rank
            kind, stage, _ = action
            if what == "send":
                return 2 * count + (stage if kind == "F" else stage - 1)
            return stage if kind == "F" else count + stage

        return [place(*one) for one in self.issued]

    def _task(self, at: int, number: dict[tuple[str, Action | None], int]) -> Task:
        rank, what, action = self.issued[at]
        duration_s = self.seconds[self.places[at]]
        if what == "send":
            return Task(duration_s, "send", (at - 1,), rank)
        return Task(duration_s, "compute", () if action is None else self._before(action, number), rank)

    def _is_sent(self, action: Action) -> bool:
        kind, stage, _ = action
        return (kind == "F" and stage < self.hybrid.stages - 1) or (kind == "B" and stage > 0)

    def _before(self, action: Action, number: dict[tuple[str, Action | None], int]) -> tuple[int, ...]:
        """The task that a forward or backward of a stage waits for: the neighbour's send, or its own forward at the
        last stage."""
        kind, stage, micro = action
        if kind == "W":
            return ()
        other = ("F", stage - 1, micro) if kind == "F" else ("B", stage + 1, micro)
        if 0 <= other[1] < self.hybrid.stages:
            return (number["send", other],)
        return (number["run", ("F", stage, micro)],) if kind == "B" else ()


def simulated_s(hybrid: Hybrid, stages: Sequence[StageTimes]) -> float:
    """Seconds from the first forward to the last backward of all micro-batches. Of many, `FEWER` and `MORE` per rank
    are simulated; between these the pipeline is full, so that each further one takes as long. With multi-copy rounds
    of micro-batches run as one."""
    if hybrid.copies > 1:
        return hybrid.copies * simulated_s(as_rounds(hybrid), stages)
    count, ranks = hybrid.micro_batches, hybrid.pipeline_ranks
    if count <= MORE * ranks or hybrid.replicas:
        return _simulated_s(hybrid, stages)
    fewer, more = (_simulated_s(replace(hybrid, micro_batches=n * ranks), stages) for n in (FEWER, MORE))
    return more + (count - MORE * ranks) * (more - fewer) / ((MORE - FEWER) * ranks)


def _simulated_s(hybrid: Hybrid, stages: Sequence[StageTimes]) -> float:
    in_order, places = _in_order(Hybrid(hybrid.micro_batches, hybrid.stages, hybrid.pipeline_ranks, hybrid.schedule,
                                        replicas=hybrid.replicas))
    seconds = np.array(PipelineTasks(hybrid, tuple(stages)).seconds)
    return max(in_order.times(seconds[places].tolist())[1], default=0.0)


@lru_cache(maxsize=4)
def _in_order(hybrid: Hybrid) -> tuple[InOrder, np.ndarray]:
    """The tasks of a pipeline, whatever time they take, and the places of their seconds."""
    some = PipelineTasks(hybrid, (StageTimes(0.0, 0.0),) * hybrid.stages)
    return InOrder(some.tasks), np.array(some.places, np.int64)


__all__ = ["PipelineTasks", "StageTimes", "simulated_s"]
