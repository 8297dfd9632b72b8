"""Tables on the host whose hot rows the device holds: parameters and optimizer states that are written back before they
are read, and optimizers that step the device's rows.

Programs look up, and optimizers step, in a `RowCache`; whoever else reads a table, or a state of its, reads its local
shard on the host, which has all rows then. (A tensor of ``to_local()``, or a view, has them as they were when it was
taken.)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoparallel.errors import InputError
from autoparallel.kernels.host_copies import table_memory
from autoparallel.kernels.table_cache import Column, Lookups, RowCache

_DETACH = torch.ops.aten.detach.default
#: The ops by which optimizers make states, which are on the host as the table.
_LIKE = frozenset({torch.ops.aten.zeros_like.default, torch.ops.aten.full_like.default})
_LOCAL: Any = DTensor.__dict__["_local_tensor"]


class CachedTable(DTensor):
    """A table, or an optimizer state of one, with its shard on the host and hot rows on the device."""

    cache: RowCache
    column: Column
    _is_read: bool

    @staticmethod
    def of(value: DTensor, cache: RowCache, column: Column) -> CachedTable:
        """The DTensor, whose shard is the column's tensor on the host. (For autograd it is one of the device, on which
        its gradient is made.)"""
        there = torch.empty(0, dtype=value.dtype, device=cache.device)
        made = cast(CachedTable, DTensor.__new__(CachedTable, there, value._spec, requires_grad=False))
        _LOCAL.__set__(made, _local(value))
        made.cache, made.column, made._is_read = cache, column, False
        return made

    @property
    def _local_tensor(self) -> Tensor:
        """The shard, with all rows. Whoever asks may write to it, but for ops that only read."""
        if (cache := self.__dict__.get("cache")) is not None:
            cache.flush(for_reading=self._is_read)
        return _local(self)

    @_local_tensor.setter
    def _local_tensor(self, value: Tensor) -> None:
        _LOCAL.__set__(self, value)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DETACH:
            return CachedTable.of(args[0], args[0].cache, args[0].column)
        tables = [value for value in args if isinstance(value, CachedTable)] if _only_reads(func) else []
        try:
            for table in tables:
                table._is_read = True
            found = super().__torch_dispatch__(func, types, args, kwargs or {})
            return _column(args[0], found) if func in _LIKE and isinstance(args[0], CachedTable) else found
        finally:
            for table in tables:
                table._is_read = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A parameter with a cache of its own; of a state a copy without."""
        if id(self) not in memo:
            copy: Any = DTensor(table_memory(self._local_tensor), self._spec, requires_grad=False)
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(cached(copy, self.cache.slots, self.cache.device), self.requires_grad)
            vars(copy).update({name: deepcopy(value, memo) for name, value in vars(self).items()
                               if name not in ("cache", "column", "_is_read")})
            memo[id(self)] = copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files have a DTensor."""
        return DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad).__reduce_ex__(protocol)


def _local(value: DTensor) -> Tensor:
    return cast(Tensor, _LOCAL.__get__(value))


def _only_reads(func: Any) -> bool:
    """Whether an op writes to none of its operands, and returns no view of one."""
    schema = func._schema
    return not schema.is_mutable and all(made.alias_info is None for made in schema.returns)


def cached(value: DTensor, slots: int, device: torch.device) -> CachedTable:
    """A table whose shard is on the host, with a cache of its own."""
    cache = RowCache(_local(value), slots, device)
    return CachedTable.of(value, cache, cache.table)


@dataclass(frozen=True)
class CachedMemory:
    """The way of a table to the host's memory, with a cache of so many ``slots`` on a device."""

    slots: int
    device: torch.device

    def __call__(self, value: Tensor) -> Tensor:
        return table_memory(value)

    def placed(self, value: DTensor) -> CachedTable:
        """The table that is there, with its cache."""
        return cached(value, self.slots, self.device)


def read_by_programs(value: DTensor) -> Tensor:
    """The local shard, or what programs read in place of a cached table's."""
    return value.cache.stand_in if isinstance(value, CachedTable) else value._local_tensor


def lookups_of(parameters: Any, forget: bool) -> dict[str, Lookups]:
    """What the caches of some named parameters have done, by name."""
    found = {name: value.cache for name, value in parameters if isinstance(value, CachedTable)}
    told = {name: cache.lookups() for name, cache in found.items()}
    for cache in found.values() if forget else ():
        cache.forget_lookups()
    return told


