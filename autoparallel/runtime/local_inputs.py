"""This rank's shard of an input, which is a global tensor or a DTensor."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoparallel.errors import InputError
from autoparallel.layout import INVARIANT, Layout, to_torch
from autoparallel.runtime.initialise import local_shard


def local_input(value: Tensor, mesh: DeviceMesh, layout: Layout, device: torch.device) -> Tensor:
    """This rank's shard of an input in the layout that the program reads; differentiable.

    Raises InputError for an input on the meta device, or a DTensor of another mesh.
    """
    if value.is_meta:
        raise InputError("an input is on the meta device, and has no values to compute with: give real ones, "
                         "or plan without running: autoparallel.plan")
    if isinstance(value, DTensor):
        if value.device_mesh != mesh:
            raise InputError(f"an input lies on the mesh {value.device_mesh}, the model on {mesh}")
        return _redistributed(value, layout)
    value = value.to(device)
    if not value.requires_grad and all(p == INVARIANT for p in layout):
        return value
    if not value.requires_grad and all(p == INVARIANT or p.is_shard for p in layout):
        return local_shard(value, mesh, layout).contiguous()
    whole = to_torch((INVARIANT,) * len(layout))
    return _redistributed(DTensor.from_local(value, mesh, whole, run_check=False), layout)


_as_torchs = cache(to_torch)    # asked for each input at each call


def lies_as_read(value: DTensor, layout: Layout) -> bool:
    """Whether a program reads a DTensor's shard as it is, without communication in forward or backward."""
    return value.placements == _as_torchs(layout) and not value.requires_grad


def _redistributed(value: DTensor, layout: Layout) -> Tensor:
    if lies_as_read(value, layout):
        with torch.no_grad():  # to_local without an autograd node
            return value.to_local()
    return value.redistribute(placements=to_torch(layout)).to_local()


__all__ = ["lies_as_read", "local_input"]
