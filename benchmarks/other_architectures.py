"""Architectures beside the 46: more of transformers' classes, tiny, and networks as users write them by hand.

``python -m benchmarks.model_zoo others`` runs all of them; each name works as those of `benchmarks.architectures`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks import networks
from benchmarks.architectures import (
    BATCH,
    CORE,
    ENCODER,
    EXPERTS,
    GROUPED,
    IGNORED,
    LABELS,
    NUM_CLASSES,
    SEQUENCE,
    TOKENS,
    VISION,
    VOCABULARY,
    Architecture,
    Inputs,
    causal,
    generator,
    heard,
    masked,
    seen,
    translated,
)


class Squared(nn.Module):
    """A model without a loss of its own: the mean square of an output, weighed as norms would make it 1, is one."""

    def __init__(self, model: nn.Module, output: int | str = 0) -> None:
        super().__init__()
        self.model, self.output = model, output

    def forward(self, **inputs: Any) -> networks.Output:
        made = self.model(**inputs)[self.output]
        weights = torch.linspace(0.5, 1.5, made.shape[-1], dtype=made.dtype, device=made.device)
        return networks.Output(loss=(made * weights).square().mean(), logits=made)


def _pixels(size: int = 32) -> Inputs:
    return {"pixel_values": seen(size=size)["pixel_values"]}


def _segmented(size: int, labelled: int) -> Callable[[], Inputs]:
    def inputs() -> Inputs:
        labels = torch.randint(NUM_CLASSES, (BATCH, labelled, labelled), generator=generator())
        return {**seen(size=size), "labels": labels}

    return inputs


def _classified() -> Inputs:
    return {**masked(), "labels": torch.arange(BATCH) % NUM_CLASSES}


def _filmed() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 4, 3, 32, 32, generator=generator()),
            "labels": torch.arange(BATCH) % NUM_CLASSES}


def _read(channels: int = 3) -> Inputs:
    """An image and the text that goes with it."""
    return {**masked(), "pixel_values": seen()["pixel_values"]}


def _shown(places: int, kinds: bool = False) -> Callable[[], Inputs]:
    """A text with places for an image's patches, which tokens 5 mark."""
    def inputs() -> Inputs:
        ids = torch.randint(6, VOCABULARY, (BATCH, places + 8), generator=generator())
        labels = ids.clone()
        ids[:, 2 : 2 + places], labels[:, 2 : 2 + places] = 5, IGNORED
        told = {"attention_mask": torch.ones_like(ids), "token_type_ids": (ids == 5).long()} if kinds else {}
        return {**_pixels(), "input_ids": ids, "labels": labels, **told}

    return inputs


def _captioned() -> Inputs:
    return {**_pixels(), "labels": translated()["labels"]}


def _series() -> Inputs:
    return {"past_values": torch.randn(BATCH, 32, 4, generator=generator()),
            "future_values": torch.randn(BATCH, 8, 4, generator=generator())}


def _timed() -> Inputs:
    g = generator()
    return {"past_values": torch.rand(BATCH, 10, generator=g),
            "past_time_features": torch.rand(BATCH, 10, 1, generator=g),
            "past_observed_mask": (torch.rand(BATCH, 10, generator=g) > 0.1).float(),
            "future_values": torch.rand(BATCH, 4, generator=g),
            "future_time_features": torch.rand(BATCH, 4, 1, generator=g)}


def _spectrum() -> Inputs:
    return {"input_values": torch.randn(BATCH, 32, 16, generator=generator()),
            "labels": torch.arange(BATCH) % NUM_CLASSES}


def _of(auto: str, inputs: Callable[[], Inputs], model_type: str, wrap: Callable[[nn.Module], nn.Module] | None = None,
        **config: Any) -> Architecture:
    return Architecture(model_type, f"Auto{auto}", inputs, config, wrap)


def _lm(model_type: str, **config: Any) -> Architecture:
    return _of("ModelForCausalLM", causal, model_type, **{**GROUPED, **config})


def _masked_lm(model_type: str, **config: Any) -> Architecture:
    return _of("ModelForMaskedLM", masked, model_type, **{**ENCODER, **config})


def _images(model_type: str, **config: Any) -> Architecture:
    return _of("ModelForImageClassification", seen, model_type, **{**LABELS, **config})


