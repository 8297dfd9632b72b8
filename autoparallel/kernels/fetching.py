"""Parameters in the memory of the host, copied to the device for each use; their gradients, copied back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from autoparallel.kernels import host_copies
from autoparallel.kernels.host_copies import HOST, Values

Gradients = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Fetches:
    """Parameters from the host to ``device``; their gradients to the host."""

    device: torch.device

    def forward(self, values: Values) -> Callable[[], Values]:
        return host_copies.begin(values, self.device).ready

    def backward(self, gradients: Gradients) -> Callable[[], Gradients]:
        there = [g is not None for g in gradients]
        finish = host_copies.begin([g for g in gradients if g is not None], HOST).ready

        def finished() -> Gradients:
            made = iter(finish())
            return tuple(next(made) if one else None for one in there)

        return finished

    def backward_at_once(self, gradients: Gradients) -> Gradients:
        return tuple(None if g is None else g.to("cpu") for g in gradients)


def fetch(value: torch.Tensor, where: str, device: str) -> torch.Tensor:
    """A parameter that lives in memory ``where``, copied to ``device``: the step of emitted programs, for which the
    overlap pass puts `begin_fetches` and `end`."""
    return value.to(device, copy=True)


__all__ = ["Fetches", "fetch"]
