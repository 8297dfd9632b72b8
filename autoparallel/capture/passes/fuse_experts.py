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
#: Of a row's place in the sorted order, which gathering rows and putting them back save.
SORTED_BYTES = 16.0
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
        if _name(node) in GROUPED:
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
        product_bytes = 0.0
        for node in self.rows:
            made[node] = self._copy(graph, node, made, rows)
            if _name(node) in GROUPED:
                product_bytes += node.meta["val"].numel() * node.meta["val"].element_size() / self.num_rows
        assert self.exit is not None
        graph.output(made[self.exit.args[0]])
        result, module = self.exit.meta["val"], GraphModule({}, graph, "Experts")
        return Body(module, self.num_experts, tuple(result.shape[1:]), result.dtype, self.flops,
                    self._saved_bytes(module) + SORTED_BYTES, product_bytes)

    def _saved_bytes(self, module: GraphModule) -> float:
        """Bytes a row of the tensors that autograd saves of the body, without the weights: by running it on tensors
        without data."""
        def fresh(value: torch.Tensor, rows: int | None = None) -> torch.Tensor:
            shape = value.shape if rows is None else (rows, *value.shape[1:])
            return value.new_empty(shape).requires_grad_(value.is_floating_point())

        assert self.tokens is not None
        ids = self.sort.args[0].meta["val"]
        weights = [fresh(node.meta["val"]) for node in self.weights]
        given = {weight.untyped_storage()._cdata for weight in weights}
        saved: dict[int, torch.Tensor] = {}

        def note(value: torch.Tensor) -> torch.Tensor:
            if (key := value.untyped_storage()._cdata) not in given:
                saved[key] = value
            return value

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
            ends, rows = ids.new_empty(self.num_experts, dtype=torch.int32), self.tokens.meta["val"]
            module(fresh(rows, self.num_rows), ids, ends, *(fresh(node.meta["val"]) for node in self.by_row), *weights)
        return sum(value.untyped_storage().nbytes() for value in saved.values()) / self.num_rows

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


def _name(node: Node) -> str:
    """The name of a node's op ("" for others)."""
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else ""


def _counts_up(node: Node, length: int) -> bool:
    return node.target is aten.arange.default and node.args == (length,)


__all__ = ["gather_experts"]
