"""Ops of which torch has no rule for DTensors: each rank computes the whole.

torch's own formulas of gradients mix DTensors with plain tensors that they make themselves, as that of ``prod`` joins
ones to a part of its input. These are equal on all ranks, as are plain indices that a script gives; ranks compare them
by a hash. Dims of unequal shards, as of a last batch that is smaller, are joined to others
(``logits.view(-1, classes)``) once they are whole. ``torch.stack`` and ``torch.cat`` take values of several partial
placements (sums, norms, maxima) once they are whole. ``squeeze_`` changes the shape of shards, and not the DTensor's,
so that the next op takes other dims: refused.
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
from autoparallel.runtime.places import plain_as_whole

aten = torch.ops.aten
#: Torch has no rule of these, or none with plain arguments.
_WHOLE = ("take", "put", "_pdist_forward", "_pdist_backward", "unfold", "unfold_backward", "_trilinear",
          "multi_margin_loss", "multi_margin_loss_backward", "multilabel_margin_loss_forward",
          "multilabel_margin_loss_backward", "_ctc_loss", "_ctc_loss_backward", "native_group_norm_backward",
          "avg_pool2d_backward", "_prelu_kernel_backward", "hardtanh_backward", "index_fill", "searchsorted",
          "bucketize")
#: Torch has rules of these, but not with plain tensors, which its formulas of gradients make.
_IN_BACKWARD = (aten.cat.default, aten.where.self, aten.scatter_add.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_UNEQUAL = "unevenly sharded tensor"
_Run = Callable[[list[Handler | None], Any, tuple[Any, ...], dict[str, Any]], Any]


@cache
def compute_whole() -> None:
    """Run these so, from now on, for DTensors on the meshes of parallel modules."""
    for op in chain.from_iterable(_overloads(name) for name in _WHOLE):
        _set(op, _whole)
    for op in _IN_BACKWARD:
        _set(op, _mixed)
    for op in _VIEWS:
        _set(op, _view)
    for op in _overloads("squeeze_"):
        _set(op, _refuse)
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
    args, kwargs = pytree.tree_map(_local, plain_as_whole((args, kwargs), given[0]))
    return plain_as_whole(op(*args, **kwargs), given[0], compare=False)


def _local(value: Any) -> Any:
    return replicated(value)._local_tensor if isinstance(value, DTensor) else value


def _mixed(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In backward, plain tensors are those of the whole. (Those without dims torch takes itself.)"""
    tensors = _tensors(args, kwargs)
    given, plain = ([v for v in tensors if isinstance(v, DTensor) == kind] for kind in (True, False))
    if any(v.dim() for v in plain) and torch._C._current_graph_task_id() != -1 and all(map(is_watched, given)):
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
    return as_before(before, op, (replicated(args[0]), *args[1:]), kwargs)


def _refuse(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_watched(args[0]):
        return as_before(before, op, args, kwargs)
    raise InputError(f"squeeze_ is asked of a DTensor {list(args[0].shape)}: torch changes the shape of its shards, "
                     "and not its own\n  Write value = value.squeeze(dim).")


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
