"""Ring attention (Liu, Zaharia, Abbeel 2023): queries, keys and values are cut along the sequence.

Keys and values pass once around the ring, those of the next round while a round is computed. Each rank attends to one
shard of keys per round and combines the results by their log-sum-exp. Backward passes them around again; the gradients
of keys and values follow one rank behind and come home with the last message.

With a causal mask the last of n contiguous shards is 2n - 1 times the work of the first. In the zigzag form the
sequence has 2n chunks, of which rank r takes chunks r and 2n - 1 - r (as Megatron's context parallelism does): its
queries see half of the scores in every round, on each rank.
"""

from __future__ import annotations

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
        whole = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=torch.promote_types(q.dtype, torch.float32))
        none = whole.new_full(whole.shape[:-1], -torch.inf)
        outs, logs, state = list(whole.chunk(self.chunks, 2)), list(none.chunk(self.chunks, 2)), ()
        for _, part, key, value in self.rounds(k, v):
            if not part.keys:
                outs = [after(out, key, value) for out in outs]
                continue
            made, scores, state = flash.attend(self.rows(q, part.first, self.chunks), self.rows(key, 0, part.keys),
                                               self.rows(value, 0, part.keys), part.causal, self.scale)
            number = self.chunks - part.first
            for at, out, log in zip(range(part.first, self.chunks), made.chunk(number, 2), scores.chunk(number, 2),
                                    strict=True):
                joined = torch.logaddexp(logs[at], log)
                outs[at] = outs[at] * (logs[at] - joined).exp().unsqueeze(-1) + out * (log - joined).exp().unsqueeze(-1)
                logs[at] = joined
        return self.contiguous(_joined(outs).to(q.dtype))[0], _joined(logs), state

    def gradients(self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, state: Any
                  ) -> tuple[Tensor, Tensor, Tensor]:
        """Those of `attend`, which gave ``out`` (here in the form of the queries), ``logs`` and the state."""
        dq, own, moving = list[Tensor](), list[Tensor](), list[Tensor]()    # by chunk; of keys, then of values
        for step, part, key, value in self.rounds(k, v):    # step 0 sees this rank's own keys
            if step > 1:  # gradients begin with the first rank after the owner
                moving = list(shifted(moving, self.axis))
            if not part.keys:
                dq, moving = ([after(one, gradient, q, key, value, out, logs) for one in some] for some in (dq, moving))
                continue
            of_out, rows, row_outs, row_logs = (self.rows(x, part.first, self.chunks) for x in (gradient, q, out, logs))
            made = flash.attend_backward(of_out, rows, self.rows(key, 0, part.keys), self.rows(value, 0, part.keys),
                                         row_outs, row_logs.contiguous(), part.causal, self.scale, state)
            of_q = made[0].to(logs.dtype).chunk(self.chunks - part.first, 2)
            of_keys = [x.to(logs.dtype).chunk(part.keys, 2) for x in made[1:]]
            if not step:
                dq, own = list(of_q), [one for some in of_keys for one in some]
                moving = [torch.zeros_like(one) for one in own]
                continue
            for at, one in enumerate(of_q, part.first):
                dq[at] = dq[at] + one
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
