"""Element-wise ops: every dim of the result is a factor; broadcast dims stay whole."""

from __future__ import annotations

from dataclasses import replace

import torch

from autoparallel.capture.graph import TensorMeta
from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import Dims, Rule

aten = torch.ops.aten

#: Ops linear in these groups of tensor inputs (by position): a sum over ranks passes through them.
LINEAR: dict[object, tuple[tuple[int, ...], ...]] = {
    aten.detach.default: ((0,),),
    aten.clone.default: ((0,),),
    aten.neg.default: ((0,),),
    aten.mul.Tensor: ((0,), (1,)),
    aten.mul.Scalar: ((0,),),
    aten.div.Tensor: ((0,),),
    aten.div.Scalar: ((0,),),
    aten.add.Tensor: ((0, 1),),
    aten.sub.Tensor: ((0, 1),),
    aten.real.default: ((0,),),
    aten.imag.default: ((0,),),
    aten.complex.default: ((0, 1),),
    aten.conj.default: ((0,),),
    aten.rsub.Tensor: ((0, 1),),
    aten.addcmul.default: ((0, 1), (0, 2)),
    aten.addcdiv.default: ((0, 1),),
    aten.lerp.Scalar: ((0, 1),),
    aten.lerp.Tensor: ((0, 1),),
    aten.ldexp.Tensor: ((0,),),
    aten.deg2rad.default: ((0,),),
    aten.rad2deg.default: ((0,),),
    aten.where.self: ((1, 2),),
    aten.masked_fill.Tensor: ((0, 2),),
    aten.xlogy.Tensor: ((0,),),
    aten.special_xlog1py.default: ((0,),),
}
#: Ops that put a number in some places, and are linear where it is zero.
FILLED = {aten.masked_fill.Scalar: "value", aten.where.ScalarOther: "other", aten.where.ScalarSelf: "self"}
#: Ops whose backward needs neither input nor output.
NOTHING_SAVED = {aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.to.dtype, aten.add.Scalar, aten.sub.Scalar,
                 aten.mul.Scalar, aten.div.Scalar, aten.rsub.Tensor, aten.rsub.Scalar, aten.lerp.Scalar,
                 aten.real.default, aten.imag.default, aten.deg2rad.default, aten.rad2deg.default,
                 aten.clone.default}
#: Ops that choose between their inputs by a mask, which is all that they save.
CHOICES = {aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Scalar,
           aten.masked_fill.Tensor}
OUTPUT_SAVED = {aten.relu.default, aten.tanh.default, aten.sigmoid.default, aten.exp.default, aten.rsqrt.default,
                aten.sqrt.default, aten.reciprocal.default}

#: Ops that torch runs for an input's gradient, where it is not one (its derivatives.yaml: x^n has g * (n * x^(n-1))).
GRADIENT_OPS = {aten.add.Tensor: 0, aten.add.Scalar: 0, aten.sub.Scalar: 0, aten.detach.default: 0,
                aten.clone.default: 0,
                aten.pow.Tensor_Scalar: 3, aten.rsqrt.default: 3, aten.reciprocal.default: 3, aten.cos.default: 3,
                aten.sqrt.default: 2, aten.sin.default: 2, aten.abs.default: 2}


def broadcast_dims(meta: TensorMeta, out: TensorMeta) -> Dims:
    offset = len(out.shape) - len(meta.shape)
    return tuple(f"d{offset + d}" if size != 1 else None for d, size in enumerate(meta.shape))


@rule_for("pointwise", aten.to.dtype, aten.where.self, aten.relu.default, aten.gelu.default, aten.silu.default,
          aten.detach.default, aten.__and__.Tensor, aten.__or__.Tensor, aten.masked_fill.Scalar, aten.softplus.default,
          aten.clamp.default, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar,
          aten.floor_divide.default, aten.floor_divide.Scalar, aten.masked_fill.Tensor, aten.real.default,
          aten.imag.default, aten.complex.default, aten.polar.default, aten.conj.default, aten.rsub.Tensor,
          aten.isin.Tensor_Scalar, aten.selu.default, aten.relu6.default, aten.hardtanh.default, aten.hardswish.default,
          aten.log_sigmoid.default, aten.special_polygamma.default, aten.special_ndtr.default)
