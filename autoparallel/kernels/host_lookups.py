"""Values that cross between the memories of the device and of its host, for ops that run on the host."""

from __future__ import annotations

import torch


def cross(value: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """A value in memory ``source`` (a device, or "host") copied to ``target``; its gradient goes back. Where both are
    one memory, the value."""
    return value.to("cpu" if target == "host" else target)


__all__ = ["cross"]
