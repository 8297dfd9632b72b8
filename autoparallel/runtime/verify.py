"""Predicted steps beside measured ones, and the correction of the cluster that the difference suggests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from autoparallel.errors import InputError, shown
from autoparallel.plans import Prediction
from cost_models import Cluster, Correction
from cost_models.calibrate import write_cluster

#: Names of the profiler's events that are communication, as torch and its process groups record them.
COMMUNICATION = ("c10d::", "_c10d_functional::", "nccl", "gloo:")
WARM_UP = 2
#: The least and the largest factor of a correction.
LIMITS = 1e-3, 1e3


@dataclass(frozen=True)
class Measured:
    """Seconds of a step on the slowest rank: of forward and backward, of the part in compute, and of the rest, which is
    exposed communication and the host; of the optimizer (None: there was none). ``collectives``: calls by kind.
    ``peak_bytes``: of tensors by rank (empty where the device does not tell)."""

    step_s: float
    compute_s: float
    exposed_s: float
    optimizer_s: float | None
    collectives: Mapping[str, int]
    peak_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verification:
    """A plan's prediction beside what its steps took. ``print`` shows both; `save` writes the corrected cluster."""

    predicted: Prediction
    measured: Measured
    cluster: Cluster

    @property
    def error(self) -> float:
        """(predicted - measured) / measured seconds of forward and backward."""
        return self.predicted_s / self.measured.step_s - 1

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of a step without the optimizer, which is measured apart."""
        return self.predicted.step_s - self.predicted.optimizer_s

    @property
    def correction(self) -> Correction:
        """Factors that bring compute and communication to what was measured; what is left is fixed. Waits in a pipeline
        are compute of other ranks. Where the parts exceed the step (the profiler takes time too), both factors shrink
        alike."""
        p, m, old = self.predicted, self.measured, self.cluster.correction
        worked, exposed = p.forward_s + p.backward_s, self._exposed_s
        compute = m.compute_s / worked if worked > 0 and m.compute_s > 0 else 1.0
        waits = compute * p.waiting_s
        communication = max(m.exposed_s - waits, 0.0) / exposed if exposed > 0.01 * self.predicted_s else 1.0
        told = compute * worked + waits + communication * exposed
        shrunk = min(1.0, m.step_s / told) if told > 0 else 1.0
        return Correction(_limited(old.compute * compute * shrunk),
                          _limited(old.communication * communication * shrunk), max(0.0, m.step_s - told))

    @property
    def _exposed_s(self) -> float:
        """Predicted seconds of communication that is not overlapped."""
        p = self.predicted
        return max(0.0, p.forward_communication_s + p.backward_communication_s - p.hidden_s)

    @property
    def corrected(self) -> Cluster:
        """The cluster with the correction, for the next plan."""
        return replace(self.cluster, correction=self.correction)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the corrected cluster as a TOML file for `Cluster.load`."""
        write_cluster(Path(path), self.corrected, "as described; corrected by measured steps")

    def __str__(self) -> str:
        p, m = self.predicted, self.measured
        rows = [("forward and backward", self.predicted_s, m.step_s),
                ("  compute", p.forward_s + p.backward_s, m.compute_s),
                ("  exposed communication, bubbles, host", self._exposed_s + p.waiting_s + p.fixed_s, m.exposed_s),
                ("optimizer", p.optimizer_s, m.optimizer_s)]
        lines = [f"{'seconds':40}{'predicted':>12}{'measured':>12}"]
        lines += [f"{name:40}{a:12.4g}{'-' if b is None else format(b, '12.4g'):>12}" for name, a, b in rows]
        fullest = max(m.peak_bytes, default=None)
        lines.append(f"{'peak bytes of the fullest rank':40}{p.peak_bytes:12.4g}"
                     f"{'-' if fullest is None else format(float(fullest), '12.4g'):>12}")
        lines += [f"  {kind}: {count} calls measured" for kind, count in sorted(m.collectives.items())]
        found = self.correction
        lines.append(f"predicted {self.error:+.0%}; correction: compute x {found.compute:.3g}, communication "
                     f"x {found.communication:.3g}, {found.fixed_s:.3g} s a step")
        if LIMITS[0] in vars(found).values() or LIMITS[1] in vars(found).values():
            lines.append("a factor is at its limit: the cluster's description is of another machine")
        return "\n".join(lines)


def _limited(factor: float) -> float:
    return min(LIMITS[1], max(LIMITS[0], factor))


def measure(step: Callable[[], object], device: torch.device, steps: int,
            optimizer: torch.optim.Optimizer | None = None) -> Measured:
    """Run ``step`` and, if given, the optimizer's, and time them: the median of ``steps`` on the slowest rank, and one
    more step under the profiler for its parts. Collective."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps is {shown(steps)}: give the number of steps to measure, 1 or more")
    for _ in range(WARM_UP):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    taken = [_timed(step, device) for _ in range(steps)]
    updates = [_timed(optimizer.step, device) for _ in range(steps)] if optimizer is not None else []
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    compute_s, calls = _profiled(step, device)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (statistics.median(taken), compute_s,
                                   statistics.median(updates) if updates else None, peak))
    step_s, compute_s = max(r[0] for r in ranks), max(r[1] for r in ranks)
    return Measured(step_s, min(compute_s, step_s), max(0.0, step_s - compute_s),
                    max(r[2] for r in ranks) if updates else None, calls, tuple(r[3] for r in ranks if r[3]))


@contextmanager
def undone(parallel: Any) -> Iterator[None]:
    """Gradients, buffers and the run state of a parallel module are afterwards as they were."""
    parameters, state = list(parallel.parameters()), parallel.run_state()
    gradients = [p.grad for p in parameters]
    buffers = [(b, b.detach().clone()) for b in parallel.buffers()]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        parallel.load_run_state(state)


def _timed(call: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _profiled(step: Callable[[], object], device: torch.device) -> tuple[float, dict[str, int]]:
    """Seconds of this rank's ops (kernels, on a GPU) that are not communication, and the collectives' calls by kind."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    dist.barrier()
    with profile(activities=activities) as recorded:
        step()
    seconds, calls = 0.0, dict[str, int]()
    for event in recorded.key_averages():
        name = event.key.lower()
        if name.startswith("c10d::"):
            calls[name.removeprefix("c10d::").rstrip("_")] = event.count
        if not name.startswith(COMMUNICATION) and (on_gpu or name.startswith("aten::")):
            seconds += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
    return seconds, calls


__all__ = ["Measured", "Verification", "measure", "undone"]
