"""Linear layers in pieces of their rows, which overlap with the redistribution of their operand or result
(`schedule.pieces`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from autoparallel.kernels import groups
from autoparallel.kernels.async_communication import Moved
from autoparallel.kernels.collectives import Finish, Sizes, begin_plain
from autoparallel.kernels.tracing import is_traced
from autoparallel.layout import Placement, dual
from autoparallel.layout.redistribution import COLLECTIVES

#: A layer's weight and bias.
Layer = tuple[torch.Tensor, torch.Tensor | None]
#: (number of pieces, dim, whether the step's own shards cut it too), as `schedule.pieces.Cut`.
Cut = tuple[int, int, bool]


@dataclass
class _Whole:
    """A tensor that is made piece by piece; the cut as `Cut` has it. ``pieces``: in a traced program, whose compiler
    puts them in their place."""

    count: int
    dim: int
    inside: bool
    made: torch.Tensor | None = None
    number: int = 0
    pieces: list[torch.Tensor] = field(default_factory=list)

    def _next(self, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The place of the next piece, of this shape."""
        at = self.dim + self.inside
        if self.made is None:
            self.made = like.new_empty(*shape[:at], self.count * shape[at], *shape[at + 1 :])
        self.number += 1
        return self.made.narrow(at, (self.number - 1) * shape[at], shape[at])

    def add(self, piece: torch.Tensor) -> torch.Tensor:
        """Put the next piece in its place; returns it there."""
        if is_traced():
            self.pieces.append(piece)
            return piece
        return self._next(piece, piece.shape).copy_(piece)

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the next piece, x @ weight + bias, in its place if that is contiguous; returns it there."""
        rows, shape = x.reshape(-1, x.shape[-1]), (*x.shape[:-1], weight.shape[-1])
        at = self.dim + self.inside
        # Selective recompute, a dispatch mode, keeps results of products, which nobody may write to.
        if is_traced() or is_in_torch_dispatch_mode() or math.prod(shape[:at]) > 1:
            made = rows.mm(weight) if bias is None else torch.addmm(bias, rows, weight)
            return self.add(made.view(shape))
        place = self._next(x, shape)
        out = place.view(rows.shape[0], -1)
        torch.mm(rows, weight, out=out) if bias is None else torch.addmm(bias, rows, weight, out=out)
        return place

    @property
    def tensor(self) -> torch.Tensor:
        made = torch.cat(self.pieces, self.dim + self.inside) if self.pieces else self.made
        assert made is not None and max(self.number, len(self.pieces)) == self.count
        return made.flatten(self.dim, self.dim + 1) if self.inside else made


@dataclass(frozen=True)
class _Pieces:
    """The pieces of a redistribution: ``moved`` of the whole tensor; ``each``: the sizes of the source's and target's
    shards of a piece."""

    moved: Moved
    each: tuple[Sizes, Sizes]
    cut: Cut

    @classmethod
    def of(cls, axis: str, source: str, target: str, source_sizes: Sizes, target_sizes: Sizes, cut: Cut) -> _Pieces:
        there = groups.current(axis)
        before, after = Placement.parse(source), Placement.parse(target)
        moved, ones = Moved(there, before, after, source_sizes, target_sizes), (1,) * there.size
        each = (ones, ones) if cut[2] else (source_sizes, target_sizes)    # inside, a shard is a row of (rank, place)
        return cls(moved, each, cut)

    def split(self, x: torch.Tensor, placement: Placement) -> list[torch.Tensor]:
        """The pieces of a tensor that lies on the axis as ``placement`` says."""
        count, dim, inside = self.cut
        if inside:
            x = x.unflatten(dim, (1 if placement.is_shard else self.moved.axis.size, -1))
        return list(x.chunk(count, dim + inside))

    def whole(self) -> _Whole:
        return _Whole(*self.cut)

    @property
    def sends_back(self) -> bool:
        """Whether gradients communicate."""
        return self.moved.action_back in COLLECTIVES

    def send(self, x: torch.Tensor) -> Finish:
        """Begin the step of a piece, whose result may lie in any order in memory."""
        m = self.moved
        return begin_plain(m.action, x, m.axis, m.source, self.each[0], m.target, self.each[1])

    def send_back(self, gradient: torch.Tensor) -> Finish:
        """Begin the step of a piece's gradient, as `send`."""
        m = self.moved
        return begin_plain(m.action_back, gradient, m.axis, dual(m.target), self.each[1], dual(m.source), self.each[0])


