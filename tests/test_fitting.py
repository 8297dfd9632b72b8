"""Where a plain step does not fit, `plan` takes ZeRO, recompute and micro-batches, if the call can run with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoparallel
from autoparallel.errors import InfeasibleError
from cost_models import Cluster


class Deep(nn.Module):
    """Blocks whose activations are large beside their weights; ``loss``: whether it returns one."""

    def __init__(self, loss: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)])
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
