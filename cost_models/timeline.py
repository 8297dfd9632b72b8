"""A small event-driven simulator: tasks on streams, with dependencies and slow-down while streams overlap.

    rank 0  compute      | F0 | F1 |        | B0 | B1 |
            inter-host         | send |

A stream (of one rank) runs its tasks one after another in the order given, as a CUDA stream does; a task starts when
its stream is free and all tasks that it comes after have ended. While several streams of a rank are busy, each runs
slower, by the factor for the set of busy streams (Galvatron: 1.3; Mist: one factor for each set and stream).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np

from cost_models.errors import TimelineError

#: For a set of busy streams of a rank, by how much each of them takes longer.
Slowdown = Mapping[frozenset[str], Mapping[str, float]]


class Task(NamedTuple):
    """``duration_s`` of work on a stream of a rank when nothing else runs; ``after`` are positions in the task list."""

    duration_s: float
    stream: str = "compute"
    after: tuple[int, ...] = ()
    rank: int = 0
    name: str = ""


@dataclass(frozen=True)
class Timeline:
    """When each task ran."""

    tasks: tuple[Task, ...]
    start_s: np.ndarray = field(repr=False)
    end_s: np.ndarray = field(repr=False)

    @property
    def total_s(self) -> float:
        return float(self.end_s.max(initial=0.0))

    def busy_s(self, rank: int = 0, stream: str = "compute") -> float:
        """Time in which a stream works."""
        return _length(self._intervals(rank, [stream]))

    def exposed_s(self, rank: int = 0, hidden_by: str = "compute") -> float:
        """Time in which other streams of the rank work and ``hidden_by`` does not: communication that is not hidden."""
        streams = {task.stream for task in self.tasks if task.rank == rank}
        both = _length(self._intervals(rank, streams | {hidden_by}))
        return both - _length(self._intervals(rank, [hidden_by]))

    def _intervals(self, rank: int, streams: Iterable[str]) -> list[tuple[float, float]]:
        names = set(streams)
        return [(float(s), float(e)) for task, s, e in zip(self.tasks, self.start_s, self.end_s, strict=True)
                if task.rank == rank and task.stream in names and e > s]


def _length(intervals: list[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def equal_slowdown(streams: Sequence[str], factor: float) -> Slowdown:
    """Every set of two or more of these streams slows each of them by the same factor."""
    sets = (frozenset(s) for size in range(2, len(streams) + 1) for s in combinations(streams, size))
    return {busy: dict.fromkeys(busy, factor) for busy in sets}


def simulate(tasks: Sequence[Task], slowdown: Slowdown | None = None) -> Timeline:
    """Run the tasks; O(tasks) where nothing slows down, else O(tasks x log tasks), and more where ranks overlap streams
    that slow one another down.

    >>> line = simulate([Task(2.0), Task(3.0, "network", after=(0,)), Task(1.0)])
    >>> line.total_s, line.exposed_s()
    (5.0, 2.0)

    Raises TimelineError if a task takes no time that there is (negative, infinite), comes after one that is not in the
    list, or the tasks wait for one another.
    """
    if not slowdown:
        found = InOrder(tasks)
        return Timeline(found.tasks, *map(np.array, found.times([task.duration_s for task in tasks])))
    run = _Run(tuple(tasks), slowdown)
    run.go()
    return Timeline(run.tasks, np.array(run.start_s), np.array(run.end_s))


class InOrder:
    """Tasks that nothing slows down: each starts when the last that it waits for has ended. Their order holds for all
    durations. Raises TimelineError as `simulate` does."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        run = _Run(tuple(tasks), {})
        self.tasks, self._next_of = run.tasks, run.next_of
        self._order = [n for n, waits in enumerate(run.waits) if not waits]
        for number in self._order:    # which grows
            for other in self._next_of[number]:
                run.waits[other] -= 1
                if not run.waits[other]:
                    self._order.append(other)
        run.check_all_ran(len(self._order))

    def times(self, durations_s: Sequence[float]) -> tuple[list[float], list[float]]:
        """When each task starts and ends, if they take so many seconds."""
        start_s, end_s, next_of = [0.0] * len(self.tasks), [0.0] * len(self.tasks), self._next_of
        for number in self._order:
            end_s[number] = until_s = start_s[number] + durations_s[number]
            for other in next_of[number]:
                if until_s > start_s[other]:
                    start_s[other] = until_s
        return start_s, end_s


