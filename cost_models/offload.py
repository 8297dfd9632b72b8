"""Training state outside of device memory: seconds of an optimizer step on the host, with states there or on disk; and
the share of a device's speed that a bandwidth leaves (ZeRO-Infinity's form)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cost_models import memory
from cost_models.cluster import Cluster
from cost_models.devices import ITEM_BYTES
from cost_models.errors import ClusterError
from cost_models.links import UNLIMITED

#: Shares of a disk's rates at which parameters and gradients, in files mapped into memory, are read and written: of
#: direct I/O in large requests (docs/measurements/offload.md, "Ways to read and write").
MAPPED_READ, MAPPED_WRITE = 0.74, 0.35

#: Seconds in which a processor steps an element of a sparse gradient's rows, beside what the memory takes: torch sorts
#: the rows, and looks up, masks and adds each by itself (Adagrad, rows of 32; docs/measurements/gpu.md, 2026-11-27).
SPARSE_ELEMENT_S = 1.2e-8


@dataclass(frozen=True)
class HostStep:
    """Seconds of what goes on at once while a tile is stepped, for all tiles of a rank; numbers or arrays.

    ``fetch_s``: gradients (and parameters, if no master is on the host) from the device, and states from disk.
    ``step_s``: the optimizer on the host. ``put_s``: parameters to the device, and states to disk.
    """

    fetch_s: Any
    step_s: Any
    put_s: Any

    @property
    def total_s(self) -> Any:
        """With many tiles: the longest of the three."""
        return np.maximum(np.maximum(self.fetch_s, self.step_s), self.put_s)


def host_step(num_elements: Any, dtype: str, optimizer: str, cluster: Cluster, on_disk: bool = False,
              gradients_there: bool = False, parameters_there: bool = False, files: Collection[str] = ()) -> HostStep:
    """The step of ``num_elements`` elements (arrays allowed) of a dtype or precision by a rank's host.
    ``gradients_there``: they have come during backward; ``parameters_there``: these live on the host. ``files``: of
    "parameters" and "gradients" those that live on its disk, in files mapped into memory.

    Its ``step_s`` is the longer of the processors' own time, if known, and that of the host's memory, which all that
    is fetched and put passes too. Raises ClusterError where the cluster's description has no rate of what moves.
    """
    kept, how, elements = memory.precision(dtype), memory.recipe(optimizer), np.asarray(num_elements, dtype=float)
    host, down, up = cluster.host, 0.0, 0.0
    if not host.shared_memory and not (gradients_there and parameters_there):
        parameter = ITEM_BYTES[kept.parameter]
        down = (0 if gradients_there else ITEM_BYTES[kept.gradient]) + (0 if kept.master else parameter)
        up = parameter
    states = how.num_states * ITEM_BYTES[kept.state] + (ITEM_BYTES[kept.master] if kept.master else 0)
    states *= on_disk
    weights, sums = (ITEM_BYTES[item] * (name in files) for item, name in (
        (kept.parameter, "parameters"), (kept.gradient, "gradients")))
    read = states + (sums + (0 if kept.master else weights)) / MAPPED_READ
    fetch = _moving_s(elements, cluster, {"from_device_bytes_per_s": down, "disk_read_bytes_per_s": read})
    put = _moving_s(elements, cluster, {"to_device_bytes_per_s": up,
                                        "disk_write_bytes_per_s": states + weights / MAPPED_WRITE})
    step = elements * (step_bytes(dtype, optimizer, cluster) / _step_rate(cluster)
                       + (down + up + 2 * (states + weights) + sums) / _memory_rate(cluster))
    if host.step_elements_per_s:
        step = np.maximum(step, elements / known_rate(cluster, "step_elements_per_s"))
    return HostStep(fetch, step, put)


def _moving_s(elements: Any, cluster: Cluster, by_rate: Mapping[str, float]) -> Any:
    """Seconds of so many bytes of each element at each rate, one after another."""
    return elements * sum(num_bytes / known_rate(cluster, name) for name, num_bytes in by_rate.items() if num_bytes)


def step_bytes(dtype: str, optimizer: str, cluster: Cluster) -> float:
    """Bytes of an element that a step on the host reads and writes: the optimizer's own, and under a software profile
    its conversions and its norm, scaling and copies of gradients.

    >>> plain, torch_s = (Cluster.load("h100-sxm", software=name) for name in ("none", "torch-eager"))
    >>> step_bytes("float16-master", "adamw", plain), step_bytes("float16-master", "adamw", torch_s) > 40
    (28.0, True)
    """
    own = memory.step_bytes(dtype, optimizer)
    if (profile := cluster.profile) is None:
        return own
    return own + memory.converted_bytes(dtype) + profile.update_bytes


def gradients_s(num_bytes: Any, cluster: Cluster, adds: bool = False, on_disk: bool = False) -> Any:
    """Seconds of moving gradients to the host's memory; ``adds``: to others there, while the next ones come;
    ``on_disk``: then to mapped files. Raises ClusterError where the cluster's description has no rate of what moves."""
    if on_disk:
        rates = {"disk_write_bytes_per_s": 1 / MAPPED_WRITE, "disk_read_bytes_per_s": adds / MAPPED_READ}
        return gradients_s(num_bytes, cluster, adds) + _moving_s(np.asarray(num_bytes, dtype=float), cluster, rates)
    moved = np.asarray(num_bytes, dtype=float)
    passes = 4 if adds else 1                    # each comes; it and the sum are read, and the sum is written
    if cluster.host.shared_memory:
        return np.maximum(2, passes - 1) * moved / _memory_rate(cluster)
    return np.maximum(moved / known_rate(cluster, "from_device_bytes_per_s"), passes * moved / _memory_rate(cluster))


