"""Several tensors in one all-gather or reduce-scatter: small ones share a bucket, large ones are sent from where they
lie.

A bucket costs a copy of what goes into it or comes out of it, of the whole tensor. A large tensor whose cut dim is the
first needs none: its shards one after the other are the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autoparallel.kernels.collectives import (
    Sizes,
    begin_all_gather,
    begin_reduce_scatter,
    begin_sums_of_shards,
    begin_whole_tensors,
    gathered_up,
    joined,
    padded,
)
from autoparallel.kernels.groups import Axis
from autoparallel.kernels.tracing import is_traced
from autoparallel.layout import Placement
from autoparallel.schedule.step_config import LARGE_BYTES

#: A tensor's cut dim, and the lengths of all ranks' shards along it.
Cut = tuple[int, Sizes]


@dataclass(frozen=True)
class _Split:
    """Positions of large tensors, each its own message, and of small tensors, which share a bucket."""

    alone: tuple[int, ...]
    together: tuple[int, ...]

    @staticmethod
    def of(cuts: Sequence[Cut], whole_bytes: Sequence[int]) -> _Split:
        """The same on all ranks. In a traced program all share a bucket: a compiler fuses the copies."""
        alone = [] if is_traced() else [
            number for number, ((dim, sizes), size) in enumerate(zip(cuts, whole_bytes, strict=True))
            if dim == 0 and len(set(sizes)) == 1 and size >= LARGE_BYTES]
        return _Split(tuple(alone), tuple(n for n in range(len(cuts)) if n not in alone))

    def merged(self, alone: Sequence[torch.Tensor], together: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Both kinds of results, in the order of the tensors."""
        made = dict(zip((*self.alone, *self.together), (*alone, *together), strict=True))
        return tuple(made[number] for number in sorted(made))


def begin_gathers_of(values: Sequence[torch.Tensor], axis: Axis, sources: Sequence[Placement], sizes: Sequence[Sizes]
                     ) -> Callable[[], tuple[torch.Tensor, ...]]:
    """`begin_all_gathers` of shards of these placements, also interleaved ones."""
    finish = begin_all_gathers(values, axis, [(s.dim, lengths) for s, lengths in zip(sources, sizes, strict=True)])
    if not any(s.is_interleaved for s in sources):
        return finish
    return lambda: tuple(gathered_up(x, s, axis.size) if s.is_interleaved else x
                         for x, s in zip(finish(), sources, strict=True))


def begin_all_gathers(values: Sequence[torch.Tensor], axis: Axis, cuts: Sequence[Cut]
                      ) -> Callable[[], tuple[torch.Tensor, ...]]:
    """All-gather several tensors of one dtype, on GPUs as one group of messages."""
    if len(values) == 1:
        finish_one = begin_all_gather(values[0], axis, *cuts[0])
        return lambda: (finish_one(),)
    split = _Split.of(cuts, [axis.size * x.nbytes for x in values])
    sent = [values[n].contiguous() for n in split.alone]
    shards = [padded(values[n], max(cuts[n][1]), cuts[n][0]) for n in split.together]
    shapes, places = [x.shape for x in shards], [cuts[n] for n in split.together]
    if shards:
        sent.append(torch.cat([x.reshape(-1) for x in shards]))
    gathered = begin_whole_tensors(sent, axis)
    del values, shards, sent

    def finish() -> tuple[torch.Tensor, ...]:
        whole = [wait() for wait in gathered]
        if not shapes:
            return tuple(whole)
        by_rank = whole.pop().view(axis.size, -1).split([shape.numel() for shape in shapes], dim=1)
        return split.merged(whole, [_own(part.unflatten(1, shape), *cut)
                                    for part, shape, cut in zip(by_rank, shapes, places, strict=True)])

    return finish


def _own(shards: torch.Tensor, dim: int, sizes: Sizes) -> torch.Tensor:
    """[ranks, *the longest shard] -> the whole tensor, in memory of its own."""
    if len(shards) == 1:  # which is contiguous as it is: a part of its bucket
        return shards[0].clone(memory_format=torch.contiguous_format)
    return joined(shards, dim, sizes).contiguous()


def begin_reduce_scatters(values: Sequence[torch.Tensor], axis: Axis, cuts: Sequence[Cut]
                          ) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Reduce-scatter several tensors of one dtype, on GPUs as one group of messages. Results of tensors in a bucket
    are views of it, but where shards are uneven along another dim than the first."""
    if len(values) == 1:
        finish_one = begin_reduce_scatter(values[0], axis, *cuts[0])
        return lambda: (finish_one(),)
    split = _Split.of(cuts, [x.nbytes for x in values])
    sent = [values[n].contiguous() for n in split.alone]
    places = [cuts[n] for n in split.together]
    shapes = [torch.Size((*values[n].shape[:dim], max(sizes), *values[n].shape[dim + 1:]))
              for n, (dim, sizes) in zip(split.together, places, strict=True)]
    if shapes:
        sent.append(_bucket([values[n] for n in split.together], axis, places, shapes))
    reduced = begin_sums_of_shards(sent, axis)
    del values, sent

    def finish() -> tuple[torch.Tensor, ...]:
        made = [wait() for wait in reduced]
        if not shapes:
            return tuple(made)
        parts = made.pop().split([shape.numel() for shape in shapes])
        return split.merged(made, [part.view(shape).narrow(dim, 0, sizes[axis.rank]).contiguous()
                                   for part, shape, (dim, sizes) in zip(parts, shapes, places, strict=True)])

    return finish


def _bucket(values: Sequence[torch.Tensor], axis: Axis, cuts: Sequence[Cut], shapes: Sequence[torch.Size]
            ) -> torch.Tensor:
    """Tensors one after the other, by rank: [ranks * the shards' numbers of elements]."""
    lengths = [shape.numel() for shape in shapes]
    bucket = values[0].new_empty((axis.size, sum(lengths)))
    for x, part, shape, (dim, sizes) in zip(values, bucket.split(lengths, dim=1), shapes, cuts, strict=True):
        _cut_into(part.unflatten(1, shape), x, dim, sizes)
    return bucket.view(-1)


def _cut_into(shards: torch.Tensor, x: torch.Tensor, dim: int, sizes: Sizes) -> None:
    """Write a whole tensor as shards [ranks, *the longest shard], padded with zeros."""
    if len(set(sizes)) == 1:
        shards.copy_(x.unflatten(dim, (len(sizes), sizes[0])).movedim(dim, 0))
        return
    shards.zero_()
    for shard, part, size in zip(shards, x.split(list(sizes), dim), sizes, strict=True):
        shard.narrow(dim, 0, size).copy_(part)
