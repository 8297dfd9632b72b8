"""Embedding, of ids one by one or in bags: ids, hidden and (as a variant) vocabulary may be cut."""

from __future__ import annotations

from dataclasses import replace

import torch

from autoparallel.layout import PARTIAL, REPLICATE, shard
from autoparallel.ops.embedding_bag import MAX, SUM
from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import AxisStrategy, Rule, einsum_rule

aten = torch.ops.aten


@rule_for(aten.embedding.default)
def embedding(op: OpView) -> Rule | None:
    if op.arg("scale_grad_by_freq"):
        return None
    rule = einsum_rule("w[., h], ids[*b] -> y[*b, h]", op.shapes, [op.out.shape], linear=("w",),
                       op_class="gather")
    return replace(rule, flops=float(op.out.num_elements), variants=(_vocabulary(op, "vocabulary"),))


def _vocabulary(op: OpView, variant: str) -> AxisStrategy:
    """A vocabulary cut gives each rank the rows of its own ids and zeros elsewhere: a summand of the result."""
    return AxisStrategy(
        "vocabulary", (shard(0), *(REPLICATE for _ in op.inputs[1:])), (PARTIAL,), "vocabulary", variant=variant
    )


@rule_for("autoparallel::embedding_bag")
def bags(op: OpView) -> Rule:
    """Bags of one length may be cut, and where they are added up also the ids of each; of others only hidden."""
    rows, summed = len(op.shapes[1]) == 2, op.arg("mode") == SUM
    each = f"[b, {'l' if summed else '.'}]" if rows else "[.]"
    others = [f"{name}{each}" for name in ("weights", "offsets") if op.arg(name) is not None]
    pattern = ", ".join([f"w[., h], ids{each}", *others]) + f" -> y[{'b' if rows else '.'}, h]"
    linear = () if op.arg("mode") == MAX else ("w", "weights") if "weights" in pattern else ("w",)
    rule = einsum_rule(pattern, op.shapes, [op.out.shape], reduce="l" if summed and rows else "", linear=linear,
                       op_class="gather", saves=frozenset(range(1, len(op.inputs))))
    return replace(rule, flops=float(op.inputs[1].num_elements * op.out.shape[-1]),
                   variants=(_vocabulary(op, "vocabulary of bags"),) if summed else ())
