"""Seconds of one op: a roofline with efficiency curves (Williams et al. 2009)."""

from __future__ import annotations

from typing import Any

import numpy as np

from cost_models.cluster import Device

#: Op classes whose arithmetic runs on the matrix units; everything else counts as memory traffic with fp32 arithmetic.
MATRIX = frozenset({"matmul", "attention", "conv"})


def op_time_s(op_class: str, flops: Any, nbytes: Any, dtype: str, device: Device) -> Any:
    """max(arithmetic, memory traffic) + launch; vectorised. ``nbytes``: read and written together.

    A dtype that the device does not list counts as float32; an op class without a curve runs at its peak.
    """
    f, b = np.asarray(flops, dtype=float), np.asarray(nbytes, dtype=float)
    peak = device.peak_flops_per_s.get(dtype, 0.0) if op_class in MATRIX else 0.0
    peak = peak or device.peak_flops_per_s["float32"]
    arithmetic = f / (peak * efficiency(op_class, f, device))
    memory = b / (device.memory_bandwidth_bytes_per_s * device.memory_bandwidth_efficiency)
    return np.maximum(arithmetic, memory) + device.launch_s


def efficiency(op_class: str, flops: Any, device: Device) -> Any:
    """Share of the peak that one call of this size reaches: linear in log10(FLOP) between the curve's points."""
    curve = device.efficiency.get(op_class)
    if curve is None:
        return np.ones_like(np.asarray(flops, dtype=float))
    x, y = zip(*curve, strict=True)
    return np.interp(np.log10(np.maximum(flops, 1.0)), np.log10(x), y)
