"""Predicted steps beside measured ones, and the correction of the cluster that the difference suggests."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoparallel.errors import InputError, shown
from autoparallel.plans import Prediction
from autoparallel.plans.reports.step_parts import ATTENTION, OTHERS, PRODUCTS
from autoparallel.runtime.measured import Calls, measured_step
from autoparallel.runtime.recorded import recorded
from cost_models import Cluster, Correction
from cost_models.calibrate import write_cluster

MOST_STEPS = 10_000
WARM_UP = 2
#: Ranks whose memory is printed.
MOST_RANKS = 16
#: The least and the largest factor of a correction.
LIMITS = 1e-3, 1e3


@dataclass(frozen=True)
class Measured:
    """Seconds of a step on the slowest rank: of forward and backward, of the part in compute, and of the rest, which is
    exposed communication and the host; of the optimizer (None: there was none). ``collectives``: by kind, means over
    the ranks (with those that compare the ranks' calls). ``peak_bytes``: of tensors by rank (empty where the device
    does not tell)."""

    step_s: float
    compute_s: float
    exposed_s: float
    optimizer_s: float | None
    collectives: Mapping[str, Calls]
    peak_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verification:
    """A plan's prediction, on so many ranks of a pipeline, beside what its steps took. ``print`` shows both; `save`
    writes the corrected cluster."""

    predicted: Prediction
    measured: Measured
    cluster: Cluster
    pipeline_ranks: int = 1

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
        are compute of other ranks, else communication (of buckets that are not full). Where the parts exceed the step
        (the profiler takes time too), both factors shrink by the same ratio."""
        p, m, old = self.predicted, self.measured, self.cluster.correction
        worked, exposed = p.forward_s + p.backward_s, self._exposed_s
        compute = m.compute_s / worked if worked > 0 and m.compute_s > 0 else 1.0
        waits = compute * p.waiting_s if self.pipeline_ranks > 1 else 0.0
        communication = max(m.exposed_s - waits, 0.0) / exposed if exposed > 0.01 * self.predicted_s else 1.0
        told = compute * worked + waits + communication * exposed
        shrunk = min(1.0, m.step_s / told) if told > 0 else 1.0
        return Correction(_limited(old.compute * compute * shrunk),
                          _limited(old.communication * communication * shrunk), max(0.0, m.step_s - told))

    @property
    def _exposed_s(self) -> float:
        """Predicted seconds of communication that is not overlapped."""
        return self.predicted.exposed_s + (self.predicted.waiting_s if self.pipeline_ranks == 1 else 0.0)

    @property
    def corrected(self) -> Cluster:
        """The cluster with the correction, for the next plan."""
        return replace(self.cluster, correction=self.correction)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the corrected cluster as a TOML file for `Cluster.load`."""
        write_cluster(Path(path), self.corrected, "as described; corrected by measured steps")

    def __str__(self) -> str:
        p, m, found = self.predicted, self.measured, self.correction
        lines = [f"{'seconds':46}{'predicted':>12}{'measured':>12}"]
        lines += [f"{name:46}{a:12.4g}{'-' if b is None else format(b, '12.4g'):>12}" for name, a, b in self._rows()]
        lines.append(f"{'peak bytes of the fullest rank':46}{p.peak_bytes:12.4g}"
                     f"{format(float(max(m.peak_bytes)), '12.4g') if m.peak_bytes else '-':>12}")
        if m.peak_bytes:
            shown = " ".join(f"{num_bytes:.4g}" for num_bytes in m.peak_bytes[:MOST_RANKS])
            lines.append(f"  measured, by rank: {shown}{' ...' if len(m.peak_bytes) > MOST_RANKS else ''}")
        lines.append(f"predicted {self.error:+.0%}; correction: compute x {found.compute:.3g}, communication "
                     f"x {found.communication:.3g}, {found.fixed_s:.3g} s a step")
        if LIMITS[0] in vars(found).values() or LIMITS[1] in vars(found).values():
            lines.append("a factor is at its limit: the cluster's description is of another machine")
        return "\n".join(lines)

    def _rows(self) -> Iterator[tuple[str, float, float | None]]:
        """Parts of the step, predicted and measured. What is predicted to overlap with compute is parameters'
        collectives, each at an equal share."""
        p, m = self.predicted, self.measured
        yield "forward and backward", self.predicted_s, m.step_s
        yield "  compute", p.forward_s + p.backward_s, m.compute_s
        uses = p.collectives_on_a_rank(self.pipeline_ranks)
        of_parameters = sum(use.seconds for use in uses if use.purpose != "activations")
        hidden = min(1.0, p.hidden_s / of_parameters) if of_parameters else 0.0
        predicted = defaultdict[str, float](float)
        for use in uses:
            predicted[use.kind] += use.seconds * (1 - hidden * (use.purpose != "activations"))
        for kind in sorted({*predicted, *m.collectives}):
            calls = m.collectives.get(kind)
            told = f" ({calls.count} calls)" if calls else ""
            yield f"  exposed {kind}{told}", predicted[kind], calls.exposed_s if calls else 0.0
        rest_s = m.exposed_s - sum(calls.exposed_s for calls in m.collectives.values())
        yield "  bubbles, sends, waits, host", p.waiting_s + p.fixed_s, max(0.0, rest_s)
        yield "optimizer", p.optimizer_s, m.optimizer_s


def _limited(factor: float) -> float:
    return min(LIMITS[1], max(LIMITS[0], factor))


def measure(step: Callable[[], object], device: torch.device, steps: int,
            optimizer: torch.optim.Optimizer | None = None) -> Measured:
    """Run ``step`` and, if given, the optimizer's, and time them: the median of ``steps`` on the slowest rank, and one
    more step under the profiler for its parts. Collective."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MOST_STEPS:
        raise InputError(f"steps is {shown(steps)}: give the number of steps to measure, 1 to {MOST_STEPS}")
    for _ in range(WARM_UP):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    taken = [_timed(step, device) for _ in range(steps)]
    updates = [_timed(optimizer.step, device) for _ in range(steps)] if optimizer is not None else []
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    dist.barrier()
    mine = measured_step(recorded(step, device), (), {})
    ranks: list[Any] = [None] * dist.get_world_size()
    compute_s = sum(mine.parts.get(part, 0.0) for part in (PRODUCTS, ATTENTION, OTHERS))
    dist.all_gather_object(ranks, (statistics.median(taken), compute_s,
                                   statistics.median(updates) if updates else None, peak, mine.collectives))
    step_s, compute_s = max(r[0] for r in ranks), max(r[1] for r in ranks)
    return Measured(step_s, min(compute_s, step_s), max(0.0, step_s - compute_s),
                    max(r[2] for r in ranks) if updates else None, _mean([r[4] for r in ranks]),
                    tuple(r[3] for r in ranks if r[3]))


def _mean(ranks: Sequence[Mapping[str, Calls]]) -> dict[str, Calls]:
    """Collectives of a rank, in the mean; the most calls that one made."""
    none = Calls(0, 0.0, 0.0)
    every = {kind: [rank.get(kind, none) for rank in ranks] for kind in sorted(set().union(*ranks))}
    return {kind: Calls(max(c.count for c in some), statistics.fmean(c.seconds for c in some),
                        statistics.fmean(c.exposed_s for c in some)) for kind, some in every.items()}


@contextmanager
def undone(parallel: Any) -> Iterator[None]:
    """Gradients, buffers and the run state of a parallel module are afterwards as they were."""
    parameters, state = list(parallel.parameters()), parallel.run_state()
    gradients = [p.grad for p in parameters]
    buffers = [(b, b.detach().clone()) for b in parallel.buffers()]
    for p in parameters:
        p.grad = None
    try:
        with ExitStack() as idle:
            for optimizer in parallel._state.optimizers:
                idle.enter_context(optimizer.idle())
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


__all__ = ["Measured", "Verification", "measure", "undone"]
