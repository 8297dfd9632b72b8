"""Normalisation: fewer kinds of ops, each in one form, so that rules are few and short.

Each pass has one named line in `PASSES`. Afterwards: no in-place ops (buffer updates are listed apart), no asserts or
no-op copies, every view is a ``reshape`` with explicit sizes, every transpose a ``permute``, every mean a sum times a
constant (so that a summand stays a summand), and losses that average are sums over counts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode

from autoparallel.errors import CaptureError

aten = torch.ops.aten
Node: TypeAlias = Any  # an fx node, whose args torch types as a union of twenty kinds


def normalise(gm: GraphModule, buffer_names: dict[str, str]) -> dict[str, Node]:
    """Run all passes in place; returns the final value of each buffer that the program updates, by placeholder name."""
    graph = gm.graph
    inline_grad_regions(gm)
    mutations = functionalise(graph, buffer_names)
    for one_pass in PASSES:
        one_pass(graph, mutations)
    drop_dead(graph, mutations)
    return mutations


def emit(graph: Graph, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert an op at the current point, with the value and origin metadata that a traced node would have."""
    node = graph.call_function(target, args, kwargs)
    values = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    node.meta = {k: like.meta[k] for k in ("nn_module_stack", "stack_trace", "no_grad") if k in like.meta}
    node.meta["val"] = target(*values[0], **values[1])
    return node


def replace(node: Node, new: Node, mutations: dict[str, Node]) -> None:
    node.replace_all_uses_with(new)
    for name, value in mutations.items():
        if value is node:
            mutations[name] = new
    node.graph.erase_node(node)


# --- structure ---------------------------------------------------------------------------------------------------


def inline_grad_regions(gm: GraphModule) -> None:
    """Inline ``torch.no_grad`` regions, marking their ops."""
    graph = gm.graph
    for node in list(graph.nodes):
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            continue
        enabled, body, *operands = node.args
        inner: GraphModule = getattr(gm, body.target)
        inline_grad_regions(inner)
        env: dict[Node, Node] = dict(
            zip((n for n in inner.graph.nodes if n.op == "placeholder"), operands, strict=True)
        )
        results: Any = None
        with graph.inserting_before(node):
            for n in inner.graph.nodes:
                if n.op == "output":
                    results = torch.fx.node.map_arg(n.args[0], env.__getitem__)
                elif n.op != "placeholder":
                    env[n] = graph.node_copy(n, env.__getitem__)
                    env[n].meta = dict(n.meta)
                    if not enabled:
                        env[n].meta["no_grad"] = True
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


def functionalise(graph: Graph, buffer_names: dict[str, str]) -> dict[str, Node]:
    """Replace in-place ops by their functional twins; later readers of the written tensor read the new value."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    mutations: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        written = [a for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if not written:
            continue
        target = node.args[0]
        if _shared_later(target, node, order):
            raise CaptureError(
                f"{node.target} writes in place to memory that is read later under another name{_source(node)}\n"
                "  Write the out-of-place form instead (x = x.add(y), torch.where, torch.cat, ...)."
            )
        new = _functional_twin(graph, node)
        for user in list(target.users):
            if user is not new and order.get(user, len(order)) > order[node]:
                user.replace_input_with(target, new)
        root = next((name for name, value in mutations.items() if value is target), None)
        if target.op == "placeholder" or root is not None:
            name = root or target.name
            if name not in buffer_names:
                raise CaptureError(f"the model writes in place to its input {name!r}{_source(node)}\n"
                                   "  Write to a copy (x.clone()) or to a buffer.")
            mutations[name] = new
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        order[new] = order[node]
    return mutations


def _is_view(node: Node) -> bool:
    """Whether the op's result may share memory with its first argument."""
    schema = getattr(node.target, "_schema", None)
    first = schema.arguments[0] if schema is not None and schema.arguments else None
    return first is not None and first.alias_info is not None and not first.alias_info.is_write


def _shared_later(target: Node, node: Node, order: dict[Node, int]) -> bool:
    """Whether memory that ``node`` writes to is read later under another name: a view, or what it is a view of."""
    root = target
    while root.op == "call_function" and _is_view(root):
        root = root.args[0]
    if root is not target and root.op == "placeholder":
        return True
    family, waiting = {root}, [root]
    while waiting:
        views = [user for user in waiting.pop().users if user.op == "call_function" and _is_view(user)]
        waiting.extend(v for v in views if v not in family)
        family.update(views)
    return any(order.get(user, 0) > order[node] for member in family - {target} for user in member.users)


