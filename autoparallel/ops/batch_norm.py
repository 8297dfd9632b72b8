"""Batch norm in training as one op, whose new running statistics are results: ``x[b, c, *], ... -> y[b, c, *]``."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

_library = torch.library.Library("autoparallel", "FRAGMENT")
_library.define("batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, "
                "float momentum, float eps) -> Tensor[]")


def _batch_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
                running_mean: torch.Tensor | None, running_var: torch.Tensor | None, momentum: float, eps: float
                ) -> list[torch.Tensor]:
    if running_mean is None or running_var is None:
        return [F.batch_norm(x, None, None, weight, bias, True, momentum, eps)]
    mean, variance = running_mean.detach().clone(), running_var.detach().clone()
    return [F.batch_norm(x, mean, variance, weight, bias, True, momentum, eps), mean, variance]


_library.impl("batch_norm", _batch_norm, "CompositeImplicitAutograd")
#: The result, and the running mean and variance after it, where there are such.
batch_norm = torch.ops.autoparallel.batch_norm.default
