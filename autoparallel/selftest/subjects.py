"""Seven small models with random weights, the same on every rank."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY = 8, 16, 128


@dataclass(frozen=True)
class Subject:
    """A model that the selftest trains.

    ``build()``: the model; its call with the keyword arguments ``batch()`` (float32 and int64, on the CPU) returns the
    loss, or a result with a ``loss``. ``needs``: a package that the model needs (None: torch alone).
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    needs: str | None = None

    @property
    def is_there(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def model(self, device: torch.device) -> nn.Module:
        """On ``device``, in train mode, with the same weights at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            return self.build().train().to(device)

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        return {name: value.to(device) for name, value in self.batch().items()}


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(torch.relu(self.up(x))) - y).square().mean()


class _Images(nn.Module):
    """A small residual network with group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm, self.conv = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.conv(torch.relu(self.norm(x)))
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), y)


def _transformer(model: str, config: str, **values: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**values))
        return made

    return build


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(17)


def _rows() -> dict[str, Tensor]:
    drawn = _random()
    return {"x": torch.randn(BATCH, 32, generator=drawn), "y": torch.randn(BATCH, 32, generator=drawn)}


def _pictures() -> dict[str, Tensor]:
    drawn = _random()
    return {"x": torch.randn(BATCH, 3, 8, 8, generator=drawn), "y": torch.randint(10, (BATCH,), generator=drawn)}


def _tokens() -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=_random())
    return {"input_ids": ids, "labels": ids.clone()}


_LLAMA = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "use_cache": False}
_TRANSFORMERS: Mapping[str, Callable[[], nn.Module]] = {
    "llama": _transformer("LlamaForCausalLM", "LlamaConfig", **_LLAMA),
    "gpt2": _transformer("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32,
                         n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
                         eos_token_id=0, use_cache=False),
    "bert": _transformer("BertForMaskedLM", "BertConfig", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64,
                         num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=LENGTH,
                         hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, use_cache=False),
    "t5": _transformer("T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64,
                       num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False),
    "mixtral": _transformer("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2,
                            **_LLAMA),
}
SUBJECTS = {subject.name: subject for subject in (
    Subject("mlp", _MLP, _rows), Subject("images", _Images, _pictures),
    *(Subject(name, build, _tokens, "transformers") for name, build in _TRANSFORMERS.items()))}


def wide_llama() -> Subject:
    """A Llama of 3.6 million parameters, for what is timed."""
    sizes = {**_LLAMA, "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8,
             "num_key_value_heads": 4, "max_position_embeddings": 64}

    def batch() -> dict[str, Tensor]:
        ids = torch.randint(4096, (BATCH, 64), generator=_random())
        return {"input_ids": ids, "labels": ids.clone()}

    return Subject("wide llama", _transformer("LlamaForCausalLM", "LlamaConfig", **sizes), batch, "transformers")


__all__ = ["SUBJECTS", "Subject", "wide_llama"]
