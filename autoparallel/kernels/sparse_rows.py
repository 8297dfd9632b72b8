"""Lookups in a shard of a table's rows whose gradient is sparse: only of the rows that are looked up in this shard.

Rows of other ranks are zeros in the result, and have no entry in the gradient. (An entry of zeros, as a dense lookup's
mask would give, is a gradient to optimizers that keep moments of what they touch.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autoparallel.ops.embedding_bag import embedding_bag


class _OwnRows(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor, start: int, padding_idx: int) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.start, ctx.padding_idx = weight.shape, start, padding_idx
        own = _own(ids, start, weight.shape[0])
        rows = torch.nn.functional.embedding((ids - start).masked_fill(~own, 0), weight)
        return rows * own.unsqueeze(-1).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        own = _own(ids, ctx.start, ctx.shape[0]) & (ids != ctx.padding_idx)
        return _rows(ids[own] - ctx.start, gradient[own], ctx.shape), None, None, None


class _OwnBags(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None,
                offsets: torch.Tensor | None, mode: int, last: bool, padding_idx: int | None, start: int
                ) -> torch.Tensor:
        own = _own(ids, start, weight.shape[0])
        if padding_idx is not None:
            own &= ids != padding_idx
        counted = own.to(weight.dtype) if weights is None else weights * own.to(weight.dtype)
        of_weights = weights is not None and weights.requires_grad
        ctx.save_for_backward(ids, own, counted, offsets, weight if of_weights else None)
        ctx.shape, ctx.start = weight.shape, start
        return embedding_bag(weight, (ids - start).masked_fill(~own, 0), counted, offsets, mode, last, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ids, own, counted, offsets, weight = ctx.saved_tensors
        index, entries = ids[own] - ctx.start, gradient[_bag_of_each(ids, offsets)[own]]
        of_weights = None
        if weight is not None:
            of_weights = torch.zeros_like(counted)
            of_weights[own] = (entries * weight[index]).sum(-1)
        values = entries * counted[own].unsqueeze(-1)
        return (_rows(index, values, ctx.shape) if ctx.needs_input_grad[0] else None, None, of_weights,
                None, None, None, None, None)


def own_rows(weight: torch.Tensor, ids: torch.Tensor, start: int, padding_idx: int) -> torch.Tensor:
    """The rows of the ids in the shard ``weight``, [rows, hidden], which begins at row ``start`` of the table; zeros
    for other ids. Row ``padding_idx`` of the table gets no gradient. Returns [*ids, hidden]."""
    found: torch.Tensor = _OwnRows.apply(weight, ids, start, padding_idx)
    return found


def own_bags(weight: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, offsets: torch.Tensor | None,
             mode: int, last: bool, padding_idx: int | None, start: int) -> torch.Tensor:
    """As `own_rows`, of rows that are summed by bags, as `embedding_bag` does. Returns [bags, hidden]."""
    found: torch.Tensor = _OwnBags.apply(weight, ids, weights, offsets, mode, last, padding_idx, start)
    return found


def _own(ids: torch.Tensor, start: int, length: int) -> torch.Tensor:
    return (ids >= start) & (ids < start + length)


def _rows(index: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return torch.sparse_coo_tensor(index.unsqueeze(0), values, shape, check_invariants=False)


def _bag_of_each(ids: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """The number of the bag that each id is in: its row, or found by where bags begin."""
    if offsets is None:
        return torch.arange(ids.shape[0], device=ids.device).unsqueeze(1).expand_as(ids)
    return torch.bucketize(torch.arange(ids.numel(), device=ids.device), offsets, right=True) - 1


__all__ = ["own_bags", "own_rows"]
