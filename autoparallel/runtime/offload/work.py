"""Shards of parameters and gradients where an offloaded optimizer steps them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from autoparallel.kernels import host_copies
from autoparallel.runtime.offload.tiles import Region


class Work:
    """The parameter and gradient of a region where they are stepped: views of the shard, or copies, on the host if the
    region is stepped there and the shard is not."""

    def __init__(self, region: Region, local: Tensor, gradient: Tensor | None, on_host: bool) -> None:
        self.region, self._local, self._on_host = region, local, on_host
        self.parameter = self._taken(local)
        if gradient is not None:
            self.parameter.grad = self._taken(gradient)

    def _taken(self, value: Tensor) -> Tensor:
        flat = value.detach().reshape(-1)[self.region.start : self.region.stop]
        if self._moves(value):
            return host_copies.begin([flat], host_copies.HOST).ready()[0]
        return flat if value.is_contiguous() else flat.clone()

    def _moves(self, value: Tensor) -> bool:
        return self._on_host and value.device.type != "cpu"

    def put(self) -> None:
        """Write a copied parameter back to the shard."""
        local = self._local.detach()
        if self.parameter.grad is None or not (self._moves(local) or not local.is_contiguous()):
            return
        flat = local.reshape(-1)
        region = flat[self.region.start : self.region.stop]
        copies = host_copies.begin([self.parameter], region.device, into=[region])
        copies.ready()
        if not local.is_contiguous():
            local.copy_(flat.view(local.shape))
        copies.wait()


def local_of(value: Tensor) -> Tensor:
    """This rank's shard."""
    return value._local_tensor if isinstance(value, DTensor) else value


def gradient_of(parameter: Tensor) -> Tensor | None:
    """This rank's shard of the gradient, as the parameter is sharded."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return None if gradient is None else local_of(gradient)


def as_sharded(parameter: Tensor, local: Tensor) -> Tensor:
    """A shard as a tensor that is sharded as the parameter."""
    return DTensor(local, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else local


def copied(value: Any) -> Any:
    """A tensor's copy, or the value."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def told(value: Tensor) -> str:
    """Shape and placements, for errors."""
    return f"of shape {tuple(value.shape)}, {getattr(value, 'placements', 'not on a mesh')}"


__all__ = ["Work", "as_sharded", "copied", "gradient_of", "local_of", "told"]
