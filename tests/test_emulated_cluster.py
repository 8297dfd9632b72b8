"""The emulated cluster: what can be shown without root, and (slow, as root) a small one from end to end."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from autoparallel.calibration.measure import group_shapes
from benchmarks.emulated_cluster import report
from benchmarks.emulated_cluster.__main__ import main
from benchmarks.emulated_cluster.calibration import DEVICE, nominal
from benchmarks.emulated_cluster.clock import (
    COMMUNICATING,
    COMPUTING,
    DeviceClock,
    roofline_s,
    ticking,
)
from benchmarks.emulated_cluster.network import EmulationError, Network, Topology, bytes_per_s, dropped, missing
from benchmarks.emulated_cluster.plans import Spec, make, specs
from benchmarks.emulated_cluster.report import Row, spearman, summary
from benchmarks.emulated_cluster.subjects import MLP, SUBJECTS, Subject
from cost_models import Device

SLOW_DEVICE = Device("slow", {"float32": 1e7}, 1e9, 1.0, 1e9, 0.0)

# --- the network --------------------------------------------------------------------------------------------------


def test_without_root_it_says_so_and_ends_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
                                              ) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    main()
    assert capsys.readouterr().out == "no cluster can be emulated here: it takes root to make network namespaces\n"


def test_without_iproute2_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert missing() == "ip and tc and sysctl not found: install iproute2 and procps"


def test_both_ends_of_each_wire_and_loopback_are_shaped() -> None:
    built = Network(Topology(hosts=2, ranks_per_host=3, inter="250mbit", intra="1gbit"), "test")
    shaped = [" ".join(c) for c in built.commands() if c[0] == "tc"]
    assert [line.split(" burst")[0] for line in shaped] == [
        "tc -n test-host0 qdisc add dev eth0 root tbf rate 250mbit",
        "tc -n test-switch qdisc add dev port0 root tbf rate 250mbit",
        "tc -n test-host0 qdisc add dev lo root tbf rate 1gbit",
        "tc -n test-host1 qdisc add dev eth0 root tbf rate 250mbit",
        "tc -n test-switch qdisc add dev port1 root tbf rate 250mbit",
        "tc -n test-host1 qdisc add dev lo root tbf rate 1gbit",
    ]
    thin = Network(Topology(2, 3, "250mbit", "1gbit", slow=(0,), thin=(1,)), "test")
    rates = [c[c.index("rate") + 1] for c in thin.commands() if c[0] == "tc"]
    assert rates == ["250mbit", "250mbit", "1gbit", "125000000bit", "125000000bit", "1gbit"]
    assert [(one.devices, one.speed, one.bandwidth) for one in thin.topology.slowed()] == [
        ((0, 1, 2), 0.5, 1.0), ((3, 4, 5), 1.0, 0.5)]
    assert [built.host_of(rank) for rank in range(6)] == ["test-host0"] * 3 + ["test-host1"] * 3


def test_rates_and_drops_are_read() -> None:
    assert (bytes_per_s("8kbit"), bytes_per_s("1.5gbit")) == (1e3, 1.875e8)
    assert dropped('[{"kind": "tbf", "drops": 2}, {"kind": "noqueue"}, {"kind": "tbf", "drops": 1}]') == 3
    assert dropped("") == 0
    for rate in ("500", "mbit", "-1mbit", "5 furlong"):
        with pytest.raises(EmulationError, match="cannot read the rate"):
            Topology(inter=rate)


# --- the device clock ---------------------------------------------------------------------------------------------


def test_ops_are_padded_to_the_emulated_device() -> None:
    x = torch.ones(100, 100)
    clock = DeviceClock(SLOW_DEVICE)
    started = time.monotonic()
    with ticking(clock, time.monotonic()):
        y = x @ x
    assert torch.equal(y, torch.full((100, 100), 100.0))
    assert clock.busy_s == pytest.approx(2 * 100**3 / 1e7)
    assert time.monotonic() - started >= 0.2


def test_late_emulation_is_reported() -> None:
    clock = DeviceClock(SLOW_DEVICE)
    with ticking(clock, time.monotonic()):
        torch.ones(10, 10) @ torch.ones(10, 10)
        time.sleep(0.02)
    assert clock.overrun_s >= 0.01


def test_compute_yields_to_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks have real-time priority; others keep what they have."""
    at = [COMMUNICATING]
    monkeypatch.setattr(os, "sched_getparam", lambda thread: os.sched_param(at[-1]))
    monkeypatch.setattr(os, "sched_setparam", lambda thread, param: at.append(param.sched_priority))
    with ticking(DeviceClock(SLOW_DEVICE), time.monotonic()):
        assert at == [COMMUNICATING]
        torch.ones(2) + 1
        assert at == [COMMUNICATING, COMPUTING]
    assert at == [COMMUNICATING, COMPUTING, COMMUNICATING]
    at[:] = [0]
    with ticking(DeviceClock(SLOW_DEVICE), time.monotonic()):
        torch.ones(2) + 1
    assert at == [0]


