"""`autoparallel calibrate`: what it measures fits together and is read back."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoparallel import Cluster, calibration
from autoparallel.cli import app
from cost_models.calibrate import MeasuredOp, fit_device, predicted_op_s


def calibrate_two() -> tuple[Cluster, int, int]:
    calibration.SIZES, calibration.SIDES, calibration.TRAFFIC = (2**12, 2**16, 2**18), (32, 64), (2**10, 2**16)
    found = calibration.calibrate("two ranks", ranks_per_host=2, repeats=2)
    assert len(found.residuals) == len(found.measured) and len(found.op_residuals) == len(found.ops)
    return found.cluster, len(found.measured), len(found.ops)


def test_all_ranks_measure_the_same_machine(ranks) -> None:  # type: ignore[no-untyped-def]
    (cluster, calls, ops), (other, *_) = ranks(2).run(calibrate_two, timeout_s=120)
    assert cluster == other
    assert calls == 5 * 3 and ops == 4
    assert set(cluster.call_s) == set(calibration.KINDS)
    assert cluster.links[0].bandwidth_bytes_per_s > 1e5


def test_a_device_is_recovered_from_its_own_prices() -> None:
    sizes = {"matmul": [1e6, 1e8, 1e9], "pointwise": [0.0, 1e5, 1e7]}
    ops = [MeasuredOp(kind, size, 1e-5 + size / {"matmul": 1e12, "pointwise": 1e10}[kind])
           for kind, some in sizes.items() for size in some]
    ops = [op for op in ops if op.size or op.op_class == "matmul"] + [MeasuredOp("pointwise", 1.0, 1e-5)]
    device = fit_device("toy", ops, 1e9)
    assert device.launch_s == pytest.approx(1e-5)
    assert device.peak_flops_per_s["float32"] == pytest.approx(1e12, rel=0.01)
    assert device.memory_bandwidth_bytes_per_s == pytest.approx(1e10, rel=0.01)
    assert all(predicted_op_s(device, op) == pytest.approx(op.seconds, rel=0.01) for op in ops)


@pytest.mark.slow
def test_the_command_writes_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    result = CliRunner().invoke(app, ["calibrate", "--output", str(path), "--ranks", "2", "--repeats", "1"])
    assert result.exit_code == 0, result.output
    cluster = Cluster.load(path, num_devices=2)
    assert cluster.name == "here" and "autoparallel calibrate" in cluster.sources["links.0.alpha_s"]
