"""Modules whose parameters are on the servers: rows are pulled in forward, and their gradients pushed by the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from autoparallel.errors import InputError
from autoparallel.servers.tables import Table

if TYPE_CHECKING:
    from autoparallel.servers.worker import Servers


class ServedEmbedding(nn.Module):
    """`torch.nn.Embedding` on the servers: ids int64 [*] -> rows [*, width]. Each row that the ids name is pulled once.

    Raises InputError for ids that are no integers, or outside of the table.
    """

    def __init__(self, servers: Servers, table: Table, padding_idx: int | None = None) -> None:
        super().__init__()
        self._servers, self.table = servers, table
        if padding_idx is not None and not -table.rows <= padding_idx < table.rows:
            raise InputError(f"padding_idx is {padding_idx}, and table {table.name!r} has {table.rows} rows")
        self.padding_idx = None if padding_idx is None else padding_idx % table.rows

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows, places, padding = self._pulled(ids)
        return F.embedding(places, rows, padding)

    def _pulled(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Rows of the ids, each once; the place of each id's row among them; the place of the padding's."""
        table = self.table
        if ids.dtype not in (torch.int64, torch.int32):
            raise InputError(f"ids of table {table.name!r} are {ids.dtype}: torch.int64 or int32 are required")
        unique, places = ids.to(torch.int64).unique(return_inverse=True)
        if unique.numel() and not 0 <= int(unique[0]) <= int(unique[-1]) < table.rows:
            raise InputError(f"ids of table {table.name!r} are from {int(unique[0])} to {int(unique[-1])}: from 0 to "
                             f"{table.rows - 1} are required")
        found = (unique == self.padding_idx).nonzero() if self.padding_idx is not None else None
        padding = int(found[0]) if found is not None and found.numel() else None
        return self._servers.pull_rows(table, unique), places, padding

    def extra_repr(self) -> str:
        return f"{self.table.name!r}, {self.table.rows}, {self.table.width}, optimizer={self.table.optimizer}"


class ServedEmbeddingBag(ServedEmbedding):
    """`torch.nn.EmbeddingBag` on the servers: ids [bags, length], or [ids] with offsets [bags] -> [bags, width]."""

    def __init__(self, servers: Servers, table: Table, padding_idx: int | None = None, mode: str = "mean") -> None:
        super().__init__(servers, table, padding_idx)
        if mode not in ("sum", "mean", "max"):
            raise InputError(f"mode of table {table.name!r} is {mode!r}: 'sum', 'mean' or 'max' is required")
        self.mode = mode

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor | None = None,
                per_sample_weights: torch.Tensor | None = None) -> torch.Tensor:
        rows, places, padding = self._pulled(ids)
        return F.embedding_bag(places, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights,
                               padding_idx=padding)


def dense_tables(name: str, model: nn.Module) -> dict[str, nn.Parameter]:
    """A model's trainable parameters by the name of their table.

    Raises InputError for a model without any, or with buffers of floating point, which each worker would change alone.
    """
    buffers = [path for path, buffer in model.named_buffers() if buffer.is_floating_point()
               and path.rpartition(".")[2] not in model.get_submodule(path.rpartition(".")[0])
               ._non_persistent_buffers_set]
    if buffers:
        raise InputError(f"the model has buffers {buffers}, which each worker would change alone: use layers without "
                         "running statistics (GroupNorm, LayerNorm), or make them constants (persistent=False)")
    found = {f"{name}.{path}": p for path, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise InputError("the model has no trainable parameters that a server could hold")
    return found


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter as rows: [first dim, the others]; a number as one row."""
    return tensor.detach().reshape(max(1, tensor.shape[0]) if tensor.dim() else 1, -1)


def pull_hook(servers: Servers, tables: dict[str, Table], model: nn.Module, parameters: dict[str, nn.Parameter]) -> Any:
    """Before forward: the parameters of the step, once."""
    at = -1

    def pull(*_: Any) -> None:
        nonlocal at
        if at == servers.step_number:
            return
        for name, values in servers.pull_whole(list(tables.values())).items():
            with torch.no_grad():
                parameters[name].copy_(values.reshape(parameters[name].shape))
        at = servers.step_number

    return model.register_forward_pre_hook(pull)


__all__ = ["ServedEmbedding", "ServedEmbeddingBag", "as_rows", "dense_tables", "pull_hook"]
