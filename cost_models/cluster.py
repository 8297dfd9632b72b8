"""Machines as data: devices, links, and the groups of ranks that mesh axes form on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cost_models import unequal
from cost_models.errors import ClusterError
from cost_models.unequal import OtherHosts, Slow

if TYPE_CHECKING:
    from cost_models.profile import Profile

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
              "float4_e2m1fn": 0.5}

#: Points of an efficiency curve: (FLOP or bytes of one call, achieved share of the peak), sizes growing.
Curve = tuple[tuple[float, float], ...]

#: By how much compute and communication of GPUs take longer while both run: what Galvatron takes where nobody measured
#: (Miao et al., VLDB 2023).
OVERLAP_SLOWDOWN = 1.3
#: What a link's ``slowdown`` may name.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")

#: Dtypes of ``peak_flops_per_s``, and classes of ops that have efficiency curves.
PEAK_DTYPES = (*ITEM_BYTES, "tf32", "int8")
OP_CLASSES = ("attention", "conv", "default", "elementwise", "gather", "matmul", "pointwise", "reduction")

#: What a cluster's ``algorithms`` may name; see `cost_models.collectives`.
ALGORITHMS = ("ring", "tree", "hierarchical")

#: Bytes per second of a link that takes no time.
ENDLESS = 1e300

#: ``num_devices`` of an outermost link that any number of devices can share.
UNLIMITED = 2**31


@dataclass(frozen=True)
class Tiles:
    """How a device cuts matrix products: each of ``units`` multiprocessors computes one tile of the result at a time.

    ``share`` of the peak is what the main loop of the largest tile reaches; a tile loses the time of ``ramp`` columns
    of k to its start and end; ``misaligned`` is the speed left where an operand's rows do not start on 128-byte
    boundaries. ``low_precision_share`` is ``share`` for dtypes of one byte and less.
    """

    units: int
    share: float
    ramp: float = 256.0
    misaligned: float = 0.8
    low_precision_share: float | None = None

    def __post_init__(self) -> None:
        shares = (self.share, self.misaligned, self.low_precision_share or self.share)
        if self.units < 1 or not all(0 < share <= 1 for share in shares) or not 0 <= self.ramp < math.inf:
            raise ClusterError(f"tiles need units >= 1, ramp >= 0 and shares in (0, 1], not {self}")


@dataclass(frozen=True)
class Device:
    """One accelerator (or one process of a CPU cluster).

    ``peak_flops_per_s`` by dtype name. ``launch_s`` is the fixed time of one op or collective. ``efficiency`` gives for
    an op class a curve of (FLOP of one call, share of the peak), ``memory_efficiency`` one of (bytes of one call, share
    of the memory bandwidth), "default" for classes not listed; else ``memory_bandwidth_efficiency`` counts, which is
    that of large transfers. ``reserved_bytes`` is what a process loses before the first tensor: context, library and
    communication buffers. ``tiles``, where known, prices matrix products by their shape (`compute.matmul_time_s`).
    ``overlap_slowdown``: how many times longer compute and communication take while both run (2: nothing is gained).
    ``price_per_hour`` (in any currency) and ``watts`` of one device with its share of the host, for reports; 0: not
    known.

    A curve may not rise so steeply that a larger call takes less time:

    >>> Device("toy", {"float32": 1e12}, 1e11, 1.0, 1e9, 0.0, {"matmul": ((1e6, 0.1), (1e7, 0.5))}).name
    'toy'
    >>> Device("toy", {"float32": 1e12}, 1e11, 1.0, 1e9, 0.0, {"matmul": ((1, 0.1), (2, 0.5))})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    cost_models.errors.ClusterError: device toy: efficiency.matmul rises from 0.1 to 0.5 between 1 and 2: ...
    """

    name: str
    peak_flops_per_s: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    memory_bandwidth_efficiency: float
    memory_bytes: float
    launch_s: float
    efficiency: Mapping[str, Curve] = field(default_factory=dict)
    memory_efficiency: Mapping[str, Curve] = field(default_factory=dict)
    reserved_bytes: float = 0.0
    tiles: Tiles | None = None
    overlap_slowdown: float = OVERLAP_SLOWDOWN
    price_per_hour: float = 0.0
    watts: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.overlap_slowdown <= 2:
            raise ClusterError(f"device {self.name}: overlap_slowdown must be in [1, 2], not {self.overlap_slowdown}")
        for what in ("memory_bandwidth_bytes_per_s", "memory_bytes"):
            if not 0 < getattr(self, what) < math.inf:
                raise ClusterError(f"device {self.name}: {what} must be positive, not {getattr(self, what)}")
        if not 0 < self.memory_bandwidth_efficiency <= 1:
            raise ClusterError(f"device {self.name}: memory_bandwidth_efficiency must be in (0, 1], "
                               f"not {self.memory_bandwidth_efficiency}")
        for what in ("price_per_hour", "watts"):
            if not 0 <= getattr(self, what) < math.inf:
                raise ClusterError(f"device {self.name}: {what} must not be negative, but is {getattr(self, what)}")
        if not 0 <= self.launch_s < math.inf or not 0 <= self.reserved_bytes < self.memory_bytes:
            raise ClusterError(f"device {self.name}: launch_s must not be negative, and reserved_bytes in "
                               f"[0, memory_bytes), not {self.launch_s} and {self.reserved_bytes}")
        if "float32" not in self.peak_flops_per_s or not all(0 < v < math.inf for v in self.peak_flops_per_s.values()):
            raise ClusterError(f"device {self.name}: peak_flops_per_s must give a positive number for float32 (which "
                               f"stands in for dtypes not listed) and all others, not {dict(self.peak_flops_per_s)}")
        for table in ("efficiency", "memory_efficiency"):
            for op_class, curve in getattr(self, table).items():
                _check_curve(f"device {self.name}: {table}.{op_class}", curve)

    @property
    def usable_bytes(self) -> float:
        """Memory that is left for tensors."""
        return self.memory_bytes - self.reserved_bytes


def _check_curve(what: str, curve: Curve) -> None:
    if not curve or any(size <= 0 or not 0 < share <= 1 for size, share in curve):
        raise ClusterError(f"{what} must be pairs of a size above 0 and a share in (0, 1], not {curve}")
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x1 <= x0:
            raise ClusterError(f"{what}: sizes must grow, but {x1:g} follows {x0:g}")
        if y1 / y0 > x1 / x0 * (1 + 1e-9):
            raise ClusterError(f"{what} rises from {y0:g} to {y1:g} between {x0:g} and {x1:g}: the larger call "
                               "would take less time; the share may grow at most as the size does")


@dataclass(frozen=True)
class Protocol:
    """Another way to send over the same wires, sooner but slower: NCCL's LL and LL128 beside Simple.

    ``base_s`` is the fixed time of a call, ``alpha_s`` that of a message, ``share`` the part of the bandwidth left.
    """

    base_s: float
    alpha_s: float
    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.base_s < math.inf or not 0 <= self.alpha_s < math.inf or not 0 < self.share <= 1:
            raise ClusterError(f"a protocol needs base_s >= 0, alpha_s >= 0 and a share in (0, 1], not {self}")


@dataclass(frozen=True)
class Link:
    """The wires of one level: ``num_devices`` neighbours reach one another by them.

    ``alpha_s`` seconds per message; ``bandwidth_bytes_per_s`` what one device can send (and receive at the same time).
    ``slowdown`` by collective (1 when absent): its time over that of the formula with this alpha and bandwidth.

    A link between hosts has ``nics_per_host``, each of that bandwidth, which all devices of a host share: eight devices
    with four NICs get half each while all of them send. None: each device has its own. A host is what the next inner
    link joins; where that is a rack, say ``[host] devices`` (`Host.devices`), else the NICs are those of the rack.

    ``protocols`` are alternatives by name; a collective uses the cheapest that all links it crosses have.
    ``burst_bytes``: the link is shaped by a token bucket, so that what it does not send for a while, it may send at
    once later, up to so many bytes (of all that share it).
    ``relay_s_per_byte``: before a rank of a ring takes its next shard, it sums and hands on the last. Its link is idle
    meanwhile, but for other groups that share it (`Group.pace_s_per_byte`).
    """

    name: str
    num_devices: int
    alpha_s: float
    bandwidth_bytes_per_s: float
    slowdown: Mapping[str, float] = field(default_factory=dict)
    nics_per_host: int | None = None
    protocols: Mapping[str, Protocol] = field(default_factory=dict)
    burst_bytes: float = 0.0
    relay_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if self.num_devices < 1 or not 0 <= self.alpha_s < math.inf or not 0 < self.bandwidth_bytes_per_s < math.inf:
            raise ClusterError(f"link {self.name}: needs num_devices >= 1, alpha_s >= 0, bandwidth_bytes_per_s > 0; "
                               f"has {self.num_devices}, {self.alpha_s}, {self.bandwidth_bytes_per_s}")
        if not 0 <= self.burst_bytes < math.inf:
            raise ClusterError(f"link {self.name}: burst_bytes must be at least 0, not {self.burst_bytes}")
        if not 0 <= self.relay_s_per_byte < math.inf:
            raise ClusterError(f"link {self.name}: relay_s_per_byte must be at least 0, not {self.relay_s_per_byte}")
        if self.nics_per_host is not None and self.nics_per_host < 1:
            raise ClusterError(f"link {self.name}: nics_per_host must be at least 1, not {self.nics_per_host}")
        for kind, factor in self.slowdown.items():
            if kind not in COLLECTIVES or not 0 < factor < math.inf:
                raise ClusterError(f"link {self.name}: slowdown.{kind} = {factor}: must be a positive factor for one "
                                   f"of {', '.join(COLLECTIVES)}")

    @property
    def beta_s_per_byte(self) -> float:
        return 1.0 / self.bandwidth_bytes_per_s

    def seen_by(self, collective: str, protocol: str | None = None) -> Link:
        """The link as one collective finds it, by one of its protocols."""
        slow = self.slowdown.get(collective, 1.0)
        alpha_s, share = self.alpha_s, 1.0
        if protocol is not None:
            alpha_s, share = self.protocols[protocol].alpha_s, self.protocols[protocol].share
        bandwidth = self.bandwidth_bytes_per_s * share / slow
        return replace(self, alpha_s=alpha_s * slow, bandwidth_bytes_per_s=bandwidth, slowdown={}, protocols={},
                       relay_s_per_byte=self.relay_s_per_byte * slow)


@dataclass(frozen=True)
class Group:
    """The ranks along mesh axes, by how they cross the links; of the groups along the same axes, the worst.

    ``levels`` are (how many, by which link) from the innermost link outwards; ``size`` the ranks. Sixteen devices in
    two hosts of eight: ``((8, nvlink), (2, infiniband))``. Twelve, eight in one host and four in the other: the same
    levels, size 12, and not ``even``.

    ``lanes`` says for each level how many times the link's bandwidth the group's members in one host have together:
    1 inside a host; between hosts, eight members with a NIC each have 8. ``sharing`` is the number of groups along the
    same axes that leave a host at the same time by its NICs, at the outermost level crossed. ``call_s`` is the
    cluster's, and ``launch_s`` what a call costs of collectives that it does not name. ``late_s``: how long a call
    waits for the last rank. ``slower``: a factor on all seconds.
    """

    levels: tuple[tuple[int, Link], ...]
    launch_s: float
    lanes: tuple[float, ...] = ()
    size: int = 0
    sharing: int = 1
    algorithms: tuple[str, ...] = ALGORITHMS
    call_s: Mapping[str, float] = field(default_factory=dict)
    late_s: float = 0.0
    slower: float = 1.0

    def __post_init__(self) -> None:
        counts = [count for count, _ in self.levels]
        if not self.size:
            object.__setattr__(self, "size", math.prod(counts))
        if not self.lanes:
            object.__setattr__(self, "lanes", (1.0,) * len(self.levels))
        if not counts or min(counts) < 1 or not 1 <= self.size <= math.prod(counts):
            raise ClusterError(f"a group of {self.size} ranks cannot have levels of {counts}")
        if len(self.lanes) != len(counts) or min(self.lanes) <= 0 or self.sharing < 1:
            raise ClusterError(f"a group of {len(counts)} levels needs as many positive lanes, not {self.lanes}")

    @property
    def even(self) -> bool:
        """Whether every host has as many members as the next, as level-by-level algorithms require."""
        return self.size == math.prod(count for count, _ in self.levels)

    @cached_property
    def crossed(self) -> tuple[tuple[int, Link, float], ...]:
        """(count, link, bytes/s of the group's members in one domain of that level) of the levels in use."""
        return tuple((count, link, link.bandwidth_bytes_per_s * lanes)
                     for (count, link), lanes in zip(self.levels, self.lanes, strict=True) if count > 1)

    @cached_property
    def pace_s_per_byte(self) -> float:
        """Of a ring through all ranks, where it is slowest: the time of its bytes by all groups that share the link, or
        its own by the link and through a rank, whichever is longer."""
        found = 0.0
        for number, (_, link, bandwidth) in enumerate(self.crossed, start=1):
            sharing = self.sharing if number == len(self.crossed) else 1
            alone = max(bandwidth, min(bandwidth * sharing, link.bandwidth_bytes_per_s))
            found = max(found, 1 / bandwidth, 1 / alone + link.relay_s_per_byte)
        return found

    @cached_property
    def ring_alpha_s(self) -> float:
        """The latency of the n - 1 steps of a ring through all ranks: on each level as many as there are boundaries of
        it."""
        parts, seconds = self.size, 0.0
        for level, (_, link) in enumerate(self.levels):
            domains = min(parts, math.prod(count for count, _ in self.levels[level + 1:]))
            seconds += (parts - domains) * link.alpha_s
            parts = domains
        return seconds

    @property
    def burst_bytes(self) -> float:
        """Of the outermost link crossed."""
        return self.crossed[-1][1].burst_bytes if self.crossed else 0.0

    @cached_property
    def prompt(self) -> Group:
        """This group without latency: messages cost their bytes only."""
        return replace(self, levels=tuple((count, replace(link, alpha_s=0.0)) for count, link in self.levels))

    @cached_property
    def outside(self) -> Group:
        """This group where a second is a byte by one wire of the outermost link crossed, and nothing else counts."""
        outermost = max((number for number, (count, _) in enumerate(self.levels) if count > 1), default=-1)
        levels = tuple((count, replace(link, alpha_s=0.0, relay_s_per_byte=0.0,
                                       bandwidth_bytes_per_s=1.0 if i == outermost else ENDLESS))
                       for i, (count, link) in enumerate(self.levels))
        return replace(self, levels=levels, launch_s=0.0)

    def seen_by(self, collective: str) -> tuple[Group, ...]:
        """This group as a collective finds it: links slowed down, once as they are and once by each protocol that all
        links crossed offer."""
        if collective not in self._seen:
            crossed = [link for _, link, _ in self.crossed]
            names = [name for name in (crossed[0].protocols if crossed else ())
                     if all(name in link.protocols for link in crossed)]
            self._seen[collective] = tuple(self._as(collective, name) for name in (None, *names))
        return self._seen[collective]

    def _as(self, collective: str, protocol: str | None) -> Group:
        levels = tuple((count, link.seen_by(collective, protocol if count > 1 else None))
                       for count, link in self.levels)
        if protocol is None:
            return replace(self, levels=levels, launch_s=self.call_s.get(collective, self.launch_s))
        base_s = max(link.protocols[protocol].base_s for _, link, _ in self.crossed)
        return replace(self, levels=levels, launch_s=base_s)

    @cached_property
    def _seen(self) -> dict[str, tuple[Group, ...]]:
        return {}

    @property
    def slowest(self) -> Link:
        """The link crossed with the least bandwidth per device."""
        crossed = [link for count, link in self.levels if count > 1] or [self.levels[0][1]]
        return min(crossed, key=lambda link: link.bandwidth_bytes_per_s)


@dataclass(frozen=True)
class Host:
    """What devices of one host share or reach besides each other; 0 means not known.

    Rates per device and direction. Those of memory (``memory_bandwidth_bytes_per_s``: reads and writes together), of
    disks and of the processors (``step_elements_per_s``: elements that the cores step with a fused optimizer, were
    memory endless) are shares of a device while all devices of the host are at work: with fewer, each has more
    (`cost_models.offload.known_rate`). Those between host and device are of one that moves data alone;
    ``devices_per_switch`` devices (0: one) share a PCIe switch and its link to the host. ``shared_memory`` (1 or 0):
    devices compute in the host's memory, so that nothing is copied between them for the host to step it. ``devices``:
    how many devices a host has (`Cluster.devices_per_host`).
    """

    memory_bytes: float = 0.0
    to_device_bytes_per_s: float = 0.0
    from_device_bytes_per_s: float = 0.0
    disk_read_bytes_per_s: float = 0.0
    disk_write_bytes_per_s: float = 0.0
    memory_bandwidth_bytes_per_s: float = 0.0
    step_elements_per_s: float = 0.0
    shared_memory: float = 0.0
    devices: float = 0.0
    devices_per_switch: float = 0.0

    def __post_init__(self) -> None:
        for what, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ClusterError(f"host: {what} must not be negative, but is {value}")
            if what.startswith("devices") and value != int(value):
                raise ClusterError(f"host: {what} must be a whole number, but is {value}")


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
    may be partly used. ``call_s`` by collective is what one call costs beside its messages (waking ranks and threads),
    whatever its size and group; the device's launch time when absent. ``profile`` holds the fitted constants of the
    software that runs on it (None: only what the description says counts), ``correction`` what measured steps showed
    beside predicted ones (`autoparallel.ParallelModule.verify`). ``sources`` says where each number comes
    from, by its path in the TOML file.
    """

    name: str
    device: Device
    links: tuple[Link, ...]
    num_devices: int
    algorithms: tuple[str, ...] = ALGORITHMS
    host: Host = Host()
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
        for kind, seconds in self.call_s.items():
            if kind not in COLLECTIVES or not 0 <= seconds < math.inf:
                raise ClusterError(f"cluster {self.name}: call_s.{kind} = {seconds}: must be seconds, not negative, "
                                   f"for one of {', '.join(COLLECTIVES)}")
        if not self.algorithms or not set(self.algorithms) <= set(ALGORITHMS):
            raise ClusterError(f"cluster {self.name}: algorithms {list(self.algorithms)} must be some of "
                               f"{', '.join(ALGORITHMS)}")
        if self.slow or self.others:
            unequal.check(self)

    def _nics(self, link: Link, inside: int) -> float:
        """NICs of the ``inside`` devices that the next inner link joins: a host's, or those of several hosts."""
        if link.nics_per_host is None:
            return inside
        return link.nics_per_host * max(1.0, inside / self.host.devices if self.host.devices else 1.0)

    def message_bytes_per_s(self, level: int) -> float:
        """What one device can send to another (and receive at the same time) by the link of a ``level``, from inside a
        host outwards, while all devices that the next inner link joins do so too.

        >>> Cluster.load("h100-sxm", num_devices=64, software="none").message_bytes_per_s(1)
        45000000000.0
        """
        link = self._links[level].seen_by("send_recv")
        inside = self.links[level - 1].num_devices if level else 1
        share = min(1.0, self._nics(link, inside) / inside) if level else 1.0
        return share * link.bandwidth_bytes_per_s / self.correction.communication

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

    def _links_of(self, count: int) -> tuple[Link, ...]:
        """The links; those between hosts as the host with the slowest NICs of the first ``count`` devices has them."""
        share = unequal.bandwidth_share(self, range(count)) if self.slow else 1.0
        if share == 1.0:
            return self._links
        inside = [0, *(link.num_devices for link in self._links[:-1])]
        last = len(self._links) - 1
        return tuple(replace(link, bandwidth_bytes_per_s=share * link.bandwidth_bytes_per_s)
                     if level == last or within >= self.devices_per_host else link
                     for level, (link, within) in enumerate(zip(self._links, inside, strict=True)))

    def group(self, mesh_shape: Sequence[int], axis: int, places: Sequence[int] = ()) -> Group:
        """How the groups along one mesh axis (or of the ranks at some ``places`` of it) cross the links (of several
        groups the worst).

        >>> cluster = Cluster.load("h100-sxm", num_devices=64)
        >>> [count for count, link in cluster.group((4, 16), 1).levels]     # sixteen ranks in two hosts
        [8, 2]
        """
        return self.group_of(mesh_shape, (axis,), places)

    def group_of(self, mesh_shape: Sequence[int], axes: Sequence[int], places: Sequence[int] = ()) -> Group:
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
        lanes, links = [1.0], self._links_of(needed)
        for level, link in enumerate(links[1:]):
            lanes.append(_lanes(domains[level], self._nics(link, domains[level]), members[level],
                                sharing[level]))
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
        )


