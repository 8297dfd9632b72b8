"""Builds the module tree on the mesh: parameters as DTensors under their names, buffers replicated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from autoparallel.capture.dependencies import MIRRORS
from autoparallel.errors import InputError
from autoparallel.kernels.host_copies import host_memory, table_memory
from autoparallel.layout import INVARIANT, Layout, local_boxes, local_shape, to_torch
from autoparallel.runtime.agree import made_equally
from autoparallel.runtime.cached_tables import CachedMemory
from autoparallel.runtime.corrected_ops import correct_ops
from autoparallel.runtime.dtensors import watch
from autoparallel.runtime.form import Compiled
from autoparallel.runtime.guards import Places, SharedAttributes
from autoparallel.runtime.hints import add_hint_of_rows, add_hints
from autoparallel.runtime.initialise import (
    Keep,
    as_dtensor,
    container,
    elsewhere,
    leave_out,
    live_elsewhere,
    outside,
    registered,
)
from autoparallel.runtime.interleaved_views import view_rightly
from autoparallel.runtime.mixing import mix_lists, mix_scalars
from autoparallel.runtime.offload.gradients import HostGradients, leaves_by_itself
from autoparallel.runtime.offload.mapped import MappedFiles
from autoparallel.runtime.offload.saved_file import SavedFile
from autoparallel.runtime.optimizers import look_at_steps, offload_states
from autoparallel.runtime.originals import Originals
from autoparallel.runtime.reads import read_places
from autoparallel.runtime.shared import Ranks, shared_parameters
from autoparallel.runtime.state import State
from autoparallel.runtime.whole_draws import draw_whole
from autoparallel.runtime.whole_means import take_whole_means
from autoparallel.runtime.whole_ops import compute_whole
from autoparallel.schedule.tiers import BUCKETS_IN_FLIGHT

#: Bytes of a table's rows that are on the device at a time, while it is brought to the hosts of all ranks.
ROWS_BYTES = 64 * 2**20


def place(root: nn.Module, state: State, compiled: Compiled) -> None:
    """Build the original's module tree under ``root``: parameters as DTensors in the layouts of ``compiled``, buffers
    whole on every rank, with rank 0's values. Parameters that only other stages read are left out; who asks for one is
    told so. All ranks call this.
    """
    model, mesh = state.model, state.mesh
    layouts, absent = compiled.parameter_layouts, compiled.elsewhere
    watch(mesh)
    draw_whole()
    take_whole_means()
    correct_ops()
    read_places()
    compute_whole()
    view_rightly()
    add_hints()
    if state.inputs.are_local:
        add_hint_of_rows()
    mix_scalars()
    mix_lists()
    look_at_steps()
    _make_shared_groups(state, sorted(set(shared_parameters(compiled, state.hybrid).values())))
    everywhere = (INVARIANT,) * mesh.ndim
    state.parts = _make_parts(root, model)
    root.training, state.original_modes = model.training, [module.training for module in state.parts]
    placed: dict[int, nn.Parameter | torch.Tensor] = {}
    state.offload = compiled.plan.hybrid.offload
    state.files, state.saved_file = _files(state, compiled), _saved_file(state, compiled)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = _same_on_pipeline(state, parameter.detach())
        if compiled.micro.whole.aliases.get(name, name) in absent:
            leave_out(root, name)
            continue
        owner, leaf = container(root, name)
        if id(parameter) not in placed:
            state.layouts[name] = layouts.get(name, everywhere)
            keep = _table_memory(state, compiled, name) or _keep(state, name)
            placed[id(parameter)] = _placed(state, name, value, parameter.requires_grad, keep)
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
    keep_states_away(root, state)
    if any(map(leaves_by_itself, state.offload.each)):
        in_flight = BUCKETS_IN_FLIGHT * compiled.plan.hybrid.bucket_bytes
        state.host_gradients = HostGradients(state.device, in_flight, state.offload, state.files)
    state.attributes, state.places = SharedAttributes(state.parts), Places(root)
    state.originals = Originals(model, placed)


def keep_states_away(root: nn.Module, state: State) -> None:
    """Refuse optimizers that would keep states on the device of parameters whose states the plan has elsewhere, or
    would step those after backward that the plan steps within."""
    tiers = {name: state.offload.of(name) for name in state.layouts}    # of tables, as if none were looked up
    offload_states(state, {id(registered(root, name)): one for name, one in tiers.items()
                           if one.is_away or state.offload.steps_there})
    state.keeps_away = True


def _placed(state: State, name: str, value: torch.Tensor, requires_grad: bool, keep: Keep | None) -> nn.Parameter:
    """A parameter of the parallel module, in the memory where it lives; ``keep``: the way there, None: the device."""
    layout = state.layouts[name]
    if keep is table_memory or isinstance(keep, CachedMemory):
        shard = _shard_on_host(value, state.mesh, layout, state.device)
        if isinstance(keep, CachedMemory) and not shard.is_meta:
            shard = keep.placed(shard)
    else:
        shard = _shard_of(value, state.mesh, layout, state.device)
        shard = shard if keep is None else elsewhere(shard, keep)
    made = nn.Parameter(shard, requires_grad)
    if keep is not None:
        live_elsewhere(made, keep)
    return made


def _table_memory(state: State, compiled: Compiled, name: str) -> Keep | None:
    """The way to the memory of a table on the host; None: a parameter is none."""
    whole, hybrid = compiled.micro.whole, compiled.plan.hybrid
    if (path := whole.aliases.get(name, name)) not in hybrid.on_host:
        return None
    cache = next((one for one in hybrid.cached if one.name == path), None)
    if cache is None:
        return table_memory
    shape = tuple(state.model.get_parameter(name).shape)
    rows = local_shape(shape, state.layouts[name], state.mesh.shape, state.mesh.get_coordinate() or ())[0]
    return CachedMemory(cache.slots(shape[0], rows), state.device)


def _keep(state: State, name: str) -> Keep | None:
    """The way to the memory in which a parameter lives that the device reads; None: on the device."""
    away = state.offload.of(name)
    if away.parameters == "disk":
        assert state.files is not None
        return state.files.copy_of
    return host_memory if away.moves_parameters else None


def _files(state: State, compiled: Compiled) -> MappedFiles | None:
    """The files of this rank's parameters and gradients, if they live on disk. All ranks call this. Raises InputError
    on all where one has no room."""
    if not {"parameters", "gradients"} & {*state.offload.in_tier("disk")}:
        return None
    folder, hybrid, sizes, seen = state.limits.disk_path, compiled.plan.hybrid, list[int](), set[int]()
    assert folder is not None
    coordinate, everywhere = state.mesh.get_coordinate() or (), (INVARIANT,) * state.mesh.ndim
    for name, parameter in state.model.named_parameters():
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        there = state.offload.of(name, hybrid.on_host).in_tier("disk")
        layout = compiled.parameter_layouts.get(name, everywhere)
        count = math.prod(local_shape(tuple(parameter.shape), layout, state.mesh.shape, coordinate))
        width, sums = parameter.element_size(), hybrid.micro_batches > 1 and hybrid.sum_dtype
        sizes += [count * width] * ("parameters" in there)
        sizes += [count * max(width, sums.itemsize if sums else 0)] * ("gradients" in there and parameter.requires_grad)
    return made_equally("files of parameters and gradients", lambda: MappedFiles(folder, sizes), lambda _: "")


def _saved_file(state: State, compiled: Compiled) -> SavedFile | None:
    """The file of the tensors that this rank's blocks save on disk, with room for as much as the plan predicts. All
    ranks call this. Raises InputError on all where one has no room."""
    if compiled.plan.hybrid.saved_on != "disk":
        return None
    folder, others = state.limits.disk_path, state.offload.in_tier("disk")    # which are in the prediction too
    assert folder is not None
    num_bytes = 0 if others else int(compiled.plan.prediction.disk_bytes)
    return made_equally("a file of saved tensors", lambda: SavedFile(folder, num_bytes), lambda _: "")


def check_conversion(fn: Callable[[torch.Tensor], torch.Tensor], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises InputError if ``fn`` changes the dtype or device of a placed tensor (``tensors``: name, tensor)."""
    for name, value in tensors:
        made = fn(value.to_local().detach() if isinstance(value, DTensor) else value)
        if (made.dtype, made.device) != (value.dtype, value.device):
            raise InputError(f"{name} is {value.dtype} on {value.device}, and cannot become {made.dtype} on "
                             f"{made.device}: the program was compiled for what it is\n  Convert the model before "
                             "it is called, or give it to autoparallel.compile again; a model on the meta device "
                             "gets values by init_weights() or load_state_dict(...).")


