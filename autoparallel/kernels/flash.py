"""Attention with its log-sum-exp per query, from which results over shards of the keys are combined.

The one file that calls torch's attention kernels by their internal names: the flash kernel on CPU, and on CUDA in half
precision (the latter not tested on a machine yet); else plain matrix products.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Any]:
    """(attention, log-sum-exp of each query's scores [batch, heads, queries], further state for `attend_backward`).

    ``q`` [batch, heads, queries, d]; ``k`` and ``v`` may have fewer heads (grouped queries).
    """
    k, v = (_for_heads(x, q.shape[1]) for x in (k, v))
    match _kernel(q, v):
        case "cpu":
            out, logs = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
            return out, logs, ()
        case "cuda":
            out, logs, *state = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
            return out, logs, tuple(state[:6])
    scores = _scores(q, k, causal, scale)
    logs = scores.logsumexp(-1)
    return (scores - logs.unsqueeze(-1)).exp().to(v.dtype) @ v, logs, ()


def attend_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, causal: bool,
                    scale: float, state: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v. ``out`` and ``logs`` may cover more keys than ``k`` has: those of the whole sequence give
    the shard's part of the gradient."""
    heads = k.shape[1]
    k, v = (_for_heads(x, q.shape[1]) for x in (k, v))
    match _kernel(q, v):
        case "cpu":
            dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient.contiguous(), q, k, v, out, logs, 0.0, causal, scale=scale)
        case "cuda":
            dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
                gradient, q, k, v, out, logs, *state[:4], 0.0, causal, *state[4:], scale=scale)
        case _:
            weights = (_scores(q, k, causal, scale) - logs.unsqueeze(-1)).exp()
            dv = weights.to(v.dtype).mT @ gradient
            change = weights * (gradient @ v.mT - (gradient * out).sum(-1, keepdim=True)).to(weights.dtype) * scale
            dq, dk = change.to(k.dtype) @ k, change.to(q.dtype).mT @ q
    return dq, _of_groups(dk, heads), _of_groups(dv, heads)


def _kernel(q: Tensor, v: Tensor) -> str:
    if q.shape[-1] != v.shape[-1]:
        return "plain"
    if q.device.type == "cuda":
        return "cuda" if q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 else "plain"
    return "cpu" if q.device.type == "cpu" else "plain"


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _for_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values [batch, groups, ...] of grouped queries, repeated to ``heads``."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _of_groups(gradient: Tensor, groups: int) -> Tensor:
    return gradient if gradient.shape[1] == groups else gradient.unflatten(1, (groups, -1)).sum(2)
