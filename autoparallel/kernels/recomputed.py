"""Activation recompute and offload of a block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autoparallel.kernels import groups, numbers, rng
from autoparallel.kernels.host_copies import HOST, Copies, begin
from autoparallel.kernels.regather import gathers_parameter

#: Ops whose results "selective" recompute keeps (`KEPT_CLASSES` in pricing is the same list for prices).
KEPT = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product", "aten::convolution",
         "aten::_flash_attention", "aten::_efficient_attention", "_c10d_functional::",
         "aten::_grouped_mm", "transformers::grouped_mm_fallback")


class Recomputed(nn.Module):
    """A block recomputed in backward, with the same random numbers, number arguments and axes (``mode`` "full" or
    "selective"), or whose saved tensors are offloaded to the host ("offload").

    ``in_parts``: backward runs in several parts (zero bubble); the recomputed tensors are kept until the last part."""

    def __init__(self, body: GraphModule, mode: str, in_parts: bool = False) -> None:
        super().__init__()
        self.body, self.mode, self.in_parts = body, mode, in_parts

    def forward(self, *values: torch.Tensor) -> Any:
        if self.mode == "offload":
            with on_host(values):
                return self.body(*values)
        axes, seeds, given = groups.bound(), rng.call_seeds(), numbers.call_numbers()

        def run(*again: torch.Tensor) -> Any:
            with groups.use(axes), rng.use_seed(*seeds), numbers.use_numbers(given):
                return self.body(*again)

        if self.in_parts:
            return _Again(run, values).first()
        contexts: dict[str, Any] = {}
        if self.mode == "selective":
            contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(run, *values, use_reentrant=False, preserve_rng_state=False, **contexts)


class _Again:
    """One run of a block, recomputed once for all parts of its backward; keeps the recomputed tensors as long as
    autograd holds its hooks. (torch's `checkpoint` recomputes for each part: of a zero-bubble stage, for each
    layer.)"""

    def __init__(self, run: Callable[..., Any], values: Sequence[torch.Tensor]) -> None:
        self.run, self.values, self.count = run, values, 0
        self.saved: list[torch.Tensor] = []

    def first(self) -> Any:
        def pack(_: torch.Tensor) -> int:
            self.count += 1
            return self.count - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda number: self._found()[number]):
            return self.run(*self.values)

    def _found(self) -> list[torch.Tensor]:
        if not self.saved:
            found = list[torch.Tensor]()
            inputs = [value.detach().requires_grad_(value.requires_grad) for value in self.values]
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda value: found.append(value.detach()), _unused)
            with torch.enable_grad(), hooks:
                self.run(*inputs)
            assert len(found) == self.count, "a block saves the same tensors each time"
            self.saved = found
        return self.saved


def _unused(_: None) -> torch.Tensor:
    raise AssertionError("backward goes through the first run only")


@contextmanager
def on_host(own: Sequence[torch.Tensor]) -> Iterator[None]:
    """Offload the tensors that autograd saves inside to host memory, each tensor once, and copy them back at their use.
    ``own``, kept alive elsewhere, stay. (torch's `save_on_cpu` moves all of them, at every save.)"""
    kept = {value.untyped_storage().data_ptr() for value in own}
    moved: dict[Any, tuple[torch.Tensor, Copies]] = {}  # holds the tensor, so that its address is not reused

    def pack(value: torch.Tensor) -> Any:
        address = value.untyped_storage().data_ptr()
        if address in kept or not value.numel():
            return value.detach()
        key = address, value.storage_offset(), value.shape, value.stride(), value.dtype
        if key not in moved:
            moved[key] = value, begin([value], HOST)
        return value.device, moved[key][1]

    def unpack(packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else packed[1].back(packed[0]).ready()[0]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    moved.clear()


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = isinstance(op, torch._ops.OpOverload) and op._schema.name.startswith(KEPT) and not gathers_parameter()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
