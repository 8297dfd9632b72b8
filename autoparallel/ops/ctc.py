"""The CTC loss (connectionist temporal classification) as an op with one loss per sample:

    log_probs[t, b, c], targets[b, s], input_lengths[b], target_lengths[b] -> y[b]

Torch's own op has a second result whose shape depends on the lengths, which cannot be traced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch._subclasses.fake_tensor import FakeTensor

Lengths = torch.Tensor | Sequence[int]
_library = torch.library.Library("autoparallel", "FRAGMENT")
_library.define("ctc_losses(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
                "bool zero_infinity) -> Tensor")


def _losses(log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor, target_lengths: torch.Tensor,
            blank: int, zero_infinity: bool) -> torch.Tensor:
    if isinstance(log_probs, FakeTensor) or log_probs.is_meta:  # only the shape matters
        return log_probs.sum((0, 2))
    return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, "none", zero_infinity)


_library.impl("ctc_losses", _losses, "CompositeImplicitAutograd")
ctc_losses = torch.ops.autoparallel.ctc_losses.default


def ctc_loss_as_op(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Lengths, target_lengths: Lengths, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> torch.Tensor:
    """Replaces `torch.nn.functional.ctc_loss` while a model is traced; same arguments and result. ``reduction="mean"``
    divides each loss by its target's length before the mean, as torch does."""
    inputs, lengths = (x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in (input_lengths, target_lengths))
    batched = log_probs.dim() == 3
    if not batched:
        log_probs, inputs, lengths = log_probs.unsqueeze(1), inputs.reshape(1), lengths.reshape(1)
        targets = targets.unsqueeze(0)
    losses = ctc_losses(log_probs, targets, inputs, lengths, blank, zero_infinity)
    if reduction == "mean":
        return (losses / lengths.to(losses).clamp(min=1)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses if batched else losses.squeeze(0)
