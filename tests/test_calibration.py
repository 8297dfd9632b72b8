"""`autoparallel calibrate`: what it measures fits together and is read back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from autoparallel import Cluster
from autoparallel.calibration import measure
from autoparallel.cli import app
from autoparallel.kernels.groups import Axis
from cost_models import ClusterError, Host, Link
from cost_models.calibrate import (
    Measured,
    MeasuredOp,
    MeasuredOverlap,
    fit_device,
    fit_overlap_slowdown,
    predicted_op_s,
    predicted_overlap_s,
    predicted_s,
)
from cost_models.links import UNLIMITED
from cost_models.memory import optimizer_step_s
from tests.support.tiers import slow


def calibrate_two() -> tuple[Cluster, int, int]:
    measure.SIZES, measure.SIDES, measure.TRAFFIC = (2**12, 2**16, 2**18), {"cpu": (32, 64)}, {"cpu": (2**10, 2**16)}
    measure.OVERLAP_SIDES, measure.OVERLAP_BYTES, measure.SEQUENCES = {"cpu": 64}, 2**18, {"cpu": (16,)}
    found = measure.calibrate("two ranks", ranks_per_host=2, repeats=2)
    orders = [(m.collective, m.ahead) for m in found.overlapped]
    assert set(orders) == {(kind, ahead) for kind in measure.OVERLAP_KINDS for ahead in (0.0, 0.5)}
    assert len(orders) == len(found.overlap_residuals) == 2 * 3 * 3
    assert found.cluster.device.overlap_slowdown == fit_overlap_slowdown(found.overlapped)
    assert len(found.residuals) == len(found.measured) and len(found.op_residuals) == len(found.ops)
    return found.cluster, len(found.measured), len(found.ops)


def test_all_ranks_measure_the_same_machine(ranks) -> None:  # type: ignore[no-untyped-def]
    (cluster, calls, ops), (other, *_) = ranks(2).run(calibrate_two, timeout_s=120)
    assert cluster == other
    assert calls == 5 * 3 and ops == 2 + 1 + 2 * 3
    assert set(cluster.device.memory_efficiency) == {"default", "reduction", "optimizer"}
    assert set(cluster.call_s) == set(measure.KINDS)
    assert cluster.links[0].bandwidth_bytes_per_s > 1e5


def test_a_device_is_recovered_from_its_own_prices() -> None:
    rates = {"matmul": 1e12, "pointwise": 1e10, "reduction": 2e9, "optimizer": 5e9}
    sizes = {"matmul": [1e6, 1e8, 1e9], "pointwise": [1.0, 1e5, 1e7], "reduction": [1e5, 1e7],
             "optimizer": [28.0, 28e6]}
    ops = [MeasuredOp(kind, size, 1e-5 * (kind != "optimizer") + size / rates[kind])
           for kind, some in sizes.items() for size in some]
    device = fit_device("toy", ops, 1e9)
    assert device.launch_s == pytest.approx(1e-5, rel=1e-4)
    assert device.peak_flops_per_s["float32"] == pytest.approx(1e12, rel=0.01)
    assert device.memory_bandwidth_bytes_per_s == pytest.approx(1e10, rel=0.01)
    assert all(predicted_op_s(device, op) == pytest.approx(op.seconds, rel=0.01) for op in ops)
    assert optimizer_step_s(1e6, "float32", "adamw", device) == pytest.approx(28e6 / 5e9)
    assert optimizer_step_s(1e6, "float32", "sgd", device) == pytest.approx(12e6 / 5e9)
    plain = fit_device("toy", [op for op in ops if op.op_class != "optimizer"], 1e9)    # at the rate of transfers
    assert optimizer_step_s(1e6, "float32", "adamw", plain) == pytest.approx(28e6 / 1e10, rel=0.01)


def test_a_gpu_has_a_peak_by_dtype_and_attention_of_its_own() -> None:
    rates = {"float32": 5e13, "bfloat16": 7e14}
    shares = {("float32", 1e9): 0.9, ("bfloat16", 1e9): 0.35}    # small products fill float32's units first
    ops = [MeasuredOp("matmul", size, 1e-5 + size / rate / shares.get((dtype, size), 1.0), dtype)
           for dtype, rate in rates.items() for size in (1e9, 1e12)]
    ops += [MeasuredOp("attention", size, 1e-5 + size / 5e14, "bfloat16") for size in (1e11, 1e12)]
    ops += [MeasuredOp("pointwise", size, 1e-5 + size / 4e12) for size in (1.0, 1e9)]
    device = fit_device("toy", ops, 1e11)
    assert device.peak_flops_per_s == pytest.approx(rates, rel=0.01)
    assert all(share == pytest.approx(5 / 7, rel=0.01) for _, share in device.efficiency["attention"])
    assert all(predicted_op_s(device, op) == pytest.approx(op.seconds, rel=0.02) for op in ops
               if op.size > 1 and (op.dtype, op.size) != ("float32", 1e9))
    with pytest.raises(ClusterError, match="matmul in bfloat16"):
        fit_device("toy", [op for op in ops if op.dtype == "bfloat16" or op.op_class == "pointwise"], 1e11)


@settings(max_examples=30)
@given(slowdown=st.integers(0, 100), cases=st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10),
                                                               st.sampled_from([0.0, 0.5])), min_size=1, max_size=5))
def test_how_much_compute_and_communication_slow_each_other_is_recovered(
        slowdown: int, cases: list[tuple[float, float, float]]) -> None:
    true = 1 + slowdown / 100
    made = [MeasuredOverlap("all_reduce", compute_s, sent_s, ahead, 0.0) for compute_s, sent_s, ahead in cases]
    measured = [replace(m, seconds=predicted_overlap_s(true, m)) for m in made]
    assert fit_overlap_slowdown(measured) == pytest.approx(true)


@pytest.mark.parametrize(("ahead", "both"), [(0.0, 2.0 + 0.3 * 1.0), (0.5, 1.0 + 1.3), (1.0, 2.0 + 1.0)])
def test_overlap_slows_only_the_overlapping_tasks(ahead: float, both: float) -> None:
    """Two seconds of compute and one of communication, issued before, in the middle and behind."""
    assert predicted_overlap_s(1.3, MeasuredOverlap("all_reduce", 2.0, 1.0, ahead, 0.0)) == pytest.approx(both)


def test_messages_are_measured_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages go on and back in turns: a rank that only sends would run ahead of them."""
    told: list[int] = []
    monkeypatch.setattr(measure, "_pass_on", lambda tensor, axis, group, by: told.append(by))
    group: Any = None
    pass_on = measure._calls(Axis("all", 2, 0, ""), group, 64, torch.device("cpu"))["send_recv"]
    for _ in range(4):
        pass_on()
    assert told == [1, -1, 1, -1]


