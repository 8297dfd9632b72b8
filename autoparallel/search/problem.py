"""The whole search problem: nodes with costed choices, edges with cost tables, memory over liveness intervals.

The form is that of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism (IOPDDL), with three additions: costs
are floating-point seconds, an edge may use memory too (the copy that a redistribution makes), and a choice may carry a
label per mesh axis, so that a search may take the axes one at a time.

    choice[v] is an index into nodes[v].costs
    objective = sum_v nodes[v].costs[choice[v]] + sum_e edges[e].costs[choice[e.source], choice[e.target]]
    at every time t: sum of usages of the nodes and edges whose interval holds t  <=  limit
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from autoparallel.errors import SearchError

FORBIDDEN = float("inf")
Label = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Node:
    """One decision.

    ``costs[i]`` (seconds, >= 0, inf = forbidden) and ``usages[i]`` (bytes, >= 0) belong to choice ``i``. ``interval``
    is half-open; ``(t, t)`` uses no memory. ``labels[i]`` names choice i by one row number per mesh axis; equal labels
    on two nodes mean nothing. Arrays may be shared between nodes (repeated blocks) and must not be written to.
    """

    name: str
    costs: np.ndarray
    usages: np.ndarray
    interval: tuple[int, int] = (0, 0)
    labels: tuple[Label, ...] | None = None

    def __post_init__(self) -> None:
        if self.costs.ndim != 1 or self.costs.shape != self.usages.shape or not len(self.costs):
            raise SearchError(f"node {self.name!r}: costs {self.costs.shape} and usages {self.usages.shape} must be "
                              "equal, one-dimensional and not empty")
        if self.labels is not None and len(self.labels) != len(self.costs):
            raise SearchError(f"node {self.name!r}: {len(self.labels)} labels for {len(self.costs)} choices")


@dataclass(frozen=True, eq=False)
class Edge:
    """A cost (and perhaps memory) that depends on two decisions: ``costs[choice[source], choice[target]]``."""

    source: int
    target: int
    costs: np.ndarray
    usages: np.ndarray | None = None
    interval: tuple[int, int] = (0, 0)


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes, edges and one memory limit in bytes (inf: none)."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    limit: float = FORBIDDEN
    name: str = "problem"


class Pricer(Protocol):
    """What a search may ask for beyond one problem: the same nodes with other choices.

    ``labels(v)`` lists every label of node v, one row number per axis; ``problem(allowed)`` prices exactly the labels
    given for each node. ``axis_names`` runs from the axis with the slowest links to the fastest.
    """

    axis_names: tuple[str, ...]

    @property
    def num_nodes(self) -> int: ...

    def rows(self, node: int, axis: int) -> Sequence[int]: ...

    def problem(self, allowed: Sequence[Sequence[Label]]) -> Problem: ...


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
