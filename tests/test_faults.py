"""Faults at random points on four ranks: all others end soon, with the guilty rank named, and nothing is left over."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoparallel
from autoparallel.runtime.checkpoint.job import checkpoints
from tests.support.failures import Loss, said
from tests.support.ranks import mesh_of, pool_of

SOON_S = 30.0
FATAL = ("SIGKILL", "SIGSTOP")
WAYS: dict[str, tuple[str, ...]] = {
    "forward": (*FATAL, "error", "memory"), "step": (*FATAL, "error", "memory"),
    "pipeline": (*FATAL, "error", "memory"), "compile": (*FATAL, "error"), "saving": (*FATAL, "disk")}


def happens(way: str) -> None:
    if way in FATAL:
        os.kill(os.getpid(), getattr(signal, way))
    elif way == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    else:
        raise torch.OutOfMemoryError("no memory left") if way == "memory" else ArithmeticError("a fault of one rank")


class At(TorchDispatchMode):
    """Something happens at the op of this number."""

    def __init__(self, number: int, way: str) -> None:
        super().__init__()
        self.number, self.way = number, way

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number -= 1
        if self.number == 0:
            happens(self.way)
        return func(*args, **(kwargs or {}))


class FailsWhenTraced(nn.Module):
    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ArithmeticError("a fault of one rank")
        return x


def with_a_fault(phase: str, way: str, guilty: int, point: float, folder: str) -> Any:
    rank, x = torch.distributed.get_rank(), torch.randn(8, 32)
    options: dict[str, Any] = {"example_inputs": (x,), "peer_timeout_s": 4.0, "check_inputs": 0}
    pipeline = {"baseline": "fsdp", "pipeline_stages": 2, "micro_batches": 4, "schedule": "1f1b"}
    mesh, options = (mesh_of(2, 2), options | pipeline) if phase == "pipeline" else (
        mesh_of(4), options | {"baseline": "fsdp"})
    if phase == "compile":
        autoparallel.compile(nn.Linear(32, 32), mesh)  # before the first one, nobody knows that a rank has lived
        if rank == guilty and way in FATAL:
            threading.Timer(3 * point, happens, (way,)).start()
        model = nn.Sequential(Loss(), FailsWhenTraced(way == "error" and rank == guilty))
        return said(lambda: [autoparallel.compile(model, mesh, **options).step(x) for _ in range(60)])
    parallel = autoparallel.compile(Loss(), mesh, **options)
    optimizer = torch.optim.AdamW(parallel.parameters())
    if phase == "saving":
        if rank == guilty and way in FATAL:
            threading.Timer(point, happens, (way,)).start()
        elif rank == guilty:
            happens(way)

        def save() -> None:
            for number in range(200):
                parallel.save(folder, optimizer, step=number, keep=2)

        return said(save)
    run = (lambda: parallel(x).backward()) if phase == "forward" else lambda: parallel.step(x)
    with At(1 + int(300 * point) if rank == guilty else 0, way):
        return said(lambda: [run() for _ in range(40)])


def check(phase: str, way: str, guilty: int, point: float, folder: Path) -> None:
    pool = pool_of(4)
    arguments = (phase, way, guilty, point, str(folder))
    try:
        if way in FATAL:
            found = pool.run_losing(guilty, with_a_fault, *arguments, timeout_s=60)
        else:
            found = pool.run(with_a_fault, *arguments, timeout_s=60)
        processes = list(pool._processes)
    finally:
        pool.stop()
    for rank, told in enumerate(found):
        if rank == guilty:
            continue
        name, text, named, seconds = told
        assert seconds < SOON_S and f"rank {guilty}" in text, (arguments, rank, told)
        assert (name, named) == ("PeerError", guilty) or way == "disk" or (phase, way) == ("compile", "error"), told
    assert not any(process.is_alive() for process in processes)
    for checkpoint in checkpoints(folder):  # each that is there is whole
        assert (checkpoint.path / ".metadata").exists()


def faults(seed: int, count: int) -> list[tuple[str, str, int, float]]:
    draw = random.Random(seed)
    phases = [draw.choice(sorted(WAYS)) for _ in range(count)]
    return [(phase, draw.choice(WAYS[phase]), draw.randrange(4), round(draw.random(), 3)) for phase in phases]


@pytest.mark.ranks
@pytest.mark.parametrize(("phase", "way", "guilty", "point"), [
    ("saving", "disk", 2, 0.5), ("compile", "SIGKILL", 1, 0.3),
    *(pytest.param(*fault, marks=pytest.mark.slow) for fault in faults(0, 40))])
def test_a_fault_ends_all_ranks_and_names_the_guilty_one(phase: str, way: str, guilty: int, point: float,
                                                         tmp_path: Path) -> None:
    check(phase, way, guilty, point, tmp_path)
