"""The tasks of a rank's step, and the collectives that it launches and awaits, in the order of its program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autoparallel import clock
from autoparallel.pricing.rank_reads import COMPUTE, Message, Timed, TimedStep
from autoparallel.schedule.async_windows import TOP
from cost_models.timeline import Task, equal_slowdown, simulate

#: What a task does, and the first and the last decision for which.
Label = tuple[str, int, int]
UNNAMED: Label = ("", TOP, TOP)


def label_of(what: str, steps: Sequence[TimedStep]) -> Label:
    """The label of redistributions of parameters, or of activations, by the decisions that read them."""
    targets = [timed.target for timed in steps]
    return what, min(targets), max(targets)


class Launch(NamedTuple):
    """The launch of a collective by task ``task``."""

    task: int
    message: Message


class Wait(NamedTuple):
    """The wait for a collective that task ``task`` launched."""

    task: int


class Passed(NamedTuple):
    """A message to another pipeline rank, where it is ``sent``; or from one, where it is awaited."""

    sent: bool
    peer: int
    num_bytes: float


class StepTasks:
    """The tasks of one rank in issue order; the program awaits some of them. ``labels``: of each task; ``events``: the
    launches and waits of collectives (in pipelines also messages), in the order in which the rank's program makes
    them; ``extra_s``: seconds of tasks that the parts of a step do not have."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.labels: list[Label] = []
        self.events: list[Launch | Wait | Passed] = []
        self.extra_s = 0.0
        self._compute_s = 0.0
        self._label: Label | None = None
        self._after: tuple[int, ...] = ()

    def issue(self, steps: Sequence[Timed], label: Label = UNNAMED, more_s: float = 0.0) -> int:
        """Launch the communication of these steps as one asynchronous task on their stream, which takes ``more_s``
        longer than they; returns its number."""
        self.flush()
        self.extra_s += more_s
        self._add(Task(sum(timed.seconds for timed in steps) + more_s, steps[0].stream, self._after), label)
        if messages := [timed.message for timed in steps if timed.message is not None and timed.seconds]:
            whole = messages[0]._replace(num_bytes=sum(message.num_bytes for message in messages))
            self.events.append(Launch(len(self.tasks) - 1, whole))
        return len(self.tasks) - 1

    def _add(self, task: Task, label: Label) -> None:
        self.tasks.append(task)
        self.labels.append(label)

    def wait(self, tasks: Sequence[int]) -> None:
        """Later work waits for these tasks."""
        self.flush()
        self.events += (Wait(task) for task in tasks if self.tasks[task].stream != COMPUTE)
        self._after = (*self._after, *tasks)

    def compute(self, seconds: float, label: Label = UNNAMED) -> None:
        """Compute on the rank's own stream."""
        if seconds:
            if self._label is not None and self._label[0] != label[0]:
                self.flush()
            self._compute_s += seconds
            self._label = label if self._label is None else (self._label[0], self._label[1], label[2])

    def run(self, timed: Timed, label: Label = UNNAMED) -> None:
        """Launch one direction of a redistribution step and await it at once."""
        if timed.message is None:
            self.compute(timed.seconds, label)
        elif timed.seconds:
            self.wait([self.issue([timed], label)])

    def flush(self) -> None:
        """Turn the compute accumulated so far into a task."""
        if self._compute_s:
            assert self._label is not None
            self._add(Task(self._compute_s, COMPUTE, self._after), self._label)
            self._compute_s, self._label, self._after = 0.0, None, (len(self.tasks) - 1,)

    def hidden_s(self, slowdown: float) -> float:
        """Seconds by which the simulated step is shorter than the sum of its parts; below 0 where what is ``extra_s``
        takes longer than what overlap saves."""
        streams = sorted({task.stream for task in self.tasks} | {COMPUTE})
        alone = sum(task.duration_s for task in self.tasks)
        clock.did("tasks simulated", len(self.tasks))
        return max(0.0, alone - simulate(self.tasks, equal_slowdown(streams, slowdown)).total_s) - self.extra_s


__all__ = ["Label", "Launch", "Passed", "StepTasks", "Wait", "label_of"]