def _translator(model_type: str, **config: Any) -> Architecture:
    return _of("ModelForSeq2SeqLM", translated, model_type, **{**ENCODER_DECODER, **config})


ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0, "use_cache": False, **TOKENS, "decoder_start_token_id": 0, "forced_eos_token_id": None}
T5: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
                      "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0}
SOUND: dict[str, Any] = {
    **LABELS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "conv_dim": [32, 32, 32], "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3], "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0, "apply_spec_augment": False,
    "final_dropout": 0.0}
RESNET = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1],
          "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}
DETECTOR = {"backbone_config": RESNET, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
            "num_queries": 8, "dropout": 0.0, "use_timm_backbone": False, "use_pretrained_backbone": False,
            "backbone": None}
DINO = {"model_type": "dinov2", **VISION, "out_indices": [1, 2], "reshape_hidden_states": False,
        "apply_layernorm": True}
TIMED = {"prediction_length": 4, "context_length": 8, "input_size": 1, "d_model": 32, "encoder_layers": 2,
         "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "num_time_features": 1, "dropout": 0.0, "attention_dropout": 0.0,
         "activation_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "use_cache": False}
TEXT_TOWER = {**CORE, "attention_dropout": 0.0, "projection_dim": 32, **TOKENS}
MULTIMODAL = {**GROUPED, "head_dim": 16}
VISION_TOWER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
                "image_size": 32, "patch_size": 8, "projection_dim": 32, "attention_dropout": 0.0}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "n_shared_experts": 1,
          "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
          "num_key_value_heads": 4}

