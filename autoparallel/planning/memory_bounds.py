"""Lower bounds of a combination's work where memory is priced: a Lagrangian of all that lives between forward and
backward.

No plan that fits has more bytes between forward and backward, of all pipeline ranks together, than these ranks have. At
a price per byte the graph's optimum, less the price of that room, is below every plan that fits. Each of a block's
equals may be recomputed or not: of those that one block of the reduced-depth model stands for, each takes the cheaper
way. The other blocks have the cheaper way's seconds, and the bytes of the way that keeps less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np

from autoparallel.search.low_width.bucket_elimination import Eliminator
from autoparallel.search.low_width.solve import elimination_cells
from autoparallel.search.model.interned import Shared
from autoparallel.search.model.problem import FORBIDDEN, Edge, Node, Problem

#: Prices that are tried at most; cells of an elimination beyond which memory is not priced.
MOST_PRICES, MOST_CELLS = 6, 2e7


@dataclass(frozen=True, eq=False)
class Way:
    """A problem without a memory limit, the bytes of each user that have a price, and the order of elimination."""

    problem: Problem
    held: Shared
    live: np.ndarray
    eliminator: Eliminator

    @classmethod
    def of(cls, problem: Problem, turn: int) -> Way:
        """Of a part of a graph; bytes at time ``turn`` have a price."""
        begin, end = problem.intervals.T
        return cls(problem, problem.usages, (begin <= turn) & (turn < end), Eliminator.of(problem))

    def at(self, price: float) -> tuple[float, float]:
        """The least seconds at a price per byte, and the bytes of a choice that attains it."""
        value, choice = self.eliminator.solve(self.problem.costs.priced(self.held, price * self.live))
        if value == FORBIDDEN:
            return value, 0.0
        return value, float(self.held.take(self.problem.cells(choice))[self.live].sum())

    def or_less(self, other: Way) -> Way:
        """With the bytes of each user that are the fewer in this way or the other."""
        pairs = list(zip(self.held.numbers.tolist(), other.held.numbers.tolist(), strict=True))
        place = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        fewer = [np.minimum(self.held.distinct[one], other.held.distinct[two]) for one, two in place]
        return Way(self.problem, Shared(fewer, np.array([place[pair] for pair in pairs], np.int64)),
                   self.live & other.live, self.eliminator)


class Parts:
    """The parts of a problem that nothing joins but nodes of one choice: the ``apart`` ones are of nodes that stand for
    several, the ``rest`` is one."""

    def __init__(self, problem: Problem, several: Sequence[bool]) -> None:
        open_ = problem.sizes > 1
        joined = nx.Graph()
        joined.add_nodes_from(np.flatnonzero(open_).tolist())
        joined.add_edges_from([(u, v) for u, v in problem.ends.tolist() if open_[u] and open_[v]])
        apart = [sorted(part) for part in nx.connected_components(joined) if all(several[v] for v in part)]
        of = np.full(len(problem.nodes), -1)
        for number, part in enumerate(sorted(apart)):
            of[part] = number
        #: By node its part, and by edge (that of an end with choices); -1: the rest.
        self.of_node, self.of_edge = of, np.maximum(of[problem.ends[:, 0]], of[problem.ends[:, 1]])
        self.count = len(apart)

    def part(self, problem: Problem, number: int) -> Problem:
        """A part of a problem of this structure; -1: the rest."""
        edges = np.flatnonzero(self.of_edge == number)
        ends = problem.ends[edges]
        nodes = np.union1d(np.flatnonzero(self.of_node == number), ends)
        place = np.full(len(problem.nodes), -1)
        place[nodes] = np.arange(len(nodes))
        made = list[Node]()
        for index in nodes.tolist():
            node = problem.nodes[index]
            own = self.of_node[index] == number
            made.append(node if own else Node(node.name, np.zeros(len(node.costs)), np.zeros(len(node.costs))))
        return Problem(made, [Edge(int(place[u]), int(place[v]), edge.costs, edge.usages, edge.interval)
                              for edge, (u, v) in zip((problem.edges[at] for at in edges.tolist()), ends.tolist(),
                                                      strict=True)], name=problem.name)


def least_fitting_s(ways: Sequence[Problem], several: Sequence[bool], turn: int, room: float) -> float:
    """The least seconds of a problem of whose choices the bytes at time ``turn`` do not exceed the room.

    ``ways``: the problem, and with recomputed blocks; ``several``: by node, whether it is in a block that stands for
    several. A bound, not attained; 0 where elimination takes long.
    """
    parts = Parts(ways[0], several)
    apart = [[Way.of(parts.part(way, number), turn) for way in ways] for number in range(parts.count)]
    rest, *others = (Way.of(parts.part(way, -1), turn) for way in ways)
    for other in others:
        rest = rest.or_less(other)
    some = [rest, *(way for one in apart for way in one)]
    if sum(elimination_cells(way.eliminator, way.problem) for way in some) > MOST_CELLS:
        return 0.0

    def at(price: float) -> tuple[float, float]:
        found = [rest.at(price), *(min(way.at(price) for way in one) for one in apart)]
        return sum(value for value, _ in found), sum(num_bytes for _, num_bytes in found)

    return _highest(at, room)


def _highest(at: Callable[[float], tuple[float, float]], room: float) -> float:
    """The highest of ``at(price)`` less the price of the room, by the tangents on both sides of the best price."""
    value, num_bytes = at(0.0)
    if num_bytes <= room or value in (0.0, FORBIDDEN):
        return value
    best, low = value, (value, num_bytes - room)    # value at no price, and slope
    price, high = value / max(num_bytes, 1.0), None
    for _ in range(MOST_PRICES):
        value, num_bytes = at(price)
        over, bound = num_bytes - room, value - price * room
        best = max(best, bound)
        tangent = bound - price * over, over
        if over > 0:
            low = tangent
        else:
            high = tangent
        if over == 0 or (high is not None and high[1] == 0):
            break
        if high is None:
            price *= 4
            continue
        crossing = (high[0] - low[0]) / (low[1] - high[1])
        if math.isclose(crossing, price, rel_tol=1e-6) or low[0] + crossing * low[1] <= best * (1 + 1e-4):
            break
        price = crossing
    return best


__all__ = ["least_fitting_s"]
