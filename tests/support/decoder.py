"""A small decoder with grouped queries."""

from __future__ import annotations

import torch
from torch import Tensor, nn

IDS = torch.zeros(8, 16, dtype=torch.long)


class Block(nn.Module):
    """Four heads of queries, two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(64), nn.LayerNorm(64)
        self.q_proj, self.o_proj = nn.Linear(64, 64), nn.Linear(64, 64)
        self.k_proj, self.v_proj = nn.Linear(64, 32), nn.Linear(64, 32)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (p(y).unflatten(2, (-1, 16)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.mlp_norm(x)).relu())


class Decoder(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(128, 64), nn.Linear(64, 128)
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), input_ids.flatten())