def _take_hooks(original: torch.Tensor, placed: torch.Tensor) -> None:
    """Register the user's hooks on a parameter with its DTensor; they receive DTensor gradients."""
    for hook in (original._backward_hooks or {}).values():
        placed.register_hook(hook)
    for hook in (getattr(original, "_post_accumulate_grad_hooks", None) or {}).values():
        placed.register_post_accumulate_grad_hook(hook)


def _make_parts(root: nn.Module, model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Give ``root`` copies of ``model``'s submodules: same classes and attributes, no parameters and buffers. Returns
    module -> copy (``model`` -> ``root``)."""
    parts = {model: root}
    for module in model.modules():
        if module is not model:
            part = parts[module] = module.__class__.__new__(module.__class__)
            part.__dict__.update(module.__dict__, _parameters=_absent(module._parameters),
                                 _buffers=_absent(module._buffers), _modules={},
                                 _non_persistent_buffers_set=set(module._non_persistent_buffers_set),
                                 **{name: [None] * len(vars(module)[name]) for name in MIRRORS & vars(module).keys()})
    for module, part in parts.items():
        part._modules.update({name: None if child is None else parts[child]    # an empty ModuleList is false
                              for name, child in module._modules.items()})
    return parts


def _absent(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, None]:
    """The names registered as None (``bias=False``)."""
    return {name: None for name, value in tensors.items() if value is None}


def _shard_of(value: torch.Tensor, mesh: DeviceMesh, layout: Layout, device: torch.device) -> DTensor:
    """A parameter as a DTensor with memory of its own: shards of rank 0's value, or a meta shard of a meta value."""
    if value.device.type != "meta":
        return distribute_tensor(value.to(device, copy=True), mesh, to_torch(layout))
    shape = local_shape(tuple(value.shape), layout, mesh.shape, mesh.get_coordinate() or ())
    return as_dtensor(torch.empty(shape, dtype=value.dtype, device="meta"), mesh, layout, tuple(value.shape))


def _shard_on_host(value: torch.Tensor, mesh: DeviceMesh, layout: Layout, device: torch.device) -> DTensor:
    """As `_shard_of`, in host memory: of a table that is larger than the device's, of which a few rows are there at a
    time."""
    if value.device.type == "meta":
        return _shard_of(value, mesh, layout, device)
    shape, coordinate = tuple(value.shape), mesh.get_coordinate() or ()
    made = torch.empty(local_shape(shape, layout, mesh.shape, coordinate), dtype=value.dtype)
    rows = max(1, ROWS_BYTES // max(1, value[:1].nbytes))
    for start in range(0, shape[0], rows):
        part = _same_everywhere(value[start : start + rows], mesh, device)
        for box in local_boxes(shape, layout, mesh.shape, coordinate):
            first, end = max(start, box.offsets[0]), min(start + rows, box.offsets[0] + box.shape[0])
            if first < end:
                to = first - box.offsets[0] + box.local_offsets[0]
                columns = slice(box.offsets[1], box.offsets[1] + box.shape[1])
                at = slice(box.local_offsets[1], box.local_offsets[1] + box.shape[1])
                made[to : to + end - first, at] = part[first - start : end - start, columns]
    return outside(made, mesh, layout, shape)


def _same_everywhere(value: torch.Tensor, mesh: DeviceMesh, device: torch.device) -> torch.Tensor:
    """A copy of a buffer with the value of the mesh's first rank, on every rank."""
    if value.device.type == "meta":
        return value
    value = value.to(device).clone()
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        dist.broadcast(value, dist.get_global_rank(group, 0), group=group)
    return value


def _make_shared_groups(state: State, ranks_together: Sequence[Ranks]) -> None:
    """Make a process group per set of pipeline ranks, for each coordinate within a stage. All ranks call this."""
    for ranks in filter(lambda ranks: len(ranks) > 1, ranks_together):
        for column in state.position.whole.mesh.flatten(1).t().tolist():
            group = dist.new_group([column[rank] for rank in ranks])
            if dist.get_rank() in column and state.position.pipeline_rank in ranks:
                state.shared_groups[ranks] = group
                state.together.own(group)


def _same_on_pipeline(state: State, value: torch.Tensor) -> torch.Tensor:
    """The value of the pipeline's first rank, broadcast."""
    group = state.position.pipeline_group
    if group is None or value.device.type == "meta":
        return value
    value = value.to(state.device).clone()
    dist.broadcast(value, dist.get_global_rank(group, 0), group=group)
    return value
