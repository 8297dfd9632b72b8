"""Ops of which torch has no rule for DTensors: each rank computes the whole.

torch's own formulas of gradients mix DTensors with plain tensors that they make themselves, as that of ``prod`` joins
ones to a part of its input. These are equal on all ranks, as are plain indices that a script gives; ranks compare them
by a hash. Dims of unequal shards, as of a last batch that is smaller, are joined to others
(``logits.view(-1, classes)``) once they are whole. A warning tells of large tensors. ``torch.stack`` and ``torch.cat``
take values of several partial placements (sums, norms, maxima) once they are whole. ``squeeze_`` and others that change
a shape in place change that of the DTensor too, which torch leaves as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoparallel.errors import InputError
from autoparallel.runtime.dtensors import Handler, as_before, combine, is_watched, replicated, set_handler
from autoparallel.runtime.gathered import gathered
from autoparallel.runtime.places import plain_as_whole

aten = torch.ops.aten
#: Torch has no rule of these, or none with plain arguments.
_WHOLE = ("take", "put", "_pdist_forward", "_pdist_backward", "unfold", "unfold_backward", "_trilinear",
          "multi_margin_loss", "multi_margin_loss_backward", "multilabel_margin_loss_forward",
          "multilabel_margin_loss_backward", "_ctc_loss", "_ctc_loss_backward", "native_group_norm_backward",
          "avg_pool2d_backward", "_prelu_kernel_backward", "hardtanh_backward", "index_fill", "searchsorted",
          "bucketize", "nonzero", "bincount", "_unique2", "unique_dim", "unique_consecutive", "histogram", "allclose",
          "block_diag", "reflection_pad1d", "reflection_pad1d_backward", "reflection_pad2d",
          "reflection_pad2d_backward")
#: Torch has rules of these, but not with plain tensors, which its formulas of gradients make.
_IN_BACKWARD = (aten.cat.default, aten.where.self, aten.eq.Tensor)
#: Torch has rules of most of these, but not with plain indices, masks or values.
_AT_PLACES = ("gather", "index_select", "index_add", "index_copy", "index_reduce", "scatter", "scatter_add",
              "scatter_reduce", "masked_fill", "masked_select", "masked_scatter", "isin")
#: Their forms in place.
_TO_PLACES = ("index_fill_", "put_", "index_put_", "index_add_", "index_copy_", "index_reduce_", "scatter_",
              "scatter_add_", "scatter_reduce_")
_VIEWS = (aten.view.default, aten._unsafe_view.default)
#: Without these an op sees the shape of a DTensor, and not its shards.
_OF_DTENSORS = (torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
                | torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot))
_UNEQUAL = "unevenly sharded tensor"
_Run = Callable[[list[Handler | None], Any, tuple[Any, ...], dict[str, Any]], Any]


@cache
def compute_whole() -> None:
    """Run these so, from now on, for DTensors on the meshes of parallel modules."""
    for op in chain.from_iterable(_overloads(name) for name in _WHOLE):
        _set(op, _whole)
    for op in chain.from_iterable(map(_overloads, _AT_PLACES)):
        _set(op, _at_places)
    for op in chain.from_iterable(map(_overloads, _TO_PLACES)):
        _set(op, _to_places)
    for op in _IN_BACKWARD:
        _set(op, _mixed)
    for op in _VIEWS:
        _set(op, _view)
    for op in chain.from_iterable(map(_overloads, ("squeeze_", "unsqueeze_", "transpose_", "t_"))):
        _set(op, _shape_in_place)
    _set(aten.stack.default, _joined)
    _set(aten.masked_fill_.Scalar, _masked_fill)
    _set(aten.log_sigmoid_backward.default, _log_sigmoid_backward)


def _overloads(name: str) -> list[Any]:
    packet = getattr(aten, name)
    return [getattr(packet, each) for each in packet.overloads() if each != "grad_input" and not each.endswith("out")]


def _set(op: Any, run: _Run) -> None:
    before: list[Handler | None] = []
    before.append(set_handler(op, partial(run, before)))


def _tensors(*values: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _whole(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on whole tensors, whose results all ranks have."""
    given = [value for value in _tensors(args, kwargs) if isinstance(value, DTensor)]
    if not all(map(is_watched, given)):
        return as_before(before, op, args, kwargs)
    args, kwargs = pytree.tree_map(partial(_local, op), plain_as_whole((args, kwargs), given[0]))
    return plain_as_whole(op(*args, **kwargs), given[0], compare=False)


