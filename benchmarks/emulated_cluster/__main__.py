"""``python -m benchmarks.emulated_cluster``: see README.md in this folder."""

from __future__ import annotations

import json
import signal
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console

from autoparallel.calibration.measure import Calibration
from benchmarks.emulated_cluster import report
from benchmarks.emulated_cluster.calibration import calibrate, source
from benchmarks.emulated_cluster.network import EmulationError, Network, Topology, missing, network
from benchmarks.emulated_cluster.plans import Made, equal, make, specs
from benchmarks.emulated_cluster.pool import pool
from benchmarks.emulated_cluster.report import Row
from benchmarks.emulated_cluster.steps import Steps, check_losses, measure_steps
from benchmarks.emulated_cluster.subjects import SUBJECTS
from benchmarks.measure import as_json, conditions
from cost_models.calibrate import write_cluster

#: Numbers of slow hosts, and of those whose NIC has half the rate.
UNEQUAL = ((1, 3), (2,))


def main(
    hosts: Annotated[int, typer.Option(help="network namespaces")] = 4,
    ranks_per_host: Annotated[int, typer.Option(help="processes in each")] = 2,
    inter: Annotated[str, typer.Option(help="rate of each NIC and direction; several with commas between")] = "200mbit",
    intra: Annotated[str, typer.Option(help="rate of each host's loopback")] = "1gbit",
    models: Annotated[str, typer.Option(help="which, with commas between")] = ",".join(SUBJECTS),
    plans: Annotated[int | None, typer.Option(help="at most so many beside the two searches; all by default")] = None,
    hybrid: Annotated[bool, typer.Option("--hybrid", help="hybrid plans and the joint search's only")] = False,
    copies: Annotated[bool, typer.Option("--copies", help="ZeRO-3 and tensor-parallel plans with micro-batches one "
                                         "after the other and multi-copy, and the joint search's only; with --hybrid "
                                         "pipelines")] = False,
    unequal: Annotated[bool, typer.Option("--unequal", help="hosts 1 and 3 compute at half the speed, host 2 has a NIC "
                                          "of half the rate; hybrid plans, each also as for equal hosts")] = False,
    launches: Annotated[int, typer.Option(help="fresh processes so often")] = 2,
    steps: Annotated[int, typer.Option(help="steps measured per plan and launch")] = 5,
    clusters: Annotated[Path | None, typer.Option(help="write the calibrated descriptions into this folder")] = None,
    output: Annotated[Path | None, typer.Option(help="write everything here as JSON")] = None,
) -> None:
    """Measure step times of plans on an emulated cluster, and compare them with the predictions."""
    reason = missing()
    if reason is not None:
        typer.echo(f"no cluster can be emulated here: {reason}")
        return
    signal.signal(signal.SIGTERM, _end)
    console = Console(width=160, soft_wrap=True)
    slow, thin = UNEQUAL if unequal else ((), ())
    settings = [Topology(hosts, ranks_per_host, rate, intra, slow, thin) for rate in inter.split(",")]
    rows: list[Row] = []
    calibrations = []
    try:
        with _folder(clusters) as folder:
            for topology in settings:
                with network(replace(topology, slow=(), thin=())) as built:
                    calibration = _calibrated(built, folder, console)
                    calibrations.append(calibration)
                with network(topology) as built:
                    calibration = _slowed(calibration, topology, folder)
                    wanted = specs(topology.num_ranks, plans, hybrid or unequal, copies)
                    wanted += equal(wanted) if unequal else []
                    for name in models.split(","):
                        rows += _measured(built, name, calibration, folder, wanted, launches, steps, console)
                    if dropped := built.drops():
                        raise EmulationError(f"{dropped} packets were dropped: what was measured is worth nothing")
    finally:  # what was measured is kept where a later model fails
        for table in report.tables(rows):
            console.print(table)
        for line in report.unequal_lines(rows):
            console.print(line, markup=False)
        if output is not None:
            output.write_text(json.dumps(_everything(rows, calibrations), indent=1), encoding="utf-8")


