"""States of torch's optimizers: their names, their kernels, and what a state dict must have."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from autoparallel.errors import InputError, shown
from autoparallel.runtime.offload.work import copied, local_of, told
from autoparallel.runtime.shard_steps import ELEMENTWISE, steps_shards

#: Optimizers with a fused kernel for the host.
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
#: Optimizers whose fused kernels DTensor supports too, which `shard_steps` falls back to.
FUSED_ON_DEVICE = (torch.optim.Adam, torch.optim.AdamW)


def beside(parameter: Tensor, scalars: Mapping[str, Any], fused: bool) -> dict[str, Any]:
    """Copies of a parameter's scalar states (the step count). A fused kernel requires them on the parameter's device,
    which is the GPU or the CPU for the two parts of a parameter whose states are partly offloaded."""
    return {name: value.to(parameter.device, copy=True) if fused and isinstance(value, Tensor) else copied(value)
            for name, value in scalars.items()}


def fused_by_default(kind: Any, groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """``fused=True`` for a class of optimizers that has such a kernel for the parameters of these groups, unless the
    options or a group name a kernel: one pass over each state (torch's own default on GPUs takes several). Not for SGD
    with momentum: torch's kernel begins with memory as it finds it, which stays where the first step overflows, and
    takes no parameter whose first gradient comes later than others'."""
    named = {"fused", "foreach", "capturable", "differentiable"} & {*options, *chain.from_iterable(groups)}
    devices = {"cpu"} if issubclass(kind, torch.optim.Adagrad) else {"cpu", "cuda"}
    runs = all(p.is_floating_point() and p.device.type in devices for group in groups for p in group["params"])
    momentum = issubclass(kind, torch.optim.SGD) and any(known.get("momentum") for known in (options, *groups))
    return {"fused": True} if runs and not named and not momentum and issubclass(kind, FUSED) else {}


def names_of(kind: Any, group: Mapping[str, Any], dtype: torch.dtype) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the states that ``kind`` keeps: numbers of a parameter, and tensors of its shape. Found by two steps of
    a parameter of two elements."""
    parameter = torch.zeros(2, dtype=dtype)
    hyper = {key: copied(value) for key, value in group.items() if key not in ("params", "param_names")}
    optimizer = kind([{**hyper, "params": [parameter]}])
    for _ in range(2):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    state = {key: value for key, value in optimizer.state[parameter].items() if value is not None}
    elements = tuple(key for key, value in state.items() if isinstance(value, Tensor) and value.dim())
    return tuple(key for key in state if key not in elements), elements


def check_kind(kind: Any, options: Mapping[str, Any]) -> None:
    write = f"take one of {', '.join(one.__name__ for one in ELEMENTWISE)} of torch.optim, or offload='none'"
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise InputError(f"the optimizer is {shown(kind)}: give a class of torch.optim, as torch.optim.AdamW")
    if not steps_shards(kind):
        raise InputError(f"{kind.__name__} is not element-wise, or steps in its own way, and its states cannot be "
                         f"stepped in tiles on the host: {write}")
    for name in ("capturable", "differentiable"):
        if options.get(name):
            raise InputError(f"{name}=True is of optimizers on the device: leave it out, or take offload='none'")


def take_options(kind: Any, options: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Give the groups the options of ``kind``, and its defaults, as its constructor checks them; returns the
    defaults."""
    chosen = fused_by_default(kind, groups, options)
    empty = [{**group, "params": [torch.empty(0, dtype=p.dtype) for p in group["params"]]} for group in groups]
    template = kind(empty, **options, **chosen)
    for group, full in zip(groups, template.param_groups, strict=True):
        group.update({key: value for key, value in full.items() if key != "params"})
    defaults: dict[str, Any] = template.defaults
    return defaults


def scalars_in(entries: Mapping[str, Any], elements: Collection[str], fused: bool) -> dict[str, Any]:
    """Copies of a parameter's states but for ``elements``, as kernels take them."""
    scalars = {name: copied(value) for name, value in entries.items() if name not in elements}
    if "step" in scalars and fused:
        scalars["step"] = torch.as_tensor(scalars["step"], dtype=torch.float32, device="cpu")
    return scalars


def check_entries(kind: Any, number: int, parameter: Tensor, names: tuple[Sequence[str], Sequence[str]],
                   entries: Mapping[str, Any]) -> None:
    """Raises InputError for states that are not those of a parameter, of these names (numbers, tensors)."""
    scalars, elements = names
    if set(entries) != {*scalars, *elements}:
        raise InputError(f"the state of parameter {number} has {sorted(entries)}, and {kind.__name__} with "
                         f"these options keeps {sorted((*scalars, *elements))}: load what it has saved")
    for name in elements:
        value = entries[name]
        if value.shape != parameter.shape or getattr(value, "placements", None) != getattr(
                parameter, "placements", None) or local_of(value).shape != local_of(parameter).shape:
            raise InputError(f"{name} of parameter {number} is {told(value)}, and the parameter "
                             f"{told(parameter)}: load states of the same plan, or a checkpoint by parallel.load, "
                             "which fits any")


__all__ = ["FUSED_ON_DEVICE", "beside", "check_entries", "check_kind", "fused_by_default", "names_of", "scalars_in",
           "take_options"]