def _local(op: Any, value: Any) -> Any:
    return gathered(op, value)._local_tensor if isinstance(value, DTensor) else value


def _at_places(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With plain tensors, those of the whole."""
    given, plain = _kinds(args, kwargs)
    if not plain or not all(map(is_watched, given)) or _is_of_fewer_rows(op, args):
        return as_before(before, op, args, kwargs)
    return _whole(before, op, args, kwargs)


def _to_places(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Written to the whole, of which each rank keeps its shard."""
    given, plain = _kinds(args, kwargs)
    target = args[0]
    if not is_watched(target) or not plain or not all(map(is_watched, given)) or _is_of_fewer_rows(op, args):
        return as_before(before, op, args, kwargs)
    if any(p.is_partial() for p in target.placements) and not combine(target):
        raise InputError(f"{op._opname} is asked of a DTensor {list(target.shape)} with placements "
                         f"{target.placements}, whose summands other tensors share\n  Write value = value.clone() "
                         "first.")
    whole = pytree.tree_map(partial(_local, op), plain_as_whole((args, kwargs), target))
    made = plain_as_whole(op(whole[0][0].clone(), *whole[0][1:], **whole[1]), target, compare=False)
    target._local_tensor.copy_(made.redistribute(placements=target.placements)._local_tensor)
    return target


def _is_of_fewer_rows(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether an index has an entry for some rows only, as one of this rank's rows has: torch refuses the mixture."""
    if not op._opname.startswith(("gather", "scatter")):
        return False
    value, dim, index = args[:3]
    return any(value.shape[d] != index.shape[d] for d in range(value.dim()) if d != dim % value.dim())


def _kinds(*values: Any) -> tuple[list[Any], list[Any]]:
    """The DTensors, and the plain tensors with dims."""
    given, plain = ([v for v in _tensors(*values) if isinstance(v, DTensor) == kind] for kind in (True, False))
    return given, [value for value in plain if value.dim()]


def _mixed(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In backward, plain tensors are those of the whole. (Those without dims torch takes itself.)"""
    given, plain = _kinds(args, kwargs)
    if plain and torch._C._current_graph_task_id() != -1 and all(map(is_watched, given)):
        args, kwargs = plain_as_whole((args, kwargs), given[0])
    return _joined(before, op, args, kwargs) if op is aten.cat.default else as_before(before, op, args, kwargs)


def _joined(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Partial values of several kinds are reduced first."""
    given = _tensors(args)
    if all(map(is_watched, given)) and len({repr(p) for v in given for p in v.placements if p.is_partial()}) > 1:
        args = ([replicated(value) if any(p.is_partial() for p in value.placements) else value for value in args[0]],
                *args[1:])
    return as_before(before, op, args, kwargs)


def _view(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return as_before(before, op, args, kwargs)
    except RuntimeError as error:
        if not is_watched(args[0]) or _UNEQUAL not in str(error):
            raise
    return as_before(before, op, (gathered(op, args[0]), *args[1:]), kwargs)


def _shape_in_place(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The shape of the shards and of the DTensor. Refused of a view, and of a dim that is sharded, as the values would
    lie elsewhere then."""
    value = args[0]
    if not is_watched(value):
        return as_before(before, op, args, kwargs)
    method = op._opname.removesuffix("_")
    made = getattr(value, method)(*args[1:], **kwargs)
    is_sharded = [p.is_shard() for p in made.placements] != [p.is_shard() for p in value.placements]
    if is_sharded or value._base is not None:
        raise InputError(f"{method}_ is asked of a DTensor {list(value.shape)} with placements {value.placements}, "
                         f"{'of a dim that is sharded' if is_sharded else 'which is a view'}: torch changes the shape "
                         f"of its shards, and not its own\n  Write value = value.{method}(...).")
    with torch._C._ExcludeDispatchKeyGuard(_OF_DTENSORS):
        op(*args, **kwargs)
    value._local_tensor, value._spec = made._local_tensor, made._spec
    return value


def _masked_fill(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A partial value, as gradients of norms and standard deviations are, is reduced first, unless a view shares its
    memory."""
    if is_watched(args[0]):
        combine(args[0])
    return as_before(before, op, args, kwargs)


def _log_sigmoid_backward(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradient, value, _ = args
    if not is_watched(gradient) or not is_watched(value):
        return as_before(before, op, args, kwargs)
    return gradient * torch.sigmoid(-value)


__all__ = ["compute_whole"]
