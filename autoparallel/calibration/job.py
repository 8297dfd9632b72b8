"""``autoparallel calibrate``: measures the machines at hand, writes a cluster description, prints fit and residuals."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autoparallel.errors import InputError
from cost_models.calibrate import write_cluster

if TYPE_CHECKING:
    from autoparallel.calibration.measure import Calibration


def main(output: Path, ranks: int, nics_per_host: int | None, repeats: int, joined: Sequence[int] = ()) -> None:
    """Measure and write ``output``. Under torchrun all ranks call this and rank 0 writes; else ``ranks`` local
    processes are started (InputError for fewer than two). ``joined``: as in `measure.calibrate` (ClusterError)."""
    from autoparallel.calibration.measure import bounds

    bounds(joined, int(os.environ.get("WORLD_SIZE", ranks)))
    if "WORLD_SIZE" in os.environ:
        found = _under_torchrun(output.stem, nics_per_host, repeats, joined)
    else:
        from autoparallel.launch.local import launch

        if ranks < 2:
            raise InputError(f"--ranks {ranks}: collectives need at least two processes")
        found = launch(_measured, ranks, output.stem, ranks, nics_per_host, repeats, joined)[0]
    if int(os.environ.get("RANK", 0)) == 0:
        _tell(found, output)


def _measured(name: str, ranks_per_host: int, nics_per_host: int | None, repeats: int, joined: Sequence[int]
              ) -> Calibration:
    from autoparallel.calibration.measure import calibrate

    return calibrate(name, ranks_per_host, nics_per_host, repeats, joined)


def _under_torchrun(name: str, nics_per_host: int | None, repeats: int, joined: Sequence[int]) -> Calibration:
    import torch.distributed as dist

    from autoparallel.kernels.groups import destroy_groups

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        return _measured(name, int(os.environ.get("LOCAL_WORLD_SIZE", 1)), nics_per_host, repeats, joined)
    finally:
        destroy_groups()


def _tell(found: Calibration, output: Path) -> None:
    from autoparallel.plans.reports.text import ReportConsole

    source = f"autoparallel calibrate, {datetime.date.today()}, torch {torch.__version__}"
    write_cluster(output, found.cluster, source)
    console = ReportConsole()
    console.print(_links(found))
    console.print(_residuals(found))
    console.print(f"written to {output}: mean error of collectives {found.mean_error:.1%}")


def _links(found: Calibration) -> Any:
    from rich.table import Table

    table = Table(title=found.cluster.name, title_justify="left")
    for column in ("link", "alpha", "bandwidth", "relay", "slow-downs"):
        table.add_column(column)
    for link in found.cluster.links:
        slow = ", ".join(f"{kind} {factor:.2f}" for kind, factor in link.slowdown.items())
        table.add_row(link.name, f"{link.alpha_s * 1e6:.1f} us", f"{link.bandwidth_bytes_per_s / 1e9:.3f} GB/s",
                      f"{link.relay_s_per_byte * 1e9:.3f} ns/B", slow)
    device = found.cluster.device
    table.add_row(device.name, f"launch {device.launch_s * 1e6:.1f} us",
                  f"{device.memory_bandwidth_bytes_per_s / 1e9:.1f} GB/s", "",
                  ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {dtype}" for dtype, rate in device.peak_flops_per_s.items())
                  + f"; {device.overlap_slowdown:.2f} while communicating")
    return table


def _residuals(found: Calibration) -> Any:
    """Mean absolute and worst residual, by collective and group, by op class, and of overlap."""
    from rich.table import Table

    groups: dict[str, list[float]] = {}
    for m, residual in zip(found.measured, found.residuals, strict=True):
        mesh = "x".join(map(str, m.mesh_shape))
        groups.setdefault(f"{m.collective}, axis {m.axis} of {mesh}", []).append(residual)
    for op, residual in zip(found.ops, found.op_residuals, strict=True):
        groups.setdefault(op.op_class, []).append(residual)
    for both, residual in zip(found.overlapped, found.overlap_residuals, strict=True):
        order = "issued after half of it" if both.ahead else "issued first"
        groups.setdefault(f"compute overlapped with {both.collective}, {order}", []).append(residual)
    table = Table(title="predicted against measured", title_justify="left")
    for column in ("what", "cases", "mean error", "worst"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for what, residuals in groups.items():
        worst = max(residuals, key=abs)
        table.add_row(what, str(len(residuals)), f"{sum(map(abs, residuals)) / len(residuals):.1%}", f"{worst:+.1%}")
    return table
