"""TOML descriptions of clusters: reading with errors that name file, key and what is required; and writing.

A number is written plainly or, better, with its source: ``alpha_s = { value = 5e-6, source = "..." }``. A file may be
``based_on`` a known cluster and say only what differs; a list of links replaces the whole list, of which each may be
``like`` a link of the known cluster.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from cost_models import tori
from cost_models.cluster import Cluster, Correction, devices_of_host
from cost_models.devices import OP_CLASSES, OVERLAP_SLOWDOWN, PEAK_DTYPES, Curve, Device, Host, Tiles
from cost_models.errors import ClusterError
from cost_models.files import is_nested, nearest, read_regular
from cost_models.links import ALGORITHMS, COLLECTIVES, UNLIMITED, Link, Protocol
from cost_models.profile import Profile, check_software
from cost_models.unequal import OtherHosts, Slow, worse_host, worse_link

#: The known cluster of processes on one machine, without GPUs.
LOCAL_CPU = "local-cpu"
#: The device of a calibrated cluster of CPUs.
CPU_PROCESS = "one process"
#: Entries of networks in `profiles.toml`, by the first word of a link's name.
NETWORKS = {"infiniband": "infiniband", "roce": "roce", "omni-path": "omni-path"}
#: Of a description (known ones have 5 kB): its size, and how deep its lists and tables lie in one another.
MOST_BYTES, MOST_DEEP = 2**20, 8
#: Of a number in it, either way; and of bytes, bytes per second and FLOP per second, above 0.
MOST, LEAST = 1e300, 1e5
_NUMBER = '{ value = 1.0, source = "where it comes from" }'
_HOST = {
    "memory_bytes": "bytes of memory of one host",
    "to_device_bytes_per_s": "bytes per second from host memory to a device that reads alone",
    "from_device_bytes_per_s": "bytes per second from a device that writes alone to host memory",
    "disk_read_bytes_per_s": "bytes per second and device read from the host's disk",
    "disk_write_bytes_per_s": "bytes per second and device written to the host's disk",
    "memory_bandwidth_bytes_per_s": "bytes per second and device that the host's processors read and write in memory",
    "step_elements_per_s": "elements per second and device that the host's processors step, were memory endless",
    "shared_memory": "1 if the devices' memory is the host's, else 0",
    "devices": "devices of one host, where that is not what the outermost link's NICs are shared by",
    "devices_per_switch": "devices that share one PCIe link to the host",
}


def known_clusters() -> list[str]:
    """Names that `Cluster.load` knows."""
    folder = resources.files("cost_models") / "clusters"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def cluster_of_device(reported: str) -> str | None:
    """The known cluster of devices whose driver reports this name (`torch.cuda.get_device_name`); None: none is.

    >>> cluster_of_device("NVIDIA H100 80GB HBM3")
    'h100-sxm'
    >>> cluster_of_device("NVIDIA H100 80GB HBM3 MIG 1g.10gb")    # a part of one is another device
    """
    return next((one for one in known_clusters() if reported in tomllib.loads(_text(one)).get("reported_as", ())), None)


def is_gpu(device: str) -> bool | None:
    """Whether devices of this name are GPUs: of a known cluster, or as calibration names them; None: not known.

    >>> is_gpu("H100 SXM5 80GB"), is_gpu("NVIDIA H100 80GB HBM3"), is_gpu(CPU_PROCESS), is_gpu("ours")
    (True, True, False, None)
    """
    if device == CPU_PROCESS:
        return False
    known = next((one for one in known_clusters() if load(one).device.name == device), None) or \
        cluster_of_device(device)
    return None if known is None else known != LOCAL_CPU


def _text(name: str) -> str:
    return (resources.files("cost_models") / "clusters" / f"{name}.toml").read_text("utf-8")


def load(name_or_path: str | Path, num_devices: int | None = None, software: str | None = None) -> Cluster:
    """See `Cluster.load`."""
    data, where = _read(name_or_path)
    return from_table(data, where, num_devices, software)


def _read(name_or_path: str | Path) -> tuple[dict[str, Any], str]:
    """The table of a known cluster or a file, with what it is based on filled in, and where it was found. A file based
    on a known cluster is the same machine to `profiles.toml`."""
    if not isinstance(name_or_path, (str, Path)):
        raise ClusterError(f"the cluster is of type {type(name_or_path).__name__}: give a Cluster, a known name "
                           f"({', '.join(known_clusters())}) or the path of a TOML file")
    if "\0" in str(name_or_path):
        raise ClusterError(f"{_told(str(name_or_path))} is no path: it has a null character")
    path = Path(name_or_path)
    if str(name_or_path) in known_clusters():
        where = f"cost_models/clusters/{name_or_path}.toml"
        text = _text(str(name_or_path))
    elif path.suffix == ".toml" and _exists(path):
        where = str(path)
        try:
            text = read_regular(path, MOST_BYTES).decode("utf-8")
        except (OSError, ValueError) as error:
            raise ClusterError(f"cannot read {where}: {error}") from error
    else:
        tori.refuse(path.stem)
        missing = "there is no such file; " if path.suffix == ".toml" else ""
        meant = nearest(str(name_or_path), known_clusters())
        raise ClusterError(f"unknown cluster {_told(str(name_or_path))}{meant}: {missing}known are "
                           f"{', '.join(known_clusters())}; or give the path of a TOML file "
                           "(cost_models/README.md says how to write one)")
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # (numbers of more digits than Python takes are a ValueError)
        raise ClusterError(f"{where} is not TOML: {error}") from error
    if is_nested(data, MOST_DEEP):
        raise ClusterError(f"{where} is not a cluster: its lists and tables lie more than {MOST_DEEP} deep")
    if str(name_or_path) in known_clusters():
        data.pop("reported_as", None)
    base = data.pop("based_on", None)
    if base is None:
        if str(name_or_path) in known_clusters():
            data.setdefault("machine", str(name_or_path))
        return data, where
    if base not in known_clusters() or base == str(name_or_path):
        raise ClusterError(f"{where}: based_on = {_told(base)} must be another known cluster: "
                           f"{', '.join(known_clusters())}")
    if str(name_or_path) in known_clusters():
        data.setdefault("machine", str(name_or_path))
    elif "name" not in data or data["name"] in known_clusters():    # by it a saved plan finds its cluster again
        said = f"name = {_told(data['name'])} is a known cluster's" if "name" in data else "name is missing"
        raise ClusterError(f'{where}: {said}; required: a name of its own, as name = "ours", since it may differ from '
                           f"{base}")
    known = _read(base)[0]
    if isinstance(data.get("links"), list):
        data["links"] = [_like(link, known["links"], f"{where}: links.{i}") for i, link in enumerate(data["links"])]
        each = load(base).devices_per_host
        if any(isinstance(link, dict) and _plain(link.get("num_devices")) == each for link in data["links"]):
            data.setdefault("host", {}).setdefault("devices", {"value": each, "source": f"hosts of {base}"})
    return _merged(known, data), where


def _plain(value: Any) -> Any:
    """A value, with or without its source."""
    return value.get("value") if isinstance(value, dict) else value


def _like(link: Any, known: Sequence[Mapping[str, Any]], where: str) -> Any:
    """A link's table; with ``like`` that of the base's link of this name, and what differs."""
    if not isinstance(link, dict) or "like" not in link:
        return link
    changes = {key: value for key, value in link.items() if key != "like"}
    for one in known:
        if one["name"] == link["like"]:
            apart = {"nics_per_host"} if "uplinks" in changes else set()    # a link has one of both
            return _merged({key: value for key, value in one.items() if key not in apart}, changes)
    raise ClusterError(f"{where}.like = {_told(link['like'])} must be a link of what the file is based on: "
                       f"{', '.join(one['name'] for one in known)}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _told(value: Any) -> str:
    """A value of a file in a message, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]} ..."


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        tables = isinstance(old, dict) and isinstance(value, dict) and "value" not in value
        result[key] = _merged(old, value) if tables and isinstance(old, dict) else value
    return result


