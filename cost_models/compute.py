"""Seconds of one op: a roofline with efficiency curves (Williams, Waterman, Patterson 2009)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from cost_models.devices import ITEM_BYTES, Curve, Device, Tiles
from cost_models.profile import Profile

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


def matmuls_s(m: Any, n: Any, k: Any, count: Any, dtype: str, device: Device) -> np.ndarray:
    """`matmul_time_s` of many products: arrays of one shape, or numbers; equal products are priced once."""
    shapes = np.stack(np.broadcast_arrays(*(np.asarray(x, dtype=float) for x in (m, n, k, count))), axis=-1)
    different, which = np.unique(shapes.reshape(-1, 4), axis=0, return_inverse=True)
    seconds = [matmul_time_s(_whole(a), _whole(b), _whole(c), dtype, device, _whole(times))
               for a, b, c, times in different.tolist()]
    return np.array(seconds)[which].reshape(shapes.shape[:-1])


def _whole(size: float) -> float:
    return int(size) if size == int(size) else size


def traffic_s(nbytes: Any, device: Device, tensor_bytes: Any = math.inf, cache_bytes: float = 0.0) -> Any:
    """Seconds of moving ``nbytes``, read and written together, in tensors of ``tensor_bytes`` each; vectorised.

    A tensor that the cache of ``cache_bytes`` holds need not be read again by the next kernel: half of the traffic of
    small tensors is not paid.
    """
    size = np.asarray(tensor_bytes, dtype=float)
    found = 0.5 / (1 + (2 * size / cache_bytes) ** 2) if cache_bytes else 0.0
    speed = device.memory_bandwidth_bytes_per_s * device.memory_bandwidth_efficiency
    return np.asarray(nbytes, dtype=float) * (1 - found) / speed


#: Bytes that attention moves for one score, forward and backward, where scores are in memory: the products' results and
#: the softmax of one kernel; and more by forward and backward each where the softmax is five kernels of torch.
SCORE_BYTES, UNFUSED_SOFTMAX_BYTES = (9.0, 11.0), 22.0


def attention_s(heads: Any, rows: Any, columns: Any, widths: tuple[float, float], profile: Profile, device: Device,
                causal: bool = True, fused_softmax: Any = True, dtype: str = "float16") -> tuple[Any, Any]:
    """Seconds (forward, backward) of attention of ``heads`` (of all sequences) with ``rows`` queries and ``columns``
    keys each; ``widths`` of keys and values; arrays or numbers.

    Flash attention at the profile's share of the peak, less for heads narrower than 128; of a causal one half is
    skipped; backward is 2.5 times the FLOP at 0.8 of the speed (Dao 2023, arXiv 2307.08691). Software without it keeps
    scores in memory: two products, and their traffic.
    """
    d_qk, d_v = widths
    scores = np.asarray(heads, dtype=float) * rows * columns
    if profile.flash:
        share = profile.attention * profile.attend * (1.0 if profile.native else profile.legacy)
        speed = peak_flops_per_s("attention", dtype, device) * share * min(1.0, d_v / 128) ** 0.3
        forward = (0.5 if causal else 1.0) * 2.0 * scores * (d_qk + d_v) / speed
        return forward, 2.5 * forward / 0.8
    products = (matmuls_s(rows, columns, d_qk, heads, dtype, device)
                + matmuls_s(rows, d_v, columns, heads, dtype, device))
    more = np.where(fused_softmax, 0.0, UNFUSED_SOFTMAX_BYTES)
    forward, backward = (profile.passes * profile.unfused
                         * traffic_s(scores * (way + more), device, 2.0 * scores, profile.cache_bytes)
                         for way in SCORE_BYTES)
    return forward + products, backward + 2 * products


def ring_sums_s(rounds: Any, results: Any, operands: Any, itemsize: float, profile: Profile, device: Device
                ) -> tuple[Any, Any]:
    """Seconds (forward, backward) of the sums, in float32, over the ``rounds`` of ring attention: of results with
    ``results`` elements, in backward of gradients with ``operands`` elements. Arrays or numbers.

    The first is cast. A kernel reads each other one and the sum, and writes the sum; unfused, forward casts it before.
    """
    cast, fused = 4.0 + itemsize, 8.0 + itemsize
    share = profile.passes if profile.fused else profile.kernel_bytes
    forward, backward = (
        share * traffic_s(np.where(rounds, cast + (rounds - 1) * each, 0) * elements, device, 4.0 * elements,
                          profile.cache_bytes)
        for elements, each in ((results, fused if profile.fused else fused + 8), (operands, fused)))
    return forward, backward


def softmax_is_fused(heads: Any, columns: float) -> Any:
    """Megatron's fused softmax takes batches of four and at most 2,048 columns, and else gives way to five kernels of
    torch (megatron/model/fused_softmax.py: is_kernel_available). ``heads``: of all sequences on a rank."""
    return (np.asarray(heads) % 4 == 0) & (columns <= 2048)


#: Of a layer's launches, what attention has more of whose scores are in memory and whose softmax is not fused.
UNFUSED_LAUNCHES = 0.4


def larger(a: Any, b: Any, sharpness: float = 6.0) -> Any:
    """A smooth maximum: neither of two things that run side by side is quite free of the other's jitter."""
    top = np.maximum(np.maximum(a, b), 1e-30)
    return top * ((a / top) ** sharpness + (b / top) ** sharpness) ** (1 / sharpness)


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
