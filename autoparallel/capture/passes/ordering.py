"""One order of ops that are independent of each other, however a process happened to trace them.

Python draws the order of a set of strings anew in every process, and models loop over such sets: transformers makes
masks and rotary embeddings ``for layer_type in set(config.layer_types)``. Ranks would have different programs, and a
saved plan could not be loaded. Ops that read no parameter are therefore put in the order in which later ops read their
results, within the place where they were traced. Ops that read parameters keep the order of the trace. Constants, which
torch.export numbers as they are met, come in the order in which they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch.fx import Graph

from autoparallel.capture.passes.editing import Node


def order_independent(graph: Graph, parameters: Collection[str], constants: Collection[str],
                      mutations: Mapping[str, Node]) -> None:
    """Reorder, in place, each series of ops without an op between them that depends on a parameter, and constants.

    ``parameters`` and ``constants``: the names of their placeholders; ``mutations``: the final value of each buffer
    that is updated, by its placeholder's name.
    """
    nodes = list(graph.nodes)
    place: dict[Node, int] = {}  # in the final order, counted from the end
    updates = {mutations[name]: name for name in sorted(mutations, reverse=True)}
    for series in reversed(_series(nodes, _dependent(nodes, parameters))):
        if len(series) > 1:
            before = series[-1].next
            series = _by_readers(series, lambda node: _first_reading(node, place, updates))
            for node in series:
                before.prepend(node)
        for node in reversed(series):
            place[node] = -len(place)
    _order_constants([node for node in nodes if node.name in constants], place, updates)


def _order_constants(found: Sequence[Node], place: Mapping[Node, int], updates: Mapping[Node, str]) -> None:
    """Move the nodes of constants so that they stand in the order in which the program first reads them."""
    if not found:
        return
    before = found[0].prev
    for node in sorted(found, key=lambda node: _first_reading(node, place, updates), reverse=True):
        before.append(node)


def _dependent(nodes: Sequence[Node], parameters: Collection[str]) -> set[Node]:
    """The nodes that depend on a parameter."""
    found: set[Node] = set()
    for node in nodes:
        if node.name in parameters or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _series(nodes: Sequence[Node], dependent: Collection[Node]) -> list[list[Node]]:
    """All nodes in order, in groups: consecutive ops that depend on no parameter form one group, each other node its
    own."""
    found: list[list[Node]] = [[]]
    for node in nodes:
        free = node.op == "call_function" and node not in dependent
        if free and found[-1] and found[-1][-1].op == "call_function" and found[-1][-1] not in dependent:
            found[-1].append(node)
        else:
            found.append([node])
    return found[1:]


def _by_readers(series: Sequence[Node], first_reading: Callable[[Node], tuple[int, int, str]]) -> list[Node]:
    """Each op after those that it reads; besides, in the order in which the results are read behind the series."""
    inside, done = set(series), dict[Node, None]()
    for node in sorted((n for n in series if not n.users or any(u not in inside for u in n.users)), key=first_reading):
        stack = [node]
        while stack:
            waiting = [source for source in stack[-1].all_input_nodes if source in inside and source not in done]
            if waiting:
                stack.append(waiting[0])
            else:
                done.setdefault(stack.pop())
    return list(done)


def _first_reading(node: Node, place: Mapping[Node, int], updates: Mapping[Node, str]) -> tuple[int, int, str]:
    """Which op behind the series reads it first, and at which of its arguments; a buffer's new value that nobody reads
    comes last, by the buffer's name."""
    readings = [(place[user], user.all_input_nodes.index(node), "") for user in node.users if user in place]
    return min(readings, default=(1, 0, updates.get(node, "")))


__all__ = ["order_independent"]
