"""In-place ops become their functional twins: later readers of the written memory read the new value.

    y = x[:, 1:]            y  = slice(x, 1, 1)
    y.copy_(z)       ->     y' = copy(y, z);  x' = slice_scatter(x, y', 1, 1)
    return x.sum()          sum(x')

A write through a view is carried up to what it is a view of; a view is made anew when the memory under it has been
written to since. What shares memory with what is read off the traced values' storages.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph

from autoparallel.capture.passes.editing import Node, argument, emit, source_line
from autoparallel.errors import CaptureError

aten = torch.ops.aten


def functionalise(graph: Graph, buffer_names: dict[str, str]) -> dict[str, Node]:
    """Rewrite the graph in place; returns the last value of each buffer that it writes to, by placeholder name.

    Raises CaptureError when the program writes to its input, or through a view that cannot be undone.
    """
    for node in graph.nodes:
        if node.target is aten.set_.source_Tensor and node.args[0] is node.args[1]:    # to register a parametrization
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    writing = [node for node in graph.nodes if writes(node)]
    if not writing:
        return {}
    memory = _Memory(graph)
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            memory.visit(node)
    mutations = {}
    for node in memory.written_placeholders():
        if node.name not in buffer_names:
            _refuse_written(node, memory.writer[node])
        mutations[node.name] = memory.read(node)
    for node in reversed(writing):
        graph.erase_node(node)
    return mutations


class _Memory:
    """What every traced tensor holds at the present point of the program.

    ``base[v]`` is what the view v looks at (of an in-place op's result: the tensor written to). ``value[t]`` is t's
    present value, if it is not t itself. ``version`` counts the writes to a root's memory, ``seen[v]`` is the version
    that v's value belongs to. ``lost``: written to through a view that cannot be undone, or behind autograd's back, so
    that gradients are not those of what was computed. ``trainable``: what gradients flow through. ``writer``: the first
    op that writes to a root.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.base: dict[Node, Node] = {}
        self.value: dict[Node, Node] = {}
        self.version: dict[Node, int] = {}
        self.seen: dict[Node, int] = {}
        self.lost: dict[Node, Node] = {}
        self.writer: dict[Node, Node] = {}
        self.trainable: set[Node] = set()

    def visit(self, node: Node) -> None:
        """Let a node read present values; note what it looks at, or do what it writes."""
        if self._trainable(node):
            self.trainable.add(node)
        first = written(node) if writes(node) else node.args[0] if node.args else None
        if _shares_memory(node, first):
            self.base[node] = first
            self.seen[node] = self.version.get(self._root(first), 0)
        present = {read: self.read(read) for read in node.all_input_nodes}
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), present.__getitem__)
        node.args, node.kwargs = arguments
        if writes(node):
            self._write(first, _functional_twin(self.graph, node), node)

    def _trainable(self, node: Node) -> bool:
        if node.op == "placeholder":
            value = node.meta.get("val")
            return isinstance(value, torch.Tensor) and value.requires_grad
        name = getattr(node.target, "__name__", "")
        copies_shape_only = "_like" in name or name.startswith("new_")
        flows = not node.meta.get("no_grad") and node.target is not aten.detach.default and not copies_shape_only
        return flows and any(n in self.trainable for n in node.all_input_nodes)

    def written_placeholders(self) -> Iterator[Node]:
        return (node for node in self.version if node.op == "placeholder")

    def read(self, node: Node) -> Node:
        """The node's present value; a view of memory written to since is made anew."""
        if node in self.lost:
            write = self.lost[node]
            if write.target is aten.embedding_renorm_.default:
                raise CaptureError(
                    f"an embedding has max_norm, which writes to its rows in forward{source_line(write)}\n"
                    "  Write max_norm=None, and scale the rows before each step, under torch.no_grad(): "
                    "weight.mul_((max_norm / (weight.norm(dim=1, keepdim=True) + 1e-7)).clamp(max=1))"
                )
            raise CaptureError(
                f"{write.target} writes in place to memory that is read later under another name, or to what gradients "
                f"flow through without their knowing{source_line(write)}\n"
                "  Write the out-of-place form instead (x = x.add(y), torch.where, torch.cat, ...); change parameters "
                "between steps, as optimizers do."
            )
        if node not in self.base:
            return self.value.get(node, node)
        if writes(node):
            return self.read(self.base[node])
        version = self.version.get(self._root(node), 0)
        if self.seen[node] != version:
            whole = self.read(self.base[node])
            self.value[node] = emit(self.graph, node, node.target, whole, *node.args[1:], **node.kwargs)
            self.seen[node] = version
        return self.value.get(node, node)

    def _root(self, node: Node) -> Node:
        while node in self.base:
            node = self.base[node]
        return node

    def _write(self, target: Node, new: Node, write: Node) -> None:
        """Give ``target`` a value, and everything that it is a view of."""
        chain = [target]
        while chain[-1] in self.base:
            chain.append(self.base[chain[-1]])
        olds = [None if node in self.lost else self.read(node) for node in chain]
        root, known = chain[-1], True
        self.version[root] = self.version.get(root, 0) + 1
        self.writer.setdefault(root, write)
        if write.meta.get("no_grad") and not self.trainable.isdisjoint(chain):
            self.lost.update(dict.fromkeys(chain, write))
            return
        if write in self.trainable:
            self.trainable.update(chain)
        self._set(target, new)
        for (view, whole), old in zip(pairwise(chain), olds[1:], strict=True):
            carry = _same if writes(view) else CARRY.get(view.target)
            hidden = view.target is aten.detach.default and whole in self.trainable
            known = known and carry is not None and old is not None and not hidden
            if known:
                assert carry is not None
                new = carry(self.graph, view, old, new)
                self._set(whole, new)
            else:
                self.lost[whole] = write

    def _set(self, node: Node, value: Node) -> None:
        self.value[node] = value
        self.seen[node] = self.version[self._root(node)]


