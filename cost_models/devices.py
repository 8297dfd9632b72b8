"""Devices and hosts as data: rates, memory, and efficiency curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from cost_models.errors import ClusterError

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
              "float4_e2m1fn": 0.5}

#: Points of an efficiency curve: (FLOP or bytes of one call, achieved share of the peak), sizes growing.
Curve = tuple[tuple[float, float], ...]

#: By how much compute and communication of GPUs take longer while both run: what Galvatron takes where nobody measured
#: (Miao et al., VLDB 2023).
OVERLAP_SLOWDOWN = 1.3

#: Dtypes of ``peak_flops_per_s``, and classes of ops that have efficiency curves ("optimizer": steps of a parameter).
PEAK_DTYPES = (*ITEM_BYTES, "tf32", "int8")
OP_CLASSES = ("attention", "conv", "default", "elementwise", "gather", "matmul", "optimizer", "pointwise",
              "reduction")


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

    @property
    def saved_by_overlap(self) -> float:
        """Of seconds in which compute and communication both run: the share that is saved."""
        return 2 - self.overlap_slowdown

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
        if not 0 <= self.launch_s < math.inf:
            raise ClusterError(f"device {self.name}: launch_s must not be negative, but is {self.launch_s}")
        if not 0 <= self.reserved_bytes < self.memory_bytes:
            raise ClusterError(f"device {self.name}: reserved_bytes must be at least 0 and less than memory_bytes, "
                               f"{self.memory_bytes}, not {self.reserved_bytes}")
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
