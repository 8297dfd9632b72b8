"""The models whose plans are measured: small, with about as much to compute as to communicate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoparallel import compiler
from benchmarks.subjects import gpt2, llama, row_batch, token_batch

VOCABULARY = 2048
Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """A model and its global batch; ``build`` gives equal weights each time."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]


class MLP(nn.Module):
    """Square layers, so that no dim is cut more cheaply than another."""

    def __init__(self, width: int = 1024, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.mse_loss(x, y)


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return MLP()


SUBJECTS = {
    "mlp": Subject(_mlp, lambda: row_batch(256, 1024)),
    "llama": Subject(lambda: llama(VOCABULARY, 384, 1024, 4, 8), lambda: token_batch(VOCABULARY, 16, 32)),
    "gpt2": Subject(lambda: gpt2(VOCABULARY, 384, 4, 64), lambda: token_batch(VOCABULARY, 16, 32)),
}

_GRAPHS: dict[Subject, Any] = {}


@contextmanager
def captured_once(subject: Subject) -> Iterator[None]:
    """While this lasts, the subject is traced the first time only: plans differ in what becomes of its graph."""
    real = compiler.capture

    def known(*call: Any) -> Any:
        if subject not in _GRAPHS:
            _GRAPHS[subject] = real(*call)
        return _GRAPHS[subject]

    compiler.capture = known  # type: ignore[assignment]
    try:
        yield
    finally:
        compiler.capture = real
