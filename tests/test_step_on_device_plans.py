"""Plans that step on the device while backward goes on: peaks are as measured, and what reports and errors say."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typer.testing import CliRunner

import autoparallel
from autoparallel.cli import app
from autoparallel.errors import InfeasibleError
from autoparallel.plans import Plan
from autoparallel.schedule.tiers import Offload
from cost_models import Cluster
from tests.support.captured import plan_again
from tests.support.peaks import MostBytes
from tests.support.ranks import mesh_of
from tests.support.tiers import slow


class Deep(nn.Module):
    """Layers whose weights are more than their activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


#: Parameter and two moments of AdamW.
KEPT = 3
DEEP = {"bucket_bytes": 4 * 256 * 256}


def peaks(mesh: DeviceMesh, early: bool, **options: Any) -> tuple[float, float]:
    """Predicted and measured bytes of the second step."""
    x = torch.randn(32, 256)
    model = Deep()
    parallel = autoparallel.compile(model, mesh, example_inputs=(x,), step_in_backward=early, **DEEP, **options)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
    parallel(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    states = [value.to_local() for entries in optimizer.state.values() for value in entries.values() if value.dim()]
    shards = [cast(Any, p).to_local() for p in parallel.parameters()]
    with MostBytes([*shards, *states, x, *model.parameters()]) as seen:
        parallel(x).backward()
    return parallel.plan.prediction.peak_bytes, seen.most + KEPT * sum(shard.nbytes for shard in shards)


def test_gradients_of_the_whole_model_never_live_together(mesh_of_one: DeviceMesh) -> None:
    after, early = peaks(mesh_of_one, False), peaks(mesh_of_one, True)
    assert early[0] == pytest.approx(early[1], rel=0.05)
    gradients = sum(4 * p.numel() for p in Deep().parameters())
    assert after[1] - early[1] > 0.7 * gradients    # at the loss all activations live, and no gradient does


def peaks_on_ranks(options: dict[str, Any], early: bool) -> tuple[float, float]:
    return peaks(mesh_of(2), early, **options)


@pytest.mark.ranks
@pytest.mark.parametrize("options", [{"baseline": "ddp", "zero_stage": 0}, {"baseline": "fsdp", "zero_stage": 3},
                                     slow({"baseline": "fsdp", "zero_stage": 2})])
def test_bytes_on_ranks_are_as_predicted(ranks: Any, options: dict[str, Any]) -> None:
    for predicted, measured in ranks(2).run(peaks_on_ranks, options, True):
        assert predicted == pytest.approx(measured, rel=0.05)
    if options["zero_stage"] != 2:    # where whole parameters live at the loss
        (_, after), *_ = ranks(2).run(peaks_on_ranks, options, False)
        assert measured < 0.95 * after


# --- plans ------------------------------------------------------------------------------------------------------------

A100 = Cluster.load("a100-sxm", num_devices=1, software="none")
WIDTH, DEPTH = 4096, 8
#: Bytes of the gradients of `planned`, in bfloat16.
GRADIENTS = 2 * DEPTH * WIDTH**2


@functools.cache
def square_layers() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(DEPTH)))


def planned(cluster: Cluster = A100, **options: Any) -> Plan:
    """A plan of square layers with few activations."""
    x = torch.empty(64, WIDTH, dtype=torch.bfloat16, device="meta")
    if not {"joint", "by_hand"} & options.keys():
        options["mesh_shape"] = (cluster.num_devices,)
    return plan_again(square_layers(), cluster, (x,), **options)


def test_a_plan_and_its_report_say_so(tmp_path: Path) -> None:
    after, early = planned(), planned(step_in_backward=True)
    saved = after.prediction.peak_bytes - early.prediction.peak_bytes
    assert saved == pytest.approx(GRADIENTS * (1 - 1 / DEPTH), rel=0.01)    # but for those of one layer
    assert early.prediction.state_bytes == after.prediction.state_bytes - GRADIENTS
    assert early.prediction.step_s == after.prediction.step_s
    assert "parameters stepped during backward, each gradient let go then" in early.summary()
    early.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").hybrid == early.hybrid != after.hybrid
    (lost,) = (one for one in autoparallel.export_plan(early, "fsdp2").lost if "stepped" in one.what)
    assert lost.instead == "after backward, with all gradients in memory"
    assert planned(by_hand="dp=1", step_in_backward=True).prediction == early.prediction


def test_several_micro_batches_keep_their_sums() -> None:
    after, early = (planned(micro_batches=4, step_in_backward=one) for one in (False, True))
    assert early.prediction.peak_bytes == after.prediction.peak_bytes


def test_who_lacks_less_than_the_gradients_is_told() -> None:
    limit = 3.4 * GRADIENTS
    for how in ({}, {"joint": True}, {"by_hand": "dp=1"}, {"offload": "auto"}):
        assert planned(memory_limit_bytes=limit, step_in_backward=True, **how).prediction.peak_bytes <= limit
    with pytest.raises(InfeasibleError, match=r"With step_in_backward=True it may fit: gradients, 256 MiB a device"):
        planned(memory_limit_bytes=limit)
    with pytest.raises(InfeasibleError) as error:
        planned(memory_limit_bytes=limit / 2)
    assert "step_in_backward" not in str(error.value)
    small = replace(A100, device=replace(A100.device, memory_bytes=limit, reserved_bytes=0.0))
    assert "step_in_backward=True would take 8" in planned(small, by_hand="dp=1").summary()
    assert "step_in_backward" not in planned(small, by_hand="dp=1", step_in_backward=True).summary()


def test_the_command_plans_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = CliRunner().invoke(app, ["plan", "tests.support.reported:factory", "--devices", "2", "--by-hand", "dp=2",
                                    "--step-in-backward", "--output", str(path)])
    assert done.exit_code == 0 and "parameters stepped during backward" in done.stdout
    assert Plan.load(path).hybrid.offload == Offload(in_backward=True)