TRANSFORMERS: dict[str, Architecture] = {
    "cohere": _lm("cohere"), "cohere2": _lm("cohere2", sliding_window=8), "nemotron": _lm("nemotron", head_dim=16),
    "glm": _lm("glm", head_dim=16), "glm4": _lm("glm4", head_dim=16),
    "starcoder2": _lm("starcoder2", residual_dropout=0.0, embedding_dropout=0.0),
    "smollm3": _lm("smollm3"), "arcee": _lm("arcee"), "ernie4_5": _lm("ernie4_5"), "helium": _lm("helium", head_dim=16),
    "exaone4": _lm("exaone4", sliding_window=8), "hunyuan_v1_dense": _lm("hunyuan_v1_dense", head_dim=16),
    "olmo": _lm("olmo"), "olmo3": _lm("olmo3", sliding_window=8), "apertus": _lm("apertus"),
    "bitnet": _lm("bitnet"), "persimmon": _lm("persimmon", hidden_dropout=0.0),
    "gpt_bigcode": _of("ModelForCausalLM", causal, "gpt_bigcode", vocab_size=VOCABULARY, n_positions=64, n_embd=64,
                       n_layer=2, n_head=4, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, use_cache=False, **TOKENS),
    "codegen": _of("ModelForCausalLM", causal, "codegen", vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2,
                   n_head=4, rotary_dim=8, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, use_cache=False, **TOKENS),
    "mpt": _of("ModelForCausalLM", causal, "mpt", vocab_size=VOCABULARY, d_model=64, n_layers=2, n_heads=4,
               max_seq_len=64, use_cache=False),
    "ctrl": _of("ModelForCausalLM", causal, "ctrl", vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2,
                n_head=4, dff=128, resid_pdrop=0.0, embd_pdrop=0.0, use_cache=False),
    "biogpt": _lm("biogpt", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layerdrop=0.0),
    "xglm": _of("ModelForCausalLM", causal, "xglm", vocab_size=VOCABULARY, d_model=64, ffn_dim=128, num_layers=2,
                attention_heads=4, max_position_embeddings=64, dropout=0.0, attention_dropout=0.0, use_cache=False,
                **TOKENS),
    "granitemoe": _lm("granitemoe", num_local_experts=4, num_experts_per_tok=2),
    "olmoe": _lm("olmoe", **{**EXPERTS, "num_experts": 4}),
    "dbrx": _of("ModelForCausalLM", causal, "dbrx", vocab_size=VOCABULARY, d_model=64, n_heads=4, n_layers=2,
                max_seq_len=64, attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
                ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
                use_cache=False, **TOKENS),
    "phimoe": _lm("phimoe", num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.0,
                  input_jitter_noise=0.0),
    "glm4_moe": _lm("glm4_moe", **{**EXPERTS, "head_dim": 16}, n_routed_experts=4, n_shared_experts=1, n_group=1,
                    topk_group=1, first_k_dense_replace=1),
    "dots1": _lm("dots1", **EXPERTS, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1,
                 first_k_dense_replace=1),
    "llama4_text": _of("ModelForCausalLM", causal, "llama4_text", **GROUPED, head_dim=16, num_local_experts=4,
                       num_experts_per_tok=1, intermediate_size_mlp=128, attention_chunk_size=8),
    "ernie4_5_moe": _lm("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=1),
    "minimax": _lm("minimax", num_local_experts=4, num_experts_per_tok=2, block_size=8, head_dim=16,
                   layer_types=["linear_attention", "full_attention"]),
    "lfm2": _lm("lfm2", layer_types=["conv", "full_attention"], block_multiple_of=16),
    "jamba": _lm("jamba", num_experts=4, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1,
                 expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4,
                 use_mamba_kernels=False),
    "bamba": _lm("bamba", mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8,
                 attn_layer_indices=[1]),
    "falcon_h1": _lm("falcon_h1", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8,
                     mamba_chunk_size=8, head_dim=16),
    "granitemoehybrid": _lm("granitemoehybrid", num_local_experts=4, num_experts_per_tok=2, mamba_n_heads=8,
                            mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8,
                            shared_intermediate_size=64, layer_types=["mamba", "attention"]),
    "zamba2": _lm("zamba2", mamba_d_state=8, mamba_headdim=16, n_mamba_heads=8, mamba_ngroups=1, chunk_size=8,
                  layers_block_type=["mamba", "hybrid"], hybrid_layer_ids=[1], num_mem_blocks=1, adapter_rank=8,
                  num_key_value_heads=4),
    "recurrent_gemma": _lm("recurrent_gemma", lru_width=64, attention_window_size=8, num_hidden_layers=3,
                           block_types=["recurrent", "recurrent", "attention"], head_dim=16),
    "rwkv": _of("ModelForCausalLM", causal, "rwkv", vocab_size=VOCABULARY, hidden_size=64, attention_hidden_size=64,
                num_hidden_layers=2, intermediate_size=128, context_length=32, use_cache=False, **TOKENS),
    "reformer": _of("ModelForCausalLM", causal, "reformer", vocab_size=VOCABULARY, hidden_size=64,
                    attention_head_size=16, num_attention_heads=4, feed_forward_size=128, is_decoder=True,
                    attn_layers=["local", "local"], local_attn_chunk_length=4, axial_pos_embds=False,
                    max_position_embeddings=64, hidden_dropout_prob=0.0, local_attention_probs_dropout_prob=0.0,
                    use_cache=False, **TOKENS),
    "gemma3n_text": _lm("gemma3n_text", head_dim=16, sliding_window=8, hidden_size_per_layer_input=16,
                        vocab_size_per_layer_input=VOCABULARY, laurel_rank=8, num_kv_shared_layers=0,
                        altup_num_inputs=2, layer_types=["sliding_attention", "full_attention"],
                        activation_sparsity_pattern=[0.0, 0.0]),
    "camembert": _masked_lm("camembert"), "xlm_roberta": _masked_lm("xlm-roberta"), "ernie": _masked_lm("ernie"),
    "rembert": _masked_lm("rembert", input_embedding_size=32, output_embedding_size=32, classifier_dropout_prob=0.0),
    "convbert": _masked_lm("convbert", embedding_size=32, head_ratio=2, conv_kernel_size=3),
    "squeezebert": _masked_lm("squeezebert", embedding_size=64, q_groups=2, k_groups=2, v_groups=2,
                              post_attention_groups=1, intermediate_groups=2, output_groups=2),
    "nystromformer": _masked_lm("nystromformer", num_landmarks=SEQUENCE, segment_means_seq_len=SEQUENCE,
                                conv_kernel_size=3),
    "fnet": _of("ModelForMaskedLM", lambda: {k: v for k, v in masked().items() if k != "attention_mask"}, "fnet",
                **ENCODER),
    "funnel": _of("ModelForMaskedLM", masked, "funnel", vocab_size=VOCABULARY, d_model=64, n_head=4, d_head=16,
                  d_inner=128, block_sizes=[1, 1], num_decoder_layers=1, hidden_dropout=0.0, attention_dropout=0.0,
                  activation_dropout=0.0),
    "esm": _masked_lm("esm", position_embedding_type="rotary", token_dropout=False, mask_token_id=1, pad_token_id=2),
    "mobilebert": _masked_lm("mobilebert", embedding_size=32, intra_bottleneck_size=32, true_hidden_size=32,
                             num_feedforward_networks=2),
    "big_bird": _masked_lm("big_bird", attention_type="original_full"),
    "roformer": _masked_lm("roformer", embedding_size=64),
    "canine": _of("ModelForSequenceClassification", _classified, "canine", **{**ENCODER, **LABELS},
                  num_hash_buckets=64, downsampling_rate=2, local_transformer_stride=8),
    "longt5": _of("ModelForSeq2SeqLM", translated, "longt5", **T5, local_radius=4,
                  encoder_attention_type="local"),
    "umt5": _of("ModelForSeq2SeqLM", translated, "umt5", **T5),
    "mt5": _of("ModelForSeq2SeqLM", translated, "mt5", **T5),
    "switch": _of("ModelForSeq2SeqLM", translated, "switch_transformers", **T5, num_experts=4, expert_capacity=32,
                  router_jitter_noise=0.0, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
    "pegasus": _translator("pegasus"), "mbart": _translator("mbart"), "marian": _translator("marian"),
    "m2m_100": _translator("m2m_100"), "blenderbot": _translator("blenderbot"),
    "prophetnet": _of("ModelForSeq2SeqLM", translated, "prophetnet", vocab_size=VOCABULARY, hidden_size=64,
                      encoder_ffn_dim=128, decoder_ffn_dim=128, num_encoder_layers=2, num_decoder_layers=2,
                      num_encoder_attention_heads=4, num_decoder_attention_heads=4, dropout=0.0, attention_dropout=0.0,
                      activation_dropout=0.0, max_position_embeddings=64, use_cache=False, **TOKENS,
                      decoder_start_token_id=0),
    "hubert": _of("ModelForAudioClassification", heard, "hubert", **SOUND),
    "wavlm": _of("ModelForAudioClassification", heard, "wavlm", **SOUND),
    "unispeech": _of("ModelForAudioClassification", heard, "unispeech", **SOUND),
    "sew": _of("ModelForAudioClassification", heard, "sew", **SOUND, squeeze_factor=2),
    "ast": _of("ModelForAudioClassification", _spectrum, "audio-spectrogram-transformer", **{**VISION, **LABELS},
               max_length=32, num_mel_bins=16, frequency_stride=8, time_stride=8),
    "siglip_vision": _of("Model", _pixels, "siglip_vision_model", Squared, **VISION_TOWER),
    "blip_text": _of("ModelForImageTextToText", _read, "blip", text_config={**TEXT_TOWER, **ENCODER},
                     vision_config=VISION_TOWER, projection_dim=32, image_text_hidden_size=32),
    "siglip": _of("Model", lambda: {**_read(), "labels": None, "return_loss": True}, "siglip",
                  text_config=TEXT_TOWER, vision_config=VISION_TOWER),
    "segformer": _of("ModelForSemanticSegmentation", _segmented(32, 32), "segformer", **LABELS,
                     depths=[1, 1], num_encoder_blocks=2, sr_ratios=[2, 1], hidden_sizes=[16, 32],
                     patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
                     decoder_hidden_size=32, drop_path_rate=0.0, classifier_dropout_prob=0.0, hidden_dropout_prob=0.0,
                     attention_probs_dropout_prob=0.0),
    "efficientnet": _images("efficientnet", image_size=32, width_coefficient=0.25, depth_coefficient=0.25,
                            hidden_dim=320, dropout_rate=0.0, drop_connect_rate=0.0, batch_norm_momentum=0.1),
    "mobilevit": _images("mobilevit", image_size=32, patch_size=1, hidden_sizes=[16, 24, 32], num_attention_heads=2,
                         neck_hidden_sizes=[8, 16, 24, 32, 32, 32, 64], hidden_dropout_prob=0.0,
                         attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0),
    "mobilenet_v2": _images("mobilenet_v2", image_size=32, depth_multiplier=0.25, classifier_dropout_prob=0.0),
    "regnet": _images("regnet", embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], groups_width=8),
    "poolformer": _images("poolformer", hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], drop_path_rate=0.0),
    "pvt": _images("pvt", image_size=32, hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 1, 1],
                   num_attention_heads=[1, 2, 2, 4], drop_path_rate=0.0, hidden_dropout_prob=0.0,
                   attention_probs_dropout_prob=0.0),
    "cvt": _images("cvt", embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 2, 3], drop_rate=[0.0] * 3,
                   drop_path_rate=[0.0] * 3),
    "beit": _images("beit", **VISION, drop_path_rate=0.0),
    "bit": _images("bit", embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], num_groups=4,
                   drop_path_rate=0.0),
    "swinv2": _images("swinv2", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
                      window_size=4, drop_path_rate=0.0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "convnextv2": _images("convnextv2", hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], image_size=32,
                          drop_path_rate=0.0),
    "focalnet": _images("focalnet", image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], focal_levels=[2, 2],
                        focal_windows=[3, 3], hidden_sizes=[16, 32], hidden_dropout_prob=0.0, drop_path_rate=0.0),
    "hiera": _images("hiera", image_size=[32, 32], embed_dim=16, depths=[1, 1], num_heads=[1, 2],
                     patch_stride=[4, 4], patch_size=[7, 7], patch_padding=[3, 3], num_query_pool=1,
                     masked_unit_size=[4, 4], query_stride=[2, 2], drop_path_rate=0.0),
    "dpt": _of("ModelForDepthEstimation", _pixels, "dpt", Squared, **{**VISION, "num_hidden_layers": 4},
               backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[16, 16, 32, 32], fusion_hidden_size=16,
               reassemble_factors=[4, 2, 1, 0.5], readout_type="project"),
    "depth_anything": _of("ModelForDepthEstimation", _pixels, "depth_anything", Squared, backbone_config=DINO,
                          patch_size=8, neck_hidden_sizes=[16, 32], fusion_hidden_size=16,
                          reassemble_hidden_size=64, reassemble_factors=[2, 1], head_hidden_size=16),
    "upernet": _of("ModelForSemanticSegmentation", _segmented(32, 32), "upernet",
                   backbone_config={**RESNET, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
                   hidden_size=16, pool_scales=[1, 2], auxiliary_channels=16, auxiliary_in_channels=64, **LABELS),
    "detr": _of("Model", _pixels, "detr", Squared, **DETECTOR),
    "yolos": _of("Model", _pixels, "yolos", Squared, **{**VISION, "image_size": [32, 32]}, num_detection_tokens=4,
                 use_mid_position_embeddings=False),
    "vit_mae": _of("Model", lambda: {**_pixels(), "noise": torch.rand(BATCH, 16, generator=generator())}, "vit_mae",
                   Squared, **VISION, mask_ratio=0.5),
    "videomae": _of("ModelForVideoClassification", _filmed, "videomae", **{**VISION, **LABELS}, num_frames=4,
                    tubelet_size=2),
    "vivit": _of("ModelForVideoClassification", _filmed, "vivit", **{**VISION, **LABELS}, num_frames=4,
                 tubelet_size=[2, 8, 8]),
    "timesformer": _of("ModelForVideoClassification", _filmed, "timesformer", **{**VISION, **LABELS}, num_frames=4,
                       drop_path_rate=0),
    "sam_vision": _of("Model", _pixels, "sam_vision_model", Squared, **VISION_TOWER, output_channels=16,
                      global_attn_indexes=[1], window_size=2, num_pos_feats=16, mlp_dim=128, initializer_range=0.02),
    "perceiver": _of("ModelForMaskedLM", masked, "perceiver", vocab_size=VOCABULARY, d_model=64, d_latents=32,
                     num_latents=8, num_blocks=1, num_self_attends_per_block=1, num_self_attention_heads=4,
                     num_cross_attention_heads=4, max_position_embeddings=SEQUENCE, attention_probs_dropout_prob=0.0),
    "patchtst": Architecture("patchtst", "PatchTSTForPrediction", _series, {
        "num_input_channels": 4, "context_length": 32, "prediction_length": 8, "patch_length": 8, "patch_stride": 8,
        "d_model": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 64, "attention_dropout": 0.0,
        "positional_dropout": 0.0, "ff_dropout": 0.0, "path_dropout": 0.0, "head_dropout": 0.0, "loss": "mse"}),
    "llava": _of("ModelForImageTextToText", _shown(16), "llava", text_config={**MULTIMODAL, "model_type": "llama"},
                 vision_config={**VISION_TOWER, "model_type": "clip_vision_model"}, image_token_index=5,
                 vision_feature_layer=-1),
    "paligemma": _of("ModelForImageTextToText", _shown(16, kinds=True), "paligemma", image_token_index=5,
                     text_config={**MULTIMODAL, "model_type": "gemma"}, projection_dim=64,
                     vision_config={**VISION_TOWER, "model_type": "siglip_vision_model"}),
    "gemma3": _of("ModelForImageTextToText", _shown(4, kinds=True), "gemma3", image_token_index=5,
                  text_config={**MULTIMODAL, "model_type": "gemma3_text", "sliding_window": 8}, mm_tokens_per_image=4,
                  vision_config={**VISION_TOWER, "model_type": "siglip_vision_model"}),
    "blip2": _of("ModelForImageTextToText", _shown(4), "blip-2", image_token_index=5, num_query_tokens=4,
                 text_config={**CORE, **TOKENS, "model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64,
                              "dropout": 0.0, "attention_dropout": 0.0}, vision_config=VISION_TOWER,
                 qformer_config={**ENCODER, "encoder_hidden_size": 64}),
    "internvl": _of("ModelForImageTextToText", _shown(4), "internvl", image_token_id=5, downsample_ratio=0.5,
                    text_config={**MULTIMODAL, "model_type": "qwen2"},
                    vision_config={**VISION_TOWER, "image_size": [32, 32], "patch_size": [8, 8],
                                   "model_type": "internvl_vision"}),
    "aya_vision": _of("ModelForImageTextToText", _shown(4), "aya_vision", image_token_index=5, downsample_factor=2,
                      text_config={**MULTIMODAL, "model_type": "cohere2", "sliding_window": 8},
                      vision_config={**VISION_TOWER, "model_type": "siglip_vision_model"}, vision_feature_layer=-1),
    "florence2": _of("ModelForImageTextToText", _shown(17), "florence2", image_token_id=5,
                     text_config={**ENCODER_DECODER, "model_type": "bart"},
                     vision_config={"embed_dim": [16, 32], "depths": [1, 1], "num_heads": [2, 2],
                                    "num_groups": [2, 2], "patch_size": [7, 3], "patch_stride": [4, 2],
                                    "patch_padding": [3, 1], "patch_prenorm": [False, True], "window_size": 4,
                                    "projection_dim": 64, "max_position_embeddings": 16, "drop_path_rate": 0.0}),
    "git": _of("ModelForCausalLM", lambda: {**causal(), **_pixels()}, "git", **ENCODER,
               vision_config={**VISION_TOWER, "model_type": "git_vision_model"}),
    "vision_encoder_decoder": Architecture(
        "vision-encoder-decoder", "VisionEncoderDecoderModel", _captioned,
        {"encoder": {"model_type": "vit", **VISION}, "pad_token_id": 2, "decoder_start_token_id": 0,
         "decoder": {"model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4,
                     "add_cross_attention": True, "is_decoder": True, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
                     "attn_pdrop": 0.0, "use_cache": False}}),
    "conditional_detr": _of("Model", _pixels, "conditional_detr", Squared, **DETECTOR),
    "deformable_detr": _of("Model", _pixels, "deformable_detr", lambda model: Squared(model, "last_hidden_state"),
                           **DETECTOR, num_feature_levels=3),
    "speech_to_text": _of("ModelForSpeechSeq2Seq",
                          lambda: {"input_features": torch.randn(BATCH, 32, 16, generator=generator()),
                                   "labels": translated()["labels"]}, "speech_to_text", **ENCODER_DECODER,
                          input_feat_per_channel=16, num_conv_layers=2, conv_channels=32, max_source_positions=64,
                          max_target_positions=64),
    "moonshine": _of("ModelForSpeechSeq2Seq",
                     lambda: {"input_values": torch.randn(BATCH, 2000, generator=generator()),
                              "labels": translated()["labels"]}, "moonshine", vocab_size=VOCABULARY, hidden_size=64,
                     intermediate_size=128, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
                     encoder_num_attention_heads=4, decoder_num_attention_heads=4, max_position_embeddings=64,
                     use_cache=False, pad_token_id=2, decoder_start_token_id=0),
    "time_series_transformer": Architecture("time_series_transformer", "TimeSeriesTransformerForPrediction", _timed, {
        **TIMED, "lags_sequence": [1, 2]}),
    "patchtsmixer": Architecture("patchtsmixer", "PatchTSMixerForPrediction", _series, {
        "context_length": 32, "prediction_length": 8, "patch_length": 8, "patch_stride": 8, "num_input_channels": 4,
        "d_model": 16, "num_layers": 2, "dropout": 0.0, "head_dropout": 0.0}),
    "owlvit_vision": Architecture("owlvit_vision_model", "OwlViTVisionModel", _pixels, VISION_TOWER,
                                 Squared),
}

