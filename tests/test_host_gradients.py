"""Gradients in the memory of the host: to the bit those of a run that keeps them on the device, in all their uses."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import autoparallel
from autoparallel.errors import InputError
from autoparallel.runtime.offload.gradients import HostGradients
from autoparallel.schedule.tiers import Offload
from tests.support.models import CASES
from tests.support.offloaded import Net, Options, differing, local, same, trained
from tests.support.ranks import mesh_of
from tests.support.reference import Trained, assert_same_parameters, train_reference
from tests.support.tiers import slow


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "shape", "options", "norm", "calls"), [
    slow("gpt2", (4,), {"zero_stage": 2}, 0.5, 1), slow("llama", (4,), {"zero_stage": 2}, 0.5, 1),
    ("llama", (2, 2), {"zero_stage": 3, "micro_batches": 4, "recompute": "full"}, 0.5, 2),
    ("gpt2", (2, 2), {"pipeline_stages": 2, "micro_batches": 4, "zero_stage": 2}, 0.5, 1),
    slow("gpt2", (2, 2), {"pipeline_stages": 2, "micro_batches": 4, "zero_stage": 2, "schedule": "zero_bubble"},
         1.0, 2),
    slow("gpt2", (4,), {"zero_stage": 1, "micro_batches": 2}, None, 2),
    slow("bert", (4,), {"zero_stage": 0}, None, 1),
    slow("bert", (2, 2), {"zero_stage": 3, "backend": "aot_eager"}, 0.1, 2),
    slow("mixtral", (4,), {"zero_stage": 3}, 0.5, 1),
    slow("bert", (2, 2), {"zero_stage": 2, "micro_batches": 8, "reduce_dtype": "float32"}, None, 1),
])
def test_gradients_states_and_parameters_are_those_of_device_memory(
        ranks: Any, case: str, shape: tuple[int, ...], options: Options, norm: float | None, calls: int) -> None:
    """To the bit; losses and parameters are those of one process."""
    pool = ranks(4)
    kept = pool.run(trained, case, shape, options, "none", norm, calls, timeout_s=200)
    moved = pool.run(trained, case, shape, options, "host", norm, calls, timeout_s=200)
    for before, after in zip(kept, moved, strict=True):
        assert differing(after, before) == []
        assert after["bytes"] == sum(g.nbytes for g in after["gradients"][0] if g is not None) > 0
    if norm is None and calls == 1:
        expected = train_reference(CASES[case], "adamw", num_steps=3, batch_size=8)
        everything = Trained(0, [], {}, expected.parameters | moved[0]["whole"], {})
        assert moved[0]["losses"][:3] == pytest.approx(expected.losses, rel=1e-5)
        assert_same_parameters(everything.parameters, expected, 1e-4)


def compiled(tier: str, **options: Any) -> Any:
    mesh = mesh_of(dist.get_world_size())
    return autoparallel.compile(Net(), mesh, example_inputs=(torch.ones(8, 8),), offload=tier, **options)


def hooked(tier: str, micro_batches: int) -> list[Any]:
    """What hooks of the user's see, with gradients of two calls; and what an own backward leaves."""
    parallel = compiled(tier, zero_stage=2, micro_batches=micro_batches)
    seen: list[Tensor] = []
    weight = parallel.get_parameter("a.weight")
    weight.register_hook(lambda gradient: gradient * 2)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(local(p.grad)))
    for _ in range(2):
        parallel.step(torch.full((8, 8), 0.5))
    parallel.b.weight.requires_grad_(False)
    kept = parallel.b.weight.grad
    if micro_batches == 1:
        parallel(torch.full((8, 8), 0.25)).backward()
        torch.autograd.grad(parallel(torch.ones(8, 8)), [weight])
    else:
        parallel.step(torch.full((8, 8), 0.25))
    assert parallel.b.weight.grad is kept
    parallel.b.weight.requires_grad_(True)
    return [*map(local, (p.grad for p in parallel.parameters())), *seen[:1]]


@pytest.mark.ranks
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_hooks_and_own_backwards(ranks: Any, micro_batches: int) -> None:
    kept, moved = (ranks(2).run(hooked, tier, micro_batches) for tier in ("none", "host"))
    assert same(moved, kept)


class _Order(TorchDispatchMode):
    """Notes the products that run."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func):
            self.seen.append("product")
        return func(*args, **(kwargs or {}))


def order() -> list[str]:
    """Of a backward: its products, and gradients that go to the host."""
    parallel, seen, take = compiled("host", zero_stage=0), list[str](), HostGradients.take

    def taken(*given: Any, **more: Any) -> Tensor:
        seen.append("gradient")
        return take(*given, **more)

    loss = parallel(torch.ones(8, 8))
    with patch.object(HostGradients, "take", taken), _Order(seen):
        loss.backward()
    return seen


@pytest.mark.ranks
def test_gradients_leave_the_device_as_they_come(ranks: Any) -> None:
    """Those of the last layer before the products of the first, where they stay whole. (Seen on an H200: all stayed to
    backward's end.) Shards of reduced ones leave once their reductions are awaited, at its end."""
    for seen in ranks(1).run(order):
        assert seen.count("gradient") == 4 and seen.count("product") >= 3
        assert "gradient" in seen[:len(seen) - seen[::-1].index("product")], seen


def refused() -> list[str]:
    parallel = compiled("host")
    with pytest.raises(InputError) as graph:
        parallel(torch.ones(8, 8)).backward(create_graph=True)
    limited = compiled("host", host_memory_limit_bytes=4000)
    with pytest.raises(InputError) as limit:
        limited.optimizer(torch.optim.AdamW)
    parallel.step(torch.ones(8, 8))
    for parameter in parallel.parameters():    # as if the parameters were on an accelerator
        parameter.grad._local_tensor = parameter.grad._local_tensor.to("meta")
    scaler, optimizer = torch.amp.GradScaler("cpu"), parallel.optimizer(torch.optim.AdamW)
    scaler.scale(torch.ones(()))
    with pytest.raises(InputError) as scaled:
        scaler.unscale_(optimizer)
    return [str(graph.value), str(limit.value), str(scaled.value)]


@pytest.mark.ranks
def test_what_is_refused(ranks: Any) -> None:
    for graph, limit, scaled in ranks(2).run(refused):
        assert "gradient scaling is on the device" in scaled and "bfloat16" in scaled
        assert "backward(create_graph=True)" in graph and "offload='none'" in graph
        assert "gradients and optimizer states need" in limit


def test_no_more_than_the_cap_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes more waits; one gradient that is larger goes alone; errors of a copy are raised."""
    moving, most = HostGradients(torch.device("cpu"), 100.0, Offload("host")), 0
    for size in (5, 10, 12, 30, 1):
        gradient = torch.full((size,), float(size))
        made = moving.take(gradient)
        most = max(most, moving._moving_bytes)
        moving.take(gradient, made)
        moving.wait()
        assert torch.equal(made, 2 * gradient)
    assert 0 < most <= 120 and moving._moving_bytes == 0
    for _ in range(20):
        moving.take(torch.ones(10))
        assert moving._moving_bytes <= 100
    moving.take(torch.ones(3), torch.ones(4))
    with pytest.raises(RuntimeError, match="size"):
        moving.wait()
    moving.close()
