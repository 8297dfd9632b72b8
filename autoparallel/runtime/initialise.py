"""Values of parameters on a mesh: local shards, setting values, initial weights of meta-device models."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autoparallel.errors import InputError, StageError
from autoparallel.kernels.host_copies import table_memory
from autoparallel.layout import Box, Layout, from_torch, local_boxes, to_torch
from autoparallel.runtime.agree import decide_once
from autoparallel.runtime.cached_tables import CachedMemory, read_by_programs
from autoparallel.runtime.dtensors import KEPT
from autoparallel.runtime.sparse_gradients import own_rows_of, sparse_gradient
from autoparallel.schedule.tiers import Offload

#: Copies a tensor to the memory in which a parameter lives.
Keep = Callable[[torch.Tensor], torch.Tensor]


def container(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """(module, attribute) of a dotted name under ``root``, whose own methods may have the names of parts (``step``)."""
    *path, leaf = name.split(".")
    for part in path:
        root = cast(nn.Module, root._modules[part])
    return root, leaf


class StageParameters(dict[str, Any]):
    """The parameters of a module of which other pipeline stages have some. ``elsewhere``: those, by attribute, with
    their names from the root; to ask for one raises StageError."""

    def __init__(self, here: Mapping[str, Any]) -> None:
        super().__init__(here)
        self.elsewhere: dict[str, str] = {}

    def __contains__(self, leaf: object) -> bool:
        found = super().__contains__(leaf)
        if not found and leaf in self.elsewhere:
            raise StageError(f"{self.elsewhere[str(leaf)]} is a parameter of another pipeline stage, and not on this "
                             "rank\n  Loop over parallel.named_parameters(), which has those of this rank's stages; "
                             "hooks, and requires_grad, can be set on the model before it is compiled.")
        return found


def leave_out(root: nn.Module, name: str) -> None:
    """A parameter of other pipeline stages, by its dotted name under ``root``: to ask for it raises StageError."""
    owner, leaf = container(root, name)
    if not isinstance(owner._parameters, StageParameters):
        vars(owner)["_parameters"] = StageParameters(owner._parameters)
    cast(StageParameters, owner._parameters).elsewhere[leaf] = name


def registered(root: nn.Module, name: str) -> Any:
    """The parameter or buffer of a dotted name under ``root``."""
    owner, leaf = container(root, name)
    return owner._parameters[leaf] if leaf in owner._parameters else owner._buffers[leaf]


def as_dtensor(local: torch.Tensor, mesh: DeviceMesh, layout: Layout, shape: tuple[int, ...] | None = None) -> DTensor:
    """The DTensor with local shard ``local``. ``shape``: the global shape, needed for uneven shards."""
    if shape is None:
        return DTensor.from_local(local, mesh, to_torch(layout), run_check=False)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, to_torch(layout), run_check=False, shape=torch.Size(shape), stride=stride)


def elsewhere(value: DTensor, keep: Keep) -> DTensor:
    """The DTensor with its shard outside of the device; one on the meta device stays there."""
    return value if value.is_meta else DTensor(keep(value._local_tensor), value._spec, requires_grad=False)


def outside(local: torch.Tensor, mesh: DeviceMesh, layout: Layout, shape: tuple[int, ...]) -> DTensor:
    """The DTensor with a local shard that is not on the mesh's devices, and stays where it is."""
    spec = as_dtensor(torch.empty_like(local, device="meta"), mesh, layout, shape)._spec
    return DTensor(local, spec, requires_grad=False)


def live_elsewhere(parameter: torch.Tensor, keep: Keep) -> None:
    """Mark a parameter whose values `set_value` shall keep outside of the device."""
    setattr(parameter, KEPT, keep)


def is_table(parameter: torch.Tensor) -> bool:
    """Whether a parameter lives on the host, and is looked up there."""
    keep = getattr(parameter, KEPT, None)
    return keep is table_memory or isinstance(keep, CachedMemory)


def tiers_of(offload: Offload, name: str, parameter: torch.Tensor) -> Offload:
    """The tiers of a parameter, by its first name."""
    return offload.of(name, (name,) if is_table(parameter) else ())