#: Decoders whose fields are usual ones, without experts, with experts, and with latent keys and values.
for _name in ("cwm", "granite_swa", "granitemoe_swa", "granitemoeshared", "hyperclovax", "internlm3", "iquestcoder",
              "jais2", "ministral", "ministral3", "nanochat", "vaultgemma", "flint", "lfm3", "olmo_hybrid"):
    TRANSFORMERS[_name] = _lm(_name, head_dim=16, sliding_window=8)
for _name in ("afmoe", "aria_text", "exaone_moe", "flex_olmo", "hunyuan_v1_moe", "hy_v3", "minimax_m2",
              "mimo_v2_flash", "solar_open", "laguna", "cohere2_moe"):
    TRANSFORMERS[_name] = _lm(_name, **ROUTED)
for _name in ("deepseek_v2", "glm4_moe_lite", "minicpm3", "dots3_note_text"):
    TRANSFORMERS[_name] = _lm(_name, **{**ROUTED, **LATENT})


def _by_hand(make: Callable[[], nn.Module], inputs: Callable[[], Inputs]) -> Architecture:
    return Architecture("", "", inputs, {}, None, make)


def _image_and_map() -> Inputs:
    return {"image": torch.randn(BATCH, 3, 16, 16, generator=generator()),
            "target": torch.randint(4, (BATCH, 16, 16), generator=generator())}


