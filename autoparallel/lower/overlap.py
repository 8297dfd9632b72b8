"""Communication of parameters beside compute: gathered before they are read, gradients reduced while backward goes on.

A step that takes a parameter to its readers becomes two lines, `begin_...` and `end`, with compute between them:

    forward     begin: a gather is posted          end: it is waited for
    backward    end: a reduction is posted         begin: it is waited for

Autograd runs backward of what was made last first, so the place of `begin` in the program says both how early a gather
is posted and how late a reduction is waited for. Gradients of whole parameters (nothing is sent forward) begin at the
top, many in one bucket; of the others, the next to be read are on their way (`posting.py` says which).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode

from autoparallel.layout import INVARIANT, PARTIAL, Placement, dual
from autoparallel.lower.collectives import (
    Sizes,
    act,
    begin_all_gather,
    begin_all_reduce,
    begin_all_reduce_own,
    begin_reduce_scatter,
    reduce_gradient,
    slice_tensor,
)
from autoparallel.lower.emit import item
from autoparallel.lower.posting import TOP, Event, Pair, Posting, Read, kind_of, places
from autoparallel.runtime import groups
from autoparallel.runtime.groups import Axis

Values = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]
#: The block that a node belongs to, if any.
BlockOf = Callable[[FxNode], str | None]


class Sending(Protocol):
    """What one pair of `begin` and `end` sends: each method posts it, and returns the way to its results."""

    def forward(self, values: Values) -> Callable[[], Values]: ...

    def backward(self, gradients: Gradients) -> Callable[[], Gradients]: ...

    def backward_at_once(self, gradients: Gradients) -> Gradients:
        """The same, in a way that can be differentiated again."""
        ...


@dataclass(frozen=True)
class Reductions:
    """I -> R of several parameters: nothing forward; backward one all_reduce."""

    axis: Axis
    sum_dtype: torch.dtype | None

    def forward(self, values: Values) -> Callable[[], Values]:
        return lambda: values

    def backward(self, gradients: Gradients) -> Callable[[], Gradients]:
        there = [self._summed(g) for g in gradients if g is not None]
        if len(there) == 1:
            finish = begin_all_reduce(there[0], self.axis)
        elif there:
            finish = begin_all_reduce_own(torch.cat([g.reshape(-1) for g in there]), self.axis)

        def finished() -> Gradients:
            parts = iter(finish().view(-1).split([g.numel() for g in there]) if there else ())
            return tuple(None if g is None else next(parts).view(g.shape).to(g.dtype) for g in gradients)

        return finished

    def backward_at_once(self, gradients: Gradients) -> Gradients:
        return tuple(None if g is None else act(self._summed(g), self.axis, PARTIAL, INVARIANT).to(g.dtype)
                     for g in gradients)

    def _summed(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to(self.sum_dtype or gradient.dtype)


@dataclass(frozen=True)
class Gather:
    """S -> R or I of one parameter: all_gather; backward reduce_scatter, or of an invariant value the rank's piece."""

    axis: Axis
    source: Placement
    target: Placement
    sizes: Sizes
    sum_dtype: torch.dtype | None

    def forward(self, values: Values) -> Callable[[], Values]:
        finish = begin_all_gather(values[0], self.axis, self.source.dim, self.sizes)
        return lambda: (finish(),)

    def backward(self, gradients: Gradients) -> Callable[[], Gradients]:
        (gradient,) = gradients
        if gradient is None:
            return lambda: (None,)
        if self.target.kind == "I":
            return lambda: (slice_tensor(gradient, self.axis, self.source.dim, self.sizes),)
        summed = gradient.to(self.sum_dtype or gradient.dtype)
        finish = begin_reduce_scatter(summed, self.axis, self.source.dim, self.sizes)
        return lambda: (finish().to(gradient.dtype),)

    def backward_at_once(self, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        if gradient is None:
            return (None,)
        summed = gradient.to(self.sum_dtype or gradient.dtype)
        back = act(summed, self.axis, dual(self.target), dual(self.source), (), self.sizes)
        return (back.to(gradient.dtype),)


@dataclass
class _OnTheWay:
    """What `begin` and `end` share beside autograd's edges, along which only stand-ins of the values' shapes go.

    ``early``: which gradients are on their way before backward comes to `end` (`post_gradients`), and the way to
    them."""

    sending: Sending
    values: Callable[[], Values] | None = None
    gradients: Callable[[], Gradients] | None = None
    early: tuple[tuple[bool, ...], Callable[[], Gradients]] | None = None

    def send(self, gradients: Gradients) -> Callable[[], Gradients]:
        """Those that are not on their way yet; the way to all."""
        if self.early is None:
            return self.sending.backward(gradients)
        (sent, finish), self.early = self.early, None
        late = tuple(None if there else g for g, there in zip(gradients, sent, strict=True))
        if all(g is None for g in late):
            return finish
        finish_late = self.sending.backward(late)
        return lambda: tuple(b if a is None else a for a, b in zip(finish(), finish_late(), strict=True))


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: _OnTheWay, *values: torch.Tensor) -> Values:
        ctx.way = way
        ctx.set_materialize_grads(False)
        way.values = way.sending.forward(values)
        return tuple(x.view_as(x) for x in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        finish, ctx.way.gradients = ctx.way.gradients, None
        return None, *(finish() if finish is not None else gradients)


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: _OnTheWay, *values: torch.Tensor) -> Values:
        ctx.way, ctx.shapes = way, [x.shape for x in values]
        ctx.set_materialize_grads(False)  # what is read under no_grad only has no gradient, rather than zeros
        assert way.values is not None
        finish, way.values = way.values, None
        return tuple(made.view_as(made) for made in finish())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            return None, *ctx.way.sending.backward_at_once(gradients)
        ctx.way.gradients = ctx.way.send(gradients)
        return None, *(None if g is None else g.new_zeros(()).expand(shape)
                       for g, shape in zip(gradients, ctx.shapes, strict=True))