@dataclass
class Pretended:
    """A machine whose collectives take what ``cluster`` predicts; ``shapes``: the meshes that were asked for."""

    cluster: Cluster
    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def mesh(self, kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        self.shapes.append(shape)
        return shape

    def collectives(self, mesh: tuple[int, ...], axis: int, kinds: Sequence[str], sizes: Sequence[int], repeats: int
                    ) -> list[Measured]:
        cases = [Measured(kind, mesh, axis, float(nbytes), 0.0) for kind in kinds for nbytes in sizes]
        return [replace(case, seconds=predicted_s(self.cluster, case)) for case in cases]


#: Hosts of 4 in racks of 16 in rooms of 64; domains of 16 over hosts of 4 by NVLink; hosts alone; devices of their own.
@pytest.mark.parametrize(("ranks_per_host", "asked", "names"), [
    pytest.param(4, (4, 16), ["inside a host", "joins 16 devices", "joins all devices"], marks=pytest.mark.slow),
    (4, (16,), ["joins 16 devices", "joins all devices"]), slow(4, (), ["inside a host", "between hosts"]),
    slow(1, (8,), ["joins 8 devices", "between hosts"]),
])
def test_each_link_is_measured_apart_and_recovered(ranks_per_host: int, asked: tuple[int, ...], names: list[str],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = list(zip((2e-6, 5e-6, 1e-5), (2e11, 5e10, 1e10), (asked or (4,)) + (UNLIMITED,), strict=False))
    links = [Link(f"link {size}", size, alpha_s, rate) for alpha_s, rate, size in speeds]
    links[-1] = replace(links[-1], nics_per_host=2)
    device = Cluster.load("local-cpu").device
    there = Pretended(Cluster("there", device, tuple(links), 64, ("ring",), host=Host(devices=ranks_per_host)))
    monkeypatch.setattr(measure.dist, "get_world_size", lambda: 64)
    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", there.mesh)
    monkeypatch.setattr(measure, "time_collectives", there.collectives)
    monkeypatch.setattr(measure, "time_ops", lambda *_: [])
    monkeypatch.setattr(measure, "fit_device", lambda *_: device)
    monkeypatch.setattr(measure, "time_overlapped", lambda *_: [MeasuredOverlap("all_reduce", 1.0, 1.0, 0.0, 1.0)])
    made = measure.calibrate("here", ranks_per_host, nics_per_host=2, joined=asked)
    assert max(map(abs, made.residuals)) < 0.01 and made.cluster.devices_per_host == ranks_per_host
    assert [link.name for link in made.cluster.links] == names and there.shapes[0] == made.measured[0].mesh_shape
    for found, link in zip(made.cluster.links, links, strict=True):
        assert (found.num_devices, found.nics_per_host) == (link.num_devices, link.nics_per_host)
        assert found.alpha_s == pytest.approx(link.alpha_s, rel=0.02)
        assert found.bandwidth_bytes_per_s == pytest.approx(link.bandwidth_bytes_per_s, rel=0.02)


@pytest.mark.parametrize("joined", [(3,), (4, 6), (8, 4), (5, 10)])
def test_links_that_do_not_nest_are_refused(joined: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="give each as a multiple of the one before"):
        measure.group_shapes(16, joined)
    result = CliRunner().invoke(app, ["calibrate", "--ranks", "16", "--output", str(tmp_path / "x.toml"),
                                      "--links", ",".join(map(str, joined))])
    assert isinstance(result.exception, ClusterError)  # before ranks are started


@pytest.mark.slow
def test_the_command_writes_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    result = CliRunner().invoke(app, ["calibrate", "--output", str(path), "--ranks", "2", "--repeats", "1"])
    assert result.exit_code == 0, result.output
    cluster = Cluster.load(path, num_devices=2)
    assert cluster.name == "here" and "autoparallel calibrate" in cluster.sources["links.0.alpha_s"]
    assert "autoparallel calibrate" in cluster.sources["device.overlap_slowdown"]