def _noised() -> Inputs:
    g = generator()
    return {"image": torch.randn(BATCH, 4, 16, 16, generator=g), "noise": torch.randn(BATCH, 4, 16, 16, generator=g),
            "times": torch.randint(100, (BATCH,), generator=g), "text": torch.randn(BATCH, 6, 24, generator=g)}


def _tokens() -> Inputs:
    return {"ids": torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator()),
            "labels": torch.arange(BATCH) % NUM_CLASSES}


def _graph() -> Inputs:
    g = generator()
    return {"nodes": torch.randn(24, 16, generator=g), "edges": torch.randint(24, (2, 96), generator=g),
            "labels": torch.randint(4, (24,), generator=g)}


def _clicks() -> Inputs:
    g = generator()
    return {"dense": torch.randn(BATCH, 13, generator=g), "sparse": torch.randint(64, (BATCH, 4), generator=g),
            "bags": torch.randint(64, (BATCH, 6), generator=g), "clicked": torch.arange(BATCH).remainder(2).float()}


def _flat(features: int) -> Callable[[], Inputs]:
    return lambda: {"x": torch.randn(BATCH, features, generator=generator()),
                    "noise": torch.randn(BATCH, 8, generator=generator())}


def _waves() -> Inputs:
    g = generator()
    return {"x": torch.randn(BATCH, 1, 64, generator=g), "target": torch.randn(BATCH, 1, 64, generator=g)}


