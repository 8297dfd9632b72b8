"""All benchmarks: ``python -m benchmarks``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import planning_time, step_time
from benchmarks.measure import as_json, conditions


def main(
    output: Annotated[Path | None, typer.Option(help="write everything here as JSON")] = None,
    small: Annotated[bool, typer.Option(help="only the smallest case of each")] = False,
) -> None:
    """Planning time by phase, then step time against DDP, FSDP2 and tensor parallelism by hand."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    planning = planning_time.run(planning_time.CASES[:1] if small else planning_time.CASES)
    shown = Table(title="planning, CPU seconds", title_justify="left")
    for column in ("case", "phases", "plan", "lower", "peak GiB", "gap"):
        shown.add_column(column)
    for r in planning:
        phases = ", ".join(f"{k} {v:.2f}" for k, v in r["phases_cpu_s"].items())
        shown.add_row(r["case"], phases, f"{r['plan_cpu_s']:.2f}", f"{r['lower_cpu_s']:.2f}", f"{r['peak_gib']:.2f}",
                      f"{r['gap']:.3%}")
    console.print(shown)
    rows = step_time.run(["wide_mlp"] if small else list(step_time.SUBJECTS), 3 if small else 15)
    console.print(step_time.table(rows))
    everything = {"conditions": conditions(), "planning": planning, "step_time": as_json(rows)}
    if output is not None:
        output.write_text(json.dumps(everything, indent=1))
    typer.echo(json.dumps(everything))


if __name__ == "__main__":
    typer.run(main)
