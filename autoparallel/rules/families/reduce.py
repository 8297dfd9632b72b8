"""Sums and other reductions, cumulative ops."""

from __future__ import annotations

from dataclasses import replace

import torch

from autoparallel.capture.graph import is_floating
from autoparallel.layout import INVARIANT, Placement, shard
from autoparallel.rules.families.views import whole_dims
from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import AxisStrategy, Exchange, Rule

aten = torch.ops.aten


#: Norms of vectors, and the argument that has their order.
NORMS = {aten.linalg_vector_norm.default: "ord", aten.norm.ScalarOpt_dim: "p"}


@rule_for(aten.sum.dim_IntList)
def sum_(op: OpView) -> Rule | None:
    """Over a cut dim each rank has a summand of the result. (Sums of numbers cut to integers are not linear.)"""
    linear = is_floating(op.out.dtype) or not is_floating(op.inputs[0].dtype)
    return _reduction(op, op.arg("dim"), bool(op.arg("keepdim")), adds=True, linear=linear)


@rule_for(aten.nansum.default)
def nansum(op: OpView) -> Rule | None:
    return _reduction(op, op.arg("dim"), bool(op.arg("keepdim")), adds=True)


@rule_for(aten.count_nonzero.dim_IntList, aten.count_nonzero.default)
def count(op: OpView) -> Rule | None:
    return _reduction(op, op.arg("dim"), False, adds=True)


@rule_for(aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)
def places(op: OpView) -> Rule | None:
    """Of a cut dim by a variant: each rank's value and place go to all, and the best is taken."""
    rule, (x,) = other(op), op.inputs
    if rule is None or not x.num_elements:
        return rule
    asked = range(len(x.shape)) if op.arg("dim") is None else [op.arg("dim") % max(1, len(x.shape))]
    dims = [d for d in asked if x.shape and x.shape[d] != 1 and x.dtype is not torch.bool]
    share = op.out.num_elements / x.num_elements
    numbers = [Exchange("all_gather", 0, (8.0 + x.dtype.itemsize) * share, whole=True)]
    if len(op.outputs) > 1:
        numbers.append(Exchange("all_reduce", 0, x.dtype.itemsize * share, whole=True))
    variants = [_variant(d, "places", tuple(INVARIANT for _ in op.outputs), numbers) for d in dims]
    names = frozenset(variant.name for variant in variants)
    return replace(rule, variants=tuple(replace(variant, apart=names - {variant.name}) for variant in variants))


def _variant(dim: int, variant: str, outputs: tuple[Placement, ...], inside: list[Exchange]) -> AxisStrategy:
    return AxisStrategy(f"along d{dim}", (shard(dim),), outputs, f"d{dim}", variant=variant, inside=tuple(inside))


@rule_for(aten.logsumexp.default)
def logsumexp(op: OpView) -> Rule | None:
    """Along cut dims by a variant, which exchanges maximum and sum of each row."""
    rule, (x,) = other(op), op.inputs
    if rule is None or not x.shape or not x.dtype.is_floating_point:
        return rule
    dims = sorted({d % len(x.shape) for d in op.arg("dim")})
    size = 4.0 * op.out.num_elements / max(1, x.num_elements)
    return replace(rule, gradient_ops=3, variants=tuple(  # g * exp(x - result)
        _variant(d, "softmax", (INVARIANT,), [Exchange("all_reduce", 0, size, 2, whole=True)])
        for d in dims if x.shape[d] != 1))


@rule_for(aten.amax.default, aten.amin.default, aten.median.dim, aten.mode.default, aten.kthvalue.default,
          aten.prod.dim_int, aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim,
          aten.var.dim, aten.var.correction, aten.std.dim, aten.std.correction,
          aten.var_mean.correction, aten.var_mean.dim, aten.std_mean.correction, aten.std_mean.dim,
          aten.nanmedian.dim, aten.aminmax.default, aten.quantile.scalar, aten.nanquantile.scalar,
          aten.linalg_matrix_norm.default, aten.linalg_matrix_norm.str_ord)
def other(op: OpView) -> Rule | None:
    """Only the dims that stay may be cut; of a sum of absolute values (a norm of order 1) all."""
    adds = op.target in NORMS and op.arg(NORMS[op.target]) == 1
    return _reduction(op, op.arg("dim"), bool(op.arg("keepdim")), adds=adds)