def _grid() -> Inputs:
    g = generator()
    return {"x": torch.randn(BATCH, 2, 16, 16, generator=g), "target": torch.randn(BATCH, 1, 16, 16, generator=g)}


def _points() -> Inputs:
    return {"points": torch.randn(BATCH, 3, 32, generator=generator()), "labels": torch.arange(BATCH) % NUM_CLASSES}


def _pair() -> Inputs:
    g = generator()
    return {"left": torch.randn(BATCH, 24, generator=g), "right": torch.randn(BATCH, 24, generator=g)}


def _translation() -> Inputs:
    return {"source": torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator()),
            "target": torch.randint(VOCABULARY, (BATCH, 12), generator=torch.Generator().manual_seed(3))}


def _draw(**shapes: tuple[int, ...]) -> Callable[[], Inputs]:
    """Random numbers by name."""
    def made() -> Inputs:
        g = generator()
        return {name: torch.randn(BATCH, *shape, generator=g) for name, shape in shapes.items()}

    return made


def _sound() -> Inputs:
    return {"sound": torch.randn(BATCH, 8, 40, generator=generator()),
            "labels": torch.randint(1, VOCABULARY, (BATCH, 6), generator=generator()),
            "lengths": torch.arange(BATCH) % 4 + 2}


def _atoms() -> Inputs:
    return {**_draw(places=(5, 3), energy=(), forces=(5, 3))(),
            "kinds": torch.randint(10, (BATCH, 5), generator=generator())}


