"""Rooflines: formulas, monotone curves, and what the device description promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import Cluster, ClusterError, compute, known_clusters
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


@settings(max_examples=100, deadline=None)
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
