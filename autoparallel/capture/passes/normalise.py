"""Normalisation: fewer kinds of ops, each in one form, so that rules are few and short.

Each pass has one named line in `PASSES`. Afterwards: no in-place ops (buffer updates are listed apart), no asserts or
no-op copies, every view is a ``reshape`` with explicit sizes, every transpose a ``permute``, every mean a sum times a
constant (so that a summand stays a summand), and losses that average are sums over counts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph
from torch.fx import Node as FxNode

from autoparallel.capture.passes.attention_masks import drop_masks
from autoparallel.capture.passes.autocast import explicit_casts
from autoparallel.capture.passes.batch_norm import norms_in_training, refuse_given_statistics
from autoparallel.capture.passes.compositions import COMPOSITIONS, DECOMPOSED, Rewrite
from autoparallel.capture.passes.dtype_check import refuse_types
from autoparallel.capture.passes.editing import Node, argument, emit, replace, source_line
from autoparallel.capture.passes.functionalise import functionalise
from autoparallel.capture.passes.fuse_embedding_bags import gather_bags
from autoparallel.capture.passes.fuse_experts import gather_experts
from autoparallel.capture.passes.fuse_functions import gather_functions
from autoparallel.capture.passes.fuse_linear_sections import gather_sections
from autoparallel.capture.passes.group_heads import group_heads
from autoparallel.capture.passes.mean_losses import AVERAGED_LOSSES
from autoparallel.capture.passes.vmap_and_grad import batch_regions, expand_gradients
from autoparallel.capture.remedies import instead, lines_of
from autoparallel.errors import CaptureError

aten = torch.ops.aten


def normalise(graph: Graph, buffer_names: dict[str, str]) -> dict[str, Node]:
    """Run all passes in place; returns the final value of each buffer that the program updates, by placeholder name."""
    refuse_unknown_shapes(graph)
    batch_regions(graph)
    explicit_casts(graph)
    refuse_types(graph)
    lists(graph, {})  # so that a chunk of a split that is written to is a slice
    mutations = functionalise(graph, buffer_names)
    expand_gradients(graph)
    for one_pass in PASSES:
        one_pass(graph, mutations)
    refuse_given_statistics(mutations, buffer_names)
    drop_dead(graph, mutations)
    return mutations


# --- structure ---------------------------------------------------------------------------------------------------


def refuse_unknown_shapes(graph: Graph) -> None:
    """Raises CaptureError for a tensor whose shape depends on the data: nothing could be said about its shards."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not all(type(size) is int for size in value.shape):
            raise CaptureError(f"{node.target} gives a tensor whose shape depends on the data{source_line(node)}\n"
                               + instead([line for line in lines_of(node.meta.get("stack_trace") or "")
                                          if "/torch/" not in line.path],
                                         "Write torch.where or a mask, so that the shape is known beforehand."))


def drop_dead(graph: Graph, mutations: dict[str, Node]) -> None:
    kept = set(mutations.values())
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and node not in kept:
            graph.erase_node(node)


# --- one op at a time --------------------------------------------------------------------------------------------

def _each(rewrites: dict[Any, Rewrite]) -> Callable[[Graph, dict[str, Node]], None]:
    def run(graph: Graph, mutations: dict[str, Node]) -> None:
        for node in list(graph.nodes):
            rewrite = rewrites.get(node.target) if node.op == "call_function" else None
            if rewrite is not None:
                with graph.inserting_before(node):
                    new = rewrite(graph, node)
                if new is not None and new is not node:
                    replace(node, new, mutations)

    return run


def drop_asserts(graph: Graph, mutations: dict[str, Node]) -> None:
    """Shapes, dtypes and constants are checked against the traced call instead."""
    names = ("_assert", "sym_constrain", "_guards_fn")
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "call_module") and not node.users and any(
            s in str(node.target) for s in names
        ):
            graph.erase_node(node)


def _identity(graph: Graph, node: Node) -> Node:
    return node.args[0]


def _synonym(graph: Graph, node: Node) -> Node:
    return emit(graph, node, SYNONYMS[node.target], *node.args, **node.kwargs)