def pointwise(op: OpView) -> Rule | None:
    out = op.out
    sizes = {f"d{i}": size for i, size in enumerate(out.shape) if size != 1}
    groups = LINEAR.get(op.target, ())
    if op.target in (aten.add.Tensor, aten.sub.Tensor) and len(op.inputs) < 2:
        groups = ()  # adding a number to each summand would add it several times
    if op.target is aten.to.dtype and _holds_all(op.out.dtype, op.inputs[0].dtype):
        groups = ((0,),)
    if op.target in FILLED and op.arg(FILLED[op.target]) == 0:
        groups = tuple((i,) for i, meta in enumerate(op.inputs) if meta.dtype is not torch.bool)[:1]
    return Rule(
        tuple(broadcast_dims(m, out) for m in op.inputs),
        (tuple(f"d{i}" if size != 1 else None for i, size in enumerate(out.shape)),) * len(op.outputs),
        sizes,
        linear=tuple(frozenset(g) for g in groups if all(i < len(op.inputs) for i in g)),
        flops=float(out.num_elements),
        saves=_saved(op),
        saves_output=op.target in OUTPUT_SAVED,
        alias=op.target is aten.detach.default,
        random=torch.Tag.nondeterministic_seeded in op.target.tags,
        gradient_ops=GRADIENT_OPS.get(op.target, 1),
    )


def _holds_all(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether numbers of one kind are such of the other, so that a sum of them stays one."""
    return narrow is not torch.bool and torch.promote_types(wide, narrow) == wide


def _saved(op: OpView) -> frozenset[int]:
    """Inputs kept for backward: none of a linear op; for a product each factor that the other one's gradient needs."""
    if op.target in NOTHING_SAVED or op.target in OUTPUT_SAVED:
        return frozenset()
    if op.target in CHOICES:
        return frozenset(i for i, meta in enumerate(op.inputs) if meta.dtype is torch.bool)
    if op.target is aten.addcmul.default:
        return frozenset({1, 2})
    if op.target is aten.mul.Tensor:
        if len(op.inputs) < 2:
            return frozenset()
        return frozenset(i for i in (0, 1) if op.inputs[1 - i].requires_grad)
    if op.target is aten.div.Tensor and len(op.inputs) < 2:
        return frozenset()
    return frozenset(range(len(op.inputs)))


@rule_for(aten.prelu.default)
def prelu(op: OpView) -> Rule | None:
    """One slope for all, or one for each channel (dim 1)."""
    rule = pointwise(op)
    if rule is None:
        return None
    slope = (None,) * len(op.shapes[1]) if op.inputs[1].num_elements == 1 else (rule.outputs[0][1],)
    return replace(rule, inputs=(rule.outputs[0], slope))


@rule_for(aten.dropout.default, aten.native_dropout.default, aten.rand_like.default, aten.randn_like.default,
          aten.bernoulli.default, aten.bernoulli.p, aten.uniform.default, aten.exponential.default)
def random(op: OpView) -> Rule:
    """Numbers drawn for each element: ranks with different shards draw different ones."""
    sizes = {f"d{i}": size for i, size in enumerate(op.out.shape) if size != 1}
    dims = tuple(f"d{i}" if size != 1 else None for i, size in enumerate(op.out.shape))
    return Rule((dims,), (dims,) * len(op.outputs), sizes, flops=float(op.out.num_elements), random=True,
                extra_bytes={0: 1.0})


@rule_for(aten._standard_gamma.default, aten.poisson.default, aten.rrelu.default)
def random_of_values(op: OpView) -> Rule:
    """Numbers drawn for each element, whose distribution it says. Backward of rrelu reads its slopes."""
    rule, slopes = random(op), op.target is aten.rrelu.default
    assert rule is not None
    return replace(rule, saves=frozenset({0}), saves_output=op.target is aten._standard_gamma.default,
                   extra_bytes={0: float(op.out.dtype.itemsize)} if slopes else {})