def _functional_twin(graph: Graph, node: Node) -> Node:
    name = node.target._schema.name.split("::")[1]
    packet = getattr(aten, name.removesuffix("_"), None)
    overload = getattr(packet, node.target._overloadname, None) if packet is not None else None
    if not name.endswith("_") or overload is None:
        raise CaptureError(f"{node.target} writes in place and has no functional form{_source(node)}")
    with graph.inserting_before(node):
        twin = emit(graph, node, overload, *node.args, **node.kwargs)
        if twin.meta["val"].dtype != node.args[0].meta["val"].dtype:
            twin = emit(graph, node, aten.to.dtype, twin, node.args[0].meta["val"].dtype)
        return twin


def _source(node: Node) -> str:
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.strip().splitlines()]
    return f"\n  at {lines[-2]}: {lines[-1]}" if len(lines) >= 2 else ""


def drop_dead(graph: Graph, mutations: dict[str, Node]) -> None:
    kept = set(mutations.values())
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and node not in kept:
            graph.erase_node(node)


# --- one op at a time --------------------------------------------------------------------------------------------

Rewrite = Callable[[Graph, Node], Node | None]


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


def _same_dtype(graph: Graph, node: Node) -> Node | None:
    """A copy to the same dtype is the tensor itself; any other is `to.dtype` (devices are one per rank)."""
    source, value = node.args[0], node.meta["val"]
    if source.meta["val"].dtype == value.dtype:
        return source
    return emit(graph, node, aten.to.dtype, source, value.dtype)


def _reshape(graph: Graph, node: Node) -> Node:
    source, shape = node.args[0], list(node.meta["val"].shape)
    if list(source.meta["val"].shape) == shape and source.meta["val"].dtype == node.meta["val"].dtype:
        return source
    return emit(graph, node, aten.reshape.default, source, shape)


def _permute(graph: Graph, node: Node) -> Node:
    source = node.args[0]
    rank = source.meta["val"].dim()
    dims = list(range(rank))
    if node.target in (aten.transpose.int,):
        a, b = node.args[1] % rank, node.args[2] % rank
        dims[a], dims[b] = dims[b], dims[a]
    elif node.target in (aten.permute.default,):
        dims = [d % rank for d in node.args[1]]
    else:  # t, numpy_T, mT
        dims[-2:] = dims[-2:][::-1]
    return source if dims == list(range(rank)) else emit(graph, node, aten.permute.default, source, dims)


def _expand(graph: Graph, node: Node) -> Node:
    source, shape = node.args[0], list(node.meta["val"].shape)
    if list(source.meta["val"].shape) == shape:
        return source
    return emit(graph, node, aten.expand.default, source, shape)


def _slice(graph: Graph, node: Node) -> Node:
    arguments: list[Any] = [*node.args] + [None] * (5 - len(node.args))
    source, dim, start, end, step = arguments
    value = source.meta["val"]
    dim = (dim or 0) % value.dim()
    start, end, step = slice(start, end, step).indices(value.shape[dim])
    if (start, end, step) == (0, value.shape[dim], 1):
        return source
    return emit(graph, node, aten.slice.Tensor, source, dim, start, end, step)


def _pieces(graph: Graph, node: Node) -> None:
    """split, chunk, unbind -> one slice (or select) per piece that is used."""
    source = node.args[0]
    argument = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    if node.target is aten.unbind.int:
        argument = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    dim = argument % source.meta["val"].dim()
    start = 0
    pieces: list[tuple[int, int]] = []
    for value in node.meta["val"]:
        length = 1 if node.target is aten.unbind.int else value.shape[dim]
        pieces.append((start, length))
        start += length
    for user in list(node.users):
        start, length = pieces[user.args[1]]
        if node.target is aten.unbind.int:
            new = emit(graph, user, aten.select.int, source, dim, start)
        else:
            new = emit(graph, user, aten.slice.Tensor, source, dim, start, start + length)
        user.replace_all_uses_with(new)
        graph.erase_node(user)