def _same_dtype(graph: Graph, node: Node) -> Node | None:
    """A copy to the same dtype is the tensor itself, of a number (as torch.vmap writes it) a new one; any other is
    `to.dtype` (devices are one per rank)."""
    source, value = node.args[0], node.meta["val"]
    if not isinstance(source, FxNode):
        return emit(graph, node, aten.full.default, [], source, dtype=value.dtype)
    if source.meta["val"].dtype == value.dtype:
        return source
    return emit(graph, node, aten.to.dtype, source, value.dtype)


def _reshape(graph: Graph, node: Node) -> Node:
    source, shape = node.args[0], list(node.meta["val"].shape)
    if list(source.meta["val"].shape) == shape and source.meta["val"].dtype == node.meta["val"].dtype:
        return source
    return emit(graph, node, aten.reshape.default, source, shape)


def _permute(graph: Graph, node: Node) -> Node:
    """transpose, movedim, t, ...: the order of dims is read off a tensor whose sizes are their numbers."""
    source = node.args[0]
    rank = source.meta["val"].dim()
    numbered = torch.empty(list(range(rank)), device="meta")
    dims = list(node.target(numbered, *node.args[1:], **node.kwargs).shape)
    return source if dims == list(range(rank)) else emit(graph, node, aten.permute.default, source, dims)


def _expand(graph: Graph, node: Node) -> Node:
    source, shape = node.args[0], list(node.meta["val"].shape)
    if list(source.meta["val"].shape) == shape:
        return source
    return emit(graph, node, aten.expand.default, source, shape)


def _repeat(graph: Graph, node: Node) -> Node:
    """repeat, tile -> expand before each dim, merged: [a, b] 2 x 3 times is [2, a, 3, b] -> [2 a, 3 b]."""
    source, repeats = node.args[0], list(node.args[1])
    repeats = [1] * (source.meta["val"].dim() - len(repeats)) + repeats
    shape = [1] * (len(repeats) - source.meta["val"].dim()) + list(source.meta["val"].shape)
    return _expanded_between(graph, node, [(1, n) for n in shape], list(zip(repeats, shape, strict=True)))


def _repeat_interleave(graph: Graph, node: Node) -> Node | None:
    """repeat_interleave -> expand of a dim after the repeated one, merged."""
    source, times = node.args[:2]
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    shape = list(source.meta["val"].shape)
    if dim is None:
        return None
    dims = [(n,) for n in shape]
    at = dim % len(shape)
    apart, wide = [*dims[:at], (shape[at], 1), *dims[at + 1 :]], [*dims[:at], (shape[at], times), *dims[at + 1 :]]
    return _expanded_between(graph, node, apart, wide)


def _expanded_between(graph: Graph, node: Node, apart: list[tuple[int, ...]], wide: list[tuple[int, ...]]) -> Node:
    """reshape to the sizes of ``apart``, expand to those of ``wide``, merge each group of dims again."""
    made = emit(graph, node, aten.reshape.default, node.args[0], [n for dims in apart for n in dims])
    made = emit(graph, node, aten.expand.default, made, [n for dims in wide for n in dims])
    return emit(graph, node, aten.reshape.default, made, [math.prod(dims) for dims in wide])


def _slice(graph: Graph, node: Node) -> Node:
    arguments: list[Any] = [*node.args] + [None] * (5 - len(node.args))
    source, dim, start, end, step = arguments
    value = source.meta["val"]
    dim = (dim or 0) % value.dim()
    start, end, step = slice(start, end, step).indices(value.shape[dim])
    if (start, end, step) == (0, value.shape[dim], 1):
        return source
    return emit(graph, node, aten.slice.Tensor, source, dim, start, end, step)


def _cat(graph: Graph, node: Node) -> Node | None:
    """Chunks without elements add nothing; a single chunk is the result."""
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    shards = [local_shard for local_shard in node.args[0] if local_shard.meta["val"].numel()] or list(node.args[0])
    if len(shards) == 1 and shards[0].meta["val"].dtype == node.meta["val"].dtype:
        return shards[0]
    if len(shards) == len(node.args[0]):
        return None
    return emit(graph, node, aten.cat.default, shards, dim)


