"""The norm of all gradients of a model on a mesh, and scaling by it: one pass over local shards, one collective."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoparallel.errors import InputError, shown
from autoparallel.kernels.groups import MeshPosition
from autoparallel.runtime.shared import Ranks

#: Of a norm's bound and exponent; beyond it is infinity only.
MOST = 1e30
_LOW = (torch.float16, torch.bfloat16)


def check_arguments(max_norm: float, norm_type: float) -> None:
    """Raises InputError for values that are no norms."""
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not isinstance(value, Real) or not (value > 0 or (value == 0 and name == "max_norm")) \
                or MOST < value < math.inf:
            raise InputError(f"{name} is {shown(value)}: give a number above 0, of at most {MOST:g}")


@torch.no_grad()
def clip_gradients(parameters: Iterable[tuple[str, nn.Parameter]], shared: Mapping[str, Ranks], position: MeshPosition,
                   device: torch.device, max_norm: float, norm_type: float) -> Tensor:
    """Scale all gradients so that their total norm is at most ``max_norm``; returns the norm before scaling, in
    float32, or float64 if a gradient is.

    ``shared``: the pipeline ranks of parameters that several of them have. All ranks of the mesh call this.
    """
    gradients = [(name, _gradient(p)) for name, p in parameters if p.grad is not None]
    here = position.pipeline_rank
    counted = [_local(g) for name, g in gradients if shared.get(name, (here,))[0] == here and _counts_here(g, position)]
    infinite = norm_type == float("inf")
    norms = _norms(counted, norm_type, device)
    total = (norms.amax() if norms.numel() else norms.sum()) if infinite else (norms**norm_type).sum()
    is_double = any(g.dtype == torch.float64 for _, g in gradients)
    both = torch.stack([total, torch.full_like(total, is_double)])
    _reduce(both, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, position.whole)
    total = both[0] if infinite else both[0] ** (1 / norm_type)
    _scale([_local(g) for _, g in gradients], torch.clamp(max_norm / (total + 1e-6), max=1.0))
    is_double = is_double or (not gradients and bool(both[1]))      # a pipeline's rank may have no gradient itself
    return total if is_double else total.float()


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter. A partial one, which a user has set, is summed first."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        assert isinstance(parameter, DTensor)
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    elif gradient.is_sparse and not gradient.is_coalesced():    # of several backward calls
        gradient = parameter.grad = gradient.coalesce()
    return gradient


def _local(gradient: Tensor) -> Tensor:
    """The local shard, which shares its memory; of a sparse one the entries, one for each row."""
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local._values() if local.is_sparse else local


def _counts_here(gradient: Tensor, position: MeshPosition) -> bool:
    """Whether this rank counts its shard: the first of the ranks that have the same shard does."""
    if not isinstance(gradient, DTensor):
        return not any(position.coordinate)
    return all(not p.is_replicate() or at == 0 for p, at in zip(gradient.placements, position.coordinate, strict=True))


def _norms(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of each tensor, in float64 on ``device``; of gradients in host memory taken there."""
    low = [g for g in gradients if g.dtype in _LOW and g.numel()]
    high = [g for g in gradients if g.dtype not in _LOW and g.numel()]
    found = [*(torch._foreach_norm(low, norm_type, dtype=torch.float32) if low else ()),
             *(torch._foreach_norm(high, norm_type) if high else ())]
    places = dict.fromkeys(norm.device for norm in found)
    stacked = [torch.stack([norm.double() for norm in found if norm.device == place]) for place in places]
    return torch.cat([torch.zeros(0, dtype=torch.float64, device=device), *(part.to(device) for part in stacked)])


def _reduce(total: Tensor, op: dist.ReduceOp.RedOpType, mesh: DeviceMesh) -> None:
    """Reduce over all ranks of the mesh, in place: one collective if the mesh has all ranks, else one per axis."""
    if mesh.size() == dist.get_world_size():
        if mesh.size() > 1:
            dist.all_reduce(total, op)
        return
    for axis in range(mesh.ndim):
        dist.all_reduce(total, op, group=mesh.get_group(axis))


def _scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place. On a GPU without waiting for the factor, but for gradients in host memory."""
    here = [g for g in gradients if g.device.type == "cpu"]
    there = [g for g in gradients if g.device.type != "cpu"]
    for dtype in {g.dtype for g in there}:
        as_exact = factor.to(torch.promote_types(dtype, torch.float32))
        torch._foreach_mul_([g for g in there if g.dtype == dtype], as_exact)
    if here and (number := float(factor)) != 1.0:
        torch._foreach_mul_(here, number)


__all__ = ["check_arguments", "clip_gradients"]
