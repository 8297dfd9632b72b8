"""Whether AOTAutograd traces what runs."""

from __future__ import annotations

import torch


def is_traced() -> bool:
    """Whether AOTAutograd runs this: tensors have no values, and ops that write to an ``out`` tensor, or make tensors
    of other classes, cannot be traced as what they are."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None
