"""Rows of published runs, and predictions of them."""

from __future__ import annotations

from typing import Any

from benchmarks.published_runs import predict


def row(**changes: Any) -> dict[str, Any]:
    """Korthikanti et al. 2022, table 5: 175B on 64 A100s with selective recomputation; dotted keys change it."""
    base: dict[str, Any] = {
        "id": "korth-004",
        "source": {"title": "Korthikanti et al., Reducing Activation Recomputation, Table 5"},
        "model": {"name": "Megatron-175B", "layers": 96, "hidden": 12288, "ffn": 49152, "heads": 96, "kv_heads": 96,
                  "vocab": 51200, "seq_len": 2048, "gated_mlp": False, "tied_embeddings": True, "moe": None},
        "hardware": {"gpu": "A100-80GB", "n_gpus": 64, "gpus_per_node": 8, "inter_bw": "HDR InfiniBand (Selene)"},
        "plan": {"dp": 1, "tp": 8, "pp": 8, "cp": 1, "virtual_stages": 3, "schedule": "interleaved-1f1b", "zero": 0,
                 "sequence_parallel": True, "micro_batch": 1, "global_batch": 64, "recompute": "selective",
                 "precision": "fp16/bf16"},
        "measured": {"step_time_s": 13.75},
        "derived": {},
    }
    for key, value in changes.items():
        part, name = key.split("__")
        base[part][name] = value
    return base


FSDP: dict[str, Any] = {"plan__dp": 64, "plan__tp": 1, "plan__pp": 1, "plan__virtual_stages": None, "plan__zero": 3,
                        "plan__fsdp": "FULL_SHARD", "plan__schedule": "none", "plan__sequence_parallel": None}
EXPERTS = {"experts": 64, "topk": 8, "expert_ffn": 1024, "shared_ffn": 1024, "moe_layers": 90}


def seconds(**changes: Any) -> float:
    prediction = predict(row(**changes))
    assert prediction is not None
    return float(prediction["step_time_s"])


def gigabytes(**changes: Any) -> float:
    prediction = predict(row(**changes))
    assert prediction is not None
    return float(prediction["peak_memory_bytes"]) / 1e9


BRIDGE = {"source__title": "NVIDIA Megatron-Bridge performance summary", "source__locator": "26.04 NeMo Container",
          "hardware__gpu": "GB200", "plan__tp": 1, "plan__pp": 1, "plan__virtual_stages": None, "plan__dp": 64,
          "model__moe": EXPERTS, "plan__ep": 64, "plan__micro_batch": 4, "plan__global_batch": 1280,
          "plan__recompute": None}
