"""Calls that fail on a rank, and the errors that they raise."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def said(call: Callable[[], Any]) -> tuple[str, str, int, float]:
    """The error of a call: its name, text, the rank that it names (-1: none), seconds until then."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "rank", -1), time.monotonic() - began
    return "", "", -1, time.monotonic() - began


class FailsAt(TorchDispatchMode):
    """No memory left for the product of this number; at 0 for none."""

    def __init__(self, number: int, dies: bool = False) -> None:
        super().__init__()
        self.number, self.dies = number, dies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("mm.default", "addmm.default", "bmm.default"):
            self.number -= 1
            if self.number == 0 and self.dies:
                os._exit(3)
            if self.number == 0:
                raise torch.OutOfMemoryError("no memory for this product")
        return func(*args, **(kwargs or {}))
