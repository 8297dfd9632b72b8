"""Convolution and pooling: batch and channels may be cut, space stays whole."""

from __future__ import annotations

import math

import torch

from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import Rule, einsum_rule

aten = torch.ops.aten


@rule_for(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def convolution(op: OpView) -> Rule | None:
    x, w = op.shapes[:2]
    space = len(w) - 2
    if len(x) != len(w):
        return None
    dots = ", ".join(["."] * space)
    grouped = op.arg("groups") != 1
    ci, co = (".", ".") if grouped else ("i", "o")
    rule = einsum_rule(
        f"x[b, {ci}, {dots}], w[{co}, {ci}, {dots}], bias[{co}] -> y[b, {co}, {dots}]", op.shapes, [op.out.shape],
        reduce="" if grouped else "i", additive="bias", op_class="conv", saves=frozenset({0, 1}),
    )
    flops = 2.0 * op.out.num_elements * math.prod(w[1:])
    return Rule(**{**rule.__dict__, "flops": flops})


@rule_for(aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default, aten.avg_pool1d.default,
          aten.avg_pool2d.default, aten.avg_pool3d.default, aten.adaptive_avg_pool1d.default,
          aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default)
def pool(op: OpView) -> Rule:
    rank = len(op.out.shape)
    space = int(op.target._schema.name[-2])
    names = tuple(f"d{i}" if i < rank - space and n != 1 else None for i, n in enumerate(op.out.shape))
    sizes = {n: op.out.shape[i] for i, n in enumerate(names) if n is not None}
    averages = "avg" in op.target._schema.name
    return Rule((names,), (names,), sizes, flops=float(op.inputs[0].num_elements), op_class="reduction",
                linear=(frozenset({0}),) if averages else (), saves=frozenset() if averages else frozenset({0}))
