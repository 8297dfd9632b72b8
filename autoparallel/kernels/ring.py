"""Ring attention (Liu, Zaharia, Abbeel 2023): queries, keys and values are cut along the sequence.

Keys and values pass once around the ring. Each rank attends to one shard of keys per round and combines the results by
their log-sum-exp. Backward passes them around again; the gradients of keys and values follow one rank behind and
come home with the last message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autoparallel.kernels import flash, groups, kept_results
from autoparallel.kernels.collectives import shifted
from autoparallel.kernels.groups import Axis
from autoparallel.kernels.tracing import after, marked

Tensor = torch.Tensor
#: What marks the ops of a forward in a traced graph.
RING = "ring"


def _around(axis: Axis, causal: bool) -> Iterator[tuple[int, bool, bool]]:
    """For each round: (round, whether the mask lets this rank see the shard it holds, whether that is its own)."""
    for step in range(axis.size):
        source = (axis.rank - step) % axis.size
        yield step, not causal or source <= axis.rank, source == axis.rank


def _attend(q: Tensor, k: Tensor, v: Tensor, axis: Axis, causal: bool, scale: float) -> tuple[Tensor, Tensor, Any]:
    """As `flash.attend`, over all shards of the keys; the state is that of the last."""
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=torch.promote_types(q.dtype, torch.float32))
    logs = out.new_full(out.shape[:-1], -torch.inf)
    key, value, state = k, v, ()
    for step, seen, own in _around(axis, causal):
        if step:
            key, value = shifted((key, value), axis)
        if seen:
            part, part_logs, state = flash.attend(q, key, value, causal and own, scale)
            joined = torch.logaddexp(logs, part_logs)
            out = out * (logs - joined).exp().unsqueeze(-1) + part * (part_logs - joined).exp().unsqueeze(-1)
            logs = joined
        else:
            out = after(out, key, value)
    return out.to(q.dtype), logs, state


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, causal: bool, scale: float) -> Tensor:
        ctx.call = axis, causal, scale
        with marked(RING):
            out, logs, ctx.state = kept_results.once(lambda: _attend(q, k, v, axis, causal, scale))
        ctx.save_for_backward(q, k, v, out, logs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        axis, causal, scale = ctx.call
        q, k, v, out, logs = ctx.saved_tensors
        key, value = k, v
        dq = own_dk = own_dv = dk = dv = q.new_empty(0)  # step 0 sees this rank's own keys
        for step, seen, own in _around(axis, causal):
            if step:
                key, value = shifted((key, value), axis)
            if step > 1:  # gradients begin with the first rank after the owner
                dk, dv = shifted((dk, dv), axis)
            if seen:
                parts = flash.attend_backward(gradient, q, key, value, out, logs, causal and own, scale,
                                              ctx.state)
                if step:
                    dq, dk, dv = (whole + part for whole, part in zip((dq, dk, dv), parts, strict=True))
                else:
                    dq, own_dk, own_dv = (part.to(logs.dtype) for part in parts)
                    dk, dv = torch.zeros_like(own_dk), torch.zeros_like(own_dv)
            else:
                dq, dk, dv = (after(one, gradient, q, key, value, out, logs) for one in (dq, dk, dv))
        if axis.size > 1:
            dk, dv = shifted((dk, dv), axis)
        dk, dv = own_dk + dk, own_dv + dv
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False, axes: tuple[str, ...],
) -> Tensor:
    """Attention of even shards [batch, heads, sequence / n, head dim] over the one axis of ``axes``. No mask, no
    dropout."""
    (name,) = axes
    return _Ring.apply(q, k, v, groups.current(name), is_causal, q.shape[-1] ** -0.5 if scale is None else scale)
