"""Measuring a machine: seconds of collectives on any process group, and of ops on one device.

`cost_models.calibrate` fits what is measured here. All groups along a mesh axis work at the same time, as they do in a
program, so that what they share (a network card) counts.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from autoparallel.lower import collectives
from autoparallel.runtime import groups
from autoparallel.runtime.groups import Axis
from cost_models import Cluster, Link
from cost_models.calibrate import Measured, MeasuredOp, fit_device, fit_links, predicted_op_s
from cost_models.cluster import UNLIMITED

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Call = Callable[[], object]
#: Waits until all ranks are ready, and returns when (`time.monotonic`) the measured call began.
Start = Callable[[], float]
WARM_UP = 1
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
SIZES = tuple(2**k for k in (10, 12, 14, 16, 18, 20, 22, 24))
#: Bytes up to which leaving at different times weighs most: more calls in a row.
SHORT = 2**18
#: Which of the repeats counts: what else a machine does only adds to them.
QUIET = 0.25
#: Bytes per second that no link reaches.
ANY_RATE = 1e15
#: Sides of square products, and bytes read by an element-wise op.
SIDES, TRAFFIC = (64, 128, 256, 512, 1024), tuple(2**k for k in (10, 14, 18, 20, 22, 24))


@dataclass(frozen=True)
class Calibration:
    """A machine as measured: the cluster that fits best, and what it was fitted to; residuals are (predicted -
    measured)/measured."""

    cluster: Cluster
    measured: tuple[Measured, ...]
    residuals: tuple[float, ...]
    ops: tuple[MeasuredOp, ...] = ()
    op_residuals: tuple[float, ...] = ()

    @property
    def mean_error(self) -> float:
        """Mean absolute residual of the collectives."""
        return statistics.mean(map(abs, self.residuals))


def calibrate(name: str, ranks_per_host: int, nics_per_host: int | None = None, repeats: int = 9) -> Calibration:
    """Measure the machines of this process group: ops on all its devices at once, collectives within and across hosts.

    All ranks call this, and get the same. ``nics_per_host``: as in `cost_models.Link`.
    """
    from torch.distributed.device_mesh import init_device_mesh

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    count = dist.get_world_size()
    measured: list[Measured] = []
    for shape, axis in group_shapes(count // ranks_per_host, ranks_per_host):
        measured += time_collectives(init_device_mesh(kind, shape), axis, KINDS, SIZES, repeats)
    ops = time_ops(torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind), repeats)
    links = [Link("inside a host", ranks_per_host, 0.0, ANY_RATE)] * (ranks_per_host > 1)
    links += [Link("between hosts", UNLIMITED, 0.0, ANY_RATE, nics_per_host=nics_per_host)] * (count > ranks_per_host)
    device = fit_device(torch.cuda.get_device_name() if kind == "cuda" else "one process", ops, memory_bytes(kind))
    cluster, residuals = fit_links(Cluster(name, device, tuple(links), count, ("ring",)), measured)
    op_residuals = tuple(predicted_op_s(device, op) / op.seconds - 1 for op in ops)
    return Calibration(cluster, tuple(measured), residuals, tuple(ops), op_residuals)


def group_shapes(hosts: int, ranks_per_host: int) -> list[tuple[tuple[int, ...], int]]:
    """(mesh, axis) of different groups: within hosts, across them and sharing their cards, and both."""
    count, whole = hosts * ranks_per_host, (hosts, ranks_per_host)
    found: list[tuple[tuple[int, ...], int]] = [(whole, 1), (whole, 0)] if hosts > 1 else []
    found.append(((count,), 0))
    if count % 2 == 0 and count > 2:
        found += [((2, count // 2), 0), ((2, count // 2), 1)]
    return [(mesh, axis) for mesh, axis in dict.fromkeys(found) if mesh[axis] > 1]


def memory_bytes(kind: str) -> float:
    """Of one device: a GPU's own, or this process's share of the host's."""
    if kind == "cuda":
        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / dist.get_world_size()


