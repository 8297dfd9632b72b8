"""Memory limits at the few times that matter: those at which the limit could be exceeded and that no other time
implies.

A time is *dominated* when everything live at it is live at another time too; only times between a start and the next
end are not. A time is *slack* when even the greediest choices fit. What is left is usually a few per cent of all times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoparallel.search.model.interned import Shared, firsts, paired
from autoparallel.search.model.problem import FORBIDDEN, NOTHING, MemoryLimitError, Problem


@dataclass(frozen=True, eq=False)
class Memory:
    """The limit as rows: at each of ``times``, usage above the least possible must be at most ``room`` bytes.

    ``extra[u]`` is user u's usage minus its least usage; ``spans[u]`` is its half-open range of indices into ``times``.
    Users are the problem's nodes, then its edges (those without usages have an empty span).
    """

    times: np.ndarray
    room: np.ndarray
    extra: Shared
    spans: np.ndarray
    num_nodes: int

    @property
    def binds(self) -> bool:
        return len(self.times) > 0

    def uses(self, user: int) -> bool:
        """Whether the user's choice changes the memory at a time that matters."""
        return bool(self.spans[user, 0] < self.spans[user, 1])

    def load(self, problem: Problem, choice: Sequence[int]) -> np.ndarray:
        """Extra usage of a choice at each of ``times``. O(users + times)."""
        return load_of(self.spans, self.extra.take(problem.cells(choice)), len(self.times))

    def prices_per_user(self, prices: np.ndarray) -> np.ndarray:
        """Seconds per byte of each user, from seconds per byte at each of ``times``."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        return np.maximum(0.0, total[self.spans[:, 1]] - total[self.spans[:, 0]])


class Users:
    """All nodes, then all edges, with the least and the most usages of those choices that are allowed. O(n log n)."""

    def __init__(self, problem: Problem) -> None:
        self.intervals, self.num_nodes, self.name = problem.intervals, len(problem.nodes), problem.name
        first, numbers = firsts(paired(problem.usages.numbers, problem.costs.numbers))
        ranges = [_range(problem.usages[user], problem.costs[user]) for user in first]
        least, most = np.array(ranges).reshape(-1, 2).T
        self.low, self.high = least[numbers], most[numbers]
        self.live = (self.intervals[:, 0] < self.intervals[:, 1]) & (self.high > 0)
        self.extra = Shared([np.maximum(problem.usages[user] - low, 0.0) if low else problem.usages[user]
                             for user, (low, _) in zip(first, ranges, strict=True)], numbers)

    @cached_property
    def times(self) -> np.ndarray:
        """The times that no other time dominates."""
        return undominated_times(self.intervals[self.live])

    @cached_property
    def least(self) -> np.ndarray:
        """Least usage at each of ``times``."""
        return self.load(self.times, self.low)

    def load(self, times: np.ndarray, usages: np.ndarray) -> np.ndarray:
        return load_at(times, self.intervals[self.live], usages[self.live])

    def within(self, limit: float) -> Memory:
        """The rows. Raises MemoryLimitError when the least usages alone exceed the limit."""
        if limit == FORBIDDEN:
            return self.memory(np.zeros(0, np.int64), limit)
        if len(self.times) and self.least.max() > limit:
            raise MemoryLimitError(self.name, float(self.least.max()), limit)
        return self.memory(self.times[self.load(self.times, self.high) > limit], limit)

    def memory(self, times: np.ndarray, limit: float) -> Memory:
        spans = np.searchsorted(times, self.intervals)
        spans[self.high <= self.low] = 0
        return Memory(times, limit - self.load(times, self.low), self.extra, spans, self.num_nodes)


def _range(usages: np.ndarray, costs: np.ndarray) -> tuple[float, float]:
    allowed = usages if usages is NOTHING else usages[costs < FORBIDDEN]
    return (float(allowed.min()), float(allowed.max())) if allowed.size else (0.0, 0.0)


def undominated_times(intervals: np.ndarray) -> np.ndarray:
    """Times that no other time dominates, among half-open intervals (start < end). O(n log n)."""
    if not len(intervals):
        return np.zeros(0, np.int64)
    starts, ends = np.unique(intervals[:, 0]), np.unique(intervals[:, 1])
    following_end = np.searchsorted(ends, starts, side="right")
    last = np.append(following_end[1:] != following_end[:-1], True)
    return starts[last]


def load_at(times: np.ndarray, intervals: np.ndarray, usages: np.ndarray) -> np.ndarray:
    """Summed usage of the intervals that hold each of the ascending ``times``."""
    return load_of(np.searchsorted(times, intervals), usages, len(times))


def load_of(spans: np.ndarray, usages: np.ndarray, num_times: int) -> np.ndarray:
    """Summed usage at each time, from half-open ranges of times."""
    change = np.zeros(num_times + 1)
    np.add.at(change, spans[:, 0], usages)
    np.subtract.at(change, spans[:, 1], usages)
    return np.cumsum(change)[:-1]


def memory_of(problem: Problem) -> Memory:
    """Set up the rows. Raises MemoryLimitError when the least usages alone exceed the limit. O(n log n)."""
    return Users(problem).within(problem.limit)


def memory_at(problem: Problem, times: np.ndarray) -> Memory:
    """Rows at these (ascending) times, whether they matter or not. O(n log n)."""
    return Users(problem).memory(times, problem.limit)


def least_peak(problem: Problem) -> float:
    """Peak bytes if every node and edge could take its least usage: no plan needs less. O(n log n)."""
    return float(Users(problem).least.max(initial=0.0))
