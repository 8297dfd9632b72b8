"""What a parallel module holds is let go of when it is closed or collected."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoparallel
from autoparallel.errors import InputError
from tests.support.ranks import mesh_of


class Tied(nn.Module):
    """A parameter of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.b(self.a(x).relu()).relu()).square().mean()


def refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except InputError as error:
        return "is closed" in str(error) and "Compile the model again" in str(error)
    return False


def held() -> tuple[int, int, int, int]:
    """Process groups, threads (of Python; of the process), descriptors."""
    return (len(dist.distributed_c10d._world.pg_map), threading.active_count(),
            len([*Path("/proc/self/task").iterdir()]), len([*Path("/proc/self/fd").iterdir()]))


def compiled_six_times(closes: bool) -> list[Any]:
    x, counts, gone, answers = torch.randn(8, 32), [], [], []
    for _ in range(7):
        parallel = autoparallel.compile(Tied(), mesh_of(2), example_inputs=(x,), pipeline_stages=2, micro_batches=4)
        loss = parallel.step(x)
        reference = weakref.ref(parallel)
        if closes:
            parallel.close()
            parallel.close()
            answers += [refused(lambda p=parallel: p.step(x)), refused(lambda p=parallel: p(x)),
                        refused(parallel.state_dict), refused(lambda p=parallel: p.clip_grad_norm_(1.0)),
                        refused(lambda p=parallel: p.manual_seed(1)), refused(lambda p=parallel: p.plan)]
        del parallel
        gc.collect()
        gone.append(reference() is None)
        counts.append(held())
    return [counts, gone, answers, bool(loss.isfinite())]


@pytest.mark.ranks
@pytest.mark.parametrize("closes", [True, False])
def test_six_pipelines_leave_nothing_behind(ranks: Any, closes: bool) -> None:
    """(2 groups, 8 threads, 27 descriptors became 7, 23 and 47.)"""
    for counts, gone, answers, right in ranks(2).run(compiled_six_times, closes, timeout_s=90):
        assert right and all(gone) and all(answers)
        assert counts[1:] == counts[:1] * 6


def a_copy_outlives_its_original() -> bool:
    import copy

    x = torch.randn(8, 32)
    parallel = autoparallel.compile(Tied(), mesh_of(2), example_inputs=(x,), pipeline_stages=2, micro_batches=4)
    other = copy.deepcopy(parallel)
    before = other.step(x)
    parallel.close()
    return bool(other.step(x) == before)


@pytest.mark.ranks
def test_closing_leaves_copies_as_they_are(ranks: Any) -> None:
    assert all(ranks(2).run(a_copy_outlives_its_original, timeout_s=60))
