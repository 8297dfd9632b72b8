"""What a rank does to measure a plan: compile it, train a few steps under the device clock, and say when."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.emulated_cluster.clock import COMMUNICATING, DeviceClock, ticking
from benchmarks.emulated_cluster.network import EmulationError
from benchmarks.emulated_cluster.subjects import SUBJECTS, Batch, Subject, captured_once

WARM_UP = 1
#: How long before a common start its time is told.
AHEAD_S = 0.03
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Steps:
    """One rank's steps: seconds since the common start, what the device worked, and what came too late; losses."""

    seconds: tuple[float, ...]
    busy_s: tuple[float, ...]
    overrun_s: tuple[float, ...]
    losses: tuple[float, ...]


def measure_steps(subject_name: str, plan_text: str, cluster_path: str, steps: int) -> Steps:
    """Train ``steps`` steps (after warm-up) of the plan (as JSON) on all ranks."""
    import autoparallel

    plan = autoparallel.Plan.from_json(plan_text)
    cluster = autoparallel.Cluster.load(cluster_path, num_devices=dist.get_world_size())
    subject = SUBJECTS[subject_name]
    batch = subject.batch()
    mesh = mesh_of(plan)
    with captured_once(subject):
        parallel = autoparallel.compile(subject.build(), mesh, plan=plan, cluster=cluster, example_kwargs=dict(batch),
                                        check_inputs=0)
    once = _once(parallel, plan.hybrid.is_plain, batch)
    parameters = list(parallel.parameters())  # a pipeline stage may have none
    optimizer = torch.optim.AdamW(parameters or [torch.zeros(1)], lr=1e-4, eps=1e-4, fused=True)
    (own,) = cluster.kinds((dist.get_rank(),))    # ranks fill one host after the other
    clock = DeviceClock(own.working_device)
    made = [_step(clock, once, optimizer) for _ in range(WARM_UP + steps)]
    seconds, busy, overruns, losses = zip(*made, strict=True)
    return Steps(seconds[WARM_UP:], busy[WARM_UP:], overruns[WARM_UP:], losses)


def mesh_of(plan: Any) -> Any:
    """The plan's mesh over all ranks, in the plan's order of devices; a pipeline is its first axis."""
    from torch.distributed.device_mesh import init_device_mesh

    from autoparallel.kernels import groups

    ranks = plan.hybrid.pipeline_ranks
    shape, names = tuple(plan.mesh_shape), tuple(plan.axis_names)
    if plan.devices:
        return groups.ordered_mesh("cpu", plan.devices, (ranks, *shape), ("pipeline", *names))
    return init_device_mesh("cpu", (ranks, *shape), mesh_dim_names=("pipeline", *names)) if ranks > 1 else \
        init_device_mesh("cpu", shape, mesh_dim_names=names)


def _once(parallel: Any, plain: bool, batch: Batch) -> Callable[[], torch.Tensor]:
    """Forward and backward of one step; returns the loss."""
    if not plain:
        return lambda: parallel.step(**batch)
    placed = parallel.shard_batch(dict(batch))

    def run() -> torch.Tensor:
        output = parallel(**placed)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        return loss.detach()

    return run


def _step(clock: DeviceClock, once: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer
          ) -> tuple[float, float, float, float]:
    with real_time():
        started = start_together()
        busy, overrun = clock.busy_s, clock.overrun_s
        with ticking(clock, started):
            loss = once()
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.monotonic() - started
    return seconds, clock.busy_s - busy, clock.overrun_s - overrun, whole(loss)


def whole(loss: torch.Tensor) -> float:
    return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)


def start_together() -> float:
    """Wait for a moment that all ranks agree on, and return it: they share one machine's clock."""
    dist.barrier()
    moment = torch.tensor([time.monotonic() + AHEAD_S], dtype=torch.float64)
    dist.broadcast(moment, 0)
    time.sleep(max(0.0, float(moment) - time.monotonic()))
    return float(moment)


@contextmanager
def real_time() -> Iterator[None]:
    """All threads of this process before all others of the machine, so that what else it does does not show."""
    _schedule(os.SCHED_RR, COMMUNICATING)
    try:
        yield
    finally:
        _schedule(os.SCHED_OTHER, 0)


def _schedule(policy: int, priority: int) -> None:
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))
        except ProcessLookupError:  # it ended meanwhile
            continue


def check_losses(subject_name: str, losses: Mapping[str, Sequence[float]]) -> None:
    """Hold the losses that plans (by name) came to against those of one process.

    Raises EmulationError for a plan that computes something else.
    """
    expected = _train_alone(SUBJECTS[subject_name], max(map(len, losses.values())))
    for plan, found in losses.items():
        worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=False))
        if not worst < TOLERANCE:
            raise EmulationError(f"{subject_name}, {plan}: its losses {found} differ by {worst:.1e} from one "
                                 f"process's, {expected}")


def _train_alone(subject: Subject, steps: int) -> list[float]:
    model, batch = subject.build(), subject.batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)
    losses = []
    for _ in range(steps):
        output = model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
