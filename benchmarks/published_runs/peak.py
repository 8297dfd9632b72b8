"""Bytes on the fullest device: training state, what is gathered, saved activations in flight, and the largest moment
of one layer or of the loss.

Saved by a layer for each token, of two bytes an element (Korthikanti et al. 2022, section 4, with attention's scores
only where they are in memory): inputs and outputs of both norms, query, key, value, attention's output, the MLP's
inner tensors; dropout masks where the software of the time had dropout.
"""

from __future__ import annotations

from benchmarks.published_runs.price import Pricer
from benchmarks.published_runs.rows import is_core, is_torch
from cost_models import memory


def peak_bytes(pricer: Pricer) -> float:
    """The fullest stage's peak: the first holds most micro-batches, the last the logits."""
    run, c = pricer.run, pricer.c
    fullest = max(state_bytes(pricer, stage) + activation_bytes(pricer, stage) for stage in (0, pricer.p.pipeline - 1))
    peak = (fullest + gathered_bytes(pricer)) * (1 + c.fragments)
    if run.stack == "megatron-deepspeed":    # their memory is nvidia-smi's: context and communicators count
        peak += run.cluster.device.reserved_bytes + c.communicators
    return peak


def state_bytes(pricer: Pricer, stage: int) -> float:
    """Parameters, gradients and optimizer state."""
    run, p = pricer.run, pricer.p
    dense, experts = pricer.parameters.stage_parameters(stage)
    ranks = pricer.machine.shards()
    if p.fsdp:
        kind = "float32" if run.master_in_float32 else "bfloat16"
        return float(memory.training_state(dense + experts, kind, "adamw", zero_stage=3, num_shards=ranks).total)
    kind = "megatron-bfloat16" if run.stack == "megatron-core" or run.gradient_bytes == 4 else "float16-master"
    if run.model.latent and run.stack.startswith("nemo"):
        kind = "bfloat16-moments"    # Megatron-Bridge's recipes of DeepSeek's kind of model
    own = max(1, ranks * p.tensor // p.expert)
    state = sum(float(memory.training_state(part, kind, "adamw", zero_stage=p.zero_stage, num_shards=shards).total)
                for part, shards in ((dense, ranks), (experts, own)) if part)
    twice = run.gradient_bytes == 4 and not is_core(run.stack)    # DeepSpeed adds two-byte gradients to those in four
    return state + (2.0 * dense if twice else 0.0)


def gathered_bytes(pricer: Pricer) -> float:
    """What FSDP holds whole: two layers and the embedding; under a pipeline, where parameters stay gathered and
    gradients add up over micro-batches, the stage in two bytes and its gradients in four."""
    p, m = pricer.p, pricer.m
    if not p.fsdp:
        return 0.0
    if p.pipeline > 1:
        return 6.0 * sum(pricer.parameters.stage_parameters(0))
    layer = sum(pricer.parameters.layer_parameters(m.mixed_layers > 0))
    return 2 * 4.0 * layer + 4.0 * m.vocab * m.hidden / p.tensor


def activation_bytes(pricer: Pricer, stage: int) -> float:
    """Saved activations of the micro-batches in flight, and what one layer or the loss needs besides."""
    p, m = pricer.p, pricer.m
    schedule = "gpipe" if p.gpipe else "1f1b"
    chunks = memory.in_flight_micro_batches(schedule, stage, p.pipeline, p.micro_batches, p.virtual)
    mixed = m.mixed_layers / m.layers
    whole = sum(part * layer_bytes(pricer, kind) for kind, part in ((False, 1 - mixed), (True, mixed)) if part)
    rows = pricer.machine.tokens / (p.tensor if p.sequence_parallel else 1)
    kept = 2.0 * rows * m.hidden if p.recompute == "full" else whole
    if p.recompute == "selective" and is_torch(pricer.run.stack):
        # its compiler recomputes more than that: two runs of one job (torch 2.6 and 2.8) differ by 15 of 62 GiB
        kept = _selected_bytes(pricer) if pricer.run.stack == "torch-eager" and not mixed else 0.3 * kept
    last = stage == p.pipeline - 1
    logits = pricer.c.logit_bytes * pricer.machine.tokens * m.vocab / p.tensor if last else 0.0
    working = 2 * whole if p.recompute == "full" else 0.5 * whole
    return chunks / p.virtual * pricer.parameters.stage_layers()[stage] * kept + max(working, logits)


def _selected_bytes(pricer: Pricer) -> float:
    """Saved by a dense layer where torchtitan recomputes by op: its input, attention's output, and every other product
    (query, value, the first of the MLP, the last)."""
    p, m, t = pricer.p, pricer.m, pricer.machine.tokens
    rows = t / (p.tensor if p.sequence_parallel else 1)
    return 4.0 * rows * m.hidden + 2.0 * t * ((2 * m.heads + m.query_groups) * m.head_dim + m.ffn) / p.tensor


def layer_bytes(pricer: Pricer, mixed: bool) -> float:
    """Saved by one layer for one micro-batch when nothing is recomputed but, if so planned, attention's core."""
    p, m, t = pricer.p, pricer.m, pricer.machine.tokens
    old = not pricer.c.flash
    rows = t / (p.tensor if p.sequence_parallel else 1)
    nbytes = rows * m.hidden * (10.0 if old else 8.0)
    nbytes += 2.0 * t * (2 * m.heads + 2 * m.query_groups) * m.head_dim / p.tensor
    if old and p.recompute != "selective":
        nbytes += 5.0 * p.micro_batch * m.heads * m.seq_len**2 / p.tensor
    inner = (3 if m.gated else 2) * 2.0
    if not mixed or m.experts is None:
        return nbytes + inner * t * m.ffn / p.tensor
    e = m.experts
    return nbytes + rows * e.top_k * (inner * e.ffn + 2.0 * m.hidden) + inner * t * e.shared_ffn / p.tensor
