"""Loading a state dict: all values are checked on all ranks before anything is written.

A saved DTensor keeps the mesh coordinate of the rank that saved it. One that another rank saved is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.modules.module import _IncompatibleKeys

from autoparallel.errors import InputError, StateDictError
from autoparallel.kernels.groups import MeshPosition
from autoparallel.runtime import initialise
from autoparallel.runtime.agree import made_equally
from autoparallel.runtime.failing import reached
from autoparallel.runtime.inputs import digest, hash_of
from autoparallel.runtime.load_hooks import Entries, entries_for

_OF_ONE = ": one rank saved it, and all load it"
_REMEDY = ("\n  Save and load by torch.distributed.checkpoint, or save whole tensors, which any rank can: value."
           "full_tensor() of each DTensor, called on all ranks.")
_SAMPLE = 64  # elements of a tensor that ranks compare, about
_NAMED = 3  # names in a message


def load_state_dict(model: nn.Module, parallel: nn.Module, state: Mapping[str, Any], position: MeshPosition,
                    device: torch.device, strict: bool) -> Any:
    """Load global tensors or DTensors by name; a pipeline stage takes its own. All ranks call this.

    ``strict``: names that are missing, or that the original ``model`` does not have, are errors. Hooks of modules are
    called, and extra state is set, as torch does. Raises InputError on
    all ranks, with nothing changed, if a value cannot be loaded or ranks have different values.
    """

    def check() -> tuple[dict[str, torch.Tensor], Entries, _IncompatibleKeys, Mapping[str, torch.Tensor]]:
        if not isinstance(state, Mapping):
            raise InputError(f"a state dict is a mapping of names to tensors, not of type {type(state).__name__}")
        entries = entries_for(model, parallel, state)
        values, missing, unexpected = _checked(model, parallel, entries, strict, position)
        return values, entries, _IncompatibleKeys(missing, unexpected), initialise.lost_buffers(model, device)

    values, entries, odd, lost = made_equally("a state dict", check, lambda _: "")
    _compare(values, position)
    for name, value in sorted(values.items()):  # one order on all ranks: redistribution of DTensors is collective
        initialise.set_value(parallel, name, value, device)
    for name, value in lost.items():
        initialise.set_value(parallel, name, value, device)
    for call in entries.afterwards:
        call(odd)
    return odd


def load_original(model: nn.Module, state: Mapping[str, Any], strict: bool, assign: bool) -> Any:
    """``model.load_state_dict`` of a model that is not on the mesh yet; if it fails, nothing has changed. If there are
    DTensors, all ranks call this.

    Raises InputError for DTensors of other ranks, and for a model on the meta device, which cannot keep values.
    """
    if not assign and any(p.is_meta for p in model.parameters()):
        raise InputError("the model is on the meta device and has not been traced, so its parameters have no layout "
                         "yet: call it once, or give example_inputs or example_kwargs to autoparallel.compile, and "
                         "load then")
    if isinstance(state, Mapping) and any(isinstance(value, DTensor) for value in state.values()):
        state = _with_whole(state)
    before = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    values = [(value, value.detach().clone()) for value in (*model.parameters(), *model.buffers())]
    try:
        return model.load_state_dict(state, strict, assign)
    except BaseException:
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        with torch.no_grad():
            for value, old in values:
                value.copy_(old)
        raise


class _StateDict(dict[str, Any]):
    """A dict with ``_metadata`` (versions of modules), as torch's state dicts."""

    _metadata: Any


def _with_whole(state: Mapping[str, Any]) -> _StateDict:
    """The state dict with each DTensor as its whole tensor. All ranks call this."""

    def check() -> dict[str, Any]:
        return {name: _of_this_rank(name, value) if isinstance(value, DTensor) else value
                for name, value in state.items()}

    made = _StateDict({name: value.full_tensor().detach() if isinstance(value, DTensor) else value
                       for name, value in made_equally("a state dict", check, lambda _: "").items()})
    if hasattr(state, "_metadata"):
        made._metadata = state._metadata
    return made


