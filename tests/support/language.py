"""Small language models, sentences to train them on, and ranks as accelerate wants them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

VOCABULARY, SAMPLES, LENGTH = 64, 44, 16


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False, **options)
    return transformers.LlamaForCausalLM(config)


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(llama(), config)


def whole(parallel: Any) -> dict[str, Tensor]:
    """All that this rank holds, whole."""
    return {name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in parallel.state_dict().items()}


class Text(Dataset[dict[str, Tensor]]):
    """Sentences in a small language, some of them short, padded to one length (or to their own)."""

    def __init__(self, padded: bool = True) -> None:
        self.padded = padded

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = (torch.arange(LENGTH) * 3 + index) % 61 + torch.randint(0, 3, (LENGTH,), generator=generator)
        length = LENGTH - index % 5 if index < SAMPLES - 4 else LENGTH
        mask = (torch.arange(LENGTH) < length).long()
        sample = {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}
        return sample if self.padded else {name: value[:length] for name, value in sample.items()}


def reset_accelerate() -> None:
    """accelerate keeps its state in the process; so do these tests' ranks."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()


def as_ranks() -> None:
    """What a launcher says to accelerate; the process group is there."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1",
                      MASTER_PORT="29511", ACCELERATE_USE_CPU="1")
    reset_accelerate()


def windowed(kind: str) -> Any:
    """A small model some or all of whose layers see the last four tokens."""
    sizes: Any = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
                  "num_key_value_heads": 2, "sliding_window": 4, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    if kind == "gemma3":
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(
            **sizes, num_hidden_layers=2, head_dim=8, layer_types=["sliding_attention", "full_attention"]))
    return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, num_hidden_layers=2))


def encoded(kind: str) -> Any:
    """A small encoder-decoder, and a batch for its encoder."""
    sizes: Any = {"vocab_size": 64, "d_model": 16, "decoder_start_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    if kind == "t5":
        return transformers.T5ForConditionalGeneration(transformers.T5Config(
            **sizes, d_kv=8, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0))
    layers: Any = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
                   "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    if kind == "whisper":
        return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(
            **sizes, **layers, bos_token_id=1, num_mel_bins=4, max_source_positions=8, max_target_positions=32))
    return transformers.BartForConditionalGeneration(transformers.BartConfig(
        **sizes, **layers, max_position_embeddings=32, forced_eos_token_id=None))
