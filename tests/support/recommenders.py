"""DLRM and Wide & Deep, small: models, batches, and training that tells losses and whole parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.tensor import DTensor

BATCH, WIDTH = 16, 8
#: Rows of each table, as different as in practice; none but the last is divided by four.
ROWS = (50, 7, 203, 64)


class DLRM(nn.Module):
    """One table of bags per feature, a bottom MLP for numbers, dot products of all pairs, a top MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, WIDTH, mode="mean" if rows == 7 else "sum") for rows in ROWS)
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.top = nn.Sequential(nn.Linear(WIDTH + 10, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(numbers)
        found = [self.tables[number](ids[:, number] % rows) for number, rows in enumerate(ROWS)]
        features = torch.stack([dense, *found], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        rows, columns = torch.tril_indices(5, 5, offset=-1)
        logits = self.top(torch.cat([dense, products[:, rows, columns]], dim=1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, clicked)


class WideAndDeep(nn.Module):
    """A linear model of crossed features (a table of width 1), and an MLP of embeddings with a padding row."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(203, 1, mode="sum")
        self.tables = nn.ModuleList([nn.Embedding(50, WIDTH), nn.Embedding(64, WIDTH, padding_idx=0)])
        self.deep = nn.Sequential(nn.Linear(2 * WIDTH + 5, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        first, second = self.tables[0](ids[:, 0, 0] % 50), self.tables[1](ids[:, 1] % 64).sum(1)
        logits = self.wide(ids[:, 2] % 203) + self.deep(torch.cat([first, second, numbers], 1))
        return F.binary_cross_entropy_with_logits(logits.squeeze(-1), clicked)


def example(kind: type[nn.Module]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    batch = (torch.randn(BATCH, 5), torch.randint(0, 1000, (BATCH, 4, 3)), torch.randint(0, 2, (BATCH,)).float())
    return kind(), batch


def trained(model: nn.Module, batch: tuple[torch.Tensor, ...], optimizer: str) -> tuple[list[float], dict[str, Any]]:
    stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        loss = model(*batch)
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(float((loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()))
    return losses, {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
                    for name, p in model.named_parameters()}
