"""Hugging Face's ``generate`` on a parallel module."""

from __future__ import annotations

import functools
import types
from functools import cache
from typing import Any

import torch

from autoparallel.kernels import rng
from autoparallel.runtime.state import State


@cache
def generating(module: Any, original: Any) -> Any:
    """A subclass of ``module`` (ParallelModule) and of the model's class ``original``, where ``generate`` looks for its
    methods and for the signature of ``forward``. Within ``generate``, calls return whole tensors and all ranks draw the
    same numbers."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return module.forward(self, *args, **kwargs)

    @functools.wraps(original.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: State = self._state
        state.gathers = True
        try:
            with torch.random.fork_rng():
                torch.manual_seed(rng.mix(state.seed, state.calls))
                return original.generate(self, *args, **kwargs)
        finally:
            state.gathers = False

    def namespace(members: dict[str, Any]) -> None:
        members.update(forward=forward, generate=generate, __doc__=module.__doc__)

    return types.new_class(f"Parallel{original.__name__}", (module, original), {}, namespace)