# --- optimizers -------------------------------------------------------------------------------------------------------


def has_cached(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has cached tables."""
    return any(isinstance(p, CachedTable) for group in optimizer.param_groups for p in group["params"])


def check_steps_rows(optimizer: torch.optim.Optimizer, is_elementwise: bool) -> None:
    """Raises InputError for an optimizer of cached tables that changes rows without a gradient, or steps in a way of
    its own."""
    takes = isinstance(optimizer, torch.optim.SparseAdam) or (
        is_elementwise and isinstance(optimizer, (torch.optim.Adagrad, torch.optim.SGD)))
    for group in optimizer.param_groups:
        table = next((p for p in group["params"] if isinstance(p, CachedTable)), None)
        if table is not None and not takes:
            raise _cannot_step(optimizer, table)


def _cannot_step(optimizer: torch.optim.Optimizer, table: CachedTable, given: str = "") -> InputError:
    return InputError(f"{type(optimizer).__name__}{given} cannot step a table {list(table.shape)} with a cache on the "
                      "device, of which it changes rows that have no gradient, or which it does not know\n  Give its "
                      "tables to SparseAdam, Adagrad, or SGD without momentum; or pin them as 'host', without a cache.")


def on_rows(optimizer: torch.optim.Optimizer) -> ExitStack:
    """Until it is closed, the groups of an optimizer have rows on the device in place of cached tables: those with a
    gradient. (A step that failed leaves it open, perhaps for good; no generator, which would run on at its end.)"""
    with ExitStack() as taken:
        for group in optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                if isinstance(parameter, CachedTable) and parameter.grad is not None:
                    taken.callback(_take_rows(optimizer, group, number, parameter))
        return taken.pop_all()


def _take_rows(optimizer: torch.optim.Optimizer, group: dict[str, Any], number: int, table: CachedTable
               ) -> Callable[[], None]:
    """Put the rows with a gradient in the place of a table, with theirs of the states; returns the way back."""
    if momentum := group.get("momentum"):    # perhaps set since the last step
        raise _cannot_step(optimizer, table, f"(momentum={momentum})")
    rows, values = _entries(table)
    states = optimizer.state.pop(table, {})
    kept = {name: _column(table, value) if isinstance(value, DTensor) else value for name, value in states.items()}
    columns = [table.column, *(value.column for value in kept.values() if isinstance(value, CachedTable))]
    held = table.cache.held(rows, columns, writes=True)
    there = iter(held.values)
    shard = next(there).detach()
    shard.grad = torch.sparse_coo_tensor(held.at.unsqueeze(0), values, shard.shape, check_invariants=False)
    if kept:
        optimizer.state[shard] = {name: next(there) if isinstance(value, CachedTable) else value
                                  for name, value in kept.items()}
    group["params"][number] = shard

    def back() -> None:
        group["params"][number] = table
        shard.grad = None
        if made := optimizer.state.pop(shard, None):
            optimizer.state[table] = {name: kept[name] if isinstance(kept.get(name), CachedTable) else value
                                      for name, value in made.items()}
        table.cache.put_back(rows, columns, held)

    return back


def _entries(table: CachedTable) -> tuple[Tensor, Tensor]:
    """The rows with a gradient, each once, and their entries. Raises InputError for a dense gradient."""
    gradient = table.grad
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    if local is None or not local.is_sparse:
        raise InputError(f"the gradient of a table {list(table.shape)} with a cache on the device is dense\n  Give the "
                         "sparse gradient of backward, scaled; or pin the table as 'host', without a cache.")
    whole = local.coalesce()
    return whole._indices()[0], whole._values()


def _column(table: CachedTable, state: DTensor) -> CachedTable:
    """A state of the table with a column of its cache."""
    if isinstance(state, CachedTable) and state.cache is table.cache:
        return state
    local = state._local_tensor.detach().cpu()
    plain = DTensor(local, table._spec, requires_grad=False)
    return CachedTable.of(plain, table.cache, table.cache.attach(local))


__all__ = ["CachedMemory", "CachedTable", "cached", "check_steps_rows", "has_cached", "lookups_of", "on_rows",
           "read_by_programs"]
