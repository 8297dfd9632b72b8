"""Hosts as network namespaces, joined by links of a chosen bandwidth.

Each host has a veth to a bridge in a namespace of its own, the switch. A token bucket (tc tbf) on both ends of the veth
shapes what the host sends and receives; one on its loopback shapes what its ranks tell one another, because packets to
an address of the same host take the loopback. Delay is not emulated.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autoparallel.errors import AutoparallelError
from cost_models.unequal import Slow

#: Largest packets. tbf drops what is larger than its burst, so loopback (65,536 else) and offloading are cut down.
NIC_MTU, LOOPBACK_MTU, OFFLOAD_BYTES = 9000, 16384, 16384
BURST_BYTES, QUEUE_BYTES = 32 * 2**10, 64 * 2**20
#: Each as TCP on a cluster's network would be set: no loss to react to, no forgetting of windows while devices compute.
SYSCTLS = ("net.ipv4.tcp_congestion_control=reno", "net.ipv4.tcp_slow_start_after_idle=0")
PREFIX = "apc"
#: Milliseconds for which a real-time process keeps its core from others; the machine's, and put back after a run.
TURN = Path("/proc/sys/kernel/sched_rr_timeslice_ms")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
Command = tuple[str, ...]


class EmulationError(AutoparallelError, RuntimeError):
    """The network cannot be built as asked, or did not behave."""


@dataclass(frozen=True)
class Topology:
    """``hosts`` of ``ranks_per_host``; rates in tc's words: ``inter`` of each NIC and direction, ``intra`` of loopback
    (both directions together). Numbers of hosts: ``slow`` ones compute at half the speed, ``thin`` ones have NICs of
    half the rate."""

    hosts: int = 4
    ranks_per_host: int = 2
    inter: str = "200mbit"
    intra: str = "1gbit"
    slow: tuple[int, ...] = ()
    thin: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not {*self.slow, *self.thin} <= set(range(self.hosts)):
            raise EmulationError(f"slow hosts {self.slow} and thin ones {self.thin} are numbers from 0 to "
                                 f"{self.hosts - 1}")
        if not 1 <= self.hosts <= 200 or self.ranks_per_host < 1:
            raise EmulationError(f"1 to 200 hosts and at least one rank on each, not {self.hosts} and "
                                 f"{self.ranks_per_host}")
        for rate in (self.inter, self.intra):
            bytes_per_s(rate)

    @property
    def num_ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def name(self) -> str:
        unequal = f", hosts {self.slow} slow, {self.thin} thin" if self.slow or self.thin else ""
        return f"{self.hosts}x{self.ranks_per_host}, {self.inter}, {self.intra} inside{unequal}"

    def rate_of(self, host: int) -> str:
        """Of a host's NIC, in tc's words."""
        return f"{bytes_per_s(self.inter) * 4:.0f}bit" if host in self.thin else self.inter

    def slowed(self) -> tuple[Slow, ...]:
        """The same of a cluster's description."""
        each = self.ranks_per_host
        return tuple(Slow(tuple(rank for host in some for rank in range(host * each, (host + 1) * each)), *shares)
                     for some, shares in ((self.slow, (0.5, 1.0)), (self.thin, (1.0, 0.5))) if some)


def bytes_per_s(rate: str) -> float:
    """Bytes per second of a rate in tc's words.

    >>> bytes_per_s("500mbit")
    62500000.0
    """
    number, unit = rate[:-4], rate[-4:]
    try:
        value = float(number) * _UNITS[unit] / 8
    except (KeyError, ValueError):
        value = 0.0
    if not value > 0:
        raise EmulationError(f"cannot read the rate {rate!r}: write for example 500mbit or 4gbit")
    return value


