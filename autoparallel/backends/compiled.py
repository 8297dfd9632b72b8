"""A program whose parts are compiled, called like the program itself."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from autoparallel.backends import agreement, two_parts
from autoparallel.backends.buckets import Limits, bucket_gathers, bucket_reductions
from autoparallel.backends.flat import FlatProgram, flat
from autoparallel.backends.left_out import views_left_out
from autoparallel.backends.moving import Collective, move_collectives, name_what_is_sent, order_of
from autoparallel.backends.recompute import tag_blocks, tag_collectives_of_backward, tag_gathers
from autoparallel.backends.traced import mark_gathers, own_results, with_one_wait
from autoparallel.backends.untraceable import why_not_traced
from autoparallel.capture.blocks import block_path
from autoparallel.errors import InputError
from autoparallel.kernels import groups, rng
from autoparallel.kernels.collectives import item
from autoparallel.kernels.saved_on_host import SavedInOrder
from autoparallel.lower.recompute_pass import in_parts
from autoparallel.schedule.fusion import BY_SIZE, Fusion

_LOG = logging.getLogger("autoparallel")


@dataclass(frozen=True, eq=False)
class Lowering:
    """How a program is compiled.

    ``generates``: by Inductor, else run as it is traced. ``regathers``: backward gathers parameters again (ZeRO-3).
    ``recompute``: as in `Hybrid`, of the blocks that ``block_of`` names (None: as they are; of several micro-batches at
    a time each has its own). ``saved_on``: where what these blocks save waits for backward; if not "device", of parts
    that are these blocks.
    ``puts_off``: gradients of leaves among the parameters are a second part of backward (zero bubble).
    ``bucket_bytes``: of gathers and reductions of parameters, at most, or as ``fusion`` says. ``made``: what has been
    compiled, by what it is, with the order of its collectives.
    """

    generates: bool
    regathers: bool
    recompute: str
    block_of: Callable[[FxNode], object]
    bucket_bytes: float
    saved_on: str = "device"
    puts_off: bool = False
    fusion: Fusion = BY_SIZE
    made: dict[Any, tuple[Callable[..., Sequence[Tensor]], Sequence[Collective]]] = field(default_factory=dict)

    @property
    def recomputes(self) -> bool:
        return self.recompute not in ("none", "offload")


def compiled(program: GraphModule, how: Lowering, part_of: Callable[[FxNode], object] = lambda node: "") -> GraphModule:
    """The program with each run of nodes of one part as a `CompiledPart`. Ops that cannot be traced, and nodes whose
    part is None, run as they are, between them.

    Called within `groups.use` and `rng.use_seed`, like the program; all ranks make the same calls.
    """
    why = {node: reason for node in program.graph.nodes if (reason := why_not_traced(node)) is not None}
    why |= {result: reason for node, reason in why.items() for result in node.users if result.target is item}
    runs = _runs(program, how.block_of) if how.recomputes else {}
    for reason in sorted(set(why.values())):
        _LOG.warning("%s: runs node by node, between compiled graphs", reason)

    def traced_in(node: FxNode) -> object:
        return None if node in why else part_of(node)

    outside = views_left_out(program.graph, traced_in)

    def part(node: FxNode) -> object:
        return None if node in outside else traced_in(node)

    order = SavedInOrder(ahead=True, on_disk=how.saved_on == "disk")

    def made(body: GraphModule, members: Sequence[FxNode]) -> nn.Module:
        compiled_part = CompiledPart(body, how, [runs.get(node) for node in members])
        offloads = how.saved_on != "device" and how.block_of(members[0]) is not None
        return order.block(compiled_part) if offloads else compiled_part

    return in_parts(program, part, made)


class CompiledPart(nn.Module):
    """A part of a program, traced and compiled at the first call, and again for a call without gradients. A part that
    is equal to another is compiled once. Ranks compare the collectives of each part: two may be equal on some ranks
    only, as with shards of 3 + 3 and 3 + 2 elements.

    ``runs``: for each of its ops, the number of its run of a recomputed block, or None. ``calls``: by form of the
    inputs, the function that runs.
    """

    def __init__(self, body: GraphModule, how: Lowering, runs: Sequence[int | None]) -> None:
        super().__init__()
        self.how = how
        ops = [node for node in body.graph.nodes if node.op == "call_function"]
        self.flat: FlatProgram = flat(body, {node: run for node, run in zip(ops, runs, strict=True) if run is not None})
        first = 1 if self.flat.draws else 0
        placeholders = body.graph.find_nodes(op="placeholder")
        #: By number of the traced function's inputs that are parameters, the bucket of any size that each is in.
        self.parameters_at = {n + first: bucket for n, bucket in _buckets_of_any_size(placeholders, how).items()}
        self.calls: dict[Any, Callable[..., Sequence[Tensor]]] = {}

    def forward(self, *placeholders: Tensor) -> Any:
        if not self.flat.returns:
            return self.flat.structured(())
        inputs = self.flat.inputs([x.contiguous() for x in placeholders], rng.call_seeds())
        late = self._put_off(inputs)
        form = torch.is_grad_enabled(), tuple(map(_form, inputs)), late
        if form not in self.calls:
            key = self.flat.text, form, tuple(self.parameters_at.items())
            if key not in self.how.made:
                self.how.made[key] = self._compiled(inputs, late)
            self.calls[form], order = self.how.made[key]
            agreement.check_order(order, groups.bound().values())
        made = self.calls[form](*inputs)
        for node in {result.grad_fn for result in made if result.grad_fn is not None}:
            node.register_prehook(_runs_once)
            if late and node.name() == two_parts.NODE:    # not a view of a result
                node.register_prehook(partial(_runs_next, {number: inputs[number] for number in late}))
        return self.flat.structured(made)

    def _put_off(self, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        """The numbers of the inputs whose gradients are a second part of backward: parameters that autograd gives
        gradients, and not to what they were made of."""
        if not self.how.puts_off:
            return ()
        return tuple(number for number in self.parameters_at if inputs[number].requires_grad and inputs[number].is_leaf)

    def _compiled(self, inputs: Sequence[Tensor], late: Sequence[int]
                  ) -> tuple[Callable[..., Sequence[Tensor]], Sequence[Collective]]:
        from autoparallel.backends import aot  # seconds to import

        passes = _Passes(self.how, self.parameters_at)
        call = aot.compile_graph(self.flat.module, inputs, aot.Passes(passes.tag, passes.each, passes.alone),
                                 self.how.generates, late)
        return call, passes.orders


def _buckets_of_any_size(placeholders: Sequence[FxNode], how: Lowering) -> Mapping[int, int | None]:
    """By number of the placeholders that are parameters: the bucket that the plan names (`Fusion.number_of`), or, below
    0, that of its block, if the plan gives no sizes and the block is larger than other buckets; None: neither."""
    found, blocks = dict[int, int | None](), dict[str, list[int]]()
    for number, node in enumerate(placeholders):
        if node.meta["reads"]:
            name = node.meta["parameter"]
            found[number] = how.fusion.number_of(name)
            if how.fusion.blocks and found[number] is None and (path := block_path(name.rpartition(".")[0])):
                blocks.setdefault(path, []).append(number)
    for count, members in enumerate(blocks.values(), 1):
        if sum(placeholders[number].meta["global_meta"].num_bytes for number in members) > how.bucket_bytes:
            found.update(dict.fromkeys(members, -count))
    return found


def _runs_next(weights: Mapping[int, Tensor], _: object) -> None:
    two_parts.runs_next(weights)


def _runs_once(gradients: Sequence[Tensor | None]) -> None:
    """Raises InputError in a backward whose gradients could be differentiated, or that could run again, before torch
    refuses it, or part of it, with the gradients of others added."""
    if torch.is_grad_enabled():
        raise InputError("create_graph=True in the backward of a compiled program, whose gradients are not "
                         "differentiated again\n  Compile with backend=\"eager\"; or take the inner gradients within "
                         "the model's forward (torch.func.grad, torch.autograd.grad), which are traced with it.")
    if torch._C._autograd._get_current_graph_task_keep_graph():
        raise InputError("retain_graph=True in the backward of a compiled program, which runs once\n  Add the losses "
                         "up before one backward, or call the model once for each; or take backend=\"eager\".")


_form = attrgetter("shape", "dtype", "requires_grad")


class _Passes:
    """The passes over one part's graphs. ``orders``: their collectives, once `each` has run."""

    def __init__(self, how: Lowering, parameters: Mapping[int, int | None]) -> None:
        self.how, self.parameters, self.orders = how, parameters, list[Collective]()
        self.limits = Limits(how.bucket_bytes, how.fusion,
                             {axis.group_name: axis.name for axis in groups.bound().values()})

    def tag(self, joint: GraphModule) -> None:
        """Say what backward computes, again or by itself."""
        mark_gathers(joint.graph, self.parameters)
        tag_collectives_of_backward(joint)
        if self.how.recomputes:
            tag_blocks(joint, self.how.recompute)
        if self.how.regathers:
            tag_gathers(joint)

    def alone(self, module: GraphModule) -> None:
        """Rewrite a forward graph that has no backward."""
        mark_gathers(module.graph, self.parameters)
        self.each(module, False)

    def each(self, module: GraphModule, backward: bool) -> None:
        """Rewrite the forward or the backward graph."""
        with_one_wait(module.graph)
        gathers = bucket_gathers(module.graph, self.limits)
        if backward:
            bucket_reductions(module.graph, self.limits, self.parameters)
            own_results(module.graph)
        move_collectives(module, gathers)
        self.orders.extend(order_of(module))
        name_what_is_sent(module)
        module.recompile()


def _runs(program: GraphModule, block_of: Callable[[FxNode], object]) -> dict[FxNode, int]:
    """The nodes of recomputed blocks, by contiguous run. Steps on the paths of parameters belong to none: what they
    make is kept, unless ZeRO-3 gathers it again."""
    nodes = [n for n in program.graph.nodes if n.op == "call_function" and not ("step" in n.meta and n.meta["reads"])]
    runs = itertools.groupby(nodes, block_of)
    return {node: number for number, (block, run) in enumerate(runs) if block is not None for node in run}
