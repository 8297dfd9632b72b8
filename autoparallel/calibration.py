"""Measuring a machine: seconds of collectives on any process group, and of ops on one device.

`cost_models.calibrate` fits what is measured here. All groups along a mesh axis work at the same time, as they do in a
program, so that what they share (a network card) counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from autoparallel.lower import collectives
from autoparallel.runtime import groups
from autoparallel.runtime.groups import Axis
from cost_models.calibrate import Measured

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Call = Callable[[], object]
#: Waits until all ranks are ready, and returns when (`time.monotonic`) the measured call began.
Start = Callable[[], float]
WARM_UP = 2


def after_barrier() -> float:
    """All ranks start when the barrier lets them go: late by its own unevenness, but on any machines."""
    dist.barrier()
    return time.monotonic()


def time_collectives(mesh: DeviceMesh, axis: int, kinds: Sequence[str], sizes: Sequence[int], repeats: int = 5,
                     start: Start = after_barrier) -> list[Measured]:
    """Each collective of ``kinds`` along one axis, for each size in bytes (as `cost_models.collectives` counts them).

    All ranks of the mesh call this. Seconds are medians over repeats of the slowest rank's.
    """
    device = _device_of(mesh)
    name = groups.axis_names(mesh)[axis]
    found = []
    for nbytes in sizes:
        calls = _calls(groups.bind(mesh)[name], mesh.get_group(axis), nbytes, device)
        for kind in kinds:
            seconds = _slowest(_timed(calls[kind], repeats, start, device), device)
            found.append(Measured(kind, tuple(mesh.shape), axis, float(nbytes), seconds))
    return found


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
        "all_reduce": lambda: collectives.all_reduce_tensor(whole, axis),
        "all_gather": lambda: collectives.all_gather_tensor(part, axis, 0, equal),
        "reduce_scatter": lambda: collectives.reduce_scatter_tensor(whole, axis, 0, equal),
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


def _slowest(seconds: Sequence[float], device: torch.device) -> float:
    """The median of what the slowest rank took."""
    together = torch.tensor(seconds, device=device)
    dist.all_reduce(together, dist.ReduceOp.MAX)
    return float(together.median())
