"""Clusters whose devices are not all alike: slow devices, hosts of another kind, hosts with slower NICs.

Work is cut into equal shards, and all ranks of a mesh wait for the last: so an op takes the time of the slowest device
of its mesh, memory ends with the smallest, and a collective goes at the pace of the slowest link. Only the stages of a
pipeline may differ. `Cluster.kinds` says which devices a mesh has, as clusters of equal devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from cost_models.errors import ClusterError

if TYPE_CHECKING:
    from cost_models.cluster import Cluster
    from cost_models.devices import Curve, Device, Host
    from cost_models.links import Link
    from cost_models.profile import Profile

#: The least speed, and the least share of a bandwidth: a device that is slower than this is of no use.
LEAST = 0.01


@dataclass(frozen=True)
class Slow:
    """``devices`` (numbers from 0) that run everything at ``speed`` times what the cluster says of them, and whose
    hosts send to others at ``bandwidth`` times what it says of the links between hosts; both in [0.01, 1]. So many of
    each of these hosts' NICs have failed (``failed_nics``), and their devices send by the others."""

    devices: tuple[int, ...]
    speed: float = 1.0
    bandwidth: float = 1.0
    failed_nics: int = 0

    def __post_init__(self) -> None:
        for what, value in (("speed", self.speed), ("bandwidth", self.bandwidth)):
            if not LEAST <= value <= 1:
                raise ClusterError(f"slow devices {told(self.devices)}: {what} is {value:g}, and must be in "
                                   f"[{LEAST:g}, 1]: 0.5 is half as fast as the others; leave out devices that are "
                                   "of no use")
        if type(self.failed_nics) is not int or self.failed_nics < 0:
            raise ClusterError(f"slow devices {told(self.devices)}: failed_nics is {self.failed_nics}: give how many "
                               "of a host's NICs have failed, 0 or more")
        if not self.devices or min(self.devices) < 0 or len(set(self.devices)) < len(self.devices):
            raise ClusterError(f"slow devices {told(self.devices)}: give numbers from 0 on, each once")


@dataclass(frozen=True)
class OtherHosts:
    """``devices`` (numbers from 0, of whole hosts) that are not the cluster's ``device`` but this one, under this
    ``profile``, as those of the known cluster ``like``."""

    like: str
    devices: tuple[int, ...]
    device: Device
    profile: Profile | None = None