def fetch_s(num_bytes: Any, cluster: Cluster, on_disk: bool = False) -> Any:
    """Seconds of moving parameters from the host's memory to the device; ``on_disk``: from mapped files. Raises
    ClusterError where the cluster's description has no rate of it."""
    moved = np.asarray(num_bytes, dtype=float)
    if on_disk:
        return fetch_s(moved, cluster) + _moving_s(moved, cluster, {"disk_read_bytes_per_s": 1 / MAPPED_READ})
    if cluster.host.shared_memory:
        return 2 * moved / _memory_rate(cluster)
    return np.maximum(moved / known_rate(cluster, "to_device_bytes_per_s"), moved / _memory_rate(cluster))


def host_copy_s(num_bytes: Any, cluster: Cluster, to_device: bool) -> Any:
    """Moving ``num_bytes`` between a device's memory and its host's, while all devices of the cluster do. Raises
    ClusterError where the cluster does not say how fast that is."""
    rate = known_rate(cluster, "to_device_bytes_per_s" if to_device else "from_device_bytes_per_s")
    return max(kind.device.launch_s for kind in cluster.kinds()) + np.asarray(num_bytes, dtype=float) / rate


def saved_s(num_bytes: Any, cluster: Cluster, to_device: bool, on_disk: bool = False) -> Any:
    """Seconds of moving tensors that are saved for backward to the host's memory, or ``to_device``; ``on_disk``: on to
    a file, or from there, while others are copied. Raises ClusterError where the cluster's description has no
    rate of it."""
    copied_s = host_copy_s(num_bytes, cluster, to_device)
    if not on_disk:
        return copied_s
    rate = known_rate(cluster, "disk_read_bytes_per_s" if to_device else "disk_write_bytes_per_s")
    return np.maximum(copied_s, np.asarray(num_bytes, dtype=float) / rate)


def traffic_s(num_bytes: Any, cluster: Cluster) -> Any:
    """Seconds in which so many bytes pass the host's memory. Raises ClusterError where the cluster's description has no
    rate of it."""
    return np.asarray(num_bytes, dtype=float) / _memory_rate(cluster)


def _memory_rate(cluster: Cluster) -> float:
    """Bytes per second of the host's memory for one device."""
    if cluster.host.shared_memory:
        return min(kind.device.memory_bandwidth_bytes_per_s * kind.device.memory_bandwidth_efficiency
                   for kind in cluster.kinds())
    return known_rate(cluster, "memory_bandwidth_bytes_per_s")


def _step_rate(cluster: Cluster) -> float:
    """The part of it that the software's optimizer step reaches."""
    return _memory_rate(cluster) * (cluster.profile.host_memory if cluster.profile is not None else 1.0)


def known_rate(cluster: Cluster, name: str) -> float:
    """A rate of a cluster's host for each device, while all devices of the cluster are at work; as described, where a
    host has any number of devices. Raises ClusterError if it is not known.

    >>> from cost_models import Cluster
    >>> one, two, four, eight = (Cluster.load("a100-sxm", num_devices=n) for n in (1, 2, 4, 8))
    >>> known_rate(one, "to_device_bytes_per_s") / known_rate(two, "to_device_bytes_per_s")     # of the same switch
    2.0
    >>> known_rate(four, "memory_bandwidth_bytes_per_s") / known_rate(eight, "memory_bandwidth_bytes_per_s")
    2.0
    """
    rate, count = float(getattr(cluster.host, name)), cluster.devices_on_host
    if not rate:
        raise ClusterError(f"cluster {cluster.name} does not say how fast its hosts move data: add {name} to [host] of "
                           "its description")
    if name in ("to_device_bytes_per_s", "from_device_bytes_per_s"):
        return rate / max(1.0, min(cluster.host.devices_per_switch, count))
    whole = cluster.devices_per_host
    return rate if whole == UNLIMITED else rate * whole / count


def efficiency(flops_per_byte: float, bytes_per_s: float, flops_per_s: float) -> float:
    """The share of ``flops_per_s`` that a device has left when its data come at ``bytes_per_s`` and are used for
    ``flops_per_byte``, without overlap.

    >>> f"{efficiency(parameter_intensity(1024, 1), 70e9, 70e12):.1%}"    # ZeRO-Infinity, section 4
    '50.6%'
    """
    done = flops_per_byte * bytes_per_s
    return done / (done + flops_per_s)


def parameter_intensity(sequence: float, batch: float) -> float:
    """FLOP for each byte of parameters and gradients in 16 bits: 8 per parameter and token with recompute, over four
    transfers of two bytes."""
    return sequence * batch


def state_intensity(sequence: float, batch: float) -> float:
    """FLOP for each byte of optimizer states: as above, 16 bytes of a parameter's states read and written."""
    return sequence * batch / 4


def checkpoint_intensity(hidden: float, interval: float) -> float:
    """FLOP for each byte of activations kept for recompute, one in ``interval`` blocks."""
    return 24 * hidden * interval
