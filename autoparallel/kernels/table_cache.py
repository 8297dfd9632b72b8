"""A cache on the device for rows of a table in the host's memory: lookups in it, with sparse gradients of the table.

A cache has slots; each holds a row of the table and, of each optimizer state of the table, the same row (a `Column`
each). What a lookup misses is loaded in one copy for each column, into the slots that were used the longest ago; rows
that were stepped since they came are written back before. Rows for which a call leaves no slot are taken from the host
for this call alone.

A program reads `RowCache.stand_in` in place of the table: a tensor of its shape without its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.autograd.function import once_differentiable

from autoparallel.kernels import host_copies
from autoparallel.kernels.sparse_rows import own_bags, own_ids, own_rows
from autoparallel.ops.embedding_bag import embedding_bag


class Column:
    """A tensor on the host with a row for each of a table's, and those of its rows that are in the cache's slots."""

    def __init__(self, host: torch.Tensor, slots: int, device: torch.device) -> None:
        self.host, self.there = host, torch.zeros((slots, *host.shape[1:]), dtype=host.dtype, device=device)


class Held(NamedTuple):
    """Rows of some columns on the device: ``values`` of each, in which row n is at ``at[n]``. ``slots``: of each row in
    the cache, -1 where it has none; None: ``values`` are the cache's own."""

    values: tuple[torch.Tensor, ...]
    at: torch.Tensor
    slots: torch.Tensor | None


class Lookups(NamedTuple):
    """What a cache has done: looked-up ids (each once, also where recompute looks it up again), those of them whose row
    was there (``hits``), and the rows that were loaded from the host and written back to it."""

    ids: int
    hits: int
    loaded: int
    written: int

    @property
    def hit_rate(self) -> float:
        """The share of ids whose row was there; 0 before any lookup."""
        return self.hits / self.ids if self.ids else 0.0


#: By the memory of their stand-ins.
_caches: WeakValueDictionary[int, RowCache] = WeakValueDictionary()


