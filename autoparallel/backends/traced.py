"""What a node of a traced graph is: a collective of a parameter or of a gradient, or an op that only moves data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph
from torch.fx import Node as FxNode

import autoparallel.kernels.collectives  # noqa: F401  its ops are looked up by name

aten, c10d, own = torch.ops.aten, torch.ops._c10d_functional, torch.ops.autoparallel
WAIT = c10d.wait_tensor.default
GATHER = c10d.all_gather_into_tensor.default
EXCHANGE = c10d.all_to_all_single.default
REDUCE, SCATTER = c10d.all_reduce.default, c10d.reduce_scatter_tensor.default
_MARK, _NAMED = "gathers_parameter", "bucket_of_parameter"
STARTS = frozenset({GATHER, REDUCE, SCATTER, EXCHANGE})
#: Ops that move or convert data and compute nothing.
MOVES = frozenset({
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.clone.default, aten.slice.Tensor, aten.cat.default, aten.constant_pad_nd.default,
    aten.split.Tensor, aten.split_with_sizes.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten._to_copy.default, aten.as_strided.default, aten.expand.default, aten.alias.default, aten.full.default,
    torch.ops.prims.convert_element_type.default, own.bucket.default,
})
#: Those whose result shares its input's memory.
VIEWS = MOVES - {aten.clone.default, aten.cat.default, aten.constant_pad_nd.default, aten._to_copy.default,
                 aten.full.default, torch.ops.prims.convert_element_type.default, own.bucket.default}


def is_move(node: FxNode) -> bool:
    """Whether a node only moves or converts data; a result of a split is one too."""
    return node.op == "call_function" and (node.target in MOVES or getattr(node.target, "__name__", "") == "getitem")


def input_number(placeholder: FxNode) -> int | None:
    """The index of a placeholder among the traced function's inputs; None for tangents and saved values."""
    found = re.fullmatch(r"primals_(\d+)|arg(\d+)_1", str(placeholder.target))
    if found is None:
        return None
    return int(found[1]) - 1 if found[1] else int(found[2])


def mark_gathers(graph: Graph, parameters: Mapping[int, int | None]) -> None:
    """Mark the all-gathers of parameters (numbers of the traced function's inputs), with the bucket of any size that
    each is in: a graph that is cut out of this one may not show where their data come from."""
    of_parameters = dict[FxNode, int | None]()
    for node in graph.nodes:
        number = input_number(node) if node.op == "placeholder" else None
        if number is not None and number in parameters:
            of_parameters[node] = parameters[number]
        elif (is_move(node) or node.target in (WAIT, GATHER)) and all(i in of_parameters for i in node.all_input_nodes):
            # a constant (padding) has no inputs
            of_parameters[node] = next((of_parameters[i] for i in node.all_input_nodes), None)
            node.meta[_MARK], node.meta[_NAMED] = node.target is GATHER, of_parameters[node]


def gathers_of(graph: Graph) -> list[FxNode]:
    """The marked all-gathers of parameters, in order."""
    return [node for node in graph.nodes if node.target is GATHER and node.meta.get(_MARK)]


def named_bucket(gather: FxNode) -> int | None:
    """The bucket of any size of the parameter of a marked all-gather; None: none."""
    found: int | None = gather.meta[_NAMED]
    return found


def named_reductions(backward: Graph, parameters: Mapping[int, int | None]) -> dict[FxNode, int]:
    """Of a backward graph, whose results are the gradients of the traced function's inputs in order, the sums of the
    gradients whose parameters are in a bucket of any size, with its number: in that of a block (below 0) those of
    shards, whose parameters are gathered as one."""
    found = dict[FxNode, int]()
    for number, node in enumerate(backward.output_node().args[0]):  # type: ignore[arg-type]
        named = parameters.get(number)
        while named is not None and isinstance(node, FxNode) and node.op == "call_function":
            if node.target is SCATTER or (node.target is REDUCE and named >= 0):
                found[node] = named
            elif not (is_move(node) or node.target is WAIT):
                break
            node = node.all_input_nodes[0]
    return found


def reductions_of(graph: Graph) -> dict[FxNode, int]:
    """The sums of gradients, which nothing reads but the graph's results: node -> number of such sums before it."""
    final = set[FxNode]()
    for node in reversed(graph.nodes):
        moves = is_move(node) or node.target in (WAIT, REDUCE, SCATTER)
        if node.op == "output" or (moves and node.users and all(user in final for user in node.users)):
            final.add(node)
    depth = dict[FxNode, int]()
    for node in graph.nodes:
        depth[node] = max((depth[i] for i in node.all_input_nodes if i in final), default=0)
        depth[node] += node in final and node.target in (REDUCE, SCATTER)
    return {node: depth[node] - 1 for node in graph.nodes if node in final and node.target in (REDUCE, SCATTER)}


def own_results(graph: Graph) -> None:
    """Give results that are views of a larger awaited tensor, of which the rest is not returned, memory of their own:
    a shard of a gradient would keep the whole."""
    sources: dict[FxNode, list[FxNode]] = {}
    for node in dict.fromkeys(graph.output_node().all_input_nodes):
        source = node
        while is_move(source) and source.target in VIEWS:
            source = source.all_input_nodes[0]
        if source.target is WAIT:
            sources.setdefault(source, []).append(node)
    for source, made in sources.items():
        if sum(node.meta["val"].numel() for node in made) < source.meta["val"].numel():
            for node in made:
                with graph.inserting_before(graph.output_node()):
                    copy = call(graph, aten.clone.default, node, memory_format=torch.contiguous_format)
                graph.output_node().replace_input_with(node, copy)


def read_by_moves(node: FxNode, follow: Callable[[FxNode], bool]) -> Iterator[FxNode]:
    """``node`` and the nodes that only move or await what it made, as far as ``follow`` goes."""
    yield node
    for user in node.users:
        if follow(user):
            yield from read_by_moves(user, follow)


def with_one_wait(graph: Graph) -> None:
    """Give each collective one `wait_tensor`, right behind it, which all others read. (Merging equal nodes leaves
    several; the partitioner may save what is not awaited yet, and await it in backward.)"""
    for node in list(graph.nodes):
        if node.target is WAIT and node.args[0].target not in STARTS:
            assert node.args[0].op == "placeholder", f"{node.args[0].target} is no collective that passes know"
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for start in [node for node in graph.nodes if node.target in STARTS]:
        users = list(start.users)
        with graph.inserting_after(start):
            wait = call(graph, WAIT, start)
        for user in users:
            if user.target is WAIT:
                user.replace_all_uses_with(wait)
                graph.erase_node(user)
            else:
                user.replace_input_with(start, wait)


def waited(start: FxNode) -> FxNode:
    """The one `wait_tensor` of a collective."""
    (wait,) = start.users
    assert wait.target is WAIT
    return wait


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> FxNode:
    """A new node, with its value's shape as AOTAutograd notes it."""
    node = graph.call_function(target, args, kwargs)
    known = torch.fx.map_arg((args, kwargs), lambda arg: arg.meta["val"])
    node.meta["val"] = target(*known[0], **known[1])
    return node
