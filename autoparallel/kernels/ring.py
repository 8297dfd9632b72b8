"""Ring attention (Liu, Zaharia, Abbeel 2023): queries, keys and values are cut along the sequence.

Keys and values pass once around the ring, those of the next round while a round is computed. Each rank attends to one
shard of keys per round and combines the results by their log-sum-exp. Backward passes them around again; the gradients
of keys and values follow one rank behind, each round's while the next is computed, and arrive with a last message.

With a causal mask the last of n contiguous shards is 2n - 1 times the work of the first. In the zigzag form the
sequence has 2n chunks, of which rank r takes chunks r and 2n - 1 - r (as Megatron's context parallelism does): its
queries see half of the scores in every round, on each rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autoparallel.kernels import flash, groups, kept_results
from autoparallel.kernels.collectives import begin_rows_exchanged, begin_shifted, shifted
from autoparallel.kernels.groups import Axis
from autoparallel.kernels.tracing import after, is_traced, marked

Tensor = torch.Tensor
#: Marks of a traced graph's nodes: of the rounds of a forward, and of chunks that move to the zigzag form and back.
RING, MOVING = "ring", "chunks moving"
#: Chunks of a shard in the zigzag form.
HALVES = 2


@dataclass(frozen=True)
class _Round:
    """The part of a round's scores that is computed: of the queries' chunks from ``first``, and of ``keys`` chunks of
    the shard that the rank holds; none if no query sees these. ``causal``: within them, of the rank's own shard."""

    first: int = 0
    keys: int = 0
    causal: bool = False


