"""Views and data movement: reshape, permute, expand, slice, select, cat, pad, flip, roll.

A reshape is taken apart into groups of dims with equal products. In each group only the leading dim can be cut, and
only into shards that divide the leading dim on both sides: [b, s, (h d)] -> [b, s, h, d] cuts h.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autoparallel.layout import shard
from autoparallel.ops.windows import window_of_rows
from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import AxisStrategy, Exchange, Rule

aten = torch.ops.aten


def reshape_groups(source: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Dims of source and target that hold the same elements, group by group (dims of size 1 are left out).

    >>> reshape_groups((8, 16, 32), (8, 16, 4, 8))
    [([0], [0]), ([1], [1]), ([2], [2, 3])]
    """
    left = [(d, n) for d, n in enumerate(source) if n != 1]
    right = [(d, n) for d, n in enumerate(target) if n != 1]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        a, b = [left[i][0]], [right[j][0]]
        p, q = left[i][1], right[j][1]
        i, j = i + 1, j + 1
        while p != q:
            if p < q:
                a.append(left[i][0])
                p *= left[i][1]
                i += 1
            else:
                b.append(right[j][0])
                q *= right[j][1]
                j += 1
        groups.append((a, b))
    return groups


@rule_for(aten.reshape.default)
def reshape(op: OpView) -> Rule | None:
    source, target = op.shapes[0], op.out.shape
    if 0 in source:
        return None
    sizes: dict[str, int] = {}
    even: dict[str, tuple[int, ...]] = {}
    a: list[str | None] = [None] * len(source)
    b: list[str | None] = [None] * len(target)
    for number, (left, right) in enumerate(reshape_groups(source, target)):
        factor = f"d{number}"
        a[left[0]] = b[right[0]] = factor
        sizes[factor] = min(source[left[0]], target[right[0]])
        if len(left) > 1 or len(right) > 1:
            even[factor] = (source[left[0]], target[right[0]])
    return Rule((tuple(a),), (tuple(b),), sizes, even=even, linear=(frozenset({0}),), alias=not op.copies)


@rule_for(aten.permute.default)
def permute(op: OpView) -> Rule:
    names = [f"d{i}" if size != 1 else None for i, size in enumerate(op.shapes[0])]
    sizes = {f"d{i}": size for i, size in enumerate(op.shapes[0]) if size != 1}
    out = tuple(names[d] for d in op.arg("dims"))
    return Rule((tuple(names),), (out,), sizes, linear=(frozenset({0}),), alias=True)


@rule_for(aten.expand.default)
def expand(op: OpView) -> Rule:
    source, target = op.shapes[0], op.out.shape
    offset = len(target) - len(source)
    names = tuple(f"d{i}" if n != 1 else None for i, n in enumerate(target))
    inputs = tuple(names[offset + d] if n == target[offset + d] else None for d, n in enumerate(source))
    sizes = {f"d{i}": n for i, n in enumerate(target) if n != 1}
    return Rule((inputs,), (names,), sizes, linear=(frozenset({0}),), alias=True)


def whole_dims(op: OpView, whole: set[int], **rest: object) -> Rule:
    """A rule whose inputs and outputs have the same dims, each of them a factor but those in ``whole``."""
    rank = len(op.out.shape)
    names = tuple(f"d{i}" if i not in whole and op.out.shape[i] != 1 else None for i in range(rank))
    sizes = {n: op.out.shape[i] for i, n in enumerate(names) if n is not None}
    inputs = tuple(names if len(shape) == rank else (None,) * len(shape) for shape in op.shapes)
    return Rule(inputs, (names,) * len(op.outputs), sizes, **rest)  # type: ignore[arg-type]


@rule_for(aten.slice.Tensor)
def slice_(op: OpView) -> Rule:
    rule = whole_dims(op, {op.arg("dim")}, linear=(frozenset({0}),), alias=True)
    return _with_borders(rule, op) if op.arg("step") == 1 and (op.arg("start") or 0) >= 0 else rule


def _with_borders(rule: Rule, op: OpView) -> Rule:
    """A dim of which less than half is cut off, or that is filled up by less, is cut too: neighbours send one another
    what their shards are shifted by."""
    shape, rows = op.shapes[0], []
    for dim, (size, made) in enumerate(zip(shape, op.out.shape, strict=True)):
        window = window_of_rows(op.target, op.arguments, dim, len(shape))
        most = max(abs(window.before), abs(made - size - window.before))
        if 0 < 2 * most < size:
            border = Exchange("neighbours", 0, op.inputs[0].dtype.itemsize * most / size, 1,
                              int(op.inputs[0].requires_grad), kept=True, whole=True)
            name = f"halo d{dim}"
            rows.append(AxisStrategy(name, (shard(dim),), (shard(dim),), f"d{dim}", variant="rows", inside=(border,),
                            apart=frozenset({name})))
    return replace(rule, variants=tuple(rows))


@rule_for(aten.select.int)
def select(op: OpView) -> Rule:
    shape = op.shapes[0]
    dim = op.arg("dim") % len(shape)
    names = tuple(f"d{i}" if i != dim and n != 1 else None for i, n in enumerate(shape))
    sizes = {f"d{i}": n for i, n in enumerate(shape) if i != dim and n != 1}
    return Rule((names,), (names[:dim] + names[dim + 1 :],), sizes, linear=(frozenset({0}),), alias=True)


