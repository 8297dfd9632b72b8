"""Alpha, beta and slow-downs of the emulated network, measured on it, and the cluster description made of them."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from benchmarks.emulated_cluster.network import Topology, bytes_per_s
from benchmarks.emulated_cluster.pool import Pool
from cost_models import Cluster, Device, Link
from cost_models.calibrate import Measured, fit_links
from cost_models.cluster import UNLIMITED

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
SIZES = tuple(2**k for k in (12, 18, 19, 20, 21, 22))
#: The emulated device: what `DeviceClock` pads to, so no measurement. Eight of them need an eighth of two cores.
DEVICE = Device("emulated", {"float32": 2e9}, 1e9, 1.0, 4e9, 2e-4)


@dataclass(frozen=True)
class Calibration:
    """What was measured, the cluster that fits it best, and by measurement (predicted - measured)/measured."""

    cluster: Cluster
    measured: tuple[Measured, ...]
    residuals: tuple[float, ...]

    @property
    def source(self) -> str:
        """For the TOML file: what, when, and how well it fits."""
        error = sum(map(abs, self.residuals)) / len(self.residuals)
        return (f"fitted to {len(self.measured)} measurements on the emulated network, {datetime.date.today()}, mean "
                f"error {error:.1%}")


def nominal(topology: Topology) -> Cluster:
    """The cluster as its links are set: what is fitted keeps its names and structure."""
    inter = Link("NIC", UNLIMITED, 0.0, bytes_per_s(topology.inter), nics_per_host=1)
    intra = Link("loopback", topology.ranks_per_host, 0.0, bytes_per_s(topology.intra) / 2)
    links = [intra] * (topology.ranks_per_host > 1) + [inter] * (topology.hosts > 1)
    return Cluster(f"emulated {topology.name}", DEVICE, tuple(links), topology.num_ranks, ("ring",))


def meshes(topology: Topology) -> list[tuple[tuple[int, ...], int]]:
    """(mesh, axis) of the group shapes: within hosts, across them and sharing NICs, and both."""
    hosts, inside, ranks = topology.hosts, topology.ranks_per_host, topology.num_ranks
    found = [((hosts, inside), 1), ((hosts, inside), 0), ((ranks,), 0)]
    if hosts % 2 == 0 and hosts > 2:
        found += [((2, ranks // 2), 0), ((2, ranks // 2), 1)]
    sizes = [(mesh, axis) for mesh, axis in found if mesh[axis] > 1]
    return list(dict.fromkeys(sizes))


def calibrate(ranks: Pool, topology: Topology, repeats: int = 5) -> Calibration:
    """Measure every collective on every shape of group, and fit."""
    measured = [m for mesh, axis in meshes(topology) for m in ranks.run(measure, mesh, axis, repeats)[0]]
    cluster, residuals = fit_links(nominal(topology), measured)
    return Calibration(cluster, tuple(measured), residuals)


def measure(mesh_shape: tuple[int, ...], axis: int, repeats: int) -> list[Measured]:
    """What each rank does."""
    from torch.distributed.device_mesh import init_device_mesh

    from autoparallel.calibration import time_collectives
    from benchmarks.emulated_cluster.steps import real_time, start_together

    mesh = init_device_mesh("cpu", mesh_shape)
    with real_time():
        return time_collectives(mesh, axis, KINDS, SIZES, repeats, start_together)
