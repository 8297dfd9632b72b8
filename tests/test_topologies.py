"""Networks as they are (docs/guides/topologies.md): seconds of collectives and choices of plans, worked out by hand."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autoparallel
from autoparallel.plans import Plan
from autoparallel.plans.roles import roles_of
from cost_models import Cluster, ClusterError
from cost_models.calibrate import write_cluster
from cost_models.collectives import all_gather_s, all_to_all_s, send_recv_s
from cost_models.unequal import Slow, lines

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "topologies.md"
FILES = {re.findall(r'^name = "(.+)"', text, re.M)[0]: text
         for text in re.findall(r"```toml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S)}
#: Bytes per second of one GPU by NVLink 4, of one NDR NIC, of a PCIe 4.0 x16 port, of a line between sites.
NVLINK, NDR, PCIE, LINE = 370.8e9, 45e9, 24e9, 11.25e9
GIB = float(2**30)


def described(name: str, folder: Path, devices: int | None = None) -> Cluster:
    """A file of the guide, without a software profile; protocols and latencies left out, so that bytes alone count."""
    (folder / "cluster.toml").write_text(FILES[name], encoding="utf-8")
    return Cluster.load(folder / "cluster.toml", devices, "none")


def bytes_only(cluster: Cluster) -> Cluster:
    plain = tuple(replace(link, alpha_s=0.0, protocols={}, slowdown={}) for link in cluster.links)
    return replace(cluster, links=plain, device=replace(cluster.device, launch_s=0.0))


class Net(nn.Module):
    """``count`` pairs of products w -> 4 w -> w: 8 w^2 weights each."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.ReLU(), nn.Linear(4 * width, width, bias=False))
            for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def planned(cluster: Cluster, rows: int, width: int, mesh: tuple[int, ...] | None, count: int = 2) -> Plan:
    with torch.device("meta"):
        model = Net(count, width).to(torch.bfloat16)
        x = torch.zeros(rows, width, dtype=torch.bfloat16)
    return autoparallel.plan(model, cluster, example_inputs=(x,), mesh_shape=mesh)


def roles(plan: Plan) -> list[str]:
    return [axis.role for axis in roles_of(plan).axes]


# --- rails --------------------------------------------------------------------------------------------------------


def test_rails_of_a_superpod_do_not_share(tmp_path: Path) -> None:
    """32 hosts by one rail: (31/32) b at a NIC's rate, on all eight rails at once. A ring of all 256 leaves each host
    by all eight NICs (360 GB/s). In an all-to-all of 512, all but 8/512 leave by the NIC: 45 GB/s each."""
    pod = bytes_only(described("superpod", tmp_path))
    assert pod.devices_per_host == 8
    assert float(all_gather_s(GIB, pod.group((2, 32, 8), 1))) == pytest.approx(31 / 32 * GIB / NDR)
    assert float(all_gather_s(GIB, pod.group((2, 256), 1))) == pytest.approx(255 / 256 * GIB / (8 * NDR))
    assert float(all_gather_s(GIB, pod.group((2, 32, 8), 0))) == pytest.approx(GIB / 2 / NDR)    # a spine as wide
    assert float(all_to_all_s(GIB, pod.group((512,), 0))) == pytest.approx(504 / 512 * GIB / NDR)
    assert float(all_gather_s(GIB, pod.group((64, 8), 1))) == pytest.approx(7 / 8 * GIB / NVLINK)


@pytest.mark.parametrize(("rows", "expected"), [(131_072, ["data", "tensor"]), (8_192, ["tensor", "data"])])
def test_what_crosses_the_hosts_of_a_superpod(tmp_path: Path, rows: int, expected: list[str]) -> None:
    """32 hosts, two layers of width 8,192 in bfloat16: 2.1 GB of weights. Data parallel between hosts sends their
    gradients and gathers them, an eighth a device: 2 x 268 MB. Tensor parallel sends four activations a layer, of an
    eighth of the rows, 16 KiB each: 2.1 GB of 131,072 rows, 134 MB of 8,192."""
    pod = described("superpod", tmp_path, 256)
    gradients, activations = 2 * 2 * 8 * 8192**2 * 2 / 8, 4 * 2 * rows / 8 * 8192 * 2
    assert activations / gradients == {"data": 4, "tensor": 1 / 4}[expected[0]]
    assert roles(planned(pod, rows, 8192, (32, 8))) == expected


