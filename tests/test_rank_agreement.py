"""Ranks agree: what one rank finds is told on all, and nobody hangs."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoparallel
from autoparallel.errors import AutoparallelError, CaptureError, InfeasibleError, InputError
from autoparallel.kernels import groups
from autoparallel.launch.local import free_port, launch
from tests.support.ranks import mesh_of


def too_little_memory() -> str:
    """Rank 0 finds that nothing fits; every rank is told."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    try:
        autoparallel.compile(model, mesh_of(2), example_inputs=(torch.ones(4, 8),), memory_limit_bytes=10)
    except InfeasibleError as error:
        return str(error)
    return ""


def test_an_infeasible_plan_is_an_error_on_every_rank(ranks: Any) -> None:
    assert all("more than the limit" in said for said in ranks(2).run(too_little_memory, timeout_s=60))


def different_models() -> str:
    """Rank 0 compiles another model than the others."""
    import torch.distributed as dist

    width = 16 if dist.get_rank() == 0 else 32
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))
    try:
        autoparallel.compile(model, mesh_of(2), example_inputs=(torch.ones(4, 8),), baseline="ddp")
    except AutoparallelError as error:
        return str(error)
    return ""


def test_ranks_with_different_programs_are_refused(ranks: Any) -> None:
    for said in ranks(2).run(different_models, timeout_s=60):
        assert said.startswith("ranks [1] have a program other than the first rank's of their group")
        assert "rank 1: 0.weight (parameter)" in said and "sorted(names)" not in said


class ByKind(nn.Module):
    """Heads in the order of a rank, as a loop over a set has them."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.heads, self.kinds = nn.ModuleDict({kind: nn.Linear(8, 4) for kind in ("near", "far")}), kinds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = {kind: self.heads[kind](x).relu() for kind in self.kinds}
        return (made["near"] * made["far"]).sum()


def heads_in_another_order(rank: int) -> str:
    import torch.distributed as dist

    kinds = ["near", "far"][:: -1 if dist.get_rank() == rank else 1]
    try:
        autoparallel.compile(ByKind(kinds), mesh_of(2), example_inputs=(torch.ones(4, 8),))
    except AutoparallelError as error:
        return str(error)
    return ""


def test_an_order_of_ops_that_differs_is_shown_with_its_likely_reason(ranks: Any) -> None:
    """The op, its place in the code, and that a set's order is another in each process."""
    for said in ranks(2).run(heads_in_another_order, 1, timeout_s=60):
        assert "They differ first at\n    rank 0: linear (aten.linear.default in heads.near)" in said
        assert "rank 1: linear (aten.linear.default in heads.far)" in said
        assert "self.heads[kind](x).relu() for kind in self.kinds" in said
        assert "loop over sorted(names)" in said


def an_edited_plan_on_one_rank(rank: int) -> list[str]:
    """In which nothing is said, or which is of other calls."""
    import torch.distributed as dist

    x, mesh, said = torch.ones(4, 8), mesh_of(2), []
    right = autoparallel.compile(nn.Linear(8, 8), mesh, example_inputs=(x,)).plan
    micro_batches = dataclasses.replace(right.hybrid, micro_batches=2)
    for wrong in (dataclasses.replace(right, strategies={}), dataclasses.replace(right, hybrid=micro_batches), right):
        try:
            autoparallel.compile(nn.Linear(8, 8), mesh, example_inputs=(x,),
                                 plan=wrong if dist.get_rank() == rank else right)
            said.append("")
        except AutoparallelError as error:
            said.append(str(error))
    return said


def test_a_plan_that_one_rank_cannot_run_is_an_error_on_every_rank(ranks: Any) -> None:
    """The others waited for it until their groups' timeout."""
    (first, micro_batches, after), (other, too, well) = ranks(2).run(an_edited_plan_on_one_rank, 1, timeout_s=60)
    assert other == "the plan says nothing about 'weight'" and first == f"on rank 1: {other}"
    assert micro_batches == too and micro_batches.startswith("ranks [1] have a program other than the first rank's")
    assert after == well == ""


def integers_on_one_rank(rank: int) -> list[str]:
    """One rank's example is of another type, which the model does not take."""
    import torch.distributed as dist

    x = torch.ones(4, 8)
    said = []
    for wrong in (x.long(), x):
        try:
            autoparallel.compile(nn.Linear(8, 8), mesh_of(2), example_inputs=(wrong if dist.get_rank() == rank else x,))
            said.append("")
        except InputError as error:
            said.append(str(error))
    return said


def test_an_example_of_another_type_on_one_rank_is_an_error_on_every_rank(ranks: Any) -> None:
    """It names the rank (the others waited for it until its process ended), and does no harm."""
    (first, after), (other, too) = ranks(2).run(integers_on_one_rank, 1, timeout_s=60)
    assert "compile(int64[4, 8]) in train mode on rank 1" in other and first == other and after == too == ""


class Choosy(nn.Module):
    """Cannot be traced on rank 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        return x.relu() if dist.get_rank() == 0 else x.relu() @ x


def untraceable_on_one_rank() -> str:
    try:
        autoparallel.compile(nn.Sequential(nn.Linear(8, 8), Choosy()), mesh_of(2), example_inputs=(torch.ones(4, 8),))
    except CaptureError as error:
        return str(error)
    return ""


def test_a_failed_trace_on_one_rank_is_an_error_on_all(ranks: Any) -> None:
    first, other = ranks(2).run(untraceable_on_one_rank, timeout_s=60)
    assert first == f"on rank 1: {other}" and "Choosy" in other


def apart_from_the_gpus(port: int) -> tuple[bool, list[float]]:
    """In a process group for GPUs alone, as of ``init_process_group("nccl")``: what ranks compare goes by gloo."""
    import torch.distributed as dist

    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    group, both = groups.apart(), torch.ones(1) + rank
    dist.all_reduce(both, group=group)
    assert dist.group.WORLD is not None
    return torch.device("cpu") in dist.group.WORLD._device_types, both.tolist()


@pytest.mark.ranks
def test_ranks_with_nccl_alone_compare_their_calls() -> None:
    assert launch(apart_from_the_gpus, 2, free_port(), device="cpu") == [(False, [3.0])] * 2


def wait_for_ever(folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)


@pytest.mark.ranks
def test_ranks_end_with_a_command_that_is_stopped(tmp_path: Path) -> None:
    """By SIGTERM, as `timeout` and schedulers send it to the command alone."""
    script = (f"from tests.{Path(__file__).stem} import launch, wait_for_ever\n"
              f"launch(wait_for_ever, 2, {str(tmp_path)!r}, device='cpu')")
    command = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parent.parent)
    try:
        until = time.monotonic() + 200
        while len(ranks := [int(path.name) for path in tmp_path.iterdir()]) < 2 and time.monotonic() < until:
            time.sleep(0.2)
        command.terminate()
        assert len(ranks) == 2 and command.wait(60) == 128 + signal.SIGTERM
    finally:
        command.kill()
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)
