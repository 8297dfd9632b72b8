"""Ops that are other ops under one name, written as those: stacks, tensor products, rotations, trapezoids, ..."""

from __future__ import annotations

import math
import operator
import string
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph

from autoparallel.capture.passes.editing import Node, argument, emit, source_line
from autoparallel.errors import CaptureError

aten = torch.ops.aten
Rewrite = Callable[[Graph, Node], Node | None]
#: What a stack makes of its tensors before it concatenates them.
RAISED = {aten.hstack.default: aten.atleast_1d.default, aten.vstack.default: aten.atleast_2d.default,
          aten.dstack.default: aten.atleast_3d.default}


def _shape(node: Node) -> list[int]:
    return list(node.meta["val"].shape)


def adjoint(graph: Graph, node: Node) -> Node:
    """mH, adjoint: the last two dims exchanged, of conjugates."""
    x, rank = node.args[0], len(_shape(node))
    if x.meta["val"].is_complex():
        x = emit(graph, node, aten.conj.default, x)
    return emit(graph, node, aten.permute.default, x, [*range(rank - 2), rank - 1, rank - 2])


def stacked(graph: Graph, node: Node) -> Node:
    shards = [emit(graph, node, RAISED[node.target], local_shard) for local_shard in node.args[0]]
    last = {aten.hstack.default: 1, aten.vstack.default: 0, aten.dstack.default: 2}[node.target]
    return emit(graph, node, aten.cat.default, shards, min(last, len(_shape(shards[0])) - 1))


def columns(graph: Graph, node: Node) -> Node:
    """column_stack: a vector is a column."""
    shards = [
        local_shard
        if len(_shape(local_shard)) > 1
        else emit(graph, node, aten.reshape.default, local_shard, [math.prod(_shape(local_shard)), 1])
        for local_shard in node.args[0]
    ]
    return emit(graph, node, aten.cat.default, shards, 1)


def tensordot(graph: Graph, node: Node) -> Node:
    x, y = node.args[:2]
    left, right = ([d % len(_shape(t)) for d in argument(node, name)]
                   for t, name in ((x, "dims_self"), (y, "dims_other")))
    letters = iter(string.ascii_letters)
    of_x, of_y = ([next(letters) for _ in _shape(t)] for t in (x, y))
    for d, e in zip(left, right, strict=True):
        of_y[e] = of_x[d]
    return _einsum(graph, node, of_x, of_y)


def inner(graph: Graph, node: Node) -> Node:
    """Along the last dims of both; with a number it is a product."""
    x, y = node.args
    if not _shape(x) or not _shape(y):
        return emit(graph, node, aten.mul.Tensor, x, y)
    letters = iter(string.ascii_letters)
    of_x, of_y = ([next(letters) for _ in _shape(t)] for t in (x, y))
    return _einsum(graph, node, of_x, [*of_y[:-1], of_x[-1]])


def _einsum(graph: Graph, node: Node, x: list[str], y: list[str]) -> Node:
    """The letters that only one of the two has are the result's."""
    out = [letter for letter in (*x, *y) if (letter in x) != (letter in y)]
    return emit(graph, node, aten.einsum.default, f"{''.join(x)},{''.join(y)}->{''.join(out)}", list(node.args[:2]))


def kron(graph: Graph, node: Node) -> Node:
    """[a, b] x [c, d]: the product of [a, 1, b, 1] and [1, c, 1, d], with pairs merged."""
    rank = len(_shape(node))
    wide = []
    for place, factor in enumerate(node.args):
        shape = [1] * (rank - len(_shape(factor))) + _shape(factor)
        pairs = [n for size in shape for n in ((size, 1) if place == 0 else (1, size))]
        wide.append(emit(graph, node, aten.reshape.default, factor, pairs))
    return emit(graph, node, aten.reshape.default, emit(graph, node, aten.mul.Tensor, *wide), _shape(node))


def rotated(graph: Graph, node: Node) -> Node:
    """rot90: one turn is a flip and a transpose, so that only the flipped dim must be whole."""
    x, rank = node.args[0], len(_shape(node))
    a, b = (d % rank for d in argument(node, "dims"))
    turns = argument(node, "k") % 4
    flips = [[], [b], [a, b], [a]][turns]
    if flips:
        x = emit(graph, node, aten.flip.default, x, flips)
    order = list(range(rank))
    if turns % 2:
        order[a], order[b] = b, a
    return emit(graph, node, aten.permute.default, x, order)