def _checked(model: nn.Module, parallel: nn.Module, entries: Entries, strict: bool, position: MeshPosition
             ) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """(values to load on this rank by name, missing names, unexpected names). Raises InputError for invalid values."""
    state = entries.values
    here = dict((*parallel.named_parameters(remove_duplicate=False), *parallel.named_buffers(remove_duplicate=False)))
    persistent = dict.fromkeys((*nn.Module.state_dict(parallel), *sorted(entries.extra)))
    if odd := [name for name, value in state.items() if name in here and not isinstance(value, torch.Tensor)]:
        raise InputError(f"state dict has no tensors for {odd}: only tensors by name are loaded")
    if empty := [name for name in state if name in here and (state[name].is_meta or state[name].is_sparse)]:
        raise InputError(f"state dict has tensors on the meta device, or sparse ones, for {empty}: give dense ones, "
                         "with values")
    known = {*here, *initialise.names_of(model), *entries.extra}
    missing, unexpected = [name for name in persistent if name not in state], sorted(set(state) - known)
    if strict and (missing or unexpected):
        raise StateDictError(f"state dict does not fit: missing {missing}, unexpected {unexpected}; "
                         "strict=False loads the rest")
    values = {}
    for name in filter(here.__contains__, state):
        old, value = here[name], state[name]  # DTensors are not detached yet: the result may lie on another mesh
        if tuple(old.shape) != tuple(value.shape):
            raise StateDictError(f"{name} has shape {list(old.shape)}, the value given {list(value.shape)}")
        if old.is_meta:
            initialise.check_unwatched(name, old)
        values[name] = (_on_mesh(name, value, position) if isinstance(value, DTensor) else value).detach()
    return values, missing, unexpected


def _on_mesh(name: str, value: DTensor, position: MeshPosition) -> torch.Tensor:
    """A DTensor's value on the model's mesh; plain if replicated. Raises InputError if it is another rank's."""
    if _is_whole(value):
        return value.to_local()
    if value.device_mesh == position.mesh:
        check_place(name, value)
        if (mine := value.to_local().shape) != (right := _local_shape(value)):
            raise InputError(f"{name} is a DTensor whose shard is {list(mine)}, and this rank's is {list(right)}"
                             f"{_OF_ONE}{_REMEDY}")
        return DTensor.from_local(value.to_local(), position.mesh, value.placements, run_check=False, shape=value.shape,
                                  stride=value.stride())
    if position.pipeline_ranks > 1:
        raise InputError(f"{name} is a DTensor on the mesh {value.device_mesh}, this pipeline stage lies on "
                         f"{position.mesh}{_REMEDY}")
    return _of_this_rank(name, value)


def _is_whole(value: DTensor) -> bool:
    return all(isinstance(placement, Replicate) for placement in value.placements)


def _of_this_rank(name: str, value: DTensor) -> torch.Tensor:
    """A DTensor whose mesh can communicate, or a plain tensor if replicated. Raises InputError if it is another rank's
    or its mesh has no process groups here."""
    if _is_whole(value):
        return value.to_local()
    check_place(name, value)
    if not _is_connected(value.device_mesh):
        raise InputError(f"{name} is a DTensor that was saved on another mesh, {value.device_mesh}: its shards cannot "
                         f"be gathered here{_REMEDY}")
    return value


def check_place(name: str, value: DTensor) -> None:
    """Raises InputError if the DTensor's mesh coordinate, which a file keeps, is not this rank's."""
    mesh = value.device_mesh
    here = (mesh.mesh == dist.get_rank()).nonzero().tolist()
    place = mesh.get_coordinate()
    if not here or place is None or list(place) != here[0]:
        raise InputError(f"{name} is a DTensor with the shard at {place and tuple(place)} of the mesh, and this rank "
                         f"is at {tuple(here[0]) if here else None}{_OF_ONE}{_REMEDY}")


