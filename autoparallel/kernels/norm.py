"""Norms: along a cut dim, where each row's statistics are all-reduced, forward and backward; whole, in one op."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autoparallel.kernels import groups
from autoparallel.kernels.collectives import all_reduce_tensor
from autoparallel.kernels.groups import Axis
from autoparallel.ops.arguments import arguments

Tensor = torch.Tensor
aten = torch.ops.aten


class _Normed(torch.autograd.Function):
    """Normalised rows of x [rows, shard of the normed elements], ``centred`` as layer norm, else as RMS norm; and
    1 / deviation of each row, which only gradients that are differentiated again read.

    ``count``: elements of a whole row. Backward is that of layer norm (Ba et al. 2016), with y the result:
    (g - y * mean(g * y) [- mean(g) if centred]) / deviation.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: tuple[Axis, ...], count: int, eps: float,
                centred: bool) -> tuple[Tensor, Tensor]:
        ctx.call = axes, count, centred
        ctx.set_materialize_grads(False)
        if centred:
            x = x - _total(x.sum(1), axes).unsqueeze(1) / count
        scale = torch.rsqrt(_total(x.square().sum(1), axes) / count + eps).unsqueeze(1)
        normed = x * scale
        ctx.save_for_backward(normed, scale)
        return normed, scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, of_scale: Tensor | None) -> tuple[Tensor | None, ...]:
        axes, count, centred = ctx.call
        normed, scale = ctx.saved_tensors
        made = None
        if gradient is not None:
            along = (gradient * normed).sum(1)
            sums = torch.stack([along, gradient.sum(1)] if centred else [along])
            means = _Total.apply(sums, axes).unsqueeze(-1) / count
            gradient = gradient - normed * means[0]
            made = (gradient - means[1] if centred else gradient) * scale
        if of_scale is not None:
            whole = _Total.apply(of_scale, axes)
            through = normed * (whole * scale.square() / -count)
            made = through if made is None else made + through
        return made, None, None, None, None


