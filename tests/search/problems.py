"""Small problems for the search's tests: random ones, the contest's example, and brute force to judge them."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from autoparallel.search import Edge, Evaluation, Node, Problem, evaluate

EXAMPLE = {"problem": {
    "name": "example",
    "nodes": {"intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
              "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
              "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]]},
    "edges": {"nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
              "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]]},
    "usage_limit": 50}}


def random_problem(seed: int, limited: bool, max_nodes: int = 5) -> Problem:
    """Up to 5 nodes of up to 4 choices, on two axes, with parallel edges, forbidden cells, memory on some edges."""
    rng = np.random.default_rng(seed)
    nodes, edges = [], []
    for i in range(int(rng.integers(1, max_nodes + 1))):
        count = int(rng.integers(1, 5))
        costs = rng.integers(0, 9, count).astype(float)
        costs[rng.random(count) < 0.05] = np.inf
        start, end = sorted(rng.integers(0, 6, 2).tolist())
        nodes.append(Node(f"n{i}", costs, rng.integers(0, 9, count).astype(float), (start, end),
                          tuple((j // 2, j % 2) for j in range(count))))
    for u, v in itertools.permutations(range(len(nodes)), 2):
        if rng.random() < 0.4:
            shape = len(nodes[u].costs), len(nodes[v].costs)
            costs = rng.integers(0, 9, shape).astype(float)
            costs[rng.random(shape) < 0.1] = np.inf
            usages = rng.integers(0, 9, shape).astype(float) if rng.random() < 0.3 else None
            start, end = sorted(rng.integers(0, 6, 2).tolist())
            edges.append(Edge(u, v, costs, usages, (start, end)))
    return Problem(tuple(nodes), tuple(edges), float(rng.integers(5, 40)) if limited else np.inf, f"random {seed}")


def all_plans(problem: Problem) -> list[tuple[tuple[int, ...], Evaluation]]:
    return [(choice, evaluate(problem, choice))
            for choice in itertools.product(*(range(len(node.costs)) for node in problem.nodes))]


seeds = st.integers(0, 10**9)


def block_chain(layers: int, choices: int = 8, seed: int = 0, limit: float = np.inf, axes: int = 1) -> Problem:
    """Repeated blocks that share their arrays: a residual stream, a branch of three ops with a weight, and one hub."""
    rng = np.random.default_rng(seed)
    made: dict[str, np.ndarray] = {}
    rows = round(choices ** (1 / axes))
    strategies = tuple(itertools.product(range(rows), repeat=axes)) if rows**axes == choices else None
    nodes: list[Node] = []
    edges: list[Edge] = []

    def array(name: str, *shape: int) -> np.ndarray:
        if name not in made:
            made[name] = rng.integers(1, 100, shape).astype(float)
        return made[name]

    def op(name: str, *inputs: int, count: int = choices) -> int:
        v = len(nodes)
        nodes.append(Node(f"{name}.{v}", array(f"{name} costs", count), array(f"{name} usages", count),
                          (v, 6 * layers + 2), strategies if count == choices else None))
        for place, u in enumerate(inputs):
            edges.append(Edge(u, v, array(f"{name} edge {place}", len(nodes[u].costs), count)))
        return v

    shared_read = op("shared_read")
    stream = op("embedding")
    for _ in range(layers):
        x = op("norm", stream)
        weight = op("weight")
        x = op("linear", x, weight)
        x = op("mix", x, shared_read)
        stream = op("residual", stream, x)
    return Problem(tuple(nodes), tuple(edges), limit, f"{layers} blocks")


def grid(rows: int, columns: int, choices: int, room: float) -> Problem:
    """Nodes beside and below each other, no two alike; ``room``: the limit's place between least and most memory.

    Elimination takes ``choices ** (rows + 1)`` cells per node.
    """
    rng = np.random.default_rng(0)
    count = rows * columns
    usages = rng.integers(0, 1000, (count, choices)).astype(float)
    nodes = tuple(Node(f"n{v}", rng.integers(0, 1000, choices).astype(float), usages[v], (v // 4, v // 4 + 8))
                  for v in range(count))
    pairs = [(v, v + 1) for v in range(count - 1) if (v + 1) % rows] + [(v, v + rows) for v in range(count - rows)]
    edges = tuple(Edge(u, v, rng.integers(0, 500, (choices, choices)).astype(float)) for u, v in pairs)
    free = Problem(nodes, edges, np.inf, f"{rows} x {columns} nodes")
    least, most = (evaluate(free, picks).peak_bytes for picks in (usages.argmin(axis=1), usages.argmax(axis=1)))
    return replace(free, limit=float(least + room * (most - least)))


def lateness() -> float:
    """Seconds that a process may be late on this machine: longer where others wait for the same cores."""
    return 0.3 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def two_axes(seed: int, num_nodes: int = 30, rows: int = 4, weights: bool = False) -> Problem:
    """A chain with skips on a slow and a fast axis: work is divided by what is split, changing a row costs its axis.

    ``weights``: every other node reads one that stays in memory, less of it where split, and is gathered at a cost.
    """
    rng = np.random.default_rng(seed)
    strategies = tuple(itertools.product(range(rows), repeat=2))
    slow, fast = rng.uniform(4, 8, (rows, rows)), rng.uniform(0.5, 1, (rows, rows))
    np.fill_diagonal(slow, 0.0)
    np.fill_diagonal(fast, 0.0)
    table = np.array([[slow[a[0], b[0]] + fast[a[1], b[1]] for b in strategies] for a in strategies])
    nodes = []
    for i in range(num_nodes):
        work, traffic = rng.uniform(5, 50), rng.uniform(0, 5, (2, rows))
        costs = [
            work / ((1 + 3 * (a > 0)) * (1 + 7 * (b > 0))) + 4 * traffic[0, a] + traffic[1, b] for a, b in strategies
        ]
        nodes.append(Node(f"n{i}", np.array(costs), np.ones(len(strategies)), (i, i + 2), strategies))
    pairs = [(i, i + 1) for i in range(num_nodes - 1)] + [(i, i + 5) for i in range(0, num_nodes - 5, 3)]
    edges = [Edge(u, v, table) for u, v in pairs]
    for i in range(0, num_nodes, 2) if weights else ():
        size = rng.uniform(1, 10)
        gathers = [size * ((a > 0) + 0.3 * (b > 0)) for a, b in strategies]
        shares = [size / ((1 + 3 * (a > 0)) * (1 + 7 * (b > 0))) for a, b in strategies]
        edges.append(Edge(len(nodes), i, size / 4 * table))
        nodes.append(Node(f"w{i}", np.array(gathers), np.array(shares), (0, num_nodes), strategies))
    return Problem(tuple(nodes), tuple(edges), np.inf, "two axes")