class _Run:
    """The state of one simulation."""

    def __init__(self, tasks: tuple[Task, ...], slowdown: Slowdown) -> None:
        count = len(tasks)
        self.tasks, self.slowdown = tasks, slowdown
        self.start_s, self.end_s = [0.0] * count, [0.0] * count
        self.next_of: list[list[int]] = [[] for _ in tasks]    # tasks that wait for a task
        self.waits = [0] * count
        last: dict[tuple[int, str], int] = {}
        for number, (duration_s, stream, before, rank, name) in enumerate(tasks):
            if not 0 <= duration_s < float("inf"):
                raise TimelineError(f"task {number} ({name or stream}): duration_s must not be {duration_s}")
            if before and not 0 <= min(before) <= max(before) < count:
                raise TimelineError(f"task {number} ({name or stream}) comes after {sorted(before)}, but there are "
                                    f"{count} tasks")
            key = rank, stream
            if key in last:
                before = (*before, last[key])
            last[key] = number
            self.waits[number] = len(before)
            for other in before:
                self.next_of[other].append(number)
        self.left_s = [task.duration_s for task in tasks]
        self.running: dict[int, dict[str, int]] = defaultdict(dict)    # by rank: its busy streams' tasks
        self.changed: set[int] = set()    # ranks whose busy streams have changed
        self.rate, self.seen_s = [0.0] * count, [0.0] * count    # 0: not started
        self.turn = [0] * count    # how often a task's end was foretold; only the last word counts
        self.events: list[tuple[float, int, int]] = []    # end, task, turn
        self.rates: dict[tuple[str, ...], list[float]] = {}    # by busy streams, of each

    def go(self) -> None:
        tasks, running, changed, waits = self.tasks, self.running, self.changed, self.waits
        ready, done, now = [n for n in range(len(tasks)) if not waits[n]], 0, 0.0
        while True:
            for number in ready:
                _, stream, _, rank, _ = tasks[number]
                self.start_s[number] = now
                running[rank][stream] = number
                changed.add(rank)
            for rank in changed:
                self._retime(rank, now)
            changed.clear()
            if not self.events:
                break
            moment, number, turn = heapq.heappop(self.events)
            ready = []
            if self.turn[number] == turn:
                now, done = moment, done + 1
                self.end_s[number] = now
                _, stream, _, rank, _ = tasks[number]
                del running[rank][stream]
                changed.add(rank)
                for other in self.next_of[number]:
                    waits[other] -= 1
                    if not waits[other]:
                        ready.append(other)
        self.check_all_ran(done)

    def check_all_ran(self, done: int) -> None:
        """Raise TimelineError unless so many tasks are all."""
        tasks = self.tasks
        if done < len(tasks):
            stuck = [f"{n} ({tasks[n].name or tasks[n].stream})" for n, left in enumerate(self.waits) if left]
            raise TimelineError(f"{len(tasks) - done} tasks never start, for they wait for one another or for "
                                f"tasks later on their stream: {', '.join(stuck[:5])}, ...")

    def _retime(self, rank: int, now: float) -> None:
        """The tasks that a rank runs have changed: progress so far, new rates, new ends."""
        busy = self.running[rank]
        streams = tuple(busy)
        if (rates := self.rates.get(streams)) is None:
            factors = self._factors(frozenset(busy))
            rates = self.rates[streams] = [1.0 / factors.get(stream, 1.0) for stream in streams]
        for number, rate in zip(busy.values(), rates, strict=True):
            if rate != (before := self.rate[number]):
                self.left_s[number] -= (now - self.seen_s[number]) * before
                self.rate[number], self.seen_s[number] = rate, now
                self.turn[number] += 1
                heapq.heappush(self.events, (now + max(0.0, self.left_s[number]) / rate, number, self.turn[number]))

    def _factors(self, busy: frozenset[str]) -> Mapping[str, float]:
        """Those of the set, else of each stream the largest in known sets within it."""
        if busy in self.slowdown or len(busy) < 2:
            return self.slowdown.get(busy, {})
        factors: dict[str, float] = {}
        for known, by_stream in self.slowdown.items():
            if known <= busy:
                for stream, factor in by_stream.items():
                    factors[stream] = max(factor, factors.get(stream, 1.0))
        return factors
