"""Collectives of a traced graph issued as early and awaited as late as the data allows.

The order of the collectives among themselves stays, so that it is the same on all ranks. A gather of a parameter could
be issued at the top, and all parameters would be whole at once: it is issued where the gather before it is read.

Products that make gradients of weights, which only results are, come behind the next collective of activations, which
is issued so much earlier and travels beside them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule
from torch.fx import Node as FxNode

from autoparallel.backends.traced import (
    EXCHANGE,
    GATHER,
    REDUCE,
    SCATTER,
    STARTS,
    WAIT,
    aten,
    call,
    is_move,
    own,
    waited,
)


def move_collectives(module: GraphModule, gathers: Sequence[FxNode]) -> None:
    """Put the nodes in an order in which collectives overlap with compute. ``gathers``: those of
    parameters. The graph's nodes may be out of order before."""
    order = _Order(module, gathers).run()
    graph = module.graph
    previous = None
    for node in order:
        if previous is not None:
            previous.append(node)
        previous = node
    graph.lint()


class _Order:
    """The new order. ``made``: nodes that have their place; ``starts``: collectives that are left; ``before``: the
    collective issued before each."""

    def __init__(self, module: GraphModule, gathers: Sequence[FxNode]) -> None:
        self.nodes = _sorted(module.graph.nodes)
        self.made: dict[FxNode, None] = {}
        self.gathers = set(gathers)
        self.late = set[FxNode]()  # waits, and what only moves their results
        for node in self.nodes:
            if node.target is WAIT or (is_move(node) and any(i in self.late for i in node.all_input_nodes)):
                self.late.add(node)
        self.starts = _prefetched([n for n in self.nodes if n.target in STARTS], self.gathers)
        self.before = dict(itertools.pairwise(reversed(self.starts)))
        self.of_weights = _of_weights(self.nodes)
        self._needed = dict[FxNode, set[FxNode]]()

    def run(self) -> list[FxNode]:
        for node in self.nodes:
            if node.op == "placeholder":
                self.made[node] = None
        if self.starts and self.starts[0] in self.gathers:
            self.make(self.starts[0])
        waiting = list[FxNode]()
        for node in self.nodes:
            if not (node.op == "output" or node in self.late or node.target in STARTS):
                left = len(self.starts)
                self.raise_starts()
                for product in waiting if len(self.starts) < left else ():
                    self.make(product)
                if len(self.starts) < left:
                    waiting.clear()
                if node in self.of_weights and self._gives_way(node):
                    waiting.append(node)
                    continue
                for value in node.all_input_nodes:
                    self.make(value)
                self.raise_starts()  # the next gather of a parameter begins before this one's reader runs
                self.make(node)
        for node in self.nodes:  # what nothing reads; results last
            self.make(node)
        return list(self.made)

    def make(self, node: FxNode) -> None:
        """Place the node behind what it reads, and a collective behind the one before it."""
        pending = [node]
        while pending:
            top = pending[-1]
            needed = [*top.all_input_nodes, *([self.before[top]] if top in self.before else [])]
            if top in self.made or not (left := [i for i in needed if i not in self.made]):
                self.made[pending.pop()] = None
            else:
                pending += left

    def raise_starts(self) -> None:
        """Issue the next collectives whose data are there; a gather of a parameter once the one before is read."""
        while self.starts and (self.starts[0] in self.made or self._is_due(self.starts[0])):
            self.make(self.starts.pop(0))

    def _gives_way(self, product: FxNode) -> bool:
        """Whether the next collective is one of activations that needs a few products more, and not this one."""
        if not self.starts or self.starts[0] in self.gathers:
            return False
        needed = self._needed_by(self.starts[0])
        left = sum(node.target in _PRODUCTS and node not in self.made for node in needed)
        return product not in needed and 0 < left <= MOST_BEFORE and not needed & self.of_weights

    def _needed_by(self, start: FxNode) -> set[FxNode]:
        """What a collective needs, as far as it had no place when this was first asked."""
        if start not in self._needed:
            found, pending = set[FxNode](), list(start.all_input_nodes)
            while pending:
                node = pending.pop()
                if node not in found and node not in self.made:
                    found.add(node)
                    pending += node.all_input_nodes
            self._needed[start] = found
        return self._needed[start]

    def _is_due(self, start: FxNode) -> bool:
        if start not in self.gathers:
            return self._ready(start)
        return all(waited(other) in self.made for other in self.gathers if other in self.made)

    def _ready(self, node: FxNode) -> bool:
        """Whether only moves are left to do before this collective, and nothing to await."""
        return all(i in self.made or (is_move(i) and self._ready(i)) for i in node.all_input_nodes)


