"""The collectives that a rank issues in a step on real process groups, in order, and what it has on its way."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import autoparallel
from autoparallel.schedule.async_windows import AsyncWindows
from tests.support.ranks import mesh_of

#: (kind, ranks of the group, elements sent)
Sent = tuple[str, tuple[int, ...], int]
_PRODUCTS = ("mm.default", "addmm.default", "bmm.default")


class Collectives(TorchDispatchMode):
    """``sent``: collectives in order; ``most``: the most reduce-scatters on their way at a time; ``beside``, ``alone``:
    products that run while any is, and while none is."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []
        self.pending = dict[int, str]()
        self.most = self.beside = self.alone = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.__name__ == "wait_tensor.default":
            self.pending.pop(args[0].untyped_storage().data_ptr(), None)
        elif func.namespace == "_c10d_functional":
            name, kind = [arg for arg in args if isinstance(arg, str)][-1], func._opname.removesuffix("_out")
            group = torch._C._distributed_c10d._resolve_process_group(name)
            self.sent.append((kind, tuple(dist.get_process_group_ranks(group)), args[0].numel()))
            self.pending[made.untyped_storage().data_ptr()] = kind
            self.most = max(self.most, Counter(self.pending.values())["reduce_scatter_tensor"])
        elif func.__name__ in _PRODUCTS:
            self.beside += bool(self.pending)
            self.alone += not self.pending
        return made

    def counts(self) -> Counter[str]:
        return Counter(kind for kind, *_ in self.sent)


class Llama(torch.nn.Module):
    """Four layers, by transformers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        self.model = LlamaForCausalLM(LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, use_cache=False))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


def second_step(model: torch.nn.Module, mesh_shape: tuple[int, ...], options: dict[str, Any]
                ) -> tuple[Collectives, int]:
    """What this rank sends in a second step, and the buckets of reduce-scatters of its programs by their windows."""
    ids = torch.arange(8 * 12).view(8, 12) % 127
    parallel = autoparallel.compile(model, mesh_of(*mesh_shape), example_inputs=(ids,), **options)
    windows = list[AsyncWindows]()
    init = AsyncWindows.__init__

    def noted(self: AsyncWindows, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        windows.append(self)

    AsyncWindows.__init__ = noted  # type: ignore[method-assign]
    try:
        parallel.step(ids)
    finally:
        AsyncWindows.__init__ = init  # type: ignore[method-assign]
    with Collectives() as collectives:
        parallel.step(ids)
    buckets = sum(window.reads[pair.steps[0]].backward == "reduce_scatter" for window in windows
                  for pair in window.gathered)
    return collectives, buckets
