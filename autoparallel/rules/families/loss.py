"""Losses that sum over elements (capture turned the means into sums and counts)."""

from __future__ import annotations

from dataclasses import replace

import torch

from autoparallel.layout import INVARIANT, shard
from autoparallel.ops.ctc import ctc_losses
from autoparallel.rules.families.pointwise import broadcast_dims
from autoparallel.rules.registry import OpView, repeated, rule_for
from autoparallel.rules.rule import AxisStrategy, Dims, Exchange, Rule

aten = torch.ops.aten
NONE, SUM = 0, 2


@rule_for(aten.cross_entropy_loss.default)
def cross_entropy(op: OpView) -> Rule | None:
    """Targets may be cut, which are classes or their probabilities; weights of the classes are for all.

    With cut classes a variant exchanges the normalisers (one number per target).
    """
    logits = op.shapes[0]
    summed = op.arg("reduction") == SUM
    if op.arg("reduction") not in (NONE, SUM) or len(logits) == 1:
        return None
    names = tuple(f"n{i}" if i != 1 and n != 1 else None for i, n in enumerate(logits))
    own = (names[0], *names[2:])
    sizes = {n: logits[i] for i, n in enumerate(names) if n is not None}
    probable = op.inputs[1].dtype.is_floating_point
    weights = [(None,) for _ in op.shapes[2:]]
    plain = summed and len(logits) == 2 and not (probable or weights or _smooth(op))
    numbers = Exchange("all_reduce", 1, 4.0, forward=3)  # maximum, sum of exponentials, the target's own logit
    classes = AxisStrategy(
        "classes", (shard(1), INVARIANT), (INVARIANT,), "classes", variant="classes", inside=(numbers,)
    )
    return Rule(
        (names, names if probable else own, *weights), (() if summed else own,), sizes,
        reduce=frozenset(sizes if summed else ()), linear=(frozenset({1}),) if probable and not _smooth(op) else (),
        flops=6.0 * op.inputs[0].num_elements, op_class="reduction", saves=frozenset({1}),
        variants=(classes,) if plain else (), extra_bytes={0: float(op.inputs[0].dtype.itemsize)},
    )


def _smooth(op: OpView) -> bool:
    return any(a.name == "label_smoothing" for a in op.target._schema.arguments) and bool(op.arg("label_smoothing"))


@rule_for(aten.nll_loss_nd.default)
def negative_log_likelihood(op: OpView) -> Rule | None:
    rule = cross_entropy(op)
    return replace(rule, variants=(), flops=float(op.inputs[1].num_elements)) if rule is not None else None


@rule_for(aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
          aten.kl_div.default, aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
          aten.soft_margin_loss.default, aten.poisson_nll_loss.default, aten.hinge_embedding_loss.default)
def elementwise_loss(op: OpView) -> Rule | None:
    """Weights broadcast; the loss is linear in them."""
    shape = op.shapes[0]
    if op.arg("reduction") not in (NONE, SUM) or op.shapes[1] != shape:
        return None
    weighted = any(a.name == "weight" for a in op.target._schema.arguments) and op.arg("weight") is not None
    dims = tuple(broadcast_dims(meta, op.inputs[0]) for meta in op.inputs)
    sizes = {f: shape[i] for i, f in enumerate(dims[0]) if f}
    summed = op.arg("reduction") == SUM
    return Rule(dims, (() if summed else dims[0],), sizes, reduce=frozenset(sizes if summed else ()),
                linear=(frozenset({2}),) if weighted else (), flops=3.0 * op.inputs[0].num_elements,
                op_class="reduction", saves=frozenset(range(len(dims))))


@rule_for(aten.cosine_embedding_loss.default, aten.triplet_margin_loss.default)
def loss_of_rows(op: OpView) -> Rule | None:
    """Rows of features compared, each by itself; a label, where there is one, for each row."""
    rows, reduction = op.shapes[0][:-1], op.arg("reduction")
    if reduction not in (NONE, SUM) or any(shape not in (op.shapes[0], rows) for shape in op.shapes):
        return None
    names: Dims = tuple(f"d{i}" if n != 1 else None for i, n in enumerate(rows))
    sizes = {f: n for f, n in zip(names, rows, strict=True) if f}
    inputs = tuple((*names, None) if shape == op.shapes[0] else names for shape in op.shapes)
    return Rule(inputs, (names if reduction == NONE else (),), sizes,
                reduce=frozenset(sizes if reduction == SUM else ()), flops=6.0 * op.inputs[0].num_elements,
                op_class="reduction", saves=frozenset(range(len(op.inputs))))


@rule_for(aten.multi_margin_loss.default, aten.multilabel_margin_loss.default)
def margin_loss(op: OpView) -> Rule | None:
    """Each row of scores by itself; weights of the classes are for all."""
    scores, labels = op.shapes[:2]
    reduction = op.arg("reduction")
    if reduction not in (NONE, SUM) or len(scores) != 2 or scores[0] == 1:
        return None
    rows = [("b", *(None,) * (len(scores) - 1)), ("b", *(None,) * (len(labels) - 1))]
    weights = [(None,) * len(shape) for shape in op.shapes[2:]]
    out: Dims = ("b",) if reduction == NONE else ()
    return Rule((*rows, *weights), (out,), {"b": scores[0]}, reduce=frozenset() if out else frozenset({"b"}),
                flops=3.0 * op.inputs[0].num_elements, op_class="reduction", saves=frozenset(range(len(op.inputs))))


@rule_for(ctc_losses)
def connectionist(op: OpView) -> Rule:
    """By sample, where targets are rows (rather than one after another)."""
    times, batch, classes = op.shapes[0]
    if len(op.shapes[1]) != 2 or batch == 1:
        return repeated(op)
    return Rule(((None, "b", None), ("b", None), ("b",), ("b",)), (("b",),), {"b": batch},
                flops=6.0 * times * batch * (classes + op.shapes[1][1]), op_class="reduction", saves=frozenset({0}))
