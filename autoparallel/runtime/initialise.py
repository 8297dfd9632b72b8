"""Values of parameters on a mesh: their local pieces, initial weights of meta-device models, loading by name."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoparallel.errors import InputError
from autoparallel.layout import Layout, from_torch, local_box, to_torch
from autoparallel.runtime.agree import decide_once


def container(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """(module, attribute) of a dotted name under ``root``."""
    path, _, leaf = name.rpartition(".")
    return root.get_submodule(path), leaf


def as_dtensor(local: torch.Tensor, mesh: DeviceMesh, layout: Layout, shape: tuple[int, ...] | None = None) -> DTensor:
    """The DTensor whose piece here is ``local``; ``shape`` is the global shape (uneven pieces need it)."""
    if shape is None:
        return DTensor.from_local(local, mesh, to_torch(layout), run_check=False)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, to_torch(layout), run_check=False, shape=torch.Size(shape), stride=stride)


class _LocalPieces(torch.autograd.Function):
    """`DTensor.to_local` of many at once: as one node of autograd it takes a quarter of the time."""

    @staticmethod
    def forward(ctx: Any, *values: DTensor) -> tuple[torch.Tensor, ...]:
        ctx.specs = [value._spec for value in values]
        ctx.set_materialize_grads(False)
        return tuple(value._local_tensor.view_as(value._local_tensor) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        return tuple(None if g is None else _gradient(g, spec) for g, spec in zip(gradients, ctx.specs, strict=True))


def _gradient(local: torch.Tensor, spec: Any) -> DTensor:
    """Contiguous, as parameters are: torch's fused optimizers read both by one stride."""
    local = local.contiguous()
    if torch.is_grad_enabled():  # to be differentiated again
        return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=spec.shape,
                                  stride=spec.stride)
    return DTensor(local, copy.copy(spec), requires_grad=False)


def local_pieces(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors, with this rank's piece of each DTensor."""
    learning = [v for v in values if isinstance(v, DTensor) and v.requires_grad]
    pieces = iter(_LocalPieces.apply(*learning) if learning else ())
    return [v if not isinstance(v, DTensor) else next(pieces) if v.requires_grad else v.to_local() for v in values]


def shared_seed(seed: int) -> int:
    """Rank 0's seed."""
    return decide_once(lambda: seed)


def piece(value: torch.Tensor, mesh: DeviceMesh, layout: Layout) -> torch.Tensor:
    """This rank's piece of a global tensor."""
    offsets, shape = local_box(tuple(value.shape), layout, mesh.shape, mesh.get_coordinate() or ())
    for dim, (start, length) in enumerate(zip(offsets, shape, strict=True)):
        value = value.narrow(dim, start, length)
    return value


def _set(parallel: nn.Module, name: str, value: torch.Tensor, device: torch.device) -> None:
    """Give a parameter or buffer of the parallel module a (global) value."""
    owner, leaf = container(parallel, name)
    old = owner._parameters.get(leaf) if leaf in owner._parameters else owner._buffers.get(leaf)
    if old is None:
        raise InputError(f"the model has no parameter or buffer {name!r}")
    if tuple(old.shape) != tuple(value.shape):
        raise InputError(f"{name} has shape {list(old.shape)}, the value given {list(value.shape)}")
    if not isinstance(old, DTensor):
        made: torch.Tensor = value.to(device=device, dtype=old.dtype).clone()
    else:
        mesh, layout = old.device_mesh, from_torch(tuple(old.placements))
        if isinstance(value, DTensor):
            local = value.redistribute(mesh, to_torch(layout)).to_local()
        else:
            local = piece(value, mesh, layout)
        made = as_dtensor(local.to(device=device, dtype=old.dtype).contiguous().clone(), mesh, layout, tuple(old.shape))
    if old.device.type != "meta":
        with torch.no_grad():
            old.copy_(made)
        return
    replacement = nn.Parameter(made, old.requires_grad) if isinstance(old, nn.Parameter) else made
    for module in parallel.modules():  # tied names share one tensor
        for table in (module._parameters, module._buffers):
            for key, value_there in table.items():
                if value_there is old:
                    table[key] = replacement  # type: ignore[assignment]


def _names(module: nn.Module) -> set[str]:
    """Of its parameters and buffers."""
    named = *module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)
    return {name for name, _ in named}


