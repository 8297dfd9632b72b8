"""The module tree on the mesh: each parameter a DTensor under its name, buffers whole, groups of ranks that share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from autoparallel.layout import INVARIANT, Layout, local_shape, to_torch
from autoparallel.runtime.form import Compiled
from autoparallel.runtime.guards import Places, SharedAttributes
from autoparallel.runtime.initialise import as_dtensor, container
from autoparallel.runtime.optimizers import refuse_on
from autoparallel.runtime.shared import Ranks
from autoparallel.runtime.state import State


def place(root: nn.Module, state: State, compiled: Compiled) -> None:
    """Make the module tree under ``root`` with the original's names: parameters as DTensors, buffers whole on every
    rank."""
    model, mesh = state.model, state.mesh
    layouts, elsewhere = compiled.parameter_layouts, compiled.elsewhere
    refuse_on(mesh)
    _make_shared_groups(state, sorted(set(compiled.shared.values())))
    everywhere = (INVARIANT,) * mesh.ndim
    state.parts = _make_parts(root, model)
    root.training = model.training
    placed: dict[int, nn.Parameter | torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = _same_on_pipeline(state, parameter.detach())
        if compiled.micro.whole.aliases.get(name, name) in elsewhere:
            continue
        owner, leaf = container(root, name)
        if id(parameter) not in placed:
            layout = layouts.get(name, everywhere)
            state.layouts[name] = layout
            placed[id(parameter)] = nn.Parameter(
                _shard_of(value, mesh, layout, state.device), parameter.requires_grad
            )
            _take_hooks(parameter, placed[id(parameter)])
        owner._parameters[leaf] = placed[id(parameter)]  # type: ignore[assignment]
    for path, owner_module in model.named_modules():
        for leaf, buffer in owner_module._buffers.items():
            if buffer is not None:
                name = f"{path}.{leaf}" if path else leaf
                owner, _ = container(root, name)
                if id(buffer) not in placed:
                    value = _same_on_pipeline(state, buffer.detach())
                    placed[id(buffer)] = _same_everywhere(value, mesh, state.device)
                owner._buffers[leaf] = placed[id(buffer)]
                if leaf in owner_module._non_persistent_buffers_set:
                    owner._non_persistent_buffers_set.add(leaf)
    state.attributes, state.places = SharedAttributes(state.parts), Places(root)


def _take_hooks(original: torch.Tensor, placed: torch.Tensor) -> None:
    """Hooks that the user has set on a parameter, on the one that is trained: they see its gradient, a DTensor."""
    for hook in (original._backward_hooks or {}).values():
        placed.register_hook(hook)
    for hook in (getattr(original, "_post_accumulate_grad_hooks", None) or {}).values():
        placed.register_post_accumulate_grad_hook(hook)


def _make_parts(root: nn.Module, model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Give ``root`` the submodules of ``model``, each of the original's class and with its attributes, but without its
    parameters and buffers. Returns the part of each module; the model's own is ``root``."""
    parts = {model: root}
    for module in model.modules():
        if module is not model:
            part = parts[module] = module.__class__.__new__(module.__class__)
            part.__dict__.update(module.__dict__, _parameters=_absent(module._parameters),
                                 _buffers=_absent(module._buffers), _modules={},
                                 _non_persistent_buffers_set=set(module._non_persistent_buffers_set))
    for module, part in parts.items():
        part._modules.update({name: child and parts[child] for name, child in module._modules.items()})
    return parts


def _absent(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, None]:
    """The names that a module has without a tensor (``bias=False``)."""
    return {name: None for name, value in tensors.items() if value is None}


def _shard_of(value: torch.Tensor, mesh: DeviceMesh, layout: Layout, device: torch.device) -> DTensor:
    """A parameter on the mesh, in its own memory: rank 0's value in pieces, or an empty meta piece of a meta value."""
    if value.device.type != "meta":
        return distribute_tensor(value.to(device, copy=True), mesh, to_torch(layout))
    shape = local_shape(tuple(value.shape), layout, mesh.shape, mesh.get_coordinate() or ())
    return as_dtensor(torch.empty(shape, dtype=value.dtype, device="meta"), mesh, layout, tuple(value.shape))


def _same_everywhere(value: torch.Tensor, mesh: DeviceMesh, device: torch.device) -> torch.Tensor:
    """A buffer with rank 0's value on every rank."""
    if value.device.type == "meta":
        return value
    value = value.to(device).clone()
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        dist.broadcast(value, dist.get_global_rank(group, 0), group=group)
    return value


def _make_shared_groups(state: State, ranks_together: Sequence[Ranks]) -> None:
    """Process groups of these ranks of the pipeline, beside each place in a stage. All ranks call this."""
    for ranks in filter(lambda ranks: len(ranks) > 1, ranks_together):
        for column in state.position.whole.mesh.flatten(1).t().tolist():
            group = dist.new_group([column[rank] for rank in ranks])
            if dist.get_rank() in column and state.position.pipeline_rank in ranks:
                state.shared_groups[ranks] = group
                state.together.groups.append(group)


def _same_on_pipeline(state: State, value: torch.Tensor) -> torch.Tensor:
    """A value as the pipeline's first rank has it."""
    group = state.position.pipeline_group
    if group is None or value.device.type == "meta":
        return value
    value = value.to(state.device).clone()
    dist.broadcast(value, dist.get_global_rank(group, 0), group=group)
    return value
