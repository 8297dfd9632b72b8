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
import io
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autoparallel.errors import SearchError
from autoparallel.search.model.problem import FORBIDDEN, Edge, Node, Problem, unchecked
from cost_models.files import read_regular

FORBIDDEN_NUMBER = 10**18
#: Of a file, packed or not.
MOST_BYTES = 2**31
STRING_OR_LIST = re.compile(rb'"(?:[^"\\]|\\.)*"|\[[^][{}"]*\]')


class _Lists:
    """Every list of plain values by its text: files repeat a few thousand tables and costs tens of thousands of times.

    ``outline`` is the document with a name in place of each such list.
    """

    def __init__(self, raw: bytes) -> None:
        names: dict[bytes, bytes] = {}

        def name(found: re.Match[bytes]) -> bytes:
            text = found.group()
            return text if text.startswith(b'"') else names.setdefault(text, b'"[%d"' % len(names))

        self.outline = json.loads(STRING_OR_LIST.sub(name, raw))
        contents = json.loads(b"[" + b",".join(names) + b"]")
        self._contents = {f"[{number}": content for number, content in enumerate(contents)}
        self._arrays: dict[str, np.ndarray] = {}
        self._tables: dict[tuple[str, int, int], np.ndarray] = {}

    def __getitem__(self, name: str) -> list[Any]:
        return self._contents[name]

    def names(self, outer: list[str] | str) -> list[str]:
        """The names in a list of lists, which may be empty."""
        if isinstance(outer, list):
            return outer
        if self[outer]:
            raise TypeError("expected a list of lists")
        return []

    def array(self, name: str) -> np.ndarray:
        """A float64 array, the same object for equal contents."""
        if name not in self._arrays:
            values = np.array(self[name], np.float64)
            values[values >= FORBIDDEN_NUMBER] = FORBIDDEN
            self._arrays[name] = values
        return self._arrays[name]

    def table(self, name: str, rows: int, columns: int) -> np.ndarray:
        key = name, rows, columns
        if key not in self._tables:
            self._tables[key] = self.array(name).reshape(rows, columns)
        return self._tables[key]


def _nodes(data: dict[str, Any], lists: _Lists) -> tuple[Node, ...]:
    names = [lists.names(data[key]) for key in ("intervals", "costs", "usages")]
    classes = lists[data["device_classes"]] if "device_classes" in data else []
    equivalent: dict[tuple[str, str, int], Node] = {}
    found = []
    for i, (interval, costs, usages, number) in enumerate(zip(*names, classes or [0] * len(names[1]), strict=True)):
        start, end = map(int, lists[interval])
        if max(abs(start), abs(end)) >= FORBIDDEN_NUMBER:
            raise ValueError(f"the interval of node {i} is [{start:.3g}, {end:.3g}]")
        key = costs, usages, int(number)
        if key not in equivalent or start > end:
            equivalent[key] = Node(f"n{i}", lists.array(costs), lists.array(usages), (start, end), None, int(number))
            found.append(equivalent[key])
        else:
            found.append(unchecked(equivalent[key], name=f"n{i}", interval=(start, end)))
    return tuple(found)


def _edges(data: dict[str, Any], lists: _Lists, nodes: tuple[Node, ...]) -> tuple[Edge, ...]:
    equivalent: dict[int, Edge] = {}
    found = []
    for pair, costs in zip(lists.names(data["nodes"]), lists.names(data["costs"]), strict=True):
        source, target = lists[pair]
        table = lists.table(costs, len(nodes[source].costs), len(nodes[target].costs))
        if id(table) not in equivalent or source == target:
            equivalent[id(table)] = Edge(source, target, table)
            found.append(equivalent[id(table)])
        else:
            found.append(unchecked(equivalent[id(table)], source=source, target=target))
    return tuple(found)


def read(path: str | Path) -> Problem:
    """Read a .json or .json.gz file. Raises SearchError when it is not of this form, or larger than `MOST_BYTES`."""
    path = Path(path)
    try:
        raw = read_regular(path, MOST_BYTES)
        lists = _Lists(_unpacked(raw) if path.suffix == ".gz" else raw)
        data = lists.outline["problem"]
        nodes = _nodes(data["nodes"], lists)
        edges = _edges(data["edges"], lists, nodes)
        limits = data.get("usage_limit"), *(lists[data["usage_limits"]] if "usage_limits" in data else ())
        limit, *more = (FORBIDDEN if number is None or number >= FORBIDDEN_NUMBER else float(number)
                        for number in limits)
        return Problem(nodes, edges, limit, str(data.get("name", path.name)), tuple(more))
    except SearchError as error:
        raise SearchError(f"{path}: {error}") from error
    except (OSError, EOFError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError,
            zlib.error) as error:
        said = f"{type(error).__name__}: {str(error)[:200]}"
        raise SearchError(f"{path}: not a problem in IOPDDL JSON: {said}") from error


def _unpacked(raw: bytes) -> bytes:
    """The contents of a gzip file. Raises ValueError for more than `MOST_BYTES`, before as many are unpacked."""
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
        found = file.read(MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise ValueError(f"it unpacks to more than {MOST_BYTES:,} bytes")
    return found


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
