"""Activation recompute of a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _VersionWrapper,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autoparallel.kernels import groups, numbers, rng
from autoparallel.kernels.async_communication import recompute
from autoparallel.kernels.kept_results import KeptResults
from autoparallel.kernels.regather import gathers_parameter

_ATTENTION = ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention")
#: By mode of recompute, the ops whose results are kept (`KEPT_CLASSES` in pricing is the same list for prices).
KEPT = {
    "all_but_attention": _ATTENTION,
    "selective": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", *_ATTENTION, "aten::convolution",
                  "_c10d_functional::", "aten::_grouped_mm", "transformers::grouped_mm_fallback"),
}


class Recomputed(nn.Module):
    """A block recomputed in backward, with the same random numbers, number arguments and axes. ``mode``: "full",
    "all_but_attention" or "selective".

    ``in_parts``: backward runs in several parts (zero bubble); the recomputed tensors are kept until the last part."""

    def __init__(self, body: GraphModule, mode: str, in_parts: bool = False) -> None:
        super().__init__()
        self.body, self.mode, self.in_parts = body, mode, in_parts

    def forward(self, *values: torch.Tensor) -> Any:
        if self.in_parts:
            return _Again(self._run(), values).first()
        if self.mode == "full":
            return checkpoint(self._run(), *values, use_reentrant=False, preserve_rng_state=False)
        return self._selective(values, self._contexts(), KeptResults())

    def saving(self, values: Sequence[torch.Tensor], pack: Callable[[torch.Tensor], Any],
               unpack: Callable[[Any], torch.Tensor]) -> Any:
        """Run the block, "selective", and hold what ``pack`` makes of each kept result, which ``unpack`` gives back for
        backward, once."""
        contexts, whole = self._contexts(), KeptResults()
        made = self._selective(values, contexts, whole)
        for results in contexts[0].storage.values():    # by op, those of each of its calls
            for number, kept in results.items():
                results[number] = pytree.tree_map_only(_VersionWrapper, lambda one: _Packed(one, pack, unpack), kept)
        whole.hold(pack, unpack)
        return made

    def _contexts(self) -> tuple[Any, Any]:
        contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(partial(_policy, KEPT[self.mode]))
        return contexts

    def _selective(self, values: Sequence[torch.Tensor], contexts: tuple[Any, Any], whole: KeptResults) -> Any:
        run_block = self._run()

        def run(*again: torch.Tensor) -> Any:
            with whole.keeping():
                return run_block(*again)

        return checkpoint(run, *values, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts)

    def _run(self) -> Callable[..., Any]:
        axes, seeds, given = groups.bound(), rng.call_seeds(), numbers.call_numbers()
        contexts = iter([nullcontext()])    # of the first run, forward

        def run(*again: torch.Tensor) -> Any:
            with (next(contexts, None) or recompute(), groups.use(axes), rng.use_seed(*seeds),
                  numbers.use_numbers(given)):
                return self.body(*again)

        return run


class _Packed:
    """A kept result in the place of torch's own holder, in what `create_selective_checkpoint_contexts` keeps."""

    def __init__(self, kept: _VersionWrapper, pack: Callable[[torch.Tensor], Any],
                 unpack: Callable[[Any], torch.Tensor]) -> None:
        value = kept.get_val(False)
        self._is_tensor, self._unpack = isinstance(value, torch.Tensor), unpack
        self._packed = pack(value) if self._is_tensor else value

    def get_val(self, allow_cache_entry_mutation: bool) -> Any:
        """What torch's holder gives."""
        return self._unpack(self._packed) if self._is_tensor else self._packed


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


def _policy(names: tuple[str, ...], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = isinstance(op, torch._ops.OpOverload) and op._schema.name.startswith(names) and not gathers_parameter()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
