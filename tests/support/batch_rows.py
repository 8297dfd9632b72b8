"""A model that weighs the rows of a batch, for tests on ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autoparallel
from tests.support.models import CASES
from tests.support.ranks import mesh_of


def example(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    case = CASES[name]
    return case.build(), *case.inputs(8)


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


class Rows(nn.Module):
    """Three layers, one of which has a weight that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.turned = nn.Parameter(torch.randn(12, 8).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(torch.tanh(self.first(x)) @ self.turned)[:, :8]).square().mean()


def rows_of(mesh_shape: tuple[int, ...] | None, options: dict[str, Any], frozen: tuple[str, ...] = ()
            ) -> tuple[Rows, Any, torch.Tensor]:
    """A model, the same compiled (or itself, without a mesh), and an input."""
    torch.manual_seed(0)
    model, x = Rows(), torch.randn(8, 8)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    if mesh_shape is None:
        return model, model, x
    return model, autoparallel.compile(model, mesh_of(*mesh_shape), example_inputs=(x,), **options), x


def stepped(called: Any, x: torch.Tensor) -> None:
    called.step(x) if hasattr(called, "step") else called(x).backward()
