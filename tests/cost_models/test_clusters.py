"""Machines: loading, errors, and how groups of ranks cross links."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import Cluster, ClusterError, Group, Link, Protocol, collectives, known_clusters
from cost_models.description import _read, _text, cluster_of_device

H100 = Cluster.load("h100-sxm", num_devices=64, software="none")
SMALL = """
name = "mine"
[device]
name = "toy"
memory_bytes = 1e9
memory_bandwidth_bytes_per_s = 1e11
memory_bandwidth_efficiency = 0.8
launch_s = 1e-6
[device.peak_flops_per_s]
float32 = 1e12
[[links]]
name = "wire"
num_devices = 4
alpha_s = 1e-6
bandwidth_bytes_per_s = { value = 1e10, source = "the box" }
[[links]]
name = "net"
alpha_s = 1e-5
bandwidth_bytes_per_s = 1e9
nics_per_host = 1
"""


def counts(group: Group) -> list[int]:
    return [count for count, _ in group.levels]


# --- loading ------------------------------------------------------------------------------------------------------


def test_clusters_of_devices_by_the_names_that_drivers_report() -> None:
    assert cluster_of_device("NVIDIA A100-SXM4-40GB") == "a100-sxm-40"    # and not of what it is based on
    assert cluster_of_device("NVIDIA B300 SXM6 AC") == "b300"
    assert cluster_of_device("NVIDIA A100-PCIE-40GB") is None
    assert cluster_of_device("") is None
    reported = [name for cluster in known_clusters() for name in tomllib.loads(_text(cluster)).get("reported_as", ())]
    assert len(reported) == len(set(reported)) > len(known_clusters()) - 2    # but for the CPU's


@pytest.mark.parametrize("name", known_clusters())
@pytest.mark.parametrize("count", [1, 3, 6, 8, 12, 24, 96, 1000])
def test_every_machine_works_at_any_size(name: str, count: int) -> None:
    cluster = Cluster.load(name, num_devices=count)
    group = cluster.group((count,), 0)
    assert group.size == count
    assert group.even == (math.prod(counts(group)) == count)
    assert (collectives.all_reduce_s(1e6, group) == 0) == (count == 1)


@pytest.mark.parametrize("name", known_clusters())
def test_every_number_says_where_it_comes_from(name: str) -> None:
    data, _ = _read(name)
    plain = []

    def walk(value: object, path: str) -> None:
        if isinstance(value, dict) and "value" in value:
            plain.extend([path] if len(str(value.get("source", ""))) < 3 else [])
        elif isinstance(value, dict):
            for key, part in value.items():
                walk(part, f"{path}.{key}")
        elif isinstance(value, list):
            for number, part in enumerate(value):
                walk(part, f"{path}.{number}")
        elif isinstance(value, int | float):
            plain.append(path)

    walk({key: value for key, value in data.items() if key not in ("num_devices", "algorithms")}, name)
    assert not plain


def test_by_default_a_host() -> None:
    assert Cluster.load("h100-sxm", software="none").num_devices == 8
    assert Cluster.load("gb200-nvl72", software="none").num_devices == 72
    assert Cluster.load("local-cpu", software="none").num_devices == 4


def test_one_file_is_based_on_another() -> None:
    h100, h200 = Cluster.load("h100-sxm", software="none"), Cluster.load("h200", software="none")
    assert h200.links == h100.links
    assert h200.device.memory_bytes > h100.device.memory_bytes
    assert h200.device.peak_flops_per_s == h100.device.peak_flops_per_s


def test_terabytes_and_gibibytes() -> None:
    """Defect: 1 TB = 1024^4. Rates and sizes are decimal; an 80 GB device has at most 80 GiB."""
    device = H100.device
    assert device.memory_bandwidth_bytes_per_s == 3.35 * 1000**4
    assert device.usable_bytes < device.memory_bytes <= 80.01 * 1024**3


@pytest.mark.parametrize(("old", "new", "says"), [
    ('name = "mine"', "name = 1", "mine.toml: name = 1 is not text; required: the cluster's name"),
    ("launch_s = 1e-6", "", r"mine.toml: device.launch_s is missing; required: seconds of the smallest op.*source"),
    ("launch_s = 1e-6", 'launch_s = "fast"', "device.launch_s = 'fast' is not a number"),
    ("launch_s = 1e-6", "launch_s = -1.0", "mine.toml: device toy: launch_s must not be negative"),
    ("launch_s = 1e-6", "launch_s = { value = 1e-6, unit = 's' }", "device.launch_s has .'unit'."),
    ("memory_bytes = 1e9", "memory_byte = 1e9", "mine.toml: device.memory_bytes is missing"),
    ("float32 = 1e12", "bfloat16 = 1e12", "must give a positive number for float32"),
    ("alpha_s = 1e-5", "alpha_s = 1e-5\nlatency = 3", "links.1.latency is not a key that is known here; known"),
    ("num_devices = 4", "num_devices = 4.5", "links.0.num_devices = 4.5; required: how many"),
    ("nics_per_host = 1", "nics_per_host = 0", "nics_per_host must be at least 1, not 0"),
    ("[[links]]", "[links]", "mine.toml"),
    ("[device.peak_flops_per_s]", "[device.efficiency]\nmatmul = 0.5\n[device.peak_flops_per_s]",
     "device.efficiency.matmul = 0.5; required: pairs"),
    ("[device.peak_flops_per_s]", "[device.efficiency]\nmatmul = [[2.0, 0.5], [1.0, 0.5]]\n[device.peak_flops_per_s]",
     "efficiency.matmul: sizes must grow, but 1 follows 2"),
    ("nics_per_host = 1", "[links.slowdown]\nallreduce = 2.0",
     r"slowdown.allreduce \(is it 'all_reduce'\?\) is not a key"),
    ("nics_per_host = 1", "[links.protocols]\nLL = [1.0, 2.0]", "protocols.LL .*; required: .seconds of a call"),
    ('name = "mine"', 'name = "mine"\nalgorithms = ["magic"]', "algorithms .'magic'. must be some of ring, tree"),
    ('name = "mine"', 'based_on = "nothing"', "based_on = 'nothing' must be another known cluster: a100"),
    ('name = "mine"', 'based_on = "h200"', 'name is missing; required: a name of its own, as name = "ours"'),
    ('name = "mine"', 'based_on = "h200"\nname = "h200"', "name = 'h200' is a known cluster's; required: a name of"),
    ('name = "mine"', "this is not toml", "mine.toml is not TOML"),
])
def test_bad_descriptions_name_the_missing_field(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SMALL.replace(old, new, 1))
    with pytest.raises(ClusterError, match=says):
        Cluster.load(path)


def test_a_description_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(b"\xd0\xff")
    with pytest.raises(ClusterError, match=r"cannot read .*mine\.toml"):
        Cluster.load(tmp_path / "mine.toml")


def test_errors_name_what_is_known() -> None:
    with pytest.raises(ClusterError, match=r"a100-sxm, .*local-cpu, .*; or give the path of a TOML file"):
        Cluster.load("h100", software="none")
    with pytest.raises(ClusterError, match=r"there is no such file"):
        Cluster.load("missing.toml")
    with pytest.raises(ClusterError, match="num_devices=128"):
        H100.group((128,), 0)
    with pytest.raises(ClusterError, match="at least one"):
        Cluster.load("h100-sxm", num_devices=0, software="none")
    with pytest.raises(ClusterError, match=r"axes .2. of a mesh"):
        H100.group((8, 8), 2)
    with pytest.raises(ClusterError, match="num_devices growing"):
        replace(H100, links=H100.links[::-1])


# --- groups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "axis", "expected", "lanes", "sharing"), [
    ((8, 8), 1, [8, 1], 1, 1),     # inside a host
    ((8, 8), 0, [1, 8], 1, 8),     # one rank in each host: eight groups share its NICs
    ((64,), 0, [8, 8], 8, 1),      # the whole cluster: one group has all NICs
    ((4, 16), 0, [1, 4], 1, 8),    # stride 16: four hosts; only half of the hosts see each group
    ((4, 16), 1, [8, 2], 8, 1),
    ((16, 4), 0, [2, 8], 2, 4),
    ((2, 4, 8), 1, [1, 4], 1, 8),
])
def test_groups_cross_hosts_as_ranks_are_laid_out(
    mesh: tuple[int, ...], axis: int, expected: list[int], lanes: float, sharing: int
) -> None:
    group = H100.group(mesh, axis)
    assert counts(group) == expected
    assert group.lanes[1] == lanes or expected[1] == 1
    assert group.sharing == sharing
    assert group.even


def test_a_partly_used_last_host() -> None:
    twelve = Cluster.load("h100-sxm", num_devices=12, software="none").group((12,), 0)
    assert counts(twelve) == [8, 2]
    assert twelve.size == 12
    assert not twelve.even
    assert twelve.lanes[1] == 4    # the second host sends by four NICs only
    across = Cluster.load("h100-sxm", num_devices=12, software="none").group((4, 3), 1)    # ranks 6, 7 | 8
    assert counts(across) == [2, 2]
    assert across.size == 3
    assert across.lanes[1] == 1


def test_three_levels() -> None:
    wire = Link("pair", 2, 1e-6, 2e11)
    cluster = replace(H100, links=(wire, *H100.links))
    assert counts(cluster.group((64,), 0)) == [2, 4, 8]
    assert counts(cluster.group((8, 8), 1)) == [2, 4, 1]
    assert counts(cluster.group((2, 4, 4, 2), 1)) == [1, 1, 4]
    assert counts(cluster.group_of((2, 4, 4, 2), (1, 3))) == [2, 1, 4]


def test_hosts_of_more_than_one_link(tmp_path: Path) -> None:
    """A host is what shares NICs outwards, or as many devices as is said: a switch of four inside a host of eight."""
    wide = SMALL.replace('[[links]]\nname = "net"', """[[links]]
