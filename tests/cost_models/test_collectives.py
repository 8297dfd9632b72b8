"""Prices of communication: formulas, properties that any cost model must have, and defects found in public systems."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cost_models import Cluster, ClusterError, Group, Link, collectives, known_clusters, offload
from cost_models.collectives import all_gather_s, all_reduce_s, all_to_all_s, broadcast_s, reduce_scatter_s, send_recv_s

COLLECTIVES = [all_reduce_s, all_gather_s, reduce_scatter_s, all_to_all_s, broadcast_s, send_recv_s]
H100 = Cluster.load("h100-sxm", num_devices=64, software="none")
WIRE = Link("wire", 8, 1e-6, 1e11)
NET = Link("net", 4096, 1e-5, 1e10)
PLAIN = replace(H100, links=(WIRE, NET))
SHAPED = replace(H100, links=(replace(WIRE, alpha_s=5.7e-6, bandwidth_bytes_per_s=2.4e10, burst_bytes=2.0**15),
                              replace(NET, alpha_s=1.4e-5, bandwidth_bytes_per_s=2.25e10, burst_bytes=2.0**15)))
MACHINES = {name: Cluster.load(name, num_devices=64, software="none") for name in known_clusters()}
MESHES = [(64,), (8, 8), (4, 16), (2, 4, 8), (16, 4), (3,), (6, 2), (4, 3), (61,)]


@st.composite
def groups(draw: st.DrawFn, bursts: tuple[float, ...] = (0.0, 2.0**15, 1e9)) -> Group:
    cluster = MACHINES[draw(st.sampled_from(sorted(MACHINES)))]
    mesh = draw(st.sampled_from(MESHES))
    burst, relay = draw(st.sampled_from(bursts)), draw(st.sampled_from((0.0, 1e-11, 1e-8)))
    links = tuple(replace(link, burst_bytes=burst, relay_s_per_byte=relay) for link in cluster.links)
    return replace(cluster, links=links).group(mesh, draw(st.integers(0, len(mesh) - 1)))


# --- properties ---------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(groups(), st.floats(0, 1e11), st.floats(0, 1e11))
def test_more_bytes_never_cost_less(group: Group, a: float, b: float) -> None:
    for collective in COLLECTIVES:
        assert collective(min(a, b), group) <= collective(max(a, b), group)


@settings(max_examples=60)
@given(groups(), st.floats(0, 1e11), st.floats(1.0, 100.0), st.floats(1.0, 100.0), st.integers(0, 1))
@example(SHAPED.group((8, 8), 0), 762601.0, 1.0, 3.0, 0)
@example(SHAPED.group((64,), 0), 762601.0, 1.0, 3.0, 0)
def test_a_slower_link_never_makes_anything_faster(
    group: Group, nbytes: float, narrower: float, later: float, which: int
) -> None:
    levels = list(group.levels)
    count, link = levels[which % len(levels)]
    levels[which % len(levels)] = count, replace(
        link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / narrower, alpha_s=link.alpha_s * later)
    slower = replace(group, levels=tuple(levels))
    for collective in COLLECTIVES:
        assert collective(nbytes, slower) >= collective(nbytes, group) * (1 - 1e-12)


@settings(max_examples=60)
@given(st.floats(0, 1e12), st.sampled_from(known_clusters()))
def test_a_group_of_one_is_free(nbytes: float, name: str) -> None:
    group = MACHINES[name].group((16, 1), 1)
    for collective in COLLECTIVES:
        assert collective(nbytes, group) == 0.0


@settings(max_examples=60)
@given(groups(), st.lists(st.floats(0, 1e11), min_size=1, max_size=5))
def test_arrays_price_like_their_elements(group: Group, sizes: list[float]) -> None:
    for collective in COLLECTIVES:
        together = collective(np.array(sizes), group)
        assert together.shape == (len(sizes),)
        assert np.array_equal(together, [collective(size, group) for size in sizes])


@settings(max_examples=60)
@given(groups(bursts=(0.0,)))
def test_gathering_and_reduce_scattering_make_an_all_reduce(group: Group) -> None:
    """Also the defect of pricing an all-gather on the sharded size: bytes are those of the gathered tensor."""
    both = all_gather_s(4e9, group) + reduce_scatter_s(4e9, group)
    assert both >= 0.99 * all_reduce_s(4e9, group)


@settings(max_examples=60)
@given(st.sampled_from(known_clusters()), st.floats(1e3, 1e10))
def test_the_inner_axis_is_faster_than_the_outer(name: str, nbytes: float) -> None:
    cluster = MACHINES[name]
    for collective in COLLECTIVES:
        assert collective(nbytes, cluster.group((8, 8), 1)) <= collective(nbytes, cluster.group((8, 8), 0))


# --- formulas -----------------------------------------------------------------------------------------------------


def test_a_ring_inside_a_host() -> None:
    """n = 8, large b: (n-1)/n b beta one way, twice that for all-reduce."""
    group = PLAIN.group((8, 8), 1)
    assert all_gather_s(8e9, group) == pytest.approx(7e9 / 1e11, rel=1e-3)
    assert reduce_scatter_s(8e9, group) == pytest.approx(7e9 / 1e11, rel=1e-3)
    assert all_reduce_s(8e9, group) == pytest.approx(14e9 / 1e11, rel=1e-3)
    assert all_to_all_s(8e9, group) == pytest.approx(7e9 / 1e11, rel=1e-3)
    assert broadcast_s(8e9, group) == pytest.approx(8e9 / 1e11, rel=1e-3)
    assert send_recv_s(8e9, group) == pytest.approx(8e9 / 1e11, rel=1e-3)
    small = PLAIN.device.launch_s + 7e-6
    assert all_gather_s(0, group) == pytest.approx(small)


def test_a_ring_over_hosts_uses_all_their_nics() -> None:
    """64 ranks in 8 hosts: a host's 8 NICs carry 63/64 b together; with one NIC a host, eight times slower."""
    ring = replace(PLAIN, algorithms=("ring",))
    wide, narrow = ring.group((64,), 0), replace(ring, links=(WIRE, replace(NET, nics_per_host=1))).group((64,), 0)
    assert all_gather_s(64e9, wide) == pytest.approx(63e9 / 8e10, rel=1e-3)
    assert all_gather_s(64e9, narrow) == pytest.approx(63e9 / 1e10, rel=1e-3)