@dataclass(frozen=True)
class Begun:
    """Values on their way; ``again``: what is known of making them again in backward."""

    way: _OnTheWay
    values: Values
    again: Any = None


def _begin(sending: Sending, *values: torch.Tensor) -> Begun:
    way = _OnTheWay(sending)
    return Begun(way, _Begin.apply(way, *values))


def begin_reductions(axis: str, *values: torch.Tensor, sum_dtype: torch.dtype | None = None) -> Begun:
    """I -> R for several parameters, whose gradients are reduced together, in ``sum_dtype`` if given."""
    return _begin(Reductions(groups.current(axis), sum_dtype), *values)


def begin_gather(x: torch.Tensor, axis: str, source: str, target: str, source_sizes: Sizes = (),
                 target_sizes: Sizes = (), sum_dtype: torch.dtype | None = None) -> Begun:
    """S -> R or I of one parameter, as `collectives.all_gather`."""
    return _begin(Gather(groups.current(axis), Placement.parse(source), Placement.parse(target), source_sizes,
                         sum_dtype), x)


def end(begun: Begun) -> Values:
    """The values, here: gathered, and whose gradients are on their way from here on."""
    return _End.apply(begun.way, *begun.values)


def post_gradients(values: Values, gradients: Gradients) -> None:
    """Send the gradients of what one `end` returned now; backward must come to it with the same ones later, and may
    with some that are None here."""
    way = values[0].grad_fn.way  # type: ignore[union-attr]
    with torch.no_grad():
        way.early = tuple(g is not None for g in gradients), way.sending.backward(gradients)


def ended_together(module: GraphModule) -> list[list[int]]:
    """For each `end` of whose values the program makes nothing, which of its results they are."""
    output = module.graph.output_node()
    place = {node: number for number, node in enumerate(output.all_input_nodes)}
    items = [sorted(node.users, key=lambda made: made.args[1]) for node in module.graph.nodes if node.target is end]
    return [[place[made] for made in made_here] for made_here in items
            if all(set(made.users) == {output} for made in made_here)]


def overlap(module: GraphModule, block_of: BlockOf | None = None) -> GraphModule:
    """The same program, in which communication of parameters runs beside compute.

    ``block_of``: blocks of which each must stay one run of nodes, so that what they read is there when they begin.
    """
    steps, reads = reads_of(module, block_of or (lambda node: None))
    events, writer = Posting(reads).events, _Writer(module, steps, reads)
    writer.run(events.get(TOP, ()))
    seen = set[int]()
    for node in module.graph.nodes:
        if node.op == "call_function" and (site := node.meta["site"]) not in seen:
            seen.add(site)
            writer.run(events.get(site, ()))
        writer.copy(node)
    return GraphModule(module, writer.graph, class_name=type(module).__name__)


def reads_of(module: GraphModule, block_of: BlockOf) -> tuple[list[FxNode], list[Read]]:
    """The steps from parameters to their readers, in order, and what `Posting` asks of them."""
    made = [node for node in module.graph.nodes if node.op == "call_function"]
    place = places((node.meta["site"], block_of(node)) for node in made)
    steps = [node for node in made if "step" in node.meta and node.meta["reads"]]
    number, reads = {node: n for n, node in enumerate(steps)}, []
    for node in steps:
        step, meta = node.meta["step"], node.meta["global_meta"]
        kind = kind_of(step.forward, step.backward, meta.requires_grad)
        reads.append(Read(number.get(node.all_input_nodes[0]), kind, str(node.args[1]), str(meta.dtype),
                          float(node.meta["num_bytes"]) if kind else 0.0, place[node.meta["site"]]))
    return steps, reads


class _Writer:
    """Writes a program anew; ``made`` are its nodes by the old ones', ``steps`` and ``reads`` what pairs' numbers
    mean."""

    def __init__(self, module: GraphModule, steps: Sequence[FxNode], reads: Sequence[Read]) -> None:
        self.graph, self.made, self.begun = Graph(), dict[FxNode, FxNode](), dict[Pair, FxNode]()
        self.steps, self.reads = steps, reads
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self.copy(node)

    def copy(self, node: FxNode) -> FxNode:
        """The node, and what it needs that is not there yet (steps before a gather)."""
        if node not in self.made:
            self.made[node] = self.graph.node_copy(node, self.copy)
        return self.made[node]

    def run(self, events: Sequence[Event]) -> None:
        for event in events:
            (self._begin if event.begins else self._end)(event.pair)

    def _begin(self, pair: Pair) -> None:
        steps = [self.steps[n] for n in pair.steps]
        first, values = steps[0], [self.copy(step.all_input_nodes[0]) for step in steps]
        if first.target is reduce_gradient:
            made = self.graph.call_function(begin_reductions, (first.args[1], *values), dict(first.kwargs))
        else:
            made = self.graph.call_function(begin_gather, (values[0], *first.args[1:]), dict(first.kwargs))
            made.meta = {"place": self.reads[pair.steps[0]].place, "num_bytes": first.meta["num_bytes"]}
        self.begun[pair] = made

    def _end(self, pair: Pair) -> None:
        ended = self.graph.call_function(end, (self.begun[pair],))
        for number, step in enumerate(self.steps[n] for n in pair.steps):
            self.made[step] = self.graph.call_function(item, (ended, number))
            self.made[step].meta = {k: v for k, v in step.meta.items() if k != "block"}
