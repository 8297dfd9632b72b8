"""Measuring a machine: seconds of collectives on process groups, of ops on a device, and of both overlapped.

`cost_models.calibrate` fits these measurements. All groups along a mesh axis run at the same time, as in a program, so
that a shared network card counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from autoparallel.kernels import collectives, groups
from autoparallel.kernels.groups import Axis
from autoparallel.kernels.host_copies import process_bytes
from autoparallel.kernels.norm import rms_norm
from autoparallel.runtime.shard_steps import step_shards
from cost_models import Cluster, Link
from cost_models.calibrate import (
    Measured,
    MeasuredOp,
    MeasuredOverlap,
    fit_device,
    fit_links,
    fit_overlap_slowdown,
    predicted_op_s,
    predicted_overlap_s,
)
from cost_models.cluster import devices_of_host
from cost_models.description import CPU_PROCESS
from cost_models.devices import Host
from cost_models.errors import ClusterError
from cost_models.links import UNLIMITED
from cost_models.memory import step_bytes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Call = Callable[[], object]
#: Waits until all ranks are ready; returns the start time of the measured call (`time.monotonic`).
Start = Callable[[], float]
WARM_UP = 1
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
SIZES = tuple(2**k for k in (10, 12, 14, 16, 18, 20, 22, 24))
#: Quantile of the repeats that is reported: what the machine's own scheduler adds counts, as in a program.
TYPICAL = 0.5
#: Least seconds of a series of op calls: long enough that processes which share cores take turns, as in a program.
LEAST_SERIES_S = 0.03
#: Bytes per second above any link's: the bandwidth before it is fitted.
ANY_RATE = 1e15
#: Sides of square matrix products, and bytes of a tensor of element-wise ops, by kind of device.
SIDES = {"cpu": (64, 128, 256, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
TRAFFIC = {"cpu": tuple(2**k for k in (10, 14, 18, 20, 22, 24)),
           "cuda": tuple(2**k for k in (12, 16, 20, 22, 24, 26, 30))}
#: Sequences of causal attention, and (heads, width of each), by kind of device.
SEQUENCES = {"cpu": (32, 128, 512), "cuda": (256, 1024, 4096, 8192)}
HEADS = {"cpu": (8, 64), "cuda": (32, 128)}
#: Links of a chain, at least and at most, and bytes that they make together: about what a small model's forward saves,
#: more than a core's own caches hold. (With 128 MiB, new memory takes most of the time: steps were predicted too long.)
LEAST_LINKS, MOST_LINKS, CHAIN_BYTES = 4, 64, 2**24
#: Elements that reductions reduce; parameters that are stepped at once, up to so many bytes together.
REDUCED, STEPPED, STEPPED_BYTES = 256, 8, 2**25
#: Overlap measurement: side n of the layers' products ([n / 4, n] times [n, n], with three element-wise ops), bytes of
#: the collective, and compute time as multiples of the collective's own.
OVERLAP_SIDES, OVERLAP_BYTES, OVERLAP_TIMES = {"cpu": 512, "cuda": 2048}, 2**24, (0.5, 1.0, 2.0)
OVERLAP_KINDS = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Calibration:
    """A measured machine: the fitted cluster, the measurements, and residuals (predicted - measured) / measured."""

    cluster: Cluster
    measured: tuple[Measured, ...]
    residuals: tuple[float, ...]
    ops: tuple[MeasuredOp, ...] = ()
    op_residuals: tuple[float, ...] = ()
    overlapped: tuple[MeasuredOverlap, ...] = ()

    @property
    def overlap_residuals(self) -> tuple[float, ...]:
        """Residuals of collectives overlapped with compute."""
        slowdown = self.cluster.device.overlap_slowdown
        return tuple(predicted_overlap_s(slowdown, m) / m.seconds - 1 for m in self.overlapped)

    @property
    def mean_error(self) -> float:
        """Mean absolute residual of the collectives."""
        return statistics.mean(map(abs, self.residuals))


def calibrate(name: str, ranks_per_host: int, nics_per_host: int | None = None, repeats: int = 9,
              joined: Sequence[int] = ()) -> Calibration:
    """Measure the machines of the default process group: ops on all devices at once, collectives within and across
    hosts, and both overlapped. All ranks call this and get the same result.

    ``name``: of the cluster; ``nics_per_host``: network cards by which a host's devices share the outermost link, as in
    `cost_models.Link`. ``joined``: how many devices each link but the outermost joins, innermost first, where hosts are
    not the only bounds (8 in a host, 32 in a rack: ``(8, 32)``). Raises ClusterError where each is no multiple of the
    one before.
    """
    from torch.distributed.device_mesh import init_device_mesh

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    world = dist.get_world_size()
    measured: list[Measured] = []
    joined = bounds(joined or (ranks_per_host,), world)
    for shape, axis in group_shapes(world, joined):
        mesh = init_device_mesh(kind, shape)
        kinds = KINDS if kind == "cpu" else _sent(mesh, axis)
        measured += time_collectives(mesh, axis, kinds, SIZES, repeats)
    ops = time_ops(torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind), repeats)
    device = fit_device(torch.cuda.get_device_name() if kind == "cuda" else CPU_PROCESS, ops,
                        memory_bytes(kind, ranks_per_host))
    overlapped = time_overlapped(init_device_mesh(kind, (world,)), OVERLAP_SIDES[kind], OVERLAP_BYTES, repeats)
    device = replace(device, overlap_slowdown=fit_overlap_slowdown(overlapped))
    links = links_to_fit(world, joined, ranks_per_host, nics_per_host)
    host = Host() if devices_of_host(links, Host()) == ranks_per_host else Host(devices=ranks_per_host)
    cluster, residuals = fit_links(Cluster(name, device, tuple(links), world, ("ring",), host=host), measured)
    op_residuals = tuple(predicted_op_s(device, op) / op.seconds - 1 for op in ops)
    return Calibration(cluster, tuple(measured), residuals, tuple(ops), op_residuals, tuple(overlapped))


def _sent(mesh: DeviceMesh, axis: int) -> tuple[str, ...]:
    """The collectives that ranks with GPUs can run: no sends where they share them (`groups.sends`)."""
    sends = groups.sends(mesh.get_group(axis), _device_of(mesh))
    return KINDS if sends else tuple(kind for kind in KINDS if kind != "send_recv")


def bounds(joined: Sequence[int], world: int) -> tuple[int, ...]:
    """The sizes of links between one device and all: of ``joined``, those above 1 and below ``world``. Raises
    ClusterError where one is no multiple of the one before."""
    sizes = (1, *joined)
    if any(outer % inner or outer < inner for inner, outer in pairwise(sizes)) or world % sizes[-1]:
        raise ClusterError(f"links that join {list(joined)} of {world} devices: give each as a multiple of the one "
                           f"before, and as the last a divisor of {world}")
    return tuple(dict.fromkeys(size for size in joined if 1 < size < world))


def group_shapes(world: int, joined: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
    """(mesh shape, axis) of groups to measure: across each link alone (sharing network cards), and mixed. ``joined``:
    devices that each link but the outermost joins.

    >>> group_shapes(8, (4,))
    [((2, 4), 1), ((2, 4), 0), ((8,), 0)]
    """
    joined = bounds(joined, world)
    sizes = (1, *joined, world)
    whole = tuple(outer // inner for inner, outer in pairwise(sizes))[::-1]
    found = [(whole, axis) for axis in reversed(range(len(whole)))] if joined else []
    found.append(((world,), 0))
    if world % 2 == 0 and world > 2:
        found += [((2, world // 2), 0), ((2, world // 2), 1)]
    return [(mesh, axis) for mesh, axis in dict.fromkeys(found) if mesh[axis] > 1]


def links_to_fit(world: int, joined: Sequence[int], ranks_per_host: int, nics_per_host: int | None) -> list[Link]:
    """The links of a machine, innermost first, before their speeds are known."""
    known = {ranks_per_host: "inside a host"}
    links = [Link(known.get(size, f"joins {size} devices"), size, 0.0, ANY_RATE) for size in joined]
    if world > ranks_per_host or joined:
        name = "between hosts" if ranks_per_host in (1, *joined[-1:]) else "joins all devices"
        return [*links, Link(name, UNLIMITED, 0.0, ANY_RATE, nics_per_host=nics_per_host)]
    return [Link("inside a host", ranks_per_host, 0.0, ANY_RATE)] if ranks_per_host > 1 else []


def memory_bytes(kind: str, ranks_per_host: int) -> float:
    """Memory of one device in bytes: the GPU's, or this process's share of its machine's."""
    if kind == "cuda":
        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return process_bytes(ranks_per_host)