class _Total(torch.autograd.Function):
    """The sum over the ranks, of which each one computes a part further with: gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: tuple[Axis, ...]) -> Tensor:
        ctx.axes = axes
        return _total(x, axes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Total.apply(gradient, ctx.axes), None


def _total(x: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    for axis in axes:
        x = all_reduce_tensor(x, axis)
    return x


def norm_of_shards(*args: Any, op: Any, axes: tuple[str, ...], dims: tuple[int, ...],
                   sizes: tuple[tuple[int, int], ...], **kwargs: Any) -> Tensor:
    """A layer, RMS, group or instance norm ``op`` on shards of the dims that it norms along. Dim ``dims[i]`` is cut
    over axis ``axes[i]``, its global lengths are ``sizes[i]`` (input, result). Weight and bias of a layer norm are
    shards."""
    given = arguments(op, args, kwargs)
    x: Tensor = given["input"]
    whole = list(x.shape)
    for dim, (size, _) in zip(dims, sizes, strict=True):
        whole[dim] = size
    if "normalized_shape" in given:
        first = x.dim() - len(given["normalized_shape"])
        rows, normed = math.prod(x.shape[:first]), math.prod(whole[first:])
        parameters = x.shape[first:]
    else:
        number = given.get("num_groups", x.shape[1])
        rows, normed = x.shape[0] * number, math.prod(whole[1:]) // number
        parameters = torch.Size((x.shape[1], *(1 for _ in x.shape[2:])))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    eps = _epsilon(given["eps"], wide)
    along = tuple(groups.current(name) for name in axes)  # resolved here: backward may run outside groups.use
    made, _ = _Normed.apply(wide.reshape(rows, -1), along, normed, eps, op is not aten.rms_norm.default)
    made = made.view_as(wide)
    if given["weight"] is not None:
        made = made * given["weight"].reshape(parameters)
    if given.get("bias") is not None:
        made = made + given["bias"].reshape(parameters)
    return made.to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    """RMS norm along the last dims, which keeps its input and a number a row, as torch's kernel of GPUs does. (On a CPU
    torch writes it out in ops that keep the normalised tensor too, and compute over all of memory more often.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int, eps: float | None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        ctx.dims, ctx.eps = dims, _epsilon(eps, wide)
        scale = torch.rsqrt(_mean_square(wide, dims).add_(ctx.eps))
        ctx.save_for_backward(x, weight, scale)
        made = wide * scale
        return (made if weight is None else made.mul_(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        dims = tuple(range(-ctx.dims, 0))
        wide = x.to(scale.dtype)
        if torch.is_grad_enabled():    # differentiated again
            scale = torch.rsqrt(_mean_square(wide, ctx.dims) + ctx.eps)
        normed, gradient = wide * scale, gradient.to(scale.dtype)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (gradient * normed).sum_to_size(weight.shape).to(weight.dtype)
        gradient = gradient if weight is None else gradient * weight
        along = (gradient * normed).mean(dims, keepdim=True)
        return torch.addcmul(gradient, normed, along, value=-1).mul(scale).to(x.dtype), of_weight, None, None


def _mean_square(x: Tensor, dims: int) -> Tensor:
    return x.square().mean(tuple(range(-dims, 0)), keepdim=True)


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """`torch.nn.functional.rms_norm`, of real numbers on a CPU with as little memory as on a GPU."""
    if x.device.type != "cpu" or not x.is_floating_point():
        return torch.rms_norm(x, list(shape), weight, eps)
    made: Tensor = _RmsNorm.apply(x, weight, len(shape), eps)
    return made


def _epsilon(given: float | None, wide: Tensor) -> float:
    """None: that of the type in which torch computes."""
    return torch.finfo(wide.dtype).eps if given is None else given


class _BatchNormed(torch.autograd.Function):
    """Batch norm of shards of x [b, c, *], cut along samples or places, by the statistics of all of ``count`` elements
    of a channel: the result, and of each channel mean and variance, which have no gradients.

    Sums of x and of its squares are all-reduced together in float64, in which the variance, their difference, keeps
    its precision. Backward (Ioffe and Szegedy 2015) is that for constant statistics, less the means of g and of
    g * normed over all ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, axes: tuple[Axis, ...], count: int,
                eps: float) -> tuple[Tensor, Tensor, Tensor]:
        dims = [d for d in range(x.dim()) if d != 1]
        variance, mean = torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), dims, correction=0)
        own = x.numel() // x.shape[1]
        sums = _total(torch.stack([mean.double(), variance + mean.double().square()]) * own, axes) / count
        wide, mean = mean.dtype, sums[0].to(mean.dtype)
        variance = (sums[1] - sums[0].square()).clamp_(min=0.0).to(wide)
        ctx.call = axes, count, eps
        ctx.save_for_backward(x, weight, bias, mean, variance)
        ctx.mark_non_differentiable(mean, variance)
        return _by_statistics(x, weight, bias, mean, variance, eps), mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, variance = ctx.saved_tensors
        axes, count, eps = ctx.call
        if torch.is_grad_enabled():    # differentiated again
            wanted = [one for one, needed in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if needed]
            found = iter(torch.autograd.grad(_written_out(x, weight, bias, axes, count, eps), wanted, gradient,
                                             create_graph=True))
            return *(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), None, None, None
        scale = torch.rsqrt(variance + eps)
        factor = scale if weight is None else scale * weight
        of_x, of_weight, of_bias = aten.native_batch_norm_backward(
            gradient, x, None if weight is None else weight.to(mean.dtype), mean, variance, mean, scale, False, eps,
            [ctx.needs_input_grad[0], True, True])
        if ctx.needs_input_grad[0]:
            sums = _total(torch.stack([of_weight, of_bias]), axes) / count
            shape = [1, -1] + [1] * (x.dim() - 2)
            along = -factor * scale * sums[0]
            of_x = torch.addcmul(of_x - (factor * sums[1] + along * mean).view(shape), x, along.view(shape))
        return (of_x if of_x is None else of_x.to(x.dtype),
                of_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
                of_bias.to(bias.dtype) if ctx.needs_input_grad[2] else None, None, None, None)


def _by_statistics(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
                   ) -> Tensor:
    weight, bias = (None if vector is None else vector.to(mean.dtype) for vector in (weight, bias))
    made: Tensor = torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, torch.backends.cudnn.enabled)
    return made


def _written_out(x: Tensor, weight: Tensor | None, bias: Tensor | None, axes: tuple[Axis, ...], count: int, eps: float
                 ) -> Tensor:
    """Batch norm of shards in ops that torch differentiates as often as is wanted."""
    dims, shape = [d for d in range(x.dim()) if d != 1], [1, -1] + [1] * (x.dim() - 2)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - (_Total.apply(wide.sum(dims), axes) / count).view(shape)
    variance = _Total.apply(centred.square().sum(dims), axes) / count
    made = centred * torch.rsqrt(variance + eps).view(shape)
    made = made if weight is None else made * weight.view(shape)
    return (made if bias is None else made + bias.view(shape)).to(x.dtype)


def batch_norm_of_shards(x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
                         running_var: Tensor | None, momentum: float, eps: float, *, op: Any, axes: tuple[str, ...],
                         dims: tuple[int, ...], sizes: tuple[tuple[int, int], ...]) -> list[Tensor]:
    """`ops.batch_norm` on shards of samples or places: dim ``dims[i]`` of x is cut over axis ``axes[i]``, its global
    lengths are ``sizes[i]`` (input, result)."""
    whole = list(x.shape)
    for dim, (size, _) in zip(dims, sizes, strict=True):
        whole[dim] = size
    count = math.prod(whole) // whole[1]
    along = tuple(groups.current(name) for name in axes)  # resolved here: backward may run outside groups.use
    made, mean, variance = _BatchNormed.apply(x, weight, bias, along, count, eps)
    if running_mean is None or running_var is None:
        return [made]
    unbiased = variance * (count / max(1, count - 1))
    return [made, *(torch.lerp(old.to(new.dtype), new, momentum).to(old.dtype)
                    for old, new in ((running_mean.detach(), mean), (running_var.detach(), unbiased)))]
