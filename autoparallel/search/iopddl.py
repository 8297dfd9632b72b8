"""Problems as IOPDDL JSON, the form of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism.

    {"problem": {"name": ..., "nodes": {"intervals": [[0, 3]], "costs": [[1, 2]], "usages": [[8, 4]]},
                 "edges": {"nodes": [[0, 1]], "costs": [[row-major table]]}, "usage_limit": 50}}

Several device classes, which the contest's form does not know, are written as ``usage_limits`` (of classes 1, 2, ...)
and ``nodes.device_classes``; both are left out where there is one class.

Whole numbers stay exact up to 2**53; 1e18 and above is forbidden. The format knows no memory on edges: such an edge is
written as a node of its own, one choice per pair, tied to both ends by tables of 0 and forbidden.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autoparallel.errors import SearchError
from autoparallel.search.problem import FORBIDDEN, Edge, Node, Problem

FORBIDDEN_NUMBER = 10**18


def _array(numbers: list[float], shared: dict[tuple[float, ...], np.ndarray]) -> np.ndarray:
    """A float64 array, the same object for equal contents."""
    key = tuple(numbers)
    if key not in shared:
        values = np.array(numbers, np.float64)
        values[values >= FORBIDDEN_NUMBER] = FORBIDDEN
        shared[key] = values
    return shared[key]


def read(path: str | Path) -> Problem:
    """Read a .json or .json.gz file. Raises SearchError when it is not of this form."""
    path = Path(path)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        data = json.loads(raw)["problem"]
        shared: dict[tuple[float, ...], np.ndarray] = {}
        nodes = tuple(
            Node(f"n{i}", _array(costs, shared), _array(usages, shared), (int(start), int(end)), None, int(number))
            for i, ((start, end), costs, usages, number) in enumerate(zip(
                data["nodes"]["intervals"], data["nodes"]["costs"], data["nodes"]["usages"],
                data["nodes"].get("device_classes") or [0] * len(data["nodes"]["costs"]), strict=True)))
        tables: dict[tuple[int, int, int], np.ndarray] = {}
        edges = []
        for (source, target), costs in zip(data["edges"]["nodes"], data["edges"]["costs"], strict=True):
            flat = _array(costs, shared)
            key = id(flat), len(nodes[source].costs), len(nodes[target].costs)
            if key not in tables:
                tables[key] = flat.reshape(key[1:])
            edges.append(Edge(source, target, tables[key]))
        limit, *more = (FORBIDDEN if number is None or number >= FORBIDDEN_NUMBER else float(number)
                        for number in (data.get("usage_limit"), *data.get("usage_limits", ())))
    except (OSError, EOFError, KeyError, IndexError, TypeError, ValueError) as error:
        raise SearchError(f"{path}: not a problem in IOPDDL JSON: {type(error).__name__}: {error}") from error
    return Problem(nodes, tuple(edges), limit, data.get("name", path.name), tuple(more))


def edges_as_nodes(problem: Problem) -> Problem:
    """The same problem with every memory-using edge as a node; the first nodes are the problem's own."""
    nodes, edges = list(problem.nodes), []
    for edge in problem.edges:
        if edge.usages is None:
            edges.append(edge)
            continue
        rows, columns = edge.costs.shape
        new = len(nodes)
        nodes.append(Node(f"{edge.source}->{edge.target}", edge.costs.ravel(), edge.usages.ravel(), edge.interval,
                          None, edge.device_class))
        picked = np.arange(rows * columns)
        for end, index, size in ((edge.source, picked // columns, rows), (edge.target, picked % columns, columns)):
            edges.append(Edge(end, new, np.where(np.arange(size)[:, None] == index[None], 0.0, FORBIDDEN)))
    return replace(problem, nodes=tuple(nodes), edges=tuple(edges))


def _numbers(values: np.ndarray) -> list[float | int]:
    return [FORBIDDEN_NUMBER if value == FORBIDDEN else int(value) if value.is_integer() else value
            for value in map(float, values.ravel())]


def write(problem: Problem, path: str | Path) -> None:
    """Write a .json or .json.gz file. Labels are lost; see the module's docstring for memory on edges."""
    path, problem = Path(path), edges_as_nodes(problem)
    data: dict[str, Any] = {
        "name": problem.name,
        "nodes": {"intervals": [list(node.interval) for node in problem.nodes],
                  "costs": [_numbers(node.costs) for node in problem.nodes],
                  "usages": [_numbers(node.usages) for node in problem.nodes]},
        "edges": {"nodes": [[edge.source, edge.target] for edge in problem.edges],
                  "costs": [_numbers(edge.costs) for edge in problem.edges]},
    }
    if problem.limit < FORBIDDEN:
        data["usage_limit"] = _numbers(np.array(float(problem.limit)))[0]
    if problem.more_limits:
        data["usage_limits"] = _numbers(np.array(problem.more_limits))
        data["nodes"]["device_classes"] = [node.device_class for node in problem.nodes]
    text = json.dumps({"problem": data}).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
