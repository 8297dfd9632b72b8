"""Writes to places of a DTensor: ``weight[3] = 0``, ``weight[ids] = rows``, ``weight.fill_diagonal_(0)``.

torch selects along a sharded dim from a gathered copy, to which a write changes nothing, has no rule for most indices,
and takes no plain values. Here each rank makes the mask of the places and the values that come there, of the whole
tensor, and keeps what is of its shard. Plain indices and values are those of the whole, equal on all ranks, which
compare them by a hash. Gradients flow as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoparallel.errors import InputError
from autoparallel.runtime.inputs import form_text, hash_of, hash_of_values


def write(tensor: DTensor, index: Any, value: Any) -> None:
    """``tensor[index] = value``, whatever of these is a DTensor. All ranks call this. Raises InputError on all of them
    for plain tensors that differ."""
    index, value = pytree.tree_map(_whole, index), _whole(value)
    with torch.no_grad():
        _compare([leaf for leaf in pytree.tree_leaves((index, value)) if isinstance(leaf, Tensor)], tensor)
        places = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
        places[index] = True
    values = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    values[index] = value
    tensor.copy_(torch.where(_laid_out(places, tensor), _laid_out(values, tensor), tensor))


def write_selected(selected: DTensor, base: DTensor, write_to: Callable[[Any], object]) -> None:
    """Write to what was selected from ``base`` and is a copy of it, and to the places of ``base`` that it is of. All
    ranks call this, without gradients."""
    with torch.no_grad():
        now: Any = selected._view_func_unsafe(base)           # base may have changed since
        selected._local_tensor.copy_(now.redistribute(placements=selected.placements)._local_tensor)
        write_to(selected)
        empty: Any = torch.zeros(base.shape, dtype=base.dtype, device=base.device)
        values, places = empty, empty.clone()                 # of base's dtype: a view may be of another
        selected._view_func_unsafe(values).copy_(selected.full_tensor())
        selected._view_func_unsafe(places).fill_(1)
        base.copy_(torch.where(_laid_out(places != 0, base), _laid_out(values, base), base))


def plain_as_whole(values: Any, tensor: DTensor, compare: bool = True) -> Any:
    """Arguments of a read or write of ``tensor``: plain ones as DTensors that every rank has whole. Raises InputError
    where the ranks' differ."""
    plain = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)]
    if compare:
        _compare(plain, tensor)
    mesh = tensor.device_mesh
    return pytree.tree_map(lambda leaf: DTensor.from_local(leaf, mesh, [Replicate()] * mesh.ndim, run_check=False)
                           if any(leaf is one for one in plain) else leaf, values)


def _compare(given: Sequence[Tensor], tensor: DTensor) -> None:
    if not given:
        return
    mesh, ours = tensor.device_mesh, torch.tensor([hash_of([(form_text(one), hash_of_values(one)) for one in given])])
    every = DTensor.from_local(ours.to(tensor.device), mesh, [Shard(0)] * mesh.ndim, run_check=False).full_tensor()
    if bool((every != every[0]).any()):
        raise InputError(f"ranks read or write other places, or other values, of a DTensor {list(tensor.shape)} with "
                         f"placements {tensor.placements}\n  Plain values and indices are of the whole tensor: give "
                         "the same on all ranks (draw random ones with the same seed).")


def fill_diagonal(tensor: DTensor, fill_value: Any, wrap: bool = False) -> DTensor:
    """``tensor.fill_diagonal_(fill_value, wrap)``."""
    places = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device).fill_diagonal_(True, wrap)
    tensor.masked_fill_(_laid_out(places, tensor), fill_value)
    return tensor


def fill_where(tensor: DTensor, mask: Tensor, value: Any) -> None:
    """``tensor[mask] = value`` for a mask of the first dims, or of all, and one number."""
    whole: Any = mask.reshape(*mask.shape, *[1] * (tensor.dim() - mask.dim())).expand(tensor.shape)
    tensor.masked_fill_(whole if isinstance(whole, DTensor) else _laid_out(whole.contiguous(), tensor), value)


def _laid_out(whole: Tensor, tensor: DTensor) -> DTensor:
    """A tensor that every rank has whole, in the placements of ``tensor``; summands stay whole."""
    mesh = tensor.device_mesh
    made = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return made.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


__all__ = ["fill_diagonal", "fill_where", "plain_as_whole", "write", "write_selected"]
