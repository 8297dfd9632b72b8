"""Rules found by running: what nobody described is cut where that is right, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoparallel.capture import capture
from autoparallel.rules.registry import find_rule
from tests.support.tiers import slow


def function(forward: Any, backward: Any = None) -> Any:
    """A torch.autograd.Function of tensors; without a backward its gradient is that of the forward."""
    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Any:
            ctx.save_for_backward(*tensors)
            return forward(*tensors)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            if backward is not None:
                return backward(*ctx.saved_tensors, *gradients)
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
                made = forward(*leaves)
                made = made if isinstance(made, tuple) else (made,)
                return torch.autograd.grad(made, leaves, gradients)

    return Made


def found_for(op: Any, *shapes: tuple[int, ...]) -> dict[str, str]:
    """What was found besides repeating: the placements of the axis strategies."""
    class Model(nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            return op.apply(*tensors)

    graph = capture(Model(), tuple(torch.zeros(s, requires_grad=not torch.is_inference_mode_enabled()) for s in shapes))
    (node,) = (n for n in graph.of_kind("op") if "Made" in n.op_name)
    rule, known = find_rule(graph, node)
    found = {" ".join(map(str, s.inputs)): " ".join(map(str, s.outputs)) for s in rule.axis_strategies()[2:]}
    assert known == bool(found)
    return found


ROUND = function(lambda x: x.round(), lambda x, g: g)


@pytest.mark.parametrize(("op", "shapes", "expected"), [
    (ROUND, [(6, 5)], {"S(0)": "S(0)", "S(1)": "S(1)"}),
    (function(lambda x: 3 * x), [(6, 5)], {"S(0)": "S(0)", "S(1)": "S(1)", "P": "P"}),
    (function(lambda x: x.softmax(-1)), [(6, 5)], {"S(0)": "S(0)"}),
    (function(lambda x: x.sum(1)), [(6, 5)], {"S(0)": "S(0)", "S(1)": "P", "P": "P"}),
    (function(lambda x, w: x @ w.T), [(6, 5), (8, 5)],
     {"S(0) R": "S(0)", "S(1) S(1)": "P", "R S(0)": "S(1)", "P R": "P", "R P": "P"}),
    (function(lambda x, y: (x * y, x + y)), [(6, 5), (6, 5)],
     {"S(0) S(0)": "S(0) S(0)", "S(1) S(1)": "S(1) S(1)"}),
    (function(lambda x: x.nan_to_num()), [(6, 5)], {"S(0)": "S(0)", "S(1)": "S(1)"}),  # linear in numbers
    (function(lambda x, y: x * 2, lambda x, y, g: (g + y, None)), [(6, 5), (6, 5)],  # whose backward reads y as well
     {"S(0) S(0)": "S(0)", "S(1) S(1)": "S(1)", "P R": "P"}),
    (function(lambda x: x > 0), [(6, 5)], {"S(0)": "S(0)", "S(1)": "S(1)"}),
    (function(lambda x: x.abs()), [(6, 5)], {"S(0)": "S(0)", "S(1)": "S(1)"}),  # shares of it add up
    (function(lambda x: x / x.abs().max()), [(6, 5)], {}),  # which looks at everything
    (function(lambda x: x, lambda x, g: g / g.norm()), [(6, 5)], {"P": "P"}),  # and so does its backward
    (function(lambda x: x * (torch.arange(x.shape[1]) < 20)), [(6, 40)], {"S(0)": "S(0)", "P": "P"}),  # by position
    slow(function(lambda x: 3 * x), [(6, 1 << 25)], {"S(0)": "S(0)", "P": "P"}),  # too long to try
    (function(lambda x: x + torch.rand_like(x)), [(6, 5)], {}),  # draws numbers
    (function(lambda x: x.view(2, 3, 5).sum(1)), [(6, 5)], {"P": "P"}),  # runs on no other sizes
    (function(lambda x: x.view(x.shape[0], 2, 3).sum(1)), [(8, 6)], {"S(0)": "S(0)", "P": "P"}),
    (function(lambda x: x.view(-1, 64).softmax(1).view(x.shape)), [(256,)], {"S(0)": "S(0)"}),  # whole rows of 64
])
def test_rules_are_found_by_running(op: Any, shapes: list[tuple[int, ...]], expected: dict[str, str]) -> None:
    assert found_for(op, *shapes) == expected


def test_halves_are_cut_evenly_only() -> None:
    """An op that runs on even sizes only: whoever cuts it must leave even shards, or not cut that dim."""
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(lambda x: torch.cat([-x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]], 1)
                            if x.shape[1] % 2 == 0 else x.new_zeros(()).view(2)).apply(x)

    graph = capture(Model(), (torch.zeros(16, 8, requires_grad=True),))
    (node,) = (n for n in graph.of_kind("op") if "Made" in n.op_name)
    rule, _ = find_rule(graph, node)
    assert {(s.name, s.even) for s in rule.variants} == {("S(0)", (16,)), ("linear(0)", ())}


def test_an_op_of_its_own_sizes_is_cut_into_what_was_tried() -> None:
    """Whole rows of 64 of 256 are four shards at most, though more would divide it; a length of 17 is not tried."""
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(lambda x: x.view(-1, 64, 17).softmax(1).view(x.shape)).apply(x)

    graph = capture(Model(), (torch.zeros(256, 17, requires_grad=True),))
    (node,) = (n for n in graph.of_kind("op") if "Made" in n.op_name)
    assert [(s.name, s.even) for s in find_rule(graph, node)[0].variants] == [("S(0)", (4,))]


def test_an_op_without_a_derivative() -> None:
    """What cannot be trained through may still be cut."""
    @torch.library.custom_op("tests::halves", mutates_args=())
    def halves(x: Tensor) -> Tensor:
        return x / 2

    halves.register_fake(torch.empty_like)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.ops.tests.halves(x)

    graph = capture(Model(), (torch.zeros(6, 5),))
    (node,) = (n for n in graph.of_kind("op") if "halves" in n.op_name)
    assert {s.name for s in find_rule(graph, node)[0].variants} == {"S(0)", "S(1)", "linear(0)"}


def test_rules_are_found_without_gradients_too() -> None:
    """Whether gradients are on when a model is planned has no say in what its ops allow."""
    with torch.no_grad():
        assert found_for(function(lambda x: x, lambda x, g: g / g.norm()), (4, 5)) == {"P": "P"}
    with torch.inference_mode():
        assert found_for(function(lambda x: x.cos()), (4, 5)) == {"S(0)": "S(0)", "S(1)": "S(1)"}
