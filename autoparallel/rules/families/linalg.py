"""Linear algebra on batches of matrices: the leading dims, which broadcast, may be cut; so may columns solved for."""

from __future__ import annotations

from dataclasses import replace

import torch

from autoparallel.rules.families.pointwise import broadcast_dims
from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import Dims, Rule, einsum_rule

aten = torch.ops.aten

#: Ops that solve for an input (its position), in which they are linear column by column.
SOLVED = {aten.linalg_solve.default: 1, aten.linalg_solve_triangular.default: 1, aten.linalg_lu_solve.default: 2,
          aten.linalg_ldl_solve.default: 2, aten.cholesky_solve.default: 0, aten.lu_solve.default: 0,
          aten.linalg_solve_ex.default: None, aten.triangular_solve.default: None}
#: Inputs that are vectors, by position; all others are matrices.
VECTORS: dict[object, tuple[int, ...]] = {
    aten.linalg_lu_solve.default: (1,), aten.linalg_ldl_solve.default: (1,), aten.lu_solve.default: (2,),
    aten.lu_unpack.default: (1,), aten.linalg_householder_product.default: (1,), aten.ormqr.default: (1,),
}
#: Inputs that are numbers, by position.
NUMBERS: dict[object, tuple[int, ...]] = {aten.linalg_pinv.atol_rtol_tensor: (1, 2)}


@rule_for(aten.cholesky.default, aten.linalg_cholesky.default, aten.linalg_cholesky_ex.default,
          aten.cholesky_inverse.default, aten.linalg_inv.default, aten.linalg_inv_ex.default, aten.inverse.default,
          aten.linalg_det.default, aten.det.default, aten.logdet.default, aten.linalg_slogdet.default,
          aten.slogdet.default, aten.linalg_eig.default, aten.linalg_eigvals.default, aten.linalg_eigh.default,
          aten.linalg_eigvalsh.default, aten.linalg_qr.default, aten.qr.default, aten.geqrf.default,
          aten.linalg_svd.default, aten.linalg_svdvals.default, aten.svd.default, aten.linalg_matrix_exp.default,
          aten.matrix_exp.default, aten.linalg_matrix_power.default, aten.matrix_power.default,
          aten.linalg_pinv.default, aten.pinverse.default, aten.linalg_lu.default, aten.linalg_lu_factor.default,
          aten.linalg_lu_factor_ex.default, aten.linalg_ldl_factor.default, aten.linalg_ldl_factor_ex.default,
          aten.linalg_cond.default, aten.linalg_matrix_rank.default, *SOLVED, *VECTORS, *NUMBERS)
def of_matrices(op: OpView) -> Rule | None:
    """Every matrix, or vector, of the last dims by itself."""
    vectors, numbers = VECTORS.get(op.target, ()), NUMBERS.get(op.target, ())
    kept = [1 if i in vectors else 0 if i in numbers else 2 for i in range(len(op.inputs))]
    if op.target in (aten.linalg_solve.default, aten.linalg_solve_ex.default) and _one_column(*op.shapes):
        kept[1] = 1
    rule = over_leading(op, kept)
    solved = SOLVED.get(op.target)
    if rule is None or solved is None or kept[solved] == 1 or _from_the_right(op):
        return rule
    return _by_columns(rule, solved, op.out.shape[-1])


