"""Backward in two parts gives the gradients that one backward gives, whatever a stage computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining._backward import stage_backward_weight

from autoparallel.runtime.pipeline import backward_of_inputs
from autoparallel.runtime.step import _Sent

Tensors = list[torch.Tensor]
Stage = Callable[[Tensors, Tensors], Tensors]
SIZE = 3


def tensors(count: int, seed: int, *, frozen: int = 0) -> Tensors:
    """``count`` leaves; the first ``frozen`` take no gradient."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, SIZE, generator=draw, dtype=torch.float64).requires_grad_(i >= frozen)
            for i in range(count)]


def assert_two_parts_are_one(stage: Stage, inputs: Tensors, weights: Tensors) -> list[int]:
    """Returns how many weights wait for the second part, by group."""
    outputs = stage(inputs, weights)
    output_grads = tensors(len(outputs), 3)
    leaves = [x for x in (*inputs, *weights) if x.requires_grad]
    used = [(o, g) for o, g in zip(outputs, output_grads, strict=True) if o.requires_grad]
    expected: tuple[torch.Tensor | None, ...] = ()
    if used:
        expected = torch.autograd.grad([o for o, _ in used], leaves, [g for _, g in used], allow_unused=True)
    sent = [_Sent.apply(o) for o in stage(inputs, weights)]
    found, groups = backward_of_inputs(sent, output_grads, inputs, weights)
    sizes = [len(group["params"]) for group in groups]
    stage_backward_weight(iter(weights), groups)
    got = [g for x, g in zip(inputs, found, strict=True) if x.requires_grad]
    got += [w.grad for w in weights if w.requires_grad]
    for one, other in zip(expected or [None] * len(got), got, strict=True):
        if one is None:
            assert other is None
        else:
            torch.testing.assert_close(other, one)
    return sizes


STAGES: dict[str, tuple[Stage, list[int]]] = {
    "each of a chain by itself": (lambda x, w: [torch.tanh(torch.tanh(x[0] @ w[0]) @ w[1])], [1, 1]),
    "two that meet the path in one place": (lambda x, w: [x[0] @ torch.tanh(w[0] @ w[1])], [2]),
    "one used twice": (lambda x, w: [torch.tanh(x[0] @ w[0]) @ w[0] @ w[1]], [1]),
    "one that meets no path": (lambda x, w: [x[0] @ w[0], torch.tanh(w[1])], [1]),
    "a branch of its own, joined in two places": (
        lambda x, w: [torch.tanh(x[0] @ torch.tanh(w[0] @ w[1])) @ torch.tanh(w[0] @ w[1])], []),
}


@pytest.mark.parametrize("name", STAGES)
def test_stages(name: str) -> None:
    stage, groups = STAGES[name]
    assert assert_two_parts_are_one(stage, tensors(1, 1), tensors(2, 2)) == groups


def test_without_inputs_that_take_gradients() -> None:
    assert assert_two_parts_are_one(lambda x, w: [x[0] @ w[0]], tensors(1, 1, frozen=1), tensors(1, 2)) == []


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_stage(data: st.DataObject) -> None:
    """Ops on any two earlier values; any of them are sent."""
    inputs = tensors(data.draw(st.integers(1, 3)), 1, frozen=data.draw(st.integers(0, 1)))
    weights = tensors(data.draw(st.integers(1, 5)), 2)
    ops: list[tuple[str, int, int]] = []
    for count in range(len(inputs) + len(weights), len(inputs) + len(weights) + data.draw(st.integers(1, 12))):
        pick = st.integers(0, count - 1)
        ops.append((data.draw(st.sampled_from(["add", "matmul", "tanh"])), data.draw(pick), data.draw(pick)))
    first = len(inputs) + len(weights)
    results = data.draw(st.lists(st.integers(first, first + len(ops) - 1), min_size=1, max_size=3, unique=True))

    def stage(x: Tensors, w: Tensors) -> Tensors:
        values = [*x, *w]
        for op, a, b in ops:
            values.append({"add": torch.add, "matmul": torch.matmul,
                           "tanh": lambda one, other: torch.tanh(one)}[op](values[a], values[b]))
        return [values[i] for i in results]

    assert_two_parts_are_one(stage, inputs, weights)
