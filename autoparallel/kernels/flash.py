"""Attention with its log-sum-exp per query, from which results over shards of the keys are combined; and attention of
grouped queries, which keeps for backward no more keys and values than there are.

The one file that calls torch's attention kernels by their internal names: the flash kernel on CPU, and on CUDA in half
precision, and the efficient one on CUDA (both not tested on a machine yet); else plain matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

aten = torch.ops.aten
Tensor = torch.Tensor
_library = torch.library.Library("autoparallel", "FRAGMENT")
#: Without them an op of a traced tensor runs the kernel of its device, which asks for sizes and types only.
_TRACING = DispatchKeySet(DispatchKey.Python).add(DispatchKey.PythonTLSSnapshot)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Any]:
    """(attention, log-sum-exp of each query's scores [batch, heads, queries], further state for `attend_backward`).

    ``q`` [batch, heads, queries, d]; ``k`` and ``v`` may have fewer heads (grouped queries).
    """
    kernel = _kernel(q, v)
    k, v = (_for_kernel(kernel, x, q) for x in (k, v))
    match kernel:
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
    the shard's part of the gradient. ``state``: of any call of `attend`, also of other lengths."""
    kernel, heads = _kernel(q, v), k.shape[1]
    k, v = (_for_kernel(kernel, x, q) for x in (k, v))
    match kernel:
        case "cpu":
            dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient.contiguous(), q, k, v, out, logs, 0.0, causal, scale=scale)
        case "cuda":
            dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
                gradient, q, k, v, out, logs, *state[:2], q.shape[2], k.shape[2], 0.0, causal, *state[4:], scale=scale)
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


def _sums_in_16_bits(q: Tensor) -> bool:
    """Whether torch's kernel adds up the gradients of a group in the type of the queries."""
    return q.device.type == "cpu" and q.dtype.itemsize < 4


def adds_up_groups(q: Tensor, k: Tensor) -> bool:
    """Whether `attend_backward` of grouped queries repeats keys and values, and sums the gradients of each group."""
    return k.shape[1] != q.shape[1] and (_sums_in_16_bits(q) or _kernel(q, k) == "plain")


def _for_kernel(kernel: str, x: Tensor, q: Tensor) -> Tensor:
    """Keys or values as the kernel takes them for queries ``q``."""
    return _for_heads(x, q.shape[1]) if kernel == "plain" or _sums_in_16_bits(q) else x


def _for_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values [batch, groups, ...] of grouped queries, repeated to ``heads``."""
    return x if x.shape[1] == heads else x.unsqueeze(2).expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)


def _of_groups(gradient: Tensor, groups: int) -> Tensor:
    return gradient if gradient.shape[1] == groups else gradient.unflatten(1, (groups, -1)).sum(2)


# --- grouped queries ---------------------------------------------------------------------------------------------


def _grouped_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                       is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = True) -> Tensor:
    """`scaled_dot_product_attention` of queries [batch, heads, queries, d], whose keys and values have fewer heads,
    [batch, groups, keys, d]: each serves heads / groups of the queries' in a row.

    Where torch has a kernel for repeated heads only, it runs on copies, which backward makes for itself. Keys that have
    not as many heads as values are left to torch, whose kernels do not check that."""
    attend = partial(F.scaled_dot_product_attention, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
    call = attn_mask, dropout_p, is_causal
    if q.dim() != 4 or not k.shape[1] == v.shape[1] < q.shape[1] or takes_groups(q, k, v, *call):
        return attend(q, k, v, attn_mask, enable_gqa=True)
    kernel = _chosen(q, *(x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v)), *call)
    match q.device.type, kernel:
        case ("cpu", SDPBackend.FLASH_ATTENTION) | ("cuda", SDPBackend.EFFICIENT_ATTENTION):
            bias = None if attn_mask is None else _bias(attn_mask, q, k)
            made: Tensor = _Repeated.apply(q, k, v, bias, dropout_p, is_causal, scale)
            return made
        case _, SDPBackend.MATH:
            return attend(q, k, v, attn_mask, enable_gqa=True)
    key, value = (_for_heads(x, q.shape[1]) for x in (k, v))
    return attend(q, key, value, attn_mask)


_library.define("grouped_attention(Tensor q, Tensor k, Tensor v, Tensor? attn_mask=None, float dropout_p=0.0, "
                "bool is_causal=False, *, float? scale=None, bool enable_gqa=True) -> Tensor")
_library.impl("grouped_attention", _grouped_attention, "CompositeImplicitAutograd")
grouped_attention = torch.ops.autoparallel.grouped_attention.default


def takes_groups(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                 is_causal: bool = False) -> bool:
    """Whether torch has a kernel for grouped queries, whose gradients are as exact as those of repeated heads. (On
    devices other than CPUs and CUDA's it is left to torch.)"""
    if q.device.type not in ("cpu", "cuda"):
        return True
    if _sums_in_16_bits(q) and torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        return False
    return _chosen(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa=True) != SDPBackend.MATH


def _chosen(*call: Any, enable_gqa: bool = False) -> SDPBackend:
    """The kernel that `scaled_dot_product_attention` picks for a call, also of traced tensors."""
    with torch._C._ExcludeDispatchKeyGuard(_TRACING):
        return SDPBackend(torch._fused_sdp_choice(*call, enable_gqa=enable_gqa))


def _bias(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A mask as the numbers that the kernel of the device adds: on CUDA one for each score, in rows that start on a
    multiple of 8 of them."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    if q.device.type == "cpu":
        return mask
    keys = k.shape[2]
    mask = mask.expand(*mask.shape[:-1], keys)
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        mask = F.pad(mask, (0, 8 - keys % 8))[..., :keys]
    return mask.expand(*q.shape[:3], keys)


class _Repeated(torch.autograd.Function):
    """Attention on keys and values that are repeated inside forward and backward, where the kernel asks for it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float, causal: bool,
                scale: float | None) -> Tensor:
        ctx.call = dropout_p, causal, scale
        state: Sequence[Tensor]
        if q.device.type == "cpu":    # as exact forward with groups
            out, *state = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, causal, attn_mask=bias,
                                                                           scale=scale)
        else:
            key, value = (_for_heads(x, q.shape[1]) for x in (k, v))
            out, *state = aten._scaled_dot_product_efficient_attention(q, key, value, bias, True, dropout_p, causal,
                                                                       scale=scale)
        ctx.save_for_backward(q, k, v, bias, out, *state)
        made: Tensor = out
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dropout_p, causal, scale = ctx.call
        q, k, v, bias, out, *state = ctx.saved_tensors
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        inputs = gradient, q, *(_for_heads(x, q.shape[1]) for x in (k, v))
        of_bias = None
        if q.device.type == "cpu":
            dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *inputs, out, *state, dropout_p, causal, attn_mask=bias, scale=scale)
        else:
            wanted = ctx.needs_input_grad[:4]
            dq, dk, dv, of_bias = aten._scaled_dot_product_efficient_attention_backward(
                *inputs, bias, out, *state, dropout_p, list(wanted), causal, scale=scale)
            of_bias = of_bias if wanted[3] else None
        dk, dv = (None if one is None else _of_groups(one, k.shape[1]) for one in (dk, dv))
        return dq, dk, dv, of_bias, None, None, None