def pixels(graph: Graph, node: Node) -> Node:
    """[(c r r), h, w] <-> [c, (h r), (w r)], channel_shuffle: dims taken apart, ordered anew and merged."""
    x, factor = node.args
    shape, out = _shape(x), _shape(node)
    lead = list(range(len(shape) - 3))
    k = len(lead)
    if node.target is aten.channel_shuffle.default:
        apart, order = [shape[0], factor, shape[1] // factor, *shape[2:]], [0, 2, 1, *range(3, len(shape) + 1)]
    elif node.target is aten.pixel_shuffle.default:
        apart = [*shape[:k], out[k], factor, factor, *shape[k + 1 :]]
        order = [*lead, *(k + d for d in (0, 3, 1, 4, 2))]
    else:
        apart = [*shape[: k + 1], out[k + 1], factor, out[k + 2], factor]
        order = [*lead, *(k + d for d in (0, 2, 4, 1, 3))]
    made = emit(graph, node, aten.reshape.default, x, apart)
    return emit(graph, node, aten.reshape.default, emit(graph, node, aten.permute.default, made, order), out)


def along_dim(graph: Graph, node: Node) -> Node:
    """take_along_dim: a gather of tensors that broadcast in the other dims, where negative places count from the end;
    without a dim a gather of flattened ones.
    """
    x, places = node.args[:2]
    dim = argument(node, "dim")
    if dim is None:
        flat, at = (emit(graph, node, aten.reshape.default, t, [math.prod(_shape(t))]) for t in (x, places))
        return emit(graph, node, aten.gather.default, flat, 0, at)
    dim %= len(_shape(x))
    backwards = emit(graph, node, aten.add.Scalar, places, _shape(x)[dim])
    places = emit(graph, node, aten.where.self, emit(graph, node, aten.lt.Scalar, places, 0), backwards, places)
    wide = []
    for t in (x, places):
        others = torch.broadcast_shapes(*([*_shape(o)[:dim], 1, *_shape(o)[dim + 1 :]] for o in (x, places)))
        wide.append(emit(graph, node, aten.expand.default, t, [*others[:dim], _shape(t)[dim], *others[dim + 1 :]]))
    return emit(graph, node, aten.gather.default, wide[0], dim, wide[1])


def msort(graph: Graph, node: Node) -> Node:
    return emit(graph, node, operator.getitem, emit(graph, node, aten.sort.default, node.args[0], 0), 0)


def cartesian_product(graph: Graph, node: Node) -> Node:
    """One column for each vector."""
    vectors = node.args[0]
    if len(vectors) == 1:
        return vectors[0]
    shape = [_shape(vector)[0] for vector in vectors]
    made = []
    for place, vector in enumerate(vectors):
        alone = emit(graph, node, aten.reshape.default, vector, [n if d == place else 1 for d, n in enumerate(shape)])
        wide = emit(graph, node, aten.expand.default, alone, shape)
        made.append(emit(graph, node, aten.reshape.default, wide, [math.prod(shape)]))
    return emit(graph, node, aten.stack.default, made, 1)


def summed_to(graph: Graph, node: Node) -> Node:
    """sum_to_size: what broadcasting has made, undone."""
    x, size = node.args[0], _shape(node)
    shape = _shape(x)
    extra = len(shape) - len(size)
    dims = [d for d, n in enumerate(shape) if d < extra or (size[d - extra] == 1 and n != 1)]
    made = emit(graph, node, aten.sum.dim_IntList, x, dims, True) if dims else x
    return emit(graph, node, aten.reshape.default, made, size)


def mean_of_numbers(graph: Graph, node: Node) -> Node:
    """nanmean: the sum of the values that are not NaN, divided by their count."""
    x, dim, keepdim = (argument(node, name) for name in ("self", "dim", "keepdim"))
    dims = [dim] if isinstance(dim, int) else list(dim or range(len(_shape(x))))
    if (dtype := node.kwargs.get("dtype")) is not None:
        x = emit(graph, node, aten.to.dtype, x, dtype)
    total = emit(graph, node, aten.nansum.default, x, dims, keepdim)
    counted = emit(graph, node, aten.logical_not.default, emit(graph, node, aten.isnan.default, x))
    return emit(graph, node, aten.div.Tensor, total, emit(graph, node, aten.sum.dim_IntList, counted, dims, keepdim))


def no_difference(graph: Graph, node: Node) -> Node | None:
    """diff of order zero is its input, whatever would be put before and after it."""
    return node.args[0] if argument(node, "n") == 0 else None


def diagonal(graph: Graph, node: Node) -> Node:
    """diag, diagflat: of a matrix its diagonal, of a vector the matrix that has it there."""
    x = node.args[0]
    offset = argument(node, "diagonal" if node.target is aten.diag.default else "offset")
    if node.target is aten.diag.default and len(_shape(x)) == 2:
        return emit(graph, node, aten.diagonal.default, x, offset)
    return emit(graph, node, aten.diag_embed.default, emit(graph, node, aten.reshape.default, x,
                                                           [math.prod(_shape(x))]), offset)


def diagonals_of_matrices(graph: Graph, node: Node) -> Node:
    return emit(graph, node, aten.diagonal.default, node.args[0],
                *(argument(node, name) for name in ("offset", "dim1", "dim2")))


def put_where(graph: Graph, node: Node) -> Node | None:
    """x[mask] = values, of values that are the same in all places: where the mask is true. Each element by itself."""
    x, indices, values = node.args[:3]
    masks = [(d, index) for d, index in enumerate(indices) if index is not None]
    if len(masks) != 1 or masks[0][1].meta["val"].dtype is not torch.bool:
        return None
    at, mask = masks[0]
    rank, after = len(_shape(x)), len(_shape(x)) - at - len(_shape(mask))
    if len(_shape(values)) > after or not _shape(mask):
        return None
    wide = emit(graph, node, aten.reshape.default, mask, [1] * at + _shape(mask) + [1] * after)
    if argument(node, "accumulate"):
        values = emit(graph, node, aten.add.Tensor, x, values)
    made = emit(graph, node, aten.where.self, wide, values, x)
    return made if len(_shape(made)) == rank else None


def trapezoid(graph: Graph, node: Node) -> Node:
    """The area under y, of trapezoids between neighbours; ``cumulative_`` up to each of them."""
    y = node.args[0]
    dim = argument(node, "dim") % len(_shape(y))
    heights = emit(graph, node, aten.add.Tensor, *_neighbours(graph, node, y, dim))
    if node.target._overloadname == "dx":
        areas = emit(graph, node, aten.mul.Tensor, heights, argument(node, "dx") / 2)
    else:
        x = node.args[1]
        shape = _shape(x)
        if len(shape) == 1:
            shape = [shape[0] if d == dim else 1 for d in range(len(_shape(y)))]
        x = emit(graph, node, aten.reshape.default, x, [1] * (len(_shape(y)) - len(shape)) + shape)
        before, after = _neighbours(graph, node, x, dim)
        widths = emit(graph, node, aten.sub.Tensor, after, before)
        areas = emit(graph, node, aten.mul.Tensor, emit(graph, node, aten.mul.Tensor, heights, widths), 0.5)
    if node.target._schema.name == "aten::cumulative_trapezoid":
        return emit(graph, node, aten.cumsum.default, areas, dim)
    return emit(graph, node, aten.sum.dim_IntList, areas, [dim], False)


def _neighbours(graph: Graph, node: Node, x: Node, dim: int) -> list[Node]:
    length = _shape(x)[dim]
    if length == 1:  # broadcast
        return [x, x]
    return [emit(graph, node, aten.slice.Tensor, x, dim, start, start + length - 1) for start in (0, 1)]


def strided(graph: Graph, node: Node) -> Node:
    """as_strided of all of a tensor in its order (as decompositions write it) is a reshape; any other picks elements
    by their places in memory. A rank's shard lies otherwise in memory, so the places are of the tensor in its order."""
    source, value, made = node.args[0], node.args[0].meta["val"], node.meta["val"]
    whole = value.is_contiguous() and made.is_contiguous() and not made.storage_offset()
    if whole and value.numel() == made.numel():
        return emit(graph, node, aten.reshape.default, source, _shape(node))
    dims = sorted(range(value.dim()), key=lambda d: (-value.stride(d), d))
    packed = value.permute(dims).is_contiguous()
    last = made.storage_offset() + sum((n - 1) * s for n, s in zip(made.shape, made.stride(), strict=True))
    if not packed or value.storage_offset() or (made.numel() and last >= value.numel()):
        raise CaptureError(f"as_strided reads memory that is not its tensor's own{source_line(node)}\n"
                           "  Give it a tensor of its own memory, x.contiguous(), or write slices and reshapes.")
    places = emit(graph, node, aten.full.default, [], made.storage_offset(), dtype=torch.int64)
    for dim, (length, stride) in enumerate(zip(made.shape, made.stride(), strict=True)):
        steps = emit(graph, node, aten.arange.default, length, dtype=torch.int64, device=made.device)
        steps = emit(graph, node, aten.mul.Tensor, steps, stride)
        steps = emit(graph, node, aten.reshape.default, steps, [length if d == dim else 1 for d in range(made.dim())])
        places = emit(graph, node, aten.add.Tensor, places, steps)
    flat = emit(graph, node, aten.reshape.default, emit(graph, node, aten.permute.default, source, dims), [-1])
    places = emit(graph, node, aten.reshape.default, places, [-1])
    picked = emit(graph, node, aten.index_select.default, flat, 0, places)
    return emit(graph, node, aten.reshape.default, picked, list(made.shape))


def convolution(graph: Graph, node: Node) -> Node:
    """The one op of all convolutions, which decompositions make."""
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = node.args
    rest = (output_padding, groups, dilation) if transposed else (dilation, groups)
    return emit(graph, node, _convolution_of(x, transposed), x, weight, bias, stride, padding, *rest)


def gradient_of_input(graph: Graph, node: Node) -> Node | None:
    """The first gradient of a convolution is a convolution of the other kind with the same weight."""
    source, number = node.args
    if number or source.target is not aten.convolution_backward.default:
        return None
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = source.args
    if transposed:
        return emit(graph, node, _convolution_of(x, False), grad, weight, None, stride, padding, dilation, groups)
    sizes, made, kernel = _shape(x)[2:], _shape(grad)[2:], _shape(weight)[2:]
    left = [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1)
            for n, m, s, p, d, k in zip(sizes, made, stride, padding, dilation, kernel, strict=True)]
    return emit(graph, node, _convolution_of(x, True), grad, weight, None, stride, padding, left, groups, dilation)


