"""From measurements to a machine: fits of alpha, beta and efficiency, and the TOML file. The measuring is elsewhere.

All fits minimise the relative error, because sizes span decades; all give back residuals, to be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from cost_models.cluster import ALGORITHMS, UNLIMITED, Cluster, Curve, Group, Link
from cost_models.collectives import all_gather_s, all_reduce_s, all_to_all_s, broadcast_s, reduce_scatter_s, send_recv_s
from cost_models.errors import ClusterError

_SECONDS: dict[str, Callable[[Any, Group], Any]] = {
    "all_reduce": all_reduce_s,
    "all_gather": all_gather_s,
    "reduce_scatter": reduce_scatter_s,
    "all_to_all": all_to_all_s,
    "broadcast": broadcast_s,
    "send_recv": send_recv_s,
}


@dataclass(frozen=True)
class Sample:
    """One measurement: a collective of ``nbytes`` (as in `cost_models.collectives`) among ``num_ranks``."""

    num_ranks: int
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class Fit:
    """alpha and beta, and by sample (predicted - measured)/measured."""

    alpha_s: float
    beta_s_per_byte: float
    residuals: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        """Mean absolute relative error."""
        return float(np.mean(np.abs(self.residuals)))


def fit_alpha_beta(nbytes: Sequence[float], seconds: Sequence[float], messages: Sequence[float] | None = None) -> Fit:
    """The alpha, beta >= 0 that minimise sum ((messages alpha + nbytes beta - seconds)/seconds)^2.

    >>> fit = fit_alpha_beta([0.0, 1e6, 2e6], [1e-5, 1.1e-4, 2.1e-4])
    >>> f"{fit.alpha_s:.1e} {fit.beta_s_per_byte:.1e} {fit.mean_error:.3f}"
    '1.0e-05 1.0e-10 0.000'

    Raises ClusterError for fewer than two samples, or seconds that are not positive.
    """
    b, t = np.asarray(nbytes, dtype=float), np.asarray(seconds, dtype=float)
    m = np.ones_like(b) if messages is None else np.asarray(messages, dtype=float)
    if len(b) < 2 or b.shape != t.shape or m.shape != t.shape or not (t > 0).all() or not (b >= 0).all():
        raise ClusterError("a fit needs at least two pairs of bytes and seconds, seconds above 0; got "
                           f"{len(b)} bytes and {len(t)} seconds")
    columns = np.stack([m / t, b / t], axis=1)
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    best = (np.inf, np.zeros(2))
    for kept in ([0, 1], [0], [1]):    # non-negative least squares of two unknowns, by cases
        part, *_ = np.linalg.lstsq(columns[:, kept] / scale[kept], np.ones_like(t), rcond=None)
        x = np.zeros(2)
        x[kept] = part / scale[kept]
        error = float(((columns @ x - 1) ** 2).sum())
        if (x >= 0).all() and error < best[0]:
            best = (error, x)
    x = best[1]
    return Fit(float(x[0]), float(x[1]), tuple(float(r) for r in columns @ x - 1))


def fit_link(
    name: str, num_devices: int, samples: Mapping[str, Sequence[Sample]], launch_s: float = 0.0
) -> tuple[Link, dict[str, tuple[float, ...]]]:
    """A link from measurements of collectives on groups inside it, and the relative residuals of each.

    alpha and bandwidth are those of a ring for "all_reduce", which must be among the samples; each other collective
    gets the slow-down factor that minimises its relative error.
    """
    if len(samples.get("all_reduce", ())) < 2:
        raise ClusterError(f"link {name}: needs two all_reduce samples or more; has {sorted(samples)}")
    n, b, t = _columns(samples["all_reduce"])
    fit = fit_alpha_beta(list(2 * (n - 1) / n * b), list(np.maximum(t - launch_s, 1e-9)), list(2 * (n - 1)))
    link = Link(name, num_devices, fit.alpha_s, 1.0 / max(fit.beta_s_per_byte, 1e-15))
    slowdown = {}
    for collective, measured in samples.items():
        if collective != "all_reduce":
            ratio = np.array([_predict(collective, s, link, 0.0) / max(s.seconds - launch_s, 1e-9) for s in measured])
            slowdown[collective] = float(ratio.sum() / (ratio**2).sum())
    link = Link(name, num_devices, link.alpha_s, link.bandwidth_bytes_per_s, slowdown)
    residuals = {collective: tuple(_predict(collective, s, link, launch_s) / s.seconds - 1 for s in measured)
                 for collective, measured in samples.items()}
    return link, residuals


def _columns(samples: Sequence[Sample]) -> np.ndarray:
    return np.array([(s.num_ranks, s.nbytes, s.seconds) for s in samples], dtype=float).T


def _predict(collective: str, sample: Sample, link: Link, launch_s: float) -> float:
    group = Group(((sample.num_ranks, link),), launch_s, algorithms=("ring",))
    return float(_SECONDS[collective](sample.nbytes, group))


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


def write_cluster(path: str | Path, cluster: Cluster, source: str = "") -> None:
    """Write a TOML file that `Cluster.load` reads back as the same cluster.

    Numbers keep the sources that the cluster knows; others get ``source``, which should say when, on what and with
    which versions they were measured.
    """
    Path(path).write_text(cluster_toml(cluster, source), encoding="utf-8")


def cluster_toml(cluster: Cluster, source: str = "") -> str:
    """The text of such a file."""

    def line(path: str, value: object) -> str:
        known = cluster.sources.get(path, "") or source
        key = path.rsplit(".", 1)[-1]
        return f"{key} = {{ value = {_toml(value)}, source = {_toml(known)} }}" if known else f"{key} = {_toml(value)}"

    def table(path: str, values: Mapping[str, object], header: str = "") -> list[str]:
        entries = [line(f"{path}.{key}", value) for key, value in values.items()]
        return ["", f"[{header or path}]", *entries] if entries else []

    d = cluster.device
    lines = [f"name = {_toml(cluster.name)}"]
    if cluster.algorithms != ALGORITHMS:
        lines.append(f"algorithms = {_toml(list(cluster.algorithms))}")
    lines += ["", "[device]", f"name = {_toml(d.name)}"]
    lines += [line(f"device.{key}", getattr(d, key)) for key in (
        "memory_bytes", "memory_bandwidth_bytes_per_s", "memory_bandwidth_efficiency", "launch_s", "reserved_bytes")]
    for key in ("peak_flops_per_s", "efficiency", "memory_efficiency"):
        lines += table(f"device.{key}", getattr(d, key))
    if d.tiles:
        lines += table("device.tiles", {key: value for key, value in vars(d.tiles).items() if value is not None})
    lines += table("host", {key: value for key, value in vars(cluster.host).items() if value})
    for i, link in enumerate(cluster.links):
        reached: object = "unlimited" if link.num_devices == UNLIMITED else link.num_devices
        lines += ["", "[[links]]", f"name = {_toml(link.name)}", line(f"links.{i}.num_devices", reached)]
        lines += [line(f"links.{i}.{key}", getattr(link, key)) for key in ("alpha_s", "bandwidth_bytes_per_s")]
        if link.nics_per_host is not None:
            lines.append(line(f"links.{i}.nics_per_host", link.nics_per_host))
        lines += table(f"links.{i}.slowdown", link.slowdown, "links.slowdown")
        ways = {name: [p.base_s, p.alpha_s, p.share] for name, p in link.protocols.items()}
        lines += table(f"links.{i}.protocols", ways, "links.protocols")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)
