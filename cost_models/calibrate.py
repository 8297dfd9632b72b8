"""From measurements to a machine: fits of alpha, beta and efficiency, and the TOML file.

The measuring is in `autoparallel.calibration.measure`, which needs torch.

All fits minimise the mean relative error, because sizes span decades; all give back residuals, to be looked at.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from cost_models.cluster import Cluster, Correction
from cost_models.collectives import all_gather_s, all_reduce_s, all_to_all_s, broadcast_s, reduce_scatter_s, send_recv_s
from cost_models.compute import MATRIX, op_time_s
from cost_models.description import from_table, known_clusters
from cost_models.devices import Curve, Device
from cost_models.errors import ClusterError
from cost_models.files import write_whole
from cost_models.links import ALGORITHMS, COLLECTIVES, ENDLESS, UNLIMITED, Group, Link
from cost_models.memory import optimizer_step_s, step_bytes
from cost_models.timeline import Task, equal_slowdown, simulate

_SECONDS: dict[str, Callable[[Any, Group], Any]] = {
    "all_reduce": all_reduce_s,
    "all_gather": all_gather_s,
    "reduce_scatter": reduce_scatter_s,
    "all_to_all": all_to_all_s,
    "broadcast": broadcast_s,
    "send_recv": send_recv_s,
}


#: How often a fit weighs its measurements.
ROUNDS = 12
#: No collective is taken to be faster than the formula by more.
LEAST_SLOWDOWN = 0.05


@dataclass(frozen=True)
class Measured:
    """One measurement on a cluster: a collective of ``nbytes`` along one axis of a mesh, by all groups at once."""

    collective: str
    mesh_shape: tuple[int, ...]
    axis: int
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class MeasuredOp:
    """One measurement on a device: a matrix product or attention of ``size`` FLOP (of a causal one half of all), or a
    pointwise op, a reduction or a parameter's step by AdamW that moves ``size`` bytes (of a step, those of
    `memory.step_bytes`)."""

    op_class: str
    size: float
    seconds: float
    dtype: str = "float32"


@dataclass(frozen=True)
class MeasuredOverlap:
    """One measurement of compute overlapped with a collective, in seconds: ``compute_s`` and ``collective_s`` alone,
    ``seconds`` together. ``ahead``: the share of the compute that was done when the collective was launched."""

    collective: str
    compute_s: float
    collective_s: float
    ahead: float
    seconds: float


def _non_negative(columns: np.ndarray, goal: np.ndarray | None = None) -> np.ndarray:
    """The x >= 0 that minimises the sum of |columns x - goal| (1 by default), so that a disturbed measurement does not
    bend the others' fit: least squares, weighed anew by what is left (Weiszfeld 1937)."""
    goal = np.ones(len(columns)) if goal is None else goal
    weights = np.ones(len(columns))
    found = []
    for _ in range(ROUNDS):
        x = _least_squares(columns, goal, weights)
        left = np.abs(columns @ x - goal)
        found.append((float(left.sum()), x))
        weights = 1 / np.maximum(left, 1e-3)
    return min(found, key=lambda one: one[0])[1]


