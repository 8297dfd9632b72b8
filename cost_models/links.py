"""Links as data, and the groups of ranks that mesh axes form on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from cost_models.errors import ClusterError

#: What a link's ``slowdown`` may name.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")

#: What a cluster's ``algorithms`` may name; see `cost_models.collectives`.
ALGORITHMS = ("ring", "tree", "hierarchical")

#: Bytes per second of a link that takes no time.
ENDLESS = 1e300

#: ``num_devices`` of an outermost link that any number of devices can share.
UNLIMITED = 2**31


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
    A link between racks or sites may have ``uplinks`` instead: wires of that bandwidth by which all devices that the
    next inner link joins reach the others. None: as many as there are NICs inside. ``oversubscription``: by how much
    less all of them have together (4 in a 4:1 fat tree).

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
    uplinks: int | None = None
    oversubscription: float = 1.0

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
        if self.uplinks is not None and (self.uplinks < 1 or self.nics_per_host is not None):
            raise ClusterError(f"link {self.name}: uplinks = {self.uplinks}, nics_per_host = {self.nics_per_host}: "
                               "give either uplinks, 1 or more, of all hosts inside together, or the NICs of a host")
        if not 1 <= self.oversubscription < math.inf:
            raise ClusterError(f"link {self.name}: oversubscription = {self.oversubscription:g}: must be at least 1; "
                               "4 where a fourth of what the NICs inside send can leave at a time")
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
    waits for the last rank. ``slower``: a factor on all seconds. ``network``: the first level whose link carries what
    goes further out, too, as NICs and switches do and NVLink does not; -1: the outermost.
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
    network: int = -1

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
