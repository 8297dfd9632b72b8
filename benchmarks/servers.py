"""Steps of parameter servers by durability: ``python -m benchmarks.servers``.

Servers and workers are processes of this machine; a worker's step pulls rows of a table, and pushes their gradients.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import autoparallel
from autoparallel.launch.local import free_port
from benchmarks.measure import as_json, conditions

DURABILITIES = ("none", "checkpoint", "log", "fsync")


def steps(folder: str, role: str, index: int, port: int, servers: int, workers: int, durability: str, rows: int,
          count: int) -> None:
    """One process of the job; worker 0 writes the seconds of its steps."""
    torch.set_num_threads(1)
    os.environ.update(AUTOPARALLEL_ROLE=role, AUTOPARALLEL_INDEX=str(index), AUTOPARALLEL_SERVERS=str(servers),
                      AUTOPARALLEL_WORKERS=str(workers), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    where = {} if durability == "none" else {"checkpoint_dir": folder, "durability": durability}
    with autoparallel.serve_parameters(**where) as job:  # type: ignore[arg-type]
        table = job.embedding("table", 100_000, 64, optimizer=torch.optim.Adagrad, lr=0.1)
        seconds = []
        for step in range(count):
            ids = torch.randint(0, 100_000, (rows,), generator=torch.Generator().manual_seed(step * workers + index))
            table(ids).square().mean().backward()
            began = time.perf_counter()
            job.step()
            seconds.append(time.perf_counter() - began)
        if index == 0:
            Path(folder, "seconds.json").write_text(json.dumps(seconds))


def measured(servers: int, workers: int, durability: str, rows: int, count: int) -> list[float]:
    """Seconds of worker 0's pushes, the first five left out."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        port, context = free_port(), multiprocessing.get_context("spawn")
        roles = [("scheduler", 0), *(("server", i) for i in range(servers)), *(("worker", i) for i in range(workers))]
        processes = [context.Process(target=steps, args=(folder, role, index, port, servers, workers, durability, rows,
                                                         count)) for role, index in roles]
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"exit codes {[process.exitcode for process in processes]}")
        found: list[float] = json.loads(Path(folder, "seconds.json").read_text())
        return found[5:]


def main(
    servers: Annotated[int, typer.Option(min=1)] = 1,
    workers: Annotated[int, typer.Option(min=1)] = 2,
    rows: Annotated[int, typer.Option(min=1, help="ids of a worker's step; a row has 64 float32")] = 1000,
    count: Annotated[int, typer.Option(min=6, help="steps")] = 105,
) -> None:
    """Median, least and most seconds of a push, by durability; JSON."""
    found: dict[str, Any] = {}
    for durability in DURABILITIES:
        seconds = measured(servers, workers, durability, rows, count)
        found[durability] = {"median_ms": 1e3 * statistics.median(seconds), "least_ms": 1e3 * min(seconds),
                             "most_ms": 1e3 * max(seconds)}
    typer.echo(json.dumps(as_json({"conditions": conditions(), "push": found}), indent=1))


if __name__ == "__main__":
    typer.run(main)
