"""What stands in, while a model is traced, for what torch would compute from values that a trace does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributions import Distribution
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode

from autoparallel.capture.ctc import ctc_loss_as_op
from autoparallel.capture.regions import gradient_as_op
from autoparallel.errors import CaptureError


@contextmanager
def without_checks() -> Iterator[None]:
    """nn.Transformer compares each mask's values with a causal one's, for a hint that changes no number; distributions
    compare their parameters with what is allowed. Neither is done."""
    asks, checks = transformer._detect_is_causal_mask, Distribution._validate_args
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = asks
        Distribution.set_default_validate_args(checks)


class TracedCalls(TorchFunctionMode):
    """Calls that a trace would not see, as ops that it sees."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if function == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if function == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise CaptureError("the model assigns to a tensor's data, which a trace does not see\n"
                               "  Write buffer.copy_(value) under torch.no_grad() instead of buffer.data = value.")
        if function is torch.autograd.grad:
            return gradient_as_op(*args, **(kwargs or {}))
        if function is torch.nn.functional.ctc_loss:
            return ctc_loss_as_op(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))