def missing() -> str | None:
    """Why no network can be built here; None when it can."""
    if os.geteuid() != 0:
        return "it takes root to make network namespaces"
    absent = [program for program in ("ip", "tc", "sysctl") if shutil.which(program) is None]
    if absent:
        return f"{' and '.join(absent)} not found: install iproute2 and procps"
    if not os.access(TURN, os.W_OK):
        return f"{TURN} cannot be written"
    return _refused()


def _refused() -> str | None:
    """Try what containers and small kernels may refuse: a namespace, and tbf in it."""
    name = f"{PREFIX}{os.getpid()}-try"
    tbf = _tbf("1gbit")
    try:
        for command in (("ip", "netns", "add", name), ("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", *tbf)):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                return f"{' '.join(command)}: {done.stderr.strip()}"
        return None
    finally:
        subprocess.run(("ip", "netns", "del", name), capture_output=True)


class Network:
    """The namespaces of one run; see `network`."""

    def __init__(self, topology: Topology, prefix: str) -> None:
        self.topology, self.prefix = topology, prefix
        self.switch = f"{prefix}-switch"
        self.hosts = [f"{prefix}-host{i}" for i in range(topology.hosts)]

    @staticmethod
    def address(host: int) -> str:
        return f"10.83.0.{host + 1}"

    def host_of(self, rank: int) -> str:
        """The namespace of a rank: ranks fill one host after the other."""
        return self.hosts[rank // self.topology.ranks_per_host]

    def commands(self) -> list[Command]:
        """What builds it."""
        made = [("ip", "netns", "add", self.switch),
                ("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge"),
                ("ip", "-n", self.switch, "link", "set", "bridge", "mtu", str(NIC_MTU), "up")]
        for number, host in enumerate(self.hosts):
            made += self._host_commands(number, host)
        return made

    def _host_commands(self, number: int, host: str) -> list[Command]:
        port, offload = f"port{number}", ("gso_max_size", str(OFFLOAD_BYTES))
        rate = self.topology.rate_of(number)
        return [
            ("ip", "netns", "add", host),
            ("ip", "-n", host, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self.switch),
            ("ip", "-n", host, "address", "add", f"{self.address(number)}/24", "dev", "eth0"),
            ("ip", "-n", host, "link", "set", "eth0", "mtu", str(NIC_MTU), *offload, "up"),
            ("ip", "-n", host, "link", "set", "lo", "mtu", str(LOOPBACK_MTU), *offload, "up"),
            ("ip", "-n", self.switch, "link", "set", port, "master", "bridge", "mtu", str(NIC_MTU), *offload, "up"),
            ("tc", "-n", host, "qdisc", "add", "dev", "eth0", "root", *_tbf(rate)),
            ("tc", "-n", self.switch, "qdisc", "add", "dev", port, "root", *_tbf(rate)),
            ("tc", "-n", host, "qdisc", "add", "dev", "lo", "root", *_tbf(self.topology.intra)),
            ("ip", "netns", "exec", host, "sysctl", "-qw", *SYSCTLS),
        ]

    def drops(self) -> int:
        """Packets that any queue dropped since the network was built: there must be none."""
        return sum(dropped(_run(("tc", "-s", "-j", "-n", name, "qdisc"))) for name in (self.switch, *self.hosts))

    def remove(self) -> None:
        for name in (*self.hosts, self.switch):
            subprocess.run(("ip", "netns", "del", name), capture_output=True)


@contextmanager
def network(topology: Topology) -> Iterator[Network]:
    """The network while the block runs; removed afterwards, whatever happened."""
    made = Network(topology, f"{PREFIX}{os.getpid()}")
    try:
        for command in made.commands():
            _run(command)
        yield made
    finally:
        made.remove()


def dropped(statistics: str) -> int:
    """Packets dropped according to ``tc -s -j qdisc``."""
    return sum(int(queue.get("drops", 0)) for queue in json.loads(statistics or "[]"))


def _tbf(rate: str) -> Command:
    return ("tbf", "rate", rate, "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES))


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise EmulationError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