def _refuse_written(node: Node, writer: Node) -> None:
    """Raises CaptureError for a parameter or an input that the program writes to."""
    if (parameter := node.meta.get("parameter")) is not None:
        raise CaptureError(f"the model writes in place to its parameter {parameter!r} in forward{source_line(writer)}\n"
                           "  Write to the parallel module's after the step: `with torch.no_grad(): parallel."
                           f"{parameter}.lerp_(...)`, or let the model keep it as a buffer (register_buffer).")
    raise CaptureError(f"the model writes in place to its input {node.name!r}{source_line(writer)}\n"
                       "  Write to a copy (x.clone()) or to a buffer.")


def writes(node: Node) -> bool:
    """Whether a node is an in-place op."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return any(a.alias_info is not None and a.alias_info.is_write for a in node.target._schema.arguments)


def written(node: Node) -> Node:
    """The tensor that the op writes to: its first argument, or ``out``."""
    return node.kwargs["out"] if "out" in node.kwargs else node.args[0]


def _shares_memory(node: Node, first: Node | None) -> bool:
    """Whether a node's value lies in its first argument's memory. (One result of several is a view of their source; a
    constant is new memory at every call, whatever its trace says.)"""
    if not isinstance(first, torch.fx.Node) or node.op != "call_function":
        return False
    if node.target is aten.lift_fresh_copy.default:
        return False
    if node.target is operator.getitem:
        first = first.args[0] if first.args else None
    value, whole = node.meta.get("val"), first.meta.get("val") if isinstance(first, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or not isinstance(whole, torch.Tensor):
        return False
    return value.untyped_storage()._cdata == whole.untyped_storage()._cdata


def _functional_twin(graph: Graph, node: Node) -> Node:
    if node.target is aten.fill_diagonal_.default and node.args[0].meta["val"].dim() == 2 and len(node.args) == 2:
        diagonal = emit(graph, node, aten.diagonal.default, node.args[0])
        filled = emit(graph, node, aten.full_like.default, diagonal, node.args[1])
        return emit(graph, node, aten.diagonal_scatter.default, node.args[0], filled)
    if node.target is aten.normal_.default and node.kwargs.get("generator") is None:
        return _drawn_normal(graph, node)
    overload = _functional_overload(node)
    if overload is None:
        raise CaptureError(f"{node.target} writes in place and has no functional form{source_line(node)}")
    value = written(node).meta["val"]
    new = {"dtype": value.dtype, "device": value.device} if _makes(node) else {}
    twin = emit(graph, node, overload, *node.args, *_left_out(node, overload), **new,
                **{k: v for k, v in node.kwargs.items() if k != "out"})
    dtype = value.dtype
    if twin.meta["val"].dtype != dtype:
        twin = emit(graph, node, aten.to.dtype, twin, dtype)
    return twin


def _makes(node: Node) -> bool:
    """Whether an op makes its ``out`` of no tensor, as ``torch.eye(n, out=x)`` does."""
    return "out" in node.kwargs and node.all_input_nodes == [node.kwargs["out"]]


def _drawn_normal(graph: Graph, node: Node) -> Node:
    """``x.normal_(mean, std)``, as `Normal.rsample` draws, has no functional op with rules; these draw the same
    numbers."""
    mean, std = (argument(node, name) for name in ("mean", "std"))
    drawn = emit(graph, node, aten.randn_like.default, node.args[0])
    if std != 1:
        drawn = emit(graph, node, aten.mul.Tensor, drawn, std)
    return drawn if mean == 0 else emit(graph, node, aten.add.Tensor, drawn, mean)


def _left_out(node: Node, overload: Any) -> tuple[Any, ...]:
    """The defaults of arguments that the call leaves out, where the functional op has others: bernoulli_() is with a
    chance of 0.5, which bernoulli.p wants said."""
    arguments = node.target._schema.arguments[len(node.args):]
    behind = [a for a in arguments if not a.kwarg_only and a.name not in node.kwargs]
    own = {a.name: a for a in overload._schema.arguments}
    if all(own[a.name].has_default_value() and own[a.name].default_value == a.default_value for a in behind):
        return ()
    return tuple(a.default_value for a in behind)


def _functional_overload(node: Node) -> object | None:
    """The functional op that takes the same arguments, but ``out``: add_ -> add, pow_.Scalar -> pow.Tensor_Scalar; of
    one that makes a tensor, with its dtype and device."""
    left = ("out", "dtype", "layout", "device", "pin_memory") if _makes(node) else ("out",)
    packet = getattr(aten, node.target._schema.name.split("::")[1].removesuffix("_"), None)
    if packet is None:
        return None

    def arguments(overload: Any) -> list[tuple[str, str]]:
        (first, *rest) = (a for a in overload._schema.arguments if a.name not in left)
        return [("", str(first.type)), *((a.name, str(a.type)) for a in rest)]

    overloads = (getattr(packet, each) for each in packet.overloads())
    return next((o for o in overloads if o is not node.target and arguments(o) == arguments(node.target)
                 and not any(a.is_out for a in o._schema.arguments)), None)


# ------------------------------------------------------------------------------------------------------- views undone

#: view node, the whole's old value, the view's new value -> the whole's new value
Carry = Callable[[Graph, Node, Node, Node], Node]


def _same(graph: Graph, view: Node, whole: Node, new: Node) -> Node:
    return new


def _into_slice(graph: Graph, view: Node, whole: Node, new: Node) -> Node:
    if whole.meta["val"].is_complex():
        dim, start, end, step = (argument(view, name) for name in ("dim", "start", "end", "step"))
        return _at_places(graph, view, whole, dim, slice(start, end, step), new)
    return emit(graph, view, aten.slice_scatter.default, whole, new, *view.args[1:])


def _into_place(graph: Graph, view: Node, whole: Node, new: Node) -> Node:
    if whole.meta["val"].is_complex():
        dim, place = (argument(view, name) for name in ("dim", "index"))
        row = emit(graph, view, aten.unsqueeze.default, new, dim % whole.meta["val"].dim())
        place %= whole.meta["val"].shape[dim]
        return _at_places(graph, view, whole, dim, slice(place, place + 1), row)
    return emit(graph, view, aten.select_scatter.default, whole, new, *view.args[1:])


def _at_places(graph: Graph, view: Node, whole: Node, dim: int, places: slice, new: Node) -> Node:
    """Of complex numbers, for which torch has no derivative of the scatters above."""
    value = whole.meta["val"]
    rows = emit(graph, view, aten.arange.start_step, *places.indices(value.shape[dim]), device=value.device)
    return emit(graph, view, aten.index_copy.default, whole, dim, rows, new)


def _reshaped(graph: Graph, view: Node, whole: Node, new: Node) -> Node:
    return emit(graph, view, aten.reshape.default, new, list(whole.meta["val"].shape))


def _on_a_diagonal(graph: Graph, view: Node, whole: Node, new: Node) -> Node:
    return emit(graph, view, aten.diagonal_scatter.default, whole, new, *view.args[1:])


def _turned(graph: Graph, view: Node, whole: Node, new: Node) -> Node:
    """Undo a permutation of dims, which is read off dims of different lengths."""
    marked = torch.empty(tuple(range(2, whole.meta["val"].dim() + 2)), device="meta")
    dims = [length - 2 for length in view.target(marked, *view.args[1:], **view.kwargs).shape]
    return emit(graph, view, aten.permute.default, new, [dims.index(d) for d in range(len(dims))])


def _narrowed(graph: Graph, view: Node, whole: Node, new: Node) -> Node:
    dim, start, length = view.args[1:]
    return emit(graph, view, aten.slice_scatter.default, whole, new, dim, start, start + length)


CARRY: dict[object, Carry] = {
    aten.slice.Tensor: _into_slice,
    aten.select.int: _into_place,
    aten.diagonal.default: _on_a_diagonal,
    aten.narrow.default: _narrowed,
    **dict.fromkeys((aten.transpose.int, aten.permute.default, aten.t.default, aten.numpy_T.default, aten.mT.default,
                     aten.movedim.int, aten.movedim.intlist, aten.swapaxes.default, aten.swapdims.default), _turned),
    **dict.fromkeys((aten.alias.default, aten.detach.default, aten.contiguous.default, aten.to.dtype, aten.to.device,
                     aten.to.dtype_layout, aten.to.other, aten.type_as.default), _same),
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.default,
                     aten.squeeze.dim, aten.squeeze.dims, aten.flatten.using_ints, aten.unflatten.int,
                     aten._unsafe_view.default, aten.view_as.default), _reshaped),
}