def _prefetched(starts: Sequence[FxNode], gathers: Collection[FxNode]) -> list[FxNode]:
    """The collectives in the order in which they are issued, from that in which they are read: each gather of a
    parameter comes where the gather before it was."""
    order = [start for start in starts if start in gathers]
    following = dict(itertools.pairwise(order))
    found = order[:1]
    for start in starts:
        found += [following[start]] if start in following else [] if start in gathers else [start]
    return found


def _sorted(nodes: Iterable[FxNode]) -> list[FxNode]:
    """The nodes in their order, but one that reads a later node behind that one. (Were the later one moved to the
    front, all that it reads would come along, which is not the same on all ranks.)"""
    place = {node: number for number, node in enumerate(nodes)}
    missing = {node: len(node.all_input_nodes) for node in place}
    ready = [(number, node) for node, number in place.items() if not missing[node]]  # in order, so a heap
    made: list[FxNode] = []
    while ready:
        made.append(heapq.heappop(ready)[1])
        for user in made[-1].users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (place[user], user))
    assert len(made) == len(place), "the graph has a cycle"
    return made


def name_what_is_sent(module: GraphModule) -> None:
    """The collectives in forms that show that what they send is in use until they are awaited (`kernels.collectives`).
    Without, a compiler takes its memory once they are issued. No other pass may follow.

    An all-reduce of a product that nothing else reads stays as it is: a compiler sums it in place. So it does with a
    bucket.
    """
    graph = module.graph
    for start in [node for node in graph.nodes if node.target in STARTS]:
        wait, sent = waited(start), start.args[0]
        if sent.target is own.bucket.default and start.target is REDUCE:
            with graph.inserting_before(start):
                start.replace_all_uses_with(call(graph, own.sum_bucket.default, *start.args))
            graph.erase_node(start)
            continue
        if start.target is REDUCE and _is_only_reader(start):
            continue
        if start.target is GATHER:
            with graph.inserting_before(start):
                start.replace_all_uses_with(call(graph, own.all_gather.default, *start.args))
        with graph.inserting_before(wait):
            wait.replace_all_uses_with(call(graph, own.awaited.default, wait.args[0], sent))
        graph.erase_node(wait)
        if not start.users:
            graph.erase_node(start)


_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
_WHOLE_VIEWS = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
                          aten.squeeze.dim, aten.squeeze.dims})


def _is_only_reader(start: FxNode) -> bool:
    """Whether what a collective sends is a product, or the whole of one, that nothing else reads."""
    source = start.all_input_nodes[0]
    while len(source.users) == 1 and source.target in _WHOLE_VIEWS:
        source = source.all_input_nodes[0]
    return len(source.users) == 1 and source.target in _PRODUCTS


#: How many products may come before a collective for which gradients of weights wait (a layer's attention has five).
MOST_BEFORE = 8


def _of_weights(nodes: Sequence[FxNode]) -> set[FxNode]:
    """The products of which nothing but results, and sums of gradients over ranks, is made."""
    final, products = set[FxNode](), set[FxNode]()
    for node in reversed(nodes):
        only_results = bool(node.users) and all(user.op == "output" or user in final for user in node.users)
        if only_results and node.target in _PRODUCTS:
            products.add(node)
        elif only_results and (is_move(node) or node.target in (WAIT, REDUCE, SCATTER)):
            final.add(node)
    return products


@dataclass(frozen=True)
class Collective:
    """A collective of a graph: the op and dtype, its group, and the length that all ranks of the group send (None if
    each sends its own)."""

    op: str
    group: str
    length: int | None

    def seen_by(self, group: str) -> str:
        """A collective as ranks along an axis compare it: with its length in the group of that axis, else its op
        only."""
        return f"{self.op} of {self.length} elements" if group == self.group else self.op


def order_of(module: GraphModule) -> list[Collective]:
    """The collectives of a graph in order."""
    found = []
    for node in module.graph.nodes:
        if node.target in STARTS:
            value, group = node.args[0].meta["val"], next(arg for arg in reversed(node.args) if isinstance(arg, str))
            own = node.target is EXCHANGE
            found.append(Collective(f"{node.target} of {value.dtype}", group, None if own else value.numel()))
    return found
