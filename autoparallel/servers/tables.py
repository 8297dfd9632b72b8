"""Named tables of rows, cut over servers: row ``r`` is on server ``r % n``, as its row ``r // n``.

The optimizer is torch's own: sparse gradients for embeddings (`torch.optim.SGD`, `Adagrad`, `SparseAdam`), dense ones
for the parameters of modules (`SGD`, `Adagrad`, `Adam`, `AdamW`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from autoparallel.errors import InputError, shown

SPARSE = ("SGD", "Adagrad", "SparseAdam")
DENSE = ("SGD", "Adagrad", "Adam", "AdamW")
CHUNK = 1024
#: What a worker pushes to a table: rows of the server (None: all), their gradients [rows, width], and the learning rate
#: (None: as it was).
Update = tuple[torch.Tensor | None, torch.Tensor, float | None]


@dataclass(frozen=True)
class Table:
    """``optimizer``: a class of `torch.optim` by name; ``options``: its arguments. ``std``, ``seed``: of the initial
    values (`initial_rows`); ``digest``: of initial values that the workers give instead."""

    name: str
    rows: int
    width: int
    sparse: bool
    optimizer: str
    options: Mapping[str, Any]
    dtype: str = "float32"
    std: float = 1.0
    seed: int = 0
    digest: int | None = None

    def local_rows(self, server: int, servers: int) -> int:
        return len(range(server, self.rows, servers))

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "options": dict(self.options)}


def made_table(name: str, rows: int, width: int, optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any], *,
               sparse: bool, **more: Any) -> Table:
    """A table whose optimizer is checked by a step on two rows.

    Raises InputError for a size below one, an optimizer that is none of ``SPARSE`` (``DENSE``), or options that torch
    refuses.
    """
    for what, size in (("rows", rows), ("width", width)):
        if type(size) is not int or size < 1:
            raise InputError(f"{what} of table {name!r} is {shown(size)}: an int of 1 or more is required")
    known = SPARSE if sparse else DENSE
    found = str(getattr(optimizer, "__name__", None))
    if found not in known or getattr(torch.optim, found) is not optimizer:
        other = " (of sparse gradients; Adam moves rows that no step has touched)" if sparse else ""
        raise InputError(f"optimizer of table {name!r} is {shown(optimizer)}: one of "
                         f"{', '.join(f'torch.optim.{one}' for one in known)} is required{other}")
    if sparse and options.get("momentum"):
        raise InputError(f"momentum={options['momentum']} of table {name!r}: torch's sparse momentum has a row for "
                         "each row ever pushed, and grows; leave it out, or use Adagrad or SparseAdam")
    table = Table(name, rows, width, sparse, found, dict(options), **more)
    try:
        trial = Shard(Table(name, 2, 1, sparse, found, dict(options)), torch.zeros(2, 1))
        trial.step([(torch.tensor([1]) if sparse else None, torch.ones(1 if sparse else 2, 1), None)], 1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"torch.optim.{found} of table {name!r} does not take {dict(options)}"
                         f"{' with sparse gradients' if sparse else ''}: {error}") from error
    return table


def initial_rows(name: str, start: int, stop: int, width: int, *, std: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Rows ``start`` to ``stop`` of a table's initial values, normal with ``std``: float32 [stop - start, width].

    They depend on name, seed and row only, not on the number of servers.
    """
    made = [_chunk(name, number, width, seed) for number in range(start // CHUNK, -(-stop // CHUNK))]
    rows = torch.cat(made) if made else torch.empty(0, width)
    first = start // CHUNK * CHUNK
    return rows[start - first:stop - first] * std


def _chunk(name: str, number: int, width: int, seed: int) -> torch.Tensor:
    key = np.array([zlib.crc32(name.encode()) << 32 | seed & 0xFFFFFFFF, number], dtype=np.uint64)
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=key)).standard_normal((CHUNK, width), np.float32))


def digest_of(values: torch.Tensor) -> int:
    """A checksum of a tensor's bytes."""
    return zlib.crc32(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


class Shard:
    """One server's rows of a table, with the optimizer's state of them."""

    def __init__(self, table: Table, values: torch.Tensor) -> None:
        self.table = table
        self.values = torch.nn.Parameter(values)
        self.optimizer = getattr(torch.optim, table.optimizer)([self.values], **table.options)

    @staticmethod
    def initial(table: Table, values: torch.Tensor | None, server: int, servers: int) -> Shard:
        """``values``: this server's rows; None: those of `initial_rows`."""
        if values is None:
            values = torch.cat([_owned(table, first, server, servers) for first in range(0, table.rows, CHUNK)])
        return Shard(table, values.to(getattr(torch, table.dtype)).clone())

    def read(self, rows: torch.Tensor | None) -> torch.Tensor:
        values = self.values.detach()
        return values.clone() if rows is None else values[rows]

    def step(self, updates: Sequence[Update], count: int) -> None:
        """One step of the optimizer with the updates' sum over ``count``, by the first's learning rate. Rows that occur
        twice are added."""
        if (rate := updates[0][2]) is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        if self.table.sparse:
            rows = torch.cat([rows for rows, _, _ in updates if rows is not None])
            values = torch.cat([values for _, values, _ in updates]) / count
            self.values.grad = torch.sparse_coo_tensor(rows.unsqueeze(0), values, self.values.shape,
                                                       check_invariants=True).coalesce()
        else:
            self.values.grad = sum((values for _, values, _ in updates[1:]), updates[0][1]) / count
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # the gradient's rows have been checked
            self.optimizer.step()
        self.values.grad = None

    def dump(self) -> dict[str, Any]:
        return {"table": self.table.plain(), "values": self.values.detach(), "optimizer": self.optimizer.state_dict()}

    @staticmethod
    def load(state: Mapping[str, Any]) -> Shard:
        shard = Shard(Table(**state["table"]), state["values"])
        shard.optimizer.load_state_dict(state["optimizer"])
        return shard


def _owned(table: Table, first: int, server: int, servers: int) -> torch.Tensor:
    stop = min(first + CHUNK, table.rows)
    rows = initial_rows(table.name, first, stop, table.width, std=table.std, seed=table.seed)
    return rows[(server - first) % servers::servers]


__all__ = ["DENSE", "SPARSE", "Shard", "Table", "Update", "digest_of", "initial_rows", "made_table"]
