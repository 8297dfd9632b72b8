"""Gradients are reduced in buckets: fewer collectives, the same numbers."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import autoparallel
from autoparallel.lower import fuse
from tests.models import CASES
from tests.ranks import mesh_of
from tests.reference import gradients_of


class Calls(TorchDispatchMode):
    """Counts ops."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def backward_twice(mesh_shape: tuple[int, ...], bucket_bytes: int, turns: int) -> tuple[int, int]:
    """On each rank: all-reduces of one backward, one by one and in buckets; the gradients are the same."""
    case = CASES["bert"]
    args, kwargs = case.inputs(8)
    model, found, counts = case.build(), [], []
    for size in (0, bucket_bytes):
        fuse.BUCKET_BYTES = size
        options: dict[str, Any] = {"micro_batches": turns} if turns else {}
        parallel = autoparallel.compile(copy.deepcopy(model), mesh_of(*mesh_shape), example_inputs=args,
                                        example_kwargs=kwargs, baseline="ddp", **options)
        if turns:
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


@pytest.mark.parametrize(("mesh_shape", "bucket_bytes", "expected"), [
    ((4,), 25 * 2**20, 1), ((2, 2), 25 * 2**20, 2), ((4,), 40_000, None),
])
def test_gradients_of_data_parallelism_are_reduced_together(ranks: Any, mesh_shape: tuple[int, ...],
                                                            bucket_bytes: int, expected: int | None) -> None:
    parameters = sum(1 for _ in CASES["bert"].build().parameters())
    for one_by_one, in_buckets in ranks(4).run(backward_twice, mesh_shape, bucket_bytes, 0, timeout_s=100):
        assert one_by_one >= len(mesh_shape) * (parameters - 1)
        assert in_buckets == expected if expected else 1 < in_buckets < one_by_one / 4


def test_a_step_in_turns_reduces_together(ranks: Any) -> None:
    for one_by_one, in_buckets in ranks(4).run(backward_twice, (4,), 25 * 2**20, 2, timeout_s=100):
        assert in_buckets < one_by_one / 4
