"""AOTAutograd and Inductor, called without Dynamo. (The one file that touches their internals: torch 2.13.)"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._functorch import compile_utils
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx, ir
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import clone, register_lowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autoparallel.backends.agreement import one_first
from autoparallel.backends.generated import misuse_of_memory
from autoparallel.backends.traced import STARTS
from autoparallel.backends.two_parts import halves
from autoparallel.errors import LoweringError
from autoparallel.kernels import collectives

#: A pass over the forward or the backward graph, in place; says whether the graph is the backward.
Pass = Callable[[GraphModule, bool], None]
#: A compiled function of flat tensors, differentiable.
Compiled = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Passes:
    """What runs on the graphs between tracing and code generation.

    ``tag`` marks nodes of the joint graph that backward recomputes (node.meta["recompute"]), in place; ``each`` runs on
    the forward and on the backward graph, both before code is generated for either; ``alone`` on a forward graph
    without a backward.
    """

    tag: Callable[[GraphModule], None]
    each: Pass
    alone: Callable[[GraphModule], None]


#: Ops that the partitioner must not merge, as it does not merge random ones, where they have equal arguments: what they
#: give depends on other ranks, whose arguments may differ (a rank that sends zeros in each layer's ring).
_RECEIVE = [op.overloadpacket for op in STARTS]


class _Partitioner(CustomPartitionerFn):
    """Inductor's own partitioner between our passes."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
                 ) -> tuple[GraphModule, GraphModule]:
        self.passes.tag(gm)
        with mock.patch.object(compile_utils, "rand_ops", [*compile_utils.rand_ops, *_RECEIVE]):
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        self.passes.each(forward, False)
        self.passes.each(backward, True)
        return forward, backward

    def uuid(self) -> Any:
        return get_hash_for_files((str(Path(__file__)), str(Path(collectives.__file__))))

    def __reduce__(self) -> Any:
        """In a key of Inductor's cache of code. (What the passes do is seen in the graph, which is in the key too.)"""
        return str, (str(self.uuid()),)


@register_lowering(torch.ops.autoparallel.all_gather.default, type_promotion_kind=None)
def _all_gather(x: ir.TensorBox, ranks: int, group_name: str) -> ir.TensorBox:
    """As torch's own gather: the code keeps what is sent until it is awaited."""
    sent: Any = ir.ExternKernel.require_contiguous(x)
    made: Any = ir._CollectiveKernel.create_out_of_place(torch.ops.autoparallel.all_gather.default, sent, ranks,
                                                         group_name)
    return ir.TensorBox.create(made)


@register_lowering(torch.ops.autoparallel.awaited.default, type_promotion_kind=None)
def _awaited(received: ir.TensorBox, sent: ir.TensorBox) -> ir.TensorBox:
    """As `wait_tensor`. ``sent`` is named for the passes over the graph; here the collective's own input is known."""
    ir._WaitKernel.create_wait(torch.ops._c10d_functional.wait_tensor.default, received)
    return received


@register_lowering(torch.ops.autoparallel.bucket.default, type_promotion_kind=None)
def _bucket(parts: Sequence[ir.TensorBox]) -> ir.TensorBox:
    """A flat concatenation whose parts Inductor writes into it directly, as it does for `aten.cat`. A part with other
    readers is copied, since the sum over ranks overwrites the bucket."""
    device, dtype, total = parts[0].get_device_or_error(), parts[0].get_dtype(), sum(x.get_numel() for x in parts)
    made: Any = ir.ConcatKernel(name=None, layout=ir.FixedLayout(device, dtype, [total], [1]), inputs=[])
    whole, begin = ir.StorageBox(made), 0
    nodes: Any = V.graph.current_node.args[0]
    for part, node in zip(parts, nodes, strict=True):
        strides = ir.FlexibleLayout.contiguous_strides(part.get_size())
        where = ir.ReinterpretView(data=whole, layout=ir.FixedLayout(device, dtype, part.get_size(), strides, begin))
        own = part if len(node.users) == nodes.count(node) == 1 else clone(part)
        made.inputs.append(ir.ConcatKernel.realize_into(own, where))
        begin += part.get_numel()
    made.name = V.graph.register_buffer(made)
    made.inputs = ir.ConcatKernel.unwrap_storage(made.inputs)
    V.graph.register_operation(made)
    return ir.TensorBox(whole)