def test_forward_backward_and_optimizer_are_counted() -> None:
    """Per layer three products (the first needs no gradient of x), AdamW reads four tensors and writes three."""
    device = Device("no launch", {"float32": 1e12}, 1e9, 1.0, 1e9, 0.0)
    model, x = nn.Linear(64, 32, bias=False), torch.ones(16, 64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    clock = DeviceClock(device)
    with ticking(clock, time.monotonic()):
        model(x).backward(torch.ones(16, 32))
    optimizer.step()  # makes its state
    product_bytes = 4 * (16 * 64 + 64 * 32 + 16 * 32)
    assert clock.busy_s == pytest.approx(2 * product_bytes / 1e9, rel=0.2)
    clock = DeviceClock(device)
    with ticking(clock, time.monotonic()):
        optimizer.step()
    assert clock.busy_s == pytest.approx(7 * 4 * 64 * 32 / 1e9, rel=0.1)


def test_views_and_expanded_tensors_cost_what_they_move() -> None:
    clock = DeviceClock(SLOW_DEVICE)
    with ticking(clock, time.monotonic()):
        torch.ones(1, 4).expand(1000, 4).t().contiguous().view(2, 2, 1000).narrow(0, 0, 1)
    assert clock.busy_s == pytest.approx((16 + 16 + 16_000) / 1e9)  # ones, and the copy
    assert roofline_s(0, 1e9, SLOW_DEVICE) == 1.0


# --- plans and report ---------------------------------------------------------------------------------------------


def test_there_are_enough_plans_of_each_kind() -> None:
    wanted = specs(8)
    assert len({spec.name for spec in wanted}) == len(wanted)
    assert sum(spec.kind == "plain" for spec in wanted) >= 8
    assert sum(spec.kind == "hybrid" for spec in wanted) >= 15
    assert [spec.kind for spec in specs(8, most=2)] == ["search", "joint", "plain", "hybrid"]


def test_equal_plans_are_measured_once_and_impossible_ones_reported() -> None:
    subject = Subject(lambda: MLP(width=16, depth=2), lambda: {"x": torch.zeros(8, 16), "y": torch.zeros(8, 16)})
    wanted = [Spec("a", "plain", {"mesh_shape": (2,)}), Spec("b", "plain", {"mesh_shape": (2,)}),
              Spec("c", "hybrid", {"mesh_shape": (2,), "micro_batches": 3})]
    made, refused = make(subject, nominal(Topology(2, 1)), wanted)
    assert [one.name for one in made] == ["a, b"]
    assert len(refused) == 1 and refused[0].startswith("c: ")


def test_summary_tells_errors_order_and_regret() -> None:
    def row(name: str, kind: str, predicted: float, measured: float) -> Row:
        return Row("m", "1gbit", name, (kind,), predicted, (measured, measured), 0.1, 0.1, 0.0)

    rows = [row("s", "search", 1.0, 1.1), row("a", "plain", 1.2, 1.0), row("h", "hybrid", 0.9, 0.8),
            row("j", "joint", 0.7, 0.84)]
    found = summary(rows)
    assert found.search_regret == pytest.approx(0.1)
    assert found.joint_ratio == pytest.approx(1.05)
    assert found.largest_error == pytest.approx(0.2)
    assert found.spearman == pytest.approx(0.6)
    assert len(report.tables(rows)) == 2
    assert spearman([1, 1, 2], [3, 3, 5]) == 1.0


def test_groups_within_and_across_hosts_are_calibrated() -> None:
    assert group_shapes(8, (2,)) == [((4, 2), 1), ((4, 2), 0), ((8,), 0), ((2, 4), 0), ((2, 4), 1)]
    assert group_shapes(2, (1,)) == [((2,), 0)]
    assert group_shapes(4, (4,)) == [((4,), 0), ((2, 2), 0), ((2, 2), 1)]
    cluster = nominal(Topology(4, 2, "500mbit", "2gbit"))
    assert [link.bandwidth_bytes_per_s for link in cluster.links] == pytest.approx([125e6, 62.5e6], rel=0.01)
    assert all(link.bandwidth_bytes_per_s < rate for link, rate in zip(cluster.links, (125e6, 62.5e6), strict=True))
    assert cluster.group((4, 2), 0).sharing == 2
    assert cluster.device == DEVICE


# --- all of it ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.timeout(600)
def test_a_small_cluster_from_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    main(hosts=2, ranks_per_host=1, models="mlp", plans=2, launches=1, steps=1, output=output, clusters=tmp_path)
    found = json.loads(output.read_text())
    assert {kind for row in found["rows"] for kind in row["kinds"]} == {"search", "joint", "plain", "hybrid"}
    assert all(0.2 < row["measured_s"] / row["predicted_s"] < 5 for row in found["rows"])
    assert missing() is None
    assert not [name for name in Path("/run/netns").iterdir() if name.name.startswith(f"apc{os.getpid()}")]


def test_subjects_are_the_same_each_time() -> None:
    for subject in SUBJECTS.values():
        a, b = subject.build(), subject.build()
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