def time_ops(device: torch.device, repeats: int = 5) -> list[MeasuredOp]:
    """Seconds of ops as programs run them, on all ranks at once: the median over repeats of the slowest rank.

    Square matrix products and element-wise ops, both in chains with their backward; causal attention, reductions (a
    softmax and an RMS norm) and AdamW's steps of a parameter. In float32; on GPUs products and attention also in the
    type of two bytes that they have, on random data, by whose switching their clocks go.
    """
    found = []
    half = torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported(False) else torch.float16
    for dtype in (torch.float32, half) if device.type == "cuda" else (torch.float32,):
        for side in SIDES[device.type]:
            x = (torch.randn(side, side, device=device) / math.sqrt(side)).to(dtype)
            links = _links(2 * x.nbytes)    # a product and a weight
            products = partial(_products, x, [x.clone() for _ in range(links)])
            found.append(_op("matmul", 2.0 * side**3, products, repeats, device, dtype, kernels=2 * links))
    fastest, (heads, width) = half if device.type == "cuda" else torch.float32, HEADS[device.type]
    for length in SEQUENCES[device.type]:
        q = torch.randn(1, heads, length, width, device=device).to(fastest)
        attend = partial(torch.nn.functional.scaled_dot_product_attention, q, q, q, is_causal=True)
        found.append(_op("attention", 2.0 * q.numel() * length, attend, repeats, device, fastest))
    for nbytes in TRAFFIC[device.type]:
        x = torch.rand(max(1, nbytes // 4 // REDUCED), REDUCED, device=device)
        size = 4.0 * x.numel()
        links = _links(2 * size)
        found.append(_op("pointwise", 11 / 4 * size, partial(_chain, x, links), repeats, device, kernels=4 * links))
        found.append(_op("reduction", 2 * size, partial(_reductions, x), repeats, device, kernels=2))
        count = max(1, min(STEPPED, int(STEPPED_BYTES / size)))
        moved = x.numel() * step_bytes("float32", "adamw")
        found.append(_op("optimizer", moved, _stepping(x, count), repeats, device, kernels=count))
    return found


def _links(made_bytes: float) -> int:
    """The links of a chain, of which each makes so many bytes."""
    return int(min(max(LEAST_LINKS, CHAIN_BYTES // made_bytes), MOST_LINKS))


def _products(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    """A matrix product for each weight, one after the other, and as many of backward."""
    first = value = x.detach().requires_grad_()
    for weight in weights:
        value = value @ weight
    torch.autograd.grad(value, first, x)


def _chain(x: torch.Tensor, links: int) -> None:
    """Forward and backward of element-wise products and SiLUs: four kernels for each link, which move 11 tensors (a
    product reads two and writes one, a SiLU one and one; each gradient reads two and writes one)."""
    first = value = x.detach().requires_grad_()
    for _ in range(links):
        value = torch.nn.functional.silu(value * x)
    torch.autograd.grad(value, first, x)


def _reductions(x: torch.Tensor) -> None:
    torch.softmax(x, -1)
    rms_norm(x, x.shape[-1:], x[0])


def _stepping(x: torch.Tensor, count: int) -> Call:
    """A step of AdamW of ``count`` parameters like x, by the kernel that steps a program's shards."""
    parameters = [torch.nn.Parameter(x.clone()) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = x
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)
    step_shards(optimizer)
    return optimizer.step


def _op(op_class: str, size: float, call: Call, repeats: int, device: torch.device,
        dtype: torch.dtype = torch.float32, kernels: int = 1) -> MeasuredOp:
    """Seconds of one of the ``kernels`` of a call, timed over ten of them in a row or more (`LEAST_SERIES_S`)."""
    def row_s(times: int, repeats: int) -> float:
        return _slowest(_timed(partial(_in_a_row, call, times), repeats, after_barrier, device), device)

    few = math.ceil(10 / kernels)
    times = max(few, math.ceil(few * LEAST_SERIES_S / row_s(few, 1)))
    return MeasuredOp(op_class, size, row_s(times, repeats) / times / kernels, str(dtype).removeprefix("torch."))


def after_barrier() -> float:
    """Start after a barrier: ranks start as unevenly as the barrier releases them, but it works on any machines."""
    dist.barrier()
    return time.monotonic()


def time_collectives(mesh: DeviceMesh, axis: int, kinds: Sequence[str], sizes: Sequence[int], repeats: int = 5,
                     start: Start = after_barrier, in_a_row: int = 4, quantile: float = TYPICAL) -> list[Measured]:
    """Seconds of each collective of ``kinds`` along one axis, for each size in bytes (of `cost_models.collectives`).

    All ranks of the mesh call this; all groups of the axis run at once. ``in_a_row``: calls per timing, several where
    ``start`` is not exact; 1 where it is, since groups that share a network card soon alternate in a row of calls.
    Seconds are the ``quantile`` over repeats of the slowest rank.
    """
    device = _device_of(mesh)
    name = groups.axis_names(mesh)[axis]
    found = []
    for nbytes in sizes:
        calls = _calls(groups.bind(mesh)[name], mesh.get_group(axis), nbytes, device)
        for kind in kinds:
            several = partial(_in_a_row, calls[kind], in_a_row)
            seconds = _slowest(_timed(several, repeats, start, device), device, quantile) / in_a_row
            found.append(Measured(kind, tuple(mesh.shape), axis, float(nbytes), seconds))
    return found


def _in_a_row(call: Call, times: int, started: float) -> None:
    for _ in range(times):
        call()


def time_overlapped(mesh: DeviceMesh, side: int, nbytes: int, repeats: int = 5, start: Start = after_barrier,
                under: Callable[[float], AbstractContextManager[None]] = lambda started: nullcontext(),
                quantile: float = TYPICAL) -> list[MeasuredOverlap]:
    """Seconds of collectives overlapped with compute along the mesh's one axis, in two orders: issued before the
    compute, as prefetched gathers are, and after its first half, as gradient reductions are.

    ``under``: start time -> context in which both run.
    """
    device = _device_of(mesh)
    begin = _begun(groups.bind(mesh)[groups.axis_names(mesh)[0]], nbytes, device)
    x, weight = torch.ones(side // 4, side, device=device), torch.ones(side, side, device=device) / side

    def seconds(ahead: int, kind: str = "", behind: int = 0) -> float:
        def run(started: float) -> None:
            with under(started):
                for _ in range(ahead):
                    torch.relu(x @ weight * 0.5 + 0.5)
                finish = begin[kind]() if kind else None
                for _ in range(behind):
                    torch.relu(x @ weight * 0.5 + 0.5)
                if finish is not None:
                    finish()

        return _slowest(_timed(run, repeats, start, device), device, quantile)

    layer_s, found = seconds(8) / 8, []
    for kind in OVERLAP_KINDS:
        alone_s = seconds(0, kind)
        for times in OVERLAP_TIMES:
            half = max(1, round(times * alone_s / layer_s / 2))
            compute_s = seconds(2 * half)
            found += [MeasuredOverlap(kind, compute_s, alone_s, share, seconds(ahead, kind, 2 * half - ahead))
                      for share, ahead in ((0.0, 0), (0.5, half))]
    return found


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _begun(axis: Axis, nbytes: int, device: torch.device) -> dict[str, Callable[[], Callable[[], object]]]:
    """The collectives that programs issue asynchronously, on float32 tensors, by the cost models' names."""
    local_shard = max(1, nbytes // 4 // axis.size)
    whole, part = torch.zeros(axis.size * local_shard, device=device), torch.zeros(local_shard, device=device)
    equal = (local_shard,) * axis.size
    return {
        "all_reduce": lambda: collectives.begin_all_reduce(whole, axis),
        "all_gather": lambda: collectives.begin_all_gather(part, axis, 0, equal),
        "reduce_scatter": lambda: collectives.begin_reduce_scatter(whole, axis, 0, equal),
    }


def _calls(axis: Axis, group: dist.ProcessGroup, nbytes: int, device: torch.device) -> dict[str, Call]:
    """The collectives of programs, on float32 tensors, by the cost models' names."""
    whole = torch.zeros(max(1, nbytes // 4 // axis.size) * axis.size, device=device)
    equal = (len(whole) // axis.size,) * axis.size
    calls = count()
    waited = {kind: _at_once(begin) for kind, begin in _begun(axis, nbytes, device).items()}
    return waited | {
        "all_to_all": lambda: collectives.all_to_all_tensor(whole, axis, 0, equal, 0, equal),
        "send_recv": lambda: _pass_on(whole, axis, group, -1 if next(calls) % 2 else 1),
    }


def _at_once(begin: Callable[[], Callable[[], object]]) -> Call:
    return lambda: begin()()


def _pass_on(tensor: torch.Tensor, axis: Axis, group: dist.ProcessGroup, by: int) -> None:
    """Every rank sends to the next at once (``by`` 1), or to the previous (-1). Calls alternate between the two: else
    the first rank, which receives nothing, would run ahead, and its next work would hide the messages."""
    works = []
    source, target = axis.rank - by, axis.rank + by
    if 0 <= source < axis.size:
        works.append(dist.irecv(torch.empty_like(tensor), group=group, group_src=source))
    if 0 <= target < axis.size:
        works.append(dist.isend(tensor, group=group, group_dst=target))
    for work in works:
        if work is not None:
            work.wait()


def _timed(call: Callable[[float], object], repeats: int, start: Start, device: torch.device) -> list[float]:
    found = []
    for _ in range(WARM_UP + repeats):
        started = start()
        call(started)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.monotonic() - started)
    return found[WARM_UP:]


def _slowest(seconds: Sequence[float], device: torch.device, quantile: float = TYPICAL) -> float:
    """The ``quantile`` over repeats of the slowest rank's seconds."""
    together = torch.tensor(seconds, device=device)
    dist.all_reduce(together, dist.ReduceOp.MAX)
    return float(together.sort().values[int(quantile * len(seconds))])
