"""Lookups of tables on the host: ids cross to its memory, and results to the device; or lookups in rows on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.fx import GraphModule
from torch.fx import Node as FxNode

from autoparallel.kernels.host_lookups import cross
from autoparallel.kernels.table_cache import cached_bags, cached_rows
from autoparallel.kernels.variants import vocabulary_bags, vocabulary_embedding
from autoparallel.ops.arguments import aten
from autoparallel.ops.embedding_bag import embedding_bag
from autoparallel.strategies.host_lookups import HOST


def look_up_on_host(program: GraphModule, ops: Collection[int], device: str) -> None:
    """Let the lookups of these decisions run on the host, where the tables are that they read; changes the program in
    place. A value that several of them read crosses once."""
    crossed = dict[FxNode, FxNode]()
    for node in list(program.graph.nodes):
        if node.op != "call_function" or node.meta.get("decision") not in ops:
            continue
        if not any(operand.meta["reads"] for operand in node.all_input_nodes):
            continue    # what leads to a lookup or follows it
        for operand in node.all_input_nodes:
            if operand.meta["reads"]:
                continue
            if operand not in crossed:
                with program.graph.inserting_before(node):
                    crossed[operand] = program.graph.call_function(cross, (operand, device, HOST))
                crossed[operand].meta = _meta(operand, node)
            node.replace_input_with(operand, crossed[operand])
        with program.graph.inserting_after(node):
            result = program.graph.call_function(cross, (node, HOST, device))
        node.replace_all_uses_with(result, delete_user_cb=lambda user, own=result: user is not own)
        result.meta = _meta(node, node)
    program.recompile()


#: By the function that looks up, that which does in a cache.
_IN_CACHE: Mapping[Any, Any] = {aten.embedding.default: cached_rows, vocabulary_embedding: cached_rows,
                                embedding_bag: cached_bags, vocabulary_bags: cached_bags}


def look_up_in_caches(program: GraphModule, decisions: Collection[int]) -> None:
    """Let the lookups of these decisions read the rows of their tables' caches; changes the program in place."""
    for node in program.graph.nodes:
        if node.op == "call_function" and node.meta.get("decision") in decisions and node.target in _IN_CACHE:
            node.target = _IN_CACHE[node.target]
    program.recompile()


def _meta(value: FxNode, lookup: FxNode) -> dict[str, object]:
    """What is known of a copy of ``value``, which is no step of its path."""
    kept = {name: value.meta[name] for name in ("layout", "global_meta", "val")}
    return {**kept, "decision": lookup.meta["decision"], "block": lookup.meta.get("block"), "reads": False,
            "of_parameter": False}


__all__ = ["look_up_in_caches", "look_up_on_host"]
