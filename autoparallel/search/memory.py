"""Memory at the few times that matter: where the limit could be exceeded, and that no other time implies.

A time is *dominated* when everything live at it is live at another time too; only times between a start and the next
end are not. A time is *slack* when even the greediest choices fit. What is left is usually a few per cent of all times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoparallel.search.problem import FORBIDDEN, Edge, MemoryLimitError, Node, Problem


@dataclass(frozen=True, eq=False)
class Memory:
    """The limit as rows: at each of ``times``, usage above the least possible must be at most ``room`` bytes.

    ``extra[u]`` is user u's usage minus its least usage; ``spans[u]`` is its half-open range of indices into ``times``.
    Users are the problem's nodes, then its edges (those without usages have an empty span).
    """

    times: np.ndarray
    room: np.ndarray
    extra: tuple[np.ndarray, ...]
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
        change = np.zeros(len(self.times) + 1)
        for user in np.flatnonzero(self.spans[:, 0] < self.spans[:, 1]).tolist():
            low, high = self.spans[user]
            if user < self.num_nodes:
                usage = self.extra[user][choice[user]]
            else:
                edge = problem.edges[user - self.num_nodes]
                usage = self.extra[user][choice[edge.source], choice[edge.target]]
            change[low] += usage
            change[high] -= usage
        return np.cumsum(change)[:-1]

    def prices_per_user(self, prices: np.ndarray) -> np.ndarray:
        """Seconds per byte of each user, from seconds per byte at each of ``times``."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        return np.maximum(0.0, total[self.spans[:, 1]] - total[self.spans[:, 0]])


@dataclass(frozen=True)
class _Use:
    """Usages of one or more users, and the least and the most of those that are allowed."""

    usages: np.ndarray
    low: float
    high: float

    @classmethod
    def of(cls, usages: np.ndarray, costs: np.ndarray) -> _Use:
        allowed = usages[costs < FORBIDDEN]
        return cls(usages, float(allowed.min()), float(allowed.max())) if allowed.size else cls(usages, 0.0, 0.0)

    @cached_property
    def extra(self) -> np.ndarray:
        return np.maximum(self.usages - self.low, 0.0)


@dataclass(frozen=True)
class _Users:
    """All nodes, then all edges; edges without usages live never, equal users (repeated blocks) share an object."""

    uses: list[_Use]
    intervals: np.ndarray
    num_nodes: int

    @classmethod
    def of(cls, problem: Problem) -> _Users:
        nothing = np.zeros((1, 1))
        made: dict[tuple[int, int], _Use] = {}

        def use(user: Node | Edge) -> _Use:
            usages, costs = (nothing, nothing) if user.usages is None else (user.usages, user.costs)
            key = id(usages), id(costs)
            if key not in made:
                made[key] = _Use.of(usages, costs)
            return made[key]

        intervals = np.array([*(node.interval for node in problem.nodes),
                              *((0, 0) if edge.usages is None else edge.interval for edge in problem.edges)],
                             np.int64).reshape(-1, 2)
        return cls([*map(use, problem.nodes), *map(use, problem.edges)], intervals, len(problem.nodes))

    @cached_property
    def low(self) -> np.ndarray:
        return np.array([use.low for use in self.uses])

    @cached_property
    def high(self) -> np.ndarray:
        return np.array([use.high for use in self.uses])

    @cached_property
    def live(self) -> np.ndarray:
        return (self.intervals[:, 0] < self.intervals[:, 1]) & (self.high > 0)

    def load(self, times: np.ndarray, usages: np.ndarray) -> np.ndarray:
        return load_at(times, self.intervals[self.live], usages[self.live])

    def memory(self, times: np.ndarray, limit: float) -> Memory:
        spans = np.searchsorted(times, self.intervals)
        spans[self.high <= self.low] = 0
        room = limit - self.load(times, self.low)
        return Memory(times, room, tuple(use.extra for use in self.uses), spans, self.num_nodes)


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
    change = np.zeros(len(times) + 1)
    np.add.at(change, np.searchsorted(times, intervals[:, 0]), usages)
    np.subtract.at(change, np.searchsorted(times, intervals[:, 1]), usages)
    return np.cumsum(change)[:-1]


def memory_of(problem: Problem) -> Memory:
    """Set up the rows. Raises MemoryLimitError when the least usages alone exceed the limit. O(n log n)."""
    if problem.limit == FORBIDDEN:
        return memory_at(problem, np.zeros(0, np.int64))
    users = _Users.of(problem)
    times = undominated_times(users.intervals[users.live])
    least, most = users.load(times, users.low), users.load(times, users.high)
    if len(times) and least.max() > problem.limit:
        raise MemoryLimitError(problem.name, float(least.max()), problem.limit)
    return users.memory(times[most > problem.limit], problem.limit)


def memory_at(problem: Problem, times: np.ndarray) -> Memory:
    """Rows at these (ascending) times, whether they matter or not. O(n log n)."""
    return _Users.of(problem).memory(times, problem.limit)


def least_peak(problem: Problem) -> float:
    """Peak bytes if every node and edge could take its least usage: no plan needs less. O(n log n)."""
    try:
        memory_of(replace(problem, limit=0.0))
    except MemoryLimitError as error:
        return error.needed_bytes
    return 0.0
