"""The second route to a prediction: the row's model is captured, and its plan priced by ``autoparallel.plan(...,
by_hand=...)``, as a user would. Models are built of transformers' Llama (gated MLP) and GPT-2 (the others)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.published_runs.predict import profile_of
from benchmarks.published_runs.rows import AbstainError, Run, is_core
from cost_models.profile import Table

if TYPE_CHECKING:
    from torch import nn

    from autoparallel import Plan


def plan_of(run: Run, table: Table | None = None) -> Plan:
    """The priced plan of a run. Raises AbstainError for what the two models cannot express."""
    import autoparallel

    if reason := _missing(run):
        raise AbstainError(reason)
    model, inputs = captured_model(run)
    cluster = replace(run.cluster, profile=profile_of(run, table))
    return autoparallel.plan(model, cluster, example_kwargs=inputs, by_hand=by_hand(run),
                             reduce_dtype="float32" if run.float32_sums else None)


def by_hand(run: Run) -> Mapping[str, Any]:
    """The run's plan, with the keys of `autoparallel.planning.by_hand`."""
    p = run.plan
    host = min(p.data, run.cluster.links[0].num_devices)
    return {"dp": p.data, "tp": p.tensor, "pp": p.pipeline, "cp": p.context, "zero": 3 if p.fsdp else p.zero_stage,
            "shards": host if p.hybrid else None, "virtual": p.virtual, "micro_batch": p.micro_batch,
            "recompute": p.recompute, "sequence_parallel": p.sequence_parallel,
            "split": "work" if p.pipeline == 1 else "ends" if run.ends else "blocks",
            "schedule": "gpipe" if p.gpipe and p.pipeline > 1 else None}


def captured_model(run: Run) -> tuple[nn.Module, dict[str, Any]]:
    """The model on the meta device in the run's two-byte dtype, and the arguments of a call with the global batch."""
    import torch
    import transformers

    config = _config(run)
    dtype = torch.float16 if run.machine.startswith("v100") else torch.bfloat16
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        sequences = run.plan.data * run.plan.micro_batch * run.plan.micro_batches
        ids = torch.zeros(sequences, run.model.seq_len, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids, "use_cache": False}


def _config(run: Run) -> Any:
    from transformers import AutoConfig

    m = run.model
    if m.gated:
        fused = is_core(run.stack)    # of its products, those of one input are one
        return AutoConfig.for_model(
            "phi3" if fused else "llama", pad_token_id=0, bos_token_id=0, eos_token_id=0, num_hidden_layers=m.layers,
            hidden_size=m.hidden, intermediate_size=m.ffn, vocab_size=run.vocab,
            num_attention_heads=m.heads, num_key_value_heads=m.query_groups, head_dim=m.head_dim,
            max_position_embeddings=m.seq_len, tie_word_embeddings=m.tied)
    return AutoConfig.for_model(
        "gpt2", n_layer=m.layers, n_embd=m.hidden, n_head=m.heads, n_inner=m.ffn, vocab_size=run.vocab,
        n_positions=m.seq_len, tie_word_embeddings=m.tied, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)


def _missing(run: Run) -> str:
    m, p = run.model, run.plan
    facts = {
        "experts": m.experts, "latent attention": m.latent, "windows of attention": m.window,
        "matrix products of less than two bytes": p.precision != "bf16",
        "recompute of named modules": p.modules,
        "recompute of some layers": p.recompute == "selective" and p.again is not None,
        "grouped queries without a gated MLP": not m.gated and m.query_groups != m.heads,
        "heads of another size without a gated MLP": not m.gated and m.head_dim * m.heads != m.hidden,
    }
    return next((f"{name}: not priced by a captured model here" for name, found in facts.items() if found), "")