# --- oversubscription -----------------------------------------------------------------------------------------------


def test_a_fat_tree_is_slow_only_for_who_leaves_the_leaf(tmp_path: Path) -> None:
    """Leaves of 64 devices have 64/4 = 16 wires upwards. A ring of all 256 passes them once, by the eight NICs of a
    host; of 64 groups across the leaves each has a fourth of a wire; of an all-to-all 192/256 of all bytes go up."""
    tree = bytes_only(described("fat-tree", tmp_path))
    full = replace(tree, links=(*tree.links[:2], replace(tree.links[2], oversubscription=1.0)))
    assert float(all_gather_s(GIB, tree.group((256,), 0))) == pytest.approx(255 / 256 * GIB / (8 * NDR))
    across = [float(all_gather_s(GIB, one.group((4, 64), 0))) for one in (full, tree)]
    assert across == pytest.approx([3 / 4 * GIB / NDR, 3 * GIB / NDR])
    spread = [float(all_to_all_s(GIB, one.group((256,), 0))) for one in (full, tree)]
    assert spread == pytest.approx([248 / 256 * GIB / NDR, 192 / 256 * 4 * GIB / NDR])
    assert tree.message_bytes_per_s(2) == pytest.approx(NDR / 4)
    wires = replace(tree, links=(*tree.links[:2], replace(
        tree.links[2], oversubscription=1.0, nics_per_host=None, uplinks=16)))
    assert float(all_gather_s(GIB, wires.group((4, 64), 0))) == pytest.approx(across[1])


def test_states_are_sharded_inside_a_leaf(tmp_path: Path) -> None:
    """The weights' 2.15 GB in 64 shards, 33.6 MB each, are reduced between leaves at a fourth of a NIC: 1.5 x 33.6 MB /
    11.25 GB/s = 4.5 ms. Shards of shards are gathered and scattered by the same wires, in as long; nothing else is sent
    there."""
    plan = planned(described("fat-tree", tmp_path), 262_144, 8192, (4, 64))
    between, inside = roles_of(plan).axes
    assert (between.role, inside.role) == ("data", "data")
    assert inside.shards
    crossing = [use for use in plan.prediction.collectives if between.name in use.axis and use.purpose != "activations"]
    assert {use.num_bytes for use in crossing} == {8192 * 65_536 * 4 / 64}
    assert sum(use.seconds for use in crossing) == pytest.approx(4.56e-3, rel=0.03)


# --- PCIe -----------------------------------------------------------------------------------------------------------


def test_a_pcie_switch_shares_one_uplink(tmp_path: Path) -> None:
    """Four devices of a switch gather at the port's rate. Four pairs across the switches have a fourth of the uplink
    each. A ring of eight passes it once. Between hosts eight pairs share one NIC of 22.5 GB/s."""
    hosts = bytes_only(described("pcie-only", tmp_path))
    assert hosts.devices_per_host == 8
    assert float(all_gather_s(GIB, hosts.group((4, 4), 1))) == pytest.approx(3 / 4 * GIB / PCIE)
    assert float(all_gather_s(GIB, hosts.group((2, 2, 4), 1))) == pytest.approx(1 / 2 * GIB / (PCIE / 4))
    assert float(all_gather_s(GIB, hosts.group((2, 8), 1))) == pytest.approx(7 / 8 * GIB / PCIE)
    assert float(all_gather_s(GIB, hosts.group((2, 8), 0))) == pytest.approx(1 / 2 * GIB / (22.5e9 / 8))


