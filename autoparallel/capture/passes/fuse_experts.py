"""Mixtures of experts as one op, which may be cut by tokens and by experts.

Libraries write them as a sort: the rows (each token once for each of its experts) are put in the order of their
experts, multiplied group by group, and put back. No shard of a sorted order is a shard of the tokens, so nothing of it
could be cut. The sort with all between it and its inverse becomes ``autoparallel::routed_experts``, which sorts the
rows that it is given by itself:

    tokens[t, ...], ids[t k], by_row[t k, ...]..., weights[e, ...]... -> rows[t k, ...]

With a part of the experts' weights it computes the rows of those experts, and zeros for the others.
"""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule

from autoparallel.capture.passes.editing import Node, replace
from autoparallel.ops.routed_experts import _BODIES, Body, routed_experts

aten = torch.ops.aten

GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
VIEWS = frozenset({aten.slice.Tensor, aten.reshape.default})
ALONG_DIM = frozenset({aten.cat.default, aten.softmax.int, aten.slice.Tensor})


def gather_experts(graph: Graph, mutations: dict[str, Node]) -> None:
    """Replace each sort of tokens by expert, and the ops on the sorted rows, by one op."""
    for node in list(graph.nodes):
        if node.target is aten.sort.default and node.args[1:] in ((), (-1,), (0,)) and not node.kwargs:
            region = _Region(node)
            if region.find():
                region.replace(mutations)


