"""Gradient scaling (float16): an overflow on one rank counts on all ranks, under every plan.

torch reduces the overflow flag only over the axes on which the first gradient is sharded. Here it is reduced over the
whole mesh, and with `GradScaler` over all ranks, pipeline stages included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.errors import InputError
from autoparallel.kernels.groups import MeshPosition
from autoparallel.runtime.dtensors import set_handler

_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_scale: ContextVar[torch.Tensor | None] = ContextVar("scale", default=None)
_scaled_backward: list[int] = []    # the last backward of a loss that `GradScaler.scale` made, by autograd's number
_reduces_itself: ContextVar[bool] = ContextVar("reduces_itself", default=False)
_STAGES: WeakValueDictionary[int, DeviceMesh] = WeakValueDictionary()  # by id: equal meshes are several


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` under every plan: all ranks skip a step in which one of them found infinite gradients, and
    have the same scale. Arguments are torch's. All ranks call its methods.

    `parallel.step` runs backward itself: within ``with scaler.scaling():`` its gradients are scaled; the loss that it
    returns is not.
    """

    @contextmanager
    def scaling(self) -> Iterator[None]:
        """Scale the gradients of the `step` calls within."""
        if not self.is_enabled():
            yield
            return
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        token = _scale.set(self._scale)
        try:
            yield
        finally:
            _scale.reset(token)

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor,
                        allow_fp16: bool) -> dict[torch.device, torch.Tensor]:
        token = _reduces_itself.set(True)
        try:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        finally:
            _reduces_itself.reset(token)
        found = found or {found_inf.device: found_inf}  # a pipeline stage without gradients
        if dist.is_initialized():
            anywhere = torch.stack([value.to(found_inf.device) for value in found.values()]).amax()
            dist.all_reduce(anywhere, dist.ReduceOp.MAX)
            for value in found.values():
                value.copy_(anywhere)
        return found


class _Scaled(torch.autograd.Function):
    """Identity forward; backward multiplies the gradient by ``scale``."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.scale = scale
        return loss.clone()  # no view: see _Sent in stage_module.py

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.scale.to(gradient.device, gradient.dtype), None


def check_unscaled(how: str) -> None:
    """Raises InputError within `GradScaler.scaling`, or within the backward of what a GradScaler has scaled, where
    ``how`` would step with gradients that are scaled."""
    if _scale.get() is not None or torch._C._current_graph_task_id() in _scaled_backward:
        raise InputError(f"gradients are scaled (GradScaler), and {how} steps with them during backward, before they "
                         "could be divided\n  Train in bfloat16, which needs no scaling, or compile without "
                         "step_in_backward.")


@cache
def watch_scale() -> None:
    """From now on the backward of a loss that a GradScaler (torch's too) has scaled is known to `check_unscaled`."""
    torchs = torch.amp.GradScaler.scale

    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        made = torchs(self, outputs)
        for one in pytree.tree_leaves(made) if self.is_enabled() else ():
            if isinstance(one, torch.Tensor) and one.requires_grad:
                one.register_hook(_mark)
        return made

    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]


def _mark(_: torch.Tensor) -> None:
    """The hook of a scaled loss, which runs before the rest of its backward."""
    _scaled_backward[:] = [torch._C._current_graph_task_id()]


def scaled(loss: torch.Tensor) -> torch.Tensor:
    """The loss of a step; within `GradScaler.scaling` its gradient is scaled."""
    scale = _scale.get()
    return loss if scale is None else _Scaled.apply(loss, scale)


def make_torchs_right(position: MeshPosition) -> None:
    """Make torch's own scaler reduce the overflow flag over the whole mesh; on a pipeline stage it is refused."""
    _replace_handler()
    if position.pipeline_ranks > 1:
        _STAGES[id(position.mesh)] = position.mesh


@cache
def _replace_handler() -> None:
    def unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        gradients, found_inf = args[0], args[1]
        mesh: DeviceMesh = gradients[0].device_mesh
        alone = not _reduces_itself.get()
        if alone and id(mesh) in _STAGES:
            raise InputError("torch's GradScaler tells only the ranks of one pipeline stage that a gradient is "
                             "infinite, and the others would go on\n  Use autoparallel.GradScaler, which tells all.")
        if any(gradient._local_tensor.device != gradient.device for gradient in gradients):
            raise InputError("the gradients are in the memory of the host, and gradient scaling is on the device\n  "
                             "Compile with an offload_fraction below 1, which leaves them there, or train in bfloat16, "
                             "which needs no scaling.")
        assert torchs is not None
        torchs(op, args, kwargs)
        if alone and len({gradient.placements for gradient in gradients}) > 1:
            for axis in range(mesh.ndim):
                dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=mesh.get_group(axis))

    torchs = set_handler(_UNSCALE, unscale)