@pytest.mark.parametrize("rows", [65_536])
def test_tensor_parallel_stays_in_the_switch(tmp_path: Path, rows: int) -> None:
    """Two layers of width 4,096, a mesh of four switches of four devices: across switches tensor parallelism would send
    4 x 2 x 16,384 rows x 8 KiB = 1.1 GB a device, data parallelism 2 x 537 MB / 4 = 0.27 GB."""
    assert roles(planned(described("pcie-only", tmp_path), rows, 4096, (4, 4))) in (["data", "tensor"],
                                                                                   ["data", "data"])


# --- what is broken -------------------------------------------------------------------------------------------------


def test_a_host_with_seven_devices(tmp_path: Path) -> None:
    """A ring of 15 leaves the second host by its seven NICs. Groups of five would cross the hosts, one of them by two
    NICs: so the plan is data parallel on one axis of all 15, and sends a fifteenth of the rows to each."""
    found = bytes_only(described("one-missing", tmp_path))
    assert float(all_gather_s(GIB, found.group((15,), 0))) == pytest.approx(14 / 15 * GIB / (7 * NDR))
    assert found.group((3, 5), 1).lanes[1] == 2.0    # of ranks 5 to 9, two are on the second host
    plan = planned(found, 15 * 4096, 2048, None, count=1)
    assert (plan.mesh_shape, roles(plan)) == ((15,), ["data"])
    one = described("one-missing", tmp_path, 7)
    assert float(all_gather_s(GIB, bytes_only(one).group((7,), 0))) == pytest.approx(6 / 7 * GIB / NVLINK)
    even = planned(one, 7 * 8192, 2048, None, count=1)
    assert (even.mesh_shape, roles(even)) == ((7,), ["data"])


def test_a_failed_nic_halves_the_rail_that_is_moved(tmp_path: Path) -> None:
    """Eight pairs of hosts on seven NICs: two share one. A ring of all 16 has seven NICs of eight. Hosts that are not
    crossed do not matter, and nothing inside does."""
    broken = bytes_only(described("failed-nic", tmp_path))
    whole = replace(broken, slow=())
    pairs, ring = ([float(all_gather_s(GIB, one.group(mesh, 0))) for one in (whole, broken)]
                   for mesh in ((2, 8), (16,)))
    assert pairs == pytest.approx([GIB / 2 / NDR, GIB / NDR])
    assert ring == pytest.approx([15 / 16 * GIB / (8 * NDR), 15 / 16 * GIB / (7 * NDR)])
    assert float(all_gather_s(GIB, broken.group((8,), 0))) == pytest.approx(7 / 8 * GIB / NVLINK)
    assert broken.is_unequal
    assert lines(broken)[2] == "  devices 8-15: H100 SXM5 80GB, 80 GiB; 1 NIC of each host failed"
    write_cluster(tmp_path / "again.toml", broken)
    assert Cluster.load(tmp_path / "again.toml") == broken
    with pytest.raises(ClusterError, match="8 NICs of a host have failed, and it has 8: a host without a NIC"):
        replace(whole, slow=(Slow((8,), failed_nics=8),))


def test_gradients_take_the_ring_that_a_failed_nic_hurts_less(tmp_path: Path) -> None:
    """Reduced rail by rail (a mesh of 2 x 8) they would take twice as long as before, on one axis of 16 8/7."""
    broken = described("failed-nic", tmp_path)
    whole = replace(broken, slow=())
    by_rail, in_one = ([planned(one, 16_384, 4096, mesh).prediction for one in (whole, broken)]
                       for mesh in ((2, 8), (16,)))
    assert by_rail[1].step_s > by_rail[0].step_s
    assert by_rail[1].step_s - by_rail[0].step_s > in_one[1].step_s - in_one[0].step_s
    assert planned(broken, 16_384, 4096, None).prediction.step_s <= in_one[1].step_s * (1 + 1e-6)


# --- sites ----------------------------------------------------------------------------------------------------------