def test_latencies_count_steps_by_level() -> None:
    """A ring of 64 in 8 hosts: 63 steps, 7 between hosts; a tree: 7 inside and log2(8) between, both ways."""
    ring = replace(PLAIN, algorithms=("ring",)).group((64,), 0)
    assert all_gather_s(0, ring) - ring.launch_s == pytest.approx(56 * 1e-6 + 7 * 1e-5)
    tree = replace(PLAIN, algorithms=("tree",)).group((64,), 0)
    assert all_reduce_s(0, tree) - tree.launch_s == pytest.approx(2 * (7 * 1e-6 + 3 * 1e-5))
    levels = replace(PLAIN, algorithms=("hierarchical",)).group((64,), 0)
    assert all_gather_s(0, levels) - levels.launch_s == pytest.approx(7 * 1e-6 + 7 * 1e-5)


def test_trees_for_small_and_rings_for_large() -> None:
    """More ways never cost more; each is the cheapest somewhere."""
    sizes = np.logspace(2, 10, 50)
    by = {way: all_reduce_s(sizes, replace(PLAIN, algorithms=(way,)).group((64,), 0)) for way in ("ring", "tree")}
    every = all_reduce_s(sizes, PLAIN.group((64,), 0))
    assert (every <= np.minimum(by["ring"], by["tree"])).all()
    assert by["tree"][0] < by["ring"][0]
    assert by["ring"][-1] < by["tree"][-1]


def test_all_to_all_over_hosts_is_limited_by_what_leaves_a_host() -> None:
    """Of each rank's b, 56/64 go to other hosts, by its own NIC."""
    assert all_to_all_s(64e9, PLAIN.group((64,), 0)) == pytest.approx(56e9 / 1e10, rel=1e-3)