def time_ops(device: torch.device, repeats: int = 5) -> list[MeasuredOp]:
    """Square products and element-wise sums in float32, on all ranks at once. Lower quartiles of the slowest rank's."""
    found = []
    for side in SIDES:
        x = torch.ones(side, side, device=device)
        found.append(_op("matmul", 2.0 * side**3, partial(torch.matmul, x, x), repeats, device))
    for nbytes in TRAFFIC:
        x = torch.ones(nbytes // 4, device=device)
        found.append(_op("pointwise", 2.0 * nbytes, partial(torch.add, x, 1), repeats, device))
    return found


def _op(op_class: str, size: float, call: Call, repeats: int, device: torch.device) -> MeasuredOp:
    """Seconds of one call among so many that the clock is fine enough."""
    calls = 10

    def several() -> None:
        for _ in range(calls):
            call()

    return MeasuredOp(op_class, size, _slowest(_timed(several, repeats, after_barrier, device), device) / calls)


def after_barrier() -> float:
    """All ranks start when the barrier lets them go: late by its own unevenness, but on any machines."""
    dist.barrier()
    return time.monotonic()


def time_collectives(mesh: DeviceMesh, axis: int, kinds: Sequence[str], sizes: Sequence[int], repeats: int = 5,
                     start: Start = after_barrier, pause_s: float = 0.0, quantile: float = QUIET) -> list[Measured]:
    """Each collective of ``kinds`` along one axis, for each size in bytes (as `cost_models.collectives` counts them).

    All ranks of the mesh call this. A program's collectives follow one another, and a rank that leaves one late is late
    for the next; so several are timed together, ``pause_s`` between them, in which devices would compute. Seconds are
    the ``quantile`` over repeats of the slowest rank's, without the pauses.
    """
    device = _device_of(mesh)
    name = groups.axis_names(mesh)[axis]
    found = []
    for nbytes in sizes:
        calls = _calls(groups.bind(mesh)[name], mesh.get_group(axis), nbytes, device)
        for kind in kinds:
            count = 4 if nbytes <= SHORT else 2
            several = partial(_in_a_row, calls[kind], count, pause_s)
            seconds = _slowest(_timed(several, repeats, start, device), device, quantile) / count - pause_s
            found.append(Measured(kind, tuple(mesh.shape), axis, float(nbytes), seconds))
    return found


def _in_a_row(call: Call, count: int, pause_s: float) -> None:
    for _ in range(count):
        if pause_s:
            time.sleep(pause_s)
        call()


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _calls(axis: Axis, group: dist.ProcessGroup, nbytes: int, device: torch.device) -> dict[str, Call]:
    """What programs call, on float32 tensors, by the cost models' names."""
    n = axis.size
    piece = max(1, nbytes // 4 // n)
    whole, part = torch.zeros(n * piece, device=device), torch.zeros(piece, device=device)
    equal = (piece,) * n
    return {
        "all_reduce": lambda: collectives.begin_all_reduce(whole, axis)(),
        "all_gather": lambda: collectives.begin_all_gather(part, axis, 0, equal)(),
        "reduce_scatter": lambda: collectives.begin_reduce_scatter(whole, axis, 0, equal)(),
        "all_to_all": lambda: collectives.all_to_all_tensor(whole, axis, 0, equal, 0, equal),
        "send_recv": lambda: _pass_on(whole, axis, group),
    }


def _pass_on(tensor: torch.Tensor, axis: Axis, group: dist.ProcessGroup) -> None:
    """Each rank but the last sends to the next, all at once."""
    works = []
    if axis.rank > 0:
        works.append(dist.irecv(torch.empty_like(tensor), group=group, group_src=axis.rank - 1))
    if axis.rank < axis.size - 1:
        works.append(dist.isend(tensor, group=group, group_dst=axis.rank + 1))
    for work in works:
        if work is not None:
            work.wait()


def _timed(call: Call, repeats: int, start: Start, device: torch.device) -> list[float]:
    found = []
    for _ in range(WARM_UP + repeats):
        started = start()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.monotonic() - started)
    return found[WARM_UP:]


def _slowest(seconds: Sequence[float], device: torch.device, quantile: float = QUIET) -> float:
    """Of what the slowest rank took."""
    together = torch.tensor(seconds, device=device)
    dist.all_reduce(together, dist.ReduceOp.MAX)
    return float(together.sort().values[int(quantile * len(seconds))])
