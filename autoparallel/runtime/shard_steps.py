"""Element-wise optimizers of torch step this rank's shards as plain tensors.

On DTensors each op of an optimizer goes through DTensor's dispatch, and torch does not pick its ``foreach`` and fused
kernels. `step_shards` lets an optimizer compute on the local shards instead; its parameters, gradients and state stay
DTensors for everybody else (state dicts, parameter groups, learning rate schedulers, hooks).

torch's optimizers collect parameters, gradients and state of a group in lists (``_init_group``) and then compute on
these lists. Here ``_init_group`` is wrapped, per optimizer, to put the local shards in the lists. (The one file that
touches ``_init_group``.)

Adam and AdamW on a CPU whose kernel is left open (``foreach`` and ``fused`` None) step by torch's fused kernel, which
passes over memory once; torch's own default there are ten kernels for each parameter. Whether a parameter does depends
on itself alone, never on others of its group: copies on several ranks stay the same to the bit.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam

from autoparallel.runtime.sparse_gradients import sparse_gradient

#: Optimizers whose new value of an element depends on no other element. (Muon and Adafactor are not.)
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.ASGD, torch.optim.Rprop)


def steps_shards(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether `step_shards` is for optimizers of this class: one of `ELEMENTWISE`, or a subclass that steps in the same
    way."""
    base = next((base for base in ELEMENTWISE if issubclass(kind, base)), None)
    return base is not None and all(
        inspect.unwrap(getattr(kind, name, None)) is inspect.unwrap(getattr(base, name, None))  # type: ignore[arg-type]
        for name in ("step", "_init_group"))


def step_shards(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer compute on local shards, as plain tensors, from its next step on. `steps_shards` must be true
    of its class."""
    collect, alive = type(optimizer)._init_group, weakref.ref(optimizer)  # type: ignore[attr-defined]

    def collect_shards(group: dict[str, Any], *lists: list[Tensor]) -> Any:
        itself = alive()
        assert itself is not None
        found = collect(itself, group, *lists)
        if not group.get("differentiable"):
            _replace(*lists)
            if isinstance(itself, torch.optim.Adam):
                _step_fused(itself, group, lists)
        return found

    optimizer._init_group = collect_shards  # type: ignore[attr-defined]
    if isinstance(optimizer, torch.optim.SGD):
        hook = optimizer.register_step_post_hook(lambda optimizer, args, kwargs: take_momentum(optimizer))
        cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks).move_to_end(hook.id, last=False)


def _step_fused(optimizer: torch.optim.Adam, group: Mapping[str, Any], lists: Sequence[list[Tensor]]) -> None:
    """Step those of the lists that `_is_for_fused`, and leave the others in the lists, which torch steps afterwards."""
    if any(group.get(name) is not None for name in ("fused", "foreach")) or group.get("capturable"):
        return
    fits = [_is_for_fused(*row) for row in zip(*filter(None, lists), strict=True)]    # (one is empty without amsgrad)
    if not any(fits):
        return
    parameters, gradients, means, squares, most, steps = (list(compress(values, fits)) for values in lists)
    for values in lists:
        values[:] = compress(values, [not fit for fit in fits])
    beta1, beta2 = group["betas"]
    adam(parameters, gradients, means, squares, most, steps, fused=True,
         grad_scale=getattr(optimizer, "grad_scale", None), found_inf=getattr(optimizer, "found_inf", None),
         decoupled_weight_decay=group["decoupled_weight_decay"], amsgrad=group["amsgrad"], beta1=beta1, beta2=beta2,
         lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=group["maximize"])


def _is_for_fused(*row: Tensor) -> bool:
    """Whether torch's fused kernel of Adam computes the same of a parameter, gradient, states and step count (last) as
    the default on a CPU, in fewer passes: in single or double precision. It reads all tensors in the order of memory,
    and step counts in single precision."""
    *tensors, step = row
    return step.dtype is torch.float32 and step.is_cpu and row[0].dtype in _FUSED and all(
        one.dtype is row[0].dtype and one.is_cpu and one.is_contiguous() and type(one) in _PLAIN for one in tensors)


def _replace(parameters: list[Tensor], gradients: list[Tensor], *states: list[Tensor]) -> None:
    """Replace DTensors by their local shards in all lists, unless those of a parameter are sharded differently: then
    the optimizer computes on DTensors, which redistribute."""
    specs = [p._spec if isinstance(p, DTensor) else None for p in parameters]
    if _fit(specs, parameters, gradients, False) and all(_fit(specs, parameters, values, True) for values in states):
        for values in (parameters, gradients, *states):
            values[:] = [value._local_tensor if isinstance(value, DTensor) else value for value in values]


_PLAIN = (Tensor, torch.nn.Parameter)
_FUSED = frozenset({torch.float32, torch.float64})


def _fit(specs: Sequence[Any], parameters: Sequence[Tensor], others: Sequence[Tensor | None], are_states: bool) -> bool:
    """Whether each parameter (with its spec, None of a plain tensor) and the other tensor are both plain, or DTensors
    sharded alike. ``are_states``: the others may be plain scalars (step counts), or not made yet (None)."""
    for spec, parameter, other in zip(specs, parameters, others, strict=False):
        if spec is not None and isinstance(other, DTensor):
            if other._spec is not spec and not _take_spec(other, parameter):
                return False
            if type(other._local_tensor) not in _PLAIN:
                return False
        elif not (are_states and (other is None or other.dim() == 0)) and (spec is None) == isinstance(other, DTensor):
            return False
    return True


def _take_spec(other: DTensor, parameter: Tensor) -> bool:
    """Whether a DTensor is sharded as the parameter; if so, it has the same object for a spec from now on, so that the
    next comparison is short."""
    ours, theirs = cast(DTensor, parameter)._spec, other._spec
    if ours == theirs:
        other._spec = ours
    return ours.placements == theirs.placements and ours.mesh == theirs.mesh and ours.shape == theirs.shape


def take_momentum(optimizer: torch.optim.SGD) -> None:
    """SGD stores its momentum under the tensors of its lists: move what it stored under local shards to their
    parameters, as DTensors."""
    for group in optimizer.param_groups:
        for parameter in _on_meshes(group["params"] if group["momentum"] else ()):
            made = optimizer.state.pop(parameter._local_tensor, None)
            if made is not None and "momentum_buffer" not in optimizer.state[parameter]:
                buffer = made["momentum_buffer"]    # sparse, as the gradients that it is the mean of
                optimizer.state[parameter]["momentum_buffer"] = sparse_gradient(buffer, parameter._spec) \
                    if buffer.is_sparse else DTensor(buffer, parameter._spec, requires_grad=False)


def _on_meshes(parameters: Sequence[Tensor]) -> list[DTensor]:
    return [parameter for parameter in parameters if isinstance(parameter, DTensor)]


__all__ = ["ELEMENTWISE", "step_shards", "steps_shards", "take_momentum"]
