"""Regions of a trace that are traced again, as ops that rules know: batched by torch.vmap, or differentiated.

What torch.vmap maps is traced as a function of one sample; traced again below vmap, its ops are those of the whole
batch. `torch.autograd.grad` inside a model becomes, while tracing, the op ``autoparallel::gradient``; what lies between
its inputs and outputs is then traced again together with its backward, whose ops can be differentiated once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._functorch import predispatch
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from autoparallel.capture.editing import Node, emit, source_line, use_results
from autoparallel.errors import CaptureError

aten = torch.ops.aten
_library = torch.library.Library("autoparallel", "FRAGMENT")
_library.define("gradient(Tensor[] outputs, Tensor[] inputs, Tensor?[] seeds, bool differentiable) -> Tensor[]")


def _like_inputs(outputs: list[torch.Tensor], inputs: list[torch.Tensor], seeds: list[torch.Tensor | None],
                 differentiable: bool) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in inputs]


_library.impl("gradient", _like_inputs, "CompositeExplicitAutograd")
gradient = torch.ops.autoparallel.gradient.default
#: Written out in what is differentiated twice. Norms are so whole: what their backward keeps has no derivative.
WRITTEN_OUT: Any = get_decompositions([
    aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm, aten.native_group_norm_backward,
    aten.native_batch_norm, aten._native_batch_norm_legit, aten.native_batch_norm_backward, aten._fused_rms_norm,
    aten._fused_rms_norm_backward, aten.select_backward, aten.slice_backward,
])


def gradient_as_op(
    outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
    only_inputs: bool = True, allow_unused: bool | None = None, is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor, ...]:
    """`torch.autograd.grad` while a model is traced. Raises CaptureError for arguments that change what it returns."""
    if allow_unused or is_grads_batched or materialize_grads:
        raise CaptureError("torch.autograd.grad in a model takes neither allow_unused, is_grads_batched nor "
                           "materialize_grads: ask for gradients of what the outputs are made of")
    listed = [[x] if isinstance(x, torch.Tensor) else list(x) for x in (outputs, inputs)]
    seeds = [grad_outputs] if isinstance(grad_outputs, torch.Tensor) else list(grad_outputs or ())
    return tuple(gradient(*listed, seeds or [None] * len(listed[0]), create_graph))


# ------------------------------------------------------------------------------------------------------------- passes


def batch_regions(graph: Graph) -> None:
    """Replace what torch.vmap maps by the ops that it does on the whole batch."""
    region: list[Node] = []
    depth = 0
    for node in list(graph.nodes):
        if node.target is predispatch.lazy_load_decompositions:
            graph.erase_node(node)
            continue
        depth += (node.target is predispatch._vmap_increment_nesting)
        if depth:
            region.append(node)
        if node.target is predispatch._vmap_decrement_nesting:
            depth -= 1
            if not depth:
                _batch(graph, region, node)
                region = []


def _batch(graph: Graph, region: list[Node], last: Node) -> None:
    inside = set(region)
    operands = _operands(region, inside)
    results = [node for node in region if any(user not in inside for user in node.users)]

    def run(*values: Any) -> list[Any]:
        env = dict(zip(operands, values, strict=True))
        _interpret(region, env)
        return [env[node] for node in results]

    with graph.inserting_before(last):
        made = _traced_again(graph, results[0] if results else last, run, operands)
    for node, new in zip(results, made, strict=True):
        node.replace_all_uses_with(new)
    for node in reversed(region):
        graph.erase_node(node)


def expand_gradients(graph: Graph) -> None:
    """Replace gradients that the model asks for by the ops that compute them."""
    for node in list(graph.nodes):
        if node.target is gradient:
            _expand(graph, node)


def _expand(graph: Graph, node: Node) -> None:
    outputs, inputs, seeds, differentiable = node.args
    region = _between(graph, inputs, outputs)
    leaves = [x for x in inputs if x not in region]
    if not all(x in region or any(x in r.all_input_nodes for r in region) or x in outputs for x in inputs):
        raise CaptureError(f"torch.autograd.grad: an output does not depend on an input{source_line(node)}")
    given = [s for s in seeds if s is not None]
    operands = list(dict.fromkeys([*leaves, *_operands(region, {*region, *leaves}), *given]))

    def run(*values: Any) -> list[Any]:
        env = dict(zip(operands, values, strict=True))
        env.update({x: env[x].detach().requires_grad_() for x in leaves})
        _interpret(region, env)
        made = torch.autograd.grad([env[y] for y in outputs], [env[x] for x in inputs],
                                   [s if s is None else env[s] for s in seeds], create_graph=True)
        return [*made, *(env[y] for y in outputs)]

    with graph.inserting_before(node):
        made = _traced_again(graph, node, run, operands, ignored=(aten.detach.default, aten.alias.default))
        gradients, again = made[: len(inputs)], made[len(inputs) :]
        if not differentiable:
            gradients = [emit(graph, node, aten.detach.default, g) for g in gradients]
    later = set(_after(node))
    for output, new in zip(outputs, again, strict=True):
        output.replace_all_uses_with(new, delete_user_cb=later.__contains__)
    use_results(node, gradients)


def _between(graph: Graph, inputs: Sequence[Node], outputs: Sequence[Node]) -> list[Node]:
    """The nodes on the ways from inputs to outputs along which a gradient flows, in order."""
    reached: dict[Node, None] = dict.fromkeys(inputs)
    for node in graph.nodes:
        flows = node.target is not aten.detach.default and not node.meta.get("no_grad")
        if node.op == "call_function" and flows and any(n in reached for n in node.all_input_nodes):
            reached[node] = None
    needed = set(outputs)
    for node in reversed(list(reached)):
        if node in needed:
            needed.update(node.all_input_nodes)
    sources = {x for x in inputs if not any(n in reached for n in x.all_input_nodes)}
    return [node for node in graph.nodes if node in reached and node in needed and node not in sources]


def _after(node: Node) -> list[Node]:
    found = []
    while node.op != "output":
        node = node.next
        found.append(node)
    return found


def _operands(region: Sequence[Node], inside: set[Node]) -> list[Node]:
    return list(dict.fromkeys(n for node in region for n in node.all_input_nodes if n not in inside))


def _interpret(region: Sequence[Node], env: dict[Node, Any]) -> None:
    for node in region:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        env[node] = node.target(*args, **kwargs)


def _traced_again(graph: Graph, like: Node, run: Callable[..., list[Any]], operands: Sequence[Node],
                  ignored: tuple[Any, ...] = ()) -> list[Node]:
    """Insert the ops that ``run`` does on the operands' values, less those ``ignored`` (which autograd puts between
    what it keeps and what it does with it); returns its results."""
    values = [node.meta["val"] for node in operands]
    with values[0].fake_mode, torch.enable_grad():
        once = make_fx(run, WRITTEN_OUT)(*values)
        traced = make_fx(torch.func.functionalize(once, remove="mutations"))(*values).graph
    traced.eliminate_dead_code()
    env: dict[Node, Node] = dict(zip((n for n in traced.nodes if n.op == "placeholder"), operands, strict=True))
    for node in traced.nodes:
        if node.op == "output":
            return [env[n] for n in node.args[0]]
        if node.op == "get_attr":
            raise CaptureError(f"a constant is made inside torch.vmap or a gradient{source_line(like)}\n"
                               "  Make it before, or hold it as a buffer.")
        if node.target in ignored:
            env[node] = env[node.args[0]]
        elif node.op != "placeholder":
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = emit(graph, like, node.target, *args, **kwargs)
    raise AssertionError("a graph has an output")