def _broadcast(graph: Graph, node: Node) -> None:
    """broadcast_tensors -> one expand per tensor that is used."""
    for user in list(node.users):
        source, value = node.args[0][user.args[1]], user.meta["val"]
        same = source.meta["val"].shape == value.shape
        new = source if same else emit(graph, user, aten.expand.default, source, list(value.shape))
        user.replace_all_uses_with(new)
        graph.erase_node(user)


def _mean(graph: Graph, node: Node) -> Node:
    source = node.args[0]
    dims = list(node.args[1]) if len(node.args) > 1 and node.args[1] else list(range(source.meta["val"].dim()))
    keep = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    if node.kwargs.get("dtype") is not None:
        source = emit(graph, node, aten.to.dtype, source, node.kwargs["dtype"])
    count = math.prod(source.meta["val"].shape[d] for d in dims)
    total = emit(graph, node, aten.sum.dim_IntList, source, dims, keep)
    return emit(graph, node, aten.mul.Tensor, total, 1.0 / count)


def _sum_all(graph: Graph, node: Node) -> Node:
    source = node.args[0]
    if node.kwargs.get("dtype") is not None:
        source = emit(graph, node, aten.to.dtype, source, node.kwargs["dtype"])
    return emit(graph, node, aten.sum.dim_IntList, source, list(range(source.meta["val"].dim())), False)


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
    """new_ones(x, ...), zeros_like(x): x gives only a dtype and a shape, both known now."""
    name = node.target._schema.name.split("::")[1]
    value = node.meta["val"]
    fill = 0 if "zeros" in name else 1 if "ones" in name else node.args[2 if name == "new_full" else 1]
    if isinstance(fill, FxNode):
        return None
    return emit(graph, node, aten.full.default, list(value.shape), fill, dtype=value.dtype, device=value.device)


def _loss_mean(position: int) -> Rewrite:
    """loss(x, y, mean) -> loss(x, y, sum) / number of elements."""

    def rewrite(graph: Graph, node: Node) -> Node | None:
        args = list(node.args) + [1] * (position + 1 - len(node.args))
        if args[position] != 1 or node.kwargs:
            return None
        count = math.prod(torch.broadcast_shapes(args[0].meta["val"].shape, args[1].meta["val"].shape))
        args[position] = 2
        return emit(graph, node, aten.mul.Tensor, emit(graph, node, node.target, *args), 1.0 / count)

    return rewrite


def _cross_entropy(graph: Graph, node: Node) -> Node | None:
    """Mean over the targets that count -> sum / count, both of which may be summed over ranks."""
    defaults: list[Any] = [None, None, None, 1, -100, 0.0]
    names = ["self", "target", "weight", "reduction", "ignore_index", "label_smoothing"]
    values = dict(zip(names, defaults, strict=True)) | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    target = values["target"]
    if values["weight"] is not None or target.meta["val"].is_floating_point() or values["reduction"] != 1:
        return None
    logits = values["self"]
    total = emit(graph, node, aten.cross_entropy_loss.default, logits, target, None, 2, values["ignore_index"],
                 values["label_smoothing"])
    counts = emit(graph, node, aten.ne.Scalar, target, values["ignore_index"])
    counts = emit(graph, node, aten.to.dtype, counts, torch.float32)
    counts = emit(graph, node, aten.sum.dim_IntList, counts, list(range(target.meta["val"].dim())), False)
    return emit(graph, node, aten.div.Tensor, total, counts)


def batch_norm(graph: Graph, mutations: dict[str, Node]) -> None:
    """Batch norm into sums and element-wise ops: a batch cut over ranks then gives synchronised statistics by itself.

    The running statistics, which the op updates behind its schema's back, become buffer updates like any other.
    """
    for node in list(graph.nodes):
        if node.target is aten.batch_norm.default:
            with graph.inserting_before(node):
                new = _batch_norm(graph, node, mutations)
            replace(node, new, mutations)


