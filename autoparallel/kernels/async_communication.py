"""Collectives issued at one program point and awaited at another, forward and backward.

A redistribution of a parameter is a pair of calls, `begin_...` and `end`, with compute between them:

    forward     begin: the gather is issued           end: it is awaited
    backward    end: the reduction is issued          begin: it is awaited
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autoparallel.kernels import groups
from autoparallel.kernels.collectives import (
    Sizes,
    act,
    begin_all_gather,
    begin_all_reduce,
    begin_all_reduce_own,
    begin_reduce_scatter,
    slice_tensor,
)
from autoparallel.kernels.groups import Axis
from autoparallel.layout import INVARIANT, PARTIAL, Placement, dual

Values = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]


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
class _Pending:
    """What `begin` and `end` share beside autograd's edges, along which only stand-ins of the values' shapes go.

    ``early``: which gradients are on their way before backward comes to `end` (`issue_gradients`), and the way to
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
    def forward(ctx: Any, way: _Pending, *values: torch.Tensor) -> Values:
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
    def forward(ctx: Any, way: _Pending, *values: torch.Tensor) -> Values:
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

    way: _Pending
    values: Values
    again: Any = None


def _begin(sending: Sending, *values: torch.Tensor) -> Begun:
    way = _Pending(sending)
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


def issue_gradients(values: Values, gradients: Gradients) -> None:
    """Send the gradients of what one `end` returned now; backward must come to it with the same ones later, and may
    with some that are None here."""
    way = values[0].grad_fn.way  # type: ignore[union-attr]
    with torch.no_grad():
        way.early = tuple(g is not None for g in gradients), way.sending.backward(gradients)
