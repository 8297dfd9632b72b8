"""Where a plain step does not fit, `plan` takes ZeRO, recompute and micro-batches, if the call can run with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoparallel
from autoparallel.errors import InfeasibleError
from cost_models import Cluster
from tests.support.ranks import mesh_of


class Deep(nn.Module):
    """Blocks whose activations are large beside their weights; ``loss``: whether it returns one; ``width``: of the
    activations inside each block."""

    def __init__(self, loss: bool, width: int = 8) -> None:
        super().__init__()
        back = [nn.Linear(width, 8)] if width > 8 else []
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, width), nn.Tanh(), *back) for _ in range(6)])
        self.loss = loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean() if self.loss else x


def planned(loss: bool, share: float) -> autoparallel.Plan:
    """With a share of the memory that a plain step takes."""
    cluster, x = Cluster.load("h100-sxm", num_devices=2), torch.zeros(8192, 8)
    plain = autoparallel.plan(Deep(loss), cluster, example_inputs=(x,)).prediction.peak_bytes
    return autoparallel.plan(Deep(loss), cluster, example_inputs=(x,), memory_limit_bytes=share * plain,
                             time_limit_s=20)


@pytest.mark.slow
def test_a_loss_may_be_made_in_micro_batches() -> None:
    made = planned(loss=True, share=0.5)
    assert made.hybrid.micro_batches > 1 or made.hybrid.recompute != "none"
    assert made.evidence.stop_reason.startswith("a step of one micro-batch without recompute does not fit")


def test_without_a_loss_there_are_no_micro_batches() -> None:
    """They run by `step` only, which needs a loss. The error says that all else was tried."""
    with pytest.raises(InfeasibleError, match="with micro-batches, ZeRO and recompute either"):
        planned(loss=False, share=0.5)


def test_a_call_without_a_batch_keeps_its_own_error() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(512, 512))

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return (self.w @ self.w.T).square().mean() * a

    with pytest.raises(InfeasibleError, match="no plan fits"):
        autoparallel.plan(Square(), Cluster.load("h100-sxm", num_devices=2), example_inputs=(torch.tensor(1.0),),
                          memory_limit_bytes=2e5)


def compiled_within(share: float) -> dict[str, object]:
    """On each rank: plan, loss and a gradient of a module compiled with a share of the memory of a plain step."""
    torch.manual_seed(0)
    x, model = torch.randn(8192, 8), Deep(loss=True, width=64)
    mesh = mesh_of(2)
    plain = autoparallel.compile(model, mesh, example_inputs=(x,)).plan.prediction.peak_bytes
    parallel = autoparallel.compile(model, mesh, example_inputs=(x,), memory_limit_bytes=share * plain, time_limit_s=20)
    loss = parallel(x)
    loss.backward()
    expected = model(x)
    expected.backward()
    name = "blocks.0.0.weight"
    gradient = parallel.get_parameter(name).grad.full_tensor()
    return {"hybrid": parallel.plan.hybrid, "fits": parallel.plan.prediction.peak_bytes <= share * plain,
            "reason": parallel.plan.evidence.stop_reason, "loss": abs(float(loss.detach()) - float(expected.detach())),
            "gradient": float((gradient - model.get_parameter(name).grad).abs().max())}


@pytest.mark.ranks
def test_a_module_on_a_mesh_recomputes_where_a_plain_step_does_not_fit(ranks: Any) -> None:
    for found in ranks(2).run(compiled_within, 0.6):
        assert found["fits"] and found["hybrid"].recompute == "full" and found["hybrid"].micro_batches == 1
        assert found["reason"].startswith("a step without recompute does not fit")
        assert found["loss"] < 1e-6 and found["gradient"] < 1e-6
    with pytest.raises(Exception, match=r"With micro_batches, which parallel\.step runs"):
        ranks(2).run(compiled_within, 0.05)