@dataclass
class _Region:
    """The nodes between a sort and its inverse."""

    sort: Node
    tokens: Node | None = None
    exit: Node | None = None
    num_rows: int = 0
    num_experts: int = 0
    per_token: int = 1
    flops: float = 0.0
    rows: dict[Node, None] = field(default_factory=dict)
    by_row: dict[Node, None] = field(default_factory=dict)
    weights: dict[Node, None] = field(default_factory=dict)
    roles: dict[Node, str] = field(default_factory=dict)

    def find(self) -> bool:
        """Whether the nodes that follow from the sort are a mixture of experts."""
        ids = self.sort.args[0].meta["val"]
        if ids.dim() != 1:
            return False
        self.num_rows = ids.shape[0]
        self.roles[self.sort] = "sort"
        node = self.sort.next
        while node.op != "root":
            follows = any(n in self.roles or n in self.rows for n in node.all_input_nodes)
            used = node.users or node.op == "output"  # what earlier passes left behind is not
            if used and follows and not (self._helps(node) or self._is_row_wise(node)):
                return False
            node = node.next
        ours = bool(self.weights) and all(w.meta["val"].shape[0] == self.num_experts for w in self.weights)
        return self.exit is not None and self.tokens is not None and ours

    def _helps(self, node: Node) -> bool:
        """Of the sort's order, or moving rows into it and back."""
        role = self._role(node)
        if role:
            self.roles[node] = role
            return True
        if node.target is not aten.index.Tensor or len(node.args[1]) != 1:
            return False
        source, place = node.args[0], self.roles.get(node.args[1][0])
        if place == "inverse" and source in self.rows and self.exit is None:
            self.exit = node
            return True
        length = source.meta["val"].shape[0]
        if place == "token" and self.tokens in (None, source) and length * self.per_token == self.num_rows:
            self.tokens = source
        elif place == "order" and length == self.num_rows:
            self.by_row[source] = None
        elif place == "experts":
            self.weights[source] = None
        else:
            return False
        self.rows[node] = None
        return True

    def _role(self, node: Node) -> str:
        args = node.args
        of = self.roles.get(args[0], "") if args and isinstance(args[0], torch.fx.Node) else ""
        if node.target is operator.getitem and of == "sort":
            return ("experts", "order")[args[1]]
        if node.target is aten.floor_divide.default and of == "order":
            self.per_token = args[1]
            return "token"
        if node.target is aten.to.dtype and of == "experts":
            return "cast"
        if node.target is aten.histc.default and of in ("cast", "experts") and args[2:] == (0, args[1] - 1):
            self.num_experts = args[1]
            return "counts"
        if node.target is aten.cumsum.default and of == "counts":
            return "ends"
        if node.target is aten.index_put.default and self.roles.get(args[1][0]) == "order":
            return "inverse" if _counts_up(args[2], self.num_rows) and len(args) == 3 else ""
        return ""

    def _is_row_wise(self, node: Node) -> bool:
        """Whether a row of the result needs no other row."""
        args, inputs = node.args, node.all_input_nodes
        name = getattr(node.target, "_schema", None) and node.target._schema.name
        if name in GROUPED:
            fits = args[0] in self.rows and self.roles.get(args[2]) == "ends" and len(args) == 3 and not node.kwargs
            if fits:
                self.weights[args[1]] = None
                self.flops += 2.0 * args[1].meta["val"].shape[1] * args[1].meta["val"].shape[2]
        else:
            fits = all(n in self.rows for n in inputs) and self._apart(node)
        if fits:
            self.rows[node] = None
        return bool(fits)

    def _apart(self, node: Node) -> bool:
        shape, tags = node.meta["val"].shape, node.target.tags
        if not len(shape) or shape[0] != self.num_rows or node.meta.get("no_grad"):
            return False
        if node.target in ALONG_DIM:
            return bool(len(node.args) > 1 and node.args[1] % len(shape) > 0)
        if node.target in (aten.reshape.default, aten.to.dtype):
            return True
        equivalent = all(n.meta["val"].dim() == len(shape) for n in node.all_input_nodes)  # rows meet rows, not columns
        return equivalent and torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags

    def replace(self, mutations: dict[str, Node]) -> None:
        exit_, graph = self.exit, self.sort.graph
        assert exit_ is not None
        body = self._body()
        code = "".join(node.format_node() for node in body.module.graph.nodes)
        digest = hashlib.sha256(f"{code}{body.num_experts}{body.width}{body.dtype}".encode()).hexdigest()[:16]
        _BODIES[digest] = body
        with graph.inserting_before(exit_):
            made = graph.call_function(routed_experts, (digest, self.tokens, self.sort.args[0], list(self.by_row),
                                                        list(self.weights)))
        made.meta = dict(exit_.meta)
        replace(exit_, made, mutations)

    def _body(self) -> Body:
        graph = Graph()
        rows, experts, ends = (graph.placeholder(name) for name in ("rows", "experts", "ends"))
        made: dict[Node, Node] = {node: experts if role == "experts" else ends for node, role in self.roles.items()
                                  if role in ("experts", "ends")}
        for number, node in enumerate(self.by_row):
            made[node] = graph.placeholder(f"by_row_{number}")
        for number, node in enumerate(self.weights):
            made[node] = graph.placeholder(f"weight_{number}")
        made_bytes = 0.0
        for node in self.rows:
            made[node] = self._copy(graph, node, made, rows)
            if node.target not in VIEWS:
                made_bytes += node.meta["val"].numel() * node.meta["val"].element_size() / self.num_rows
        assert self.exit is not None
        graph.output(made[self.exit.args[0]])
        result = self.exit.meta["val"]
        return Body(GraphModule({}, graph, "Experts"), self.num_experts, tuple(result.shape[1:]), result.dtype,
                    self.flops, made_bytes)

    def _copy(self, graph: Graph, node: Node, made: dict[Node, Node], rows: Node) -> Node:
        if node.target is aten.index.Tensor and node.args[1][0] in self.roles:
            place = self.roles[node.args[1][0]]
            if place != "experts":  # sorted rows are given
                return rows if place == "token" else made[node.args[0]]
        copy = graph.node_copy(node, made.__getitem__)
        copy.name = f"{node.target._schema.name.split('::')[1]}_{len(graph.nodes)}"
        if node.target is aten.reshape.default:
            copy.args = (copy.args[0], [-1, *node.args[1][1:]])
        return copy


def _counts_up(node: Node, length: int) -> bool:
    return node.target is aten.arange.default and node.args == (length,)


__all__ = ["gather_experts"]