def taking_any_gradient(output: torch.Tensor) -> torch.Tensor:
    """An output of a program, which takes a whole gradient where it is a DTensor (``output.backward(weights)``), and a
    DTensor's where it is plain (of a loss to which terms of the parameters were added)."""
    if output.grad_fn is not None:
        if isinstance(output, DTensor):
            mesh, placements = output.device_mesh, [Replicate() if p.is_partial() else p for p in output.placements]
            output.register_hook(lambda g: g if g is None or isinstance(_single(g), DTensor) else DTensor.from_local(
                g, mesh, run_check=False).redistribute(placements=placements))
        else:
            output.register_hook(lambda g: g.full_tensor() if isinstance(_single(g), DTensor) else g)
    return output


def _single(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient. Raises InputError for one of vmap's, of which ranks would read what is sent before it is there."""
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    if local is not None and (torch._C._functorch.is_legacy_batchedtensor(local)
                              or torch._C._functorch.is_batchedtensor(local)):
        raise InputError("backward of several vectors at once (is_grads_batched=True, vectorize=True) cannot be sent\n "
                         " Call torch.autograd.grad(..., retain_graph=True) once for each vector.")
    return gradient


class _LocalShards(torch.autograd.Function):
    """`DTensor.to_local` of many DTensors in one autograd node, which is four times as fast."""

    @staticmethod
    def forward(ctx: Any, handed_over: bool, *values: DTensor) -> tuple[torch.Tensor, ...]:
        ctx.handed_over, ctx.values, ctx.specs = handed_over, values, [value._spec for value in values]
        ctx.versions = [value._version for value in values]
        ctx.set_materialize_grads(False)
        return tuple((shard := read_by_programs(value)).view_as(shard) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        owned = [None if g is None else own_rows_of(g) if g.is_sparse else g.contiguous()
                 for g in gradients] if ctx.handed_over else _own(gradients)
        if ctx.versions != (now := [value._version for value in ctx.values]):
            number = next(n for n, (was, version) in enumerate(zip(ctx.versions, now, strict=True)) if was != version)
            raise InputError(f"a parameter {list(ctx.values[number].shape)} was written to between forward and "
                             "backward, which would take its new values\n  Write to parameters after backward.")
        made = _gradient_to_differentiate if torch.is_grad_enabled() else _gradient
        return None, *(None if g is None else made(g, spec) for g, spec in zip(owned, ctx.specs, strict=True))


def _own(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The gradients, contiguous, each in memory of its own: autograd may give two parameters one tensor, or the user's,
    and adds to the gradient of a parameter in place."""
    seen, made, held = set[int](), list[torch.Tensor | None](), _count_of_own()
    for g in gradients:
        if g is not None and g.is_sparse:
            g = own_rows_of(g)
        elif g is not None:
            g = g.contiguous()
            shared = g._use_count() > held or g.data_ptr() in seen  # type: ignore[attr-defined]
            g = g.clone() if shared else g
            seen.add(g.data_ptr())
        made.append(g)
    return made


@cache
def _count_of_own() -> int:
    """The `_use_count` of a gradient that only autograd has: 1 in torch 2.13, 2 in torch 2.11."""
    counts = list[int]()
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(1, device="cpu", requires_grad=True)
        _Counted.apply(counts, x).mul(2).sum().backward()
    return counts[0]


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, counts: list[int], x: torch.Tensor) -> torch.Tensor:
        ctx.counts = counts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.counts.append(gradient._use_count())  # type: ignore[attr-defined]
        return None, gradient


class _Gradient(DTensor):
    """A gradient on its way to a parameter, which becomes a DTensor when autograd detaches it, without DTensor's slow
    dispatch."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return DTensor.__new__(DTensor, args[0]._local_tensor, args[0]._spec, requires_grad=False)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _gradient(local: torch.Tensor, spec: Any) -> DTensor:
    """A contiguous local gradient as a DTensor: torch's fused optimizers assume the parameter's strides. (Made without
    `DTensor.__init__`, which only looks for a compiler's trace, in which no backward of ours runs.)"""
    if local.is_sparse:
        return sparse_gradient(local, spec)
    return _Gradient.__new__(_Gradient, local, spec, requires_grad=False)


def _gradient_to_differentiate(local: torch.Tensor, spec: Any) -> DTensor:
    if local.is_sparse:
        raise InputError(f"backward(create_graph=True) through lookups with sparse gradients (sparse=True), of a table "
                         f"{list(spec.shape)}: torch does not differentiate those again\n  Write sparse=False.")
    return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)


def local_shards(values: Sequence[torch.Tensor], together: bool = True, handed_over: bool = False
                 ) -> list[torch.Tensor]:
    """The tensors with each DTensor replaced by its local shard; differentiable. ``together``: by one autograd node,
    which hands all gradients on at the end of backward; else each when it is there. ``handed_over``: who gives the
    gradients to backward drops them, so that they need no memory of their own."""
    trainable = [v for v in values if isinstance(v, DTensor) and v.requires_grad]
    _count_of_own()    # not within backward, which it runs
    shards = iter(() if not trainable else _LocalShards.apply(handed_over, *trainable) if together else
                  [_at_once(value) for value in trainable])
    with torch.no_grad():  # without an autograd node
        return [v if not isinstance(v, DTensor) else next(shards) if v.requires_grad else read_by_programs(v)
                for v in values]


def _at_once(value: DTensor) -> torch.Tensor:
    """Its local shard, whose gradient is handed on as soon as it is there: autograd runs the node that was made last
    first (torch/csrc/autograd/engine.cpp, `CompareNodeTaskTime`), and would keep this one, made first, to the end."""
    (shard,) = _LocalShards.apply(False, value)
    if shard.grad_fn is not None:
        shard.grad_fn._set_sequence_nr(2**63)
    return shard


def shared_seed(seed: int) -> int:
    """Rank 0's ``seed``, on all ranks."""
    return decide_once(lambda: seed)


def local_shard(value: torch.Tensor, mesh: DeviceMesh, layout: Layout) -> torch.Tensor:
    """This rank's shard of a global tensor (a view, but of an interleaved layout)."""
    return cut_out(value, local_boxes(tuple(value.shape), layout, mesh.shape, mesh.get_coordinate() or ()))


def cut_out(value: torch.Tensor, boxes: Sequence[Box]) -> torch.Tensor:
    """The shard that is made of these boxes of a global tensor (a view of one box)."""
    def of_box(box: Box) -> torch.Tensor:
        part = value
        for dim, (start, length) in enumerate(zip(box.offsets, box.shape, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    return joined_boxes(boxes, of_box)


def joined_boxes(boxes: Sequence[Box], read: Callable[[Box], torch.Tensor]) -> torch.Tensor:
    """A rank's shard, of which ``read`` gives each box."""
    parts = [read(box) for box in boxes]
    if len(parts) == 1:
        return parts[0]
    ends = [[at + n for at, n in zip(box.local_offsets, box.shape, strict=True)] for box in boxes]
    made = parts[0].new_empty([max(of_dim) for of_dim in zip(*ends, strict=True)])
    for box, end, part in zip(boxes, ends, parts, strict=True):
        made[tuple(map(slice, box.local_offsets, end))] = part
    return made


def set_value(parallel: nn.Module, name: str, value: torch.Tensor, device: torch.device) -> None:
    """Set a parameter or buffer of the parallel module to a global tensor or a DTensor (then all ranks call this).

    The tensor stays the same object, also one on the meta device, so optimizers and hooks keep it. Raises InputError
    for an unknown name, another shape, or a meta tensor with weak references.
    """
    owner, leaf = container(parallel, name)
    old = owner._parameters.get(leaf) if leaf in owner._parameters else owner._buffers.get(leaf)
    if old is None:
        raise InputError(f"the model has no parameter or buffer {name!r}")
    if tuple(old.shape) != tuple(value.shape):
        raise InputError(f"{name} has shape {list(old.shape)}, the value given {list(value.shape)}")
    if isinstance(value, DTensor) and value.device_mesh != getattr(old, "device_mesh", None):
        value = value.full_tensor()
    if not isinstance(old, DTensor):
        made: torch.Tensor = value.to(device=device, dtype=old.dtype).clone()
    else:
        mesh, layout = old.device_mesh, from_torch(tuple(old.placements))
        if isinstance(value, DTensor):
            local = value.redistribute(mesh, to_torch(layout)).to_local()
        else:
            local = local_shard(value, mesh, layout)
        if (keep := getattr(old, KEPT, None)) is None:
            local = local.to(device=device, dtype=old.dtype).contiguous().clone()
            made = as_dtensor(local, mesh, layout, tuple(old.shape))
        else:
            local = local.to(device="cpu", dtype=old.dtype)
            made = outside(keep(local) if old.is_meta else local, mesh, layout, tuple(old.shape))
            if old.is_meta and isinstance(keep, CachedMemory):
                made = keep.placed(made)
    if old.device.type != "meta":
        with torch.no_grad():
            old.copy_(made)
    else:
        _become(name, old, nn.Parameter(made, old.requires_grad) if isinstance(old, nn.Parameter) else made)


def _become(name: str, old: torch.Tensor, made: torch.Tensor) -> None:
    """Turn the meta tensor ``old`` into ``made`` in place; hooks and attributes stay."""
    check_unwatched(name, old)
    kept, hooks, hooks_after = dict(vars(old)), old._backward_hooks, old._post_accumulate_grad_hooks
    torch.utils.swap_tensors(old, made)
    vars(old).update(kept)
    if hooks is not None:
        old._backward_hooks = hooks
    if hooks_after is not None:
        old._post_accumulate_grad_hooks = hooks_after


def check_unwatched(name: str, old: torch.Tensor) -> None:
    """Raises InputError if a meta tensor has weak references: torch cannot swap it for one with values."""
    if weakref.getweakrefcount(old):
        raise InputError(f"{name} is on the meta device, and gets no values while there is a weak reference to it: "
                         "make those (weakref.ref, WeakKeyDictionary) after init_weights() or load_state_dict(...)")


def names_of(module: nn.Module) -> set[str]:
    """Names of all parameters and buffers, duplicates included."""
    named = *module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)
    return {name for name, _ in named}


def init_weights(model: nn.Module, parallel: nn.Module, mesh: DeviceMesh, device: torch.device, seed: int,
                 dropped: Collection[str]) -> None:
    """Initialise meta parameters and buffers module by module: whole tensors of one module exist at a time, of which
    the local shards are kept. All ranks draw from ``seed``. ``dropped``: parameters that had values when they were
    placed."""
    for name, parameter in parallel.named_parameters():
        if parameter.is_meta:
            check_unwatched(name, parameter)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        done: set[int] = set()
        for path, module in model.named_modules():
            tensors = {**module._parameters, **module._buffers}
            owned = {k: t for k, t in tensors.items() if t is not None and id(t) not in done}
            done.update(id(t) for t in owned.values())
            without_values = {leaf for leaf, t in owned.items()
                              if t.device.type == "meta" and f"{path}.{leaf}".strip(".") not in dropped}
            _fill(model, module, path, parallel, without_values, device)


def lost_buffers(model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Fresh values of non-persistent meta buffers (rotary frequencies), which no state dict has, by name."""
    found = {}
    for path, module in model.named_modules():
        lost = {leaf for leaf in module._non_persistent_buffers_set
                if (buffer := module._buffers[leaf]) is not None and buffer.device.type == "meta"}
        if lost:
            made = _initialised(model, module, path, device)
            found.update({f"{path}.{leaf}" if path else leaf: made[leaf] for leaf in lost})
    return found


def _fill(model: nn.Module, module: nn.Module, path: str, parallel: nn.Module, leaves: set[str],
          device: torch.device) -> None:
    if leaves:
        names = [f"{path}.{leaf}" if path else leaf for leaf in leaves]
        if all(is_table(registered(parallel, name)) for name in names):
            device = torch.device("cpu")    # a table may be larger than the device's memory
        for leaf, value in _initialised(model, module, path, device).items():
            if leaf in leaves:
                set_value(parallel, f"{path}.{leaf}" if path else leaf, value, device)


def _initialised(model: nn.Module, module: nn.Module, path: str, device: torch.device) -> dict[str, torch.Tensor]:
    """The module's own parameters and buffers with initial values; the module itself stays on the meta device.

    Uses the model's ``_init_weights(module)``, else ``module.reset_parameters()``; InputError if there is neither.
    """
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
