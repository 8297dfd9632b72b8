"""A training step on one device, ours beside plain torch: ``python -m benchmarks.one_device``.

One process, a group of one rank, the same model, batch and fused AdamW for all variants, each alone on the device in
turn; the first one again at the end, so that drift shows. Ours are as after their first hundred calls, which compare
inputs (``check_inputs=0``). Kernels and their seconds are those of one profiled step. The losses of the first steps
must equal plain torch's.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer
from torch import nn

from benchmarks.measure import Spread, as_json, conditions
from benchmarks.subjects import gpt2, llama, token_batch

WARM_UP = 3
#: Largest relative difference of a loss: bfloat16 sums in other orders.
TOLERANCE = 5e-3


@dataclass(frozen=True)
class Case:
    """A model in bfloat16 on the device, and the shape of its token batch."""

    build: Callable[[], nn.Module]
    vocabulary: int
    batch: int
    length: int


CASES = {
    "tiny": Case(lambda: gpt2(512, 64, 2, 64), 512, 2, 32),
    "gpt2": Case(lambda: gpt2(50304, 768, 12, 1024), 50304, 8, 1024),
    "gpt2 short": Case(lambda: gpt2(50304, 768, 12, 1024), 50304, 1, 256),
    "llama3-8b, 4 layers": Case(lambda: llama(128256, 4096, 14336, 4, 8, heads=32), 128256, 2, 4096),
}
Step = Callable[[], torch.Tensor]


@dataclass
class Row:
    """One variant: its step; seconds until the host has issued it; the device's kernels in a step, and how long they
    take; compile and first step; peak of tensors. ``predicted_s`` and ``predicted_bytes``: what our plan promises."""

    case: str
    variant: str
    losses: list[float] = field(default_factory=list)
    step: Spread | None = None
    host_s: float = math.nan
    kernels: int = 0
    kernel_s: float = math.nan
    first_s: float = math.nan
    peak_bytes: int = 0
    predicted_s: float = math.nan
    predicted_bytes: float = math.nan
    error: str = ""


def step_of(model: nn.Module, called: Any, kwargs: dict[str, torch.Tensor]) -> Step:
    """Forward, backward, AdamW, zero_grad, as a training script has them; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> torch.Tensor:
        loss: torch.Tensor = called(**kwargs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def variants(case: Case, device: torch.device) -> dict[str, Callable[[], tuple[Step, Any]]]:
    """By name, what makes the step and, for ours, the parallel module."""
    import autoparallel

    kwargs = {name: value.to(device) for name, value in token_batch(case.vocabulary, case.batch, case.length).items()}

    def model() -> nn.Module:
        with device:    # billions of random numbers take a CPU a minute
            return case.build().to(torch.bfloat16)

    def torchs(**options: Any) -> tuple[Step, Any]:
        made = model()
        return step_of(made, torch.compile(made, **options) if options else made, kwargs), None

    def ddp() -> tuple[Step, Any]:
        made = nn.parallel.DistributedDataParallel(model())
        return step_of(made, made, kwargs), None

    def ours(backend: str, **options: Any) -> tuple[Step, Any]:
        cluster = None if device.type == "cuda" else "h200"
        made = autoparallel.compile(model(), 1, example_kwargs=kwargs, backend=backend, cluster=cluster,
                                    check_inputs=0, **options)
        return step_of(made, made, kwargs), made

    return {
        "torch": torchs,
        "DDP": ddp,
        "autoparallel": lambda: ours("eager"),
        "torch.compile": lambda: torchs(mode="default"),
        "autoparallel, inductor": lambda: ours("inductor"),
        "torch.compile, CUDA graphs": lambda: torchs(mode="reduce-overhead"),
        "autoparallel, CUDA graphs": lambda: ours("eager", cuda_graphs=True),
        "autoparallel, inductor, CUDA graphs": lambda: ours("inductor", cuda_graphs=True),
        "torch again": torchs,
    }


def measured(case: str, variant: str, make: Callable[[], tuple[Step, Any]], repeats: int, device: torch.device) -> Row:
    row = Row(case, variant)
    try:
        gc.collect()
        _empty(device)
        started = time.perf_counter()
        step, parallel = make()
        row.losses.append(float(step()))
        _synchronize(device)
        row.first_s = time.perf_counter() - started
        row.losses += [float(step()) for _ in range(WARM_UP)]
        row.step, row.host_s = _timed(step, repeats, device)
        row.kernels, row.kernel_s = _kernels(step, device)
        row.peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        if parallel is not None:
            row.predicted_s = parallel.plan.prediction.step_s
            row.predicted_bytes = parallel.plan.prediction.peak_bytes
    except Exception as error:  # one variant must not cost the others their device time
        row.error = f"{type(error).__name__}: {error}"
    return row


def _empty(device: torch.device) -> None:
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(step: Step, repeats: int, device: torch.device) -> tuple[Spread, float]:
    """Seconds of steps, each until the device is done, and the median time until the host has issued one."""
    seconds, issued = [], []
    for _ in range(repeats):
        _synchronize(device)
        started = time.perf_counter()
        step()
        issued.append(time.perf_counter() - started)
        _synchronize(device)
        seconds.append(time.perf_counter() - started)
    return Spread.of(seconds), Spread.of(issued).median_s


def _kernels(step: Step, device: torch.device) -> tuple[int, float]:
    """Number of the device's kernels and copies in a step, and the sum of their seconds."""
    from torch.profiler import ProfilerActivity, profile

    if device.type != "cuda":
        return 0, math.nan
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step()
        _synchronize(device)
    events = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return len(events), sum(e.time_range.elapsed_us() for e in events) / 1e6


def compare(row: Row, plain: Row) -> None:
    """Note in ``row`` where its losses are not plain torch's."""
    differences = [abs(a - b) / abs(b) for a, b in zip(row.losses, plain.losses, strict=False)]
    if not row.error and not max(differences, default=math.inf) <= TOLERANCE:
        row.error = f"losses {row.losses} differ from plain torch's {plain.losses}"


def main(
    models: Annotated[str, typer.Option(help="which, with ; between")] = "gpt2;gpt2 short;llama3-8b, 4 layers",
    repeats: Annotated[int, typer.Option(help="steps measured per variant")] = 30,
    only: Annotated[str, typer.Option(help="variants whose names contain this")] = "",
    device_type: Annotated[str, typer.Option("--device", help="cuda or cpu")] = "cuda",
) -> None:
    """Measure and print a table and JSON."""
    import autoparallel
    from autoparallel.kernels.groups import destroy_groups

    autoparallel.init(device=device_type)
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    rows: list[Row] = []
    for name in models.split(";"):
        made = {variant: make for variant, make in variants(CASES[name], device).items()
                if only in variant or variant == "torch"}
        found = [measured(name, variant, make, repeats, device) for variant, make in made.items()]
        for row in found:
            compare(row, found[0])
            print(line(row, found[0]), flush=True)
        rows += found
    about = conditions() | {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    print(json.dumps({"conditions": about, "rows": as_json(rows)}))
    destroy_groups()


def line(row: Row, plain: Row) -> str:
    """One variant for a terminal; the ratio is its median over plain torch's."""
    if row.step is None or plain.step is None:
        return f"{row.case:22}{row.variant:36}{row.error}"
    s = row.step
    told = "" if math.isnan(row.predicted_s) else (
        f" predicted {row.predicted_s * 1e3:8.2f} ms, {row.predicted_bytes / 2**30:6.2f} GiB")
    return (f"{row.case:22}{row.variant:36}{s.median_s * 1e3:9.2f} ms ({s.minimum_s * 1e3:.2f} to "
            f"{s.maximum_s * 1e3:.2f}) {s.median_s / plain.step.median_s:6.3f}; host {row.host_s * 1e3:8.2f} ms; "
            f"{row.kernels:5} kernels {row.kernel_s * 1e3:8.2f} ms; first {row.first_s:6.1f} s; "
            f"{row.peak_bytes / 2**30:6.2f} GiB;{told} {row.error}")


if __name__ == "__main__":
    typer.run(main)
