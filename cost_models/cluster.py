"""Machines as data: devices, links and the groups that mesh axes form on them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from cost_models.errors import ClusterError

Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Device:
    """One accelerator (or one process of a CPU cluster).

    ``peak_flops_per_s`` by dtype name. ``launch_s`` is the fixed time of one op or collective. ``efficiency`` gives for
    each op class a curve of (FLOP of one call, achieved share of the peak).
    """

    name: str
    peak_flops_per_s: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    memory_bandwidth_efficiency: float
    memory_bytes: float
    launch_s: float
    efficiency: Mapping[str, Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what in ("memory_bandwidth_bytes_per_s", "memory_bandwidth_efficiency", "memory_bytes"):
            if not getattr(self, what) > 0:
                raise ClusterError(f"device {self.name}: {what} must be positive, not {getattr(self, what)}")
        if self.launch_s < 0 or not self.peak_flops_per_s or min(self.peak_flops_per_s.values()) <= 0:
            raise ClusterError(f"device {self.name}: launch_s must not be negative and every peak must be positive")
        for op_class, curve in self.efficiency.items():
            if not curve or any(not 0 < e <= 1 for _, e in curve) or list(curve) != sorted(curve):
                raise ClusterError(f"device {self.name}: efficiency.{op_class} must be [FLOP, share in (0, 1]] pairs "
                                   "with growing FLOP")


@dataclass(frozen=True)
class Link:
    """The wires of one level: what ``num_devices`` devices reach one another by.

    ``alpha_s`` seconds per message, ``bandwidth_bytes_per_s`` per device and direction when all devices of a host send
    at once. ``slowdown`` by collective kind (1 when absent): time over that of an ideal ring.
    """

    name: str
    num_devices: int
    alpha_s: float
    bandwidth_bytes_per_s: float
    slowdown: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_devices < 1 or self.alpha_s < 0 or self.bandwidth_bytes_per_s <= 0:
            raise ClusterError(f"link {self.name}: needs num_devices >= 1, alpha_s >= 0, bandwidth_bytes_per_s > 0")

    @property
    def beta_s_per_byte(self) -> float:
        return 1.0 / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class Group:
    """The ranks along a mesh axis: ``levels`` are (how many, by which link), from the innermost link outwards.

    Sixteen devices in two hosts of eight: ``((8, nvlink), (2, infiniband))``.
    """

    levels: tuple[tuple[int, Link], ...]
    launch_s: float

    @property
    def size(self) -> int:
        size = 1
        for count, _ in self.levels:
            size *= count
        return size

    @property
    def slowest(self) -> Link:
        """The slowest link that the group crosses."""
        crossed = [link for count, link in self.levels if count > 1] or [self.levels[0][1]]
        return min(crossed, key=lambda link: link.bandwidth_bytes_per_s)


@dataclass(frozen=True)
class Cluster:
    """``num_devices`` equal devices joined by ``links``, from inside a host outwards.

    Ranks are laid out row-major on a mesh: the last axis runs over neighbours, so over the fastest links.
    """

    name: str
    device: Device
    links: tuple[Link, ...]
    num_devices: int

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise ClusterError(f"cluster {self.name}: {self.num_devices} devices; at least one is required")
        sizes = [link.num_devices for link in self.links]
        if not sizes or sizes != sorted(sizes):
            raise ClusterError(f"cluster {self.name}: links must be listed from inside outwards, num_devices growing")

    @staticmethod
    def load(name_or_path: str | Path, num_devices: int | None = None) -> Cluster:
        """A cluster by name (see `known_clusters`) or from a TOML file; by default one host of it.

        >>> Cluster.load("h100-sxm", num_devices=64).num_devices
        64

        Raises ClusterError for an unknown name or a description that misses something.
        """
        path = Path(name_or_path)
        if str(name_or_path) in known_clusters():
            text = (resources.files("cost_models") / "clusters" / f"{name_or_path}.toml").read_text("utf-8")
        elif path.suffix == ".toml" and path.exists():
            text = path.read_text("utf-8")
        else:
            raise ClusterError(f"unknown cluster {str(name_or_path)!r}: known are {', '.join(known_clusters())}; "
                               "or give the path of a TOML file (cost_models/README.md says how to write one)")
        try:
            return _from_toml(tomllib.loads(text), num_devices)
        except tomllib.TOMLDecodeError as error:
            raise ClusterError(f"{name_or_path} is not TOML: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise ClusterError(f"{name_or_path}: the description needs {error}") from error

    def group(self, mesh_shape: Sequence[int], axis: int) -> Group:
        """How the groups along one mesh axis cross the links (of several groups the worst)."""
        return self.group_of(mesh_shape, (axis,))

    def group_of(self, mesh_shape: Sequence[int], axes: Sequence[int]) -> Group:
        """The same for the groups over several axes together."""
        return _group(self, tuple(mesh_shape), tuple(axes))


@lru_cache(maxsize=256)
def _crossings(mesh_shape: tuple[int, ...], axes: tuple[int, ...], domain: int) -> int:
    """In how many domains of ``domain`` neighbouring ranks the members of a group lie, at most."""
    ranks = np.arange(int(np.prod(mesh_shape))).reshape(mesh_shape)
    order = [a for a in range(len(mesh_shape)) if a not in axes] + list(axes)
    members = ranks.transpose(order).reshape(-1, int(np.prod([mesh_shape[a] for a in axes])))
    homes = np.sort(members // domain, axis=1)
    return int((np.diff(homes, axis=1) > 0).sum(axis=1).max()) + 1


def _group(cluster: Cluster, mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> Group:
    size = int(np.prod(mesh_shape))
    if size > cluster.num_devices:
        raise ClusterError(f"a mesh of {mesh_shape} needs {size} devices, the cluster {cluster.name} has "
                           f"{cluster.num_devices}: load it with num_devices={size}")
    left = int(np.prod([mesh_shape[a] for a in axes]))
    levels = []
    for number, link in enumerate(cluster.links):
        last = number == len(cluster.links) - 1
        outside = 1 if last else _crossings(mesh_shape, axes, link.num_devices)
        count = -(-left // outside)
        levels.append((count, link))
        left = outside
    return Group(tuple(levels), cluster.device.launch_s)


def known_clusters() -> list[str]:
    """Names that `Cluster.load` knows."""
    folder = resources.files("cost_models") / "clusters"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def _value(table: Any) -> Any:
    """A number, written plainly or as ``{ value = ..., source = "..." }``."""
    return table["value"] if isinstance(table, dict) else table


def _from_toml(data: dict[str, Any], num_devices: int | None) -> Cluster:
    d = data["device"]
    device = Device(
        name=d["name"],
        peak_flops_per_s={k: float(_value(v)) for k, v in d["peak_flops_per_s"].items()},
        memory_bandwidth_bytes_per_s=float(_value(d["memory_bandwidth_bytes_per_s"])),
        memory_bandwidth_efficiency=float(_value(d["memory_bandwidth_efficiency"])),
        memory_bytes=float(_value(d["memory_bytes"])),
        launch_s=float(_value(d["launch_s"])),
        efficiency={
            k: tuple((float(x), float(y)) for x, y in _value(v)) for k, v in d.get("efficiency", {}).items()
        },
    )
    links = tuple(
        Link(k["name"], int(_value(k["num_devices"])), float(_value(k["alpha_s"])),
             float(_value(k["bandwidth_bytes_per_s"])),
             {kind: float(_value(v)) for kind, v in k.get("slowdown", {}).items()})
        for k in data["links"]
    )
    return Cluster(data["name"], device, links, links[0].num_devices if num_devices is None else num_devices)