name = "bus"
num_devices = 8
alpha_s = 1e-6
bandwidth_bytes_per_s = 5e9
nics_per_host = 1
[[links]]
name = "net\"""")
    path = tmp_path / "wide.toml"
    for text, devices in ((SMALL, 4), (wide, 8), (wide.replace("[device]", "[host]\ndevices = 2\n[device]", 1), 2)):
        path.write_text(text)
        made = Cluster.load(path)
        assert made.devices_per_host == made.num_devices == devices
    path.write_text(wide.replace("[device]", "[host]\ndevices = 2.5\n[device]", 1))
    with pytest.raises(ClusterError, match="devices must be a whole number, but is"):
        Cluster.load(path)


def test_flattened_groups_do_not_depend_on_how_the_mesh_is_cut() -> None:
    assert H100.group_of((2, 4, 8), (0, 1, 2)) == H100.group((64,), 0)
    assert H100.group_of((2, 4, 8), (2, -2)) == H100.group((2, 32), 1)


def test_shared_network_cards() -> None:
    """Eight devices with one NIC: a group of all has it alone, eight groups have an eighth each."""
    l4 = Cluster.load("l4", num_devices=16, software="none")
    assert l4.group((16,), 0).lanes[1] == 1
    assert l4.group((2, 8), 0).lanes[1] == pytest.approx(1 / 8)
    alone, shared = l4.group((16,), 0), l4.group((2, 8), 0)
    assert collectives.all_reduce_s(1e9, shared) > 3 * collectives.all_reduce_s(1e9, alone)