def test_protocols_trade_latency_for_bandwidth() -> None:
    """NCCL's LL for small, Simple for large; and the model is near nccl-tests where it should be."""
    group = H100.group((8, 8), 1)
    simple_only = replace(group, levels=tuple((count, replace(link, protocols={})) for count, link in group.levels))
    assert all_gather_s(1e3, group) < 0.6 * all_gather_s(1e3, simple_only)
    assert all_gather_s(1e9, group) == all_gather_s(1e9, simple_only)
    bus = 2 * 7 / 8 * 8e9 / float(all_reduce_s(8e9, group))
    assert 460e9 < bus < 482e9


def test_a_protocol_must_be_offered_by_every_link() -> None:
    inner, outer = H100.links
    mixed = replace(H100, links=(inner, replace(outer, protocols={})))
    assert all_gather_s(1e3, mixed.group((64,), 0)) > all_gather_s(1e3, H100.group((64,), 0))
    assert all_gather_s(1e3, mixed.group((8, 8), 1)) == all_gather_s(1e3, H100.group((8, 8), 1))


def test_slowdowns_multiply_time() -> None:
    """gloo's reduce_scatter: about as expensive as its all_reduce."""
    group = Cluster.load("local-cpu", software="none").group((4,), 0)
    assert reduce_scatter_s(8e6, group) == pytest.approx(float(all_reduce_s(8e6, group)), rel=0.5)
    ideal = replace(group, levels=tuple((count, replace(link, slowdown={})) for count, link in group.levels))
    ratio = (reduce_scatter_s(8e6, group) - group.launch_s) / (reduce_scatter_s(8e6, ideal) - group.launch_s)
    assert ratio == pytest.approx(group.levels[0][1].slowdown["reduce_scatter"])


def test_links_that_save_up_take_the_longer_of_messages_and_bytes() -> None:
    """A token bucket fills while messages are on their way; groups that share a card share its burst."""
    links = WIRE, Link("card", 4096, 1e-3, 1e6, nics_per_host=1, burst_bytes=1e5)
    cluster = replace(H100, links=links, algorithms=("ring",), call_s={"send_recv": 0.0})
    one, eight = cluster.group((2, 32), 0), cluster.group((8, 8), 0)
    assert [float(send_recv_s(b, one)) for b in (0.0, 1e4)] == [1e-3, 1e-3]
    assert one.sharing == eight.sharing == 8
    assert float(send_recv_s(1e5 / 8, one)) == 1e-3
    assert float(send_recv_s(1e7, one)) == pytest.approx(80.0 - 0.1, rel=1e-6)
    assert float(send_recv_s(2e5 / 8, one)) == pytest.approx((1e-3**2 + 0.1**2) ** 0.5)


def test_a_lone_ring_leaves_gaps_that_another_fills() -> None:
    """Ranks that hand on half as fast as their card sends: one ring takes half as long again, two by a card do not."""
    card = Link("card", 4096, 0.0, 1e6, nics_per_host=1, relay_s_per_byte=0.5e-6)
    loopback = Link("loopback", 2, 0.0, 1e9)
    slow, prompt = (replace(H100, links=(loopback, link), algorithms=("ring",), call_s={"all_reduce": 0.0})
                    for link in (card, replace(card, relay_s_per_byte=0.0)))
    ratios = [float(all_reduce_s(1e6, slow.group(mesh, 0)) / all_reduce_s(1e6, prompt.group(mesh, 0)))
              for mesh in ((8,), (4, 2))]
    assert ratios == pytest.approx([1.5, 1.0])


def test_a_rack_has_the_nics_of_all_its_hosts() -> None:
    """With a link of racks between, hosts of eight with eight NICs send as fast as without, if they are said."""
    wire, net = Link("NVLink", 8, 1e-6, 4e11), Link("InfiniBand", 4096, 5e-6, 5e10, nics_per_host=8)
    rack = Link("rack", 32, 2e-6, 2e11)
    hosts = replace(H100, links=(wire, net), num_devices=512, algorithms=("ring",))
    racks = replace(hosts, links=(wire, rack, net), host=replace(H100.host, devices=8))
    assert racks.devices_per_host == 8
    # Four ranks of each rack or host, spread over the cluster: all leave at once.
    alone, inside = (float(all_gather_s(1e9, one.group((8, 64), 0))) for one in (hosts, racks))
    assert inside == pytest.approx(alone, rel=0.05)
    unsaid = float(all_gather_s(1e9, replace(racks, host=replace(H100.host, devices=0)).group((8, 64), 0)))
    assert unsaid == pytest.approx(4 * alone, rel=0.1)  # eight NICs of a rack