def _one_column(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether the right side of A x = b is a vector for each matrix."""
    return len(b) == 1 or (len(a) - 1 == len(b) and a[:-1] == b)


def _from_the_right(op: OpView) -> bool:
    return any(a.name == "left" for a in op.target._schema.arguments) and not op.arg("left")


def _by_columns(rule: Rule, solved: int, columns: int) -> Rule:
    linear = (frozenset({solved}),)
    if columns == 1:
        return replace(rule, linear=linear)
    inputs = tuple((*dims[:-1], "n") if i == solved else dims for i, dims in enumerate(rule.inputs))
    return replace(rule, inputs=inputs, outputs=((*rule.outputs[0][:-1], "n"),), sizes={**rule.sizes, "n": columns},
                   linear=linear)


def over_leading(op: OpView, kept: list[int]) -> Rule | None:
    """Only the leading dims are cut: all but the last ``kept[i]`` of input i, broadcast against one another."""
    leads = [shape[: len(shape) - k] for shape, k in zip(op.shapes, kept, strict=True)]
    batch = tuple(torch.broadcast_shapes(*leads))
    if any(meta.shape[: len(batch)] != batch for meta in op.outputs):
        return None
    names: Dims = tuple(f"b{i}" if n != 1 else None for i, n in enumerate(batch))
    inputs = tuple(
        (*(f if n != 1 else None for f, n in zip(names[len(batch) - len(lead) :], lead, strict=True)), *(None,) * k)
        for lead, k in zip(leads, kept, strict=True)
    )
    outputs = tuple((*names, *(None,) * (len(meta.shape) - len(batch))) for meta in op.outputs)
    sizes = {f: n for f, n in zip(names, batch, strict=True) if f}
    flops = float(op.inputs[0].num_elements * max(op.shapes[0][-1:], default=1))
    return Rule(inputs, outputs, sizes, flops=flops, op_class="matmul", saves=frozenset(range(len(inputs))),
                saves_output=True)


@rule_for(aten.linalg_vander.default)
def powers(op: OpView) -> Rule:
    """Of each element, in a new last dim; as many as there are elements in the last one where nothing else is said."""
    pattern = "x[*b] -> y[*b, .]" if op.arg("N") is not None else "x[*b, .] -> y[*b, ., .]"
    return einsum_rule(pattern, op.shapes, [op.out.shape], flops_per_point=float(op.out.shape[-1]),
                       saves=frozenset({0}), saves_output=True)


@rule_for(aten.linalg_tensorsolve.default)
def tensorsolve(op: OpView) -> Rule:
    """One system of equations: only the right side may be a summand."""
    x = op.out.num_elements
    return Rule(tuple((None,) * len(shape) for shape in op.shapes), ((None,) * len(op.out.shape),), {},
                linear=(frozenset({1}),), flops=2.0 / 3.0 * x**3, op_class="matmul", saves=frozenset({0}),
                saves_output=True)


@rule_for(aten.pairwise_distance.default, aten.cosine_similarity.default)
def compared(op: OpView) -> Rule:
    """Vectors along one dim of both, of which each pair gives a number; other dims broadcast."""
    wide = torch.broadcast_shapes(*op.shapes)
    dim = (-1 if op.target is aten.pairwise_distance.default else op.arg("dim")) % len(wide)
    names = [f"d{i}" if i != dim else "." for i in range(len(wide))]
    left, right = (", ".join(names[len(wide) - len(shape) :]) for shape in op.shapes)
    out = names if len(op.out.shape) == len(wide) else names[:dim] + names[dim + 1 :]
    rule = einsum_rule(f"x[{left}], y[{right}] -> z[{', '.join(out)}]", op.shapes, [op.out.shape],
                       saves=frozenset({0, 1}), saves_output=True)
    return replace(rule, flops=6.0 * op.inputs[0].num_elements, op_class="reduction")


@rule_for(aten.linalg_cross.default)
def cross(op: OpView) -> Rule:
    """Cross products of vectors along a dim of length 3, which stays whole."""
    dim = op.arg("dim") % len(op.out.shape)
    names = broadcast_dims(op.out, op.out)
    whole = names[dim]
    inputs = tuple(tuple(None if f == whole else f for f in broadcast_dims(meta, op.out)) for meta in op.inputs)
    sizes = {f: op.out.shape[d] for d, f in enumerate(names) if f and d != dim}
    return Rule(inputs, (tuple(None if f == whole else f for f in names),), sizes,
                linear=(frozenset({0}), frozenset({1})), flops=5.0 * op.out.num_elements, saves=frozenset({0, 1}))


@rule_for(aten.linalg_vecdot.default)
def vecdot(op: OpView) -> Rule:
    """A product summed over one dim."""
    wide = torch.broadcast_shapes(*op.shapes)
    dim = op.arg("dim") % len(wide)
    names = [f"d{i}" for i in range(len(wide))]
    patterns = [", ".join(names[len(wide) - len(shape) :]) for shape in op.shapes]
    out = ", ".join(name for i, name in enumerate(names) if i != dim)
    return einsum_rule(f"x[{patterns[0]}], y[{patterns[1]}] -> z[{out}]", op.shapes, [op.out.shape],
                       reduce=names[dim], linear=("x", "y"), flops_per_point=2.0, saves=frozenset({0, 1}))


@rule_for(aten.cdist.default, aten._cdist_forward.default)
def distances(op: OpView) -> Rule:
    """Between each row of one and each row of the other; batches broadcast, features stay whole."""
    batch = [f"b{i}" for i in range(len(op.out.shape) - 2)]
    left, right = (", ".join(batch[len(batch) + 2 - len(shape) :]) for shape in op.shapes)
    pattern = f"x[{left}, m, .], y[{right}, n, .] -> z[{', '.join(batch)}, m, n]"
    return einsum_rule(pattern.replace("[, ", "["), op.shapes, [op.out.shape],
                       flops_per_point=3.0 * max(1, op.shapes[0][-1]), op_class="matmul", saves=frozenset({0, 1}),
                       saves_output=True)
