"""Ops that make tensors out of nothing: one number everywhere is cut along any dim; others are repeated, and free."""

from __future__ import annotations

import torch

from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import Rule

aten = torch.ops.aten


@rule_for(aten.arange.default, aten.arange.start, aten.arange.start_step, aten.tril_indices.default,
          aten.triu_indices.default, aten.scalar_tensor.default, aten.linspace.default, aten.eye.default, aten.eye.m)
def factory(op: OpView) -> Rule:
    return _whole(op, random=False)


@rule_for(aten.rand.default, aten.randn.default, aten.randint.default, aten.randint.low, aten.randperm.default)
def random_factory(op: OpView) -> Rule:
    """Random tensors: the same numbers on every rank."""
    return _whole(op, random=True)


@rule_for(aten.full.default, aten.zeros.default, aten.ones.default)
def filled(op: OpView) -> Rule:
    dims = tuple(f"d{i}" if n != 1 else None for i, n in enumerate(op.out.shape))
    return Rule((), (dims,), {f: n for f, n in zip(dims, op.out.shape, strict=True) if f})


def _whole(op: OpView, random: bool) -> Rule:
    return Rule(tuple((None,) * len(s) for s in op.shapes), ((None,) * len(op.out.shape),), {}, fixed=True,
                random=random)
