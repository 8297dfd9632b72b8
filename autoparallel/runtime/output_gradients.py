"""Gradients that a loss outside of the model gives plain outputs, which all ranks have whole: they must be equal.

A script that computes the loss of whole outputs with each rank's own targets, or with random numbers of its own, would
train on something else on each rank.
"""

from __future__ import annotations

import math

import torch

from autoparallel.errors import InputError
from autoparallel.runtime.failing import Together, spread

_PARTS = 10_000    # of a unit of `summary`: a difference of 1 % of the norm is 100
_ELEMENTS = 2**22  # at a time
_TOLERANCE = 200   # rounding, and sums in another order on GPUs


def compare(output: torch.Tensor, together: Together) -> None:
    """Compare the gradient of a plain output over all ranks, where it gets one. Raises InputError on all ranks in
    backward, before anything of the model is computed, if they differ by more than rounding."""
    shape = list(output.shape)    # a hook that named the output would keep it until the garbage collector runs

    def check(gradient: torch.Tensor | None) -> None:
        with together.call():
            if spread(summary(gradient), "the gradients of a call's outputs") > _TOLERANCE:
                raise InputError(
                    f"the ranks' gradients of an output of shape {shape} differ: this output is whole on "
                    "every rank, with the rows of all ranks, and all ranks must compute the same loss from it\n  Give "
                    "the loss the targets of all ranks, not this rank's: x, y = parallel.shard_batch((x, y)) takes "
                    "targets with the batch (with inputs=\"local\" those of the rank's rows). Draw the "
                    "same random numbers on all ranks.")

    if output.grad_fn is not None:
        output.register_hook(check)


@torch.no_grad()
def summary(gradient: torch.Tensor | None) -> int:
    """The logarithm of a gradient's norm, plus its projection on a fixed direction, of elements with a mean of 0 and a
    variance of 1, as a share of the norm; in parts of `_PARTS`. 0 for a gradient of zeros, or none, -1 for one that
    is not finite."""
    if gradient is None:
        return 0
    flat = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).detach().reshape(-1)
    sums = torch.zeros(2, dtype=torch.float64, device=flat.device)
    for number, part in enumerate(flat.split(_ELEMENTS)):
        values = part.double()
        place = torch.arange(1, len(part) + 1, dtype=torch.float64, device=flat.device).add_(number * _ELEMENTS)
        direction = place.sin_().mul_(43758.5453).frac_().remainder_(1).sub_(0.5).mul_(math.sqrt(12))
        sums += torch.stack([values @ values, values @ direction])
    square, along = sums.tolist()
    if not math.isfinite(square):
        return -1
    norm = math.sqrt(square)
    return round(_PARTS * (math.log(norm) + along / norm)) if norm else 0


__all__ = ["compare", "summary"]
