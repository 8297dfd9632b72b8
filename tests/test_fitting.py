"""`autoparallel.fit`: what fits on a cluster, by tier of memory, and how large a batch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autoparallel
from autoparallel import fitting
from autoparallel.capture import build
from autoparallel.cli import app
from autoparallel.errors import CaptureError, InfeasibleError, InputError, PlanError, SearchError
from autoparallel.plans.reports.units import bytes_of
from cost_models import Cluster

WIDTH = 512
ONE = Cluster.load("a100-sxm", num_devices=1, software="none")


def deep(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]:
    """Twelve layers of 1 MiB of weights each; 4 KiB of activations for each layer and row."""
    with torch.device("meta"):
        model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
        return _Loss(model), (torch.empty(batch, WIDTH),), {}


class _Loss(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def fitted(megabytes: float, **options: Any) -> autoparallel.Fitting:
    return autoparallel.fit(deep, ONE, memory_limit_bytes=megabytes * 1e6, time_limit_s=3.0,
                            **{"smallest": 8, "most": 64, **options})


def test_what_does_not_fit_streams_through_one_device() -> None:
    """Of 50 MB of training state 12.6 MB are parameters: 8 MB hold a few layers at a time."""
    found = fitted(8, bucket_bytes=2**20)
    plans = {one.offload: one for one in found.tiers}
    assert [one.offload for one in found.fits] == ["parameters"]
    assert all("a device" in plans[tier].refused for tier in ("none", "host"))
    plan = plans["parameters"].plan
    assert plan is not None and plan.prediction.peak_bytes <= 8e6 and plan.prediction.host_bytes > 48e6
    assert plans["parameters"].batch >= 8
    text = found.report()
    assert text.startswith("It fits on 1 device of a100-sxm with parameters, gradients and optimizer states")
    said = " ".join(text.split())
    assert "of the batches tried, each twice the one before, the largest that fits at a time (autoparallel plan" in said
    assert "needs" in text and "MiB a device" in text


@pytest.mark.slow
def test_batches_grow_as_more_leaves_the_device() -> None:
    found = {one.offload: one for one in fitted(60, most=1024).tiers}
    assert found["none"].batch < found["parameters"].batch and found["none"].plan is not None
    plans = [one.plan for one in found.values() if one.plan is not None]
    assert len(plans) == 4 and all(plan.prediction.peak_bytes <= 60e6 for plan in plans)    # two are not tried
    assert fitted(60, most=8, tiers=["none"]).tiers[0].batch == 8


def doubled(tier: str, megabytes: float, most: int) -> int:
    """The largest batch that a plan of its own fits, from 8 by doubling; 0: none."""
    batch, best = 8, 0
    while batch <= most:
        model, args, _ = deep(batch)
        try:
            autoparallel.plan(model, ONE, example_inputs=args, joint=True, offload=tier, time_limit_s=3.0,
                              memory_limit_bytes=megabytes * 1e6, **({"micro_batches": 1} if best else {}))
        except (InfeasibleError, SearchError):
            break
        batch, best = 2 * batch, batch
    return best


@pytest.mark.slow
@pytest.mark.parametrize(("megabytes", "most"), [(60, 4096), (30, 4096), (60, 64), (60, 16)])
def test_bounds_leave_out_what_a_search_would(monkeypatch: pytest.MonkeyPatch, megabytes: float, most: int) -> None:
    """The batches are those of a plan for each; at most two are planned a tier, and each is captured once for all."""
    tiers, planned, traced = ("none", "host", "parameters"), list[tuple[str, int]](), list[int]()
    plan, trace = fitting.plan, build._captured

    def noted(model: Any, cluster: Any, **options: Any) -> Any:
        planned.append((options["offload"], len(options["example_inputs"][0])))
        return plan(model, cluster, **options)

    def captured(model: Any, args: Any, *rest: Any) -> Any:
        traced.append(len(args[0]))
        return trace(model, args, *rest)

    monkeypatch.setattr(fitting, "plan", noted)
    monkeypatch.setattr(build, "_captured", captured)
    found = {one.offload: one.batch for one in fitted(megabytes, tiers=tiers, most=most).tiers}
    count, batches = Counter(tier for tier, _ in planned), Counter(traced)
    assert found == {tier: doubled(tier, megabytes, most) for tier in tiers} and max(found.values()) > 8
    assert max(count.values()) <= 2 and max(batches.values()) == 1


@pytest.mark.slow
def test_saved_tensors_that_leave_are_said() -> None:
    """Of such a plan the report said that all is on the device."""
    found = autoparallel.fit(deep, ONE, smallest=8, most=8, tiers=["none", "host"], time_limit_s=1.0,
                             recompute="offload")
    said = [" ".join(autoparallel.Fitting(found.cluster, (one,)).report().split()) for one in found.tiers]
    assert "with all on the device, but for saved tensors of blocks on the host" in said[0]
    assert "on the host, and saved tensors of blocks on the host" in said[1]


def test_nothing_fits() -> None:
    found = fitted(0.5, tiers=["none", "host"])
    assert found.fits == () and "It does not fit on 1 device" in found.report()


@pytest.mark.parametrize(("options", "told"), [
    ({"tiers": "host"}, "give some of"), ({"tiers": ["tape"]}, "give some of"), ({"most": 0}, "most is 0"),
    ({"smallest": 1.5}, "smallest is 1.5"), ({"told": 3}, "give a function")])
def test_what_cannot_be_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        fitted(60, **options)
    wrong: Any = nn.Linear(1, 1)
    with pytest.raises(PlanError, match="give a function of a global batch"):
        autoparallel.fit(wrong, ONE)
    wrong = lambda batch: 3  # noqa: E731
    with pytest.raises(PlanError, match="return \\(model, example inputs"):
        autoparallel.fit(wrong, ONE)


class _Untraceable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if float(x.sum()) > 0 else -x


def test_a_model_that_cannot_be_traced_is_no_question_of_memory() -> None:
    with pytest.raises(CaptureError):
        autoparallel.fit(lambda batch: (_Untraceable(), (torch.zeros(batch, 4),), {}), ONE, most=2)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    config = tmp_path / "llama.json"
    config.write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,
                                  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}))
    call = ["fit", str(config), "--cluster", "a100-sxm", "--devices", "1", "--sequence-length", "32", "--most", "1",
            "--offload", "none,host", "--time-limit", "1"]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0 and "It fits on 1 device of a100-sxm with all on the device" in done.output
    assert CliRunner().invoke(app, [*call, "--memory-limit", "1KiB"]).exit_code == 3


def test_bytes_of_text() -> None:
    assert bytes_of("70GiB") == 70 * 2**30 and bytes_of("1.5 TB") == 1.5e12 and bytes_of(None) is None
    with pytest.raises(InputError, match="70GiB"):
        bytes_of("many")
