"""Unequal clusters: slow devices, hosts of another kind, slower NICs; prices by hand arithmetic, files, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import Cluster, ClusterError, Device, Link, collectives, compute
from cost_models.accuracy import usable_bytes
from cost_models.calibrate import write_cluster
from cost_models.offload import host_step
from cost_models.unequal import OtherHosts, Slow, bandwidth_share, described, grouped, in_order, weakest

FAST = Device("fast", {"float32": 4e12}, 1e11, 1.0, 2e9, 0.0)
SMALL = Device("small", {"float32": 3e12}, 4e11, 1.0, 1e9, 1e-6)
#: Two hosts of two devices, joined by a wire of 10 GB/s inside and a NIC of 1 GB/s between.
PLAIN = Cluster("toy", FAST, (Link("wire", 2, 0.0, 1e10), Link("net", 4, 0.0, 1e9, nics_per_host=1)), 4, ("ring",))
MIXED = """
based_on = "h100-sxm"
name = "mixed"
num_devices = 32
[[hosts]]
device = "a100-sxm-40"
count = 2
[[slow]]
hosts = [1]
speed = { value = 0.5, source = "clocks, 2026-11-25" }
bandwidth = 0.25
[[slow]]
devices = [16]
speed = 0.8
"""


def mixed(folder: Path, text: str = MIXED, num_devices: int | None = None) -> Cluster:
    path = folder / "mixed.toml"
    path.write_text(text)
    return Cluster.load(path, num_devices)


# --- prices -------------------------------------------------------------------------------------------------------


def test_a_slow_device_takes_longer_for_everything() -> None:
    """4e9 FLOP at 4e12 FLOP/s are 1 ms, at a quarter of the speed 4 ms; 1e8 bytes at 1e11 are 1 ms, too."""
    slow = replace(PLAIN, slow=(Slow((3,), 0.25),))
    for flops, num_bytes in ((4e9, 0.0), (0.0, 1e8)):
        seconds = [float(compute.op_time_s("matmul", flops, num_bytes, "float32", kind.working_device))
                   for kind in slow.kinds()]
        assert sorted(seconds) == pytest.approx([1e-3, 4e-3])
    assert [kind.device for kind in slow.kinds((0, 1))] == [FAST]
    assert float(compute.op_time_s("matmul", 4e9, 0.0, "float32", slow.working_device)) == pytest.approx(4e-3)


def test_two_slow_tables_of_a_device_multiply() -> None:
    slow = replace(PLAIN, slow=(Slow((2, 3), 0.5), Slow((3,), 0.5)))
    assert [speed for _, speed in slow.kinds_by_device] == [1.0, 1.0, 0.5, 0.25]


def test_a_collective_pays_the_slowest_nic_that_it_crosses() -> None:
    """Four ranks in two hosts, one NIC of 1 GB/s each, half of it on host 1: a gather of 1e9 bytes by a ring takes
    3/4 s, then 3/2 s. The wire inside a host stays what it was."""
    slow = replace(PLAIN, slow=(Slow((2, 3), bandwidth=0.5),))
    assert [float(collectives.all_gather_s(1e9, one.group((4,), 0))) for one in (PLAIN, slow)] == pytest.approx(
        [0.75, 1.5])
    assert [float(collectives.all_gather_s(1e9, one.group((2, 2), 1))) for one in (PLAIN, slow)] == pytest.approx(
        [0.05, 0.05])
    assert float(collectives.all_gather_s(1e9, slow.group((2,), 0))) == pytest.approx(0.05)


def test_memory_ends_with_the_smallest_device() -> None:
    some = replace(PLAIN, others=(OtherHosts("small", (2, 3), SMALL),))
    assert (usable_bytes(PLAIN), usable_bytes(some)) == (2e9, 1e9)
    assert described(some) == "2 fast, 2 small"


def test_an_op_takes_the_slower_kind_by_what_it_needs() -> None:
    """FLOPs on the small device (3e12 against 4e12), bytes on the fast one (1e11 against 4e11); a copy is no faster
    on the device that stands for both."""
    some = replace(PLAIN, others=(OtherHosts("small", (2, 3), SMALL),))
    both = [kind.working_device for kind in some.kinds()]
    worst = weakest(both)
    for flops, num_bytes in ((12e9, 0.0), (0.0, 4e8), (12e9, 4e8)):
        each = [float(compute.op_time_s("elementwise", flops, num_bytes, "float32", one)) for one in both]
        assert float(compute.op_time_s("elementwise", flops, num_bytes, "float32", worst)) >= max(each)
    assert some.group((4,), 0).launch_s == 1e-6


@given(st.lists(st.sampled_from(["h100-sxm", "a100-sxm", "a100-pcie", "l4", "b200", "mi300x", "v100-sxm-32"]),
                min_size=2, max_size=4, unique=True), st.sampled_from(["elementwise", "reduction", "gather", "matmul"]),
       st.floats(1e3, 1e14), st.floats(1e3, 1e11), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_nothing_is_faster_on_what_stands_for_several(names: list[str], op_class: str, flops: float, num_bytes: float,
                                                      dtype: str) -> None:
    devices = [Cluster.load(name, software="none").device for name in names]
    each = [float(compute.op_time_s(op_class, flops, num_bytes, dtype, one)) for one in devices]
    assert float(compute.op_time_s(op_class, flops, num_bytes, dtype, weakest(devices))) >= max(each) * (1 - 1e-9)


def test_hosts_of_another_kind_bring_their_links_and_memory(tmp_path: Path) -> None:
    """NVLink of the slower kind, the NICs of the slower kind, host memory of the smaller."""
    found, h100, a100 = mixed(tmp_path), Cluster.load("h100-sxm"), Cluster.load("a100-sxm-40")
    for got, *both in zip(found.links, h100.links, a100.links, strict=True):
        assert got.bandwidth_bytes_per_s == min(one.bandwidth_bytes_per_s for one in both)
        assert got.alpha_s == max(one.alpha_s for one in both)
    assert found.host.memory_bytes == min(h100.host.memory_bytes, a100.host.memory_bytes)
    assert usable_bytes(found) == pytest.approx(usable_bytes(replace(a100, num_devices=32)))
    assert float(host_step(1e9, "float32", "adamw", found).total_s) == pytest.approx(max(
        float(host_step(1e9, "float32", "adamw", one).total_s) for one in (h100, a100)))
    assert [kind.profile.machine for kind in found.kinds((0, 31)) if kind.profile] == ["h100-sxm", "a100-sxm-40"]


# --- the order ----------------------------------------------------------------------------------------------------


def test_equal_hosts_become_neighbours(tmp_path: Path) -> None:
    """Those with most memory first, then the fastest."""
    text = MIXED.replace("count = 2", "hosts = [0, 2]").replace("devices = [16]", "devices = [3]")
    found = mixed(tmp_path, text)
    assert grouped(found) == (3, 1, 2, 0)
    again = in_order(found, grouped(found))
    assert grouped(again) == (0, 1, 2, 3)
    assert described(again, range(8)) == "8 H100 SXM5 80GB"
    assert described(again, range(8, 16)) == "8 H100 SXM5 80GB at 50% speed"
    assert described(again, range(24, 32)) == "7 A100 SXM4 40GB, 1 A100 SXM4 40GB at 80% speed" or described(
        again, range(24, 32)) == "3 A100 SXM4 40GB, 1 A100 SXM4 40GB at 80% speed, 4 A100 SXM4 40GB"
    assert [bandwidth_share(again, range(8 * host, 8 * host + 8)) for host in range(4)] == [1.0, 0.25, 1.0, 1.0]


def test_a_host_that_is_partly_used_keeps_its_place() -> None:
    odd = replace(PLAIN, num_devices=3, slow=(Slow((0,), 0.5),))
    assert grouped(odd) == (0, 1)
    with pytest.raises(ClusterError, match="each of its 2 once"):
        in_order(PLAIN, (0, 0))


# --- files --------------------------------------------------------------------------------------------------------


def test_an_unequal_cluster_is_written_and_read(tmp_path: Path) -> None:
    found = mixed(tmp_path)
    assert [one.devices for one in found.others] == [tuple(range(16, 32))]
    assert found.sources["slow.0.speed"] == "clocks, 2026-11-25"
    for one in (found, in_order(found, (3, 1, 0, 2)), Cluster.load("l4", num_devices=8)):
        write_cluster(tmp_path / "again.toml", one)
        assert Cluster.load(tmp_path / "again.toml") == one


@pytest.mark.parametrize(("old", "new", "said"), [
    ("speed = 0.8", "speed = 0", "slow.1: slow devices 16: speed is 0, and must be in [0.01, 1]: 0.5 is half as fast"),
    ("speed = 0.8", "", "[[slow]] has ['devices']; required: devices = [8, 9] or hosts = [1], numbered from 0, and"),
    ("speed = 0.8", "spede = 0.8\nspeed = 0.8", "slow.1.spede (is it 'speed'?) is not a key"),
    ("devices = [16]", "devices = [16, 16]", "slow.1.devices = [16, 16] has a number twice"),
    ("devices = [16]", "devices = 16", "slow.1.devices = 16; required: a list of whole numbers from 0 on"),
    ("devices = [16]", "devices = [32]", "devices 32 are slow, and its 32 devices are 0-31: load it with num_devices"),
    ("hosts = [1]", "hosts = [4]", "host 4 is named, and 32 devices are on hosts 0-3, of 8 each"),
    ("bandwidth = 0.25", "bandwidth = 4", "bandwidth is 4, and must be in [0.01, 1]"),
    ("count = 2", "count = 5", "hosts.0.count = 5: 32 devices have 4 whole hosts of 8 for it: set num_devices"),
    ("count = 2", "", "hosts.0 has ['device']; required: device = \"h100-sxm\" and either count = 2 (the last hosts)"),
    ("a100-sxm-40", "a100-smx", "hosts.0.device = 'a100-smx' (is it 'a100-sxm'?) is not known; required"),
    ("a100-sxm-40", "gb200-nvl72", "hosts like gb200-nvl72 have 72 devices, on links that join [72, 'all']"),
    ("[[hosts]]", "[[hosts]]\ndevice = \"a100-sxm\"\nhosts = [3]\n[[hosts]]", "devices 24-31 are of two other kinds"),
    ("[[slow]]\nhosts = [1]", "[slow]\nhosts = [1]", "required: [[slow]] tables, with two brackets"),
])
def test_mistakes_are_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = MIXED[: MIXED.index("[[slow]]\ndevices")] if new.startswith("[slow]") else MIXED
    with pytest.raises(ClusterError) as caught:
        mixed(tmp_path, text.replace(old, new, 1))
    assert said in str(caught.value)


def test_fewer_devices_than_described_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="8 devices have 1 whole hosts of 8 for it"):
        mixed(tmp_path, num_devices=8)
    with pytest.raises(ClusterError, match="of another kind, and its 2 devices are 0-1"):
        replace(PLAIN, num_devices=2, others=(OtherHosts("small", (2, 3), SMALL),))
    with pytest.raises(ClusterError, match="all devices of a host are of one kind"):
        replace(PLAIN, others=(OtherHosts("small", (1, 2), SMALL),))
