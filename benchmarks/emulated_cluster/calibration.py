"""Alpha, beta and slow-downs of the emulated network, measured on it, and the cluster description made of them."""

from __future__ import annotations

import datetime
import statistics
import time
from dataclasses import replace

from autoparallel.calibration import KINDS, Calibration, group_shapes, time_collectives
from benchmarks.emulated_cluster.network import BURST_BYTES, LOOPBACK_MTU, NIC_MTU, Topology, bytes_per_s
from benchmarks.emulated_cluster.pool import Pool
from cost_models import Cluster, Device, Link
from cost_models.calibrate import Measured, fit_links
from cost_models.cluster import UNLIMITED

SIZES = tuple(2**k for k in (12, 16, 18, 20, 22))
#: What devices compute between collectives while these are measured.
PAUSE_S = 0.01
#: The emulated device: what `DeviceClock` pads to, so no measurement. Eight of them need an eighth of two cores.
DEVICE = Device("emulated", {"float32": 2e9}, 1e9, 1.0, 4e9, 5e-4)
#: What runs beside what, to see how much longer both take: so many layers of a product and three small ops, and an
#: all-reduce of so many bytes.
LAYERS, BESIDE_BYTES = 60, 2**21


def nominal(topology: Topology) -> Cluster:
    """The cluster as its links are set: what is fitted keeps its names, structure and bursts, and is no faster."""
    inter = Link("NIC", UNLIMITED, 0.0, payload(NIC_MTU) * bytes_per_s(topology.inter), nics_per_host=1,
                 burst_bytes=BURST_BYTES)
    intra = Link("loopback", topology.ranks_per_host, 0.0, payload(LOOPBACK_MTU) * bytes_per_s(topology.intra) / 2,
                 burst_bytes=BURST_BYTES)
    links = [intra] * (topology.ranks_per_host > 1) + [inter] * (topology.hosts > 1)
    return Cluster(f"emulated {topology.name}", DEVICE, tuple(links), topology.num_ranks, ("ring",))


def payload(mtu: int) -> float:
    """What of a rate is left for data: tbf counts headers of Ethernet (14 bytes), IP (20) and TCP (32, with times).

    >>> f"{payload(1500):.3f}"
    '0.956'
    """
    return (mtu - 52) / (mtu + 14)


def source(found: Calibration) -> str:
    """For the TOML file: what, when, and how well it fits."""
    return (f"fitted to {len(found.measured)} measurements on the emulated network, {datetime.date.today()}, "
            f"mean error {found.mean_error:.1%}")


def calibrate(ranks: Pool, topology: Topology, repeats: int = 3) -> Calibration:
    """Measure every collective on every shape of group, and fit."""
    shapes = group_shapes(topology.hosts, topology.ranks_per_host)
    measured = [m for mesh, axis in shapes for m in ranks.run(measure, mesh, axis, repeats)[0]]
    cluster, residuals = fit_links(nominal(topology), measured)
    slowdown = max(ranks.run(measure_beside, repeats))
    device = replace(cluster.device, overlap_slowdown=slowdown)
    return Calibration(replace(cluster, device=device), tuple(measured), residuals)


def measure(mesh_shape: tuple[int, ...], axis: int, repeats: int) -> list[Measured]:
    """What each rank does."""
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.emulated_cluster.steps import real_time, start_together

    mesh = init_device_mesh("cpu", mesh_shape)
    with real_time():
        return time_collectives(mesh, axis, KINDS, SIZES, repeats, start_together, PAUSE_S, quantile=0.5)


def measure_beside(repeats: int) -> float:
    """How many times longer compute and an all-reduce take while both run, for ranks share cores. What each rank does.
    """
    import torch
    import torch.distributed as dist

    from autoparallel.lower.collectives import begin_all_reduce
    from autoparallel.runtime.groups import Axis
    from benchmarks.emulated_cluster.clock import DeviceClock, ticking
    from benchmarks.emulated_cluster.steps import real_time, start_together

    world = dist.group.WORLD
    assert world is not None
    axis = Axis("all", dist.get_world_size(), dist.get_rank(), world.group_name)
    clock, values = DeviceClock(DEVICE), torch.zeros(BESIDE_BYTES // 4)
    x, weight = torch.ones(64, 256), torch.ones(256, 256) / 256

    def seconds(layers: int, sends: bool) -> float:
        started = start_together()
        with ticking(clock, started):
            finish = begin_all_reduce(values, axis) if sends else None
            for _ in range(layers):
                torch.relu(x @ weight * 0.5 + 0.5)
            if finish is not None:
                finish()
        return time.monotonic() - started

    with real_time():
        taken = {case: statistics.median(seconds(*case) for _ in range(repeats))
                 for case in ((LAYERS, False), (0, True), (LAYERS, True))}
    compute, sent, both = taken[LAYERS, False], taken[0, True], taken[LAYERS, True]
    found = torch.tensor(1 + (both - max(compute, sent)) / min(compute, sent))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return min(2.0, max(1.0, float(found)))