def devices_of_host(links: Sequence[Link], host: Host) -> int:
    """Devices of one full host: as ``host`` says; else those inside the outermost link that has ``nics_per_host``; else
    those of the innermost link."""
    if host.devices:
        return int(host.devices)
    inside = [inner.num_devices for inner, link in pairwise(links) if link.nics_per_host is not None]
    return inside[-1] if inside else links[0].num_devices


def _lanes(inside: int, nics: float, members: int, sharing: int) -> float:
    """How many times a NIC's bandwidth ``members`` of the ``inside`` devices that the next inner link joins have, with
    so many NICs, while ``sharing`` groups leave them."""
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
    homes = [np.sort(groups // size, axis=1) for size in domains]
    spread = [1 + (np.diff(home, axis=1) > 0).sum(axis=1) for home in homes]
    worst = int(np.lexsort(spread)[-1]) if spread else 0
    parts = [groups[worst], *(np.unique(home[worst]) * size for home, size in zip(homes, domains, strict=True))]
    counts = [int(np.unique(part // size, return_counts=True)[1].max())
              for part, size in zip(parts[:-1], domains, strict=True)]
    counts.append(len(parts[-1]))
    members, sharing = [], []
    for home, wide in zip(homes, spread, strict=True):
        leaving = home[wide > 1]
        number = np.repeat(np.arange(len(leaving)), leaving.shape[1])
        pairs, inside = np.unique(np.stack([leaving.ravel(), number]), axis=1, return_counts=True)
        members.append(int(inside.min()) if len(inside) else 1)
        sharing.append(int(np.bincount(pairs[0]).max()) if len(inside) else 1)
    return tuple(counts), tuple(members), tuple(sharing)
