"""Seconds of one op: a roofline with efficiency curves (Williams, Waterman, Patterson 2009)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from cost_models.cluster import ITEM_BYTES, Curve, Device, Tiles

#: Op classes whose arithmetic runs on the matrix units; everything else counts as memory traffic with fp32 arithmetic.
MATRIX = frozenset({"matmul", "attention", "conv"})


def op_time_s(op_class: str, flops: Any, nbytes: Any, dtype: str, device: Device) -> Any:
    """max(FLOP / (peak x efficiency), bytes / (bandwidth x efficiency)) + launch; vectorised.

    ``nbytes``: read and written together. A dtype that the device does not list counts as float32; an op class without
    a curve runs at its peak FLOP/s and at the device's ``memory_bandwidth_efficiency``.

    >>> from cost_models import Cluster
    >>> device = Cluster.load("h100-sxm").device
    >>> seconds = op_time_s("matmul", [2 * 4096**3, 2 * 8192**3], [1e8, 4e8], "bfloat16", device)
    >>> [f"{s * 1e3:.1f} ms" for s in seconds]
    ['0.2 ms', '1.5 ms']
    """
    f, b = np.asarray(flops, dtype=float), np.asarray(nbytes, dtype=float)
    arithmetic = f / (peak_flops_per_s(op_class, dtype, device) * efficiency(op_class, f, device))
    memory = b / (device.memory_bandwidth_bytes_per_s * memory_efficiency(op_class, b, device))
    return np.maximum(arithmetic, memory) + device.launch_s


#: Tiles of a result that libraries choose among, and the main loop's speed in each over that of the largest: smaller
#: ones read their operands more often. From the shapes of cuBLAS kernels; the ratios are of their operands' traffic.
_TILES = ((256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.78), (64, 64, 0.6))
#: Into how many parts k may be split, so that small results with long sums fill the device.
_SPLITS = (1, 2, 4, 8)


def matmul_time_s(m: float, n: float, k: float, dtype: str, device: Device, count: float = 1) -> float:
    """Seconds of ``count`` products [m, k] x [k, n], by tiles and waves; without ``device.tiles``, by the roofline.

    Every multiprocessor computes one tile of the result at a time, so a product takes whole waves of tiles:

        ceil(ceil(m/tm) ceil(n/tn) splits count / units)  x  2 tm tn (k/splits + ramp) / (speed of one unit)

    by the best of the usual tiles and splits of k (NVIDIA, "Matrix Multiplication Background User's Guide": tile and
    wave quantisation), and never less than the operands' traffic. Rows of an operand that do not start on 128-byte
    boundaries slow the main loop; more so those that do not even start on the 16 bytes of one load (`_aligned_share`).
    """
    width = ITEM_BYTES.get(dtype, 4)
    nbytes = width * count * (m * k + k * n + m * n)
    if device.tiles is None:
        return float(op_time_s("matmul", 2.0 * m * n * k * count, nbytes, dtype, device))
    cut = device.tiles
    share = (cut.share if width > 1 else cut.low_precision_share or cut.share) * _aligned_share(n, k, width, cut)
    unit = peak_flops_per_s("matmul", dtype, device) * share / cut.units
    best = _tiled_flops(m, n, k, count, cut.units, cut.ramp) / unit
    memory = nbytes / (device.memory_bandwidth_bytes_per_s * device.memory_bandwidth_efficiency)
    return max(best, memory) + device.launch_s


def _aligned_share(n: float, k: float, width: float, cut: Tiles) -> float:
    """What is left of the main loop's speed where rows of n or k elements of ``width`` bytes do not start on 128 bytes.
    Loads move at most 16 bytes at once, and only what starts on as many (PTX: cp.async of 4, 8 or 16 bytes): where rows
    start on 8, 4 or 2, each halving costs the square root of the factor again. A broken number is the mean of many."""
    lines, whole = int(128 / min(width, 2)), [int(size) for size in (n, k) if size == int(size)]
    row = math.gcd(*whole, lines)
    if row == lines and len(whole) == 2:
        return 1.0
    return cut.misaligned ** (1 + max(0.0, math.log2(16 / (row * width))) / 2)


@lru_cache(maxsize=1 << 16)
def _tiled_flops(m: float, n: float, k: float, count: float, units: int, ramp: float) -> float:
    """What one unit computes, padding, starts and ends of tiles included, by the best tiles and splits; at the speed
    of the largest tile."""
    best = math.inf
    for tm, tn, speed in _TILES:
        tiles = math.ceil(m / tm) * math.ceil(n / tn) * count
        for splits in _SPLITS:
            waves = math.ceil(tiles * splits / units)
            best = min(best, waves * 2.0 * tm * tn * (k / splits + ramp) / speed)
    return best


def peak_flops_per_s(op_class: str, dtype: str, device: Device) -> float:
    """The arithmetic peak of an op class: by dtype on the matrix units, else that of float32."""
    peaks = device.peak_flops_per_s
    return peaks.get(dtype, peaks["float32"]) if op_class in MATRIX else peaks["float32"]


def efficiency(op_class: str, flops: Any, device: Device) -> Any:
    """Share of the arithmetic peak that one call of this size reaches; 1 without a curve."""
    curve = device.efficiency.get(op_class)
    return np.ones_like(np.asarray(flops, dtype=float)) if curve is None else interpolate(curve, flops)


def memory_efficiency(op_class: str, nbytes: Any, device: Device) -> Any:
    """Share of the memory bandwidth that one call of this size reaches."""
    curve = device.memory_efficiency.get(op_class, device.memory_efficiency.get("default"))
    if curve is None:
        return np.full_like(np.asarray(nbytes, dtype=float), device.memory_bandwidth_efficiency)
    return interpolate(curve, nbytes)


def interpolate(curve: Curve, sizes: Any) -> Any:
    """The curve at ``sizes``: straight between its points in log-log, level beyond them.

    A share that grows no faster than the size (checked when a `Device` is made) thus never makes a larger call faster.
    """
    x, y = _logarithms(curve)
    return np.exp(np.interp(np.log(np.maximum(np.asarray(sizes, dtype=float), 1e-30)), x, y))


@lru_cache(maxsize=256)
def _logarithms(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    points = np.log(np.asarray(curve))
    return points[:, 0], points[:, 1]