def told(numbers: Iterable[int]) -> str:
    """Numbers as ranges, in their order.

    >>> told([0, 1, 2, 5, 8, 9, 4])
    '0-2, 5, 8-9, 4'
    """
    runs = list[list[int]]()
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def check(cluster: Cluster) -> None:
    """Raises ClusterError where slow devices or hosts of another kind are not the cluster's."""
    count, each, name = cluster.num_devices, cluster.devices_per_host, f"cluster {cluster.name}"
    listed = [number for other in cluster.others for number in other.devices]
    for what, numbers in (*(("slow", one.devices) for one in cluster.slow), ("of another kind", listed)):
        if beyond := [number for number in numbers if not 0 <= number < count]:
            raise ClusterError(f"{name}: devices {told(beyond)} are {what}, and its {count} devices are 0-{count - 1}: "
                               f"load it with num_devices={max(beyond) + 1} or more, or describe the {count} that "
                               "are used")
    if len(set(listed)) < len(listed):
        twice = sorted(number for number, times in Counter(listed).items() if times > 1)
        raise ClusterError(f"{name}: devices {told(twice)} are of two other kinds: name each host in one "
                           "[[hosts]] table")
    network = next((link for link in cluster.links[1:] if link.nics_per_host is not None), None)
    nics = each if network is None else network.nics_per_host or each
    if (failed := failed_nics(cluster, range(count))) and (failed >= nics or len(cluster.links) == 1):
        raise ClusterError(f"{name}: {failed} NICs of a host have failed, and it has {nics if network else 'none'}: a "
                           "host without a NIC reaches no other; leave it out")
    for other in cluster.others:
        hosts = {number // each for number in other.devices}
        if len(other.devices) != sum(min(each, count - host * each) for host in hosts):
            raise ClusterError(f"{name}: devices {told(other.devices)} are like {other.like}, and a host has {each}: "
                               "all devices of a host are of one kind")


def kinds_of(cluster: Cluster) -> tuple[tuple[int, float], ...]:
    """By device: which of ``others`` it is (-1: the cluster's own device), and its speed."""
    which, speed = np.full(cluster.num_devices, -1), np.ones(cluster.num_devices)
    for number, other in enumerate(cluster.others):
        which[list(other.devices)] = number
    for slow in cluster.slow:
        speed[list(slow.devices)] *= slow.speed
    return tuple(zip(which.tolist(), speed.tolist(), strict=True))


def only(cluster: Cluster, kind: tuple[int, float]) -> Cluster:
    """A cluster whose devices are all of one kind, as `kinds_of` says it."""
    which, speed = kind
    other = cluster.others[which] if which >= 0 else None
    correction = replace(cluster.correction, compute=cluster.correction.compute / speed)
    made = replace(cluster, slow=(), others=(), correction=correction)
    return made if other is None else replace(made, device=other.device, profile=other.profile)


def bandwidth_share(cluster: Cluster, devices: Iterable[int]) -> float:
    """The least share of the bandwidth between hosts that a host of these devices has (1.0 without devices)."""
    each = cluster.devices_per_host
    shares = dict.fromkeys((number // each for number in devices), 1.0)
    for slow in cluster.slow:
        for host in {number // each for number in slow.devices} & shares.keys():
            shares[host] *= slow.bandwidth
    return min(shares.values(), default=1.0)


def failed_nics(cluster: Cluster, devices: Iterable[int]) -> int:
    """The most NICs that a host of these devices has lost."""
    each, lost, counted = cluster.devices_per_host, Counter[int](), frozenset(devices)
    for slow in cluster.slow:
        lost.update({number // each: slow.failed_nics for number in slow.devices if number in counted})
    return max(lost.values(), default=0)


# ------------------------------------------------------------------------------------------------------- the worst


def weakest(devices: Sequence[Device]) -> Device:
    """A device on which no copy and no element-wise op takes less than on any of these; matrix products, which take
    whole waves of tiles, are priced on each (`Cluster.kinds`)."""
    if len(set(map(repr, devices))) == 1:
        return devices[0]
    slowest = min(devices, key=lambda d: d.peak_flops_per_s["float32"])
    peaks = {dtype: min(d.peak_flops_per_s[dtype] for d in devices) for dtype in slowest.peak_flops_per_s
             if all(dtype in d.peak_flops_per_s for d in devices)}
    least = {what: min(getattr(d, what) for d in devices)
             for what in ("memory_bandwidth_bytes_per_s", "memory_bandwidth_efficiency", "memory_bytes")}
    most = {what: max(getattr(d, what) for d in devices)
            for what in ("launch_s", "reserved_bytes", "overlap_slowdown", "price_per_hour", "watts")}
    work = _lowest([(d.efficiency, 1.0) for d in devices])
    traffic = _lowest([(d.memory_efficiency, d.memory_bandwidth_efficiency) for d in devices])
    return replace(slowest, name=" and ".join(dict.fromkeys(d.name for d in devices)), peak_flops_per_s=peaks,
                   efficiency=work, memory_efficiency=traffic, **least, **most)


def _lowest(tables: Sequence[tuple[Mapping[str, Curve], float]]) -> dict[str, Curve]:
    """By class of ops the lowest of several curves, each with the share that counts where it has none."""
    names = dict.fromkeys(name for curves, _ in tables for name in curves)
    return {name: _lower([curves.get(name, curves.get("default", ((1.0, share),))) for curves, share in tables])
            for name in names}


def _lower(curves: Sequence[Curve]) -> Curve:
    """The lowest of several curves at each of their points."""
    sizes = sorted({size for curve in curves for size, _ in curve})
    shares = [np.exp(np.interp(np.log(sizes), np.log([x for x, _ in curve]), np.log([y for _, y in curve])))
              for curve in curves]
    return tuple(zip(sizes, np.min(shares, axis=0).tolist(), strict=True))


def worse_link(a: Link, b: Link) -> Link:
    """A link by which nothing is faster than by either: of hosts of two kinds, which reach as many devices by it."""
    protocols = {name: replace(way, base_s=max(way.base_s, b.protocols[name].base_s),
                               alpha_s=max(way.alpha_s, b.protocols[name].alpha_s),
                               share=min(way.share, b.protocols[name].share))
                 for name, way in a.protocols.items() if name in b.protocols}
    slowdown = {kind: max(a.slowdown.get(kind, 1.0), b.slowdown.get(kind, 1.0))
                for kind in dict.fromkeys([*a.slowdown, *b.slowdown])}
    nics = [link.nics_per_host for link in (a, b) if link.nics_per_host is not None]
    name = a.name if b.name in a.name.split(" and ") else f"{a.name} and {b.name}"
    return replace(a, name=name, alpha_s=max(a.alpha_s, b.alpha_s),
                   bandwidth_bytes_per_s=min(a.bandwidth_bytes_per_s, b.bandwidth_bytes_per_s), slowdown=slowdown,
                   nics_per_host=min(nics, default=None), protocols=protocols,
                   burst_bytes=min(a.burst_bytes, b.burst_bytes),
                   uplinks=min((link.uplinks for link in (a, b) if link.uplinks is not None), default=None)
                   if not nics else None,
                   oversubscription=max(a.oversubscription, b.oversubscription),
                   relay_s_per_byte=max(a.relay_s_per_byte, b.relay_s_per_byte))


def worse_host(a: Host, b: Host) -> Host:
    """A host that has and reaches no more than either; what is not known of one is not known."""
    return replace(a, **{field.name: min(getattr(a, field.name), getattr(b, field.name)) for field in fields(a)
                         if field.name not in ("devices", "shared_memory")})


# ------------------------------------------------------------------------------------------------------- the order


def grouped(cluster: Cluster) -> tuple[int, ...]:
    """The hosts in an order in which equal ones are neighbours, so that slow ones share stages of a pipeline: those
    with most memory first, as the first stages hold most activations, then the fastest. As they are, where the last
    host is partly used."""
    each, count = cluster.devices_per_host, cluster.num_devices
    if count % each or not cluster.is_unequal:
        return tuple(range(-(-count // each)))

    def place(host: int) -> tuple[float, ...]:
        inside = range(host * each, (host + 1) * each)
        devices = [kind.working_device for kind in cluster.kinds(inside)]
        return (-min(d.memory_bytes for d in devices), -min(max(d.peak_flops_per_s.values()) for d in devices),
                -bandwidth_share(cluster, inside), failed_nics(cluster, inside))

    return tuple(sorted(range(count // each), key=place))


def in_order(cluster: Cluster, hosts: Sequence[int]) -> Cluster:
    """The cluster whose host i is the host ``hosts[i]`` of this one. Raises ClusterError unless each occurs once."""
    each = cluster.devices_per_host
    if sorted(hosts) != list(range(-(-cluster.num_devices // each))):
        raise ClusterError(f"cluster {cluster.name}: hosts {list(hosts)} are not each of its "
                           f"{-(-cluster.num_devices // each)} once")
    new = {host: number for number, host in enumerate(hosts)}

    def moved(devices: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(new[number // each] * each + number % each for number in devices))

    return replace(cluster, slow=tuple(replace(one, devices=moved(one.devices)) for one in cluster.slow),
                   others=tuple(replace(one, devices=moved(one.devices)) for one in cluster.others))


def described(cluster: Cluster, devices: Sequence[int] | None = None) -> str:
    """What these devices (default: all) are, by kind.

    >>> from cost_models import Cluster
    >>> described(Cluster.load("h100-sxm", num_devices=16))
    '16 H100 SXM5 80GB'
    """
    numbers = range(cluster.num_devices) if devices is None else devices
    found = []
    for (which, speed), count in Counter(cluster.kinds_by_device[number] for number in numbers).items():
        device = cluster.device if which < 0 else cluster.others[which].device
        found.append(f"{count} {device.name}" + (f" at {speed:.0%} speed" if not math.isclose(speed, 1.0) else ""))
    return ", ".join(found)


def lines(cluster: Cluster) -> list[str]:
    """The cluster in a few lines: its devices by kind, links, and the hosts with slower NICs.

    >>> from cost_models import Cluster
    >>> slow = replace(Cluster.load("h100-sxm", num_devices=16), slow=(Slow(tuple(range(8, 16)), 0.5, 0.5),))
    >>> print("\\n".join(lines(slow)))
    h100-sxm: 16 devices, 8 a host, unequal
      devices 0-7: H100 SXM5 80GB, 80 GiB
      devices 8-15: H100 SXM5 80GB at 50% speed, 80 GiB; 50% of the bandwidth between hosts
      links: NVLink 4 (8 devices), InfiniBand NDR (all)
    """
    each, kinds, count = cluster.devices_per_host, cluster.kinds_by_device, cluster.num_devices
    unequal = ", unequal" if cluster.is_unequal else ""
    found = [f"{cluster.name}: {count} device{'s' * (count != 1)}, {each} a host{unequal}"]
    by_kind = dict[tuple[object, ...], list[int]]()
    nics = {n: (bandwidth_share(cluster, range(n, n + 1)), failed_nics(cluster, range(n, n + 1)))
            for n in range(0, count, each)} if cluster.slow else {}
    shares = [nics.get(n // each * each, (1.0, 0)) for n in range(count)]
    for number in range(count):
        by_kind.setdefault((*kinds[number], *shares[number]), []).append(number)
    for numbers in by_kind.values():
        what = described(cluster, numbers[:1]).removeprefix("1 ")
        (kind,), (share, failed) = cluster.kinds(numbers[:1]), shares[numbers[0]]
        less = f"; {share:.0%} of the bandwidth between hosts" if share < 1 else ""
        gone = f"; {failed} NIC{'s' if failed > 1 else ''} of each host failed" if failed else ""
        which = f"device{'s' * (len(numbers) != 1)} {told(numbers)}"
        found.append(f"  {which}: {what}, {kind.device.memory_bytes / 2**30:.3g} GiB{less}{gone}")
    reach = [f"{link.name} ({'all' if number == len(cluster.links) - 1 else f'{link.num_devices} devices'}"
             f"{f', {link.oversubscription:g}:1' if link.oversubscription > 1 else ''})"
             for number, link in enumerate(cluster.links)]
    return [*found, f"  links: {', '.join(reach)}"]


__all__ = ["OtherHosts", "Slow", "described", "grouped", "in_order", "lines", "told", "weakest", "worse_host",
           "worse_link"]
