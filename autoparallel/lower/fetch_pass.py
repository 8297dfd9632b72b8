"""Parameters on the host: each is fetched to the device before its first reader, as a step on its path."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from autoparallel.kernels.fetching import fetch
from autoparallel.layout.shapes import largest_local_shape


@dataclass(frozen=True)
class Fetch:
    """The step from the host's memory to the device's; layouts stay."""

    forward: str = "fetch"
    backward: str = "put"


def fetch_parameters(program: GraphModule, fetched: Collection[int], mesh_shape: Sequence[int], device: str) -> None:
    """Insert a `fetch` behind each parameter of an emitted program whose decision is ``fetched``; changes the program
    in place."""
    nodes = list(program.graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    last = next(node for node in reversed(nodes) if node.op == "call_function")
    for node in nodes:
        if node.op == "placeholder" and node.meta["reads"] and node.users and node.meta["decision"] in fetched:
            first = min(node.users, key=place.__getitem__)
            with program.graph.inserting_before(first):
                made = program.graph.call_function(fetch, (node, "host", device))
            node.replace_all_uses_with(made, delete_user_cb=lambda user, own=made: user is not own)
            made.meta = {**node.meta, **_read_by(first if first.op == "call_function" else last)}
            meta, layout = node.meta["global_meta"], node.meta["layout"]
            elements = math.prod(largest_local_shape(meta.shape, layout, mesh_shape))
            made.meta.update(step=Fetch(), num_bytes=elements * meta.dtype.itemsize,
                             val=torch.empty_like(node.meta["val"]))
    program.recompile()


def _read_by(reader: FxNode) -> dict[str, object]:
    return {"decision": reader.meta["decision"], "block": reader.meta.get("block")}


__all__ = ["Fetch", "fetch_parameters"]