def _convolution_of(x: Node, transposed: bool) -> Any:
    plain = aten.conv1d.default, aten.conv2d.default, aten.conv3d.default
    inverse = aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input
    return (inverse if transposed else plain)[len(_shape(x)) - 3]


def counted(graph: Graph, node: Node) -> Node:
    """any, all: how many there are is a sum, of which each rank may have a summand."""
    x, value = node.args[0], node.meta["val"]
    dims = argument(node, "dim") if len(node.args) > 1 or "dim" in node.kwargs else None
    dims = list(range(len(_shape(x)))) if dims is None else [dims] if isinstance(dims, int) else list(dims)
    number = emit(graph, node, aten.count_nonzero.dim_IntList, x, dims) if dims and _shape(x) else x
    if node.target._schema.name == "aten::any" or number is x:
        made = emit(graph, node, aten.ne.Scalar, number, 0)
    else:
        made = emit(graph, node, aten.eq.Scalar, number, math.prod(_shape(x)[d] for d in dims))
    if value.dtype is not torch.bool:  # of bytes
        made = emit(graph, node, aten.to.dtype, made, value.dtype)
    return emit(graph, node, aten.reshape.default, made, _shape(node))


COMPOSITIONS: dict[Any, Rewrite] = {
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims),
                    counted),
    aten.mH.default: adjoint, aten.matrix_H.default: adjoint, aten.adjoint.default: adjoint,
    **dict.fromkeys(RAISED, stacked), aten.column_stack.default: columns,
    aten.tensordot.default: tensordot, aten.inner.default: inner, aten.kron.default: kron,
    aten.rot90.default: rotated, aten.pixel_shuffle.default: pixels, aten.pixel_unshuffle.default: pixels,
    aten.channel_shuffle.default: pixels, aten.take_along_dim.default: along_dim, aten.msort.default: msort,
    aten.cartesian_prod.default: cartesian_product, aten.sum_to_size.default: summed_to,
    aten.nanmean.default: mean_of_numbers,
    aten.diff.default: no_difference, aten.diag.default: diagonal, aten.diagflat.default: diagonal,
    aten.linalg_diagonal.default: diagonals_of_matrices, aten.index_put.default: put_where,
    **dict.fromkeys((aten.trapezoid.x, aten.trapezoid.dx, aten.trapz.x, aten.trapz.dx, aten.cumulative_trapezoid.x,
                     aten.cumulative_trapezoid.dx), trapezoid),
}
#: What decompositions and torch's own derivatives write.
DECOMPOSED: dict[Any, Rewrite] = {
    aten.as_strided.default: strided, aten.convolution.default: convolution, operator.getitem: gradient_of_input,
}
