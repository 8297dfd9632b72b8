"""A mixture of experts as one op, whose body runs on rows sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule


@dataclass(frozen=True)
class Body:
    """What happens to sorted rows: ``module(rows, experts, ends, *by_row, *weights)``, where ``experts`` has each row's
    expert and ``ends`` where each expert's rows end. Results have sizes ``width`` per row; bytes and FLOP are per
    row."""

    module: GraphModule
    num_experts: int
    width: tuple[int, ...]
    dtype: torch.dtype
    flops: float
    made_bytes: float


_BODIES: dict[str, Body] = {}
_library = torch.library.Library("autoparallel", "DEF")
_library.define("routed_experts(str body, Tensor tokens, Tensor ids, Tensor[] by_row, Tensor[] weights, int first=0) "
                "-> Tensor")


def body_of(name: str) -> Body:
    return _BODIES[name]


def _routed_experts(body: str, tokens: torch.Tensor, ids: torch.Tensor, by_row: list[torch.Tensor],
                    weights: list[torch.Tensor], first: int = 0) -> torch.Tensor:
    """``ids``: the expert of each row, [tokens x rows per token]; the weights are those of experts ``first`` on."""
    known, count = _BODIES[body], weights[0].shape[0]
    if tokens.is_meta:
        return tokens.new_empty((ids.shape[0], *known.width), dtype=known.dtype)
    place, some = ids - first, count < known.num_experts
    if some:
        place = torch.where((place >= 0) & (place < count), place, count)
    experts, order = torch.sort(place)
    ends = torch.searchsorted(experts, torch.arange(count, device=ids.device), right=True).to(torch.int32)
    if some:  # how many rows there are depends on the data, and the others' are not computed
        own = int(ends[-1])
        experts, order = experts[:own], order[:own]
    rows = tokens[order // max(1, ids.shape[0] // max(1, tokens.shape[0]))]
    made = known.module(rows, experts, ends, *(value[order] for value in by_row), *weights)
    return made.new_zeros((ids.shape[0], *known.width)).index_copy(0, order, made)


_library.impl("routed_experts", _routed_experts, "CompositeImplicitAutograd")
routed_experts = torch.ops.autoparallel.routed_experts.default
