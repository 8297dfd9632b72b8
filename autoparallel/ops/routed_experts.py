"""A mixture of experts as one op; its body runs on rows sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule


@dataclass(frozen=True)
class Body:
    """The experts' computation on sorted rows: ``module(rows, experts, ends, *by_row, *weights)`` -> [rows, *width].

    ``experts``: the expert of each row; ``ends``: where each expert's rows end. Per row: ``flops``; ``saved_bytes``, of
    what autograd saves that is made inside; ``product_bytes``, of the results of its products.
    """

    module: GraphModule
    num_experts: int
    width: tuple[int, ...]
    dtype: torch.dtype
    flops: float
    saved_bytes: float
    product_bytes: float


#: Bodies by name, which graphs carry as the op's first argument; one per class of experts in the process.
_BODIES: dict[str, Body] = {}
_library = torch.library.Library("autoparallel", "DEF")
_library.define("routed_experts(str body, Tensor tokens, Tensor ids, Tensor[] by_row, Tensor[] weights, int first=0) "
                "-> Tensor")


def body_of(name: str) -> Body:
    """The body behind the op's first argument."""
    return _BODIES[name]


def _routed_experts(body: str, tokens: torch.Tensor, ids: torch.Tensor, by_row: list[torch.Tensor],
                    weights: list[torch.Tensor], first: int = 0) -> torch.Tensor:
    """Rows of all tokens through their experts -> [tokens * k, *width].

    ``ids`` [tokens * k]: the expert of each row; ``by_row``: tensors with one row per id; ``weights``: of the experts
    from ``first`` on. Rows of other experts are zero.
    """
    known, count = _BODIES[body], weights[0].shape[0]
    if tokens.is_meta:
        return tokens.new_empty((ids.shape[0], *known.width), dtype=known.dtype)
    local, some = ids - first, count < known.num_experts
    if some:
        local = torch.where((local >= 0) & (local < count), local, count)
    experts, order = torch.sort(local)
    ends = torch.searchsorted(experts, torch.arange(count, device=ids.device), right=True).to(torch.int32)
    if some:  # rows of other experts are not computed; their number depends on the data
        own = int(ends[-1])
        experts, order = experts[:own], order[:own]
    rows = tokens[order // max(1, ids.shape[0] // max(1, tokens.shape[0]))]
    made = known.module(rows, experts, ends, *(value[order] for value in by_row), *weights)
    return made.new_zeros((ids.shape[0], *known.width)).index_put((order,), made)  # (`index_copy` would save ``made``)


_library.impl("routed_experts", _routed_experts, "CompositeImplicitAutograd")
routed_experts = torch.ops.autoparallel.routed_experts.default