def _batch_norm(graph: Graph, node: Node, mutations: dict[str, Node]) -> Node:
    x, weight, bias, running_mean, running_var, training, momentum, eps = node.args[:8]
    value = x.meta["val"]
    dims = [d for d in range(value.dim()) if d != 1]
    channels = value.shape[1]
    count = value.numel() // channels

    def e(target: Any, *args: Any) -> Node:
        return emit(graph, node, target, *args)

    def wide(vector: Node) -> Node:
        return e(aten.reshape.default, vector, [1, channels] + [1] * (value.dim() - 2))

    if training:
        mean = e(aten.mul.Tensor, e(aten.sum.dim_IntList, x, dims, True), 1.0 / count)
        centred = e(aten.sub.Tensor, x, mean)
        squares = e(aten.sum.dim_IntList, e(aten.mul.Tensor, centred, centred), dims, True)
        variance = e(aten.mul.Tensor, squares, 1.0 / count)
        if running_mean is not None:
            unbiased = 1.0 / max(1, count - 1)
            for buffer, statistic, scale in ((running_mean, mean, 1.0), (running_var, squares, unbiased)):
                batch = e(aten.reshape.default, e(aten.detach.default, statistic), [channels])
                kept = e(aten.mul.Tensor, mutations.get(buffer.name, buffer), 1.0 - momentum)
                mutations[buffer.name] = e(aten.add.Tensor, kept, e(aten.mul.Tensor, batch, scale * momentum))
    else:
        mean, variance = wide(running_mean), wide(running_var)
        centred = e(aten.sub.Tensor, x, mean)
    out = e(aten.mul.Tensor, centred, e(aten.rsqrt.default, e(aten.add.Tensor, variance, eps)))
    if weight is not None:
        out = e(aten.mul.Tensor, out, wide(weight))
    return e(aten.add.Tensor, out, wide(bias)) if bias is not None else out


def lists(graph: Graph, mutations: dict[str, Node]) -> None:
    """Ops that return a list become one op per element that is used."""
    for node in list(graph.nodes):
        take_apart = LISTS.get(node.target)
        if take_apart is not None and all(user.target is operator.getitem for user in node.users):
            with graph.inserting_before(node):
                take_apart(graph, node)


LISTS = {
    aten.split.Tensor: _pieces,
    aten.split_with_sizes.default: _pieces,
    aten.chunk.default: _pieces,
    aten.unbind.int: _pieces,
    aten.broadcast_tensors.default: _broadcast,
}
VIEWS = (aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
         aten.squeeze.dims, aten.flatten.using_ints, aten.unflatten.int, aten._unsafe_view.default,
         aten.view_as.default, aten.reshape_as.default)
COPIES = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.to.other,
          aten.type_as.default)
IDENTITIES = (aten.alias.default, aten.contiguous.default, aten.lift_fresh_copy.default, aten.lift_fresh.default,
              aten.clone.default, aten.positive.default)
FILLED = (aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.zeros_like.default,
          aten.ones_like.default, aten.full_like.default)

PASSES: list[Callable[[Graph, dict[str, Node]], None]] = [
    drop_asserts,
    batch_norm,
    lists,
    _each(dict.fromkeys(IDENTITIES, _identity)),
    _each(dict.fromkeys(COPIES, _same_dtype)),
    _each({aten.addmm.default: _addmm}),
    _each(dict.fromkeys(VIEWS, _reshape)),
    _each(dict.fromkeys((aten.transpose.int, aten.permute.default, aten.t.default, aten.numpy_T.default), _permute)),
    _each(dict.fromkeys((aten.expand.default, aten.expand_as.default, aten.broadcast_to.default), _expand)),
    _each({aten.slice.Tensor: _slice}),
    _each({aten.linear.default: _linear}),
    _each(dict.fromkeys(FILLED, _filled)),
    _each({aten.mean.default: _mean, aten.mean.dim: _mean, aten.sum.default: _sum_all}),
    _each({aten.dropout.default: _dropout}),
    _each({aten.cross_entropy_loss.default: _cross_entropy}),
    _each(dict.fromkeys((aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default), _loss_mean(2))),
    _each({aten.reshape.default: lambda graph, node: _collapse_reshape(graph, node)}),
]


def _collapse_reshape(graph: Graph, node: Node) -> Node | None:
    """reshape of reshape is one reshape (linear's flatten and unflatten cancel)."""
    source = node.args[0]
    if source.target is not aten.reshape.default:
        return None
    origin, shape = source.args[0], list(node.meta["val"].shape)
    if list(origin.meta["val"].shape) == shape:
        return origin
    return emit(graph, node, aten.reshape.default, origin, shape)
