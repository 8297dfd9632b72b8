"""Which parts of a graph repeat: what greedy elimination takes away before chains of blocks are left.

In each round those nodes go whose step is smaller than each neighbour's (or as large, and the node of a kind that comes
first): many, as long as there are blocks with an inside; a few, once one node per block is left. The nodes that went
fall into subgraphs, and subgraphs of one form are eliminated by one rule, once for all of equal costs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

SUBGRAPH_CELLS = 2e5
FEW, FEW_SHARE = 4, 1 / 8
KIND_ROUNDS = 3
KIND_BITS = 40


@dataclass(frozen=True)
class Subgraphs:
    """Subgraphs with the same nodes, edges and numbers of choices. Each row of an array is one subgraph: the numbers of
    the ``nodes`` inside it, of the ``border`` nodes that it touches, and of its cost tables, ``inputs``.

    Input i is the cost vector of node i; input (number of nodes) + e is the cost table of edge e. ``scopes`` has, for
    each column of inputs, the columns of (nodes, border) that the table is about.
    """

    nodes: np.ndarray
    border: np.ndarray
    inputs: np.ndarray
    scopes: tuple[tuple[int, ...], ...]


def repeated_subgraphs(sizes: np.ndarray, ends: np.ndarray) -> list[Subgraphs]:
    """Forms of two subgraphs or more. ``ends`` has a row (source, target) per edge. O((n + m) log(n + m)) a round."""
    count = len(sizes)
    scopes = np.where((sizes[ends] > 1).any(axis=1)[:, None], ends, ends[:, [1, 1]])
    scopes = np.where(sizes[scopes] > 1, scopes, scopes[:, ::-1])  # a node with one choice joins nothing
    inside = _inside(sizes, scopes[scopes[:, 0] != scopes[:, 1]])
    subgraph = _components(count, scopes[inside[scopes].all(axis=1)])
    subgraph[~inside] = -1
    own, other = subgraph[scopes[:, 0]], subgraph[scopes[:, 1]]
    edges = np.flatnonzero((own >= 0) | (other >= 0))
    owner = np.maximum(own, other)
    users = np.concatenate([np.flatnonzero(inside), edges + count])
    belongs = np.concatenate([subgraph[inside], owner[edges]])
    both = np.concatenate([np.repeat(np.flatnonzero(inside)[:, None], 2, axis=1), scopes[edges]])
    order = np.argsort(belongs, kind="stable")
    users, belongs, both = users[order], np.unique(belongs[order], return_inverse=True)[1], both[order]
    keys = (2 * belongs[:, None] + ~inside[both]) * count + both  # inside first, each in order
    near, place = np.unique(keys, return_inverse=True)
    numbers = np.arange(belongs.max(initial=-1) + 2)
    starts, borders = np.searchsorted(belongs, numbers), np.searchsorted(near, 2 * numbers * count)
    middles = np.searchsorted(near, (2 * numbers[:-1] + 1) * count).tolist()
    place = place.reshape(-1, 2) - borders[belongs][:, None]
    near = near % max(1, count)
    bounds = zip(itertools.pairwise(starts.tolist()), itertools.pairwise(borders.tolist()), middles, strict=True)
    found: dict[tuple[bytes, bytes, bytes], list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for (low, high), (first, last), middle in bounds:
        nodes, border = near[first:middle], near[middle:last]
        form = (sizes[nodes].tobytes(), sizes[border].tobytes(), place[low:high].tobytes())
        found.setdefault(form, []).append((nodes, border, users[low:high]))
    made = []
    for (_, _, scopes_of), equivalent in found.items():
        if len(equivalent) > 1:
            about = np.frombuffer(scopes_of, np.int64).reshape(-1, 2).tolist()
            nodes, border, inputs = (np.array(rows) for rows in zip(*equivalent, strict=True))
            made.append(Subgraphs(nodes, border, inputs, tuple((u,) if u == v else (u, v) for u, v in about)))
    return made


def _inside(sizes: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Nodes that go while many go at once, each in a step of few cells."""
    count = len(sizes)
    log = np.log2(sizes)
    left = np.ones(count, bool)
    pairs = _distinct(pairs, count)
    kinds = _kinds(sizes, pairs)
    while left.any():
        u, v = pairs.T
        work = log + np.bincount(u, log[v], count) + np.bincount(v, log[u], count)
        rank = np.empty(count, np.int64)
        rank[np.lexsort((kinds, np.rint(work * 1e6)))] = np.arange(count)
        go = left & (work <= np.log2(SUBGRAPH_CELLS))
        go[np.where(rank[u] > rank[v], u, v)] = False
        if go.sum() <= max(FEW, FEW_SHARE * left.sum()):
            break
        left &= ~go
        pairs = _without(pairs, go, count)
    return ~left


def _kinds(sizes: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Equal numbers for nodes with equal neighbourhoods up to a few eliminated pairs away (hash collisions are
    possible)."""
    kinds = sizes
    for _ in range(KIND_ROUNDS):
        marks = np.random.default_rng(0).integers(1 << KIND_BITS, size=int(kinds.max(initial=0)) + 1)
        sums = marks[kinds]
        np.add.at(sums, pairs[:, 0], marks[kinds[pairs[:, 1]]] // 3)
        np.add.at(sums, pairs[:, 1], marks[kinds[pairs[:, 0]]] // 3)
        kinds = np.unique(sums, return_inverse=True)[1].reshape(-1)
    return kinds


def _without(pairs: np.ndarray, go: np.ndarray, count: int) -> np.ndarray:
    """The pairs once these nodes, of which no two are a pair, are eliminated."""
    touched = go[pairs].any(axis=1)
    gone = np.where(go[pairs[touched]][:, :1], pairs[touched], pairs[touched][:, ::-1])
    gone = gone[np.argsort(gone[:, 0], kind="stable")]
    degree = np.bincount(gone[:, 0], minlength=count)[gone[:, 0]]
    more = [pairs[~touched]]
    for number in np.unique(degree).tolist():
        near = gone[degree == number, 1].reshape(-1, number)
        first, second = np.triu_indices(number, 1)
        more.append(np.stack([near[:, first], near[:, second]], axis=-1).reshape(-1, 2))
    return _distinct(np.concatenate(more), count)


def _distinct(pairs: np.ndarray, count: int) -> np.ndarray:
    low, high = np.minimum(pairs[:, 0], pairs[:, 1]), np.maximum(pairs[:, 0], pairs[:, 1])
    keys = np.unique(low * count + high)
    return np.stack([keys // max(1, count), keys % max(1, count)], axis=1)


def _components(count: int, pairs: np.ndarray) -> np.ndarray:
    """The least node of each node's component."""
    name = np.arange(count)
    while True:
        low = name.copy()
        np.minimum.at(low, pairs[:, 0], name[pairs[:, 1]])
        np.minimum.at(low, pairs[:, 1], name[pairs[:, 0]])
        low = low[low]
        if (low == name).all():
            return name
        name = low
