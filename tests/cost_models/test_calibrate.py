"""Fits recover what made the samples; files read back as they were written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import Cluster, ClusterError, Device, Link, calibrate, known_clusters
from cost_models.calibrate import Measured, fit_efficiency, fit_links, predicted_s

SIZES = [2.0**k for k in range(10, 26)]


GROUPS = [((4, 2), 1), ((4, 2), 0), ((2, 4), 0), ((2, 4), 1), ((8,), 0)]


def cluster_of(*links: Link, call_s: dict[str, float] | None = None) -> Cluster:
    device = Device("toy", {"float32": 1e12}, 1e11, 1.0, 1e9, 1e-6)
    return Cluster("toy", device, links, 8, ("ring",), call_s=call_s or {})


def any_rate(cluster: Cluster) -> Cluster:
    """Names and structure only."""
    links = tuple(replace(link, alpha_s=0.0, bandwidth_bytes_per_s=1e15, slowdown={}, relay_s_per_byte=0.0)
                  for link in cluster.links)
    return replace(cluster, links=links, call_s={})


def measured_on(cluster: Cluster, kinds: list[str]) -> list[Measured]:
    blank = [Measured(kind, mesh, axis, b, 0.0) for kind in kinds for mesh, axis in GROUPS for b in SIZES]
    return [replace(m, seconds=predicted_s(cluster, m)) for m in blank]


@pytest.mark.slow
def test_links_that_save_up_are_recovered() -> None:
    """Shaped by token buckets: the longer of messages and bytes, less a burst that all groups on a card share."""
    true = cluster_of(Link("inside", 2, 2e-6, 5e9, burst_bytes=2.0**15),
                      Link("card", 64, 9e-6, 1e9, nics_per_host=1, burst_bytes=2.0**16),
                      call_s={"all_reduce": 3e-4, "all_gather": 2e-4})
    fitted, residuals = fit_links(any_rate(true), measured_on(true, ["all_reduce", "all_gather"]))
    assert max(map(abs, residuals)) < 0.01
    for link, expected in zip(fitted.links, true.links, strict=True):
        assert link.bandwidth_bytes_per_s == pytest.approx(expected.bandwidth_bytes_per_s, rel=0.01)
        assert link.burst_bytes == expected.burst_bytes


@pytest.mark.slow
def test_relays_are_recovered_where_rings_have_a_card_alone_and_share_one() -> None:
    true = cluster_of(Link("inside", 2, 2e-6, 5e9),
                      Link("card", 64, 9e-6, 1e9, nics_per_host=1, relay_s_per_byte=2e-10),
                      call_s={"all_reduce": 3e-4, "all_gather": 2e-4})
    found, residuals = fit_links(any_rate(true), measured_on(true, ["all_reduce", "all_gather"]))
    assert [link.relay_s_per_byte for link in found.links] == pytest.approx([0.0, 2e-10])
    assert found.links[1].bandwidth_bytes_per_s == pytest.approx(1e9)
    assert max(map(abs, residuals)) < 1e-6


def test_no_link_is_fitted_to_be_faster_than_it_can_be() -> None:
    true = cluster_of(Link("wire", 8, 1e-5, 1e9))
    measured = measured_on(true, ["all_reduce"])
    for most in (1e12, 0.9e9):
        (link,) = fit_links(cluster_of(Link("wire", 8, 0.0, most)), measured)[0].links
        assert link.bandwidth_bytes_per_s == pytest.approx(min(most, 1e9))


def test_links_are_recovered_from_their_own_prices() -> None:
    """Within hosts, across them by a shared card, and both; what a call costs apart from its messages."""
    slow = {"reduce_scatter": 2.2, "all_gather": 1.3}
    calls = {"all_reduce": 3e-4, "all_gather": 2e-4, "reduce_scatter": 4e-4}
    true = cluster_of(Link("inside", 2, 2e-6, 5e9, slow), Link("card", 64, 9e-6, 1e9, slow, nics_per_host=1),
                      call_s=calls)
    found, residuals = fit_links(any_rate(true), measured_on(true, list(calls)))
    assert found.call_s == pytest.approx(calls)
    for link, expected in zip(found.links, true.links, strict=True):
        assert link.alpha_s == pytest.approx(expected.alpha_s)
        assert link.bandwidth_bytes_per_s == pytest.approx(expected.bandwidth_bytes_per_s)
        assert link.slowdown == pytest.approx(slow)
        assert link.nics_per_host == expected.nics_per_host
    assert max(map(abs, residuals)) < 1e-6


def test_a_collective_that_costs_another_times_as_much_gets_a_factor() -> None:
    """gloo's reduce_scatter is an all_reduce."""
    true = cluster_of(Link("wire", 8, 1e-5, 1e9))
    measured = measured_on(true, ["all_reduce"])
    found, residuals = fit_links(true, [*measured, *(replace(m, collective="reduce_scatter") for m in measured)])
    assert found.links[0].slowdown == pytest.approx({"reduce_scatter": 2.0})
    assert max(map(abs, residuals)) < 1e-6


@settings(max_examples=60)
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
    outer = replace(cluster.links[-1], burst_bytes=2.0**15, relay_s_per_byte=1e-9)
    cluster = replace(cluster, links=(*cluster.links[:-1], outer))
    path = tmp_path / "copy.toml"
    calibrate.write_cluster(path, cluster, source='measured "today"')
    again = Cluster.load(path, num_devices=16)
    assert again == cluster
    assert again.sources.items() >= {k: v for k, v in cluster.sources.items() if v}.items()


def test_too_little_to_fit_is_said() -> None:
    inside = [m for m in measured_on(cluster_of(Link("wire", 8, 1e-5, 1e9)), ["all_reduce"]) if m.axis == 1]
    with pytest.raises(ClusterError, match=r"links .'outside'. need two all_reduce measurements or more"):
        fit_links(cluster_of(Link("inside", 4, 0.0, 1e9), Link("outside", 64, 0.0, 1e9)), inside)
    with pytest.raises(ClusterError, match="an efficiency curve needs"):
        fit_efficiency([], [], 1e12)
