"""Attention with a fused projection, in the ways in which people write it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

#: How it is written, and heads of queries, of keys and of values.
EVEN = ("split", (4, 4, 4))


class Attention(nn.Module):
    """As nanoGPT, timm and Phi-3 write it. ``heads``: of queries, of keys, of values."""

    def __init__(self, written: str, heads: tuple[int, int, int], bias: bool = True, dim: int = 8) -> None:
        super().__init__()
        self.written, self.heads, self.dim = written, heads, dim
        self.qkv = nn.Linear(24, sum(heads) * dim, bias=bias)
        self.out = nn.Linear(heads[0] * dim, 24)

    def forward(self, x: Tensor) -> Tensor:
        fused, (h, g, _), d = self.qkv(x), self.heads, self.dim
        if self.written == "split":
            q, k, v = (t.unflatten(-1, (-1, d)).transpose(1, 2) for t in fused.split([n * d for n in self.heads], -1))
        elif self.written == "unbind":
            q, k, v = fused.view(*x.shape[:2], 3, h, d).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            parts = fused[..., : h * d], fused[..., h * d : (h + g) * d], fused[..., (h + g) * d :]
            q, k, v = (t.reshape(*x.shape[:2], -1, d).transpose(1, 2) for t in parts)
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().sum()


def build(*case: Any) -> tuple[Attention, Tensor]:
    torch.manual_seed(0)
    return Attention(*case), torch.randn(4, 6, 24)