def _sentences() -> Inputs:
    return {**_draw(words=(7, 12))(), "labels": torch.randint(5, (BATCH, 7), generator=generator()),
            "there": torch.arange(7)[None] < (torch.arange(BATCH) % 4 + 4)[:, None]}


BY_HAND: Mapping[str, Architecture] = {
    "unet": _by_hand(networks.UNet, _image_and_map),
    "diffusion_unet": _by_hand(networks.DiffusionUNet, _noised),
    "lstm": _by_hand(lambda: networks.Recurrent(nn.LSTM), _tokens),
    "gru": _by_hand(lambda: networks.Recurrent(nn.GRU), _tokens),
    "graph_network": _by_hand(networks.GraphNetwork, _graph),
    "vae": _by_hand(networks.VariationalAutoencoder, _flat(32)),
    "recommender": _by_hand(networks.Recommender, _clicks),
    "torch_transformer": _by_hand(networks.Translator, _translation),
    "wavenet": _by_hand(networks.WaveNet, _waves),
    "fourier_operator": _by_hand(networks.FourierOperator, _grid),
    "point_net": _by_hand(networks.PointNet, _points),
    "two_towers": _by_hand(networks.TwoTowers, _pair),
    "mixer": _by_hand(networks.Mixer, lambda: seen_as("image")),
    "upscaler": _by_hand(networks.Upscaler, lambda: seen_as("image")),
    "adversary": _by_hand(networks.Adversary, lambda: seen_as("image")),
    "mixture": _by_hand(networks.Mixture, _tokens),
    "speech": _by_hand(networks.Speech, _sound),
    "force_field": _by_hand(networks.ForceField, _atoms),
    "burgers": _by_hand(networks.Burgers, _draw(inside=(2,), border=(2,))),
    "critic": _by_hand(networks.Critic, _draw(real=(3, 16, 16), noise=(8,), shares=(1, 1, 1))),
    "meta_learner": _by_hand(networks.MetaLearner, _draw(seen=(4, 6), told=(4, 2), asked=(4, 6), answers=(4, 2))),
    "policy": _by_hand(networks.Policy, lambda: {**_draw(seen=(12,), done=(4,), advantage=(), earned=())(),
                                                 "chosen": torch.arange(BATCH) % 5}),
    "ensemble": _by_hand(networks.Ensemble, _pair),
    "quantised": _by_hand(networks.Quantised, lambda: seen_as("image")),
    "contrast": _by_hand(networks.Contrast, _pair),
    "labeller": _by_hand(networks.Labeller, _sentences),
    "scan": _by_hand(networks.Scan, _tokens),
}


def seen_as(name: str) -> Inputs:
    return {name: torch.randn(BATCH, 3, 16, 16, generator=generator()), "labels": torch.arange(BATCH) % NUM_CLASSES}


OTHERS: dict[str, Architecture] = {**TRANSFORMERS, **BY_HAND}
