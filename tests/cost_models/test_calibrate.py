"""Fits recover what made the samples; files read back as they were written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import Cluster, ClusterError, Device, Group, Link, calibrate, collectives, known_clusters
from cost_models.calibrate import Sample, fit_alpha_beta, fit_efficiency, fit_link

SIZES = [2.0**k for k in range(10, 26)]


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-8))
def test_alpha_and_beta_are_recovered(alpha_s: float, beta: float) -> None:
    fit = fit_alpha_beta(SIZES, [alpha_s + beta * b for b in SIZES])
    assert fit.mean_error < 1e-6
    assert fit.alpha_s + fit.beta_s_per_byte * 2**20 == pytest.approx(alpha_s + beta * 2**20, rel=1e-6)


def test_noise_averages_out_and_shows_in_residuals() -> None:
    random = np.random.default_rng(0)
    seconds = [(1e-5 + 1e-10 * b) * random.lognormal(0, 0.05) for b in SIZES * 20]
    fit = fit_alpha_beta(SIZES * 20, seconds)
    assert fit.alpha_s == pytest.approx(1e-5, rel=0.05)
    assert fit.beta_s_per_byte == pytest.approx(1e-10, rel=0.05)
    assert 0.02 < fit.mean_error < 0.08


def test_neither_is_negative() -> None:
    fit = fit_alpha_beta([1e6, 2e6, 4e6], [1e-3, 2.5e-3, 6e-3])    # a straight line through these starts below 0
    assert fit.alpha_s == 0
    assert fit.beta_s_per_byte > 0
    assert fit_alpha_beta([1e6, 2e6, 4e6], [3e-3, 2e-3, 1e-3]).beta_s_per_byte == 0


def test_a_link_is_recovered_from_its_own_prices() -> None:
    true = Link("wire", 8, 2e-6, 5e9, {"reduce_scatter": 2.2, "all_gather": 1.3})
    calls = {"all_reduce": collectives.all_reduce_s, "all_gather": collectives.all_gather_s,
             "reduce_scatter": collectives.reduce_scatter_s, "all_to_all": collectives.all_to_all_s}
    groups = {n: Group(((n, true),), 1e-6, algorithms=("ring",)) for n in (2, 4)}
    samples = {
        name: [Sample(n, b, float(call(b, group))) for n, group in groups.items() for b in SIZES]
        for name, call in calls.items()
    }
    link, residuals = fit_link("wire", 8, samples, launch_s=1e-6)
    assert link.alpha_s == pytest.approx(true.alpha_s)
    assert link.bandwidth_bytes_per_s == pytest.approx(true.bandwidth_bytes_per_s)
    assert link.slowdown == pytest.approx({"reduce_scatter": 2.2, "all_gather": 1.3, "all_to_all": 1.0})
    assert max(abs(r) for part in residuals.values() for r in part) < 1e-6


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(1e3, 1e12), st.floats(1e-6, 1.0)), min_size=1, max_size=12))
def test_fitted_curves_are_always_legal(samples: list[tuple[float, float]]) -> None:
    curve = fit_efficiency([s for s, _ in samples], [t for _, t in samples], 1e12)
    Device("toy", {"float32": 1e12}, 1e11, 1.0, 1e9, 0.0, {"matmul": curve})


def test_fitted_curves_go_through_the_samples() -> None:
    curve = fit_efficiency([1e6, 1e9, 1e9], [1e-5 + 1e-6, 2e-3 + 1e-6, 2e-3 + 1e-6], 1e12, launch_s=1e-6)
    assert np.array(curve) == pytest.approx(np.array([(1e6, 0.1), (1e9, 0.5)]))


@pytest.mark.parametrize("name", known_clusters())
def test_files_read_back_as_written(name: str, tmp_path: Path) -> None:
    cluster = Cluster.load(name, num_devices=16)
    path = tmp_path / "copy.toml"
    calibrate.write_cluster(path, cluster, source='measured "today"')
    again = Cluster.load(path, num_devices=16)
    assert again == cluster
    assert again.sources.items() >= {k: v for k, v in cluster.sources.items() if v}.items()


def test_too_little_to_fit_is_said() -> None:
    with pytest.raises(ClusterError, match="at least two pairs"):
        fit_alpha_beta([1.0], [1.0])
    with pytest.raises(ClusterError, match="seconds above 0"):
        fit_alpha_beta([1.0, 2.0], [0.0, 1.0])
    with pytest.raises(ClusterError, match=r"needs two all_reduce samples or more; has .'all_gather'."):
        fit_link("wire", 2, {"all_gather": []})
    with pytest.raises(ClusterError, match="an efficiency curve needs"):
        fit_efficiency([], [], 1e12)
