"""Training state outside of device memory: seconds of an optimizer step on the host, with states there or on disk; and
the share of a device's speed that a bandwidth leaves (ZeRO-Infinity's form)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cost_models import memory
from cost_models.cluster import ITEM_BYTES, Cluster
from cost_models.errors import ClusterError


@dataclass(frozen=True)
class HostStep:
    """Seconds of what goes on at once while a tile is stepped, for all tiles of a rank; numbers or arrays.

    ``fetch_s``: gradients (and parameters, if no master is on the host) from the device, and states from disk.
    ``step_s``: the optimizer, bound by host memory. ``put_s``: parameters to the device, and states to disk.
    """

    fetch_s: Any
    step_s: Any
    put_s: Any

    @property
    def total_s(self) -> Any:
        """With many tiles: the longest of the three."""
        return np.maximum(np.maximum(self.fetch_s, self.step_s), self.put_s)


def host_step(num_elements: Any, dtype: str, optimizer: str, cluster: Cluster, on_disk: bool = False,
              gradients_there: bool = False, parameters_there: bool = False) -> HostStep:
    """The step of ``num_elements`` elements (arrays allowed) of a dtype or precision by a rank's host.
    ``gradients_there``: they have come during backward; ``parameters_there``: these live on the host. Raises
    ClusterError where the cluster's description has no rate of what moves."""
    kept, how, elements = memory.precision(dtype), memory.recipe(optimizer), np.asarray(num_elements, dtype=float)
    host = cluster.host
    fetch = put = np.zeros_like(elements)
    if not host.shared_memory and not (gradients_there and parameters_there):
        parameter = ITEM_BYTES[kept.parameter]
        down = (0 if gradients_there else ITEM_BYTES[kept.gradient]) + (0 if kept.master else parameter)
        fetch = elements * down / known_rate(cluster, "from_device_bytes_per_s")
        put = elements * parameter / known_rate(cluster, "to_device_bytes_per_s")
    rate = _memory_rate(cluster)
    if on_disk:
        states = how.num_states * ITEM_BYTES[kept.state] + (ITEM_BYTES[kept.master] if kept.master else 0)
        fetch = fetch + elements * states / known_rate(cluster, "disk_read_bytes_per_s")
        put = put + elements * states / known_rate(cluster, "disk_write_bytes_per_s")
    return HostStep(fetch, elements * memory.step_bytes(dtype, optimizer) / rate, put)


def gradients_s(num_bytes: Any, cluster: Cluster, adds: bool = False) -> Any:
    """Seconds of moving gradients to the host's memory; ``adds``: to others there, while the next ones come. Raises
    ClusterError where the cluster's description has no rate of what moves."""
    moved = np.asarray(num_bytes, dtype=float)
    host = (3 if adds else 0) * moved / _memory_rate(cluster)    # the new, and the sum read and written
    if cluster.host.shared_memory:
        return np.maximum(2 * moved / _memory_rate(cluster), host)
    return np.maximum(moved / known_rate(cluster, "from_device_bytes_per_s"), host)


def fetch_s(num_bytes: Any, cluster: Cluster) -> Any:
    """Seconds of moving parameters from the host's memory to the device. Raises ClusterError where the cluster's
    description has no rate of it."""
    moved = np.asarray(num_bytes, dtype=float)
    if cluster.host.shared_memory:
        return 2 * moved / _memory_rate(cluster)
    return moved / known_rate(cluster, "to_device_bytes_per_s")


def _memory_rate(cluster: Cluster) -> float:
    """Bytes per second of the host's memory for one device."""
    if cluster.host.shared_memory:
        return min(kind.device.memory_bandwidth_bytes_per_s * kind.device.memory_bandwidth_efficiency
                   for kind in cluster.kinds())
    return known_rate(cluster, "memory_bandwidth_bytes_per_s")


def known_rate(cluster: Cluster, name: str) -> float:
    """A rate of a cluster's host. Raises ClusterError if it is not known."""
    rate = float(getattr(cluster.host, name))
    if not rate:
        raise ClusterError(f"cluster {cluster.name} does not say how fast its hosts move data: add {name} to [host] of "
                           "its description")
    return rate


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
