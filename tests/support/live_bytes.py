"""Bytes of the tensors that live, counted while they are made."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are made while it is on, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta:
                for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
                    memory = part.untyped_storage()
                    self.storages[memory._cdata] = (StorageWeakRef(memory), memory.nbytes())
        return made

    def total(self, without: Iterable[torch.Tensor | None] = ()) -> int:
        gc.collect()  # what is left over in cycles is there by chance
        self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
        skipped = {storage(tensor) for tensor in without if tensor is not None}
        return sum(size for key, (_, size) in self.storages.items() if key not in skipped)


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