def _least_squares(columns: np.ndarray, goal: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimises the sum of weights (columns x - goal)^2: a few unknowns, by which of them are not 0."""
    unknowns, roots = columns.shape[1], np.sqrt(weights)
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    best = (np.inf, np.zeros(unknowns))
    for kept in ([i for i in range(unknowns) if case >> i & 1] for case in range(2**unknowns)):
        x = np.zeros(unknowns)
        if kept:
            part, *_ = np.linalg.lstsq(columns[:, kept] / scale[kept] * roots[:, None], goal * roots, rcond=None)
            x[kept] = part / scale[kept]
        error = float((weights * (columns @ x - goal) ** 2).sum())
        if (x >= 0).all() and error < best[0]:
            best = (error, x)
    return best[1]


def fit_links(cluster: Cluster, measured: Sequence[Measured]) -> tuple[Cluster, tuple[float, ...]]:
    """The cluster with the alpha, bandwidth and slow-downs of its links and the times of calls that fit the
    measurements, and by measurement (predicted - measured)/measured.

    What the links are called, join, share and save up (`Link.burst_bytes`) is taken from ``cluster``; their bandwidths
    there are the most that they can have. Collectives run as rings. A measurement counts for the outermost link that
    it crosses. Alphas and bandwidths are those of all_reduce, of which every link needs two measurements or more; other
    collectives get a factor by link.
    """
    links = tuple(replace(link, slowdown={}, protocols={}, relay_s_per_byte=0.0) for link in cluster.links)
    blank = replace(cluster, algorithms=("ring",), call_s=dict.fromkeys(COLLECTIVES, 0.0), links=links)
    outermost = [_outermost(blank, m) for m in measured if m.collective == "all_reduce"]
    short = [link.name for number, link in enumerate(links) if outermost.count(number) < 2]
    if short:
        raise ClusterError(f"links {short} need two all_reduce measurements or more, on groups that cross "
                           "no link further out")
    fitted = _best_of(_all_reduce_fits(blank, [m for m in measured if m.collective == "all_reduce"]))
    others = {m.collective: None for m in measured if m.collective != "all_reduce"}
    for collective in others:
        fitted = _best_of(_other_fits(fitted, collective, [m for m in measured if m.collective == collective]))
    calls = {kind: seconds for kind, seconds in fitted.call_s.items() if kind == "all_reduce" or kind in others}
    fitted = replace(fitted, call_s=calls)
    return fitted, tuple(predicted_s(fitted, m) / m.seconds - 1 for m in measured)


def predicted_s(cluster: Cluster, measured: Measured) -> float:
    """Seconds that the cluster predicts for a measurement."""
    return float(_SECONDS[measured.collective](measured.nbytes, cluster.group(measured.mesh_shape, measured.axis)))


def _outermost(cluster: Cluster, measured: Measured) -> int:
    """Number of the outermost link that the measured groups cross."""
    levels = cluster.group(measured.mesh_shape, measured.axis).levels
    return max(number for number, (count, _) in enumerate(levels) if count > 1)


#: A fitted cluster, and the sum of its relative errors.
Fitted = tuple[float, Cluster]


def _best_of(fits: Iterable[Fitted]) -> Cluster:
    return min(fits, key=lambda fit: fit[0])[1]


def _error(cluster: Cluster, measured: Sequence[Measured]) -> float:
    return float(sum(abs(predicted_s(cluster, m) / m.seconds - 1) for m in measured))


def _parts(cluster: Cluster, measured: Sequence[Measured]) -> np.ndarray:
    """By measurement, what its messages and what its bytes take alone, in its seconds."""
    endless = tuple(replace(link, bandwidth_bytes_per_s=ENDLESS, relay_s_per_byte=0.0) for link in cluster.links)
    prompt = tuple(replace(link, alpha_s=0.0) for link in cluster.links)
    silent = replace(cluster, call_s=dict.fromkeys(cluster.call_s, 0.0))
    alone = replace(silent, links=endless), replace(silent, links=prompt)
    return np.array([[predicted_s(part, m) / m.seconds for part in alone] for m in measured])


def _weights(cluster: Cluster, measured: Sequence[Measured]) -> np.ndarray:
    """How much of messages and bytes each measurement shows: all where they add up; where they take
    H = sqrt(M^2 + B^2) = M/H M + B/H B, as much as they are of it."""
    parts = _parts(cluster, measured)
    saves = np.array([cluster.links[_outermost(cluster, m)].burst_bytes > 0 for m in measured])
    return np.where(saves[:, None], parts / np.maximum(np.hypot(*parts.T), 1e-12)[:, None], 1.0)


def _all_reduce_fits(blank: Cluster, measured: Sequence[Measured]) -> Iterator[Fitted]:
    """Time of a call, alphas, bandwidths and relays. A ring is linear in them (in 1/bandwidth) once the weights of its
    parts are known; they are those of the fit before."""
    weights = np.ones((len(measured), 2))
    alphas, betas, relays = _shown_by_rings(blank, measured)
    least = np.array([link.beta_s_per_byte for link in blank.links])
    for _ in range(ROUNDS):
        messages, traffic = weights[:, :1], weights[:, 1:]
        call = np.array([[1 / m.seconds] for m in measured])
        columns = np.concatenate([call, messages * alphas, traffic * betas, traffic * relays], axis=1)
        call_s, *rest = _non_negative(columns, 1 - (traffic * betas) @ least)
        alpha_s, more, relay_s = np.split(np.array(rest), 3)
        rates = 1 / np.maximum(least + more, 1e-15)
        links = tuple(replace(link, alpha_s=float(alpha_s[i]), bandwidth_bytes_per_s=float(rates[i]),
                              relay_s_per_byte=float(relay_s[i])) for i, link in enumerate(blank.links))
        fitted = replace(blank, links=links, call_s={**blank.call_s, "all_reduce": float(call_s)})
        yield _error(fitted, measured), fitted
        weights = _weights(fitted, measured)


def _shown_by_rings(blank: Cluster, measured: Sequence[Measured]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By measurement and link, what a second of alpha, of beta and of relay adds to its time, in its seconds: what is
    predicted where all others are nothing. A relay shows beside a beta as long, on links that groups had to themselves
    and shared; else it cannot be told from the beta."""
    nothing = tuple(replace(link, alpha_s=0.0, bandwidth_bytes_per_s=ENDLESS) for link in blank.links)

    def alone(number: int, link: Link, m: Measured) -> float:
        links = (*nothing[:number], link, *nothing[number + 1:])
        return predicted_s(replace(blank, links=links), m) / m.seconds

    alphas = [[alone(i, replace(link, alpha_s=1.0), m) for i, link in enumerate(nothing)] for m in measured]
    betas, both = (np.array([[alone(i, replace(link, bandwidth_bytes_per_s=1.0, relay_s_per_byte=relay), m)
                              if i == _outermost(blank, m) else 0.0 for i, link in enumerate(nothing)]
                             for m in measured]) for relay in (0.0, 1.0))
    relays = both - betas
    crossing = betas > 0
    told = np.any(crossing & (relays < 0.5 * betas), axis=0) & np.any(crossing & (relays > 0.5 * betas), axis=0)
    return np.array(alphas), betas, relays * told


def _other_fits(cluster: Cluster, collective: str, measured: Sequence[Measured]) -> Iterator[Fitted]:
    """Time of a call, and by link how many times what the formula says its messages and bytes cost."""
    outermost = np.array([_outermost(cluster, m) for m in measured])
    numbers = sorted(set(outermost.tolist()))
    parts, weights = _parts(cluster, measured), np.ones((len(measured), 2))
    for _ in range(ROUNDS):
        call = np.array([[1 / m.seconds] for m in measured])
        seconds = (weights * parts).sum(axis=1)
        columns = np.concatenate([call, np.where(outermost[:, None] == numbers, seconds[:, None], 0.0)], axis=1)
        call_s, *factors = _non_negative(columns)
        links = list(cluster.links)
        for number, factor in zip(numbers, factors, strict=True):
            slowdown = {**links[number].slowdown, collective: max(float(factor), LEAST_SLOWDOWN)}
            links[number] = replace(links[number], slowdown=slowdown)
        fitted = replace(cluster, links=tuple(links), call_s={**cluster.call_s, collective: float(call_s)})
        yield _error(fitted, measured), fitted
        weights = _weights(fitted, measured)


def fit_efficiency(sizes: Sequence[float], seconds: Sequence[float], peak_per_s: float, launch_s: float = 0.0) -> Curve:
    """A curve for `Device` from sizes (FLOP or bytes) and seconds: shares of the peak, at most 1, rising no faster than
    the size; repeated sizes count by their geometric mean."""
    x, t = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    if not len(x) or x.shape != t.shape or not (x > 0).all() or not (t > 0).all() or peak_per_s <= 0:
        raise ClusterError("an efficiency curve needs sizes and seconds above 0, as many of one as of the other")
    share = np.clip(x / peak_per_s / np.maximum(t - launch_s, 1e-12), 1e-9, 1.0)
    points = [(float(size), float(np.exp(np.log(share[x == size]).mean()))) for size in np.unique(x)]
    curve = points[:1]
    for (x0, _), (x1, y1) in pairwise(points):
        curve.append((x1, min(y1, curve[-1][1] * x1 / x0)))
    return tuple(curve)


def fit_device(name: str, measured: Sequence[MeasuredOp], memory_bytes: float) -> Device:
    """A device from products, pointwise ops and, if they are there, attention, reductions and optimizer steps: the
    least of a pointwise op's seconds is its launch, the best rates are the peaks (of products by dtype), and curves say
    how much of them each size reaches (of products in the dtype with the highest peak). Steps have no launch of their
    own. Raises ClusterError without products and pointwise ops in float32."""
    products, attention, traffic, reductions, steps = (
        [m for m in measured if m.op_class == kind]
        for kind in ("matmul", "attention", "pointwise", "reduction", "optimizer"))
    if not traffic or not any(m.dtype == "float32" for m in products):
        raise ClusterError("a device needs measurements of op classes matmul and pointwise in float32; has "
                           f"{sorted({f'{m.op_class} in {m.dtype}' for m in measured})}")
    launch_s = min(m.seconds for m in traffic)

    def best(some: Iterable[MeasuredOp]) -> float:
        return max(m.size / max(m.seconds - launch_s, m.seconds / 10) for m in some)

    peaks = {dtype: best(m for m in products if m.dtype == dtype) for dtype in dict.fromkeys(m.dtype for m in products)}

    fastest = max(peaks, key=lambda dtype: peaks[dtype])    # in which models run; smaller products of others reach more

    def curve(some: Sequence[MeasuredOp], rate: float, launch_s: float = launch_s) -> Curve:
        return fit_efficiency([m.size for m in some], [m.seconds for m in some], rate, launch_s)

    bandwidth = best(traffic)
    moved = {"default": curve(traffic, bandwidth)}
    if reductions:
        moved["reduction"] = curve(reductions, bandwidth)
    if steps:
        moved["optimizer"] = curve(steps, bandwidth, 0.0)
    classes = {"matmul": [m for m in products if m.dtype == fastest],
               "attention": [m for m in attention if m.dtype == fastest]}
    return Device(name, peaks, bandwidth, moved["default"][-1][1], memory_bytes, launch_s,
                  {name: curve(some, peaks[fastest]) for name, some in classes.items() if some}, moved)


def predicted_op_s(device: Device, measured: MeasuredOp) -> float:
    """Seconds that the device predicts for a measurement."""
    if measured.op_class == "optimizer":
        return float(optimizer_step_s(measured.size / step_bytes("float32", "adamw"), "float32", "adamw", device))
    flops, nbytes = (0.0, measured.size) if measured.op_class not in MATRIX else (measured.size, 0.0)
    return float(op_time_s(measured.op_class, flops, nbytes, measured.dtype, device))


def fit_overlap_slowdown(measured: Sequence[MeasuredOverlap]) -> float:
    """The `Device.overlap_slowdown` whose simulated seconds are closest to the measured ones, in steps of 0.01.

    >>> fit_overlap_slowdown([MeasuredOverlap("all_reduce", 2.0, 1.0, 0.0, 2.25),
    ...                       MeasuredOverlap("all_reduce", 2.0, 2.0, 0.5, 3.25)])
    1.25
    """
    if not measured:
        raise ClusterError("how much compute and communication slow each other takes a measurement of both")
    tried = [1 + step / 100 for step in range(101)]
    return min(tried, key=lambda slowdown: sum(abs(predicted_overlap_s(slowdown, m) / m.seconds - 1) for m in measured))


def predicted_overlap_s(slowdown: float, measured: MeasuredOverlap) -> float:
    """The simulated seconds of a measurement."""
    first, rest = measured.ahead * measured.compute_s, (1 - measured.ahead) * measured.compute_s
    tasks = [Task(first), Task(measured.collective_s, "network", after=(0,)), Task(rest)]
    return simulate(tasks, equal_slowdown(["compute", "network"], slowdown)).total_s


def write_cluster(path: str | Path, cluster: Cluster, source: str = "") -> None:
    """Write a TOML file that `Cluster.load` reads back as the same cluster. Raises ClusterError where none does.

    Numbers keep the sources that the cluster knows; others get ``source``, which should say when, on what and with
    which versions they were measured.
    """
    text = cluster_toml(cluster, source)
    try:
        found = from_table(tomllib.loads(text.encode().decode()), str(path))  # (UTF-8 has no lone surrogates)
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"the cluster {cluster.name!r} cannot be written: {error}") from error
    if found != cluster:
        odd = [one.name for one in fields(cluster) if one.compare
               and getattr(found, one.name) != getattr(cluster, one.name)]
        raise ClusterError(f"the cluster {cluster.name!r} cannot be written: {', '.join(odd)} would be read back as "
                           "another one")
    write_whole(path, text)


