"""Tensors that are zero but for rounding: how large they may be, beside the largest of their kind."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

ZERO_IN_FLOAT64, ZERO_IN_FLOAT32 = 1e-11, 1e-7  # of the model's largest gradient


def largest_entry(tensors: Mapping[str, Tensor]) -> float:
    """The largest absolute value in any of them; 0 without elements."""
    return max((tensor.abs().max().item() for tensor in tensors.values() if tensor.numel()), default=0.0)