@rule_for(aten.slice_scatter.default, aten.select_scatter.default)
def scatter(op: OpView) -> Rule:
    """A tensor with a slice, or one place of a dim, replaced: linear in both together."""
    dim = op.arg("dim") % len(op.out.shape)
    rule = whole_dims(op, {dim}, linear=(frozenset({0, 1}),))
    inner = rule.outputs[0][:dim] + rule.outputs[0][dim + 1 :]
    return replace(rule, inputs=(rule.inputs[0], inner)) if op.target is aten.select_scatter.default else rule


@rule_for(aten.tril.default, aten.triu.default)
def triangle(op: OpView) -> Rule:
    rank = len(op.out.shape)
    return whole_dims(op, {rank - 2, rank - 1}, linear=(frozenset({0}),))


@rule_for(aten.cat.default)
def cat(op: OpView) -> Rule | None:
    rank = len(op.out.shape)
    if any(len(shape) != rank for shape in op.shapes):
        return None
    return whole_dims(op, {op.arg("dim") % rank}, linear=(frozenset(range(len(op.inputs))),), gradient_ops=0)


@rule_for(aten.stack.default)
def stack(op: OpView) -> Rule:
    shape = op.out.shape
    dim = op.arg("dim") % len(shape)
    names = tuple(f"d{i}" if i != dim and n != 1 else None for i, n in enumerate(shape))
    sizes = {n: shape[i] for i, n in enumerate(names) if n is not None}
    inner = names[:dim] + names[dim + 1 :]
    return Rule((inner,) * len(op.inputs), (names,), sizes, linear=(frozenset(range(len(op.inputs))),))


@rule_for(aten.pad.default, aten.constant_pad_nd.default)
def pad(op: OpView) -> Rule:
    rank, amounts = len(op.out.shape), op.arg("pad")
    padded = {rank - 1 - i // 2 for i, n in enumerate(amounts) if n}
    value = op.arg("value")
    rule = whole_dims(op, padded, linear=(frozenset({0}),) if not value else ())
    return _with_borders(rule, op) if op.arguments.get("mode", "constant") == "constant" else rule


@rule_for(aten.flip.default, aten.roll.default)
def flip(op: OpView) -> Rule | None:
    dims = op.arg("dims") or range(len(op.out.shape))  # a roll without dims is of the flattened tensor
    return whole_dims(op, {d % len(op.out.shape) for d in dims}, linear=(frozenset({0}),))


@rule_for(aten.flipud.default, aten.fliplr.default)
def flip_first_dims(op: OpView) -> Rule:
    return whole_dims(op, {0 if op.target is aten.flipud.default else 1}, linear=(frozenset({0}),))


@rule_for(aten.diag_embed.default)
def diag_embed(op: OpView) -> Rule:
    """The last dim becomes a diagonal of two new ones."""
    shape, rank = op.shapes[0], len(op.out.shape)
    made = {op.arg("dim1") % rank, op.arg("dim2") % rank}
    names = tuple(f"d{i}" if n != 1 else None for i, n in enumerate(shape[:-1]))
    remaining = iter(names)
    out = tuple(None if d in made else next(remaining) for d in range(rank))
    sizes = {f: shape[i] for i, f in enumerate(names) if f}
    return Rule(((*names, None),), (out,), sizes, linear=(frozenset({0}),))


@rule_for(aten.diagonal_scatter.default)
def diagonal_scatter(op: OpView) -> Rule:
    shape = op.out.shape
    gone = {op.arg("dim1") % len(shape), op.arg("dim2") % len(shape)}
    rule = whole_dims(op, gone, linear=(frozenset({0, 1}),))
    kept = tuple(f for d, f in enumerate(rule.outputs[0]) if d not in gone)
    return replace(rule, inputs=(rule.inputs[0], (*kept, None)))


@rule_for(aten.block_diag.default)
def block_diag(op: OpView) -> Rule:
    """All blocks are needed; summands of all of them give a summand."""
    return Rule(tuple((None,) * len(s) for s in op.shapes), ((None, None),), {},
                linear=(frozenset(range(len(op.inputs))),))


@rule_for(aten.unfold.default)
def windows(op: OpView) -> Rule:
    """Windows along a dim, each in a new last dim: other dims may be cut."""
    shape = op.shapes[0]
    dim = op.arg("dimension") % len(shape)
    names = tuple(f"d{i}" if i != dim and n != 1 else None for i, n in enumerate(shape))
    sizes = {f: shape[i] for i, f in enumerate(names) if f}
    return Rule((names,), ((*names, None),), sizes, linear=(frozenset({0}),), alias=True)


@rule_for(aten.diagonal.default)
def diagonal(op: OpView) -> Rule:
    shape = op.shapes[0]
    gone = {op.arg("dim1") % len(shape), op.arg("dim2") % len(shape)}
    names = tuple(f"d{i}" if i not in gone and n != 1 else None for i, n in enumerate(shape))
    sizes = {f: shape[i] for i, f in enumerate(names) if f}
    kept = tuple(names[i] for i in range(len(shape)) if i not in gone)
    return Rule((names,), ((*kept, None),), sizes, linear=(frozenset({0}),), alias=True)