class RowCache:
    """The cache of ``table``, this rank's shard in the host's memory, with so many ``slots`` on a device."""

    def __init__(self, table: torch.Tensor, slots: int, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self.table = Column(table, slots, device)
        self.columns = WeakSet([self.table])
        self.stand_in = torch.zeros(1, dtype=table.dtype, device=device).expand(table.shape)
        self._slot_of = torch.full((len(table),), -1, dtype=torch.int32, device=device)
        self._row_in, self._used = (torch.full((slots,), start, device=device) for start in (-1, 0))
        self._changed = torch.zeros(slots, dtype=torch.bool, device=device)
        self._calls = self._loaded = self._written = 0
        self._seen = torch.zeros(2, dtype=torch.int64, device=device)    # ids, hits
        self._stale = self._is_changed = False
        _caches[_memory(self.stand_in)] = self

    def attach(self, host: torch.Tensor) -> Column:
        """A further column, as long as it lives."""
        made = Column(host, self.slots, self.device)
        self._read(*self._filled(), [made])
        self.columns.add(made)
        return made

    @torch.no_grad()
    def held(self, rows: torch.Tensor, columns: Sequence[Column], times: torch.Tensor | None = None,
             writes: bool = False, apart: bool = False) -> Held:
        """These rows of the columns, each once. ``times``: how many ids ask for each, which are counted; ``writes``:
        the caller writes to all of them, and then calls `put_back`; ``apart``: not in the cache's own memory."""
        slots, missing = self._slots_of(rows, times)
        beyond = missing - self._load(rows, slots) if missing else 0
        if writes and len(rows):
            self._changed[slots if not beyond else slots[slots >= 0]] = True
            self._is_changed = True
        if not beyond and not (apart and len(rows)):
            return Held(tuple(column.there for column in columns), slots, None)
        values = tuple(column.there.index_select(0, slots.clamp(min=0)) for column in columns)
        if beyond:
            lacking = (slots < 0).nonzero().squeeze(1)
            there = _from_host(columns, rows[lacking].cpu(), self.device)
            for value, some in zip(values, there, strict=True):
                value.index_copy_(0, lacking, some)
        return Held(values, torch.arange(len(rows), device=self.device), slots)

    @torch.no_grad()
    def put_back(self, rows: torch.Tensor, columns: Sequence[Column], held: Held) -> None:
        """Write rows that were ``held`` for writing to where they live, if they lie elsewhere."""
        if held.slots is None:
            return
        slots = self._slot_of.index_select(0, rows).long()    # as they are now: of a step that failed, others
        here, lacking = (found.nonzero().squeeze(1) for found in (slots >= 0, slots < 0))
        for column, value in zip(columns, held.values, strict=True):
            column.there.index_copy_(0, slots[here], value[here])
        self._changed[slots[here]] = self._is_changed = True
        _to_host(columns, rows[lacking].cpu(), [value[lacking] for value in held.values])
        self._written += len(lacking)

    @torch.no_grad()
    def flush(self, for_reading: bool) -> None:
        """Write changed rows back to the host; unless it is ``for_reading`` alone, rows are loaded again at the next
        lookup, for the host's may have been written to."""
        if self._is_changed:
            self._write(self._changed.nonzero().squeeze(1))
            self._is_changed = False
        self._stale |= not for_reading

    def lookups(self) -> Lookups:
        """What it has done since it was made, or since `forget_lookups`."""
        ids, hits = self._seen.cpu().tolist()
        return Lookups(ids, hits, self._loaded, self._written)

    def forget_lookups(self) -> None:
        self._loaded = self._written = 0
        self._seen.zero_()

    def _slots_of(self, rows: torch.Tensor, times: torch.Tensor | None) -> tuple[torch.Tensor, int]:
        """The slot of each row (-1: not in the cache), and the number of rows that are not."""
        if self._stale:
            self._read(*self._filled(), self.columns)
            self._stale = False
        self._calls += 1
        slots = self._slot_of.index_select(0, rows).long()
        here = slots >= 0
        if times is not None:
            self._seen += torch.stack([times.sum(), (times * here).sum()])
        found = slots[here]
        self._used[found] = self._calls
        return slots, len(rows) - len(found)

    def _load(self, rows: torch.Tensor, slots: torch.Tensor) -> int:
        """Load the rows without a slot, as many as there are slots for, and fill in these. Returns their number."""
        missing = (slots < 0).nonzero().squeeze(1)
        missing = missing[: self.slots - (len(rows) - len(missing))]
        if len(missing):
            taken = self._used.topk(len(missing), largest=False).indices    # of no row of this call
            if self._is_changed:
                self._write(taken[self._changed[taken]])
            gone, new = self._row_in[taken], rows[missing]
            self._slot_of[gone[gone >= 0]], self._row_in[taken] = -1, -1    # of none, should reading fail
            self._read(taken, new, self.columns)
            self._row_in[taken], self._slot_of[new], self._used[taken] = new, taken.int(), self._calls
            self._loaded += len(missing)
            slots[missing] = taken
        return len(missing)

    def _filled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots with a row, and the rows."""
        slots = (self._row_in >= 0).nonzero().squeeze(1)
        return slots, self._row_in[slots]

    @torch.no_grad()
    def _read(self, slots: torch.Tensor, rows: torch.Tensor, columns: Any) -> None:
        """Copy rows from the host to some slots."""
        columns = tuple(columns)
        for column, value in zip(columns, _from_host(columns, rows.cpu(), self.device), strict=True):
            column.there.index_copy_(0, slots, value)

    def _write(self, slots: torch.Tensor) -> None:
        """Copy the rows of some slots to the host."""
        columns = tuple(self.columns)
        _to_host(columns, self._row_in[slots].cpu(), [column.there.index_select(0, slots) for column in columns])
        self._changed[slots] = False
        self._written += len(slots)


def _from_host(columns: Sequence[Column], rows: torch.Tensor, device: torch.device) -> Sequence[torch.Tensor]:
    if not len(rows):
        return [column.there[:0] for column in columns]
    pinned = device.type != "cpu"
    sources = [torch.empty((len(rows), *column.host.shape[1:]), dtype=column.host.dtype, pin_memory=pinned)
               for column in columns]
    for column, source in zip(columns, sources, strict=True):
        torch.index_select(column.host, 0, rows, out=source)
    return host_copies.begin(sources, device).ready()


def _to_host(columns: Sequence[Column], rows: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
    if len(rows):
        for column, value in zip(columns, host_copies.begin(values, host_copies.HOST).ready(), strict=True):
            column.host.index_copy_(0, rows, value)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Looked(torch.autograd.Function):
    """``weight``, which has ``rows`` of the table at ``at``: its sparse gradient is one of the table's."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, at: torch.Tensor
                ) -> torch.Tensor:
        ctx.save_for_backward(rows, at)
        ctx.shape, ctx.length = table.shape, len(weight)
        return weight.data    # other calls write to slots meanwhile, of which backward reads none

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, at = ctx.saved_tensors
        row_at = rows.new_empty(ctx.length)
        row_at[at] = rows
        index = row_at[gradient._indices()]
        return torch.sparse_coo_tensor(index, gradient._values(), ctx.shape, check_invariants=False), None, None, None