class _Table:
    """One table of a file: hands out checked values, remembers their sources, and knows which keys were never asked."""

    def __init__(self, data: Any, file: str, path: str, sources: dict[str, str]) -> None:
        if not isinstance(data, dict):
            raise ClusterError(f"{file}: {path or 'the file'} must be a table, not {_told(data)}")
        self.data, self.file, self.path, self.sources = data, file, path, sources
        self.asked: set[str] = set()

    def name_of(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def is_said(self, key: str, value: Any) -> str:
        """``file: key = value``, of a message."""
        return f"{self.file}: {_key(self.name_of(key))} = {_told(value)}"

    def raw(self, key: str, required: str, default: Any = None) -> Any:
        """The plain value; ``required`` says what it is and how to write it."""
        self.asked.add(key)
        if key not in self.data:
            if default is not None:
                return default
            meant = nearest(key, [name for name in self.data if name not in self.asked])
            raise ClusterError(f"{self.file}: {self.name_of(key)} is missing{meant}; required: {required}")
        value = self.data[key]
        if isinstance(value, dict) and "value" in value:
            self.sources[self.name_of(key)] = str(value.get("source", ""))
            extra = set(value) - {"value", "source"}
            if extra:
                raise ClusterError(f"{self.file}: {self.name_of(key)} has {sorted(extra)}; write {_NUMBER}")
            return value["value"]
        return value

    def number(self, key: str, meaning: str, default: float | None = None) -> float:
        value = self.raw(key, f"{meaning}, as {_NUMBER}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ClusterError(f"{self.is_said(key, value)} is not a number; required: {meaning}")
        if not abs(value) <= MOST:
            raise ClusterError(f"{self.is_said(key, value)} is not finite, or beyond {MOST:g}; "
                               f"required: {meaning}")
        return float(value)

    def amount(self, key: str, meaning: str, default: float | None = None) -> float:
        """Bytes or FLOP, a second or not: at least `LEAST`, below which a number is of GB, GB/s or TFLOP/s."""
        value = self.number(key, meaning, default)
        if 0 < value < LEAST:
            raise ClusterError(f"{self.is_said(key, value)} is below {LEAST:,.0f}; required: {meaning}, without a "
                               "unit's prefix (80 GB are 80e9, 45 GB/s 45e9, 989 TFLOP/s 989e12)")
        return value

    def numbers(self, value: Any, count: int) -> tuple[float, ...] | None:
        """A list of so many finite numbers, None for anything else."""
        good = isinstance(value, list) and len(value) == count and all(
            isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= MOST for x in value)
        return tuple(map(float, value)) if good else None

    def whole(self, key: str, meaning: str, default: float | None = None) -> int:
        value = self.number(key, meaning, default)
        if value != int(value):
            raise ClusterError(f"{self.is_said(key, value)} is not a whole number; required: "
                               f"{meaning}")
        return int(value)

    def text(self, key: str, meaning: str) -> str:
        value = self.raw(key, meaning)
        if not isinstance(value, str) or not value.strip():
            raise ClusterError(f"{self.is_said(key, value)} is not text; required: {meaning}")
        return value

    def table(self, key: str, meaning: str, optional: bool = False) -> _Table:
        value = self.raw(key, f"a table [{self.name_of(key)}]: {meaning}", {} if optional else None)
        return _Table(value, self.file, self.name_of(key), self.sources)

    def curve(self, key: str) -> Curve:
        value = self.raw(key, "pairs of size and share")
        pairs = [self.numbers(pair, 2) for pair in value] if isinstance(value, list) else [None]
        if any(pair is None for pair in pairs):
            raise ClusterError(f"{self.is_said(key, value)}; required: pairs [size, share of the "
                               "peak]")
        return tuple((x, y) for x, y in (pair for pair in pairs if pair is not None))

    def protocol(self, key: str) -> Protocol:
        value = self.raw(key, "a protocol")
        try:
            return Protocol(*(self.numbers(value, 3) or (-1.0, 0.0, 0.0)))
        except ClusterError as error:
            raise ClusterError(f"{self.is_said(key, value)}; required: [seconds of a call, seconds "
                               "per message, share of the bandwidth]") from error

    def finish(self) -> None:
        self.only(self.asked)

    def only(self, known: Collection[str]) -> None:
        """Raises ClusterError for a key that is not one of these."""
        unknown = sorted(set(self.data) - set(known))
        if unknown:
            raise ClusterError(f"{self.file}: {_key(self.name_of(unknown[0]))}{nearest(unknown[0], known)} is not a "
                               f"key that is known here; known are {', '.join(sorted(known))}")


def _key(path: str) -> str:
    """A key in a message: quoted if it is odd, cut short."""
    return path if path.isprintable() and len(path) <= 80 else _told(path)


def from_table(data: Any, where: str, num_devices: int | None = None, software: str | None = None) -> Cluster:
    """The cluster that a parsed TOML file describes; ``where`` names the file in errors."""
    sources: dict[str, str] = {}
    top = _Table(data, where, "", sources)
    name = top.text("name", "the cluster's name")
    tori.refuse_described(top.data, where)
    if "about" in top.data:
        top.text("about", "what the machine is")
    device = _device(top.table("device", "name, memory_bytes, memory_bandwidth_bytes_per_s, peak_flops_per_s, ..."))
    listed = top.raw("links", "at least one [[links]] table, from inside a host outwards")
    if not isinstance(listed, list) or not listed:
        raise ClusterError(f"{where}: links must be [[links]] tables, from inside a host outwards, not {_told(listed)}")
    links = tuple(_link(_Table(entry, where, f"links.{i}", sources), i == len(listed) - 1)
                  for i, entry in enumerate(listed))
    if len({link.name for link in links}) < len(links):
        raise ClusterError(f"{where}: links {_told([link.name for link in links])} have a name twice: give each its "
                           "own")
    algorithms = top.raw("algorithms", f"a list of some of {ALGORITHMS}", list(ALGORITHMS))
    if not isinstance(algorithms, list) or not all(isinstance(way, str) for way in algorithms):
        raise ClusterError(f"{where}: algorithms = {_told(algorithms)}; required: a list of some of "
                           f"{list(ALGORITHMS)}")
    if len(set(algorithms)) < len(algorithms):
        raise ClusterError(f"{where}: algorithms = {_told(algorithms)} has one twice")
    known = top.table("host", "what devices of a host share", optional=True)
    host = Host(**{key: (known.amount if "bytes" in key else known.number)(key, meaning, 0.0)
                   for key, meaning in _HOST.items()})
    known.finish()
    calls = top.table("call_s", "seconds of a call by collective", optional=True)
    calls.only(COLLECTIVES)
    call_s = {kind: calls.number(kind, "seconds of one call beside its messages") for kind in calls.data}
    told = top.table("correction", "what measured steps showed beside predicted ones", optional=True)
    correction = _correction(told)
    profile = _profile(top, links[-1].name, software)
    default = top.whole("num_devices", "devices when none are asked for", float(devices_of_host(links, host)))
    slow, others = _tables(top, "slow"), _tables(top, "hosts")
    top.finish()
    count = default if num_devices is None else num_devices
    try:
        found = Cluster(name, device, links, count, tuple(algorithms), host, call_s, sources, profile, correction)
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from error
    return _with_unequal(found, slow, others) if slow or others else found


def _tables(top: _Table, key: str) -> list[_Table]:
    """The tables of a list, which may be left out."""
    listed = top.raw(key, f"[[{key}]] tables", [])
    if not isinstance(listed, list):
        raise ClusterError(f"{top.is_said(key, listed)}; required: [[{key}]] tables, with two brackets")
    return [_Table(entry, top.file, f"{key}.{number}", top.sources) for number, entry in enumerate(listed)]


def _with_unequal(cluster: Cluster, slow: Sequence[_Table], hosts: Sequence[_Table]) -> Cluster:
    """The cluster with its slow devices and its hosts of another kind, which take what links, calls and host memory
    are to the slower of both kinds."""
    where = (slow or hosts)[0].file
    try:
        taken = 0
        for table in reversed(hosts):    # a count is of the last hosts that no later table has
            other, counted = _other_hosts(table, cluster, taken)
            taken += counted
            cluster = _worse(replace(cluster, others=(other, *cluster.others)), _named(table, cluster))
        return replace(cluster, slow=tuple(_slow(table, cluster) for table in slow))
    except ClusterError as error:
        raise error if str(error).startswith(where) else ClusterError(f"{where}: {error}") from error


def _slow(table: _Table, cluster: Cluster) -> Slow:
    speed = table.number("speed", "the share of the others' speed, 0.5 for half", 1.0)
    bandwidth = table.number("bandwidth", "the share of the others' bandwidth between hosts", 1.0)
    failed = table.whole("failed_nics", "how many of a host's network cards have failed", 0.0)
    given = [key for key in ("devices", "hosts") if key in table.data]
    if len(given) != 1 or not {"speed", "bandwidth", "failed_nics"} & table.data.keys():
        raise ClusterError(f"{table.file}: [[{table.path.partition('.')[0]}]] has {sorted(table.data)}; required: "
                           "devices = [8, 9] or hosts = [1], numbered from 0, and some of speed = 0.5, bandwidth = "
                           "0.5, failed_nics = 1")
    numbers = _numbers(table, given[0])
    table.finish()
    try:
        return Slow(numbers if given[0] == "devices" else _devices_on(numbers, cluster), speed, bandwidth,
                    failed)
    except ClusterError as error:
        raise ClusterError(f"{table.file}: {table.path}: {error}") from error


def _other_hosts(table: _Table, cluster: Cluster, taken: int) -> tuple[OtherHosts, int]:
    """The hosts of a table, and how many were given by their count; ``taken``: of the last ones by later tables."""
    found, given = _named(table, cluster), [key for key in ("count", "hosts") if key in table.data]
    if len(given) != 1:
        raise ClusterError(f"{table.file}: {table.path} has {sorted(table.data)}; required: device = \"h100-sxm\" and "
                           "either count = 2 (the last hosts) or hosts = [2, 3], numbered from 0")
    whole = cluster.num_devices // cluster.devices_per_host
    if given == ["hosts"]:
        numbers, count = _numbers(table, "hosts"), 0
    else:
        count = table.whole("count", "how many hosts, the last of the cluster")
        if not 1 <= count <= whole - taken:
            raise ClusterError(f"{table.is_said('count', count)}: {cluster.num_devices} devices have "
                               f"{whole - taken} whole hosts of {cluster.devices_per_host} for it: set num_devices "
                               "to those of all hosts together, or load the cluster with as many")
        numbers = tuple(range(whole - taken - count, whole - taken))
    table.finish()
    return OtherHosts(table.data["device"], _devices_on(numbers, cluster), found.device, found.profile), count


def _named(table: _Table, cluster: Cluster) -> Cluster:
    """The known cluster whose device and hosts a table of hosts names, under the software of ``cluster``."""
    name = table.text("device", "a known cluster, whose device these hosts have")
    if name not in known_clusters():
        raise ClusterError(f"{table.is_said('device', name)}{nearest(name, known_clusters())} is not known; required: "
                           f"one of {', '.join(known_clusters())}")
    return load(name, software="none" if cluster.profile is None else cluster.profile.software)


def _numbers(table: _Table, key: str) -> tuple[int, ...]:
    given = table.raw(key, "a list of numbers from 0")
    if not isinstance(given, list) or not given or not all(type(one) is int and one >= 0 for one in given):
        raise ClusterError(f"{table.is_said(key, given)}; required: a list of whole numbers from 0 on, as [0, 1]")
    if len(set(given)) < len(given):
        raise ClusterError(f"{table.is_said(key, given)} has a number twice")
    return tuple(given)


def _devices_on(hosts: Collection[int], cluster: Cluster) -> tuple[int, ...]:
    """The devices of hosts; of one that is partly used those that are. Raises ClusterError for a host that the cluster
    has not."""
    each, count = cluster.devices_per_host, cluster.num_devices
    if max(hosts) * each >= count:
        raise ClusterError(f"host {max(hosts)} is named, and {count} devices are on hosts 0-{(count - 1) // each}, of "
                           f"{each} each: load the cluster with num_devices={(max(hosts) + 1) * each}, or name devices")
    return tuple(n for host in sorted(hosts) for n in range(host * each, min(count, (host + 1) * each)))


def _worse(cluster: Cluster, other: Cluster) -> Cluster:
    """The cluster with links, calls and host memory that are no better than those of ``other``'s hosts; the link
    between hosts is the cluster's, by the NICs of the slower."""
    mine, theirs = ([link.num_devices if link.num_devices < UNLIMITED else "all" for link in one.links]
                    for one in (cluster, other))
    if mine != theirs or cluster.devices_per_host != other.devices_per_host:
        raise ClusterError(f"hosts like {other.name} have {other.devices_per_host} devices, on links that join "
                           f"{theirs}, and those of {cluster.name} {cluster.devices_per_host}, on links that join "
                           f"{mine}: all hosts must have as many; plan for each kind of hosts apart")
    algorithms = tuple(way for way in cluster.algorithms if way in other.algorithms)
    calls = {kind: max(one.call_s.get(kind, one.device.launch_s) for one in (cluster, other))
             for kind in dict.fromkeys([*cluster.call_s, *other.call_s])}
    links = tuple(map(worse_link, cluster.links, other.links))
    return replace(cluster, links=(*links[:-1], replace(links[-1], name=cluster.links[-1].name)), call_s=calls,
                   host=worse_host(cluster.host, other.host), algorithms=algorithms)


def _correction(table: _Table) -> Correction:
    plain = Correction()
    values = {key: table.number(key, "a factor, or seconds", value) for key, value in vars(plain).items()}
    table.finish()
    try:
        return Correction(**values)
    except ClusterError as error:
        raise ClusterError(f"{table.file}: {error}") from error


def _profile(top: _Table, network: str, software: str | None) -> Profile | None:
    """The fitted constants of the machine and of the software asked for, or else of the file's own."""
    machine = top.raw("machine", "a known cluster whose fitted constants apply", "default")
    if machine not in ("default", *known_clusters()):
        raise ClusterError(f"{top.file}: machine = {_told(machine)}; required: a known cluster whose fitted constants "
                           f"apply, one of {', '.join(known_clusters())}")
    stated = top.raw("software", "a software profile", "none")
    wanted = stated if software is None else software
    if isinstance(wanted, str) and wanted == "none":
        return None
    return Profile.of(machine, check_software(wanted), NETWORKS.get(network.split()[0].lower(), "default"))


def _device(d: _Table) -> Device:
    peaks = d.table("peak_flops_per_s", "dense FLOP per second by dtype name, float32 at least")
    work, traffic = (d.table(key, "curves by op class", optional=True) for key in ("efficiency", "memory_efficiency"))
    peaks.only(PEAK_DTYPES)
    for curves in (work, traffic):
        curves.only(OP_CLASSES)
    peak = {dtype: peaks.amount(dtype, "FLOP per second") for dtype in peaks.data}
    values = {
        "memory_bandwidth_bytes_per_s": d.amount("memory_bandwidth_bytes_per_s", "bytes per second, read and write"),
        "memory_bandwidth_efficiency": d.number("memory_bandwidth_efficiency", "achieved share of it, in (0, 1]"),
        "memory_bytes": d.amount("memory_bytes", "bytes of one device's memory"),
        "launch_s": d.number("launch_s", "seconds of the smallest op"),
        "reserved_bytes": d.number("reserved_bytes", "bytes lost to context and libraries", 0.0),
        "overlap_slowdown": d.number("overlap_slowdown", "slowdown of compute and communication while they overlap",
                                     OVERLAP_SLOWDOWN),
        "price_per_hour": d.number("price_per_hour", "price of one device for an hour", 0.0),
        "watts": d.number("watts", "power of one device with its share of the host", 0.0),
    }
    name = d.text("name", "the device's name")
    cut = d.table("tiles", "how matrix products are cut", optional=True)
    d.finish()
    try:
        return Device(name=name, peak_flops_per_s=peak, **values, tiles=_tiles(cut) if cut.data else None,
                      efficiency={op_class: work.curve(op_class) for op_class in work.data},
                      memory_efficiency={op_class: traffic.curve(op_class) for op_class in traffic.data})
    except ClusterError as error:
        raise ClusterError(f"{d.file}: {error}") from error


def _tiles(table: _Table) -> Tiles:
    table.only([field.name for field in fields(Tiles)])
    units = table.whole("units", "multiprocessors")
    optional = {key: table.number(key, "see cost_models.cluster.Tiles") for key in table.data if key != "units"}
    table.finish()
    try:
        return Tiles(units=int(units), **optional)
    except TypeError as error:
        raise ClusterError(f"{table.file}: {table.path} has {sorted(table.data)}; required: units and share, optional "
                           "ramp, misaligned and low_precision_share") from error


def _link(table: _Table, outermost: bool) -> Link:
    name = table.text("name", "the link's name")
    meaning = "how many neighbouring devices it joins" + (', or "unlimited"' if outermost else "")
    reached = table.raw("num_devices", meaning, UNLIMITED if outermost else None)
    reached = UNLIMITED if outermost and reached == "unlimited" else reached
    if isinstance(reached, bool) or not isinstance(reached, int) or not reached <= UNLIMITED:
        raise ClusterError(f"{table.file}: {table.name_of('num_devices')} = {_told(reached)}; required: {meaning}")
    nics = table.whole("nics_per_host", "network cards that the devices of a host share", 0.0)
    wires = table.whole("uplinks", "wires that all devices of the next inner link share", 0.0)
    thinner = table.number("oversubscription", "4 where a fourth of what the NICs inside send can leave", 1.0)
    slow = table.table("slowdown", "factors by collective", optional=True)
    slow.only(COLLECTIVES)
    factors = {kind: slow.number(kind, "seconds per byte over those of an ideal ring") for kind in slow.data}
    ways = table.table("protocols", "alternatives by name", optional=True)
    protocols = {way: ways.protocol(way) for way in ways.data}
    alpha = table.number("alpha_s", "seconds per message")
    bandwidth = table.amount("bandwidth_bytes_per_s", "bytes per second of one device in one direction")
    burst = table.number("burst_bytes", "bytes of a collective that pass at once", 0.0)
    relay = table.number("relay_s_per_byte", "seconds of a rank for a byte before it takes the next", 0.0)
    table.finish()
    try:
        shared, risers = (int(count) if key in table.data else None
                          for key, count in (("nics_per_host", nics), ("uplinks", wires)))
        return Link(name, reached, alpha, bandwidth, factors, shared, protocols, burst, relay, risers, thinner)
    except ClusterError as error:
        raise ClusterError(f"{table.file}: {error}") from error
