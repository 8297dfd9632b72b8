"""The models whose plans are measured: small, with about as much to compute as to communicate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

VOCABULARY = 2048
Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """A model and its global batch; ``build`` gives equal weights each time."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]


class MLP(nn.Module):
    """Square layers, so that no dim is cut more cheaply than another."""

    def __init__(self, width: int = 1024, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.mse_loss(x, y)


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return MLP()


def _rows() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(256, 1024, generator=generator) for name in ("x", "y")}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, use_cache=False)).train()


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCABULARY, n_embd=384, n_layer=4, n_head=8, n_positions=64, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)).train()


def _tokens() -> Batch:
    ids = torch.randint(0, VOCABULARY, (16, 32), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


SUBJECTS = {
    "mlp": Subject(_mlp, _rows),
    "llama": Subject(_llama, _tokens),
    "gpt2": Subject(_gpt2, _tokens),
}
