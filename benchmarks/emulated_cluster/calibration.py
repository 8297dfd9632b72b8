"""Alpha, beta and slow-downs of the emulated network, measured on it, and the cluster description made of them."""

from __future__ import annotations

import datetime
from dataclasses import replace
from functools import partial

from autoparallel.calibration.measure import KINDS, Calibration, group_shapes, time_collectives, time_overlapped
from benchmarks.emulated_cluster.network import BURST_BYTES, LOOPBACK_MTU, NIC_MTU, Topology, bytes_per_s
from benchmarks.emulated_cluster.pool import Pool
from cost_models import Cluster, Device, Link
from cost_models.calibrate import Measured, MeasuredOverlap, fit_links, fit_overlap_slowdown
from cost_models.links import UNLIMITED

SIZES = tuple(2**k for k in (12, 16, 18, 20, 22))
#: The emulated device: what `DeviceClock` pads to, so no measurement. Eight of them need an eighth of two cores.
DEVICE = Device("emulated", {"float32": 2e9}, 1e9, 1.0, 4e9, 5e-4)
#: Of what runs beside what: small layers, of which ranks can compute eight times as many on two cores.
BESIDE_SIDE, BESIDE_BYTES = 256, 2**21


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


def calibrate(ranks: Pool, topology: Topology, repeats: int = 9) -> Calibration:
    """Measure every collective on every shape of group, and fit."""
    shapes = group_shapes(topology.hosts * topology.ranks_per_host, (topology.ranks_per_host,))
    measured = [m for mesh, axis in shapes for m in ranks.run(measure, mesh, axis, repeats)[0]]
    cluster, residuals = fit_links(nominal(topology), measured)
    beside = ranks.run(measure_overlap, topology.num_ranks, repeats // 3)[0]
    device = replace(cluster.device, overlap_slowdown=fit_overlap_slowdown(beside))
    return Calibration(replace(cluster, device=device), tuple(measured), residuals, overlapped=tuple(beside))


def measure(mesh_shape: tuple[int, ...], axis: int, repeats: int) -> list[Measured]:
    """What each rank does."""
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.emulated_cluster.steps import real_time, start_together

    mesh = init_device_mesh("cpu", mesh_shape)
    with real_time():
        return time_collectives(mesh, axis, KINDS, SIZES, repeats, start_together, in_a_row=1, quantile=0.5)


def measure_overlap(num_ranks: int, repeats: int) -> list[MeasuredOverlap]:
    """What each rank does."""
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.emulated_cluster.clock import DeviceClock, ticking
    from benchmarks.emulated_cluster.steps import real_time, start_together

    clock, mesh = DeviceClock(DEVICE), init_device_mesh("cpu", (num_ranks,))
    with real_time():
        return time_overlapped(mesh, BESIDE_SIDE, BESIDE_BYTES, repeats, start_together, partial(ticking, clock), 0.5)
