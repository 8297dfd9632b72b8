"""Linear layers whose weights' gradients are computed after the gradient of their input is on its way.

    begin_step(x)        backward: awaits the input's gradient
    later(weight)        backward: computes the weight's gradient
    end_step             backward: sends the input's gradient
    linear(x, weight)    backward: computes the input's gradient

Autograd runs in reverse order of the program, so the weight's gradient is computed while the input's travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: Of bias and weight: the order in which autograd has those of a linear layer.
Gradients = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass
class _State:
    """``gradients``: computes those of weight and bias, once backward has come to the layer; ``placeholder``: what
    autograd carries in their place."""

    gradients: Callable[[], Gradients] | None = None
    placeholder: torch.Tensor | None = None

    def completed(self, carried: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
        """The gradients; what is ``carried`` also has those of other readers where it is not the placeholder (of first
        gradients, where they are differentiated)."""
        (compute, self.gradients), (placeholder, self.placeholder) = (self.gradients, None), (self.placeholder, None)
        assert compute is not None and placeholder is not None
        for made, other in zip(compute()[-len(carried):], carried, strict=True):
            if other is None or made is None:
                yield made if other is None else other
            else:
                carries = other.untyped_storage().data_ptr() != placeholder.untyped_storage().data_ptr()
                yield made + other if carries else made


@dataclass(frozen=True)
class Later:
    """Result of `later`, argument of `linear`: a layer's parameters."""

    state: _State
    weight: torch.Tensor
    bias: torch.Tensor | None


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: _State, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.state = state
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *(gradients if ctx.state.gradients is None else ctx.state.completed(gradients))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: _State, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
                ) -> torch.Tensor:
        ctx.state = state
        ctx.save_for_backward(x, weight)
        return torch.ops.aten.linear.default(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), (_, of_x, of_weight, of_bias) = ctx.saved_tensors, ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])

        def gradients() -> Gradients:
            summed = rows.sum(0) if of_bias else None
            return summed, rows.t().mm(x.reshape(-1, x.shape[-1])) if of_weight else None

        input_gradient = rows.mm(weight).view(x.shape) if of_x else None
        if torch.is_grad_enabled():  # these are differentiated again
            return None, input_gradient, *gradients()[::-1]
        nothing = gradient.new_zeros(())  # in place of what `_Later` computes
        if of_weight or of_bias:
            ctx.state.gradients, ctx.state.placeholder = gradients, nothing
        return (None, input_gradient, nothing.expand(weight.shape) if of_weight else None,
                nothing.expand(weight.shape[:1]) if of_bias else None)


def later(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Later:
    """The parameters of a linear layer, whose gradients backward computes where it comes to this call."""
    state = _State()
    made = _Later.apply(state, *(x for x in (bias, weight) if x is not None))
    return Later(state, made[-1], made[0] if bias is not None else None)


def linear(x: torch.Tensor, parameters: Later) -> torch.Tensor:
    """A linear layer. In backward, this computes the gradient of its input."""
    return _Linear.apply(parameters.state, x, parameters.weight, parameters.bias)


__all__ = ["Later", "later", "linear"]
