"""What a worker holds: `Servers`, which makes modules on the servers and ends steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

from autoparallel.errors import InputError
from autoparallel.servers.client import Client
from autoparallel.servers.modules import ServedEmbedding, ServedEmbeddingBag, as_rows, dense_tables, pull_hook
from autoparallel.servers.server import Push
from autoparallel.servers.settings import Settings
from autoparallel.servers.tables import Table, Update, digest_of, made_table
from autoparallel.servers.transport import Alone, Transport

Model = TypeVar("Model", bound=nn.Module)
Optimizer = type[torch.optim.Optimizer]


class Servers:
    """The parameter servers as a worker sees them; made by `autoparallel.serve_parameters`.

    worker: this worker's number. workers: how many the job was started with. step_number: the next step's number; above
    0 for a worker that joined later, and in a resumed job.

    A context: leaving it tells the servers that this worker is done, or why it failed.
    """

    def __init__(self, client: Client, transport: Transport | Alone, settings: Settings) -> None:
        self._client, self._transport, self._settings = client, transport, settings
        self.worker, self.workers = client.worker, settings.workers
        self._pulled: list[tuple[Table, torch.Tensor, torch.Tensor]] = []
        self._dense: dict[str, tuple[Table, nn.Parameter]] = {}
        self._tables: dict[str, Table] = {}
        self._rates: dict[str, float] = {}
        self._closed = False
        self.step_number = max(client.same("join", settings.agreed))
        client.same("begin", self.step_number)
        client.start()

    def embedding(self, name: str, rows: int, width: int, *, optimizer: Optimizer, weight: torch.Tensor | None = None,
                  std: float = 1.0, seed: int = 0, padding_idx: int | None = None, **options: Any) -> ServedEmbedding:
        """An embedding of ``rows`` rows of ``width`` float32 numbers, whose rows lie on the servers by turns.

        optimizer, options: `torch.optim.SGD`, `Adagrad` or `SparseAdam` and its arguments; it runs on the servers, on
        the rows that a step has touched. Initial values: ``weight`` [rows, width], the same on all workers, or normal
        with ``std``, drawn by name, ``seed`` and row (`autoparallel.servers.tables.initial_rows`).
        name: of the table, for `whole`, `set_lr` and checkpoints.
        padding_idx: as of torch.nn.Embedding; None: none.

        Raises InputError for arguments that do not fit, or are not those of the other workers.
        """
        return ServedEmbedding(self, self._embedding(name, rows, width, optimizer, weight, std, seed, options),
                               padding_idx)

    def embedding_bag(self, name: str, rows: int, width: int, *, optimizer: Optimizer,
                      weight: torch.Tensor | None = None, std: float = 1.0, seed: int = 0, mode: str = "mean",
                      padding_idx: int | None = None, **options: Any) -> ServedEmbeddingBag:
        """As `embedding`; rows of a bag are combined by ``mode``: "sum", "mean" or "max"."""
        return ServedEmbeddingBag(self, self._embedding(name, rows, width, optimizer, weight, std, seed, options),
                                  padding_idx, mode)

    def module(self, model: Model, *, optimizer: Optimizer, name: str = "model", **options: Any) -> Model:
        """The model itself, with its trainable parameters on the servers: all are pulled before a step's first forward.

        optimizer, options: `torch.optim.SGD`, `Adagrad`, `Adam` or `AdamW` and its arguments. ``name`` begins the names
        of its parameters, as in "model.head.weight". All workers make the model with the same initial values.

        Raises InputError for a model without parameters, with running statistics, or with other values than another
        worker's.
        """
        parameters = dense_tables(name, model)
        tables = {key: made_table(key, len(rows := as_rows(p)), rows.shape[1], optimizer, options, sparse=False,
                                  dtype=str(p.dtype).removeprefix("torch."), digest=digest_of(p))
                  for key, p in parameters.items()}
        for key, p in parameters.items():
            self._declare(tables[key], as_rows(p))
            self._dense[key] = (tables[key], p)
        pull_hook(self, tables, model, parameters)
        return model

    def step(self) -> None:
        """Push the gradients of this step's backwards, and end it. They are dropped here, as by `zero_grad`.

        Returns when every server has them as safe as ``durability`` says. With ``staleness=0`` the update is made when
        all workers' are there.
        """
        pushes: list[dict[str, Update]] = [{} for _ in range(self._settings.servers)]
        for table, rows, gradients in self._sparse_gradients():
            for server, (own, values) in enumerate(self._by_server(rows, gradients)):
                pushes[server][table.name] = (own, values, self._rates.get(table.name))
        for table, p in self._dense.values():
            if p.grad is not None:
                values = as_rows(p.grad).cpu()
                for server in range(self._settings.servers):
                    own = values[server::self._settings.servers].contiguous()
                    pushes[server][table.name] = (None, own, self._rates.get(table.name))
        self._client.all("push", [(self.step_number, one) for one in pushes])
        self.zero_grad()
        self.step_number += 1

    def set_lr(self, lr: float, names: str = "*") -> None:
        """The learning rate from this step on, of the tables whose names match, for example "model.*". All workers set
        the same. A worker that joins later sets it by itself, from ``step_number``.

        Raises InputError for a rate that is no number of 0 or more, or names that match nothing.
        """
        if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 <= lr < math.inf:
            raise InputError(f"lr is {lr!r}: a number of 0 or more is required")
        found = [name for name in self._tables if fnmatchcase(name, names)]
        if not found:
            raise InputError(f"no table is named {names!r}: there are {sorted(self._tables)}")
        self._rates.update(dict.fromkeys(found, float(lr)))

    def zero_grad(self) -> None:
        """Drop the gradients since the last step."""
        self._pulled.clear()
        for _, p in self._dense.values():
            p.grad = None

    def whole(self, name: str) -> torch.Tensor:
        """All rows of a table as they are before this worker's next step: [rows, width], on the CPU.

        Raises InputError for a name that this worker has not made.
        """
        if name not in self._tables:
            raise InputError(f"no table {name!r}: there are {sorted(self._tables)}")
        return self.pull_whole([self._tables[name]])[name]

    def pushes(self) -> list[Push]:
        """The log of pushes, of all servers and workers, with versions and staleness; the last 100,000 of each server
        since its start."""
        return [Push(**one) for seen in self._client.same("pushes") for one in seen]

    def close(self, failure: str | None = None) -> None:
        """Leave. ``failure``: why this worker cannot go on, which the others are told. The servers end when all have
        left."""
        if not self._closed:
            self._closed = True
            self._client.close(failure)
            self._transport.close()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> None:
        self.close(None if error is None else f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------------------------------------------- of modules

    def pull_rows(self, table: Table, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n] of a table, each once: a leaf [n, width], whose gradient `step` pushes."""
        count = self._settings.servers
        wanted = [rows[rows % count == server] // count for server in range(count)]
        parts = self._client.all("pull", [(self.step_number, {table.name: one.cpu()}) for one in wanted])
        made = torch.empty(len(rows), table.width, dtype=getattr(torch, table.dtype), device=rows.device)
        for server, part in enumerate(parts):
            made[rows % count == server] = part[table.name].to(made.device)
        if torch.is_grad_enabled():
            made.requires_grad_()
            self._pulled.append((table, rows, made))
        return made

    def pull_whole(self, tables: Sequence[Table]) -> dict[str, torch.Tensor]:
        """All rows of tables, by name: [rows, width]."""
        count = self._settings.servers
        parts = self._client.same("pull", self.step_number, {table.name: None for table in tables})
        made = {table.name: torch.empty(table.rows, table.width, dtype=getattr(torch, table.dtype)) for table in tables}
        for server, part in enumerate(parts):
            for name, values in part.items():
                made[name][server::count] = values
        return made

    def _embedding(self, name: str, rows: int, width: int, optimizer: Optimizer, weight: torch.Tensor | None,
                   std: float, seed: int, options: dict[str, Any]) -> Table:
        if weight is not None and (tuple(weight.shape) != (rows, width) or weight.dtype != torch.float32):
            raise InputError(f"weight of table {name!r} is {weight.dtype} {list(weight.shape)}: torch.float32 "
                             f"[{rows}, {width}] is required")
        table = made_table(name, rows, width, optimizer, options, sparse=True, std=std, seed=seed,
                           digest=None if weight is None else digest_of(weight))
        self._declare(table, weight)
        return table

    def _declare(self, table: Table, values: torch.Tensor | None) -> None:
        if table.name in self._tables:
            raise InputError(f"a table {table.name!r} has been made already: give another name")
        count = self._settings.servers
        parts = [None] * count if values is None else [values.detach().cpu()[one::count].contiguous()
                                                       for one in range(count)]
        self._client.all("declare", [(table.plain(), part) for part in parts])
        self._tables[table.name] = table

    def _sparse_gradients(self) -> list[tuple[Table, torch.Tensor, torch.Tensor]]:
        """By table: rows, each once, and the sum of their gradients over the step's pulls."""
        found: dict[str, tuple[Table, list[torch.Tensor], list[torch.Tensor]]] = {}
        for table, rows, leaf in self._pulled:
            if leaf.grad is not None:
                entry = found.setdefault(table.name, (table, [], []))
                entry[1].append(rows.cpu())
                entry[2].append(leaf.grad.cpu())
        made = []
        for table, rows_of, gradients in found.values():
            sparse = torch.sparse_coo_tensor(torch.cat(rows_of).unsqueeze(0), torch.cat(gradients),
                                             (table.rows, table.width), check_invariants=False).coalesce()
            made.append((table, sparse.indices()[0], sparse.values()))
        return made

    def _by_server(self, rows: torch.Tensor, values: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        count = self._settings.servers
        return [(rows[own] // count, values[own]) for own in (rows % count == server for server in range(count))]


__all__ = ["Servers"]