def test_measured_gloo() -> None:
    """Medians of 4 processes on the machine that local-cpu describes, by `time_collectives`: within 35 %."""
    group = Cluster.load("local-cpu", software="none").group((4,), 0)
    for collective, nbytes, seconds in [
        (all_reduce_s, 2**10, 5.26e-3), (all_reduce_s, 2**20, 5.24e-3), (all_reduce_s, 2**23, 14.7e-3),
        (all_gather_s, 2**20, 3.59e-3), (all_gather_s, 2**23, 9.28e-3), (reduce_scatter_s, 2**20, 5.55e-3),
        (reduce_scatter_s, 2**23, 14.3e-3), (all_to_all_s, 2**20, 2.82e-3), (all_to_all_s, 2**23, 9.88e-3),
    ]:
        assert collective(nbytes, group) == pytest.approx(seconds, rel=0.35)


# --- defects of public systems ------------------------------------------------------------------------------------


def test_defect_fastest_link_for_a_flattened_mesh() -> None:
    """A group over several hosts costs at least what must leave a host by its slowest link."""
    group = H100.group_of((8, 8), (0, 1))
    _, outer = H100.links
    assert group.slowest is outer
    assert all_reduce_s(8e9, group) >= 2 * 7 / 8 * 8e9 / (8 * outer.bandwidth_bytes_per_s)
    assert all_reduce_s(8e9, group) > all_reduce_s(8e9, H100.group((8, 8), 1))


def test_defect_all_to_all_priced_as_a_hack() -> None:
    """An all-to-all sends (n-1)/n of a local tensor: no more than reduce-scattering it, and an n-th of gathering it."""
    group = PLAIN.group((8, 8), 1)
    assert all_to_all_s(1e9, group) <= reduce_scatter_s(1e9, group) * (1 + 1e-9)
    assert all_to_all_s(1e9, group) < all_gather_s(8e9, group) / 7


def test_defect_all_gather_priced_on_the_shard() -> None:
    """What arrives at each rank is (n-1)/n of the whole, n - 1 times its own shard."""
    group = PLAIN.group((8, 8), 1)
    whole = 8e9
    assert all_gather_s(whole, group) >= 7 / 8 * whole / PLAIN.links[0].bandwidth_bytes_per_s


def test_defect_shards_of_later_dims_are_free() -> None:
    """Gathering a shard of dim 1 costs a copy on top, which is not free."""
    assert collectives.copy_s(1e9, H100.device) > 2e9 / H100.device.memory_bandwidth_bytes_per_s


def test_copies_to_the_host() -> None:
    assert offload.host_copy_s(48e9, H100, to_device=True) == pytest.approx(1.0, rel=1e-3)
    silent = replace(H100, host=replace(H100.host, from_device_bytes_per_s=0.0))
    with pytest.raises(ClusterError, match=r"does not say how fast .* add from_device_bytes_per_s to .host."):
        offload.host_copy_s(1.0, silent, to_device=False)


def test_sharing_a_nic_is_priced() -> None:
    """Four NICs for eight devices: eight groups at once take twice as long as with eight NICs."""
    eight, four = PLAIN, replace(PLAIN, links=(WIRE, replace(NET, nics_per_host=4)))
    ratio = all_gather_s(8e9, four.group((8, 8), 0)) / all_gather_s(8e9, eight.group((8, 8), 0))
    assert ratio == pytest.approx(2.0, rel=1e-2)


def test_planning_calls_are_cheap() -> None:
    """4,000 sizes at once in well under a millisecond each; groups of a thousand devices are found once."""
    sizes = np.logspace(0, 10, 4000)
    cluster = Cluster.load("h100-sxm", num_devices=1024, software="none")
    cluster.group((128, 8), 0)
    start = time.perf_counter()
    for _ in range(20):
        group = cluster.group((128, 8), 0)
        for collective in COLLECTIVES:
            collective(sizes, group)
    assert time.perf_counter() - start < 20 * len(COLLECTIVES) * 5e-3
