"""Convolution, pooling, resampling: batch and channels may be cut; of convolution and pooling also space, into shards
that windows tile, or by halo exchange."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import torch

from autoparallel.layout import REPLICATE, shard
from autoparallel.ops.windows import Window, windows_of
from autoparallel.rules.families.views import whole_dims
from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import AxisStrategy, Dims, Exchange, Rule, einsum_rule

aten = torch.ops.aten


@rule_for(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv1d.padding, aten.conv2d.padding,
          aten.conv3d.padding)
def convolution(op: OpView) -> Rule | None:
    x, w = op.shapes[:2]
    flops = 2.0 * op.out.num_elements * math.prod(w[1:])
    if op.arg("groups") != 1:
        return _in_space(replace(_grouped(op), flops=flops), op) if len(x) == len(w) else None
    batch, dots = "b, " if len(x) == len(w) else "", ", ".join(["."] * (len(w) - 2))
    rule = einsum_rule(f"x[{batch}i, {dots}], w[o, i, {dots}], bias[o] -> y[{batch}o, {dots}]", op.shapes,
                       [op.out.shape], reduce="i", additive="bias", linear=("x bias", "w bias"), op_class="conv",
                       saves=frozenset({0, 1}))
    return _in_space(replace(rule, flops=flops), op)


def _in_space(rule: Rule, op: OpView) -> Rule:
    """With the dims in space cut too: as they are into even shards that windows tile, else by halo exchange."""
    windows = windows_of(op.target, op.arguments)
    first = len(op.shapes[0]) - len(windows)
    for number, window in enumerate(windows):
        dim, name = first + number, f"s{number}"
        size, made = op.shapes[0][dim], op.out.shape[dim]
        if made == 1:
            continue
        if window.tiles(size, made):
            x, out = (_named(dims, dim, name) for dims in (rule.inputs[0], rule.outputs[0]))
            shards = min(size, made)
            even = {name: (shards,)} if window.stride > 1 else {}
            rule = replace(rule, inputs=(x, *rule.inputs[1:]), outputs=(out,), sizes={**rule.sizes, name: shards},
                           even={**rule.even, **even})
        if (name not in rule.sizes or name in rule.even) and _filled_equally(op, window, size, made):
            rule = replace(rule, variants=(*rule.variants, _halo(op, window, dim, name)))
    return rule


def _named(dims: Dims, dim: int, name: str) -> Dims:
    return (*dims[:dim], name, *dims[dim + 1 :])


def _halo(op: OpView, window: Window, dim: int, name: str) -> AxisStrategy:
    """Neighbours exchange the places that both reach. Not over two axes: a neighbour may be one of the other."""
    x, cut = op.inputs[0], shard(dim)
    border = Exchange("neighbours", 0, x.dtype.itemsize * window.border / x.shape[dim], 1, int(x.requires_grad),
                      kept=True, whole=True)
    return AxisStrategy(
        f"halo {name}",
        (cut, *(REPLICATE for _ in op.inputs[1:])),
        (cut,),
        name,
        variant="windows",
        inside=(border,) if window.border else (),
        apart=frozenset({f"halo {name}", name}),
    )


def _filled_equally(op: OpView, window: Window, size: int, made: int) -> bool:
    """Whether places that are filled up beforehand count as those that the op fills up itself. A mean over those that
    there are knows them apart; so does one of a window that goes beyond what is filled up."""
    if "avg_pool" not in op.target._schema.name or op.arguments.get("divisor_override") is not None:
        return True
    beyond = window.reads(0, made)[1] > size + window.after
    return not beyond and (op.arg("count_include_pad") or not window.before)


def _grouped(op: OpView) -> Rule:
    """Channels are cut with their groups; lowering tells each rank how many groups its shard has."""
    x, w = op.shapes[:2]
    groups, space = op.arg("groups"), (None,) * (len(w) - 2)
    batch = "b" if x[0] != 1 else None
    channels = "g" if op.target._overloadname != "padding" else None
    inputs = ((batch, channels, *space), (channels, None, *space), (channels,))[: len(op.shapes)]
    sizes = ({"b": x[0]} if batch else {}) | ({"g": groups} if channels else {})
    linear = tuple(frozenset({i, 2} & set(range(len(op.shapes))) | {i}) for i in (0, 1))
    return Rule(inputs, ((batch, channels, *space),), sizes, linear=linear, even={"g": (groups, x[1], w[0])},
                op_class="conv", saves=frozenset({0, 1}))


def _over_batch_and_channels(op: OpView, num_space: int, **rest: object) -> Rule:
    rank = len(op.out.shape)
    names = tuple(f"d{i}" if i < rank - num_space and n != 1 else None for i, n in enumerate(op.out.shape))
    sizes = {n: op.out.shape[i] for i, n in enumerate(names) if n is not None}
    return Rule((names,), (names,) * len(op.outputs), sizes, op_class="reduction", **rest)  # type: ignore[arg-type]


@rule_for(aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default, aten.avg_pool1d.default,
          aten.avg_pool2d.default, aten.avg_pool3d.default)
def pool(op: OpView) -> Rule:
    rule = _over_channels(op)
    return _in_space(rule, op) if op.inputs[0].dtype.is_floating_point else rule


@rule_for(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default,
          aten.max_pool1d_with_indices.default, aten.max_pool2d_with_indices.default,
          aten.max_pool3d_with_indices.default, aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default,
          aten.adaptive_max_pool3d.default)
def pool_over_channels(op: OpView) -> Rule:
    """Windows of unequal lengths, or places that are counted in the whole of space."""
    return _over_channels(op)


def _over_channels(op: OpView) -> Rule:
    (space,) = re.findall(r"pool(\d)d", op.target._schema.name)
    averages = "avg" in op.target._schema.name
    is_mean = "adaptive_avg" in op.target._schema.name and set(op.out.shape[-int(space):]) == {1}
    return _over_batch_and_channels(
        op, int(space), flops=float(op.inputs[0].num_elements), linear=(frozenset({0}),) if averages else (),
        saves=frozenset() if is_mean else frozenset({0}),  # torch keeps what it averages, too
    )


@rule_for(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default,
          aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default,
          aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default,
          aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default)
def gradient_of_pool(op: OpView) -> Rule:
    """Gradients of pooling: instances and channels may be sharded, as in pooling; indices count in the whole space."""
    space, rank = (3 if "3d" in op.target._schema.name else 2), len(op.out.shape)
    return whole_dims(op, set(range(rank - space, rank)), flops=float(op.inputs[0].num_elements),
                      linear=(frozenset({0}),), saves=frozenset(range(1, len(op.inputs))))


@rule_for(aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec,
          aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_trilinear3d.vec,
          aten.upsample_bicubic2d.vec, aten._upsample_bilinear2d_aa.vec, aten._upsample_bicubic2d_aa.vec,
          aten._upsample_nearest_exact1d.vec, aten._upsample_nearest_exact2d.vec, aten._upsample_nearest_exact3d.vec,
          aten._upsample_bilinear2d_aa.default)
def upsample(op: OpView) -> Rule:
    return _over_batch_and_channels(op, len(op.out.shape) - 2, flops=4.0 * op.out.num_elements,
                                    linear=(frozenset({0}),))


@rule_for(aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def at_points(op: OpView) -> Rule:
    """Each point of the grid reads from the whole space of its instance."""
    points, space = (", ".join(pattern) for pattern in
                     zip(*((f"p{d}", ".") for d in range(len(op.shapes[0]) - 2)), strict=True))
    return einsum_rule(f"x[b, c, {space}], grid[b, {points}, .] -> y[b, c, {points}]", op.shapes, [op.out.shape],
                       linear=("x",), flops_per_point=10.0, op_class="gather", saves=frozenset({0, 1}))


@rule_for(aten.max_unpool2d.default, aten.max_unpool3d.default)
def unpool(op: OpView) -> Rule:
    """Values back to their places in the space of their channel."""
    space = 2 if op.target is aten.max_unpool2d.default else 3
    rule = _over_batch_and_channels(op, space, flops=float(op.out.num_elements), linear=(frozenset({0}),),
                                    saves=frozenset({1}))
    return replace(rule, inputs=rule.inputs * 2)


@rule_for(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
def fractional_pool(op: OpView) -> Rule | None:
    """Windows at random places, which are an input: for each channel of each instance its own."""
    x, places = op.shapes
    if x[:2] != places[:2]:
        return None
    rule = _over_batch_and_channels(op, len(x) - 2, flops=float(op.inputs[0].num_elements), saves=frozenset({0}))
    return replace(rule, inputs=(*rule.inputs, (*rule.inputs[0][:2], None)))


@rule_for(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def transposed_convolution(op: OpView) -> Rule | None:
    x, w = op.shapes[:2]
    flops = 2.0 * op.inputs[0].num_elements * math.prod(w[1:])
    if op.arg("groups") != 1:
        return _in_space(replace(_grouped(op), flops=flops), op) if len(x) == len(w) else None
    batch, dots = "b, " if len(x) == len(w) else "", ", ".join(["."] * (len(w) - 2))
    rule = einsum_rule(f"x[{batch}i, {dots}], w[i, o, {dots}], bias[o] -> y[{batch}o, {dots}]", op.shapes,
                       [op.out.shape], reduce="i", additive="bias", linear=("x bias", "w bias"), op_class="conv",
                       saves=frozenset({0, 1}))
    return _in_space(replace(rule, flops=flops), op)


@rule_for(aten.im2col.default)
def im2col(op: OpView) -> Rule | None:
    """[b, c, h, w] -> [b, (c window), places]: channels are the major part of the merged dim."""
    if len(op.shapes[0]) != 4:
        return None
    (batch, channels), window = op.shapes[0][:2], math.prod(op.arg("kernel_size"))
    sizes = {f: n for f, n in (("b", batch), ("c", channels)) if n != 1}
    b, c = (f if f in sizes else None for f in ("b", "c"))
    return Rule(((b, c, None, None),), ((b, c, None),), sizes, even={"c": (channels, channels * window)},
                linear=(frozenset({0}),), flops=float(op.out.num_elements))
