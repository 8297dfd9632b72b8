"""Optimizers with reductions over whole parameters (Adafactor), for parameters that are DTensors.

Element-wise optimizers (Adam, SGD, ...) are torch's own; `autoparallel/runtime/README.md` has the table. Adafactor
keeps a mean per row and column of each matrix. DTensor leaves such means partial where the matrix is sharded, and
torch's code writes to them in place. Here partial results are reduced at once, and the means are sharded as the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import zeros as mesh_zeros
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.overrides import TorchFunctionMode

from autoparallel.errors import InputError

if TYPE_CHECKING:
    from transformers.optimization import Adafactor as _Transformers


class Adafactor(torch.optim.Adafactor):
    """`torch.optim.Adafactor` under every plan: its arguments, state and steps as in one process.

    State of a parameter [..., n, m]: ``row_var`` [..., n, 1] and ``col_var`` [..., 1, m], sharded as the parameter.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _called(closure)
        for p in _with_gradients(self):
            if not self.state[p] and p.grad.dim() > 1:
                count = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
                self.state[p] = {"step": torch.tensor(0.0, dtype=count),
                                 "row_var": _mean_state(p, -1, keepdim=True),
                                 "col_var": _mean_state(p, -2, keepdim=True)}
        with _ReducedAtOnce():
            _plain_step(torch.optim.Adafactor)(self)
        return loss


def transformers_adafactor(params: Iterable[Any], **options: Any) -> _Transformers:
    """`transformers.optimization.Adafactor` under every plan: same options, state and steps as in one process. Raises
    InputError if transformers is not installed."""
    return adafactor_of_transformers()(params, **options)


@cache
def adafactor_of_transformers() -> type[_Transformers]:
    """The class that `transformers_adafactor` makes. Raises InputError if transformers is not installed."""
    try:
        from transformers.optimization import Adafactor as Own
    except ImportError as error:
        raise InputError("transformers is not installed: pip install transformers, or use autoparallel.optim.Adafactor"
                         ) from error

    class TransformersAdafactor(Own):
        @staticmethod
        def _rms(tensor: Tensor) -> Tensor:
            norm = torch.linalg.vector_norm(tensor)
            return (norm.full_tensor() if isinstance(norm, DTensor) else norm) / tensor.numel() ** 0.5

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = _called(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None and not self.state[p] and p.grad.dim() > 1:
                        dtype = torch.float32 if p.dtype in (torch.float16, torch.bfloat16) else p.dtype
                        self.state[p] = {"step": 0, "RMS": 0, "exp_avg_sq_row": _mean_state(p, -1, dtype=dtype),
                                         "exp_avg_sq_col": _mean_state(p, -2, dtype=dtype)}
                        if group["beta1"] is not None:
                            self.state[p]["exp_avg"] = torch.zeros_like(p, dtype=dtype)
            with _ReducedAtOnce():
                _plain_step(Own)(self)
            return loss

    return TransformersAdafactor


class _ReducedAtOnce(TorchFunctionMode):
    """Within, results of torch functions that are partial DTensors are all-reduced at once."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return pytree.tree_map_only(DTensor, _reduced, function(*args, **(kwargs or {})))


def _reduced(value: DTensor) -> DTensor:
    if not any(placement.is_partial() for placement in value.placements):
        return value
    return value.redistribute(placements=[Replicate() if p.is_partial() else p for p in value.placements])


def _mean_state(p: Tensor, dim: int, *, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros for a mean over dim ``dim`` (negative) of a parameter: sharded as the parameter, replicated over axes that
    cut this dim."""
    at = p.dim() + dim
    shape = [*p.shape[:at], *([1] if keepdim else []), *p.shape[at + 1 :]]
    if not isinstance(p, DTensor):
        return torch.zeros(shape, dtype=dtype or p.dtype, device=p.device)
    placements = [_of_mean(q, at, keepdim) for q in p.placements]
    return mesh_zeros(shape, dtype=dtype or p.dtype, device_mesh=p.device_mesh, placements=placements)


def _of_mean(placement: Placement, at: int, keepdim: bool) -> Placement:
    """Where a mean over dim ``at`` lies on an axis on which a parameter lies so."""
    if not isinstance(placement, Shard | _StridedShard) or placement.dim < at or (placement.dim > at and keepdim):
        return placement
    if placement.dim == at:
        return Replicate()
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim - 1, split_factor=placement.split_factor)
    return Shard(placement.dim - 1)


def _with_gradients(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _called(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _plain_step(kind: type[torch.optim.Optimizer]) -> Any:
    """``kind.step`` without the profiling hook that torch puts around each optimizer class's step: a subclass that
    calls it has a hook of its own, and two would record each step twice."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


__all__ = ["Adafactor", "adafactor_of_transformers", "transformers_adafactor"]
