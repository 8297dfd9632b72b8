"""Embedding: ids, hidden and (as a variant) vocabulary may be cut."""

from __future__ import annotations

import torch

from autoparallel.layout import PARTIAL, REPLICATE, shard
from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import Row, Rule, einsum_rule

aten = torch.ops.aten


@rule_for(aten.embedding.default)
def embedding(op: OpView) -> Rule | None:
    if op.arg("scale_grad_by_freq"):
        return None
    rule = einsum_rule("w[., h], ids[*b] -> y[*b, h]", op.shapes, [op.out.shape], linear=("w",),
                       op_class="gather")
    # A vocabulary cut gives each rank the rows of its own ids and zeros elsewhere: a summand of the result.
    vocabulary = Row("vocabulary", (shard(0), REPLICATE), (PARTIAL,), "vocabulary", variant="vocabulary")
    return Rule(**{**rule.__dict__, "flops": float(op.out.num_elements), "variants": (vocabulary,)})
