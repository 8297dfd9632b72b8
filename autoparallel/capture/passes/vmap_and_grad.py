"""Regions of a trace that are traced again, as ops that rules know: batched by torch.vmap, or differentiated.

What torch.vmap maps is traced as a function of one sample; traced again below vmap, its ops are those of the whole
batch. `torch.autograd.grad` inside a model becomes, while tracing, the op ``autoparallel::gradient``; what lies between
its inputs and outputs is then traced again together with its backward, whose ops can be differentiated once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._C import _functorch
from torch._decomp import get_decompositions
from torch._functorch import predispatch
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from autoparallel.capture.passes.editing import Node, emit, source_line, use_results
from autoparallel.errors import CaptureError

aten = torch.ops.aten
_library = torch.library.Library("autoparallel", "FRAGMENT")
_library.define("gradient(Tensor[] outputs, Tensor[] inputs, Tensor?[] seeds, bool differentiable) -> Tensor[]")


def _like_inputs(outputs: list[torch.Tensor], inputs: list[torch.Tensor], seeds: list[torch.Tensor | None],
                 differentiable: bool) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in inputs]


_library.impl("gradient", _like_inputs, "CompositeExplicitAutograd")
gradient = torch.ops.autoparallel.gradient.default


def _of_a_batch(info: Any, in_dims: tuple[Any, ...], outputs: list[torch.Tensor], inputs: list[torch.Tensor],
                *_: Any) -> tuple[list[torch.Tensor], list[int]]:
    """Shapes, while what torch.vmap maps is traced: each sample has gradients, also of what all samples share."""
    shapes = [[n for d, n in enumerate(x.shape) if d != at] for x, at in zip(inputs, in_dims[1], strict=True)]
    return [x.new_empty(info.batch_size, *n) for x, n in zip(inputs, shapes, strict=True)], [0] * len(inputs)


torch.library.register_vmap("autoparallel::gradient", _of_a_batch)
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


def gradient_of_function(function: Callable[..., Any], argnums: int | tuple[int, ...], has_aux: bool,
                         args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """`torch.func.grad` and `grad_and_value` while a model is traced: (gradients, value of ``function``)."""
    def of_args(*args: Any) -> Any:
        return function(*args, **kwargs)

    made, back, *aux = pullback(of_args, *args, argnums=argnums, has_aux=has_aux)
    gradients = back(torch.ones_like(made))
    return gradients, (made, *aux) if has_aux else made


def pullback(function: Callable[..., Any], *primals: Any, argnums: int | tuple[int, ...] | None = None,
             has_aux: bool = False) -> tuple[Any, ...]:
    """`torch.func.vjp` and `jacrev` while a model is traced."""
    asked = range(len(primals)) if argnums is None else (argnums,) if isinstance(argnums, int) else argnums
    numbers = [n % len(primals) for n in asked]
    with torch.enable_grad():
        given = [pytree.tree_map(lambda x: x.view_as(x), primal) if n in numbers else primal
                 for n, primal in enumerate(primals)]
        made = function(*given)
    made, *aux = made if has_aux else (made,)
    leaves, spec = pytree.tree_flatten([given[n] for n in numbers])

    def back(cotangents: Any, **_: Any) -> Any:
        seeds = pytree.tree_leaves(cotangents)
        gradients = gradient_as_op(pytree.tree_leaves(made), leaves, seeds, create_graph=True)
        found = pytree.tree_unflatten(gradients, spec)
        return found[0] if isinstance(argnums, int) else tuple(found)

    return made, back, *aux


def pushforward(function: Callable[..., Any], primals: tuple[Any, ...], tangents: Any,
                argnums: int | tuple[int, ...] | None, *, strict: bool = False, has_aux: bool = False
                ) -> tuple[Any, ...]:
    """`torch.func.jvp`, `jacfwd` and `hessian` while a model is traced: the pullback of a pullback, which is linear in
    its cotangent, is the pushforward."""
    made, back, *aux = pullback(function, *primals, argnums=argnums, has_aux=has_aux)
    seeds = pytree.tree_map(torch.zeros_like, made)
    _, again = pullback(lambda seed: pytree.tree_leaves(back(seed)), seeds)
    return made, again(pytree.tree_leaves(tangents))[0], *aux


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
    before = [n for node in region if node.target is gradient for n in _between(graph, node.args[1], node.args[0])]
    operands = _operands([*region, *before], {*inside, *before})
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
    """The nodes on the paths from inputs to outputs along which a gradient flows, in order."""
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
    level = _functorch.maybe_current_level()
    try:
        for node in region:
            if node.target is gradient:  # of what torch.vmap maps: others are expanded before
                env[node] = _differentiated(node, env)
                continue
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
    finally:
        while _functorch.maybe_current_level() != level:  # an error within torch.vmap, whose levels are ops here
            _functorch._vmap_decrement_nesting()


def _differentiated(node: Node, env: dict[Node, Any]) -> list[Any]:
    """The gradients by `torch.func`, which composes with torch.vmap; ops that both do are done twice only in the trace.
    """
    outputs, inputs, seeds, _ = node.args
    region = _between(node.graph, inputs, outputs)
    if any(n.target in (predispatch._add_batch_dim, predispatch._remove_batch_dim) for n in region):
        raise CaptureError(f"a derivative of what torch.vmap maps inside another (as torch.func.hessian does) is not "
                           f"supported{source_line(node)}\n  Write torch.func.grad of torch.func.grad, or "
                           "torch.autograd.grad row by row.")
    if any(x in region for x in inputs):
        raise CaptureError("gradients of what another input is made of, inside torch.vmap, are not supported"
                           f"{source_line(node)}\n  Ask for them one by one.")

    def run(*values: Any) -> list[Any]:
        inner = {**env, **dict(zip(inputs, values, strict=True))}
        _interpret(region, inner)
        return [inner[y] for y in outputs]

    made, back = torch.func.vjp(run, *(env[x] for x in inputs))[:2]
    return list(back([torch.ones_like(y) if s is None else env[s] for y, s in zip(made, seeds, strict=True)]))


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
