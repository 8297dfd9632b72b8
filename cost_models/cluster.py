"""Clusters as data: devices, the links that join them, and the groups that mesh axes form on them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cost_models import unequal
from cost_models.devices import Device, Host
from cost_models.errors import ClusterError
from cost_models.links import ALGORITHMS, COLLECTIVES, Group, Link
from cost_models.unequal import OtherHosts, Slow

if TYPE_CHECKING:
    from cost_models.profile import Profile


#: Planning lists devices: a billion, as of a mistyped number, filled 24 GB of memory.
MOST_DEVICES = 2**20


@dataclass(frozen=True)
class Correction:
    """What measured steps showed beside predicted ones: factors on the time of compute and of communication, and
    seconds of a step that neither explains."""

    compute: float = 1.0
    communication: float = 1.0
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        if not (1e-3 <= self.compute <= 1e3 and 1e-3 <= self.communication <= 1e3 and 0 <= self.fixed_s < math.inf):
            raise ClusterError(f"correction: factors must be in [0.001, 1000] and fixed_s not negative, not {self}")


@dataclass(frozen=True)
class Cluster:
    """``num_devices`` devices joined by ``links``, from inside a host outwards; equal but for the ``slow`` ones and
    those of ``others`` (`cost_models.unequal`).

    Ranks are laid out row-major on a mesh: the last axis runs over neighbours, so over the fastest links. The last host
    may be partly used. ``algorithms``: those of the collectives' library, of which the cheapest counts. ``call_s`` by
    collective is what one call costs beside its messages (waking ranks and threads), whatever its size and group; the
    device's launch time when absent. ``profile`` holds the fitted constants of the software that runs on it (None: only
    what the description says counts), ``correction`` what measured steps showed beside predicted ones
    (`autoparallel.ParallelModule.verify`). ``sources`` says where each number comes from, by its path in the TOML file.
    """

    name: str
    device: Device
    links: tuple[Link, ...]
    num_devices: int
    algorithms: tuple[str, ...] = ALGORITHMS
    host: Host = field(default_factory=Host)
    call_s: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    profile: Profile | None = None
    correction: Correction = Correction()
    slow: tuple[Slow, ...] = ()
    others: tuple[OtherHosts, ...] = ()

    def __post_init__(self) -> None:
        sizes = [link.num_devices for link in self.links]
        if not sizes or any(a >= b for a, b in pairwise(sizes)):
            raise ClusterError(f"cluster {self.name}: links must be listed from inside outwards, num_devices growing, "
                               f"not {sizes}")
        if not isinstance(self.num_devices, Integral) or isinstance(self.num_devices, bool):
            raise ClusterError(f"cluster {self.name}: num_devices is {self.num_devices!r}, and must be a whole number")
        if not 1 <= self.num_devices <= sizes[-1]:
            raise ClusterError(f"cluster {self.name}: {self.num_devices} devices; at least one is required, and link "
                               f"{self.links[-1].name!r} reaches {sizes[-1]}")
        if self.num_devices > MOST_DEVICES:
            raise ClusterError(f"cluster {self.name}: {self.num_devices} devices; plans are made for at most "
                               f"{MOST_DEVICES}")
        for kind, seconds in self.call_s.items():
            if kind not in COLLECTIVES or not 0 <= seconds < math.inf:
                raise ClusterError(f"cluster {self.name}: call_s.{kind} = {seconds}: must be seconds, not negative, "
                                   f"for one of {', '.join(COLLECTIVES)}")
        if not self.algorithms or not set(self.algorithms) <= set(ALGORITHMS):
            raise ClusterError(f"cluster {self.name}: algorithms {list(self.algorithms)} must be some of "
                               f"{', '.join(ALGORITHMS)}")
        if self.slow or self.others:
            unequal.check(self)

    @cached_property
    def _network(self) -> int:
        """The first level whose link joins hosts."""
        each = self.devices_per_host
        return next((level for level in range(1, len(self.links)) if self.links[level - 1].num_devices >= each),
                    len(self.links))

    def _wires(self, level: int, devices: Iterable[int] = ()) -> float:
        """Wires of a level's link by which the devices that the next inner link joins send outwards together, on the
        host of ``devices`` with most failed NICs."""
        link, inside = self.links[level], self.links[level - 1].num_devices
        if link.uplinks is not None:
            wires = float(link.uplinks)
        elif link.nics_per_host is not None:
            wires = link.nics_per_host * max(1.0, inside / self.host.devices if self.host.devices else 1.0)
        elif level > self._network:
            wires = self._wires(level - 1) * inside / self.links[level - 2].num_devices
        else:
            wires = float(inside)
        failed = unequal.failed_nics(self, devices) if level == self._network and self.slow else 0
        return (wires - failed) / link.oversubscription

    def message_bytes_per_s(self, level: int) -> float:
        """What one device can send to another (and receive at the same time) by the link of a ``level``, from inside a
        host outwards, while all devices that the next inner link joins do so too.

        >>> Cluster.load("h100-sxm", num_devices=64, software="none").message_bytes_per_s(1)
        45000000000.0
        """
        link = self._links_of(range(self.num_devices))[level].seen_by("send_recv")
        return self.share_of_wire(level) * link.bandwidth_bytes_per_s / self.correction.communication

    def share_of_wire(self, level: int) -> float:
        """The share of a wire of a level's link that a device has while all that the next inner link joins send."""
        if not level:
            return 1.0
        return min(1.0, self._wires(level, range(self.num_devices)) / self.links[level - 1].num_devices)

    @property
    def price_per_hour(self) -> float:
        """Of a device in the mean; 0 if that of any is not known."""
        kinds = map(self.kinds, ((number,) for number in range(self.num_devices))) if self.is_unequal else [(self,)]
        prices = [kind.device.price_per_hour for kind, in kinds]
        return sum(prices) / len(prices) if all(prices) else 0.0

    @property
    def devices_per_host(self) -> int:
        """Devices of one full host (`devices_of_host`)."""
        return devices_of_host(self.links, self.host)

    @property
    def devices_on_host(self) -> int:
        """Devices of this cluster on its fullest host."""
        return min(self.devices_per_host, self.num_devices)

    @staticmethod
    def load(name_or_path: str | Path, num_devices: int | None = None, software: str | None = None) -> Cluster:
        """A cluster by name (see `known_clusters`) or from a TOML file; by default one host of it.

        ``software``: the profile of the software that will run on it, by a name of `cost_models.profile.SOFTWARE`, or
        "none" for the numbers of the description alone; by default what the description says ("torch-eager" for known
        GPUs, none for measured machines).

        >>> Cluster.load("h100-sxm", num_devices=64).profile.software
        'torch-eager'
        >>> Cluster.load("h100-sxm", software="megatron-core").profile.flash
        1.0

        Raises ClusterError for an unknown name or a description that misses something.
        """
        from cost_models import description

        return description.load(name_or_path, num_devices, software)

    @property
    def is_unequal(self) -> bool:
        """Whether some devices, or what their hosts send by, differ from others."""
        return bool(self.slow or self.others)

    @cached_property
    def kinds_by_device(self) -> tuple[tuple[int, float], ...]:
        """By device: which of ``others`` it is (-1: none), and its speed."""
        return unequal.kinds_of(self)

    def kinds(self, devices: Sequence[int] | None = None) -> tuple[Cluster, ...]:
        """The kinds of these devices (numbers; default: all), each as a cluster of equal ones: an op cut over them
        takes as long as on the slowest of these."""
        if not self.is_unequal:
            return (self,)
        numbers = range(self.num_devices) if devices is None else devices
        found = sorted({self.kinds_by_device[number] for number in numbers})
        for kind in found:
            if kind not in self._kinds:
                self._kinds[kind] = unequal.only(self, kind)
        return tuple(self._kinds[kind] for kind in found)

    @cached_property
    def _kinds(self) -> dict[tuple[int, float], Cluster]:
        return {}

    @cached_property
    def working_device(self) -> Device:
        """The device as the profile's software finds it (as described, without a profile), corrected; of several kinds
        one that is no faster than any."""
        if self.is_unequal:
            return unequal.weakest([kind.working_device for kind in self.kinds()])
        found, slower = self.device, self.correction.compute
        if self.profile is not None:
            found = self.profile.device(found, devices=self.num_devices)
        if slower == 1.0:
            return found
        return replace(found, launch_s=slower * found.launch_s,
                       peak_flops_per_s={name: peak / slower for name, peak in found.peak_flops_per_s.items()},
                       memory_bandwidth_bytes_per_s=found.memory_bandwidth_bytes_per_s / slower)

    @cached_property
    def _links(self) -> tuple[Link, ...]:
        """The links; under a profile the outermost at the share of its rate that the network reaches."""
        if self.profile is None or len(self.links) == 1:
            return self.links
        outer = self.links[-1]
        rate = outer.bandwidth_bytes_per_s * self.profile.network
        return (*self.links[:-1], replace(outer, bandwidth_bytes_per_s=rate))

    def _links_of(self, devices: Iterable[int]) -> tuple[Link, ...]:
        """The links; those between hosts as the host of ``devices`` with the slowest NICs has them."""
        share = unequal.bandwidth_share(self, devices) if self.slow else 1.0
        if share == 1.0:
            return self._links
        inside = [0, *(link.num_devices for link in self._links[:-1])]
        last = len(self._links) - 1
        return tuple(replace(link, bandwidth_bytes_per_s=share * link.bandwidth_bytes_per_s)
                     if level == last or within >= self.devices_per_host else link
                     for level, (link, within) in enumerate(zip(self._links, inside, strict=True)))

    def group(self, mesh_shape: Sequence[int], axis: int, places: Sequence[int] = (),
              devices: Iterable[int] | None = None) -> Group:
        """How the groups along one mesh axis (or of the ranks at some ``places`` of it) cross the links (of several
        groups the worst). ``devices``: whose hosts' NICs count (None: all that the mesh needs; none: as described).

        >>> cluster = Cluster.load("h100-sxm", num_devices=64)
        >>> [count for count, link in cluster.group((4, 16), 1).levels]     # sixteen ranks in two hosts
        [8, 2]
        """
        return self.group_of(mesh_shape, (axis,), places, devices)

    def group_of(self, mesh_shape: Sequence[int], axes: Sequence[int], places: Sequence[int] = (),
                 devices: Iterable[int] | None = None) -> Group:
        """The same for the groups over several axes together."""
        mesh_shape, ndim = tuple(int(n) for n in mesh_shape), len(mesh_shape)
        axes = tuple(sorted({axis + ndim if axis < 0 else axis for axis in axes}))
        if not axes or axes[0] < 0 or axes[-1] >= ndim or min(mesh_shape) < 1:
            raise ClusterError(f"axes {list(axes)} of a mesh of {mesh_shape}: sizes must be positive, axes below "
                               f"{ndim}")
        needed = math.prod(mesh_shape)
        if needed > self.num_devices:
            raise ClusterError(f"a mesh of {mesh_shape} needs {needed} devices, the cluster {self.name} has "
                               f"{self.num_devices}: load it with num_devices={needed}")
        domains = tuple(link.num_devices for link in self.links[:-1])
        counts, members, sharing = _crossings(mesh_shape, axes, domains, tuple(places))
        hosts = range(needed) if devices is None else tuple(devices)
        lanes, links = [1.0], self._links_of(hosts)
        for level, inside in enumerate(domains):
            wires = self._wires(level + 1, hosts)
            lanes.append(_lanes(inside, wires, members[level], sharing[level], level + 1 == self._network))
        crossed = [level for level, count in enumerate(counts[1:]) if count > 1]
        size = len(places) or math.prod(mesh_shape[a] for a in axes)
        return Group(
            levels=tuple(zip(counts, links, strict=True)),
            launch_s=self.working_device.launch_s,
            lanes=tuple(lanes),
            size=size,
            sharing=sharing[crossed[-1]] if crossed else 1,
            algorithms=self.algorithms,
            call_s=self.call_s,
            late_s=max(kind.profile.late_s(size) if kind.profile else 0.0 for kind in self.kinds()),
            slower=self.correction.communication,
            network=min(self._network, len(links) - 1),
        )


