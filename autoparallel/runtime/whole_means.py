"""Losses and sums of DTensors that torch computes as if a shard were the whole: computed of the whole.

torch divides the gradient of a mean (``F.mse_loss(out, target)``) by the elements of a rank's shard, which makes it as
many times too large as there are shards; and the mean itself, of shards that are unequal, have unequal weights or
unequal numbers of ignored targets, is a mean of means. Here the loss of each element is computed, and divided by the
number, or the weight, of all. Norms and answers (``any``, ``all``) of shards are not added up or converted before they
are combined. What is written over a sum that is still to be added up (by ``1 - x`` in C++) counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.distributed.tensor import Partial

from autoparallel.runtime.dtensors import Handler, as_before, hold_whole, is_watched, replicated, set_handler

aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # torch's numbers of ways to reduce
_LOSSES = (aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
           aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
           aten.soft_margin_loss.default)
_GRADIENTS = (aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
              aten.binary_cross_entropy_backward.default, aten.soft_margin_loss_backward.default)
_PICKED = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_PICKED_GRADIENTS = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
_ADDED = (aten.sum.default, aten.sum.dim_IntList, aten._to_copy.default)
_FILLED = (aten.fill_.Scalar,)
#: (the op as torch runs it, its arguments by name) -> result.
_Mean = Callable[[Callable[[dict[str, Any]], Any], dict[str, Any]], Any]


@cache
def take_whole_means() -> None:
    """Compute these so, from now on, for DTensors on the meshes of parallel modules."""
    means: Sequence[tuple[Sequence[Any], _Mean]] = (
        (_LOSSES, _loss), (_GRADIENTS, _gradient), (_PICKED, _picked), (_PICKED_GRADIENTS, _picked_gradient))
    for ops, mean in means:
        for op in ops:
            before: list[Handler | None] = []
            before.append(set_handler(op, partial(_run, before, mean)))
    for ops, other in ((_ADDED, _add), (_FILLED, _fill)):
        for op in ops:
            before = []
            before.append(set_handler(op, partial(other, before)))


def _run(before: list[Handler | None], mean: _Mean, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in op._schema.arguments]
    given = {argument.name: argument.default_value for argument in op._schema.arguments}
    given.update(zip(names, args, strict=False), **kwargs)
    if given["reduction"] != _MEAN or not is_watched(given["self"]):
        return as_before(before, op, args, kwargs)
    return mean(lambda changed: as_before(before, op, tuple(changed[name] for name in names), {}), given)


def _loss(run: Callable[[dict[str, Any]], Any], given: dict[str, Any]) -> Any:
    return run({**given, "reduction": _NONE}).mean()


def _gradient(run: Callable[[dict[str, Any]], Any], given: dict[str, Any]) -> Any:
    shape = given["self"].shape
    each = (given["grad_output"] / math.prod(shape)).expand(shape)
    return run({**given, "reduction": _NONE, "grad_output": each})


def _picked(run: Callable[[dict[str, Any]], Any], given: dict[str, Any]) -> Any:
    """The mean of the losses of targets that are not ignored, by their classes' weights; and the sum of these."""
    losses, _ = run({**given, "reduction": _NONE})
    target, weight = given["target"], given["weight"]
    counted = target != given["ignore_index"]
    if weight is None:
        weights = counted.to(losses.dtype)
    else:
        weights = replicated(weight)[replicated(target * counted)] * replicated(counted)
    total = replicated(weights.sum())
    return replicated(losses.sum()) / total, total


def _picked_gradient(run: Callable[[dict[str, Any]], Any], given: dict[str, Any]) -> Any:
    each = (given["grad_output"] / given["total_weight"]).expand(given["target"].shape)
    return run({**given, "reduction": _NONE, "grad_output": each})


def _add(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Combine norms, or answers, of shards first."""
    value = args[0]
    if is_watched(value) and any(p.is_partial() and (value.dtype == torch.bool or type(p) is not Partial)
                                 for p in value.placements):
        args = (replicated(value), *args[1:])
    return as_before(before, op, args, kwargs)


def _fill(before: list[Handler | None], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank has the value afterwards, and the ranks' are not added up."""
    value = args[0]
    if is_watched(value) and any(p.is_partial() for p in value.placements):
        hold_whole(value)
    return as_before(before, op, args, kwargs)


__all__ = ["take_whole_means"]
