"""Softmax, log-softmax, log-sum-exp, and max, min, argmax, argmin along a cut dim: a few numbers per row are exchanged.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autoparallel.kernels import groups
from autoparallel.kernels.collectives import all_gather_tensor, all_reduce_tensor, redistribute
from autoparallel.ops.arguments import arguments

Tensor = torch.Tensor
aten = torch.ops.aten
LOGARITHMS = (aten.log_softmax.int, aten.logsumexp.default)
LEAST = (aten.argmin.default, aten.min.dim)


def softmax_of_shards(*args: Any, op: Any, axes: tuple[str, ...], dims: tuple[int, ...],
                      sizes: tuple[tuple[int, int], ...], **kwargs: Any) -> Tensor:
    """softmax, log_softmax or logsumexp ``op`` along cut dims: dim ``dims[i]`` is cut over axis ``axes[i]``. The result
    is sharded like the input; that of logsumexp is the whole value."""
    given = arguments(op, args, kwargs)
    x: Tensor = given["self"]
    dtype = given.get("dtype") or x.dtype
    along = [given["dim"]] if isinstance(given["dim"], int) else list(given["dim"])
    wide = x.to(dtype).to(torch.promote_types(dtype, torch.float32))
    summed = op is aten.logsumexp.default
    with torch.no_grad():
        top = wide.amax(along, keepdim=True)
        for name in axes:
            top = all_reduce_tensor(top, groups.current(name), "max")
        top = torch.where(top.isinf(), torch.zeros_like(top), top) if summed else top
    exponentials = torch.exp(wide - top)
    total = exponentials.sum(along, keepdim=True)
    for name in axes:
        total = redistribute(total, name, "P", "I" if summed else "R")
    if summed:
        made = torch.log(total) + top
        return (made if given["keepdim"] else made.squeeze(along)).to(x.dtype)
    made = wide - top - torch.log(total) if op in LOGARITHMS else exponentials / total
    return made.to(dtype)


def places_of_shards(*args: Any, op: Any, axes: tuple[str, ...], dims: tuple[int, ...],
                     sizes: tuple[tuple[int, int], ...], start: int, **kwargs: Any) -> Any:
    """argmax, argmin, or max and min with indices, along the cut dim ``dims[0]`` (argmax without a dim: over all).

    ``start``: global offset of the rank's shard; ``sizes[0][0]``: global length. Indices are global; of equal values
    the first counts, as in one process.
    """
    given = arguments(op, args, kwargs)
    x: Tensor = given["self"]
    dim, least = dims[0], op in LEAST
    with torch.no_grad():
        if given["dim"] is None:
            value, index = _in_order(x, dim, sizes[0][0], start, least)
        else:
            index = _index(x, dim, least)
            value, index = x.gather(dim, index), index + start
        for name in axes:
            axis = groups.current(name)
            counts = (1,) * axis.size
            values, indices = (all_gather_tensor(t.unsqueeze(0), axis, 0, counts) for t in (value, index))
            value = values.gather(0, _index(values, 0, least))
            is_best = (values == value) | (values.isnan() & value.isnan())
            index = torch.where(is_best, indices, torch.iinfo(indices.dtype).max).amin(0)
            value = value.squeeze(0)
    if given["dim"] is None:
        return index.reshape((1,) * x.dim() if given["keepdim"] else ())
    if op in (aten.max.dim, aten.min.dim):
        own = (index >= start) & (index < start + x.shape[dim])
        value = x.gather(dim, torch.where(own, index - start, 0)).masked_fill(~own, 0)
        for name in axes:
            value = redistribute(value, name, "P", "I")
        return (value, index) if given["keepdim"] else (value.squeeze(dim), index.squeeze(dim))
    return index if given["keepdim"] else index.squeeze(dim)


def _index(x: Tensor, dim: int, least: bool) -> Tensor:
    return x.argmin(dim, keepdim=True) if least else x.argmax(dim, keepdim=True)


def _in_order(x: Tensor, dim: int, length: int, start: int, least: bool) -> tuple[Tensor, Tensor]:
    """The best value of a shard and its index in the flattened whole tensor, whose dim ``dim`` has ``length``."""
    flat = x.flatten()
    best = _index(flat, 0, least)
    inner = math.prod(x.shape[dim + 1:])
    row, rest = best // inner, best % inner
    outer, own = row // x.shape[dim], row % x.shape[dim]
    return flat.gather(0, best), (outer * length + own + start) * inner + rest


__all__ = ["places_of_shards", "softmax_of_shards"]
