"""Models whose communication overlaps with compute, and their steps on ranks."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import autoparallel
from tests.support.models import CASES
from tests.support.ranks import mesh_of
from tests.support.reference import gradients_of


class Calls(TorchDispatchMode):
    """Counts ops."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def backward_twice(mesh_shape: tuple[int, ...], bucket_bytes: int, micro_batches: int) -> tuple[int, int]:
    """On each rank: all-reduces of one backward, one by one and in buckets; the gradients are the same."""
    case = CASES["bert"]
    args, kwargs = case.inputs(8)
    model, found, counts = case.build(), [], []
    for size in (0, bucket_bytes):
        options: dict[str, Any] = {"micro_batches": micro_batches} if micro_batches else {}
        parallel = autoparallel.compile(copy.deepcopy(model), mesh_of(*mesh_shape), example_inputs=args,
                                        example_kwargs=kwargs, baseline="ddp", bucket_bytes=size, **options)
        if micro_batches:
            with Calls() as calls:
                parallel.step(*args, **kwargs)
        else:
            loss = case.loss(parallel(*args, **kwargs))
            with Calls() as calls:
                loss.backward()
        found.append(gradients_of(parallel))
        counts.append(calls.counts["all_reduce.default"] + calls.counts["all_reduce_.default"])
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6)
    return counts[0], counts[1]


POSTED = ("all_reduce_.default", "all_reduce.default", "all_gather_into_tensor_out.default",
          "reduce_scatter_tensor.default")


class Beside(TorchDispatchMode):
    """Counts matrix products that run while a collective is on its way, and while none is."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = self.beside = self.alone = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.pending += (func.__name__ in POSTED) - (func.__name__ == "wait_tensor.default")
        if func.__name__ in ("mm.default", "addmm.default", "bmm.default"):
            self.beside += self.pending > 0
            self.alone += self.pending == 0
        return func(*args, **(kwargs or {}))


def products_overlapped(mesh_shape: tuple[int, ...], bucket_bytes: int, options: dict[str, Any]
                    ) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of forward and backward: products beside a collective, and alone."""
    case = CASES["llama"]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(*mesh_shape), example_inputs=args, example_kwargs=kwargs,
                                    bucket_bytes=bucket_bytes, **options)
    with Beside() as forward:
        loss = case.loss(parallel(*args, **kwargs))
    with Beside() as backward:
        loss.backward()
    assert forward.pending == backward.pending == 0
    return (forward.beside, forward.alone), (backward.beside, backward.alone)


class Tied(torch.nn.Module):
    """A weight that is read twice, one that is frozen, one never used, and one under no_grad only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(20, 12), torch.nn.Linear(12, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.layers = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(5))
        self.layers[1].weight.requires_grad_(False)
        self.unused = torch.nn.Parameter(torch.randn(12))
        self.shift = torch.nn.Parameter(torch.randn(12))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        with torch.no_grad():
            shift = self.shift.sin()
        x = x + shift
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def two_steps(model: Any, calls: Beside | None) -> dict[str, torch.Tensor]:
    """Two steps of which the first adds to the second's gradients, clipped: losses, norm, gradients and parameters by
    name; a rank of a pipeline has the parameters of its stages."""
    ids = torch.arange(8 * 6).view(8, 6) % 19
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), {}
    for number in range(2):
        if calls is not None:
            with calls:
                found[f"loss {number}"] = model.step(ids, ids + 1)
        else:
            found[f"loss {number}"] = model(ids, ids + 1)
            found[f"loss {number}"].backward()
    clip = model.clip_grad_norm_ if calls else lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
    found["norm"] = clip(0.05)
    optimizer.step()
    for name, p in model.named_parameters():
        found |= {name: p.detach()} | ({} if p.grad is None else {f"gradient of {name}": p.grad})
    return {name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach() for name, x in found.items()}


def steps_on_ranks(mesh_shape: tuple[int, ...], options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int, int]:
    """What they make; products beside a collective, and alone."""
    ids = torch.arange(8 * 6).view(8, 6) % 19
    parallel = autoparallel.compile(Tied(), mesh_of(*mesh_shape), example_inputs=(ids, ids + 1), bucket_bytes=1000,
                                    **options)
    made = two_steps(parallel, calls := Beside())
    assert calls.pending == 0 or "backend" in options    # compiled graphs await by another op
    return made, calls.beside, calls.alone
