"""Matrix products."""

from __future__ import annotations

import torch

from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import Rule, einsum_rule

aten = torch.ops.aten


@rule_for(aten.linear.default)
def linear(op: OpView) -> Rule:
    return einsum_rule("x[*b, k], w[n, k], bias[n] -> y[*b, n]", op.shapes, [op.out.shape], reduce="k",
                       additive="bias", flops_per_point=2.0, op_class="matmul", saves=frozenset({0, 1}))


@rule_for(aten.mm.default, aten.matmul.default, aten.bmm.default)
def matmul(op: OpView) -> Rule | None:
    a, b = op.shapes
    if len(b) == 2 and len(a) >= 2:
        pattern = "x[*b, k], w[k, n] -> y[*b, n]"
    elif len(a) == len(b) and len(a) > 2 and a[:-2] == b[:-2]:
        pattern = "x[*b, m, k], w[*b, k, n] -> y[*b, m, n]"
    else:
        return None
    return einsum_rule(pattern, op.shapes, [op.out.shape], reduce="k", flops_per_point=2.0, op_class="matmul",
                       saves=frozenset({0, 1}))


@rule_for(aten.baddbmm.default)
def baddbmm(op: OpView) -> Rule:
    return einsum_rule("c[*b, m, n], x[*b, m, k], w[*b, k, n] -> y[*b, m, n]", op.shapes, [op.out.shape],
                       reduce="k", additive="c", flops_per_point=2.0, op_class="matmul", saves=frozenset({1, 2}))
