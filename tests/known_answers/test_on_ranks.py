"""Alpa counts collectives of its compiled program, gradients in one: so do we here, of what four ranks really send."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import autoparallel
from autoparallel import Plan
from tests.known_answers.machines import NO_REDUCE_SCATTER, alternating, planned
from tests.known_answers.models import Convolutions, WithLoss, bert, mlp
from tests.support.ranks import mesh_of

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class Sent(TorchDispatchMode):
    """Counts collectives of more than one number."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = next((kind for kind in KINDS if func.__name__.startswith(kind)), None)
        if kind is not None:
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            if max(tensor.numel() for tensor in tensors) > 1:
                self.counts[kind] += 1
        return func(*args, **(kwargs or {}))


def model_of(name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    if name == "mlp":
        return mlp(6, 32), (torch.randn(256, 32), torch.randn(256, 32))
    if name == "two layers":
        return mlp(2, 16, relu=False), (torch.randn(256, 16), torch.randn(256, 16))
    if name == "four layers":
        return mlp(4, 16), (torch.randn(64, 16), torch.randn(64, 16))
    if name == "bert":
        return bert(2, 32, 8), (torch.randn(64, 64, 32), torch.randn(64, 64, 32))
    if name == "dropout":
        layers = (torch.nn.Linear(16, 16, bias=False), torch.nn.Dropout(0.1), torch.nn.Linear(16, 16, bias=False))
        return WithLoss(torch.nn.Sequential(*layers)), (torch.randn(32, 32, 16), torch.randn(32, 32, 16))
    return WithLoss(Convolutions(3, 4)), (torch.randn(16, 4, 16, 16), torch.randn(16, 4, 2, 2))


def sent(name: str, plan: Plan) -> dict[str, int]:
    """By one step of the plan, on each rank."""
    model, inputs = model_of(name)
    shape = plan.mesh_shape if plan.hybrid.stages == 1 else (plan.hybrid.stages, *plan.mesh_shape)
    parallel = autoparallel.compile(model, mesh_of(*shape), example_inputs=inputs, plan=plan)
    with Sent() as found:
        if plan.hybrid.micro_batches > 1:
            parallel.step(*inputs)
        else:
            parallel(*inputs).backward()
    return dict(found.counts)


#: Model, mesh, options; what each rank sends, and what Alpa's program does where that is something else.
STEPS: list[Any] = [
    pytest.param("mlp", (4,), {"baseline": "ddp"}, {"all_reduce": 1}, "", marks=pytest.mark.slow),
    ("mlp", (2, 2), {"baseline": "ddp"}, {"all_reduce": 1}, ""),
    ("mlp", (4,), {"baseline": "fsdp"}, {"all_gather": 1, "reduce_scatter": 1}, ""),
    ("mlp", (2, 2), {"pins": alternating(6), "slowdown": NO_REDUCE_SCATTER}, {"all_reduce": 5 + 1}, ""),
    pytest.param("bert", (4,), {"baseline": "ddp"}, {"all_reduce": 1}, "", marks=pytest.mark.slow),
    ("bert", (4,), {"baseline": "tensor_parallel"}, {"all_reduce": 4 * 2 - 1}, ""),
    ("dropout", (4,), {"baseline": "ddp"}, {"all_reduce": 1}, ""),
    pytest.param("convolutions", (4,), {"baseline": "ddp"}, {"all_reduce": 1 + 4 * 3},
                 "1 + 2 * 3: mean and variance in one", marks=pytest.mark.slow),
    pytest.param("two layers", (4,), {"baseline": "ddp", "micro_batches": 2}, {"all_reduce": 1}, "",
                 marks=pytest.mark.slow),
    ("two layers", (4,), {"baseline": "fsdp", "micro_batches": 2, "zero_stage": 1},
     {"all_gather": 1, "reduce_scatter": 1}, ""),
    pytest.param("four layers", (2, 2), {"baseline": "ddp", "micro_batches": 2, "pipeline_stages": 2},
                 {"all_reduce": 1}, "", marks=pytest.mark.slow),
    ("four layers", (2, 2), {"baseline": "fsdp", "micro_batches": 2, "pipeline_stages": 2, "zero_stage": 1},
     {"all_gather": 1, "reduce_scatter": 1}, ""),
]


@pytest.mark.parametrize(("name", "mesh_shape", "options", "expected", "elsewhere"), STEPS)
def test_collectives_of_a_step(ranks: Any, name: str, mesh_shape: tuple[int, ...], options: dict[str, Any],
                               expected: dict[str, int], elsewhere: str) -> None:
    """In turns as in one, once a step; in a pipeline, on each stage."""
    model, inputs = model_of(name)
    made = planned(model, inputs, mesh_shape, **options)
    assert ranks(4).run(sent, name, made, timeout_s=100) == [expected] * 4, elsewhere
