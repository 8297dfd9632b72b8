"""The whole search problem: nodes with costed choices, edges with cost tables, memory over liveness intervals.

The form is that of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism (IOPDDL), with three additions: costs
are floating-point seconds, an edge may use memory too (the copy that a redistribution makes), and a choice may carry a
strategy per mesh axis, so that a search may take the axes one at a time.

    choice[v] is an index into nodes[v].costs
    objective = sum_v nodes[v].costs[choice[v]] + sum_e edges[e].costs[choice[e.source], choice[e.target]]
    at every time t: sum of usages of the nodes and edges whose interval holds t  <=  limit

Several classes of devices (pipeline stages on unlike machines) have a limit and a sum each; a node or an edge uses the
memory of its own class. A node that uses memory of two classes, or at two times, gets an edge to a node of one choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np

from autoparallel import clock
from autoparallel.errors import InfeasibleError, SearchError
from autoparallel.search.model.interned import Shared

FORBIDDEN = float("inf")
Strategy = tuple[int, ...]
NOTHING = np.zeros((1, 1))
Made = TypeVar("Made")
User = TypeVar("User", bound="Node | Edge")


class MemoryLimitError(InfeasibleError):
    """No choice meets the memory limit.

    ``needed_bytes``: no plan needs less. ``limit_bytes``: what was given. ``sufficient_bytes``: a limit for which a
    plan is known (inf: none is); equal to ``needed_bytes`` where the least is known exactly.
    """

    def __init__(self, name: str, needed_bytes: float, limit_bytes: float, sufficient_bytes: float = FORBIDDEN) -> None:
        self.needed_bytes, self.limit_bytes, self.sufficient_bytes = needed_bytes, limit_bytes, sufficient_bytes
        least = "" if sufficient_bytes == needed_bytes else "at least "
        enough = sufficient_bytes if sufficient_bytes < FORBIDDEN else needed_bytes
        more = (f"{least}{needed_bytes:,.0f} bytes, {needed_bytes - limit_bytes:,.0f} more than the limit"
                if needed_bytes >= limit_bytes + 1 else "more (how much more was not found in the time)")
        super().__init__(
            f"{name}: no plan fits in {limit_bytes:,.0f} bytes. Every plan needs {more}. Raise the limit to "
            f"{enough:,.0f} bytes{_in_gib(enough)}, use more devices, or remove pins that keep values whole.")


def _in_gib(count: float) -> str:
    return f" ({count / 2**30:.3g} GiB)" if count >= 2**20 else ""


class NotRepairedError(SearchError):
    """A choice to begin with takes ``peak_bytes``, and could not be made to fit into ``limit_bytes``."""

    def __init__(self, name: str, peak_bytes: float, limit_bytes: float) -> None:
        self.peak_bytes, self.limit_bytes = peak_bytes, limit_bytes
        super().__init__(f"{name}: the choice given takes {peak_bytes:,.0f} bytes, and cannot be made to fit into "
                         f"{limit_bytes:,.0f} by moving a node or two at a time. Begin with one that takes less.")


def _check_table(owner: str, what: str, values: np.ndarray, finite: bool) -> None:
    """Raise SearchError unless values are numbers >= 0 (and finite, where asked)."""
    low, high = values.min(), values.max()
    if not low >= 0 or (finite and not high < FORBIDDEN):
        allowed = "finite numbers >= 0" if finite else "numbers >= 0 (inf = forbidden)"
        raise SearchError(f"{owner}: {what} must be {allowed}, but they run from {low} to {high}")


def _check_interval(owner: str, interval: tuple[int, int]) -> None:
    if interval[0] > interval[1]:
        raise SearchError(f"{owner}: interval {interval} ends before it starts; write (start, end) with start <= end")


def unchecked(made: Made, **changes: Any) -> Made:
    """A copy with other fields, which are not validated; values derived from the fields are kept."""
    found = object.__new__(type(made))
    found.__dict__.update(made.__dict__, **changes)
    return found


@dataclass(frozen=True, eq=False)
class Node:
    """One decision.

    ``costs[i]`` (seconds, >= 0, inf = forbidden) and ``usages[i]`` (bytes, >= 0) belong to choice ``i``. ``interval``
    is half-open; ``(t, t)`` uses no memory. ``strategies[i]`` names choice i by one number per mesh axis (of
    an axis strategy); equal numbers on two nodes mean nothing. Nodes of repeated blocks share their arrays, which must
    not be written to.
    """

    name: str
    costs: np.ndarray
    usages: np.ndarray
    interval: tuple[int, int] = (0, 0)
    strategies: tuple[Strategy, ...] | None = None
    device_class: int = 0

    def __post_init__(self) -> None:
        if self.costs.ndim != 1 or self.costs.shape != self.usages.shape or not len(self.costs):
            raise SearchError(f"node {self.name!r}: costs {self.costs.shape} and usages {self.usages.shape} must be "
                              "equal, one-dimensional and not empty")
        if self.strategies is not None and len(self.strategies) != len(self.costs):
            raise SearchError(f"node {self.name!r}: {len(self.strategies)} strategies for {len(self.costs)} choices")
        _check_table(f"node {self.name!r}", "costs", self.costs, finite=False)
        _check_table(f"node {self.name!r}", "usages", self.usages, finite=True)
        _check_interval(f"node {self.name!r}", self.interval)


@dataclass(frozen=True, eq=False)
class Edge:
    """A cost (and perhaps memory) that depends on two decisions: ``costs[choice[source], choice[target]]``."""

    source: int
    target: int
    costs: np.ndarray
    usages: np.ndarray | None = None
    interval: tuple[int, int] = (0, 0)
    device_class: int = 0

    def __post_init__(self) -> None:
        owner = f"edge {self.source} -> {self.target}"
        if self.source == self.target:
            raise SearchError(f"{owner}: an edge needs two different nodes; add its diagonal to the node's costs")
        if self.costs.ndim != 2 or not self.costs.size:
            raise SearchError(f"{owner}: costs must be a table of two dimensions, not {self.costs.shape}")
        _check_table(owner, "costs", self.costs, finite=False)
        _check_interval(owner, self.interval)
        if self.usages is not None:
            if self.usages.shape != self.costs.shape:
                raise SearchError(
                    f"{owner}: usages {self.usages.shape} must have the shape of costs {self.costs.shape}")
            _check_table(owner, "usages", self.usages, finite=True)


class Repeats(Sequence[User]):
    """Nodes, or edges, most of them alike: number i is ``models[which[i]]`` but for what ``own`` says of it, by field
    (intervals may be rows of an array).

    Each is made when one is asked for: what is told of all at once (`equivalent`, `own`) needs none.
    """

    def __init__(self, models: Sequence[User], which: np.ndarray | None = None, **own: Sequence[Any] | np.ndarray
                 ) -> None:
        self.models, self.own = models, own
        self.which = np.arange(len(models)) if which is None else which

    def but(self, **own: Sequence[Any] | np.ndarray) -> Repeats[User]:
        """These, with a field for each of its own; arrays are of the same shapes."""
        return Repeats(self.models, self.which, **{**self.own, **own})

    def followed_by(self, more: Sequence[User]) -> Repeats[User]:
        """These nodes or edges, and others after them that equal none."""
        if not more:
            return self
        which = np.concatenate([self.which, len(self.models) + np.arange(len(more))])
        return Repeats([*self.models, *more], which, **{
            name: np.concatenate([values, [getattr(one, name) for one in more]]) if isinstance(values, np.ndarray)
            else [*values, *(getattr(one, name) for one in more)] for name, values in self.own.items()})

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, number):  # type: ignore[no-untyped-def]
        if isinstance(number, slice):
            return tuple([self._one(i) for i in range(*number.indices(len(self)))])
        return self._all[number]

    def __iter__(self) -> Iterator[User]:
        return iter(self._all)

    def _one(self, number: int) -> User:
        own = {name: tuple(values[number].tolist()) if isinstance(values, np.ndarray) else values[number]
               for name, values in self.own.items()}
        return unchecked(self.models[self.which[number]], **own)

    @cached_property
    def _all(self) -> tuple[User, ...]:
        return tuple(map(self._one, range(len(self))))


def repeats(users: Sequence[User]) -> Repeats[User]:
    return users if isinstance(users, Repeats) else Repeats(users)


def equivalent(users: Sequence[User], what: Callable[[User], object]) -> np.ndarray:
    """An integer of each node or edge, which equal ones share: computed once per model."""
    if isinstance(users, Repeats):
        return np.array([what(model) for model in users.models], int)[users.which]
    return np.array([what(user) for user in users], int)


def own(users: Sequence[User], field: str) -> np.ndarray:
    """A field in which equal nodes or edges may differ, by node or edge."""
    if isinstance(users, Repeats) and field in users.own:
        return np.asarray(users.own[field], np.int64)
    return np.array([getattr(user, field) for user in users], np.int64)


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes, edges and memory limits in bytes (inf: none): of device class 0, and of classes 1, 2, ..."""

    nodes: Sequence[Node]
    edges: Sequence[Edge]
    limit: float = FORBIDDEN
    name: str = "problem"
    more_limits: tuple[float, ...] = ()

    @property
    def limits(self) -> tuple[float, ...]:
        """One per device class."""
        return self.limit, *self.more_limits

    def __post_init__(self) -> None:
        for limit in self.limits:
            if not limit >= 0:
                raise SearchError(f"{self.name}: the limit must be >= 0 bytes (inf: none), not {limit}")
        classes = self.device_classes
        if (strange := classes[(classes < 0) | (classes >= len(self.limits))]).size:
            raise SearchError(f"{self.name}: device class {strange.min()} has no limit; there are limits for "
                              f"classes 0..{len(self.limits) - 1}")
        outside = (self.ends < 0) | (self.ends >= len(self.nodes))
        if outside.any():
            number, end = np.argwhere(outside)[0]
            raise SearchError(f"{self.name}: edge {number} names node {self.ends[number, end]}; there are "
                              f"{len(self.nodes)} nodes")
        shapes = equivalent(self.edges, lambda edge: edge.costs.shape).reshape(-1, 2)
        wrong = np.flatnonzero((shapes != self.sizes[self.ends]).any(axis=1))
        if len(wrong):
            edge = self.edges[wrong[0]]
            sizes = tuple(self.sizes[[edge.source, edge.target]].tolist())
            raise SearchError(f"{self.name}: edge {wrong[0]} ({edge.source} -> {edge.target}) has a table of "
                              f"{edge.costs.shape} for nodes with {sizes} choices")

    def __getstate__(self) -> dict[str, Any]:
        """The fields only: derived values refer to arrays by identity, which a pickled copy does not keep."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def with_costs(self, costs: Shared, limit: float) -> Problem:
        """Other costs and tables, of the same shapes and not checked, and another limit."""
        count = len(self.nodes)
        nodes, edges = repeats(self.nodes).but(costs=costs[:count]), repeats(self.edges).but(costs=costs[count:])
        return unchecked(self, nodes=nodes, edges=edges, costs=costs, limit=limit)

    def with_edges(self, edges: Sequence[Edge]) -> Problem:
        """The problem with other edges, which differ in costs only; they are not validated again."""
        made = unchecked(self, edges=edges)
        made.__dict__.pop("costs", None)
        return made

    @cached_property
    def sizes(self) -> np.ndarray:
        """Choices of each node."""
        return equivalent(self.nodes, lambda node: len(node.costs))

    @cached_property
    def ends(self) -> np.ndarray:
        """A row (source, target) per edge."""
        return np.stack([own(self.edges, "source"), own(self.edges, "target")], axis=1)

    @cached_property
    def orders(self) -> dict[bytes, Any]:
        """In which order to eliminate, by sizes of the nodes; problems that are made of this one share it."""
        return {}

    @cached_property
    def costs(self) -> Shared:
        """Costs of the nodes, then of the edges."""
        return self._shared(lambda user: user.costs)

    @cached_property
    def usages(self) -> Shared:
        """Usages of the nodes, then of the edges; `NOTHING` for an edge that uses no memory."""
        return self._shared(lambda user: NOTHING if user.usages is None else user.usages)

    def _shared(self, array: Callable[[Node | Edge], np.ndarray]) -> Shared:
        nodes, edges = repeats(self.nodes), repeats(self.edges)
        models: list[Node | Edge] = [*nodes.models, *edges.models]
        found = Shared.of(map(array, models))
        which = np.concatenate([nodes.which, len(nodes.models) + edges.which])
        return Shared(found.distinct, found.numbers[which])

    @cached_property
    def intervals(self) -> np.ndarray:
        """A row (start, end) per node, then per edge; (0, 0) of an edge that uses no memory."""
        edges = own(self.edges, "interval").reshape(-1, 2)
        edges = np.where(equivalent(self.edges, lambda edge: edge.usages is not None)[:, None], edges, 0)
        return np.concatenate([own(self.nodes, "interval").reshape(-1, 2), edges])

    @cached_property
    def device_classes(self) -> np.ndarray:
        return np.concatenate([equivalent(users, lambda user: user.device_class) for users in (self.nodes, self.edges)])

    @property
    def has_strategies(self) -> bool:
        """Whether choices are named by a row per axis."""
        return bool(equivalent(self.nodes, lambda node: bool(node.strategies)).any())

    @cached_property
    def profiles(self) -> list[Profile]:
        """One per device class. O((n + m) log(n + m))."""
        return [Profile.of(np.flatnonzero(self.device_classes == number), self.intervals)
                for number in range(len(self.limits))]

    def cells(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """The entry of each node's costs and of each edge's flattened table that a choice takes."""
        picks = np.asarray(choice, np.int64)
        source, target = self.ends.T
        return np.concatenate([picks, picks[source] * self.sizes[target] + picks[target]])


class Pricer(Protocol):
    """What a search may ask for beyond one problem: the same nodes with other choices.

    ``strategies(v)`` lists every strategy of node v, one axis strategy's number per axis; ``problem(allowed)`` prices
    exactly the given strategies of each node, in that order. ``axis_names`` runs from the axis with the slowest links
    to the fastest. ``repeat_strategy(v, a)`` is the axis strategy that splits nothing on axis a, assumed for undecided
    axes.
    """

    axis_names: tuple[str, ...]

    @property
    def num_nodes(self) -> int: ...

    def axis_strategies(self, node: int, axis: int) -> Sequence[int]: ...

    def strategies(self, node: int) -> Sequence[Strategy]: ...

    def repeat_strategy(self, node: int, axis: int) -> int: ...

    def problem(self, allowed: Sequence[Sequence[Strategy]]) -> Problem: ...


@dataclass(frozen=True)
class Solution:
    """A choice per node and the evidence for it.

    ``objective`` (seconds) is always what `evaluate` says of ``choice`` on the problem as given; ``lower_bound`` holds
    for every feasible choice; ``gap = (objective - lower_bound) / objective``.
    """

    choice: tuple[int, ...]
    objective: float
    lower_bound: float
    peak_bytes: float
    stop_reason: str
    solver: str
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        return 0.0 if self.objective <= 0 else max(0.0, (self.objective - self.lower_bound) / self.objective)


@dataclass(frozen=True)
class Evaluation:
    """What a choice costs: seconds, the highest memory use in bytes, and the first time at which it is reached.

    With several device classes ``peak_bytes`` and ``peak_time`` are those of the class that is nearest to its limit or
    furthest above it, ``peaks`` those of all.
    """

    objective: float
    peak_bytes: float
    feasible: bool
    peak_time: int
    peaks: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Profile:
    """When the memory of some users changes: ``users`` live from ``times[starts]`` to ``times[ends]``."""

    users: np.ndarray
    times: np.ndarray
    where: np.ndarray

    @classmethod
    def of(cls, users: np.ndarray, intervals: np.ndarray) -> Profile:
        """Of those users that live at all; an interval per row."""
        users = users[intervals[users, 0] < intervals[users, 1]]
        times, where = np.unique(intervals[users].T, return_inverse=True)
        return cls(users, times if len(times) else np.zeros(1, np.int64), where.reshape(-1))

    def peak(self, usages: np.ndarray) -> tuple[float, int]:
        """The highest sum of all users' usages, and the first time at which it is reached. O(n)."""
        used = usages[self.users]
        load = np.cumsum(np.bincount(self.where, np.concatenate([used, -used]), len(self.times)))
        return float(load.max()), int(self.times[load.argmax()])


