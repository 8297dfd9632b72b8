"""Attributes that a user has set on parameters and buffers: in a trace other tensors stand for these, without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autoparallel.errors import CaptureError


@contextmanager
def refusing_attributes(model: torch.nn.Module) -> Iterator[None]:
    """Within, reading an attribute that a parameter or buffer of the model has raises CaptureError, in this thread;
    ``getattr(weight, name, default)`` would give the default."""
    names = {name: path for path, tensor in (*model.named_parameters(), *model.named_buffers())
             for name in getattr(tensor, "__dict__", ()) if not name.startswith("_")}    # as torch's own do
    if not names:
        yield
        return
    thread = get_ident()

    def read(self: FakeTensor, name: str) -> Any:
        if name in names and get_ident() == thread:
            raise CaptureError(f"forward of {type(model).__name__} reads {names[name]}.{name}, an attribute of a "
                               "tensor, which a trace does not see\n  Keep it as an attribute of the module.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    FakeTensor.__getattr__ = read  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del FakeTensor.__getattr__  # type: ignore[attr-defined]


__all__ = ["refusing_attributes"]
