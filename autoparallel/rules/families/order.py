"""Sorting, the largest few, differences of neighbours, histograms: the dim that is ordered stays whole."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from autoparallel.ops.bounded import bounded_places
from autoparallel.rules.families.views import whole_dims
from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import Rule

aten = torch.ops.aten


@rule_for(aten.sort.default, aten.sort.stable, aten.topk.default, aten.argsort.default, aten.argsort.stable)
def ordered(op: OpView) -> Rule | None:
    shape = op.shapes[0]
    if not shape:
        return None
    comparisons = op.inputs[0].num_elements * math.log2(max(2, shape[op.arg("dim") % len(shape)]))
    places = 8.0 * op.out.num_elements / max(1, op.inputs[0].num_elements)  # bytes of the numbers that backward needs
    return whole_dims(op, {op.arg("dim") % len(shape)}, flops=comparisons, op_class="reduction",
                      extra_bytes={} if len(op.outputs) < 2 else {0: places})


@rule_for(bounded_places)
def places(op: OpView) -> Rule:
    """Places of true entries, for each row of a mask (along the last dim) by itself."""
    rows = tuple(f"d{d}" if n != 1 else None for d, n in enumerate(op.shapes[0][:-1]))
    sizes = {f: op.shapes[0][d] for d, f in enumerate(rows) if f}
    return Rule(((*rows, None),), ((*rows, None),), sizes, flops=float(op.inputs[0].num_elements),
                op_class="reduction")


@rule_for(aten.diff.default)
def diff(op: OpView) -> Rule | None:
    """Linear in all its inputs together, but for bool, whose differences are exclusive ors."""
    numbers = op.inputs[0].dtype is not torch.bool
    linear = (frozenset(range(len(op.inputs))),) if numbers else ()
    return whole_dims(op, {op.arg("dim") % len(op.out.shape)}, linear=linear, flops=float(op.out.num_elements))


@rule_for(aten.gradient.scalarint, aten.gradient.scalararray, aten.gradient.array, aten.gradient.scalarrayint,
          aten.gradient.scalarrayarray, aten.gradient.tensorarrayint, aten.gradient.tensorarray)
def slopes(op: OpView) -> Rule:
    """torch.gradient: differences along the dims ``dim`` (default: all), one result for each. These dims stay whole,
    and the coordinates of the points, further inputs, are read by every rank."""
    rank, dim = len(op.out.shape), op.arg("dim")
    dims = [dim] if isinstance(dim, int) else dim or range(rank)
    rule = whole_dims(op, {d % rank for d in dims}, linear=(frozenset({0}),), flops=3.0 * op.out.num_elements)
    return replace(rule, inputs=(rule.inputs[0], *((None,) * len(shape) for shape in op.shapes[1:])))


@rule_for(aten.quantile.default, aten.nanquantile.default)
def quantile(op: OpView) -> Rule | None:
    """Several quantiles along one dim: a first dim of the result."""
    shape, asked = op.shapes
    if op.arg("dim") is None or len(asked) != 1:
        return None
    dim = op.arg("dim") % len(shape)
    names = [f"d{i}" if i != dim and n != 1 else None for i, n in enumerate(shape)]
    q = "q" if asked[0] != 1 else None
    sizes = {f: shape[i] for i, f in enumerate(names) if f} | ({"q": asked[0]} if q else {})
    kept = names if op.arg("keepdim") else names[:dim] + names[dim + 1 :]
    return Rule((tuple(names), (q,)), ((q, *kept),), sizes, flops=8.0 * op.inputs[0].num_elements,
                op_class="reduction", saves=frozenset({0, 1}))


@rule_for(aten.histc.default)
def histogram(op: OpView) -> Rule | None:
    """Counts between given limits: each rank counts its own part."""
    if op.arg("min") == op.arg("max"):  # then the limits are the data's
        return None
    names = tuple(f"d{d}" if n != 1 else None for d, n in enumerate(op.shapes[0]))
    sizes = {f: n for f, n in zip(names, op.shapes[0], strict=True) if f}
    return Rule((names,), ((None,),), sizes, reduce=frozenset(sizes), flops=float(op.inputs[0].num_elements),
                op_class="reduction")