def _look_up(table: torch.Tensor, ids: torch.Tensor, padding_idx: int, apart: bool = False
             ) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rows on the device that have those of the ids, where each id's is, and where that of ``padding_idx`` is (-1: it
    is none of them)."""
    cache = _caches[_memory(table)]
    rows, inverse, times = torch.unique(ids.long(), return_inverse=True, return_counts=True)
    repeats = torch._C._current_graph_task_id() >= 0    # recompute, in backward
    held = cache.held(rows, [cache.table], None if repeats else times, apart=apart)
    weight: torch.Tensor = _Looked.apply(table, held.values[0], rows, held.at)
    padding = held.at[rows == padding_idx].cpu().tolist() if padding_idx >= 0 else []
    return weight, held.at[inverse], padding[0] if padding else -1


def _look_up_own(table: torch.Tensor, ids: torch.Tensor, start: int, length: int, padding_idx: int, apart: bool = False
                 ) -> tuple[torch.Tensor, torch.Tensor, int]:
    """As `_look_up` in a shard, which begins at row ``start`` of the table's ``length``: ids of other shards get
    the first index beyond the rows; ids outside the table get the second, so that their lookup fails."""
    own = own_ids(ids, start, len(table))
    weight, found, padding = _look_up(table, ids[own] - start, max(padding_idx - start, -1), apart)
    index = len(weight) + ~own_ids(ids, 0, length)
    index[own] = found
    return weight, index, padding


def cached_rows(table: torch.Tensor, ids: torch.Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False,
                sparse: bool = False, *, start: int | None = None, length: int = 0, axes: tuple[str, ...] = ()
                ) -> torch.Tensor:
    """As ``aten.embedding`` of a cached table; with ``start``, of a shard of its rows, `own_rows`."""
    if start is None:
        weight, index, padding = _look_up(table, ids, padding_idx)
        return torch.ops.aten.embedding.default(weight, index, padding, False, weight.requires_grad)
    weight, index, padding = _look_up_own(table, ids, start, length, padding_idx)
    return own_rows(weight, index, 0, len(weight) + 1, padding)


def cached_bags(table: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, offsets: torch.Tensor | None,
                mode: int, last: bool, padding_idx: int | None, sparse: bool = False, *, start: int | None = None,
                length: int = 0, axes: tuple[str, ...] = ()) -> torch.Tensor:
    """As `embedding_bag` of a cached table; with ``start``, of a shard of its rows, `own_bags`."""
    apart, none = weights is not None and weights.requires_grad, -1 if padding_idx is None else padding_idx
    if start is None:
        weight, index, padding = _look_up(table, ids, none, apart)
        made: torch.Tensor = embedding_bag(weight, index, weights, offsets, mode, last, _or_none(padding),
                                           weight.requires_grad)
        return made
    weight, index, padding = _look_up_own(table, ids, start, length, none, apart)
    return own_bags(weight, index, weights, offsets, mode, last, _or_none(padding), 0, len(weight) + 1)


def _or_none(padding: int) -> int | None:
    return padding if padding >= 0 else None


__all__ = ["Column", "Held", "Lookups", "RowCache", "cached_bags", "cached_rows"]
