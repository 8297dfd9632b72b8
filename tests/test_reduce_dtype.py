"""reduce_dtype: gradients are summed over ranks in it, over micro-batches no worse than in it, and take its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import autoparallel
from autoparallel.errors import PlanError
from autoparallel.runtime.stage_module import StageModule
from cost_models import Cluster
from tests.support.models import CASES
from tests.support.ranks import mesh_of
from tests.support.reference import train_reference
from tests.support.tiers import slow

Options = Mapping[str, Any]
SUMS = ("all_reduce", "all_reduce_", "reduce_scatter_tensor")
CASE = "llama"


class SummedTypes(TorchDispatchMode):
    """The types of tensors of more than one element that ranks add up."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and func._opname in SUMS and args[0].numel() > 2:  # no loss and count
            self.found.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def one_step(mesh_shape: tuple[int, ...], dtype: torch.dtype, options: Options
             ) -> tuple[float, set[torch.dtype], set[torch.dtype]]:
    """Error of all gradients in 2-norm against one process in float32, types summed in, types of the gradients."""
    case = CASES[CASE]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build().to(dtype), mesh_of(*mesh_shape), example_inputs=args,
                                    example_kwargs=kwargs, **options)
    with SummedTypes() as summed:
        if parallel.plan.hybrid.is_plain:
            case.loss(parallel(*args, **kwargs)).backward()
        else:
            parallel.step(*args, **kwargs)
    exact = train_reference(case, "sgd", num_steps=1).gradients
    mine = {n: p.grad.full_tensor().double() for n, p in parallel.named_parameters() if p.grad is not None}
    wrong = sum(float((mine[n] - exact[n].double()).square().sum()) for n in mine)
    return ((wrong / sum(float(exact[n].double().square().sum()) for n in mine)) ** 0.5, summed.found,
            {p.grad.dtype for p in parallel.parameters() if p.grad is not None})


WAYS: list[tuple[tuple[int, ...], Options]] = [
    ((4,), {"baseline": "fsdp", "zero_stage": 2, "micro_batches": 4}),
    ((2, 2), {"pipeline_stages": 2, "micro_batches": 4, "baseline": "ddp", "cluster": "a100-sxm"}),
]


MORE_WAYS: list[tuple[tuple[int, ...], Options]] = [
    ((4,), {"baseline": "ddp"}),
    ((4,), {"baseline": "fsdp", "zero_stage": 1, "micro_batches": 4}),
    ((4,), {"baseline": "fsdp"}),
    ((4,), {"baseline": "fsdp", "zero_stage": 3}),
    ((4,), {"baseline": "fsdp", "zero_stage": 3, "micro_batches": 4}),
]


@pytest.mark.parametrize(("mesh_shape", "options"),
                         [*WAYS, *(pytest.param(*way, marks=pytest.mark.slow) for way in MORE_WAYS)])
def test_bfloat16_gradients_are_summed_in_float32(ranks: Any, mesh_shape: tuple[int, ...], options: Options) -> None:
    both = [ranks(4).run(one_step, mesh_shape, torch.bfloat16, {**options, "reduce_dtype": dtype}, timeout_s=100)
            for dtype in (None, "float32")]
    for (own, own_types, _), (error, types, grads) in zip(*both, strict=True):
        assert torch.bfloat16 in own_types and types == {torch.float32} and grads == {torch.bfloat16}
        assert error < 1.02 * own < 0.1


def test_float32_gradients_may_be_summed_in_bfloat16(ranks: Any) -> None:
    for error, types, grads in ranks(4).run(one_step, (4,), torch.float32,
                                            {"baseline": "ddp", "reduce_dtype": "bfloat16"}, timeout_s=100):
        assert types == {torch.bfloat16} and grads == {torch.float32} and 1e-5 < error < 0.02


def types_of_a_call(options: Options) -> set[torch.dtype]:
    """Types that a call and its backward sum in, where steps have several micro-batches."""
    case = CASES[CASE]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build().bfloat16(), mesh_of(4), example_inputs=args, example_kwargs=kwargs,
                                    **options)
    with SummedTypes() as summed:
        case.loss(parallel(*args, **kwargs)).backward()
    return summed.found


def test_calls_and_steps_of_micro_batches_sum_in_reduce_dtype(ranks: Any) -> None:
    options = {"baseline": "fsdp", "zero_stage": 2, "micro_batches": 4, "reduce_dtype": "float32"}
    assert ranks(4).run(types_of_a_call, options, timeout_s=100) == [{torch.float32}] * 4


def summed_bytes(mesh_shape: tuple[int, ...], options: Options) -> tuple[int, float]:
    """Bytes that sums of gradients take during a step, and by how much more a plan expects than without them."""
    case = CASES[CASE]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build().bfloat16(), mesh_of(*mesh_shape), example_inputs=args,
                                    example_kwargs=kwargs, reduce_dtype="float32", **options)
    most, forward = 0, StageModule.forward

    def counted(module: StageModule, *received: torch.Tensor, micro_batch: int) -> tuple[torch.Tensor, ...]:
        nonlocal most
        leaves = [*module.leaves, *(leaf for _, leaf in module.parameters_read)]
        most = max(most, sum(x.grad.numel() * x.grad.element_size() for x in leaves if x.grad is not None))
        return forward(module, *received, micro_batch=micro_batch)

    StageModule.forward = counted  # type: ignore[method-assign, assignment]
    try:
        parallel.step(*args, **kwargs)
    finally:
        StageModule.forward = forward  # type: ignore[method-assign]
    predicted = parallel.plan.prediction
    return most, predicted.peak_bytes


@pytest.mark.parametrize("zero_stage", [slow(1), slow(2), 3])
def test_their_bytes_are_counted(ranks: Any, zero_stage: int) -> None:
    """With one type for all, the gradient of a whole parameter is one of two copies, of two bytes for an element."""
    options = {"baseline": "fsdp", "zero_stage": zero_stage, "micro_batches": 2}
    case = CASES[CASE]
    args, kwargs = case.inputs(8)
    plain = autoparallel.plan(case.build().bfloat16(), Cluster.load("local-cpu", num_devices=4), example_inputs=args,
                              example_kwargs=kwargs, mesh_shape=(4,), **options)
    found = ranks(4).run(summed_bytes, (4,), options, timeout_s=100)
    most = max(taken for taken, _ in found)
    before = most / 2 if zero_stage == 1 else 0
    assert found[0][1] - plain.prediction.peak_bytes == pytest.approx(most - before, rel=0.05)


@pytest.mark.slow
def test_sums_of_more_bytes_take_longer() -> None:
    case = CASES[CASE]
    args, kwargs = case.inputs(8)

    def seconds(dtype: str | None) -> float:
        made = autoparallel.plan(case.build().bfloat16(), Cluster.load("h100-sxm", num_devices=8), example_inputs=args,
                                 example_kwargs=kwargs, mesh_shape=(8,), baseline="ddp", reduce_dtype=dtype)
        assert made.prediction.added_s - made.prediction.waiting_s == pytest.approx(made.evidence.objective_s)
        assert ("gradients summed in" in made.report()) == (dtype is not None)
        return made.prediction.backward_communication_s

    assert seconds("bfloat16") == seconds(None) < seconds("float32")


def test_other_types_are_refused() -> None:
    with pytest.raises(PlanError, match="unknown reduce_dtype 'int8'; there are"):
        autoparallel.plan(torch.nn.Linear(8, 8), "local-cpu", example_inputs=(torch.zeros(4, 8),), reduce_dtype="int8")
