"""Mixtures of experts: tokens are cut with their rows; experts with their weights (each rank then adds the rows of its
own); or both over the same axis, and rows travel to their experts. And products of rows, sorted by expert, with their
experts' matrices, where they come alone.

Sorted rows stay together (where one expert's end is known by their number only); inner and outer dims are cut, as in a
plain matrix product.
"""

from __future__ import annotations

import math

import torch

from autoparallel.layout import shard
from autoparallel.ops.routed_experts import body_of
from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import AxisStrategy, Exchange, Rule, einsum_rule

aten = torch.ops.aten


@rule_for("autoparallel::routed_experts")
def routed_experts(op: OpView) -> Rule:
    """Experts are taken to be chosen evenly: with a part of them, a rank computes and keeps that part of the rows."""
    body, tokens, rows = body_of(op.arg("body")), op.shapes[0][0], op.shapes[1][0]
    weights = len(op.arg("weights"))
    first = ["t"] * (len(op.inputs) - weights) + ["e"] * weights
    inputs = tuple((f, *(None,) * (len(s) - 1)) for f, s in zip(first, op.shapes, strict=True))
    return Rule(inputs, (("t", *(None,) * len(body.width)),), {"t": tokens, "e": body.num_experts},
                reduce=frozenset({"e"}), even={"t": (tokens,)}, flops=body.flops * rows, op_class="matmul",
                saves=frozenset(range(len(inputs))), work_bytes=body.saved_bytes * rows,
                product_bytes=body.product_bytes * rows,
                variants=(_dispatch(op, tokens),))


def _dispatch(op: OpView, tokens: int) -> AxisStrategy:
    """All cut over one axis: rows travel to their experts and back. (Experts are taken to be chosen evenly.)"""
    each = [m.dtype.itemsize for m in op.inputs]
    rows, beside = op.shapes[1][0], range(2, len(op.inputs) - len(op.arg("weights")))
    there = [Exchange("all_to_all", 1, 8.0 * body_of(op.arg("body")).num_experts, fixed=True),  # the numbers of rows
             Exchange("all_to_all", 0, each[0] * rows / tokens, forward=1, backward=1),
             *(Exchange("all_to_all", i, each[i], forward=1, backward=1) for i in beside)]
    width = math.prod(op.out.shape[1:]) * op.out.dtype.itemsize
    back = Exchange("all_to_all", 1, width, forward=1, backward=1)
    return AxisStrategy(
        "dispatch",
        (shard(0),) * len(op.inputs),
        (shard(0),),
        "t",
        (tokens,),
        "dispatch",
        (*there, back),
        frozenset({"e", "dispatch"}),
    )


@rule_for(aten._grouped_mm.default, "transformers::grouped_mm_fallback")
def grouped_matmul(op: OpView) -> Rule | None:
    """x[rows, k], w[experts, k, n], the experts' ends -> y[rows, n]; each row meets one expert."""
    if [len(shape) for shape in op.shapes] != [2, 3, 1]:
        return None  # a bias, or groups along another dim
    rows, k = op.shapes[0]
    n = op.out.shape[1]
    rule = einsum_rule("x[., k], w[., k, n], ends[.] -> y[., n]", op.shapes, [op.out.shape], reduce="k",
                       linear=("x", "w"), op_class="matmul", saves=frozenset({0, 1, 2}))
    return Rule(**{**rule.__dict__, "flops": 2.0 * rows * k * n})
