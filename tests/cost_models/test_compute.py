"""Rooflines: formulas, monotone curves, and what the device description promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import Cluster, ClusterError, Device, Tiles, compute, known_clusters
from cost_models.compute import op_time_s

DEVICES = {name: Cluster.load(name).device for name in known_clusters()}
OP_CLASSES = ["matmul", "attention", "conv", "elementwise", "reduction", "copy"]
TOY = replace(DEVICES["h100-sxm"], peak_flops_per_s={"float32": 1e12, "bfloat16": 4e12}, efficiency={},
              memory_bandwidth_bytes_per_s=1e11, memory_bandwidth_efficiency=0.5, launch_s=1e-6)


def test_the_two_sides_of_a_roofline() -> None:
    assert op_time_s("matmul", 1e12, 1e6, "float32", TOY) == pytest.approx(1.0 + 1e-6)
    assert op_time_s("matmul", 1e12, 1e6, "bfloat16", TOY) == pytest.approx(0.25 + 1e-6)
    assert op_time_s("elementwise", 1e6, 1e11, "bfloat16", TOY) == pytest.approx(2.0 + 1e-6)
    assert op_time_s("elementwise", 0, 0, "bfloat16", TOY) == 1e-6


def test_only_matrix_ops_use_matrix_units() -> None:
    assert compute.peak_flops_per_s("matmul", "bfloat16", TOY) == 4e12
    assert compute.peak_flops_per_s("elementwise", "bfloat16", TOY) == 1e12
    assert compute.peak_flops_per_s("matmul", "int64", TOY) == 1e12


@settings(max_examples=100)
@given(st.sampled_from(sorted(DEVICES)), st.sampled_from(OP_CLASSES), st.floats(0, 1e16), st.floats(0, 1e16),
       st.floats(0, 1e12), st.floats(0, 1e12))
def test_more_work_never_takes_less_time(name: str, op_class: str, a: float, b: float, c: float, d: float) -> None:
    less = op_time_s(op_class, min(a, b), min(c, d), "bfloat16", DEVICES[name])
    assert less <= op_time_s(op_class, max(a, b), max(c, d), "bfloat16", DEVICES[name]) * (1 + 1e-9)


@pytest.mark.parametrize("op_class", OP_CLASSES)
def test_arrays_price_like_their_elements(op_class: str) -> None:
    flops, nbytes = np.array([0.0, 1e6, 1e9, 1e12]), np.array([0.0, 1e3, 1e9, 1e6])
    for device in DEVICES.values():
        together = op_time_s(op_class, flops, nbytes, "float16", device)
        one_by_one = [op_time_s(op_class, f, b, "float16", device) for f, b in zip(flops, nbytes, strict=True)]
        assert together == pytest.approx(one_by_one, rel=1e-12)


def test_curves_are_straight_in_logarithms_and_level_outside() -> None:
    curve = ((1e6, 0.1), (1e8, 0.4))
    assert compute.interpolate(curve, [1.0, 1e6, 1e7, 1e8, 1e12]) == pytest.approx([0.1, 0.1, 0.2, 0.4, 0.4])
    assert compute.interpolate(curve, 0.0) == pytest.approx(0.1)


def test_memory_curves_by_op_class() -> None:
    device = replace(TOY, memory_efficiency={"copy": ((1e6, 1.0),), "default": ((1e6, 0.25),)})
    assert compute.memory_efficiency("copy", 1e9, device) == pytest.approx(1.0)
    assert compute.memory_efficiency("elementwise", 1e9, device) == pytest.approx(0.25)
    assert compute.memory_efficiency("elementwise", 1e9, TOY) == pytest.approx(0.5)


@pytest.mark.parametrize("curve", [(), ((1.0, 0.0),), ((1.0, 1.5),), ((0.0, 0.5),), ((1.0, 0.1), (2.0, 0.3))])
def test_curves_that_would_reward_more_work_are_refused(curve: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ClusterError, match=r"efficiency\.matmul"):
        replace(TOY, efficiency={"matmul": curve})


def test_measured_cpu() -> None:
    """Matrix products on one of two busy cores, halved for four processes: within 15 % of the medians measured."""
    for size, seconds in [(64, 7.0e-6), (128, 43e-6), (256, 0.335e-3), (512, 2.7e-3), (1024, 21.6e-3)]:
        predicted = op_time_s("matmul", 2 * size**3, 3 * 4 * size**2, "float32", DEVICES["local-cpu"])
        assert predicted == pytest.approx(2 * seconds, rel=0.15)


# --- matrix products by shape ---------------------------------------------------------------------------------------

A100 = Cluster.load("a100-sxm", software="none").device


def rate(m: float, n: float, k: float, count: float = 1, device: Device = A100) -> float:
    """Share of the peak that one product reaches."""
    return 2 * m * n * k * count / compute.matmul_time_s(m, n, k, "float16", device, count) / 312e12


def test_large_products_reach_the_share() -> None:
    assert A100.tiles is not None
    assert 0.9 * A100.tiles.share < rate(16384, 16384, 16384) < A100.tiles.share


def test_a_wave_that_is_not_full_costs_a_whole_one() -> None:
    """108 tiles of 256 x 128 are one wave, 109 two (NVIDIA, Matrix Multiplication Background: wave quantisation)."""
    device = replace(A100, launch_s=0.0)
    full = compute.matmul_time_s(256, 128 * 108, 8192, "float16", device)
    assert compute.matmul_time_s(256, 128 * 109, 8192, "float16", device) > 1.3 * full
    assert compute.matmul_time_s(256, 128 * 100, 8192, "float16", device) == pytest.approx(full)


def test_skinny_products_are_bound_by_memory() -> None:
    m, n, k = 8, 16384, 16384
    traffic = 2 * (m * k + k * n + m * n) / (A100.memory_bandwidth_bytes_per_s * A100.memory_bandwidth_efficiency)
    assert compute.matmul_time_s(m, n, k, "float16", A100) == pytest.approx(traffic + A100.launch_s)


def test_long_sums_of_small_results_are_split() -> None:
    """A weight's gradient, 1024 x 1024 from 65,536 tokens, would keep 32 of 108 units busy if k stayed whole."""
    assert rate(1024, 1024, 65536) > 0.6