@rule_for(aten.max.default, aten.min.default, aten.prod.default, aten.median.default, aten.nanmedian.default,
          aten.var.default, aten.std.default, aten.norm.Scalar)
def of_everything(op: OpView) -> Rule | None:
    return _reduction(op, None, False)


def _reduction(op: OpView, dim: object, keepdim: bool, adds: bool = False, linear: bool = False) -> Rule | None:
    """``adds``: results of shards of a reduced dim add up; ``linear``: so do those of summands."""
    shape = op.shapes[0] or (1,)  # of a number it is the number
    dims = [dim] if isinstance(dim, int) else list(dim or range(len(shape)))  # type: ignore[call-overload]
    reduced = {d % len(shape) for d in dims}
    names = tuple(f"d{i}" if n != 1 and (adds or i not in reduced) else None for i, n in enumerate(shape))
    out = tuple(None if i in reduced else names[i] for i in range(len(shape)) if keepdim or i not in reduced)
    sizes = {n: shape[i] for i, n in enumerate(names) if n is not None}
    return Rule(
        (names[: len(op.shapes[0])],),
        (out[: len(op.out.shape)],) * len(op.outputs),
        sizes,
        reduce=frozenset(f"d{i}" for i in reduced if names[i] is not None),
        linear=(frozenset({0}),) if linear else (),
        flops=float(op.inputs[0].num_elements),
        op_class="reduction",
        saves=frozenset() if linear else frozenset({0}),
        gradient_ops=0 if linear else 1,
    )


@rule_for(aten.cumsum.default)
def cumsum(op: OpView) -> Rule | None:
    if not op.out.shape:
        return None
    linear = (frozenset({0}),) if op.inputs[0].dtype == op.out.dtype else ()
    return whole_dims(op, {op.arg("dim") % len(op.out.shape)}, linear=linear, flops=float(op.out.num_elements))


@rule_for(aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default, aten.glu.default)
def along_a_dim(op: OpView) -> Rule | None:
    """Ops in which each element needs others along one dim, which stays whole; other dims may be sharded."""
    if not op.out.shape:
        return None
    return whole_dims(op, {op.arg("dim") % len(op.out.shape)}, flops=float(op.out.num_elements),
                      saves=frozenset({0}))


@rule_for(aten.trace.default)
def trace(op: OpView) -> Rule:
    return Rule(((None, None),), ((),), {}, linear=(frozenset({0}),), flops=float(op.shapes[0][0]))


@rule_for(aten.renorm.default)
def renorm(op: OpView) -> Rule:
    """Each slice along a dim by itself."""
    rank = len(op.out.shape)
    return whole_dims(op, set(range(rank)) - {op.arg("dim") % rank}, flops=3.0 * op.out.num_elements,
                      saves=frozenset({0}))


@rule_for(aten.softmax.int, aten.log_softmax.int)
def sharded_softmax(op: OpView) -> Rule | None:
    """Along the dim that it normalises by a variant: maximum and sum of each row, and a sum for its gradient."""
    rule = softmax(op)
    if rule is None or not op.inputs[0].dtype.is_floating_point:
        return rule
    x, dim = op.inputs[0], op.arg("dim") % len(op.out.shape)
    if x.shape[dim] == 1 or not x.num_elements:
        return rule
    size = 4.0 / x.shape[dim]
    numbers = Exchange("all_reduce", 0, size, 2, int(x.requires_grad), whole=True)
    return replace(rule, variants=(_variant(dim, "softmax", (shard(dim),), [numbers]),))


@rule_for(aten._softmax.default, aten._log_softmax.default,
          aten._safe_softmax.default)
def softmax(op: OpView) -> Rule | None:
    if not op.out.shape:
        return None
    return whole_dims(op, {op.arg("dim") % len(op.out.shape)}, flops=5.0 * op.out.num_elements, op_class="reduction",
                      saves_output=True)


@rule_for(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(op: OpView) -> Rule | None:
    if not op.out.shape:
        return None
    return whole_dims(op, {op.arg("dim") % len(op.out.shape)}, linear=(frozenset({0}),),
                      flops=4.0 * op.out.num_elements, op_class="reduction", saves=frozenset({0, 1}))
