"""A pipeline's micro-batches as tasks: the order of forwards and backwards on each rank, as
torch.distributed.pipelining runs it, with what each waits for; and the seconds that they take together.

    rank 0    F0 F1 F2 F3 ...          B0 ...      (kind, stage, micro-batch): F forward, B backward,
    rank 1       F0 F1 F2 B0 F3 B1 ...             W the gradients of weights, where backward is in two parts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoparallel.schedule.schedules import Action
from autoparallel.schedule.step_config import Hybrid
from cost_models.timeline import Task, simulate

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
        return [self._task(place, number) for place in range(len(self.issued))]

    def _task(self, place: int, number: dict[tuple[str, Action | None], int]) -> Task:
        rank, what, action = self.issued[place]
        if action is None:
            return Task(self.once_s[rank], "compute", (), rank)
        kind, stage, _ = action
        if what == "send":
            return Task(self.stages[stage if kind == "F" else stage - 1].send_s, "send", (place - 1,), rank)
        return Task(self._seconds(kind, stage), "compute", self._before(action, number), rank)

    def _seconds(self, kind: str, stage: int) -> float:
        """A backward that is split has two equal parts here: gradients of inputs, then of weights."""
        if kind == "F":
            return self.stages[stage].forward_s
        return self.stages[stage].backward_s / (2 if self.hybrid.pipelining.splits_backward else 1)

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
    are simulated; between these the pipeline is full, so that each further one takes as long."""
    count, ranks = hybrid.micro_batches, hybrid.pipeline_ranks
    if count <= MORE * ranks or hybrid.replicas:
        return simulate(PipelineTasks(hybrid, tuple(stages)).tasks).total_s
    fewer, more = (simulate(PipelineTasks(replace(hybrid, micro_batches=n * ranks), tuple(stages)).tasks).total_s
                   for n in (FEWER, MORE))
    return more + (count - MORE * ranks) * (more - fewer) / ((MORE - FEWER) * ranks)


__all__ = ["PipelineTasks", "StageTimes", "simulated_s"]