def test_rows_off_128_bytes_are_slower() -> None:
    """BLOOM's hidden size of 14,400 on 8 ranks gives rows of 1,800 elements (BigScience, chronicles-prequel.md)."""
    assert rate(2048, 5400, 14400) < 0.85 * rate(2048, 5376, 14400)


def test_rows_off_16_bytes_are_slower_still() -> None:
    """GPT-2's vocabulary of 50,257 starts its rows on 2 bytes: vTrain's head runs at 0.24 of an A100's peak so, at 0.63
    with half of it (25,128, on 16)."""
    rates = [rate(2048, n, 2048) for n in (50304, 50256, 50260, 50258, 50257)]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == 5
    assert rates[-1] < 0.75 * rates[1]


def test_without_tiles_the_roofline_counts() -> None:
    plain = replace(A100, tiles=None)
    b = 2 * 3 * 4096**2
    assert compute.matmul_time_s(4096, 4096, 4096, "float16", plain) == pytest.approx(
        float(compute.op_time_s("matmul", 2 * 4096**3, b, "float16", plain)))


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.integers(1, 8), st.sampled_from("mnkc"))
def test_larger_aligned_products_never_take_less(m: int, n: int, k: int, count: int, which: str) -> None:
    sizes = {"m": 64 * m, "n": 64 * n, "k": 64 * k, "c": count}
    grown = sizes | {which: sizes[which] + (1 if which == "c" else 64)}
    before, after = (compute.matmul_time_s(s["m"], s["n"], s["k"], "float16", A100, s["c"]) for s in (sizes, grown))
    assert after >= before


@pytest.mark.parametrize("change", [{"units": 0}, {"share": 0.0}, {"share": 1.2}, {"ramp": -1.0}, {"misaligned": 0.0}])
def test_impossible_tiles_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ClusterError, match="tiles"):
        Tiles(**{"units": 108, "share": 0.8, **change})    # type: ignore[arg-type]
