"""Norms: what is normalised over stays whole, or is cut by a variant that adds up the statistics."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch

from autoparallel.layout import INVARIANT, REPLICATE, Placement, shard
from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import AxisStrategy, Exchange, Rule, einsum_rule

aten = torch.ops.aten
_OF_A_ROW = 8.0  # bytes: mean and deviation
#: Norms that have a variant, and whether they take the mean away.
_CENTRED = {aten.layer_norm.default: True, aten.rms_norm.default: False, aten.group_norm.default: True,
            aten.instance_norm.default: True}


@rule_for(aten.layer_norm.default, aten.rms_norm.default, aten.native_layer_norm.default,
          aten._fused_rms_norm.default)
def layer_norm(op: OpView) -> Rule:
    rank, kept = len(op.out.shape), len(op.out.shape) - len(op.arg("normalized_shape"))
    names = tuple(f"d{i}" if i < kept and op.out.shape[i] != 1 else None for i in range(rank))
    sizes = {f"d{i}": op.out.shape[i] for i in range(kept) if op.out.shape[i] != 1}
    rest = tuple((None,) * len(shape) for shape in op.shapes[1:])
    return Rule((names, *rest), (names,) * len(op.outputs), sizes, linear=_scales(op),
                flops=8.0 * op.out.num_elements, op_class="reduction", saves=frozenset(range(len(op.inputs))),
                extra_bytes={0: _OF_A_ROW / prod(op.arg("normalized_shape"))},
                variants=_along(op, range(kept, rank), kept) if op.target in _CENTRED else ())


@rule_for(aten.instance_norm.default)
def instance_norm(op: OpView) -> Rule | None:
    """Each channel of each instance by itself; running statistics would be means over the batch."""
    if op.arg("running_mean") is not None:
        return None
    batch, channels = op.out.shape[:2]
    sizes = {f: n for f, n in (("b", batch), ("c", channels)) if n != 1}
    b, c = (f if f in sizes else None for f in ("b", "c"))
    whole = (b, c, *(None,) * (len(op.out.shape) - 2))
    return Rule((whole, *((c,) for _ in op.shapes[1:])), (whole,), sizes, linear=_scales(op),
                flops=8.0 * op.out.num_elements, op_class="reduction", saves=frozenset(range(len(op.inputs[:2]))),
                variants=_along(op, range(2, len(op.out.shape))))


@rule_for(aten.group_norm.default)
def group_norm(op: OpView) -> Rule:
    """Channels are cut with their groups; lowering tells each rank how many groups its shard has."""
    batch, channels = op.out.shape[:2]
    sizes = {f: n for f, n in (("b", batch), ("g", op.arg("num_groups"))) if n != 1}
    b, g = (f if f in sizes else None for f in ("b", "g"))
    names = (b, g, *(None,) * (len(op.out.shape) - 2))
    return Rule((names, *((g,) for _ in op.shapes[1:])), (names,), sizes, linear=_scales(op),
                even={"g": (sizes["g"], channels)} if g else {}, flops=8.0 * op.out.num_elements,
                op_class="reduction", saves=frozenset(range(len(op.inputs[:2]))),
                variants=_along(op, range(2, len(op.out.shape))))


@rule_for(aten._native_batch_norm_legit.no_stats)
def batch_norm(op: OpView) -> Rule | None:
    """By the statistics of the whole batch, which are results too: channels may be cut."""
    if not op.arg("training"):
        return None
    space = ", ".join(["."] * (len(op.out.shape) - 2))
    return einsum_rule(f"x[., c, {space}], weight[c], bias[c] -> y[., c, {space}], mean[c], deviation[c]", op.shapes,
                       [meta.shape for meta in op.outputs], flops_per_point=8.0, op_class="reduction",
                       saves=frozenset(range(len(op.inputs[:2]))))


@rule_for("autoparallel::batch_norm")
def batch_norm_in_training(op: OpView) -> Rule:
    """Channels are cut with their running statistics. Samples and places are cut where ranks add up the statistics."""
    x, results = op.inputs[0], len(op.outputs)
    vectors, channels = len(op.inputs) - 1, x.shape[1]
    sizes = {"c": channels} if channels != 1 else {}
    c = "c" if sizes else None
    names = (None, c, *(None,) * (len(x.shape) - 2))
    numbers = 2 * channels / max(x.num_elements, 1)
    exchanged = (Exchange("all_reduce", 0, 8.0 * numbers, whole=True),
                 Exchange("all_reduce", 0, 4.0 * numbers, 0, int(x.requires_grad), whole=True))
    cut = tuple(AxisStrategy(f"batch norm d{d}", (shard(d), *(REPLICATE,) * vectors),
                             (shard(d), *(INVARIANT,) * (results - 1)), f"d{d}", variant="batch norm", inside=exchanged)
                for d, size in enumerate(x.shape) if d != 1 and size != 1)
    saved = 2 if op.arg("weight") is not None else 1
    return Rule((names, *((c,),) * vectors), (names, *((c,),) * (results - 1)), sizes, flops=8.0 * x.num_elements,
                op_class="reduction", saves=frozenset(range(saved)), extra_bytes={0: 4.0 * numbers}, variants=cut)


@rule_for(aten.batch_norm.default)
def batch_norm_in_eval(op: OpView) -> Rule | None:
    """By running statistics, each element by itself. (In training capture has it as `autoparallel::batch_norm`.)"""
    if op.arg("training"):
        return None
    dims = ", ".join(["b", "c", *(f"s{d}" for d in range(len(op.out.shape) - 2))])
    given = [f"{name}[c]" for name in ("weight", "bias", "running_mean", "running_var") if op.arg(name) is not None]
    return einsum_rule(f"{', '.join([f'x[{dims}]', *given])} -> y[{dims}]", op.shapes, [op.out.shape],
                       flops_per_point=4.0, op_class="elementwise", saves=frozenset(range(len(op.inputs))))


def _scales(op: OpView) -> tuple[frozenset[int], ...]:
    """Linear in weight and bias together, where mean and deviation are no results."""
    return (frozenset(range(1, len(op.inputs))),) if len(op.inputs) > 1 and len(op.outputs) == 1 else ()


def _along(op: OpView, dims: Iterable[int], first: int | None = None) -> tuple[AxisStrategy, ...]:
    """Each of ``dims``, which are normed along, may be cut where the ranks add up the statistics; with it weight and
    bias, if they have those dims, which begin at ``first``."""
    x, rows = op.inputs[0], []
    if not x.dtype.is_floating_point:
        return ()
    for dim in dims:
        if x.shape[dim] == 1:
            continue
        number = x.num_elements // prod(x.shape[first:]) if first is not None else _rows_of_groups(op)
        sums, size = 2 if _CENTRED[op.target] else 1, 4.0 * number / max(x.num_elements, 1)
        numbers = (Exchange("all_reduce", 0, size, sums, whole=True),
                   Exchange("all_reduce", 0, sums * size, 0, int(x.requires_grad), whole=True))
        rest: Placement = shard(dim - first) if first is not None else REPLICATE
        rows.append(AxisStrategy(f"norm d{dim}", (shard(dim), *(rest for _ in op.inputs[1:])), (shard(dim),), f"d{dim}",
                        variant="norms", inside=numbers, unsaved=frozenset(range(2, len(op.inputs)))))
    return tuple(rows)


def _rows_of_groups(op: OpView) -> int:
    return op.out.shape[0] * (op.arg("num_groups") if op.target is aten.group_norm.default else op.out.shape[1])