def _local_shape(value: DTensor) -> torch.Size:
    """Shape of this rank's shard under the DTensor's placements."""
    shape, mesh = list(value.shape), value.device_mesh
    for axis, placement in enumerate(value.placements):
        if type(placement) is Shard:
            parts = torch.empty(shape[placement.dim], device="meta").chunk(mesh.size(axis))
            place = mesh.get_local_rank(axis)
            shape[placement.dim] = parts[place].numel() if place < len(parts) else 0
        elif isinstance(placement, _StridedShard) and not shape[placement.dim] % (
                int(placement.split_factor) * mesh.size(axis)):
            shape[placement.dim] //= mesh.size(axis)
        elif not isinstance(placement, Replicate):
            return value.to_local().shape
    return torch.Size(shape)


def _is_connected(mesh: DeviceMesh) -> bool:
    """Whether the mesh's process groups exist and have its ranks. A mesh loaded from a file may have none, or groups of
    the same name with other ranks."""
    (place,) = (mesh.mesh == dist.get_rank()).nonzero().tolist()
    for axis in range(mesh.ndim):
        index: list[Any] = list(place)
        index[axis] = slice(None)
        try:
            ranks = dist.get_process_group_ranks(mesh.get_group(axis))
        except (RuntimeError, KeyError, ValueError, AttributeError):
            return False
        if ranks != mesh.mesh[tuple(index)].tolist():
            return False
    return True


def _compare(values: Mapping[str, torch.Tensor], position: MeshPosition) -> None:
    """Compare a sample of each tensor over the ranks of a pipeline stage. Raises InputError on all ranks if their
    global values differ, or if all have equal shards (a DTensor computed from another rank's has lost its coordinate).
    """
    samples = {name: _sample(value.to_local() if isinstance(value, DTensor) else value)
               for name, value in sorted(values.items())}
    cut = [name for name, value in values.items() if isinstance(value, DTensor)
           and samples[name].numel() > 0 and bool((samples[name] != samples[name][0]).any())]
    shards = hash_of([(name, int(digest(samples[name]))) for name in sorted(cut)])
    hashes = {name: int(digest(samples[name])) for name in samples if not isinstance(values[name], DTensor)}
    found: list[Any] = [None] * dist.get_world_size()
    with reached():
        dist.all_gather_object(found, (position.pipeline_rank, hash_of(hashes), shards if cut else dist.get_rank()))
        copied = [stage for stage, _, mine in found if position.mesh.size() > 1
                  and all(mine == other for s, _, other in found if s == stage)]
        if len({(stage, theirs) for stage, theirs, _ in found}) > len({stage for stage, _, _ in found}):
            dist.all_gather_object(found, (position.pipeline_rank, hashes))
            raise InputError(f"ranks load different values: {_different(found)}\n  Plain tensors are global values: "
                             "load the same file on all ranks, or DTensors with each rank's shards.")
    if copied:
        raise InputError(f"all ranks have the same shards of all DTensors{_OF_ONE}{_REMEDY}")


def _different(found: Sequence[tuple[int, Mapping[str, int]]]) -> str:
    """The names whose hashes differ from those of the first rank of the same stage, with the ranks, as text."""
    first: dict[int, Mapping[str, int]] = {}
    names: dict[str, list[int]] = {}
    for rank, (stage, theirs) in enumerate(found):
        known = first.setdefault(stage, theirs)
        for name in known.keys() | theirs.keys():
            if known.get(name) != theirs.get(name):
                names.setdefault(name, []).append(rank)
    texts = [f"{name} on ranks {ranks}" for name, ranks in sorted(names.items())]
    return "; ".join([*texts[:_NAMED], *([f"and {len(texts) - _NAMED} more"] if len(texts) > _NAMED else [])])


def _sample(value: torch.Tensor) -> torch.Tensor:
    """About `_SAMPLE` elements at equal distances."""
    flat = value.view(-1) if value.is_contiguous() else value.reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)]