def devices_of_host(links: Sequence[Link], host: Host) -> int:
    """Devices of one full host: as ``host`` says; else those inside the outermost link that has ``nics_per_host``; else
    those of the innermost link."""
    if host.devices:
        return int(host.devices)
    inside = [inner.num_devices for inner, link in pairwise(links) if link.nics_per_host is not None]
    return inside[-1] if inside else links[0].num_devices


def in_hosts_of(cluster: Cluster, devices: int) -> Cluster:
    """The cluster with so many devices a host, fewer than it is described with: links inside a host join no more, and a
    host has its NICs, its memory and its devices behind a switch in proportion.

    >>> four = in_hosts_of(Cluster.load("a100-sxm", num_devices=16), 4)
    >>> [(link.num_devices, link.nics_per_host) for link in four.links][0], four.links[1].nics_per_host
    ((4, None), 4)
    """
    each = cluster.devices_per_host
    if not 0 < devices < each:
        raise ClusterError(f"cluster {cluster.name}: hosts of {devices} devices: from 1 to {each - 1} are required")
    links = dict[int, Link]()    # by the devices that they join
    for link in reversed(cluster.links):    # of links that join as many now, the innermost stays
        joined = link.num_devices if link.num_devices > each else min(link.num_devices, devices)
        nics = link.nics_per_host and max(1, link.nics_per_host * devices // each)
        links[joined] = replace(link, num_devices=joined, nics_per_host=nics)
    host = replace(cluster.host, memory_bytes=cluster.host.memory_bytes * devices / each,
                   devices=float(devices) if cluster.host.devices else 0.0,
                   devices_per_switch=min(cluster.host.devices_per_switch, devices))
    return replace(cluster, links=tuple(links[size] for size in sorted(links)), host=host)


def _lanes(inside: int, nics: float, members: int, sharing: int, whole: bool) -> float:
    """How many times a NIC's bandwidth ``members`` of the ``inside`` devices that the next inner link joins have, with
    so many NICs, while ``sharing`` groups leave them. ``whole``: each device sends by one NIC of its host, so that of
    several groups the one on the busiest NIC counts (8 on 7: half a NIC); a group alone uses all NICs."""
    if whole and sharing > 1 and nics >= 1:
        return min(members * max(1.0, nics / inside), members / math.ceil(members * sharing / nics))
    return min(members * max(1.0, nics / inside), nics / sharing)


@lru_cache(maxsize=1024)
def _crossings(
    mesh_shape: tuple[int, ...], axes: tuple[int, ...], domains: tuple[int, ...], places: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """How the groups over ``axes`` lie in domains of ``domains[level]`` neighbouring ranks.

    Returns the counts by level of the group that is spread most; and, by domain size, the fewest members that a group
    which leaves its domain has in one, and the most groups that leave one domain.
    """
    order = [a for a in range(len(mesh_shape)) if a not in axes] + list(axes)
    ranks = np.arange(math.prod(mesh_shape)).reshape(mesh_shape).transpose(order)
    groups = ranks.reshape(-1, math.prod(mesh_shape[a] for a in axes))
    groups = groups[:, places] if places else groups
    homes = [groups // size for size in domains]    # ascending along a group, as its ranks are
    if places and any(a > b for a, b in pairwise(places)):
        homes = [np.sort(home, axis=1) for home in homes]
    spread = [1 + (np.diff(home, axis=1) > 0).sum(axis=1) for home in homes]
    worst = int(np.lexsort(spread)[-1]) if spread else 0
    parts = [groups[worst], *(np.unique(home[worst]) * size for home, size in zip(homes, domains, strict=True))]
    counts = [int(np.unique(part // size, return_counts=True)[1].max())
              for part, size in zip(parts[:-1], domains, strict=True)]
    counts.append(len(parts[-1]))
    members, sharing = [], []
    for home, wide in zip(homes, spread, strict=True):
        leaving = home[wide > 1]
        first = np.ones(leaving.shape, dtype=bool)    # of a group's members in one domain
        first[:, 1:] = np.diff(leaving, axis=1) > 0
        begins = np.flatnonzero(first)
        members.append(int(np.diff(begins, append=leaving.size).min()) if len(begins) else 1)
        sharing.append(int(np.bincount(leaving.ravel()[begins]).max()) if len(begins) else 1)
    return tuple(counts), tuple(members), tuple(sharing)
