"""The models that every part of the compiler is tested on: real architectures, tiny, with random weights.

    case = CASES["llama"]
    model, (args, kwargs) = case.build(), case.inputs(BATCH_SIZE)
    case.loss(model(*args, **kwargs)).backward()

Sizes divide by 2, 4 and 8 (batch 8, sequence 16, hidden 32 or 64); none divides by 3, so that 3 and 6 ranks meet
uneven shards. Labels that do not count (-100) are spread unevenly over the batch: a mean of the ranks' mean losses
is then not the loss. Two calls of `build` or of `inputs` give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo import build, inputs_of

BATCH_SIZE = 8
SEQUENCE = 16
VOCABULARY = 128
NUM_CLASSES = 10
IGNORED = -100

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class ModelCase:
    """A model to test on: `build()` in train mode and fp32, `inputs(batch_size)` -> (args, kwargs), `loss(output)`.

    `random` tells that the forward draws numbers (dropout); `float64` that it runs in float64 and survives pickling
    (grouped matrix products have no float64 kernel, and transformers' hooks for router outputs are lost). Cases
    travel to ranks by name, so that they can be arguments of a job.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    loss: Callable[[Any], Tensor]
    random: bool = False
    float64: bool = True

    def __reduce__(self) -> tuple[Callable[[str], ModelCase], tuple[str]]:
        return case_named, (self.name,)

    def __str__(self) -> str:
        return self.name


def case_named(name: str) -> ModelCase:
    return CASES[name]


# ------------------------------------------------------------------------------------------------------------ inputs


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(17)


def _token_ids(batch_size: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (batch_size, SEQUENCE), generator=_generator())


def _causal_inputs(batch_size: int, vocabulary: int = VOCABULARY) -> Inputs:
    """The first sequences have prompts that do not count in the loss; the last do not."""
    ids = _token_ids(batch_size, vocabulary)
    labels = ids.clone()
    labels[: batch_size // 2, :5] = IGNORED
    return (), {"input_ids": ids, "labels": labels}


def _masked_inputs(batch_size: int) -> Inputs:
    """Sequences of several lengths, a quarter of whose tokens are to be guessed."""
    ids = _token_ids(batch_size, VOCABULARY)
    lengths = SEQUENCE - torch.arange(batch_size) % 5
    attended = torch.arange(SEQUENCE) < lengths[:, None]
    guessed = attended & (torch.rand(ids.shape, generator=_generator()) < 0.25)
    labels = torch.where(guessed, ids, IGNORED)
    return (), {"input_ids": ids.masked_fill(guessed, 1), "attention_mask": attended.long(), "labels": labels}


def _image_inputs(batch_size: int, size: int) -> Inputs:
    generator = _generator()
    pixels = torch.randn(batch_size, 3, size, size, generator=generator)
    return (), {"pixel_values": pixels, "labels": torch.randint(NUM_CLASSES, (batch_size,), generator=generator)}


def _vector_inputs(batch_size: int) -> Inputs:
    generator = _generator()
    return (torch.randn(batch_size, 32, generator=generator), torch.randn(batch_size, 32, generator=generator)), {}


def _sequence_inputs(batch_size: int) -> Inputs:
    generator = _generator()
    x = torch.randn(batch_size, SEQUENCE, 32, generator=generator)
    return (x,), {"labels": torch.randint(NUM_CLASSES, (batch_size, SEQUENCE), generator=generator)}


# ------------------------------------------------------------------------------------------------------------ models


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(23)
        return make().train()


def _gpt2(vocabulary: int = VOCABULARY, dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=SEQUENCE,
        n_embd=32,
        n_layer=2,
        n_head=4,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return _seeded(lambda: GPT2LMHeadModel(config))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    return _seeded(lambda: LlamaForCausalLM(config))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        max_position_embeddings=SEQUENCE,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        use_cache=False,
    )
    return _seeded(lambda: BertForMaskedLM(config))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=NUM_CLASSES,
        problem_type="single_label_classification",
    )
    return _seeded(lambda: ViTForImageClassification(config))


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 2],
        layer_type="basic",
        num_labels=NUM_CLASSES,
        problem_type="single_label_classification",
    )
    return _seeded(lambda: ResNetForImageClassification(config))


class MLP(nn.Module):
    """Two linear layers and a loss; the output is the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.down(functional.relu(self.up(x))), target)


class Tagger(nn.Module):
    """nn.TransformerEncoder with a linear head; the output is the tuple (loss, logits)."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(32, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.encoder(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def _loss_attribute(output: Any) -> Tensor:
    return output.loss


_FULL_VOCABULARY = 50257

CASES: dict[str, ModelCase] = {
    case.name: case
    for case in (
        ModelCase("mlp", lambda: _seeded(MLP), _vector_inputs, lambda output: output),
        ModelCase("transformer_encoder", lambda: _seeded(Tagger), _sequence_inputs, lambda output: output[0]),
        ModelCase("gpt2", _gpt2, _causal_inputs, _loss_attribute),
        ModelCase(
            "gpt2_full_vocab",
            lambda: _gpt2(_FULL_VOCABULARY),
            lambda batch_size: _causal_inputs(batch_size, _FULL_VOCABULARY),
            _loss_attribute,
        ),
        ModelCase("gpt2_dropout", lambda: _gpt2(dropout=0.1), _causal_inputs, _loss_attribute, random=True),
        ModelCase("llama", _llama, _causal_inputs, _loss_attribute),
        ModelCase("bert", _bert, _masked_inputs, _loss_attribute),
        ModelCase("vit", _vit, lambda batch_size: _image_inputs(batch_size, 16), _loss_attribute),
        ModelCase("resnet", _resnet, lambda batch_size: _image_inputs(batch_size, 32), _loss_attribute),
        ModelCase("t5", lambda: _seeded(lambda: build("t5")), lambda _: ((), inputs_of("t5")), _loss_attribute),
        ModelCase("mixtral", lambda: _seeded(lambda: build("mixtral")), lambda _: ((), inputs_of("mixtral")),
                  _loss_attribute, float64=False),
        ModelCase("deepseek_v3", lambda: _seeded(lambda: build("deepseek_v3")),
                  lambda _: ((), inputs_of("deepseek_v3")), _loss_attribute, float64=False),
    )
}