def told_apart(cluster: Cluster) -> str:
    """The description of a cluster that has a known one's name and other figures, as a file that was calibrated or
    corrected may; "" of all others, which their names tell."""
    if cluster.name not in known_clusters():
        return ""
    software = "none" if cluster.profile is None else cluster.profile.software
    try:
        if cluster == Cluster.load(cluster.name, cluster.num_devices, software):
            return ""
    except ClusterError:    # the known one has fewer devices
        pass
    return cluster_toml(replace(cluster, sources={}))


def of_description(text: str, num_devices: int, software: str | None) -> Cluster:
    """So many devices of the cluster that `told_apart` described. Raises ClusterError."""
    try:
        return from_table(tomllib.loads(text), "the plan's cluster", num_devices, software)
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"the plan's description of its cluster is not TOML: {error}") from error


def cluster_toml(cluster: Cluster, source: str = "") -> str:
    """The text of such a file."""

    def line(path: str, value: object) -> str:
        known = cluster.sources.get(path, "") or source
        return entry(path.rsplit(".", 1)[-1], value, known)

    def entry(key: str, value: object, known: str) -> str:
        key = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)
        return f"{key} = {{ value = {_toml(value)}, source = {_toml(known)} }}" if known else f"{key} = {_toml(value)}"

    def table(path: str, values: Mapping[str, object], header: str = "") -> list[str]:
        entries = [entry(key, value, cluster.sources.get(f"{path}.{key}", "") or source)
                   for key, value in values.items()]
        return ["", f"[{header or path}]", *entries] if entries else []

    d = cluster.device
    lines = [f"name = {_toml(cluster.name)}", f"num_devices = {cluster.num_devices}"]
    if cluster.profile:
        lines += [f"machine = {_toml(cluster.profile.machine)}", f"software = {_toml(cluster.profile.software)}"]
    if cluster.algorithms != ALGORITHMS:
        lines.append(f"algorithms = {_toml(list(cluster.algorithms))}")
    lines += ["", "[device]", f"name = {_toml(d.name)}"]
    lines += [line(f"device.{key}", getattr(d, key)) for key in (
        "memory_bytes", "memory_bandwidth_bytes_per_s", "memory_bandwidth_efficiency", "launch_s", "reserved_bytes",
        "overlap_slowdown")]
    for key in ("peak_flops_per_s", "efficiency", "memory_efficiency"):
        lines += table(f"device.{key}", getattr(d, key))
    if d.tiles:
        lines += table("device.tiles", {key: value for key, value in vars(d.tiles).items() if value is not None})
    lines += table("call_s", cluster.call_s)
    if cluster.correction != Correction():
        lines += table("correction", vars(cluster.correction))
    lines += table("host", {key: value for key, value in vars(cluster.host).items() if value})
    for i, link in enumerate(cluster.links):
        reached: object = "unlimited" if link.num_devices == UNLIMITED else link.num_devices
        lines += ["", "[[links]]", f"name = {_toml(link.name)}", line(f"links.{i}.num_devices", reached)]
        lines += [line(f"links.{i}.{key}", getattr(link, key)) for key in ("alpha_s", "bandwidth_bytes_per_s")]
        plain = Link("", 1, 0.0, 1.0)
        lines += [line(f"links.{i}.{key}", getattr(link, key)) for key in (
            "burst_bytes", "relay_s_per_byte", "nics_per_host", "uplinks", "oversubscription")
            if getattr(link, key) != getattr(plain, key)]
        lines += table(f"links.{i}.slowdown", link.slowdown, "links.slowdown")
        ways = {name: [p.base_s, p.alpha_s, p.share] for name, p in link.protocols.items()}
        lines += table(f"links.{i}.protocols", ways, "links.protocols")
    each = cluster.devices_per_host
    for other in cluster.others:
        lines += ["", "[[hosts]]", f"device = {_toml(other.like)}",
                  f"hosts = {_toml(sorted({n // each for n in other.devices}))}"]
    for number, slow in enumerate(cluster.slow):
        lines += ["", "[[slow]]", f"devices = {_toml(slow.devices)}"]
        lines += [line(f"slow.{number}.{key}", getattr(slow, key)) for key in ("speed", "bandwidth", "failed_nics")
                  if key != "failed_nics" or slow.failed_nics]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, str):  # TOML's basic strings have JSON's escapes, and take no DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(int(value) if isinstance(value, Integral) else float(value))  # type: ignore[arg-type]