def test_all_devices_of_a_site_share_its_lines(tmp_path: Path) -> None:
    """Sixteen pairs across two sites by four lines: a fourth of a line each, and half of ping's round trip."""
    sites = described("two-sites", tmp_path)
    assert (sites.devices_per_host, [count for count, _ in sites.group((32,), 0).levels]) == (8, [8, 2, 2])
    seconds = float(all_gather_s(GIB, bytes_only(sites).group((2, 16), 0)))
    assert seconds == pytest.approx(GIB / 2 / (4 * LINE / 16))
    assert 5e-3 < float(send_recv_s(8.0, sites.group((2, 16), 0))) < 5.1e-3


@pytest.mark.parametrize(("rows", "expected"), [(32_768, "replicated"), (1_048_576, "data")])
def test_sites_share_a_batch_only_where_it_pays(tmp_path: Path, rows: int, expected: str) -> None:
    """One layer of width 4,096 is 6 x 134e6 FLOP a row: 16 devices at 0.75 x 989e12 compute 32,768 rows in 2.2 ms and
    1,048,576 in 71 ms, of which another site takes half. Gradients between sites take two latencies (10 ms) and
    268 MB by four lines, 6 ms: so the small batch is computed twice, and the large one cut."""
    compute_s = 6 * 8 * 4096**2 * rows / (16 * 0.75 * 989e12)
    assert (compute_s / 2 > 16e-3) == (expected == "data")
    assert roles(planned(described("two-sites", tmp_path), rows, 4096, (2, 16), count=1))[0] == expected


# --- many devices ---------------------------------------------------------------------------------------------------


def test_groups_of_a_million_devices() -> None:
    """125,000 hosts: by hand, a ring of all has 8 members in each host, and 31,250 groups of 32 four hosts each."""
    many = Cluster.load("h100-sxm", 1_000_000, "none")
    assert [count for count, _ in many.group((1_000_000,), 0).levels] == [8, 125_000]
    inner, outer = many.group((31_250, 32), 1), many.group((31_250, 32), 0)
    assert ([count for count, _ in inner.levels], inner.lanes[1], inner.sharing) == ([8, 4], 8.0, 1)
    assert ([count for count, _ in outer.levels], outer.lanes[1], outer.sharing) == ([1, 31_250], 1.0, 8)


@pytest.mark.slow
def test_a_million_devices_are_planned_without_a_mesh() -> None:
    many, began = Cluster.load("h100-sxm", 1_000_000), time.process_time()
    plan = planned(many, 16_000_000, 1024, None, count=4)
    assert math.prod(plan.mesh_shape) == 1_000_000
    assert time.process_time() - began < 60


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "said"), [
    ('based_on = "h100-sxm"\nname = "tpu-v5p"', "name = 'tpu-v5p' is of a torus, which is not modelled"),
    ('based_on = "h100-sxm"\nname = "ours"\ntorus = [4, 4, 4]', "torus = '[4, 4, 4]' is of a torus"),
    ('based_on = "h100-sxm"\nname = "ours"\ntopology = "3D torus"', "topology = '3D torus' is of a torus"),
    ('based_on = "h100-sxm"\nname = "ours"\n[[links]]\nname = "ICI"', "links.0.name = 'ICI' is of a torus"),
    ('based_on = "h100-sxm"\nname = "ours"\ntopology = "fat-tree"', "a topology is not named but described"),
    ('based_on = "h100-sxm"\nname = "ours"\n[[links]]\nlike = "NVLink 5"', "links.0.like = 'NVLink 5' must be a link"),
    (FILES["fat-tree"].replace("{ value = 4,", "{ value = 0.25,"), "oversubscription = 0.25: must be at least 1"),
    (FILES["two-sites"].replace("uplinks", "nics_per_host = 2\nuplinks"), "give either uplinks, 1 or more, of all"),
])
def test_what_is_no_tree_of_levels_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "cluster.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ClusterError) as caught:
        Cluster.load(tmp_path / "cluster.toml")
    assert said in str(caught.value)


def test_a_torus_is_refused_by_name() -> None:
    with pytest.raises(ClusterError, match=r"'tpu-v4' is a torus: .* plan for it with its vendor's tools"):
        Cluster.load("tpu-v4")
