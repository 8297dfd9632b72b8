"""Arithmetic of plain scalars that have a gradient with DTensors: ``loss + 0.1 * weight.norm()``.

torch takes a plain scalar for one that all ranks have, and then gives it a DTensor as its gradient, on which the plain
tensors that it was computed from fail in backward. Here it becomes a DTensor by an op with a gradient, which is plain.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from autoparallel.runtime.dtensors import is_watched

_OPERATORS = ("add", "sub", "mul", "truediv", "pow")


@cache
def mix_scalars() -> None:
    """Compute so, from now on, with DTensors on the meshes of parallel modules."""
    for operator in _OPERATORS:
        for name in (f"__{operator}__", f"__r{operator}__", f"__i{operator}__"):
            setattr(DTensor, name, _mixing(getattr(DTensor, name)))


def _mixing(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def mixed(tensor: DTensor, other: Any) -> Any:
        if isinstance(other, torch.Tensor) and other.requires_grad and not other.dim() and (
                not isinstance(other, DTensor) and is_watched(tensor)):
            mesh = tensor.device_mesh
            other = DTensor.from_local(other, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return method(tensor, other)

    return mixed


__all__ = ["mix_scalars"]