@settings(max_examples=60)
@given(st.sampled_from(["h100-sxm", "v100-sxm-32", "gb200-nvl72"]), st.lists(st.integers(1, 9), min_size=1, max_size=3),
       st.data())
def test_groups_hold_their_invariants(name: str, mesh: list[int], data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.integers(0, len(mesh) - 1), min_size=1, max_size=len(mesh), unique=True))
    cluster = Cluster.load(name, num_devices=math.prod(mesh))
    group = cluster.group_of(mesh, axes)
    assert group.size == math.prod(mesh[a] for a in axes)
    assert max(counts(group)) <= group.size <= math.prod(counts(group))
    assert all(0 < lanes <= max(1, group.size) for lanes in group.lanes)
    assert (group.size == 1) == (not group.crossed)


def test_invariants_are_checked_at_birth() -> None:
    with pytest.raises(ClusterError, match="cannot have levels"):
        Group(((2, H100.links[0]),), 0.0, size=3)
    with pytest.raises(ClusterError, match="as many positive lanes"):
        Group(((2, H100.links[0]),), 0.0, lanes=(1.0, 1.0))
    with pytest.raises(ClusterError, match="bandwidth_bytes_per_s > 0"):
        Link("wire", 2, 0.0, 0.0)
    with pytest.raises(ClusterError, match="share in"):
        Protocol(0.0, 0.0, 2.0)