@register_lowering(torch.ops.autoparallel.sum_bucket.default, type_promotion_kind=None)
def _sum_bucket(bucket: ir.TensorBox, reduce_op: str, group_name: str) -> ir.TensorBox:
    """An in-place all-reduce: torch's lowering of `all_reduce` without the copy of its operand."""
    whole: Any = ir.ExternKernel.require_contiguous(bucket)
    ir._AllReduce_Kernel.create_inplace(torch.ops._c10d_functional.all_reduce_.default, whole, reduce_op, group_name)
    return whole


def fake_inputs(inputs: Sequence[torch.Tensor], graded: bool) -> list[torch.Tensor]:
    """Stand-ins without values: equal inputs, or inputs that share memory, are apart, since a later call's may be.
    Only if ``graded`` do they have gradients. (Inductor caches code only where shapes have a `ShapeEnv`.)"""
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True):
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device,
                                    requires_grad=graded and x.requires_grad) for x in inputs]


def compile_graph(module: GraphModule, inputs: Sequence[torch.Tensor], passes: Passes, generates: bool,
                  put_off: Collection[int] = ()) -> Compiled:
    """``module``, a graph of flat tensors in and out, traced into forward and backward, rewritten by ``passes`` and
    compiled: by Inductor if ``generates`` is true, else run node by node.

    ``inputs``: shapes, strides and requires_grad of a call, with gradients if they are enabled now; ``put_off``: the
    numbers of those whose gradients are a second part of backward (`two_parts`). Torch's settings are as before when
    this returns. Raises LoweringError if the code uses memory that a collective still uses.
    """
    def inner(graph: GraphModule, examples: Sequence[Any], **kwargs: Any) -> Any:
        if kwargs.get("is_inference"):
            passes.alone(graph)
        if kwargs.get("is_backward") and (both := halves(graph, put_off)) is not None:
            first, second = both.first, both.second
            return both.call(coded(first, examples, **kwargs),
                             coded(second, both.examples(), **{**kwargs, "static_input_idxs": ()}))
        return coded(graph, examples, **kwargs)

    def coded(graph: GraphModule, examples: Sequence[Any], **kwargs: Any) -> Any:
        if not generates:
            return _as_it_is(graph)
        layouts = inductor_config.layout_optimization and channels_last_pays(graph.graph)
        with one_first(graph), inductor_config.patch(layout_optimization=layouts):
            return compile_fx.compile_fx_inner(graph, examples, **kwargs)

    # The order of nodes is ours, that of collectives the same on all ranks; graph_partition serves CUDA graphs, and its
    # time grows with the square of the number of collectives.
    settings = {"custom_partitioner_fn": _Partitioner(passes), "reorder_for_peak_memory": False,
                "reorder_for_locality": False, "graph_partition": False}
    wrong = list[str | None]()
    looks = mock.patch.object(GraphLowering, "save_output_code", lambda code: wrong.append(misuse_of_memory(code)))
    # Donated is what backward saved, whose memory its code may take: a second part still reads it.
    whole = functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True,
                                   donated_buffer=not put_off)
    graded = torch.is_grad_enabled()
    with whole, looks, torch.inference_mode(False), torch.set_grad_enabled(graded):
        fakes = fake_inputs(inputs, graded)
        made: Any = compile_fx.compile_fx(module, fakes, inner_compile=inner, config_patches=settings)
    for misuse in filter(None, wrong):
        raise LoweringError(f"Inductor's code would compute wrong numbers: {misuse}"
                            "\n  Run this model with backend=\"eager\", and please report it.")
    return made


def channels_last_pays(graph: Graph) -> bool:
    """Whether Inductor may run a graph's convolutions on channels-last tensors, as it always would on CPUs: there only
    where their inputs have at least as many elements as their weights. It copies each weight, and the gradient of each,
    into the other layout in every step (`docs/measurements/backends.md`)."""
    found = [[value.meta["val"] for value in node.args[:2]]
             for node in graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)]
    inputs, weights = (sum(pair[number].numel() for pair in found) for number in (0, 1))
    return inputs >= weights or any(x.device.type != "cpu" for x, _ in found)


def _as_it_is(graph: GraphModule) -> Any:
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(graph.forward)
