"""Regions of torch.no_grad and torch.autocast, which a trace has as graphs of their own, written out in the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx.node import map_arg

from autoparallel.capture.passes.autocast import refuse_elsewhere
from autoparallel.capture.passes.editing import Node, use_results


def _complete_users(graph: Graph) -> None:
    """Restore the users of values that a region of ``torch.no_grad`` reads: torch.export leaves them out."""
    for node in graph.nodes:
        for read in node.all_input_nodes:
            read.users.setdefault(node)


def inline_modes(gm: GraphModule, **inherited: Any) -> None:
    """Inline them, marking their ops (``no_grad``, ``autocast``: the low precision); all others are marked as
    ``inherited`` says."""
    graph = gm.graph
    _complete_users(graph)
    for node in list(graph.nodes):
        node.meta.update({k: v for k, v in inherited.items() if k not in node.meta})
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            enabled, body, *operands = node.args
            marks = {**inherited, "no_grad": not enabled}
        elif node.target is torch.ops.higher_order.wrap_with_autocast:
            device_type, dtype, enabled, _, body, *operands = node.args
            if enabled:
                refuse_elsewhere(device_type, [n.meta["val"] for n in operands if "val" in n.meta])
            marks = {**inherited, "autocast": (dtype or torch.get_autocast_dtype(device_type)) if enabled else None}
        else:
            continue
        inner: GraphModule = getattr(gm, body.target)
        inline_modes(inner, **marks)
        env: dict[Node, Node] = dict(
            zip((n for n in inner.graph.nodes if n.op == "placeholder"), operands, strict=True)
        )
        results: Any = None
        with graph.inserting_before(node):
            for n in inner.graph.nodes:
                if n.op == "output":
                    results = map_arg(n.args[0], env.__getitem__)
                elif n.op != "placeholder":
                    env[n] = graph.node_copy(n, env.__getitem__)
                    env[n].meta = dict(n.meta)
        use_results(node, results)
