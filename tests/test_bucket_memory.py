"""Memory of gradient buckets on CPU ranks: kept from step to step, never taken from a gradient that is held."""

from __future__ import annotations

from typing import Any

import torch

import autoparallel
from autoparallel.kernels.bucket_memory import BucketMemory
from tests.support.ranks import mesh_of


def test_memory_is_taken_again_when_nobody_holds_it() -> None:
    memory, parts = BucketMemory(), [torch.ones(2, 3), torch.zeros(4)]
    first = memory.joined(parts)
    assert first.tolist() == [1.0] * 6 + [0.0] * 4
    place, view = first.data_ptr(), first[:2].view(2)
    del first
    second = memory.joined([part + 1 for part in parts])
    assert second.data_ptr() != place and view.tolist() == [1.0, 1.0]  # a view holds it
    del view
    third = memory.joined(parts)
    assert third.data_ptr() == place and second.tolist() == [2.0] * 6 + [1.0] * 4
    assert memory.joined([torch.ones(10, dtype=torch.float64)]).dtype == torch.float64


def test_a_bucket_on_its_way_holds_its_memory() -> None:
    """Another one of the same size has other memory, though no gradient is a view of the first yet."""
    memory = BucketMemory()
    first = memory.joined([torch.ones(2), torch.ones(3)])
    second = memory.joined([torch.zeros(2), torch.zeros(3)])
    assert first.tolist() == [1.0] * 5 and second.tolist() == [0.0] * 5


def equal_layers() -> float:
    """How far the gradients are from one process's (largest difference over largest gradient), in equal buckets."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(6)))
    x = torch.randn(8, 16)
    model(x).square().sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    parallel: Any = autoparallel.compile(model, mesh_of(2), example_inputs=(x,), baseline="ddp",
                                         bucket_bytes=4 * (16 * 16 + 16))
    parallel(x).square().sum().backward()
    return max(float((parameter.grad.full_tensor() - expected[name]).abs().max() / expected[name].abs().max())
               for name, parameter in parallel.named_parameters())


def test_equal_buckets_that_are_on_their_way_at_once(ranks: Any) -> None:
    assert all(error < 1e-5 for error in ranks(2).run(equal_layers, timeout_s=100))


def test_memory_of_other_sizes_is_let_go() -> None:
    memory = BucketMemory()
    for count in (3, 5, 7):
        memory.joined([torch.ones(count)])
    assert [kept.numel() for kept in memory._kept] == [7]


def stepped() -> tuple[bool, bool]:
    """Whether gradients that are accumulated over calls, and held over steps, are one process's; whether memory is
    taken again."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    x = torch.randn(8, 8)
    parallel: Any = autoparallel.compile(model, mesh_of(4), example_inputs=(x,), baseline="ddp")
    right, places, held = True, [], []
    for step in range(4):
        parallel.zero_grad()
        model.zero_grad()
        for scale in (1.0, 2.0):  # accumulated
            (parallel(x).square().mean() * scale).backward()
            (model(x).square().mean() * scale).backward()
        own = [parameter.grad.full_tensor() for parameter in parallel.parameters()]
        right &= all(map(torch.allclose, own, (parameter.grad for parameter in model.parameters())))
        if step == 1:
            held = [(gradient, gradient.clone()) for gradient in own]
        places.append(next(parallel.parameters()).grad.to_local().data_ptr())
    right &= all(torch.equal(gradient, then) for gradient, then in held)
    return right, len(set(places)) < len(places)


def test_gradients_that_are_held_stay_as_they_are(ranks: Any) -> None:
    for right, again in ranks(4).run(stepped, timeout_s=100):
        assert right and again
