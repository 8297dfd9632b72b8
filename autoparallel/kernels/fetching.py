"""Parameters in the memory of the host, copied to the device for each use; their gradients, copied back.

On an accelerator copies run on streams of their own, one for each direction, from and to pinned memory; on a CPU, where
host and device are the same memory, at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

Values = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]


def host_memory(value: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory, pinned where there is an accelerator."""
    pinned = torch.accelerator.is_available()
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned).copy_(value.detach())


def begin_copies(values: Sequence[torch.Tensor], device: torch.device) -> Callable[[], Values]:
    """Begin copies to another memory; returns what awaits them."""
    far = next((place for place in (device, *(x.device for x in values)) if place.type != "cpu"), None)
    if far is None:
        made = tuple(x.detach().clone() for x in values)
        return lambda: made
    stream: Any = _stream(far.type, device.type)
    stream.wait_stream(torch.accelerator.current_stream(far))
    with stream:
        copies = tuple(_empty(x, device).copy_(x, non_blocking=True) for x in values)
        event: Any = stream.record_event()
    for x in values:
        if x.device.type != "cpu":
            x.record_stream(stream)

    def finish() -> Values:
        if device.type == "cpu":
            event.synchronize()
        else:
            current: Any = torch.accelerator.current_stream(far)
            current.wait_event(event)
            for x in copies:
                x.record_stream(current)
        return copies

    return finish


def _empty(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=device, pin_memory=device.type == "cpu")


@cache
def _stream(kind: str, to: str) -> Any:
    return torch.Stream(torch.accelerator.current_device_index())


def settle() -> None:
    """Wait for all copies to the device: parameters on the host may be written to afterwards."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
        _stream(kind, kind).synchronize()


@dataclass(frozen=True)
class Fetches:
    """Parameters from the host to ``device``; their gradients to the host."""

    device: torch.device

    def forward(self, values: Values) -> Callable[[], Values]:
        return begin_copies(values, self.device)

    def backward(self, gradients: Gradients) -> Callable[[], Gradients]:
        there = [g is not None for g in gradients]
        finish = begin_copies([g for g in gradients if g is not None], torch.device("cpu"))

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


__all__ = ["Fetches", "begin_copies", "fetch", "host_memory", "settle"]
