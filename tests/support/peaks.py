"""The most bytes that tensors take at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class MostBytes(TorchDispatchMode):
    """The most bytes of storages that ops have made, and that lived at once, without those of ``known`` tensors."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and not tensor.is_sparse:
                storage = tensor.untyped_storage()    # of a sparse tensor, those of its parts were made before
                if storage._cdata not in self.known:
                    self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.storages = {key: one for key, one in self.storages.items() if not one[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.storages.values()))
        return made
