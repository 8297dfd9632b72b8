"""Backward in two parts gives the gradients that one backward gives, whatever a stage computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining._backward import stage_backward_weight
from torch.distributed.pipelining.schedules import _Action

from autoparallel.kernels.recomputed import Recomputed
from autoparallel.runtime.pipeline import backward_of_inputs, received_by
from autoparallel.runtime.stage_module import _Sent

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


@settings(max_examples=200)
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


def test_a_block_is_recomputed_once_for_both_parts_of_backward() -> None:
    """And not for each group of weights, which torch's checkpoint would do."""
    torch.manual_seed(0)
    body = torch.fx.symbolic_trace(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)), torch.nn.SiLU()))
    weights, runs = list(body.parameters()), 0

    def counted(module: torch.nn.Module, args: object) -> None:
        nonlocal runs
        runs += 1

    body.register_forward_pre_hook(counted)
    x = torch.randn(2, 4, requires_grad=True)
    expected = torch.autograd.grad(body(x).square().sum(), [x, *weights])
    runs = 0
    loss = Recomputed(body, "full", in_parts=True)(x).square().sum()
    (of_input,), groups = backward_of_inputs([loss], None, [x], weights)
    assert len(groups) == 3 and runs == 2
    stage_backward_weight(iter(weights), groups)
    assert runs == 2
    assert of_input is not None
    torch.testing.assert_close([of_input, *(w.grad for w in weights)], list(expected))


def test_sent_tensors_are_freed_once_received() -> None:
    """Which the sender knows from what was sent after that: to wait for anything else might be for ever."""
    orders = {
        0: ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0F2", "0SEND_F2", "0RECV_B1", "0B1", "0B2"],
        1: ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1RECV_F2", "1B1", "1SEND_B1", "1F2"],
    }
    order = {rank: [_Action.from_str(action) for action in actions] for rank, actions in orders.items()}
    done = {what: sends for what, sends in received_by(order, 0).items() if sends}
    assert done == {("B", 0, 0): [("SEND_F", 0, 0)], ("B", 0, 1): [("SEND_F", 0, 1), ("SEND_F", 0, 2)]}
    assert received_by(order, 1)["F", 1, 2] == [("SEND_B", 1, 0)]
