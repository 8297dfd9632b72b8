"""DTensors on the meshes of parallel modules, where torch answers for a shard as if it were the whole: refused or done.

Assigning a plain tensor to ``.data`` changes nothing of a DTensor, nor does writing to a selection along a sharded dim
(``weight[2:9].mul_(2)``), which torch makes of a gathered copy: here the shards are written to; with gradients, which
would be lost, it is refused. ``.item()``, ``float()`` and
``bool()`` of one that is sharded or a summand read this rank's part. Collectives of DTensors, which scripts for data
parallelism write by hand, are refused. A DTensor may be assigned to ``.data``; copies are as those of plain tensors,
also of gradients that lie in a bucket; summands are added up before they are written over.
Gradients of the third order and higher are complete: torch 2.13 detaches a gradient whose placement it changes.
(The one file that touches DTensor's op handlers and attributes.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial, wraps
from types import EllipsisType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._api import _FromTorchTensor
from torch.utils._pytree import tree_leaves

from autoparallel.errors import InputError
from autoparallel.runtime import interleaved, places

#: (op, arguments, keyword arguments) -> result, in place of DTensor's own way of running the op.
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_MESHES: WeakValueDictionary[int, DeviceMesh] = WeakValueDictionary()  # by id: equal meshes are several
_NUMBER = torch.ops.aten._local_scalar_dense.default
_DATA: Any = torch.Tensor.data
_SET_ITEM, _GET_ITEM, _DETACH = torch.Tensor.__setitem__, torch.Tensor.__getitem__, torch.Tensor.detach
#: The attribute of a detached copy of a selection: the selection, of which torch has forgotten the tensor.
_SELECTED = "_selected_from"
#: Methods of tensors that write in place.
_IN_PLACE = [name for name in dir(torch.Tensor)
             if (name.endswith("_") and not name.startswith("_")
                 and name not in ("requires_grad_", "detach_", "share_memory_"))
             or name in {f"__i{op}__" for op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or",
                                                 "xor", "lshift", "rshift")}]
#: The attribute of a parameter outside of the device, on the host or on disk, that has the way there.
KEPT = "_kept_elsewhere"
#: What to write where a selection cannot be written to.
_WRITE_WHOLE = ("`whole = tensor.full_tensor()`, on all ranks, and then `with torch.no_grad(): "
                "tensor.copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements))`.")
#: What torch says of summands that it would have to add up first, and of indices in shards.
_NOT_OF_SUMMANDS = "in-place operations that require placement changes are not supported"
#: What to write where code of another library reads outputs, as transformers' pipelines do.
_WHOLE = '; of outputs, autoparallel.compile(..., outputs="whole") gives them whole, as plain tensors, to any library.'
#: The users of memory that one tensor has, while they are counted.
_ALONE = 2
_BASIC = (int, slice, type(None), EllipsisType)
#: Ops of torch.distributed's collectives -> their names there.
_COLLECTIVES = {"allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "broadcast_": "broadcast",
                "reduce_": "reduce", "allgather_": "all_gather", "_allgather_base_": "all_gather_into_tensor",
                "reduce_scatter_": "reduce_scatter", "_reduce_scatter_base_": "reduce_scatter_tensor",
                "gather_": "gather", "scatter_": "scatter", "alltoall_": "all_to_all",
                "alltoall_base_": "all_to_all_single", "send": "send", "recv_": "recv"}


def watch(mesh: DeviceMesh) -> None:
    """Refuse, from now on, what is wrong of DTensors on this mesh."""
    _replace()
    _MESHES[id(mesh)] = mesh


def is_watched(value: Any) -> bool:
    """Whether a value is a DTensor on the mesh of a parallel module."""
    return isinstance(value, DTensor) and id(value.device_mesh) in _MESHES


def set_handler(op: Any, handler: Handler | None) -> Handler | None:
    """Let ``handler`` (None: DTensor's own way) run ``op`` on DTensors; returns the handler before."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    before: Handler | None = handlers.pop(op, None)
    if handler is not None:
        handlers[op] = handler
    return before


def as_before(before: Sequence[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op as it ran before a handler was set. ``before``: what `set_handler` returned."""
    ours = set_handler(op, before[0])
    try:
        return op(*args, **kwargs)
    finally:
        set_handler(op, ours)


def replicated(value: Any) -> Any:
    """A DTensor with all of it on each rank; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)


def hold_whole(tensor: DTensor) -> None:
    """Note that each rank has the values of what were summands of the ranks: they are not added up."""
    placements = tuple(Replicate() if p.is_partial() else p for p in tensor.placements)
    tensor._spec = replace(tensor._spec, placements=placements)


@cache
def _replace() -> None:
    set_handler(_NUMBER, _number)
    for op in _COLLECTIVES:
        before: list[Handler | None] = []
        before.append(set_handler(getattr(torch.ops.c10d, op).default, partial(_refuse_sending, before)))
    interleaved.handle(lambda mesh: id(mesh) in _MESHES)
    DTensor.data = property(partial(_detached, _DATA.__get__), _set_data)  # type: ignore[assignment]
    DTensor.detach = _detach  # type: ignore[assignment]
    DTensor.__deepcopy__ = _copied  # type: ignore[method-assign, assignment]
    DTensor.__setitem__ = _set_item  # type: ignore[assignment]
    _FromTorchTensor.backward = staticmethod(_differentiably(_FromTorchTensor.backward))  # type: ignore[method-assign]
    for name in _IN_PLACE:
        setattr(DTensor, name, _writing(getattr(torch.Tensor, name)))
    DTensor.fill_diagonal_ = _writing(_fill_diagonal)  # type: ignore[method-assign]
    for name in ("numpy", "tolist"):
        setattr(DTensor, name, _leaving(name))


def _number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value: DTensor = args[0]
    mesh = value.device_mesh
    if is_watched(value) and any(not p.is_replicate() and mesh.size(axis) > 1
                                 for axis, p in enumerate(value.placements)):
        raise InputError(f"a Python number is asked of a DTensor {list(value.shape)} with placements "
                         f"{value.placements}, of which this rank has a part only\n"
                         f"  Write value.full_tensor().item(), on all ranks{_WHOLE}")
    return op(value._local_tensor)


def _refuse_sending(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [value for value in tree_leaves((args, kwargs)) if is_watched(value)]
    if not given:
        return as_before(before, op, args, kwargs)
    raise InputError(f"torch.distributed's {_COLLECTIVES[op._opname]} is given a DTensor {list(given[0].shape)} with "
                     f"placements {given[0].placements}: parameters, gradients and outputs of a parallel module are "
                     "those of the whole model and batch already\n  Leave the call out. The whole of a sharded one is "
                     "value.full_tensor(), on all ranks; numbers of this rank's own are summed as plain tensors.")


def _set_data(tensor: DTensor, value: Any) -> None:
    if not is_watched(tensor):
        _DATA.__set__(tensor, value)
        return
    if not isinstance(value, DTensor) or hasattr(tensor, KEPT) or not _like(value, tensor):
        raise InputError(f"assigning to the data of a DTensor {list(tensor.shape)} changes nothing of it: its values "
                         "are in the local shard\n  Write into it: `with torch.no_grad(): tensor.copy_(value)`, with a "
                         "DTensor; a whole tensor as distribute_tensor(value, tensor.device_mesh, tensor.placements).")
    with torch.no_grad():
        tensor._local_tensor.data = value.redistribute(placements=tensor.placements)._local_tensor.contiguous()


def _like(value: DTensor, tensor: DTensor) -> bool:
    return (value.device_mesh == tensor.device_mesh
            and (value.shape, value.dtype, value.device) == (tensor.shape, tensor.dtype, tensor.device))


def _differentiably(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of `DTensor.from_local`, which can be differentiated where the gradient lies otherwise than the
    local tensor does: torch redistributes it outside of autograd."""

    @wraps(backward)
    def differentiable(ctx: Any, gradient: DTensor | None) -> Any:
        if torch.is_grad_enabled() and gradient is not None and gradient.requires_grad and is_watched(gradient):
            wanted = ctx.grad_placements or [Replicate() if p.is_partial() else p for p in ctx.forward_input_placements]
            gradient = gradient.redistribute(placements=wanted)
        return backward(ctx, gradient)

    return differentiable


def _copied(tensor: DTensor, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy``: of a parameter without its gradient, as torch does of plain ones, in the memory in which it
    lives; and of a shard that is a view, for which torch copies memory that a DTensor has not."""
    parameter = isinstance(tensor, torch.nn.Parameter)
    if not is_watched(tensor) or not tensor.is_leaf or not (parameter or tensor._local_tensor.storage_offset()):
        return torch.Tensor.__deepcopy__(tensor, memo)
    if id(tensor) not in memo:
        keep = deepcopy(getattr(tensor, KEPT, None), memo)
        copy: Any = tensor.detach().clone() if keep is None or tensor.is_meta else \
            DTensor(keep(tensor._local_tensor), tensor._spec, requires_grad=False)
        memo[id(tensor)] = copy = torch.nn.Parameter(copy, tensor.requires_grad) if parameter else copy
        if keep is not None:
            setattr(copy, KEPT, keep)
    return memo[id(tensor)]


def _writing(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that writes in place, refused on a selection that is a copy. What the ranks have yet to add up, or to
    take the norm of, they do before, where torch does not write to the summands."""

    @wraps(method)
    def written(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        if tensor._base is not None and any(map(_is_plain, tree_leaves((args, kwargs)))) and is_watched(tensor):
            args, kwargs = places.plain_as_whole((args, kwargs), tensor)
        if (selected := _copy_selected(tensor)) is not None:
            _write_through(tensor, selected, method, args, kwargs)
            return tensor
        try:
            return method(tensor, *args, **kwargs)
        except RuntimeError as error:
            if not is_watched(tensor) or _NOT_OF_SUMMANDS not in str(error) or not combine(tensor):
                raise
        return method(tensor, *args, **kwargs)

    return written


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and not isinstance(value, DTensor)


def _fill_diagonal(tensor: DTensor, fill_value: Any, wrap: bool = False) -> torch.Tensor:
    fill = places.fill_diagonal if is_watched(tensor) else torch.Tensor.fill_diagonal_
    return fill(tensor, fill_value, wrap)


def combine(tensor: DTensor) -> bool:
    """Give each rank the whole of what were the ranks' summands. False where there are none, or other tensors have
    their memory: views would not see what is written."""
    users = torch._C._storage_Use_Count(tensor._local_tensor.untyped_storage()._cdata)
    if users > _ALONE or not any(p.is_partial() for p in tensor.placements):
        return False
    with torch.no_grad():
        summands: Any = tensor.detach()
        whole = summands.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
    tensor._local_tensor, tensor._spec = whole._local_tensor, whole._spec
    return True


def _leaving(name: str) -> Callable[..., Any]:
    """A method that leaves torch, refused on a part."""
    method = getattr(torch.Tensor, name)

    @wraps(method)
    def left(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        if is_watched(tensor):
            raise InputError(f".{name}() is asked of a DTensor {list(tensor.shape)} with placements "
                             f"{tensor.placements}\n  Write value.full_tensor().{name}(), on all ranks{_WHOLE}")
        return method(tensor, *args, **kwargs)

    return left


def _set_item(tensor: DTensor, index: Any, value: Any) -> None:
    if not is_watched(tensor):
        _SET_ITEM(tensor, index, value)
        return
    number = not isinstance(value, torch.Tensor) or not (value.dim() or value.requires_grad)
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool and number:
        places.fill_where(tensor, index, value)      # torch takes the shard for the whole, or refuses it
    elif (selected := _copy_selected(tensor)) is not None:
        _write_through(tensor, selected, partial(places.write, index=index), (), {"value": value})
    elif isinstance(value, DTensor) and _selects_a_view(tensor, index):
        _SET_ITEM(tensor, index, value)
    else:
        places.write(tensor, index, value)


def _selects_a_view(tensor: DTensor, index: Any) -> bool:
    """Whether torch selects what is written to within the tensor's memory."""
    if not all(isinstance(i, _BASIC) for i in (index if isinstance(index, tuple) else (index,))):
        return False
    with torch.no_grad():
        return not _is_copy(_GET_ITEM(tensor, index), tensor)


def _is_copy(selected: Any, base: Any) -> bool:
    """Whether torch made a view of a DTensor of other memory than the DTensor's, for a gathered copy."""
    return isinstance(selected, DTensor) and bool(selected.numel()) and (
        selected._local_tensor.untyped_storage()._cdata != base._local_tensor.untyped_storage()._cdata)


def _copy_selected(tensor: DTensor) -> DTensor | None:
    """The selection that a tensor is (detached: of which it has the memory), if it is a copy of what it was selected
    from, or a part of a detached one; None for other tensors."""
    base: Any = tensor._base
    if base is None:
        return getattr(tensor, _SELECTED, None)
    return tensor if is_watched(base) and (hasattr(base, _SELECTED) or _is_copy(tensor, base)) else None


def _detached(detach: Callable[[Any], Any], tensor: DTensor) -> Any:
    """``.data`` or ``.detach()``: of a copy with a note of it, since what is written there belongs to the whole. (Not
    of what was computed: the note would keep its graph.)"""
    made = detach(tensor)
    if is_watched(tensor) and (selected := _copy_selected(tensor)) is not None and (
            selected._base is not None and selected._base.is_leaf):
        setattr(made, _SELECTED, selected)
    return made


def _detach(tensor: DTensor) -> Any:
    return _detached(_DETACH, tensor)


def _write_through(tensor: DTensor, selected: DTensor, method: Callable[..., Any], args: tuple[Any, ...],
                   kwargs: dict[str, Any]) -> None:
    """Write to a copy, and to what it was selected from. Raises InputError where a gradient would be lost, or the
    selection is one of a detached selection."""
    base: Any = selected._base
    given = [value for value in tree_leaves((tensor, args, kwargs)) if isinstance(value, torch.Tensor)]
    if hasattr(base, _SELECTED) or (
            torch.is_grad_enabled() and any(value.requires_grad for value in given)):
        raise InputError(f"writing to {list(selected.shape)} of a DTensor {list(base.shape)} with placements "
                         f"{base.placements} changes nothing of it: a selection along a sharded dim is a copy\n"
                         f"  Write under torch.no_grad() to the tensor itself, or to the whole: {_WRITE_WHOLE}")
    places.write_selected(selected, base, lambda copy: method(copy, *args, **kwargs))


__all__ = ["KEPT", "Handler", "as_before", "combine", "hold_whole", "is_watched", "replicated", "set_handler", "watch"]
