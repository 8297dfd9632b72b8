"""Ops of which torch gives a wrong result or gradient for DTensors, run so that they are right.

- ``<<`` and ``>>`` return their input: DTensor takes every op whose name ends in ``_`` for an in-place op, and these
  are ``__lshift__`` and ``__rshift__``.
- ``cumsum``, ``cumprod`` and ``logcumsumexp`` along a dim counted from the end begin anew in each shard.
- Reductions over ``dim=[]``, which means all dims, reduce none of a DTensor: ``value.sum([], keepdim=True)`` is that of
  the first shard, and gradients of ``amax()``, ``amin()`` and of the largest norm, which ask for such a sum, are NaN.
- ``logsumexp`` forgets that it keeps dims, and takes another for the sharded one.
- The determinant of a matrix that is gathered has the gradient of the transposed one, if the DTensor is not contiguous
  (``torch.linalg.det(weight[:, :n])``) and what is gathered is: of a contiguous matrix, torch factors the transposed,
  and backward asks the DTensor whether it was so.
- Convolutions are of each shard alone, also of shards of pixels, and add the bias to each summand; gradients of their
  weights count the whole batch once for each rank that has it.
- ``renorm``, ``renorm_`` and ``torch.cdist`` have no rule for DTensors.
- The gradient of ``select`` along a dim counted from the end takes the next dim for the sharded one.
- The gradient of ``adaptive_avg_pool2d`` of an image without a batch takes its rows for channels.
- Weight norm along sharded rows is that of a shard.
- ``any`` of shards is a summand of each: ``(x > 0).any() * 1.0`` is the number of ranks of which one is positive.
- The answers that anomaly detection and torch.distributions ask for have no rule for DTensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from autoparallel.runtime.dtensors import Handler, as_before, is_watched, replicated, set_handler

aten = torch.ops.aten
_SHIFTS = {aten.__lshift__.Scalar: aten.bitwise_left_shift.Tensor_Scalar,
           aten.__lshift__.Tensor: aten.bitwise_left_shift.Tensor,
           aten.__rshift__.Scalar: aten.bitwise_right_shift.Tensor_Scalar,
           aten.__rshift__.Tensor: aten.bitwise_right_shift.Tensor}
_SCANS = (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default)
_REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.nansum.default,
               aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction,
               aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.count_nonzero.dim_IntList)
_DETERMINANTS = (aten._linalg_det.default, aten._linalg_slogdet.default)
_CONVOLUTION, _CONVOLUTION_BACKWARD = aten.convolution.default, aten.convolution_backward.default
_WEIGHT_NORM, _WEIGHT_NORM_BACKWARD = (aten._weight_norm_interface.default,
                                       aten._weight_norm_interface_backward.default)
_DISTANCES = (aten._cdist_forward.default, aten._euclidean_dist.default)
_ANSWERS = {aten._is_any_true.default: torch.any, aten._is_all_true.default: torch.all}
_ANY = (aten.any.default, aten.any.dim, aten.any.dims)
_Placements = Sequence[Placement]


@cache
def correct_ops() -> None:
    """Run these so, from now on, for DTensors on the meshes of parallel modules."""
    for op, run in {**dict.fromkeys(_SHIFTS, _shift), **dict.fromkeys(_SCANS, _scan),
                    **dict.fromkeys(_REDUCTIONS, _reduction), **dict.fromkeys(_DETERMINANTS, _determinant),
                    aten.logsumexp.default: _logsumexp, **dict.fromkeys(_ANSWERS, _answer), **dict.fromkeys(_ANY, _any),
                    _CONVOLUTION: _convolution, _CONVOLUTION_BACKWARD: _convolution_backward,
                    aten.select_backward.default: _select_backward,
                    _WEIGHT_NORM: _weight_norm, _WEIGHT_NORM_BACKWARD: _weight_norm,
                    **dict.fromkeys(_DISTANCES, _distances), aten._cdist_backward.default: _distances_backward,
                    aten._adaptive_avg_pool2d_backward.default: _pooling_backward,
                    aten.renorm.default: _renorm, aten.renorm_.default: _renorm_in_place}.items():
        before: list[Handler | None] = []
        before.append(set_handler(op, partial(_run, before, run)))


def _run(before: list[Handler | None], run: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As torch does where not all tensors are DTensors on the mesh of a parallel module."""
    if not all(is_watched(value) for value in args if isinstance(value, Tensor)):
        return as_before(before, op, args, kwargs)
    return run(partial(as_before, before, op), op, *args, **kwargs)


def _shift(_: Any, op: Any, *args: Any) -> Any:
    return _SHIFTS[op](*args)


def _scan(as_torch: Any, _: Any, value: DTensor, dim: int, **kwargs: Any) -> Any:
    return as_torch((value, dim % max(value.dim(), 1)), kwargs)