@dataclass(frozen=True)
class _Ring:
    """One call: ``chunks`` of a shard, 1 or, zigzag, `HALVES`."""

    axis: Axis
    causal: bool
    scale: float
    chunks: int

    def rounds(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, _Round, Tensor, Tensor]]:
        """For each round: its number, the part of it that is computed, and the keys and values that the rank holds.
        Those of the next round are sent meanwhile."""
        last = self.axis.size - 1
        for step in range(last):
            coming = begin_shifted((key, value), self.axis)
            yield step, self._part(step), key, value
            key, value = coming()
        yield last, self._part(last), key, value

    def _part(self, step: int) -> _Round:
        source = (self.axis.rank - step) % self.axis.size
        if source == self.axis.rank or not self.causal:
            return _Round(0, self.chunks, self.causal)
        if source < self.axis.rank:
            return _Round(0, 1)    # of two chunks the second comes after all queries
        return _Round(1, self.chunks) if self.chunks > 1 else _Round()

    def rows(self, x: Tensor, first: int, last: int, dim: int = 2) -> Tensor:
        """The chunks of a tensor from ``first`` to before ``last``."""
        size = x.shape[dim] // self.chunks
        return x if last - first == self.chunks else x.narrow(dim, first * size, (last - first) * size)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Any]:
        """As `flash.attend`, over all shards of the keys, with a contiguous shard as the result; the state is that of
        the last."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        outs, logs, state = list[Tensor](), list[Tensor](), ()    # by chunk
        for step, part, key, value in self.rounds(k, v):
            if not part.keys:
                outs = [after(out, key, value) for out in outs]
                continue
            made, scores, state = flash.attend(self.rows(q, part.first, self.chunks), self.rows(key, 0, part.keys),
                                               self.rows(value, 0, part.keys), part.causal, self.scale)
            of_chunks = [_chunks(x.to(dtype), self.chunks - part.first) for x in (made, scores)]
            if not step:    # all queries see keys of the rank's own shard
                outs, logs = of_chunks
                continue
            for at, out, log in zip(range(part.first, self.chunks), *of_chunks, strict=True):
                outs[at] = torch.lerp(outs[at], out, torch.sigmoid(log - logs[at]).unsqueeze(-1))
                logs[at] = torch.logaddexp(logs[at], log)
        # What only backward reads, as the logarithms, the partitioner would leave to backward, and the ring with it.
        log = _joined(logs)
        return self.contiguous(after(_joined(outs), log).to(q.dtype))[0], log, state

    def gradients(self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, state: Any
                  ) -> tuple[Tensor, Tensor, Tensor]:
        """Those of `attend`, which gave ``out`` (here in the form of the queries), ``logs`` and the state."""
        dq, own, moving = list[Tensor](), list[Tensor](), list[Tensor]()    # by chunk; of keys, then of values
        for step, part, key, value in self.rounds(k, v):    # step 0 sees this rank's own keys
            # gradients begin with the first rank after the owner, and travel while those of a round are computed
            arriving = begin_shifted(moving, self.axis) if step > 1 else None
            if not part.keys:
                moving = list(arriving()) if arriving else moving
                dq, moving = ([after(one, gradient, q, key, value, out, logs) for one in some] for some in (dq, moving))
                continue
            of_out, rows, row_outs, row_logs = (self.rows(x, part.first, self.chunks) for x in (gradient, q, out, logs))
            made = flash.attend_backward(of_out, rows, self.rows(key, 0, part.keys), self.rows(value, 0, part.keys),
                                         row_outs, row_logs.contiguous(), part.causal, self.scale, state)
            of_q, *of_keys = map(_chunks, made, (self.chunks - part.first, part.keys, part.keys))
            if not step:
                dq, own = ([one.to(logs.dtype) for one in some] for some in (of_q, itertools.chain(*of_keys)))
                moving = [torch.zeros_like(one) for one in own]
                continue
            moving = list(arriving()) if arriving else moving
            for at, one in enumerate(of_q, part.first):
                dq[at] = dq[at] + one    # in the dtype of the sum
            for which, some in enumerate(of_keys):
                for at, one in enumerate(some, which * self.chunks):
                    moving[at] = moving[at] + one
        if self.axis.size > 1:
            moving = list(shifted(moving, self.axis))
        both = [mine + theirs for mine, theirs in zip(own, moving, strict=True)]
        dk, dv = both[: self.chunks], both[self.chunks :]
        return _joined(dq).to(q.dtype), _joined(dk).to(k.dtype), _joined(dv).to(v.dtype)

    def zigzag(self, *shards: Tensor) -> Sequence[Tensor]:
        """Contiguous shards as the rank's chunks, which are others in the zigzag form."""
        if self.chunks == 1:
            return shards
        rank, size = self.axis.rank, self.axis.size
        return self._moved(shards, [_zigzag_rank(2 * rank + n, size) for n in (0, 1)], [rank // 2, self._last // 2])

    def contiguous(self, *shards: Tensor) -> Sequence[Tensor]:
        """The inverse of `zigzag`."""
        if self.chunks == 1:
            return shards
        rank, size = self.axis.rank, self.axis.size
        return self._moved(shards, [rank // 2, self._last // 2], [_zigzag_rank(2 * rank + n, size) for n in (0, 1)])

    @property
    def _last(self) -> int:
        """The second of the rank's chunks in the zigzag form."""
        return 2 * self.axis.size - 1 - self.axis.rank

    def _moved(self, shards: Sequence[Tensor], targets: Sequence[int], sources: Sequence[int]) -> list[Tensor]:
        """The chunks received from two ranks, for those of each shard, which are sent to two. They move again where a
        block is recomputed."""
        with marked(MOVING), kept_results.unseen():
            return [self._moved_one(x, targets, sources) for x in shards]

    def _moved_one(self, x: Tensor, targets: Sequence[int], sources: Sequence[int]) -> Tensor:
        rows = x.movedim(2, 0)
        if targets[0] > targets[1]:
            rows = torch.cat(rows.chunk(2)[::-1])
        each = len(rows) // 2
        received, sent = ([each * ranks.count(rank) for rank in range(self.axis.size)]
                          for ranks in (list(sources), list(targets)))
        [made] = begin_rows_exchanged([rows.contiguous()], self.axis, received, sent)()
        if sources[0] > sources[1]:
            made = torch.cat(made.chunk(2)[::-1])
        return made.movedim(0, 2).contiguous()


def _chunks(x: Tensor, count: int) -> list[Tensor]:
    """Equal parts along the sequence, as slices: a part of a `split` is not kept by the partitioner, which would run
    all before it again."""
    size = x.shape[2] // count
    return [x.narrow(2, n * size, size) for n in range(count)] if count > 1 else [x]


def _joined(chunks: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(chunks), 2) if len(chunks) > 1 else chunks[0]


def _zigzag_rank(chunk: int, ranks: int) -> int:
    return chunk if chunk < ranks else 2 * ranks - 1 - chunk


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        ctx.ring = ring
        q, k, v = ring.zigzag(q, k, v)
        with marked(RING):
            out, logs, ctx.state = kept_results.once(lambda: ring.attend(q, k, v))
        ctx.save_for_backward(q, k, v, out, logs)    # the result as others save it
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ring: _Ring = ctx.ring
        q, k, v, out, logs = ctx.saved_tensors
        gradient, out = ring.zigzag(gradient, out)
        made = ring.gradients(gradient, q, k, v, out, logs, ctx.state)
        return *ring.contiguous(*made), None


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False, axes: tuple[str, ...],
) -> Tensor:
    """Attention of even shards [batch, heads, sequence / n, head dim] over the one axis of ``axes``. No mask, no
    dropout. Causal, and of shards with an even number of rows, in the zigzag form, to which chunks move and back."""
    (name,) = axes
    chunks = HALVES if is_causal and q.shape[2] % HALVES == 0 else 1
    if is_traced() and flash.adds_up_groups(q, k):    # chunks of such sums have other strides than AOTAutograd traces
        chunks = 1
    ring = _Ring(groups.current(name), is_causal, q.shape[-1] ** -0.5 if scale is None else scale, chunks)
    made: Tensor = _Attention.apply(q, k, v, ring)
    return made