def evaluate(problem: Problem, choice: Sequence[int]) -> Evaluation:
    """Judge a choice: the only place where objective and memory are defined. O(n + m), once `profiles` are known.

    Costs are summed exactly (`math.fsum`), so that the order of nodes does not matter.
    """
    if len(choice) != len(problem.nodes):
        raise SearchError(f"{problem.name}: {len(choice)} choices for {len(problem.nodes)} nodes")
    clock.did("nodes judged", len(problem.nodes) + len(problem.edges))
    picks = np.asarray(choice, np.int64)
    wrong = np.flatnonzero((picks < 0) | (picks >= problem.sizes))
    if len(wrong):
        node = problem.nodes[wrong[0]]
        raise SearchError(f"{problem.name}: choice {picks[wrong[0]]} of node {wrong[0]} ({node.name!r}) is not in "
                          f"0..{len(node.costs) - 1}")
    cells = problem.cells(picks)
    objective = math.fsum(problem.costs.take(cells).tolist())
    usages = problem.usages.take(cells)
    peaks = [profile.peak(usages) for profile in problem.profiles]
    tightest = max(range(len(peaks)), key=lambda number: (peaks[number][0] - problem.limits[number], -number))
    fits = all(peak <= limit for (peak, _), limit in zip(peaks, problem.limits, strict=True))
    return Evaluation(objective, peaks[tightest][0], objective < FORBIDDEN and fits, peaks[tightest][1],
                      tuple(peak for peak, _ in peaks))