class _Gathered(torch.autograd.Function):
    """Layers that read a gathered operand. ``parameters``: weight and bias of each. The gathered operand is a result,
    too: backward saves it, and gradients of gradients go through it."""

    @staticmethod
    def forward(ctx: Any, pieces: _Pieces, x: torch.Tensor, *parameters: torch.Tensor | None
                ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        layers = list(zip(parameters[::2], parameters[1::2], strict=True))
        begun = [pieces.send(piece) for piece in pieces.split(x, pieces.moved.source)]
        operand, made = pieces.whole(), [pieces.whole() for _ in layers]
        for finish in begun:
            piece = operand.add(finish())
            for result, (weight, bias) in zip(made, layers, strict=True):
                assert weight is not None
                result.multiply(piece, weight.t(), bias)
        ctx.pieces = pieces
        whole = operand.tensor
        ctx.save_for_backward(whole, *parameters[::2])
        return whole, *(result.tensor for result in made)

    @staticmethod
    def backward(ctx: Any, of_operand: torch.Tensor | None, *gradients: torch.Tensor | None
                 ) -> tuple[torch.Tensor | None, ...]:
        (operand, *weights), pieces, wanted = ctx.saved_tensors, ctx.pieces, ctx.needs_input_grad[2:]
        some = [(g, weight) for g, weight in zip(gradients, weights, strict=True) if g is not None][::-1]
        if of_operand is not None or torch.is_grad_enabled():    # these are differentiated, or of gradients
            sums = [_of_operand(g, weight) for g, weight in some] + ([] if of_operand is None else [of_operand])
            (back,) = pieces.moved.backward_at_once((sum(sums),)) if sums else (None,)
            return None, back, *_of_parameters(gradients, operand, wanted)
        if not some:
            return (None,) * (2 + 2 * len(weights))
        begun = list[Finish]()
        for parts in zip(*(pieces.split(g, pieces.moved.target) for g, _ in some), strict=True):
            made = [_of_operand(part, weight) for part, (_, weight) in zip(parts, some, strict=True)]
            begun.append(pieces.send_back(functools.reduce(torch.Tensor.add_, made)))
        of_parameters, back = _of_parameters(gradients, operand, wanted), pieces.whole()
        for finish in begun:
            back.add(finish())
        return None, back.tensor, *of_parameters


class _Reduced(torch.autograd.Function):
    """A layer whose result is summed over the ranks of an axis."""

    @staticmethod
    def forward(ctx: Any, pieces: _Pieces, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
                ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        begun = [pieces.send(torch.ops.aten.linear.default(piece, weight, bias))
                 for piece in pieces.split(x, pieces.moved.source)]
        ctx.pieces, made = pieces, pieces.whole()
        ctx.save_for_backward(x, weight)
        for finish in begun:
            made.add(finish())
        return made.tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (x, weight), pieces, wanted = ctx.saved_tensors, ctx.pieces, ctx.needs_input_grad[2:]
        if gradient is None:
            return (None,) * 4
        if torch.is_grad_enabled() or not pieces.sends_back:
            (whole,) = pieces.moved.backward_at_once((gradient,))
            return None, _of_operand(whole, weight), *_of_parameters([whole], x, wanted)
        begun = [pieces.send_back(part) for part in pieces.split(gradient, pieces.moved.target)]
        whole, back = pieces.whole(), pieces.whole()
        for finish in begun:
            back.multiply(whole.add(finish()), weight)
        return None, back.tensor, *_of_parameters([whole.tensor], x, wanted)


def _of_operand(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of a layer's operand."""
    rows = gradient.reshape(-1, gradient.shape[-1]).mm(weight)
    return rows.view(*gradient.shape[:-1], weight.shape[-1])


def _of_parameters(gradients: Sequence[torch.Tensor | None], x: torch.Tensor, wanted: Sequence[bool]
                   ) -> list[torch.Tensor | None]:
    """The gradients of each layer's weight and bias, where they are ``wanted``."""
    found = list[torch.Tensor | None]()
    for gradient, of_weight, of_bias in zip(gradients, wanted[::2], wanted[1::2], strict=True):
        rows = None if gradient is None else gradient.reshape(-1, gradient.shape[-1])
        bias = rows.sum(0) if rows is not None and of_bias else None
        found += [rows.t().mm(x.reshape(-1, x.shape[-1])) if rows is not None and of_weight else None, bias]
    return found


def gathered_products(x: torch.Tensor, layers: Sequence[Layer], axis: str, source: str, target: str,
                      source_sizes: Sizes, target_sizes: Sizes, cut: Cut) -> tuple[torch.Tensor, ...]:
    """The results of linear ``layers`` of x, which is gathered piece by piece; arguments of the step as
    `collectives.redistribute` has them."""
    pieces = _Pieces.of(axis, source, target, source_sizes, target_sizes, cut)
    return _Gathered.apply(pieces, x, *(value for layer in layers for value in layer))[1:]


def reduced_product(x: torch.Tensor, layer: Layer, axis: str, source: str, target: str, source_sizes: Sizes,
                    target_sizes: Sizes, cut: Cut) -> torch.Tensor:
    """The result of a linear layer of x, summed over the ranks of an axis piece by piece; arguments of the step as
    `collectives.redistribute` has them."""
    return _Reduced.apply(_Pieces.of(axis, source, target, source_sizes, target_sizes, cut), x, *layer)


__all__ = ["gathered_products", "reduced_product"]