def _end(*_: object) -> None:
    """What is asked to stop takes its network down first."""
    raise SystemExit(143)


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with TemporaryDirectory(prefix="emulated-cluster-") as folder:
        yield Path(folder)


def _file(topology: Topology, folder: Path) -> Path:
    return folder / f"emulated-{topology.hosts}x{topology.ranks_per_host}-{topology.inter}-{topology.intra}.toml"


def _calibrated(built: Network, folder: Path, console: Console) -> Calibration:
    with pool(built) as ranks:
        found = calibrate(ranks, built.topology)
    write_cluster(_file(built.topology, folder), found.cluster, source(found))
    console.print(f"{built.topology.name}: {source(found)}")
    for link in found.cluster.links:
        slow = ", ".join(f"{kind} {factor:.2f}" for kind, factor in link.slowdown.items())
        rate = link.bandwidth_bytes_per_s / 1e6
        relay = f", relay {link.relay_s_per_byte * 1e9:.2f} ns/B" if link.relay_s_per_byte else ""
        console.print(f"  {link.name}: {link.alpha_s * 1e3:.2f} ms, {rate:.1f} MB/s{relay}; {slow}")
    console.print("  a call: " + ", ".join(f"{k} {s * 1e3:.1f} ms" for k, s in found.cluster.call_s.items())
                  + f"; compute and communication at once: {found.cluster.device.overlap_slowdown:.2f} times as long")
    return found


def _slowed(found: Calibration, topology: Topology, folder: Path) -> Calibration:
    """The description, measured with equal hosts, with the hosts and links that are slower as set."""
    if not topology.slow and not topology.thin:
        return found
    cluster = replace(found.cluster, slow=topology.slowed())
    write_cluster(_file(topology, folder), cluster, source(found))
    return replace(found, cluster=cluster)


def _measured(built: Network, name: str, calibration: Calibration, folder: Path, wanted: list[Any], launches: int,
              steps: int, console: Console) -> list[Row]:
    """A row for each plan of a model."""
    made, refused = make(SUBJECTS[name], calibration.cluster, wanted)
    for line in refused:
        console.print(f"{name}: not measured: {line}", markup=False)
    taken: list[list[list[Steps]]] = [[] for _ in made]
    for _ in range(launches):
        with pool(built) as ranks:
            for number, one in enumerate(made):
                path = str(_file(built.topology, folder))
                taken[number].append(ranks.run(measure_steps, name, one.plan.to_json(), path, steps))
                console.print(_row(name, built.topology.inter, one, taken[number]).line, markup=False)
    rows = [_row(name, built.topology.inter, one, ranks) for one, ranks in zip(made, taken, strict=True)]
    check_losses(name, {row.plan: ranks[0][0].losses for row, ranks in zip(rows, taken, strict=True)})
    return rows


def _row(name: str, inter: str, made: Made, launches: list[list[Steps]]) -> Row:
    predicted = made.plan.prediction
    medians = tuple(statistics.median(max(at) for at in zip(*(r.seconds for r in ranks), strict=True))
                    for ranks in launches)
    late = max(max(r.overrun_s) for ranks in launches for r in ranks)
    busy = statistics.mean(statistics.median(r.busy_s) for ranks in launches for r in ranks)
    return Row(name, inter, made.name, tuple(spec.kind for spec in made.specs), predicted.step_s, medians, busy,
               predicted.forward_s + predicted.backward_s + predicted.optimizer_s, late / statistics.median(medians))


def _everything(rows: list[Row], calibrations: list[Calibration]) -> dict[str, Any]:
    told = [{**as_json(row), "measured_s": row.measured_s, "error": row.error} for row in rows]
    fits = [{"cluster": c.cluster.name, "measured": as_json(list(c.measured)), "residuals": list(c.residuals)}
            for c in calibrations]
    return {"conditions": conditions(), "rows": told, "summaries": as_json(report.summaries(rows)),
            "calibrations": fits}


if __name__ == "__main__":
    typer.run(main)