def single_limit(problem: Problem) -> Problem:
    """The same problem with one limit: every class has times of its own, and a last node per class of one choice.

    That node reserves what the class's limit is below the highest one. A class without limit uses no memory. Where all
    usages are whole bytes, so are the limits: then no sum is rounded.
    """
    limits = problem.limits
    if all((array == np.floor(array)).all() for array in problem.usages.distinct):
        limits = tuple(float(np.floor(limit)) for limit in limits)
    highest = max((limit for limit in limits if limit < FORBIDDEN), default=FORBIDDEN)
    users: list[Node | Edge] = [*problem.nodes, *problem.edges]
    first = min((user.interval[0] for user in users), default=0)
    span = max((user.interval[1] for user in users), default=0) - first

    def moved(user: Node | Edge) -> dict[str, object]:
        start = user.device_class * span - first
        limited = limits[user.device_class] < FORBIDDEN
        interval = (user.interval[0] + start, user.interval[1] + start) if limited else (0, 0)
        return {"interval": interval, "device_class": 0}

    nodes = [replace(node, **moved(node)) for node in problem.nodes]  # type: ignore[arg-type]
    edges = tuple(replace(edge, **moved(edge)) for edge in problem.edges)  # type: ignore[arg-type]
    strategies = next((((0,) * len(node.strategies[0]),) for node in problem.nodes if node.strategies), None)
    nodes += [Node(f"limit of class {number}", np.zeros(1), np.array([highest - limit]),
                   (number * span, (number + 1) * span), strategies)
              for number, limit in enumerate(limits) if limit < highest]
    return Problem(tuple(nodes), edges, highest, problem.name)
