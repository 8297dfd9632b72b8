"""All architectures of the benchmarks by name: models and their inputs."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.architectures import ARCHITECTURES, Architecture, Inputs


def named(name: str) -> Architecture:
    """One of the 46, or of the others."""
    from benchmarks.other_architectures import OTHERS

    return ARCHITECTURES.get(name) or OTHERS[name]


def build(name: str) -> nn.Module:
    """The model in train mode, with the same random weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(23)
        return named(name).model().train()


def inputs_of(name: str, *sizes: int) -> Inputs:
    """The same numbers at every call. ``sizes`` (of the 46 only): batch, and tokens of texts (at most 64)."""
    return named(name).inputs(*sizes)
