"""Arithmetic of plain scalars that have a gradient with DTensors: ``loss + 0.1 * weight.norm()``.

torch takes a plain scalar for one that all ranks have, and then gives it a DTensor as its gradient, on which the plain
tensors that it was computed from fail in backward. Here it becomes a DTensor by an op with a gradient, which is plain.

In-place ops on lists (``torch._foreach_*``) with DTensors and plain tensors mixed run on each kind apart: averages of
parameters and buffers (``AveragedModel(parallel, use_buffers=True)``). `_foreach_norm` of a mixed list returns plain
norms: `clip_grad_norm_` of the gradients of a parallel module and of a plain head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from autoparallel.runtime.dtensors import Handler, as_before, is_watched, set_handler

_OPERATORS = ("add", "sub", "mul", "truediv", "pow")
_LISTS = ("add", "sub", "mul", "div", "lerp", "copy", "addcmul", "addcdiv", "zero")


@cache
def mix_scalars() -> None:
    """Compute so, from now on, with DTensors on the meshes of parallel modules."""
    for operator in _OPERATORS:
        for name in (f"__{operator}__", f"__r{operator}__", f"__i{operator}__"):
            setattr(DTensor, name, _mixing(getattr(DTensor, name)))


@cache
def mix_lists() -> None:
    """From now on, let these ops take lists in which DTensors of parallel modules and plain tensors are mixed."""
    packets = [getattr(torch.ops.aten, f"_foreach_{name}_") for name in _LISTS]
    for op in chain.from_iterable((getattr(packet, name) for name in packet.overloads()) for packet in packets):
        before: list[Handler | None] = []
        before.append(set_handler(op, partial(_in_lists, before)))
    norms: list[Handler | None] = []
    norms.append(set_handler(torch.ops.aten._foreach_norm.Scalar, partial(_norms, norms)))


def _norms(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Plain norms of a mixed list, so that a norm of these can be taken. (Those of DTensors alone are DTensors.)"""
    values = args[0]
    if all(isinstance(value, DTensor) for value in values) or not any(map(is_watched, values)):
        return as_before(before, op, args, kwargs)
    parts = {kind: iter(op([value for value in values if isinstance(value, DTensor) == kind], *args[1:], **kwargs))
             for kind in (True, False)}
    found = (next(parts[isinstance(value, DTensor)]) for value in values)
    return [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in found]


def _in_lists(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An in-place op on mixed lists, on the DTensors and on the plain tensors apart."""
    lists = [each for each in args if isinstance(each, (list, tuple))]
    kinds = [[isinstance(value, DTensor) for value in each] for each in lists if isinstance(each[0], torch.Tensor)]
    if op is torch.ops.aten._foreach_copy_.default and any(map(is_watched, lists[0])):    # torch has no rule of it
        for to, value in zip(args[0], args[1], strict=True):
            to.copy_(value)
        return
    if len({*kinds[0]}) == 1 or any(kind != kinds[0] for kind in kinds) or not any(map(is_watched, lists[0])):
        as_before(before, op, args, kwargs)
        return
    for sharded in (True, False):
        op(*([value for value, kind in zip(each, kinds[0], strict=True) if kind == sharded]
             if isinstance(each, (list, tuple)) else each for each in args), **kwargs)


def _mixing(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def mixed(tensor: DTensor, other: Any) -> Any:
        if isinstance(other, torch.Tensor) and other.requires_grad and not other.dim() and (
                not isinstance(other, DTensor) and is_watched(tensor)):
            mesh = tensor.device_mesh
            other = DTensor.from_local(other, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return method(tensor, other)

    return mixed


__all__ = ["mix_lists", "mix_scalars"]
