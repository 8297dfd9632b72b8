"""Hooks of parameters are called once a step, with the whole gradient, whatever plan the step runs by."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

import autoparallel
from autoparallel.errors import StageError
from tests.support.overlapped import Tied
from tests.support.ranks import mesh_of
from tests.support.reference import gathered

Seen = list[tuple[str, torch.Tensor]]


def seen_by_hooks(mesh_shape: tuple[int, ...], options: dict[str, Any]) -> Seen:
    """What hooks of parameters get in two steps, of which the second adds to the gradients of the first and doubles its
    own; by step, kind of hook and name. Without a mesh of one process."""
    ids = torch.arange(8 * 6).view(8, 6) % 19
    model: Any = Tied()
    if mesh_shape:
        model = autoparallel.compile(model, mesh_of(*mesh_shape), example_inputs=(ids, ids + 1), **options)
    seen, parameters = Seen(), dict(model.named_parameters())

    def note(name: str, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            seen.append((name, gradient.clone()))

    for name, parameter in parameters.items():
        if parameter.requires_grad:
            parameter.register_hook(partial(note, f"gradient of {name}"))
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: note(f"sum of {name}", p.grad))
    for number in range(2):
        if number == 1:
            for parameter in filter(lambda p: p.requires_grad, parameters.values()):
                parameter.register_hook(lambda gradient: None if gradient is None else 2 * gradient)
        if mesh_shape:
            model.step(ids, ids + 1)
        else:
            model(ids, ids + 1).backward()
        seen = Seen((name if name.startswith("step") else f"step {number}: {name}", x) for name, x in seen)
    seen.sort(key=lambda pair: pair[0])
    seen += [(f"gradient of {name} at last", p.grad) for name, p in parameters.items() if p.grad is not None]
    return [(name, x) for n, x in seen for name, x in gathered([(n, x)]).items()]


@pytest.mark.parametrize(("mesh_shape", "options"), [
    ((2,), {"baseline": "fsdp", "zero_stage": 2, "micro_batches": 4}),
    ((2,), {"baseline": "ddp", "pipeline_stages": 2, "micro_batches": 4}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ((4,), {"baseline": "fsdp", "zero_stage": 3, "micro_batches": 2}),
        ((2, 2), {"baseline": "fsdp", "zero_stage": 3, "micro_batches": 4, "reduce_dtype": "float32"}),
        ((4,), {"baseline": "fsdp", "zero_stage": 1, "micro_batches": 4}),
        ((2, 2), {"baseline": "fsdp", "zero_stage": 3}),
        ((2, 2), {"baseline": "fsdp", "zero_stage": 2, "pipeline_stages": 2, "micro_batches": 4}),
        ((3, 2), {"baseline": "ddp", "micro_batches": 4, "stage_replicas": (1, 2)}),
        ((2, 2), {"baseline": "ddp", "micro_batches": 4, "pipeline_stages": 4, "schedule": "zero_bubble"}),
    ]),
])
def test_hooks_of_parameters_are_called_once_a_step(ranks: Any, mesh_shape: tuple[int, ...], options: dict[str, Any]
                                                   ) -> None:
    expected = dict(seen_by_hooks((), {}))
    assert any("sum of embedding" in name for name in expected)
    names = set[str]()
    for found in ranks(math.prod(mesh_shape)).run(seen_by_hooks, mesh_shape, options, timeout_s=100):
        assert len(dict(found)) == len(found)
        for name, x in found:
            torch.testing.assert_close(x, expected[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        names |= set(dict(found))
    assert names == set(expected)


class Ends(torch.nn.Module):
    """Its first and last parameter are of two pipeline stages, the last one of the root itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x).tanh() @ self.last).square().mean()


def asked_of_other_stages() -> tuple[list[str], list[str]]:
    """What asking for each parameter of a pipeline by attribute, and by name, raises; and what a copy has."""
    x, said = torch.ones(4, 8), list[str]()
    parallel: Any = autoparallel.compile(Ends(), mesh_of(2), pipeline_stages=2, micro_batches=2, example_inputs=(x,))
    for one in (parallel, copy.deepcopy(parallel)):
        for ask in (lambda one: one.first.weight, lambda one: one.get_parameter("first.weight"), lambda one: one.last,
                    lambda one: one.get_parameter("last")):
            try:
                assert isinstance(ask(one), DTensor)
            except StageError as error:
                said.append(str(error).split(" is a parameter of another pipeline stage")[0])
    assert hasattr(parallel, "last") != hasattr(parallel.first, "weight") == hasattr(parallel.first, "bias")
    assert not hasattr(parallel.first, "odd") and "first" in repr(parallel)
    with pytest.raises(AttributeError, match="odd"):
        parallel.get_parameter("first.odd")
    parallel.step(x)
    return said, sorted(parallel.state_dict())


def test_parameters_of_other_stages_are_refused_by_name(ranks: Any) -> None:
    """And not the untrained ones of the original, which a hook or an optimizer would take without effect."""
    (first, has_first), (second, has_second) = ranks(2).run(asked_of_other_stages, timeout_s=100)
    assert {*map(frozenset, (first, second))} == {frozenset({"last"}), frozenset({"first.weight"})}
    assert len(first) == len(second) == 4
    assert sorted(has_first + has_second) == ["first.bias", "first.weight", "last"]


def hooked_before() -> list[float]:
    """A hook of each parameter, set before the model is compiled; what `step` makes of the gradients."""
    model, x = Ends(), torch.ones(4, 8)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 3 * gradient)
    parallel: Any = autoparallel.compile(model, mesh_of(2), pipeline_stages=2, micro_batches=2, example_inputs=(x,))
    parallel.step(x)
    plain: Any = Ends()
    plain(x).backward()
    return [float((p.grad.full_tensor() / plain.get_parameter(name).grad).mean())
            for name, p in parallel.named_parameters()]


def test_hooks_that_are_set_before_compile_are_on_every_stage(ranks: Any) -> None:
    for found in ranks(2).run(hooked_before, timeout_s=100):
        assert found == pytest.approx([3.0] * len(found)) and found


def test_flops_are_counted_of_the_call_and_not_of_its_trace(mesh_of_one: Any) -> None:
    """FlopCounterMode sets hooks of all modules, and of values, which a trace cannot have."""
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(8, 4)
    counts = []
    for called in (model, autoparallel.compile(model, mesh_of_one)):
        with FlopCounterMode(display=False) as counted:
            called(x)
        counts.append(counted.get_total_flops())
    assert counts[0] == counts[1] == 2 * 8 * 4 * 4
