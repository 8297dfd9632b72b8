"""Collectives issued at one program point and awaited at another, forward and backward.

A redistribution is a pair of calls, `begin_...` and `end` (of activations: `end_step`), with compute between the two:

    forward     begin: the gather is issued           end: it is awaited
    backward    end: the reduction is issued          begin: it is awaited
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autoparallel.kernels import groups
from autoparallel.kernels.buckets import begin_gathers_of, begin_reduce_scatters
from autoparallel.kernels.collectives import (
    Finish,
    Sizes,
    act,
    begin_action,
    begin_all_reduce_own,
    dealt,
    slice_tensor,
)
from autoparallel.kernels.fetching import Fetches
from autoparallel.kernels.groups import Axis
from autoparallel.layout import INVARIANT, PARTIAL, Placement, dual
from autoparallel.layout.redistribution import ACTIONS

Values = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]


class Sending(Protocol):
    """The communication of one pair of `begin` and `end`. Each method issues it and returns a function that awaits
    it."""

    def forward(self, values: Values) -> Callable[[], Values]: ...

    def backward(self, gradients: Gradients) -> Callable[[], Gradients]: ...

    def backward_at_once(self, gradients: Gradients) -> Gradients:
        """Gradients of the values, synchronously and differentiably (for double backward)."""
        ...


@dataclass(frozen=True)
class Reductions:
    """I -> R of several parameters: no communication forward; one all-reduce of all gradients backward."""

    axis: Axis
    sum_dtype: torch.dtype | None

    def forward(self, values: Values) -> Callable[[], Values]:
        return lambda: values

    def backward(self, gradients: Gradients) -> Callable[[], Gradients]:
        forms = [None if g is None else (g.shape, g.dtype) for g in gradients]  # the gradients themselves are let go
        there = [g for g in gradients if g is not None]
        if not there:
            return lambda: gradients
        finish = self._begin(there)

        def finished() -> Gradients:
            parts = iter(finish().view(-1).split([form[0].numel() for form in forms if form is not None]))
            made = (None if form is None else next(parts).view(form[0]) for form in forms)
            return tuple(g if form is None or g is None or g.dtype == form[1] else g.to(form[1])
                         for g, form in zip(made, forms, strict=True))

        return finished

    def _begin(self, gradients: Sequence[torch.Tensor]) -> Finish:
        return begin_all_reduce_own(self.axis.buckets.joined([self._summed(g) for g in gradients]), self.axis)

    def backward_at_once(self, gradients: Gradients) -> Gradients:
        return tuple(None if g is None else act(self._summed(g), self.axis, PARTIAL, INVARIANT).to(g.dtype)
                     for g in gradients)

    def _summed(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to(self.sum_dtype or gradient.dtype)


@dataclass(frozen=True)
class Gathers:
    """S -> R or I of parameters of one dtype: one all-gather forward; backward one reduce-scatter (R), or this rank's
    slices (I). ``sources``, ``sizes``: by parameter."""

    axis: Axis
    sources: tuple[Placement, ...]
    target: Placement
    sizes: tuple[Sizes, ...]
    sum_dtype: torch.dtype | None

    def forward(self, values: Values) -> Callable[[], Values]:
        return begin_gathers_of(values, self.axis, self.sources, self.sizes)

    def backward(self, gradients: Gradients) -> Callable[[], Gradients]:
        if self.target.kind == "I":
            mine = tuple(None if g is None else slice_tensor(self._dealt(g, source), self.axis, source.dim, sizes)
                         for g, source, sizes in zip(gradients, self.sources, self.sizes, strict=True))
            return lambda: mine
        dtypes = [None if g is None else g.dtype for g in gradients]  # the gradients themselves are let go
        there = [(self._dealt(g.to(self.sum_dtype or g.dtype), source), (source.dim, sizes))
                 for g, source, sizes in zip(gradients, self.sources, self.sizes, strict=True) if g is not None]
        if not there:
            return lambda: gradients
        finish = begin_reduce_scatters([g for g, _ in there], self.axis, [cut for _, cut in there])

        def finished() -> Gradients:
            made = iter(finish())
            return tuple(None if dtype is None else next(made).to(dtype) for dtype in dtypes)

        return finished

    def backward_at_once(self, gradients: Gradients) -> Gradients:
        return tuple(None if g is None else self._reduced(g, source, sizes)
                     for g, source, sizes in zip(gradients, self.sources, self.sizes, strict=True))

    def _reduced(self, gradient: torch.Tensor, source: Placement, sizes: Sizes) -> torch.Tensor:
        summed = gradient.to(self.sum_dtype or gradient.dtype)
        return act(summed, self.axis, dual(self.target), dual(source), (), sizes).to(gradient.dtype)

    def _dealt(self, gradient: torch.Tensor, source: Placement) -> torch.Tensor:
        return dealt(gradient, source, self.axis.size) if source.is_interleaved else gradient


@dataclass(frozen=True)
class Moved:
    """One redistribution step of one tensor, from placement ``source`` to ``target``; arguments as
    `collectives.redistribute`."""

    axis: Axis
    source: Placement
    target: Placement
    source_sizes: Sizes
    target_sizes: Sizes
    sum_dtype: torch.dtype | None = None

    @property
    def action(self) -> str:
        return ACTIONS[self.source.kind, self.target.kind][0]

    @property
    def action_back(self) -> str:
        """The action of the gradient."""
        return ACTIONS[dual(self.target).kind, dual(self.source).kind][0]

    def forward(self, values: Values) -> Callable[[], Values]:
        finish = begin_action(self.action, values[0], self.axis, self.source, self.source_sizes, self.target,
                              self.target_sizes)
        return lambda: (finish(),)

    def backward(self, gradients: Gradients) -> Callable[[], Gradients]:
        (gradient,) = gradients
        if gradient is None:
            return lambda: gradients
        source, target, dtype = dual(self.target), dual(self.source), gradient.dtype
        summed = gradient.to(self.sum_dtype or dtype)
        finish = begin_action(self.action_back, summed, self.axis, source, self.target_sizes, target, self.source_sizes)
        return lambda: (finish().to(dtype),)

    def backward_at_once(self, gradients: Gradients) -> Gradients:
        (gradient,) = gradients
        if gradient is None:
            return gradients
        summed = act(gradient.to(self.sum_dtype or gradient.dtype), self.axis, dual(self.target), dual(self.source),
                     self.target_sizes, self.source_sizes)
        return (summed.to(gradient.dtype),)


@dataclass
class _Pending:
    """State that `_Begin` and `_End` share outside autograd's graph, whose edges between them carry no gradients.

    ``ends_recompute``: as of `begin_step`. ``values``, ``gradients``: await the issued communication. ``early``: which
    gradients `issue_gradients` sent before backward reached `end`, and the function that awaits them."""

    sending: Sending
    ends_recompute: bool = False
    values: Callable[[], Values] | None = None
    gradients: Callable[[], Gradients] | None = None
    early: tuple[tuple[bool, ...], Callable[[], Gradients]] | None = None

    def send(self, gradients: Gradients) -> Callable[[], Gradients]:
        """Issue the gradients that `issue_gradients` has not; returns a function that awaits all of them."""
        if self.early is None:
            return self.sending.backward(gradients)
        (sent, finish), self.early = self.early, None
        late = tuple(None if there else g for g, there in zip(gradients, sent, strict=True))
        if all(g is None for g in late):
            return finish
        finish_late = self.sending.backward(late)
        return lambda: tuple(b if a is None else a for a, b in zip(finish(), finish_late(), strict=True))


#: The communication that the running recompute of a block has begun (None: no recompute runs).
_begun_again: ContextVar[list[_Pending] | None] = ContextVar("begun by a recompute", default=None)


@contextmanager
def recompute() -> Iterator[None]:
    """A block runs in this context for its recompute, which torch stops once backward has all it needs. Communication
    that is begun then is awaited here, so that none uses memory that is let go."""
    begun = list[_Pending]()
    token = _begun_again.set(begun)
    try:
        yield
    finally:
        _begun_again.reset(token)
        for pending in begun:
            if pending.values is not None:
                pending.values()
                pending.values = None


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: _Pending, *values: torch.Tensor) -> Values:
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        again = _begun_again.get()
        if again is None or not pending.ends_recompute:
            pending.values = pending.sending.forward(values)
            if again is not None:
                again.append(pending)
        return values    # autograd makes views of them

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        finish, ctx.pending.gradients = ctx.pending.gradients, None
        return None, *(finish() if finish is not None else gradients)


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: _Pending, *values: torch.Tensor) -> Values:
        ctx.pending = pending
        ctx.set_materialize_grads(False)  # a value read only under no_grad has no gradient, rather than zeros
        assert pending.values is not None or pending.ends_recompute
        finish, pending.values = pending.values or pending.sending.forward(values), None
        return tuple(made.view_as(made) for made in finish())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            return None, *ctx.pending.sending.backward_at_once(gradients)
        ctx.pending.gradients = ctx.pending.send(gradients)
        return (None,) * (1 + len(gradients))


@dataclass(frozen=True)
class Begun:
    """Result of `begin_...`, argument of `end`: values being gathered. ``again``: how `regather` repeats the gather."""

    pending: _Pending
    values: Values
    again: Any = None


def begin(sending: Sending, *values: torch.Tensor, ends_recompute: bool = False) -> Begun:
    """Issue any communication of these values; `end` awaits it. ``ends_recompute``: as of `begin_step`."""
    pending = _Pending(sending, ends_recompute)
    return Begun(pending, _Begin.apply(pending, *values))


def begin_reductions(axis: str, *values: torch.Tensor, sum_dtype: torch.dtype | None = None) -> Begun:
    """I -> R for several parameters; their gradients are reduced in one all-reduce, in ``sum_dtype`` if given."""
    return begin(Reductions(groups.current(axis), sum_dtype), *values)


def gathers(axis: str, steps: Sequence[tuple[str, str, Sizes]], sum_dtype: torch.dtype | None) -> Gathers:
    """The communication of `begin_gathers`."""
    sources, targets, sizes = zip(*steps, strict=True)
    (target,) = {Placement.parse(target) for target in targets}
    return Gathers(groups.current(axis), tuple(map(Placement.parse, sources)), target, sizes, sum_dtype)


def begin_gathers(axis: str, steps: Sequence[tuple[str, str, Sizes]], *values: torch.Tensor,
                  sum_dtype: torch.dtype | None = None) -> Begun:
    """S -> R or I of parameters, gathered in one all-gather. ``steps``: by parameter, source, target and source sizes,
    as `collectives.all_gather` takes them; the targets are equal. Gradients are summed in ``sum_dtype`` if given."""
    return begin(gathers(axis, steps, sum_dtype), *values)


def begin_fetches(device: str, *values: torch.Tensor) -> Begun:
    """Copies of parameters on the host to ``device``; their gradients go to the host."""
    return begin(Fetches(torch.device(device)), *values)


def end(begun: Begun) -> Values:
    """Await the communication and return the values. In backward, this issues the reduction of their gradients."""
    return _End.apply(begun.pending, *begun.values)


def begin_step(x: torch.Tensor, axis: str, source: str, target: str, source_sizes: Sizes = (), target_sizes: Sizes = (),
               ends_recompute: bool = False) -> Begun:
    """Begin a redistribution step of an activation; arguments as `collectives.redistribute`. ``ends_recompute``: the
    recompute of its block usually ends before `end_step`, so that only this begins the step there, if it is reached."""
    return begin(Moved(groups.current(axis), Placement.parse(source), Placement.parse(target), source_sizes,
                        target_sizes), x, ends_recompute=ends_recompute)


def end_step(begun: Begun) -> torch.Tensor:
    """Await the step that `begin_step` began and return its result. In backward, this begins the gradient's step."""
    return end(begun)[0]


def issue_gradients(values: Values, gradients: Gradients) -> None:
    """Issue the reduction of the gradients of one `end`'s values before backward reaches it.

    Backward must then reach `end` with the same gradients; those that are None here may have a value then.
    """
    pending = values[0].grad_fn.pending  # type: ignore[union-attr]
    with torch.no_grad():
        pending.early = tuple(g is not None for g in gradients), pending.sending.backward(gradients)
