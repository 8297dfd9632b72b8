"""``autoparallel demo``: plans a small Llama, trains it on local processes, compares with one process."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

STEPS = 5
BATCH, SEQUENCE = 8, 64


@dataclass(frozen=True)
class Measured:
    """One rank's run: loss per step, largest relative difference of a parameter after the last step, median seconds per
    step, the plan's report."""

    losses: tuple[float, ...]
    parameter_error: float
    step_s: float
    report: str


def small_llama() -> nn.Module:
    """A Llama of about 3 million parameters with grouped-query attention, from transformers, random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=SEQUENCE, use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def batch(step: int) -> dict[str, torch.Tensor]:
    """Random token ids of a step, equal on all ranks."""
    ids = torch.randint(0, 2048, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def train(model: nn.Module) -> tuple[list[float], float]:
    """The losses of `STEPS` AdamW steps, and the median seconds of a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    losses, times = [], []
    for step in range(STEPS):
        started = time.perf_counter()
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        times.append(time.perf_counter() - started)
    return losses, sorted(times)[len(times) // 2]


def parallel_run(mesh_shape: tuple[int, ...], reference: dict[str, torch.Tensor]) -> Measured:
    """One rank's job: compile, train, compare parameters with ``reference`` by name."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    import autoparallel

    # full_tensor() communicates once per axis, for which torch logs warnings
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", mesh_shape)
    parallel = autoparallel.compile(small_llama(), mesh, example_kwargs=batch(0))
    losses, seconds = train(parallel)
    error = 0.0
    for name, parameter in parallel.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        expected = reference[name]
        error = max(error, float((whole.detach().cpu() - expected).abs().max() / expected.abs().max()))
    return Measured(tuple(losses), error, seconds, parallel.plan.report())


def main(num_ranks: int, mesh_shape: tuple[int, ...]) -> bool:
    """Run the demo and print it. True if losses agree with one process to 1e-5 and parameters to 1e-4, relatively."""
    from rich.console import Console
    from rich.table import Table

    from autoparallel.launch.local import launch

    console = Console()
    model = small_llama()
    losses, seconds = train(model)
    reference = {name: p.detach().clone() for name, p in model.named_parameters()}
    ranks: list[Any] = launch(parallel_run, num_ranks, mesh_shape, reference)
    first: Measured = ranks[0]
    print(first.report)
    table = Table(title=f"training on {num_ranks} processes against one", title_justify="left")
    for column in ("step", "loss, one process", f"loss, {num_ranks} processes", "relative difference"):
        table.add_column(column, justify="right")
    worst = 0.0
    for step, (one, many) in enumerate(zip(losses, first.losses, strict=True)):
        worst = max(worst, abs(one - many) / abs(one))
        table.add_row(str(step), f"{one:.7f}", f"{many:.7f}", f"{abs(one - many) / abs(one):.1e}")
    console.print(table)
    console.print(f"parameters after {STEPS} AdamW steps: largest relative difference {first.parameter_error:.1e}")
    console.print(f"step time, median: one process {seconds * 1e3:.0f} ms, {num_ranks} processes "
                  f"{first.step_s * 1e3:.0f} ms (all share this machine's cores: not a measure of speed)")
    agrees = worst < 1e-5 and first.parameter_error < 1e-4
    console.print("[bold green]the numbers agree[/]" if agrees else "[bold red]the numbers differ[/]")
    return agrees
