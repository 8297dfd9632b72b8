"""Lookups in a shard of a table's rows whose gradient is sparse: only of the rows that are looked up in this shard.

Rows of other ranks are zeros in the result, and have no entry in the gradient. (An entry of zeros, as a dense lookup's
mask would give, is a gradient to optimizers that keep moments of what they touch.) An id that the whole table has not
is torch's own error, on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autoparallel.ops.embedding_bag import embedding_bag


class _OwnRows(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor, start: int, rows: int, padding_idx: int
                ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.start, ctx.padding_idx = weight.shape, start, padding_idx
        own = own_ids(ids, start, weight.shape[0])
        found = torch.nn.functional.embedding(local_ids(ids, own, start, rows), weight)
        return found * own.unsqueeze(-1).to(found.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        own = own_ids(ids, ctx.start, ctx.shape[0]) & (ids != ctx.padding_idx)
        return _rows(ids[own] - ctx.start, gradient[own], ctx.shape), None, None, None, None


class _OwnBags(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None,
                offsets: torch.Tensor | None, mode: int, last: bool, padding_idx: int | None, start: int, rows: int
                ) -> torch.Tensor:
        own = own_ids(ids, start, weight.shape[0])
        if padding_idx is not None:
            own &= ids != padding_idx
        counted = own.to(weight.dtype) if weights is None else weights * own.to(weight.dtype)
        of_weights = weights is not None and weights.requires_grad
        ctx.save_for_backward(ids, own, counted, offsets, weight if of_weights else None)
        ctx.shape, ctx.start = weight.shape, start
        return embedding_bag(weight, local_ids(ids, own, start, rows), counted, offsets, mode, last, None)

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
                None, None, None, None, None, None)


def own_rows(weight: torch.Tensor, ids: torch.Tensor, start: int, rows: int, padding_idx: int) -> torch.Tensor:
    """The rows of the ids in the shard ``weight``, which begins at row ``start`` of the table's ``rows``; zeros for
    ids of other shards. Row ``padding_idx`` of the table gets no gradient. Returns [*ids, hidden]."""
    found: torch.Tensor = _OwnRows.apply(weight, ids, start, rows, padding_idx)
    return found


def own_bags(weight: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, offsets: torch.Tensor | None,
             mode: int, last: bool, padding_idx: int | None, start: int, rows: int) -> torch.Tensor:
    """As `own_rows`, of rows that are summed by bags, as `embedding_bag` does. Returns [bags, hidden]."""
    found: torch.Tensor = _OwnBags.apply(weight, ids, weights, offsets, mode, last, padding_idx, start, rows)
    return found


def own_ids(ids: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """Which ids are of a shard of ``length`` rows."""
    return (ids >= start) & (ids < start + length)


def local_ids(ids: torch.Tensor, own: torch.Tensor, start: int, rows: int) -> torch.Tensor:
    """The rows of the ids in the shard; 0 for those of other shards. Ids that the table has not, of ``rows`` rows,
    are out of the shard's range too, so that the lookup fails as that of the whole table."""
    return (ids - start).masked_fill(~own & (ids >= 0) & (ids < rows), 0)


def _rows(index: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return torch.sparse_coo_tensor(index.unsqueeze(0), values, shape, check_invariants=False)


def _bag_of_each(ids: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """The number of the bag that each id is in: its row, or found by where bags begin."""
    if offsets is None:
        return torch.arange(ids.shape[0], device=ids.device).unsqueeze(1).expand_as(ids)
    return torch.bucketize(torch.arange(ids.numel(), device=ids.device), offsets, right=True) - 1


__all__ = ["local_ids", "own_bags", "own_ids", "own_rows"]