def _copy(graph: Graph, node: Node) -> Node:
    """copy(x, y), fill(x, y): y in x's dtype and shape."""
    value = node.meta["val"]
    if not isinstance(node.args[1], FxNode):
        return emit(graph, node, aten.full.default, list(value.shape), node.args[1], dtype=value.dtype,
                    device=value.device)
    made = node.args[1]
    if made.meta["val"].dtype != value.dtype:
        made = emit(graph, node, aten.to.dtype, made, value.dtype)
    same = made.meta["val"].shape == value.shape
    return made if same else emit(graph, node, aten.expand.default, made, list(value.shape))


def _number_added(graph: Graph, node: Node) -> Node | None:
    """A number added to a scalar is a tensor, of which each summand of the scalar may have its part."""
    value, target = node.meta["val"], node.target
    if value.dim() or not value.is_floating_point() or node.kwargs or len(node.args) != 2 \
            or not isinstance(node.args[1], int | float):
        return None
    number = emit(graph, node, aten.full.default, [], node.args[1], dtype=value.dtype, device=value.device)
    if target is aten.rsub.Scalar:
        return emit(graph, node, aten.sub.Tensor, number, node.args[0])
    return emit(graph, node, target, node.args[0], number)


def _weight_norm(graph: Graph, node: Node) -> Node:
    """v * (g / |v|), with the norm over all dims but one as a root of a sum, of which each rank may have a summand.
    To torch a dim of -1 is none (``weight_norm(..., dim=None)``): the norm is over all."""
    v, g = node.args[:2]
    rank, dim = v.meta["val"].dim(), node.args[2] if len(node.args) > 2 else 0
    kept = None if dim == -1 else dim % rank
    squares = emit(graph, node, aten.mul.Tensor, v, v)
    total = emit(graph, node, aten.sum.dim_IntList, squares, [d for d in range(rank) if d != kept], True)
    scale = emit(graph, node, aten.div.Tensor, g, emit(graph, node, aten.sqrt.default, total))
    return emit(graph, node, aten.mul.Tensor, v, scale)


def _shards(graph: Graph, node: Node) -> None:
    """split, chunk, unbind -> one slice (or select) per chunk that is used."""
    source = node.args[0]
    single = node.target in (aten.unbind.int, aten.unbind_copy.int)
    dim = _split_dim(node) % source.meta["val"].dim()
    start = 0
    shards: list[tuple[int, int]] = []
    for value in node.meta["val"]:
        length = 1 if single else value.shape[dim]
        shards.append((start, length))
        start += length
    for user in list(node.users):
        start, length = shards[user.args[1]]
        if single:
            new = emit(graph, user, aten.select.int, source, dim, start)
        else:
            new = emit(graph, user, aten.slice.Tensor, source, dim, start, start + length)
        user.replace_all_uses_with(new)
        graph.erase_node(user)


def _split_dim(node: Node) -> int:
    """hsplit, vsplit and dsplit name it themselves."""
    named = {"aten::vsplit": 0, "aten::dsplit": 2, "aten::hsplit": min(1, node.args[0].meta["val"].dim() - 1)}
    name = node.target._schema.name
    return named[name] if name in named else argument(node, "dim")


def _broadcast(graph: Graph, node: Node) -> None:
    """broadcast_tensors -> one expand per tensor that is used."""
    for user in list(node.users):
        source, value = node.args[0][user.args[1]], user.meta["val"]
        same = source.meta["val"].shape == value.shape
        new = source if same else emit(graph, user, aten.expand.default, source, list(value.shape))
        user.replace_all_uses_with(new)
        graph.erase_node(user)


def _meshgrid(graph: Graph, node: Node) -> None:
    """meshgrid -> one reshape and expand per tensor that is used; with "xy" the first two dims are swapped."""
    order = list(range(len(node.args[0])))
    if node.kwargs.get("indexing") == "xy":
        order[:2] = order[:2][::-1]
    for user in list(node.users):
        source, shape = node.args[0][user.args[1]], list(user.meta["val"].shape)
        place = order[user.args[1]]
        alone = emit(graph, user, aten.reshape.default, source, [n if d == place else 1 for d, n in enumerate(shape)])
        user.replace_all_uses_with(emit(graph, user, aten.expand.default, alone, shape))
        graph.erase_node(user)


def _narrow(graph: Graph, node: Node) -> Node:
    source, dim, start, length = node.args
    size = source.meta["val"].shape[dim]
    start = start % size if size else 0
    return emit(graph, node, aten.slice.Tensor, source, dim, start, start + length)


