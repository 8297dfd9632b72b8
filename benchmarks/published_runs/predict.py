"""From a row to its step time, peak memory and utilisation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.published_runs.peak import peak_bytes
from benchmarks.published_runs.price import Pricer
from benchmarks.published_runs.rows import AbstainError, Row, Run, is_torch, read
from cost_models import ClusterError
from cost_models.profile import Profile, Table


def predict(row: Row) -> dict[str, Any] | None:
    """``step_time_s``, ``peak_memory_bytes`` of the fullest device, and ``mfu``: model FLOP (recomputation not counted,
    attention as if not causal) over the dense bf16 peak. None where the row lacks a fact; `explain` says which."""
    try:
        return explain(row)
    except (AbstainError, ClusterError):
        return None


def explain(row: Row) -> dict[str, Any]:
    """The same with the step's parts. Raises AbstainError naming the fact that is missing."""
    run = read(row)
    return priced(run)


def priced(run: Run, table: Table | None = None) -> dict[str, Any]:
    """A run under given constants, else those in use."""
    pricer = Pricer(run, profile_of(run, table))
    step = pricer.step()
    sequences = run.plan.data * run.plan.micro_batch * run.plan.micro_batches
    peak = run.cluster.device.peak_flops_per_s["float16"] * run.plan.devices
    return {
        "step_time_s": step.step_s,
        "peak_memory_bytes": peak_bytes(pricer),
        "mfu": run.model.flops(sequences) / step.step_s / peak,
        "parts_s": vars(step),
    }


def profile_of(run: Run, table: Table | None = None) -> Profile:
    """The constants of the run's device, software and network, with the precision that it states. The attention of
    torch's runs is FlashAttention-2: they are of releases before those that take cuDNN's (priors.toml); and they send
    activations as torch's own tensor parallelism does, not beside compute."""
    found = Profile.of(run.machine, run.stack, run.network, table)
    native = 0.0 if is_torch(run.stack) else found.native
    return replace(found, masters=float(run.master_in_float32), native=native, overlaps_activations=0.0)
