"""Prices: properties that any cost model must have, and the defects found in public systems."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import Cluster, ClusterError, Group, collectives, compute, known_clusters, memory

COLLECTIVES = [collectives.all_reduce_s, collectives.all_gather_s, collectives.reduce_scatter_s,
               collectives.all_to_all_s, collectives.broadcast_s]
H100 = Cluster.load("h100-sxm", num_devices=64)
meshes = st.sampled_from([(64,), (8, 8), (4, 16), (2, 4, 8), (16, 4), (3,), (6, 2)])


@st.composite
def groups(draw: st.DrawFn) -> Group:
    mesh = draw(meshes)
    return H100.group(mesh, draw(st.integers(0, len(mesh) - 1)))


@pytest.mark.parametrize("name", known_clusters())
def test_every_machine_loads_at_any_size(name: str) -> None:
    for count in (1, 3, 6, 12, 24, 96, 1000):
        cluster = Cluster.load(name, num_devices=count)
        group = cluster.group((count,), 0)
        assert group.size >= count
        assert collectives.all_reduce_s(1e6, group) >= 0


@given(groups(), st.floats(0, 1e11), st.floats(0, 1e11))
def test_more_bytes_never_cost_less(group: Group, a: float, b: float) -> None:
    for collective in COLLECTIVES:
        assert collective(min(a, b), group) <= collective(max(a, b), group)


@given(groups(), st.floats(0, 1e11), st.floats(1.0, 100.0), st.integers(0, 1))
def test_a_slower_link_never_makes_anything_faster(group: Group, nbytes: float, factor: float, which: int) -> None:
    levels = list(group.levels)
    count, link = levels[which]
    levels[which] = count, replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / factor,
                                   alpha_s=link.alpha_s * factor)
    slower = replace(group, levels=tuple(levels))
    for collective in COLLECTIVES:
        assert collective(nbytes, slower) >= collective(nbytes, group) * (1 - 1e-12)


@given(st.floats(0, 1e12))
def test_a_group_of_one_is_free(nbytes: float) -> None:
    for collective in COLLECTIVES:
        assert collective(nbytes, H100.group((64, 1), 1)) == 0.0


def test_arrays_price_like_their_elements() -> None:
    group = H100.group((8, 8), 0)
    sizes = np.array([0.0, 1e3, 1e6, 1e9])
    for collective in COLLECTIVES:
        assert np.array_equal(collective(sizes, group), [collective(x, group) for x in sizes])


def test_ring_formulas() -> None:
    """n = 8 on NVLink, large b: (n-1)/n b beta one way, twice that for all-reduce."""
    group = H100.group((8, 8), 1)
    beta = H100.links[0].beta_s_per_byte
    assert collectives.all_gather_s(8e9, group) == pytest.approx(7e9 * beta, rel=1e-3)
    assert collectives.reduce_scatter_s(8e9, group) == pytest.approx(7e9 * beta, rel=1e-3)
    assert collectives.all_reduce_s(8e9, group) == pytest.approx(14e9 * beta, rel=1e-3)
    assert collectives.all_to_all_s(8e9, group) == pytest.approx(7e9 * beta, rel=1e-3)


def test_defect_fastest_link_for_a_flattened_mesh() -> None:
    """A group over several hosts costs at least what its slowest link must carry: each device's share of b."""
    group = H100.group((64,), 0)
    slow = H100.links[1].beta_s_per_byte
    assert group.slowest is H100.links[1]
    assert collectives.all_reduce_s(8e9, group) >= 2 * 7 / 8 * (8e9 / 8) * slow
    assert H100.group_of((2, 4, 8), (0, 1, 2)).levels == group.levels


def test_defect_all_gather_priced_on_the_sharded_size() -> None:
    """Bytes are those of the gathered tensor: gathering and reduce-scattering make an all-reduce."""
    group = H100.group((8, 8), 1)
    both = collectives.all_gather_s(1e9, group) + collectives.reduce_scatter_s(1e9, group)
    assert both == pytest.approx(float(collectives.all_reduce_s(1e9, group)), rel=0.01)


def test_defect_all_to_all_priced_as_a_hack() -> None:
    """An all-to-all moves 1/n of what an all-gather to the same local size of input would."""
    group = H100.group((8, 8), 1)
    local = 1e9
    assert collectives.all_to_all_s(local, group) < collectives.all_gather_s(8 * local, group) / 7


def test_the_inner_axis_is_faster_than_the_outer() -> None:
    for collective in COLLECTIVES:
        assert collective(1e8, H100.group((8, 8), 1)) < collective(1e8, H100.group((8, 8), 0))


def test_groups_cross_hosts_as_ranks_are_laid_out() -> None:
    """Axis 0 of (4, 16): stride 16, so four hosts; axis 1: two hosts of eight."""
    assert [count for count, _ in H100.group((4, 16), 0).levels] == [1, 4]
    assert [count for count, _ in H100.group((4, 16), 1).levels] == [8, 2]
    twelve = Cluster.load("h100-sxm", num_devices=12).group((12,), 0)
    assert [count for count, _ in twelve.levels] == [8, 2]
    assert twelve.size == 12
    assert not twelve.even


@given(st.sampled_from(["matmul", "attention", "conv", "elementwise", "reduction"]), st.floats(0, 1e16),
       st.floats(0, 1e16), st.floats(0, 1e12))
def test_more_work_never_takes_less_time(op_class: str, a: float, b: float, nbytes: float) -> None:
    low, high = sorted((a, b))
    for name in known_clusters():
        device = Cluster.load(name).device
        faster = compute.op_time_s(op_class, low, nbytes, "bfloat16", device)
        assert faster <= compute.op_time_s(op_class, high, nbytes, "bfloat16", device) * (1 + 1e-9)
        assert faster <= compute.op_time_s(op_class, low, nbytes * 2, "bfloat16", device) * (1 + 1e-9)


def test_training_bytes() -> None:
    """fp32 AdamW: parameter, gradient and two moments of four bytes; one terabyte is 1000^4 bytes."""
    assert memory.training_bytes(10, "float32", "adamw") == 160
    assert memory.training_bytes(10, "bfloat16", "sgd") == 40
    assert Cluster.load("h100-sxm").device.memory_bytes < 2**40 / 12


@pytest.mark.parametrize(("text", "says"), [
    ("name = 1\n", "mine.toml: name = 1 is not text; required: the cluster's name"),
    ("name = 'x'\n", "mine.toml: device is missing; required: a table"),
    ("this is not toml", "not TOML"),
])
def test_a_bad_description_says_what_it_needs(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=says):
        Cluster.load(path)


def test_errors_name_what_is_known() -> None:
    with pytest.raises(ClusterError, match=r"a100-sxm, .*local-cpu; or give the path of a TOML file"):
        Cluster.load("h100")
    with pytest.raises(ClusterError, match=r"known are .*adamw"):
        memory.recipe("nonesuch")
    with pytest.raises(ClusterError, match="num_devices=128"):
        H100.group((128,), 0)
    with pytest.raises(ClusterError, match="at least one"):
        Cluster.load("h100-sxm", num_devices=0)
