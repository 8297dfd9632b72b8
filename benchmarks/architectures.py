"""The 46 architectures of the model zoo: transformers' own classes, tiny, with random weights (nothing is downloaded).

    model, inputs = build("llama"), inputs_of("llama")
    model(**inputs).loss.backward()

Batch 8, sequence 16, hidden 64, 4 heads, 2 layers, vocabulary 128, no dropout. Labels that do not count (-100) are
spread unevenly over the batch, and masks leave sequences of several lengths. Two calls give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

BATCH, SEQUENCE, VOCABULARY, NUM_CLASSES, IGNORED = 8, 16, 128, 10, -100
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """transformers' model type and class (an Auto one or its own), the config's fields, and which inputs the model
    takes; ``wrap``: what gives it a loss. Or ``make``, which makes another model."""

    model_type: str
    auto_class: str
    inputs: Callable[..., Inputs]
    config: Mapping[str, Any] = field(default_factory=dict)
    wrap: Callable[[nn.Module], nn.Module] | None = None
    make: Callable[[], nn.Module] | None = None

    def model(self) -> nn.Module:
        if self.make is not None:
            return self.make()
        import transformers

        config = transformers.AutoConfig.for_model(self.model_type, **self.config)
        of_class = getattr(transformers, self.auto_class)
        made: nn.Module = of_class.from_config(config) if self.auto_class.startswith("AutoModel") else of_class(config)
        return self.wrap(made) if self.wrap is not None else made


# ------------------------------------------------------------------------------------------------------------ inputs


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(17)


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator())


def causal(batch: int = BATCH, sequence: int = SEQUENCE) -> Inputs:
    """The first sequences have prompts that do not count in the loss."""
    ids = _ids(batch, sequence)
    labels = ids.clone()
    labels[: batch // 2, :5] = IGNORED
    return {"input_ids": ids, "labels": labels}


def masked(batch: int = BATCH, sequence: int = SEQUENCE) -> Inputs:
    """Sequences of several lengths, a quarter of whose tokens are to be guessed."""
    ids = _ids(batch, sequence)
    attended = torch.arange(sequence) < sequence - torch.arange(batch)[:, None] % 5
    guessed = attended & (torch.rand(ids.shape, generator=generator()) < 0.25)
    labels = torch.where(guessed, ids, IGNORED)
    return {"input_ids": ids.masked_fill(guessed, 1), "attention_mask": attended.long(), "labels": labels}


def translated(batch: int = BATCH, sequence: int = SEQUENCE) -> Inputs:
    """The translation is a quarter shorter."""
    labels = causal(batch, sequence)["labels"][:, : sequence * 3 // 4].contiguous()
    return {**masked(batch, sequence), "labels": labels}


def spoken(batch: int = BATCH, sequence: int = SEQUENCE) -> Inputs:
    """Log-mel features and the text that was said."""
    features = torch.randn(batch, 16, 32, generator=generator())
    return {"input_features": features, "labels": causal(batch, sequence)["labels"]}


def heard(batch: int = BATCH, sequence: int = SEQUENCE) -> Inputs:
    """Raw sound and its class."""
    sound = torch.randn(batch, 800, generator=generator())
    return {"input_values": sound, "labels": torch.arange(batch) % NUM_CLASSES}


def seen(batch: int = BATCH, sequence: int = SEQUENCE, size: int = 32) -> Inputs:
    pixels = torch.randn(batch, 3, size, size, generator=generator())
    return {"pixel_values": pixels, "labels": torch.arange(batch) % NUM_CLASSES}


def captioned(batch: int = BATCH, sequence: int = SEQUENCE) -> Inputs:
    ids = _ids(batch, sequence)
    ids[:, -1] = VOCABULARY - 1  # the end of the text, whose state stands for all of it
    return {"input_ids": ids, "pixel_values": seen(batch)["pixel_values"], "return_loss": True}


# ----------------------------------------------------------------------------------------------------------- configs

CORE: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                        "intermediate_size": 128, "max_position_embeddings": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
DECODER = {**CORE, **TOKENS, "attention_dropout": 0.0, "use_cache": False}
GROUPED: dict[str, Any] = {**DECODER, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "output_router_logits": True}
ENCODER: dict[str, Any] = {**CORE, **NO_DROPOUT}
VISION: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
                          "image_size": 32, "patch_size": 8, **NO_DROPOUT, "num_labels": NUM_CLASSES,
                          "problem_type": "single_label_classification"}
LABELS: dict[str, Any] = {"num_labels": NUM_CLASSES, "problem_type": "single_label_classification"}


def _causal_lm(model_type: str, **config: Any) -> Architecture:
    return Architecture(model_type, "AutoModelForCausalLM", causal, config)


def _masked_lm(model_type: str, **config: Any) -> Architecture:
    return Architecture(model_type, "AutoModelForMaskedLM", masked, config)


def _images(model_type: str, **config: Any) -> Architecture:
    return Architecture(model_type, "AutoModelForImageClassification", seen, {**LABELS, **config})


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": _causal_lm("gpt2", vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=4, embd_pdrop=0.0,
                       attn_pdrop=0.0, resid_pdrop=0.0, use_cache=False, **TOKENS),
    "gpt_neo": _causal_lm("gpt_neo", vocab_size=VOCABULARY, max_position_embeddings=64, hidden_size=64, num_layers=2,
                          num_heads=4, intermediate_size=128, attention_types=[[["global", "local"], 1]],
                          window_size=8, embed_dropout=0.0, attention_dropout=0.0, resid_dropout=0.0,
                          use_cache=False, **TOKENS),
    "gptj": _causal_lm("gptj", vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=4, rotary_dim=8,
                       embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, use_cache=False, **TOKENS),
    "gpt_neox": _causal_lm("gpt_neox", **DECODER, hidden_dropout=0.0),
    "opt": _causal_lm("opt", vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                      ffn_dim=128, word_embed_proj_dim=64, max_position_embeddings=64, dropout=0.0,
                      attention_dropout=0.0, use_cache=False, **TOKENS),
    "bloom": _causal_lm("bloom", vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4, hidden_dropout=0.0,
                        attention_dropout=0.0, use_cache=False, **TOKENS),
    "falcon": _causal_lm("falcon", vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                         hidden_dropout=0.0, attention_dropout=0.0, use_cache=False, **TOKENS),
    "llama": _causal_lm("llama", **GROUPED),
    "mistral": _causal_lm("mistral", **GROUPED, sliding_window=8),
    "qwen2": _causal_lm("qwen2", **GROUPED),
    "qwen3": _causal_lm("qwen3", **GROUPED, head_dim=16),
    "gemma": _causal_lm("gemma", **GROUPED, head_dim=16),
    "gemma2": _causal_lm("gemma2", **GROUPED, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    "gemma3": _causal_lm("gemma3_text", **GROUPED, head_dim=16, sliding_window=8, query_pre_attn_scalar=16,
                         layer_types=["sliding_attention", "full_attention"]),
    "phi": _causal_lm("phi", **GROUPED, embd_pdrop=0.0, resid_pdrop=0.0),
    "phi3": _causal_lm("phi3", **GROUPED, embd_pdrop=0.0, resid_pdrop=0.0),
    "stablelm": _causal_lm("stablelm", **GROUPED, hidden_dropout=0.0),
    "olmo2": _causal_lm("olmo2", **GROUPED),
    "granite": _causal_lm("granite", **GROUPED),
    "mixtral": _causal_lm("mixtral", **GROUPED, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
    "qwen2_moe": _causal_lm("qwen2_moe", **EXPERTS, num_experts=4, shared_expert_intermediate_size=64),
    "qwen3_moe": _causal_lm("qwen3_moe", **EXPERTS, num_experts=4, head_dim=16),
    "deepseek_v3": _causal_lm("deepseek_v3", **{**EXPERTS, "num_key_value_heads": 4}, n_routed_experts=8, n_group=2,
                              topk_group=1, kv_lora_rank=16, q_lora_rank=32, qk_rope_head_dim=8, v_head_dim=16,
                              qk_nope_head_dim=16, first_k_dense_replace=1, n_shared_experts=1),
    "gpt_oss": _causal_lm("gpt_oss", **GROUPED, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                          sliding_window=8, output_router_logits=True),
    "mamba": _causal_lm("mamba", vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=8,
                        use_cache=False, **TOKENS),
    "mamba2": _causal_lm("mamba2", vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=8,
                         num_heads=8, head_dim=16, n_groups=1, chunk_size=8, use_cache=False, **TOKENS),
    "bert": _masked_lm("bert", **ENCODER),
    "roberta": _masked_lm("roberta", **ENCODER),
    "distilbert": _masked_lm("distilbert", vocab_size=VOCABULARY, dim=64, n_layers=2, n_heads=4, hidden_dim=128,
                             max_position_embeddings=64, dropout=0.0, attention_dropout=0.0),
    "albert": _masked_lm("albert", **ENCODER, embedding_size=32, classifier_dropout_prob=0.0),
    "electra": _masked_lm("electra", **ENCODER, embedding_size=32),
    "mpnet": _masked_lm("mpnet", **ENCODER),
    "modernbert": _masked_lm("modernbert", **CORE, local_attention=8, global_attn_every_n_layers=2, pad_token_id=2,
                             bos_token_id=0, eos_token_id=1, cls_token_id=0, sep_token_id=1),
    "deberta_v2": _masked_lm("deberta-v2", **ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"],
                             position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm"),
    "xlnet": Architecture("xlnet", "AutoModelForCausalLM", causal,
                          {"vocab_size": VOCABULARY, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128,
                           "dropout": 0.0, "use_mems_train": False}),
    "t5": Architecture("t5", "AutoModelForSeq2SeqLM", translated,
                       {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2,
                        "num_heads": 4, "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0}),
    "bart": Architecture("bart", "AutoModelForSeq2SeqLM", translated,
                         {"vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
                          "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
                          "decoder_ffn_dim": 128, "max_position_embeddings": 64, "dropout": 0.0, "use_cache": False}),
    "whisper": Architecture("whisper", "AutoModelForSpeechSeq2Seq", spoken,
                            {"vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
                             "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
                             "decoder_ffn_dim": 128, "num_mel_bins": 16, "max_source_positions": 16,
                             "max_target_positions": 64, "dropout": 0.0, "use_cache": False, **TOKENS,
                             "decoder_start_token_id": 0}),
    "wav2vec2": Architecture("wav2vec2", "AutoModelForAudioClassification", heard,
                             {**LABELS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                              "intermediate_size": 128, "conv_dim": [32, 32, 32], "conv_stride": [5, 2, 2],
                              "conv_kernel": [10, 3, 3], "num_conv_pos_embeddings": 16,
                              "num_conv_pos_embedding_groups": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0,
                              "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0,
                              "mask_time_prob": 0.0, "apply_spec_augment": False}),
    "vit": _images("vit", **VISION),
    "deit": _images("deit", **VISION, architectures=["DeiTForImageClassification"]),  # it has two such classes
    "dinov2": _images("dinov2", **VISION),
    "swin": _images("swin", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
                    drop_path_rate=0.0, **NO_DROPOUT),
    "convnext": _images("convnext", hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 2, 1], image_size=32,
                        drop_path_rate=0.0),
    "resnet": _images("resnet", embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 2, 1],
                      layer_type="bottleneck"),
    "clip": Architecture("clip", "AutoModel", captioned, {
        "projection_dim": 32,
        "text_config": {**CORE, "eos_token_id": VOCABULARY - 1, "attention_dropout": 0.0, "projection_dim": 32},
        "vision_config": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                          "intermediate_size": 128, "image_size": 32, "patch_size": 8, "projection_dim": 32}}),
}
