"""Matrix products."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from autoparallel.layout import REPLICATE, shard
from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import AxisStrategy, Exchange, Rule, einsum_rule

aten = torch.ops.aten


@rule_for(aten.linear.default)
def linear(op: OpView) -> Rule:
    return einsum_rule("x[*b, k], w[n, k], bias[n] -> y[*b, n]", op.shapes, [op.out.shape], reduce="k",
                       additive="bias", linear=("x bias", "w bias"), flops_per_point=2.0, op_class="matmul",
                       saves=frozenset({0, 1}))


@rule_for("autoparallel::linear_sections")
def linear_sections(op: OpView) -> Rule:
    """``n`` gives each rank a shard of every section. That takes a variant: a plain shard of the weight's rows would
    have whole sections and miss others. An interleaved shard of equal sections has a part of each: ``n;3``."""
    last, width = len(op.shapes[0]) - 1, sum(op.arg("sizes"))
    results = ", ".join(f"y{i}[*b, .]" for i in range(len(op.outputs)))
    rule = einsum_rule(f"x[*b, k], w[., k], bias[.] -> {results}", op.shapes, [m.shape for m in op.outputs],
                       reduce="k", additive="bias", linear=("x bias", "w bias"), flops_per_point=2.0 * width,
                       op_class="matmul", saves=frozenset({0, 1}))
    exchanged = range(1, len(op.inputs))
    inside = tuple(Exchange("all_to_all", i, op.inputs[i].dtype.itemsize, 1, 1, kept=True) for i in exchanged)
    cut = AxisStrategy("n", (REPLICATE, *(shard(0) for _ in exchanged)), (shard(last),) * len(op.outputs), "n",
              variant="sections", inside=inside, apart=frozenset({"n"}), unsaved=frozenset(exchanged))
    if len(set(sizes := op.arg("sizes"))) > 1:
        return replace(rule, variants=(cut,))
    parts = shard(0, len(sizes))
    interleaved = AxisStrategy(f"n;{len(sizes)}", (REPLICATE, *(parts for _ in exchanged)), cut.outputs, "n",
                               (sizes[0],), apart=frozenset({"n"}))
    return replace(rule, variants=(cut, interleaved))


@rule_for(aten.mm.default, aten.matmul.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def matmul(op: OpView) -> Rule:
    """Products of matrices, of vectors, and of batches of them that broadcast: rows, columns and batch dims may be cut,
    and the summed dim, which leaves summands."""
    a, b = (len(shape) for shape in op.shapes)
    batch = [f"b{i}" for i in range(max(a, b) - 2)]
    left = [*batch[len(batch) - max(0, a - 2) :], *(["m", "k"] if a > 1 else ["k"])]
    right = [*batch[len(batch) - max(0, b - 2) :], *(["k", "n"] if b > 1 else ["k"])]
    out = [*batch, *(["m"] if a > 1 else []), *(["n"] if b > 1 else [])]
    pattern = f"x[{', '.join(left)}], w[{', '.join(right)}] -> y[{', '.join(out)}]"
    return einsum_rule(pattern, op.shapes, [op.out.shape], reduce="k", linear=("x", "w"), flops_per_point=2.0,
                       op_class="matmul", saves=frozenset({0, 1}))


#: Products added to a tensor that broadcasts: factors of both operands and of the result.
ADDED = {
    aten.addmm.default: ("m k", "k n", "m n"), aten.addmv.default: ("m k", "k", "m"),
    aten.addr.default: ("m", "n", "m n"), aten.baddbmm.default: ("b m k", "b k n", "b m n"),
    aten.addbmm.default: ("b m k", "b k n", "m n"),
}


@rule_for(*ADDED)
def added_product(op: OpView) -> Rule:
    left, right, out = (factors.split() for factors in ADDED[op.target])
    added = out[len(out) - len(op.shapes[0]) :]
    pattern = f"c[{', '.join(added)}], x[{', '.join(left)}], w[{', '.join(right)}] -> y[{', '.join(out)}]"
    reduce = " ".join(factor for factor in dict.fromkeys(left + right) if factor not in out)
    return einsum_rule(pattern, op.shapes, [op.out.shape], reduce=reduce, additive="c", linear=("c x", "c w"),
                       flops_per_point=2.0, op_class="matmul", saves=frozenset({1, 2}))


@rule_for(aten.linalg_multi_dot.default)
def chain(op: OpView) -> Rule:
    """Matrices multiplied in a row, of which the first and the last may be vectors."""
    last = len(op.shapes) - 1
    factors = [["m", "k0"] if len(op.shapes[0]) == 2 else ["k0"], *([f"k{i - 1}", f"k{i}"] for i in range(1, last)),
               [f"k{last - 1}", "n"] if len(op.shapes[last]) == 2 else [f"k{last - 1}"]]
    names = [f"x{i}" for i in range(last + 1)]
    pattern = ", ".join(f"{name}[{', '.join(dims)}]" for name, dims in zip(names, factors, strict=True))
    out = [f for f in (*factors[0], *factors[last]) if not f.startswith("k")]
    rule = einsum_rule(f"{pattern} -> y[{', '.join(out)}]", op.shapes, [op.out.shape],
                       reduce=" ".join(f"k{i}" for i in range(last)), linear=names, op_class="matmul",
                       saves=frozenset(range(last + 1)))
    return replace(rule, flops=2.0 * sum(meta.num_elements for meta in op.inputs[1:]) * math.prod(op.out.shape[:1]))


@rule_for(aten.outer.default, aten.ger.default)
def outer(op: OpView) -> Rule:
    return einsum_rule("x[m], w[n] -> y[m, n]", op.shapes, [op.out.shape], linear=("x", "w"), flops_per_point=1.0,
                       saves=frozenset({0, 1}))


@rule_for(aten.bilinear.default)
def bilinear(op: OpView) -> Rule:
    return einsum_rule("x[*b, i], z[*b, j], w[n, i, j], bias[n] -> y[*b, n]", op.shapes, [op.out.shape],
                       reduce="i j", additive="bias", linear=("x bias", "z bias", "w bias"), flops_per_point=3.0,
                       op_class="matmul", saves=frozenset({0, 1, 2}))
