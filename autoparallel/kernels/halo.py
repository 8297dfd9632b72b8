"""Halo exchange: convolution, pooling, slices and constant padding on shards of the dims that they window.

Each rank computes its shard of the output. It collects the input rows that the shard reads from the ranks that hold
them, pads what lies outside the tensor, and runs the op without padding. Backward sends the rows' gradients back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from autoparallel.kernels import groups
from autoparallel.kernels.collectives import exchanged_rows
from autoparallel.kernels.groups import Axis
from autoparallel.layout.shapes import shard_of
from autoparallel.ops.arguments import arguments
from autoparallel.ops.windows import Window, of_each, window_of_rows, windows_of

Tensor = torch.Tensor
Span = tuple[int, int]
aten = torch.ops.aten
#: Convolutions whose padding is a name ("same", "valid") -> the overload with numbers.
IN_NUMBERS = {aten.conv1d.padding: aten.conv1d.default, aten.conv2d.padding: aten.conv2d.default,
              aten.conv3d.padding: aten.conv3d.default}


@dataclass(frozen=True)
class Borders:
    """One halo exchange along ``dim``: this rank holds ``length`` rows, keeps ``own`` (start, length), sends
    ``sent[r]`` (start, length) to rank r and receives ``received[r]`` rows from it; none to and from itself."""

    axis: Axis
    dim: int
    length: int
    own: Span
    sent: tuple[Span, ...]
    received: tuple[int, ...]

    @property
    def _sent_rows(self) -> list[int]:
        return [length for _, length in self.sent]

    def collect(self, x: Tensor) -> Tensor:
        """All rows that this rank needs, in global order."""
        gone = torch.cat([x.narrow(self.dim, *span).movedim(self.dim, 0) for span in self.sent])
        came = exchanged_rows(gone, self.axis, self.received, self._sent_rows)
        parts = [rows.movedim(0, self.dim) for rows in came.split(list(self.received))]
        parts[self.axis.rank] = x.narrow(self.dim, *self.own)
        return torch.cat(parts, self.dim)

    def give_back(self, rows: Tensor) -> Tensor:
        """The transpose of `collect`: collected rows, summed at the ranks and rows they came from."""
        counts = list(self.received)
        counts[self.axis.rank] = self.own[1]
        parts = [part.movedim(self.dim, 0) for part in rows.split(counts, self.dim)]
        own, parts[self.axis.rank] = parts[self.axis.rank], parts[self.axis.rank][:0]
        home = exchanged_rows(torch.cat(parts), self.axis, self._sent_rows, self.received)
        made = own.new_zeros((self.length, *own.shape[1:]))
        for (start, length), part in zip((self.own, *self.sent), (own, *home.split(self._sent_rows)), strict=True):
            made.narrow(0, start, length).add_(part)
        return made.movedim(0, self.dim)


class _Moved(torch.autograd.Function):
    """`Borders.collect`, or ``back`` `Borders.give_back`; each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, borders: Borders, back: bool) -> Tensor:
        ctx.borders, ctx.back = borders, back
        return borders.give_back(x) if back else borders.collect(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Moved.apply(gradient, ctx.borders, not ctx.back), None, None


def exchanged_borders(x: Tensor, axis: Axis, dim: int, held: Sequence[Span], needed: Sequence[Span]) -> Tensor:
    """The rows ``needed[axis.rank]`` of dim ``dim``. Spans are (first, end) of global rows, one per rank; ``x`` is this
    rank's ``held`` rows. No communication if every rank holds what it needs."""

    def both(holder: int, reader: int) -> Span:
        """(start within the holder's shard, length) of the rows that the reader needs."""
        first, end = max(held[holder][0], needed[reader][0]), min(held[holder][1], needed[reader][1])
        return (first - held[holder][0], end - first) if first < end else (0, 0)

    me, ranks = axis.rank, range(axis.size)
    if not any(both(a, b)[1] for a, b in itertools.permutations(ranks, 2)):
        return x.narrow(dim, *both(me, me))
    sent = tuple(both(me, r) if r != me else (0, 0) for r in ranks)
    received = tuple(both(r, me)[1] if r != me else 0 for r in ranks)
    return _Moved.apply(x, Borders(axis, dim, x.shape[dim], both(me, me), sent, received), False)


def on_windows(*args: Any, op: Any, axes: tuple[str, ...], dims: tuple[int, ...], sizes: tuple[Span, ...],
               **kwargs: Any) -> Tensor:
    """A convolution, transposed convolution or pooling ``op`` on spatial shards. Dim ``dims[i]`` of input and output is
    cut over axis ``axes[i]``; ``sizes[i]`` are its global lengths (input, output)."""
    given = arguments(op, args, kwargs)
    name, windows = next(iter(given)), windows_of(op, given)
    first = given[name].dim() - len(windows)
    x, outside = _read(given[name], axes, dims, sizes, [windows[dim - first] for dim in dims])
    if "output_padding" in given:
        return _spread(op, given, _filled(x, outside, 0.0), axes, dims, sizes, windows)
    if isinstance(given["padding"], str):
        outside = {first + d: (w.before, w.after) for d, w in enumerate(windows)} | outside
    padding = [0 if first + d in outside else w.before for d, w in enumerate(windows)]
    given |= {name: _filled(x, outside, -math.inf if "max_pool" in op._schema.name else 0.0), "padding": padding}
    return IN_NUMBERS.get(op, op)(*given.values())


def _spread(op: Any, given: dict[str, Any], read: Tensor, axes: Sequence[str], dims: Sequence[int],
            sizes: Sequence[Span], windows: Sequence[Window]) -> Tensor:
    """A transposed convolution of the rows ``read``, narrowed to this rank's shard of the output."""
    first = read.dim() - len(windows)
    padding, more = ([0 if first + d in dims else of_each(given[name], len(windows))[d] for d in range(len(windows))]
                     for name in ("padding", "output_padding"))
    made = op(*(given | {"input": read, "padding": padding, "output_padding": more}).values())
    for name, dim, (_, size) in zip(axes, dims, sizes, strict=True):
        axis, window = groups.current(name), windows[dim - first]
        start, length = shard_of(size, axis.size, axis.rank)
        begin = window.reads(start, start + length)[0] * window.stride - window.before
        made = made.narrow(dim, start - begin, length)
    return made


def on_rows(*args: Any, op: Any, axes: tuple[str, ...], dims: tuple[int, ...], sizes: tuple[Span, ...], **kwargs: Any
            ) -> Tensor:
    """A slice or constant padding ``op`` on shards of the dims whose length it changes; arguments as `on_windows`."""
    given = arguments(op, args, kwargs)
    x: Tensor = next(iter(given.values()))
    moved = [window_of_rows(op, given, dim, x.dim()) for dim in range(x.dim())]
    made, outside = _read(x, axes, dims, sizes, [moved[dim] for dim in dims])
    outside = {dim: (window.before, window.after) for dim, window in enumerate(moved)} | outside
    return _filled(made, outside, given.get("value") or 0.0)


def _read(x: Tensor, axes: Sequence[str], dims: Sequence[int], sizes: Sequence[Span], windows: Sequence[Window]
          ) -> tuple[Tensor, dict[int, Span]]:
    """The input rows that this rank's shard of the output reads; by dim, the lengths (before, after) that lie outside
    the tensor."""
    outside: dict[int, Span] = {}
    for name, dim, (size, made), window in zip(axes, dims, sizes, windows, strict=True):
        axis = groups.current(name)
        read = [window.reads(start, start + length) for start, length in _shards(made, axis)]
        needed = [(min(max(a, 0), size), min(max(b, 0), size)) for a, b in read]
        held = [(start, start + length) for start, length in _shards(size, axis)]
        x = exchanged_borders(x, axis, dim, held, needed)
        (begin, end), (a, b) = read[axis.rank], needed[axis.rank]
        before = min(max(a - begin, 0), end - begin)
        outside[dim] = before, end - begin - (b - a) - before
    return x, outside


def _filled(x: Tensor, outside: Mapping[int, Span], value: float) -> Tensor:
    """x, padded by ``outside`` (before, after) of each dim with ``value``."""
    ends = [n for dim in reversed(range(x.dim())) for n in outside.get(dim, (0, 0))]
    return F.pad(x, ends, value=value) if any(ends) else x


def _shards(size: int, axis: Axis) -> list[Span]:
    """(start, length) of every rank's shard."""
    return [shard_of(size, axis.size, rank) for rank in range(axis.size)]