def load_state_dict(model: nn.Module, parallel: nn.Module, state: Mapping[str, Any], device: torch.device, strict: bool
                    ) -> Any:
    """Load global values by name; of a pipeline stage its own. With ``strict``, names that are missing here, or that
    the original ``model`` has not, raise InputError."""
    if not isinstance(state, Mapping):
        raise InputError(f"a state dict is a mapping of names to tensors, not of type {type(state).__name__}")
    known, persistent = _names(parallel), set(nn.Module.state_dict(parallel))
    if odd := [name for name, value in state.items() if name in known and not isinstance(value, torch.Tensor)]:
        raise InputError(f"state dict has no tensors for {odd}: only tensors by name are loaded")
    if empty := [name for name in state if name in known and (state[name].is_meta or state[name].is_sparse)]:
        raise InputError(f"state dict has tensors on the meta device, or sparse ones, for {empty}: give dense ones, "
                         "with values")
    missing, unexpected = sorted(persistent - set(state)), sorted(set(state) - known - _names(model))
    if strict and (missing or unexpected):
        raise InputError(f"state dict does not fit: missing {missing}, unexpected {unexpected}; "
                         "strict=False loads the rest")
    for name, value in state.items():
        if name in known:
            _set(parallel, name, value.detach(), device)
    return nn.modules.module._IncompatibleKeys(missing, unexpected)


def init_weights(model: nn.Module, parallel: nn.Module, mesh: DeviceMesh, device: torch.device, seed: int) -> None:
    """Initialise module by module: one module's whole tensors exist at a time, of which the local pieces are kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        done: set[int] = set()
        for path, module in model.named_modules():
            tensors = {**module._parameters, **module._buffers}
            owned = {k: t for k, t in tensors.items() if t is not None and id(t) not in done}
            done.update(id(t) for t in owned.values())
            _fill(model, module, path, parallel, {k for k, t in owned.items() if t.device.type == "meta"}, device)


def init_lost_buffers(model: nn.Module, parallel: nn.Module, device: torch.device) -> None:
    """Give meta-device buffers that no state dict holds (rotary frequencies) the values that their module makes."""
    for path, module in model.named_modules():
        lost = {
            leaf for leaf in module._non_persistent_buffers_set
            if (buffer := module._buffers[leaf]) is not None and buffer.device.type == "meta"
        }
        _fill(model, module, path, parallel, lost, device)


def _fill(model: nn.Module, module: nn.Module, path: str, parallel: nn.Module, leaves: set[str],
          device: torch.device) -> None:
    if leaves:
        for leaf, value in _initialised(model, module, path, device).items():
            if leaf in leaves:
                _set(parallel, f"{path}.{leaf}" if path else leaf, value, device)


def _initialised(model: nn.Module, module: nn.Module, path: str, device: torch.device) -> dict[str, torch.Tensor]:
    """The module's own tensors with fresh values; the module itself is left on the meta device."""
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    try:
        module._apply(lambda t: torch.empty_like(t, device=device), recurse=False)
        with torch.no_grad():
            if callable(hook := getattr(model, "_init_weights", None)):
                hook(module)
            elif callable(reset := getattr(module, "reset_parameters", None)):
                reset()
            else:
                raise InputError(f"{path or 'the model'} ({type(module).__name__}) owns tensors and has no "
                                 "reset_parameters(): define it, or load a state dict instead")
        return {k: t.detach() for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
    finally:
        module._parameters.update(parameters)
        module._buffers.update(buffers)