def _reduction(as_torch: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    at = [argument.name for argument in op._schema.arguments].index("dim")
    if at < len(args) and isinstance(args[at], (list, tuple)) and not args[at]:
        args = (*args[:at], list(range(args[0].dim())), *args[at + 1 :])
    return as_torch(args, kwargs)


def _answer(_: Any, op: Any, value: DTensor) -> Any:
    return replicated(_ANSWERS[op](value))


def _any(as_torch: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
    """Of the ranks' answers the largest, which no arithmetic takes for a summand."""
    made: DTensor = as_torch(args, kwargs)
    placements = [Partial("max") if p.is_partial() else p for p in made.placements]
    return _dtensor(made._local_tensor, made, placements, made.shape)


def _logsumexp(as_torch: Any, _: Any, value: DTensor, dims: Sequence[int], keepdim: bool = False) -> Any:
    dims = dims or range(value.dim()) if keepdim else dims    # of no dim torch takes all, but only where they are kept
    made = as_torch((value, list(dims)), {})
    for dim in sorted(dim % max(value.dim(), 1) for dim in dims) if keepdim and value.dim() else ():
        made = made.unsqueeze(dim)
    return made


def _determinant(as_torch: Any, _: Any, matrix: DTensor) -> Any:
    contiguous, matrix = matrix.is_contiguous(), replicated(matrix)
    local = matrix._local_tensor
    if local.is_contiguous() != contiguous:
        local = local.contiguous() if contiguous else local.mT.contiguous().mT
        matrix = DTensor.from_local(local, matrix.device_mesh, matrix.placements, run_check=False)
    return as_torch((matrix,), {})


def _convolution(_: Any, op: Any, batch: DTensor, weight: DTensor, bias: DTensor | None, *options: Any) -> Any:
    """Of this rank's samples, with the whole of the weight."""
    rows, whole = _kept(batch, 0), _kept(batch, None)
    made = op(_local(batch, rows), _local(weight, whole), _local(bias, whole), *options)
    return _dtensor(made, batch, rows, (len(batch), *made.shape[1:]))


def _convolution_backward(_: Any, op: Any, gradient: DTensor, batch: DTensor, weight: DTensor,
                          bias_shape: Sequence[int] | None, *options: Any) -> Any:
    """Gradients of the batch by rows, and of weight and bias as summands of the ranks."""
    rows, whole = _kept(batch, 0), _kept(batch, None)
    made = op(_local(gradient, rows), _local(batch, rows), _local(weight, whole), bias_shape, *options)
    sums = [Partial() if p.is_shard() else p for p in rows]
    laid = ((rows, batch.shape), (sums, weight.shape), (sums, bias_shape or ()))
    return tuple(value if value is None else _dtensor(value, batch, placements, shape)
                 for value, (placements, shape) in zip(made, laid, strict=True))


def _select_backward(as_torch: Any, _: Any, gradient: DTensor, sizes: Sequence[int], dim: int, index: int) -> Any:
    return as_torch((gradient, sizes, dim % len(sizes), index), {})


def _pooling_backward(as_torch: Any, _: Any, gradient: DTensor, images: DTensor) -> Any:
    batched = images.dim() == 4
    return as_torch((gradient, images) if batched else (replicated(gradient), replicated(images)), {})


def _weight_norm(_: Any, op: Any, *args: Any) -> Any:
    """Of rows that are whole. Both results are like two arguments, in backward like those after the gradient."""
    *tensors, dim = args if isinstance(args[-1], int) else (*args, 0)
    likes = tensors[1:3] if op is _WEIGHT_NORM_BACKWARD else tensors
    rows = _kept(likes[0], dim % likes[0].dim())
    made = op(*(_local(value, rows) for value in tensors), dim)
    return tuple(_dtensor(value, like, rows, like.shape) for value, like in zip(made, likes, strict=True))


def _distances(_: Any, op: Any, rows: DTensor, others: DTensor, *options: Any) -> Any:
    """Of this rank's rows to all others of their sample."""
    ours, theirs = _by_rows(rows, others)
    made = op(_local(rows, ours), _local(others, theirs), *options)
    return _dtensor(made, rows, ours, (*_samples(rows, others), rows.shape[-2], others.shape[-2]))


def _distances_backward(_: Any, op: Any, gradient: DTensor, rows: DTensor, others: DTensor, order: float,
                        distances: DTensor) -> Any:
    ours, theirs = _by_rows(rows, others)
    made = op(_local(gradient, ours), _local(rows, ours), _local(others, theirs), order, _local(distances, ours))
    return _dtensor(made, rows, ours, (*_samples(rows, others), *rows.shape[-2:]))


def _samples(rows: DTensor, others: DTensor) -> Sequence[int]:
    return torch.broadcast_shapes(rows.shape[:-2], others.shape[:-2])


def _by_rows(rows: DTensor, others: DTensor) -> tuple[_Placements, _Placements]:
    """Rows sharded as they are, others along the same samples; both whole where samples are not the same."""
    same_samples, last = rows.shape[:-2] == others.shape[:-2], rows.dim() - 2
    ours = [p if same_samples and any(p == Shard(dim) for dim in range(last + 1)) else Replicate()
            for p in rows.placements]
    return ours, [Replicate() if p == Shard(last) else p for p in ours]


def _renorm(_: Any, __: Any, value: DTensor, order: float, dim: int, largest: float) -> Any:
    """As torch's kernel: a slice along ``dim`` that is longer is divided by its norm."""
    others = [d for d in range(value.dim()) if d != dim % value.dim()]
    norms = replicated(torch.linalg.vector_norm(value, order, others, keepdim=True))
    return value * torch.where(norms > largest, largest / (norms + 1e-7), torch.ones_like(norms))


def _renorm_in_place(as_torch: Any, op: Any, value: DTensor, *options: Any) -> Any:
    return value.copy_(_renorm(as_torch, op, value, *options))


def _dtensor(local: Tensor, like: DTensor, placements: _Placements, shape: Sequence[int]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, like.device_mesh, placements, run_check=False, shape=torch.Size(shape),
                              stride=stride)


def _kept(like: DTensor, dim: int | None) -> _Placements:
    """Sharded where ``like`` is, along ``dim``, and whole along other axes."""
    return [p if dim is not None and p == Shard(dim) else Replicate() for p in like.placements]


def _local(value: DTensor | None, placements: _Placements) -> Tensor | None:
    return None if value is None else value.redistribute(placements=placements)._local_tensor.contiguous()


__all__ = ["correct_ops"]
