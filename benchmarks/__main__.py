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

    console = Console(width=140, soft_wrap=True)
    planning = planning_time.run(planning_time.CASES[:1] if small else planning_time.CASES, 1 if small else 3)
    console.print(planning_time.table(planning))
    steps = step_time.run(["wide_mlp"] if small else list(step_time.SUBJECTS), 3 if small else 15)
    console.print(step_time.table(steps))
    console.print(step_time.SHARED)
    everything = json.dumps(as_json({"conditions": conditions(), "planning": planning, "step_time": steps}), indent=1)
    if output is not None:
        output.write_text(everything)
    typer.echo(everything)


if __name__ == "__main__":
    typer.run(main)
