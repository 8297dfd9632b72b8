"""Tables in the memory of the host whose lookups run there: only ids go down, and only results come up.

    pins={"tables*": "host"}                                      or autoparallel.Cached(rows=100_000, hits=0.9)

Such a table is read by embeddings and bags of embeddings alone. A lookup reads it as it is stored (whole on every rank,
or a shard of its rows or columns): nothing of it, and nothing of its gradient, is sent between ranks. Cached tables
are looked up on the device, in the rows that are there.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from autoparallel.capture import OpGraph
from autoparallel.capture.graph import Node
from autoparallel.errors import PinError
from autoparallel.ops.embedding_bag import LOOKUPS
from autoparallel.schedule.table_caches import Cached, TableCache
from autoparallel.strategies.space import StrategySpace

#: The pin of such tables.
HOST = "host"


class HostLookups:
    """The tables ``names`` in a strategy graph, by decision: ``tables``, parameters and shared reads of them, and
    ``ops``, which run on the host. ``cached``: the caches of those that have one, by table, shared read and the ops
    that look up there, which are none of ``ops``. Raises PinError for a name that another op reads, and for a cached
    table whose gradient is dense."""

    def __init__(self, space: StrategySpace, names: Iterable[str] = (), cached: Iterable[TableCache] = ()) -> None:
        self.space, self.names = space, frozenset(names)
        self.tables, self.ops = frozenset[int](), frozenset[int]()
        self.cached: dict[int, TableCache] = {}
        if not self.names:
            return
        check_tables(space.graph, sorted(self.names))
        caches = {one.name: one for one in cached}
        check_cached(space.graph, caches)
        tables, ops = set[int](), set[int]()
        for decision in space.decisions:
            uses = space.uses_by.get(decision.index, ())
            if decision.kind == "parameter" and decision.path in self.names:
                tables.add(decision.index)
                if decision.path in caches:
                    self.cached[decision.index] = caches[decision.path]
            elif uses and uses[0].source in tables:
                (tables if decision.kind == "shared_read" else ops).add(decision.index)
                if uses[0].source in self.cached:
                    self.cached[decision.index] = self.cached[uses[0].source]
        self.tables, self.ops = frozenset(tables), frozenset(ops - self.cached.keys())


def host_patterns(pins: Mapping[str, Any] | None) -> list[str]:
    """The patterns of pins that are `HOST`, or `Cached`."""
    return [pattern for pattern, pin in (pins or {}).items() if isinstance(pin, Cached) or (
        isinstance(pin, str) and pin == HOST)]


def tables_pinned(graph: OpGraph, pins: Mapping[str, Any] | None) -> tuple[tuple[str, ...], tuple[TableCache, ...]]:
    """The names of the parameters that pins put on the host, in the program's order, and the caches of those that have
    one. A pattern is of parameters, or of modules with all their parameters. Raises PinError for a pattern without any,
    for two that differ, for what other ops read, and for a cached table whose gradient is dense."""
    shapes, found = {node.path: node.outputs[0].shape for node in graph.of_kind("parameter")}, dict[str, Any]()
    parameters = [*shapes]
    for pattern in host_patterns(pins):
        wanted = graph.aliases.get(pattern, pattern)
        own = [name for name in parameters if fnmatchcase(name, wanted)]
        own = own or [name for name in parameters if any(fnmatchcase(path, wanted) for path in _parents(name))]
        if not own:
            close = difflib.get_close_matches(pattern, parameters, n=3, cutoff=0.5) or parameters[:3]
            raise PinError(f"pin {pattern!r}: {HOST!r} is of parameters, and this names none; did you mean {close}?")
        check_tables(graph, own, f"pin {pattern!r}: ")
        pin = (pins or {})[pattern]
        if other := next((name for name in own if found.get(name, pin) != pin), None):
            raise PinError(f"pin {pattern!r}: {other} is pinned twice, as {found[other]!s} and as {pin!s}: leave "
                           "one out")
        found.update(dict.fromkeys(own, pin))
    caches = {name: pin.of(name, shapes[name][0]) for name, pin in found.items() if isinstance(pin, Cached)}
    check_cached(graph, caches)
    return tuple(filter(found.__contains__, parameters)), tuple(caches[name] for name in parameters if name in caches)


def check_cached(graph: OpGraph, names: Iterable[str]) -> None:
    """Raises PinError for a trained table whose gradient is dense. (Names of other programs are skipped.)"""
    known, sparse = {node.path: node for node in graph.of_kind("parameter")}, graph.sparse_tables
    for name in names:
        if name in known and name not in sparse and known[name].outputs[0].requires_grad and not _reads_alone(
                graph, known[name]):
            reader = _readers(graph)[known[name].index][0]
            raise PinError(f"{name} is cached on the device, and its gradient is dense: each step changes all of its "
                           f"rows\n  at {reader.source or reader}\n  Write sparse=True, with SparseAdam, Adagrad or "
                           f"SGD; or pin it as {HOST!r}, without a cache.")


def _reads_alone(graph: OpGraph, parameter: Node) -> bool:
    """Whether a program looks a table up without its gradient."""
    return all(node.no_grad for node in _readers(graph)[parameter.index])


def tables_of(graph: OpGraph) -> list[tuple[str, int]]:
    """All tables that could live on the host: name and bytes, the largest first."""
    readers = _readers(graph)
    found = [(node.path, node.outputs[0].num_bytes) for node in graph.of_kind("parameter")
             if not _why_not(node, readers.get(node.index, []))]
    return sorted(found, key=lambda table: -table[1])


def check_tables(graph: OpGraph, names: Iterable[str], where: str = "") -> None:
    """Raises PinError for a parameter that is read by other ops than lookups. (Names of other programs are skipped.)"""
    known, readers = {node.path: node for node in graph.of_kind("parameter")}, _readers(graph)
    for name in names:
        if name in known and (why := _why_not(known[name], readers.get(known[name].index, []))):
            raise PinError(f"{where}{why}\n  On the host run embeddings and bags of embeddings, whose table nothing "
                           "else reads; of other ops offload='parameters' keeps the parameters there.")


def _why_not(parameter: Node, readers: Sequence[Node]) -> str:
    """Why a parameter cannot be looked up on the host; "": it can."""
    if not readers:
        return f"no op reads {parameter.path}"
    other = next((node for node in readers if node.target not in LOOKUPS or any(
        ref.node == parameter.index for ref in node.inputs[1:])), None)
    if other is None:
        return ""
    return f"{parameter.path} is a result" if other.kind == "output" else f"{other} reads {parameter.path}"


def _readers(graph: OpGraph) -> dict[int, list[Node]]:
    """The nodes that read each parameter, by its node."""
    found: dict[int, list[Node]] = {node.index: [] for node in graph.of_kind("parameter")}
    for node in graph:
        for index in {ref.node for ref in node.inputs}:
            if index in found:
                found[index].append(node)
    return found


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


__all__ = ["HOST", "HostLookups", "check_cached", "check_tables", "host_patterns", "tables_of", "tables_pinned"]