def _mean(graph: Graph, node: Node) -> Node:
    source = node.args[0]
    dims = list(node.args[1]) if len(node.args) > 1 and node.args[1] else list(range(source.meta["val"].dim()))
    keep = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    if node.kwargs.get("dtype") is not None:
        source = emit(graph, node, aten.to.dtype, source, node.kwargs["dtype"])
    if not source.meta["val"].dim():  # of one number, along whatever dim
        return source
    count = math.prod(source.meta["val"].shape[d] for d in dims)
    total = emit(graph, node, aten.sum.dim_IntList, source, dims, keep)
    return emit(graph, node, aten.mul.Tensor, total, 1.0 / count if count else math.nan)


AVERAGES = {aten.adaptive_avg_pool1d.default: aten.avg_pool1d.default,
            aten.adaptive_avg_pool2d.default: aten.avg_pool2d.default,
            aten.adaptive_avg_pool3d.default: aten.avg_pool3d.default}


def _adaptive(graph: Graph, node: Node) -> Node | None:
    """A mean over all of space is a sum times a constant; one over windows of one length, that tile it, a pooling."""
    source = node.args[0]
    dims = list(range(-len(node.args[1]), 0))
    lengths = [(source.meta["val"].shape[d], node.meta["val"].shape[d]) for d in dims]
    if all(made == 1 for _, made in lengths):
        total = emit(graph, node, aten.sum.dim_IntList, source, dims, True)
        return emit(graph, node, aten.mul.Tensor, total, 1.0 / math.prod(size for size, _ in lengths))
    if any(size % made for size, made in lengths):
        return None
    return emit(graph, node, AVERAGES[node.target], source, [size // made for size, made in lengths])


def _sum_all(graph: Graph, node: Node) -> Node:
    source = node.args[0]
    if node.kwargs.get("dtype") is not None:
        source = emit(graph, node, aten.to.dtype, source, node.kwargs["dtype"])
    return emit(graph, node, aten.sum.dim_IntList, source, list(range(source.meta["val"].dim())), False)


def _cross(graph: Graph, node: Node) -> Node:
    """cross without a dim takes the first of length 3, which in a shard may be another one: name it."""
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    dim = list(node.meta["val"].shape).index(3) if dim is None else dim
    return emit(graph, node, aten.linalg_cross.default, *node.args[:2], dim=dim)


def _dropout(graph: Graph, node: Node) -> Node | None:
    source, p, train = node.args
    return source if not train or p == 0.0 else None


def _addmm(graph: Graph, node: Node) -> Node | None:
    """bias + x @ w -> linear."""
    bias, x, weight = node.args
    if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1 or bias.meta["val"].dim() != 1:
        return None
    transposed = emit(graph, node, aten.permute.default, weight, [1, 0])
    return emit(graph, node, aten.linear.default, x, transposed, bias)


def _linear(graph: Graph, node: Node) -> Node | None:
    """linear of a flattened view -> view of linear over all leading dims, each of which can then be cut."""
    x, *rest = node.args
    if x.target is not aten.reshape.default or x.meta["val"].dim() != 2:
        return None
    rows, length = x.meta["val"].shape
    whole = list(x.args[0].meta["val"].shape)
    leading = next((whole[:d] for d in range(2, len(whole)) if math.prod(whole[:d]) == rows), None)
    if leading is None:
        return None
    unflattened = x.args[0]
    if whole != [*leading, length]:
        unflattened = emit(graph, x, aten.reshape.default, unflattened, [*leading, length])
    out = emit(graph, node, aten.linear.default, unflattened, *rest)
    return emit(graph, node, aten.reshape.default, out, list(node.meta["val"].shape))


def _filled(graph: Graph, node: Node) -> Node | None:
    """new_ones(x, ...), zeros_like(x): x gives only a dtype and a shape, both known now. Empty is zero as well."""
    name = node.target._schema.name.split("::")[1]
    value = node.meta["val"]
    known = next((fill for word, fill in (("zero", 0), ("empty", 0), ("ones", 1)) if word in name), None)
    fill = node.args[2 if name == "new_full" else 1] if known is None else known
    if isinstance(fill, FxNode):
        return None
    return emit(graph, node, aten.full.default, list(value.shape), fill, dtype=value.dtype, device=value.device)


def share_masks(graph: Graph, mutations: dict[str, Node]) -> None:
    """A mask of several attentions as the numbers that they add, made once: torch makes (and keeps for backward) its
    own of a boolean mask in each."""
    readers: dict[tuple[Node, torch.dtype], list[Node]] = {}
    for node in graph.nodes:
        mask = argument(node, "attn_mask") if node.target is aten.scaled_dot_product_attention.default else None
        if mask is not None and mask.meta["val"].dtype == torch.bool:
            readers.setdefault((mask, node.args[0].meta["val"].dtype), []).append(node)
    for (mask, dtype), nodes in readers.items():
        if len(nodes) < 2:
            continue
        anchor = mask if mask.op == "call_function" else [n for n in graph.nodes if n.op == "placeholder"][-1]
        with graph.inserting_before(anchor.next):
            made = emit(graph, mask, aten.where.self, mask, *(
                emit(graph, mask, aten.full.default, [], value, dtype=dtype) for value in (0.0, float("-inf"))
            ))
        for node in nodes:
            node.replace_input_with(mask, made)


def lists(graph: Graph, mutations: dict[str, Node]) -> None:
    """Ops that return a list become one op per element that is used."""
    for node in list(graph.nodes):
        take_apart = LISTS.get(node.target)
        if take_apart is not None and all(user.target is operator.getitem for user in node.users):
            with graph.inserting_before(node):
                take_apart(graph, node)


LISTS = {
    aten.split.Tensor: _shards,
    aten.split.sizes: _shards,
    aten.unsafe_split.Tensor: _shards,
    aten.unsafe_chunk.default: _shards,
    aten.split_copy.Tensor: _shards,
    aten.split_with_sizes_copy.default: _shards,
    aten.split_with_sizes.default: _shards,
    aten.chunk.default: _shards,
    aten.tensor_split.sections: _shards,
    aten.tensor_split.indices: _shards,
    aten.unbind.int: _shards,
    aten.unbind_copy.int: _shards,
    aten.hsplit.int: _shards,
    aten.hsplit.array: _shards,
    aten.vsplit.int: _shards,
    aten.vsplit.array: _shards,
    aten.dsplit.int: _shards,
    aten.dsplit.array: _shards,
    aten.broadcast_tensors.default: _broadcast,
    aten.meshgrid.default: _meshgrid,
    aten.meshgrid.indexing: _meshgrid,
}
VIEWS = (aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
         aten.squeeze.dims, aten.flatten.using_ints, aten.unflatten.int, aten._unsafe_view.default,
         aten.view_as.default, aten.reshape_as.default, aten.view_copy.default, aten.ravel.default,
         aten.atleast_1d.default, aten.atleast_2d.default, aten.atleast_3d.default, aten.unsqueeze_copy.default,
         aten.squeeze_copy.default, aten.squeeze_copy.dim, aten.squeeze_copy.dims)
PERMUTES = (aten.transpose.int, aten.permute.default, aten.t.default, aten.numpy_T.default, aten.mT.default,
            aten.swapaxes.default, aten.swapdims.default, aten.movedim.int, aten.movedim.intlist,
            aten.moveaxis.int, aten.moveaxis.intlist, aten.permute_copy.default, aten.transpose_copy.int,
            aten.t_copy.default)
COPIES = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.to.other,
          aten.type_as.default)
IDENTITIES = (aten.alias.default, aten.contiguous.default, aten.lift_fresh_copy.default, aten.lift_fresh.default,
              aten.clone.default, aten.positive.default, aten.alias_copy.default, aten.resolve_conj.default,
          aten.resolve_neg.default)
FILLED = (aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.zeros_like.default,
          aten.ones_like.default, aten.full_like.default, aten.empty_like.default, aten.new_empty.default,
          aten.empty.memory_format, aten.zero.default)
#: Other names of the same ops.
SYNONYMS = {
    aten.multiply.Tensor: aten.mul.Tensor, aten.multiply.Scalar: aten.mul.Scalar, aten.divide.Tensor: aten.div.Tensor,
    aten.divide.Scalar: aten.div.Scalar, aten.true_divide.Tensor: aten.div.Tensor,
    aten.subtract.Tensor: aten.sub.Tensor, aten.negative.default: aten.neg.default,
    aten.absolute.default: aten.abs.default, aten.concat.default: aten.cat.default,
    aten.concatenate.default: aten.cat.default, aten.clip.default: aten.clamp.default,
    aten.special_expit.default: aten.sigmoid.default, aten.special_logsumexp.default: aten.logsumexp.default,
    aten.diagonal_copy.default: aten.diagonal.default, aten.select_copy.int: aten.select.int,
    aten.unfold_copy.default: aten.unfold.default, aten.slice_copy.Tensor: aten.slice.Tensor,
    aten.conj_physical.default: aten.conj.default, aten.narrow_copy.default: aten.narrow.default,
}
WRITTEN = (aten.copy.default, aten.fill.Scalar, aten.fill.Tensor)

PASSES: list[Callable[[Graph, dict[str, Node]], None]] = [
    drop_asserts,
    norms_in_training,
    gather_bags,
    _each(COMPOSITIONS),
    _each(DECOMPOSED),
    _each(dict.fromkeys(SYNONYMS, _synonym)),
    _each(dict.fromkeys(IDENTITIES, _identity)),
    _each(dict.fromkeys(COPIES, _same_dtype)),
    _each({aten.addmm.default: _addmm, aten._weight_norm.default: _weight_norm, aten.repeat.default: _repeat,
           aten.tile.default: _repeat, aten.repeat_interleave.self_int: _repeat_interleave, aten.cat.default: _cat,
           aten.cross.default: _cross}),
    _each(dict.fromkeys(WRITTEN, _copy)),
    _each(dict.fromkeys(VIEWS, _reshape)),
    _each(dict.fromkeys(PERMUTES, _permute)),
    _each(dict.fromkeys((aten.expand.default, aten.expand_as.default, aten.broadcast_to.default,
                         aten.expand_copy.default), _expand)),
    _each(dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar), _number_added)),
    _each({aten.narrow.default: _narrow}),
    _each({aten.slice.Tensor: _slice}),
    _each({aten.linear.default: _linear}),
    _each(dict.fromkeys(FILLED, _filled)),
    _each({aten.mean.default: _mean, aten.mean.dim: _mean, aten.sum.default: _sum_all}),
    _each(dict.fromkeys(AVERAGES, _adaptive)),
    _each({aten.dropout.default: _dropout}),
    _each(AVERAGED_LOSSES),
    drop_masks,
    gather_experts,
    share_masks,
    _each({aten.reshape.default: lambda graph, node: _unflattened_linear(graph, node)}),
    _each({aten.reshape.default: lambda graph, node: _collapse_reshape(graph, node)}),
    drop_dead,  # what passes left behind reads what nobody uses
    gather_functions,
    group_heads,
    drop_dead,
    gather_sections,
    _each({aten.reshape.default: lambda graph, node: _collapse_reshape(graph, node)}),
]


def _unflattened_linear(graph: Graph, node: Node) -> Node | None:
    """A reshape of the rows of a linear layer is one of its input: rows [tokens * batch] hide the batch, if it is not
    the outer one (as in `torch.nn.MultiheadAttention`)."""
    linear = node.args[0]
    if linear.target is not aten.linear.default or linear.args[0].target is not aten.reshape.default:
        return None
    shape, rows, whole = list(node.meta["val"].shape), linear.args[0], linear.meta["val"]
    if len(linear.users) > 1 or whole.dim() != 2 or not shape or shape[-1] != whole.shape[-1]:
        return None
    kept = emit(graph, linear, aten.reshape.default, rows.args[0], [*shape[:-1], rows.meta["val"].shape[-1]])
    return emit(graph, linear, aten.linear.default, kept, *linear.args[1:])


def _collapse_reshape(graph: Graph, node: Node) -> Node | None:
    """reshape of reshape is one reshape (linear's flatten and unflatten cancel)."""
    source = node.args[0]
    if source.target is not aten.reshape.default:
        return None
    origin, shape = source.args[0], list(node.meta["val"].shape)
    if list(origin.meta["val"].shape) == shape:
        return origin
    return emit(graph, node, aten.reshape.default, origin, shape)
