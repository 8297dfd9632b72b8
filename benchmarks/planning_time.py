"""Planning time by phase: ``python -m benchmarks.planning_time``.

Each repeat of each case runs in a process of its own, so that imports, CPU seconds and peak memory are honest. CPU
seconds of all threads, from the built (meta device) model to the plan, then from the plan to one rank's checked module.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.measure import Spread, as_json, conditions, peak_memory_bytes

CONFIGS = Path(__file__).parent / "configs"
DEPTH_KEYS = {"gpt2": "n_layer"}


@dataclass(frozen=True)
class Case:
    """A config of `configs/`, how many layers of it, the mesh, and the global batch: sequences and their tokens."""

    config: str
    layers: int
    mesh: tuple[int, ...]
    batch: int
    sequence: int
    memory_limit_bytes: float | None = None

    @property
    def name(self) -> str:
        limit = f", {self.memory_limit_bytes / 2**30:.0f} GiB" if self.memory_limit_bytes else ""
        mesh = "x".join(map(str, self.mesh))
        return f"{self.config}, {self.layers} layers, {self.batch} x {self.sequence}, mesh {mesh}{limit}"


CASES = [
    Case("gpt2", 12, (4,), 16, 1024),
    Case("small-llama", 4, (4,), 16, 512),
    *(Case("llama3-8b", layers, mesh, 16, 8192) for mesh in ((8, 8), (32, 8)) for layers in (8, 16, 32)),
    Case("llama3-8b", 32, (8, 8), 16, 8192, 24 * 2**30),
    Case("llama3-8b", 32, (2, 8, 8), 16, 8192),
]


def run_case(case: Case) -> dict[str, Any]:
    """CPU seconds by phase and peak memory of one case, in this process."""
    clock = time.process_time()  # of the interpreter's start and this module
    import torch  # noqa: F401, autoparallel and transformers import it only when they need it
    import transformers  # noqa: F401

    import autoparallel
    import autoparallel.api  # with torch.export; else the first use of `autoparallel.plan` would
    from autoparallel.models import load_model

    imported = time.process_time()
    data = json.loads((CONFIGS / f"{case.config}.json").read_text())
    data[DEPTH_KEYS.get(data["model_type"], "num_hidden_layers")] = case.layers
    model, args, kwargs = load_model(data, case.batch, case.sequence, "bfloat16")
    built = time.process_time()
    cluster = autoparallel.Cluster.load("h100-sxm", num_devices=math.prod(case.mesh))
    wall = time.perf_counter()
    started = time.process_time()
    plan = autoparallel.plan(model, cluster, example_inputs=args, example_kwargs=kwargs, mesh_shape=case.mesh,
                             memory_limit_bytes=case.memory_limit_bytes)
    planned, wall = time.process_time() - started, time.perf_counter() - wall
    peak = peak_memory_bytes()
    phases = {k: v for k, v in plan.evidence.seconds.items() if not k.startswith("search:")}
    phases["report"] = planned - sum(phases.values())
    from autoparallel.garbage import collected_later

    with collected_later():  # as in `autoparallel.compile`
        lowering = _lower(case, plan, model, args, kwargs)
    seconds = {"import": imported - clock, "build": built - imported, **phases, "plan": planned, "plan, wall": wall,
               **lowering, "lowering": sum(lowering.values())}
    return {
        "seconds": seconds, "peak_bytes": {"plan": peak, "lowering": peak_memory_bytes()},
        "solver": plan.evidence.solver, "gap": plan.evidence.gap, "predicted_step_s": plan.prediction.step_s,
    }


def _lower(case: Case, plan: Any, model: Any, args: Any, kwargs: Any) -> dict[str, float]:
    """CPU seconds from the plan to a rank's checked module, as `autoparallel.compile` does it after capture."""
    from autoparallel import Cluster
    from autoparallel.capture import capture
    from autoparallel.lower import check, emit
    from autoparallel.pricing import Prices
    from autoparallel.strategies.space import StrategySpace

    graph = capture(model, args, kwargs)
    coordinate = (0,) * len(case.mesh)
    times = [time.process_time()]
    space = StrategySpace(graph, case.mesh)
    path = Prices(space, Cluster.load("h100-sxm", num_devices=math.prod(case.mesh))).path
    strategies = plan.strategies_on(space)
    times.append(time.process_time())
    program = emit(space, strategies, path, coordinate)
    times.append(time.process_time())
    check(program, space, coordinate)
    times.append(time.process_time())
    return {k: b - a for k, (a, b) in zip(("space", "emit", "check"), itertools.pairwise(times), strict=True)}


def run(cases: list[Case], repeats: int = 1) -> list[dict[str, Any]]:
    """A row per case: spreads of CPU seconds, peak memory (the largest), evidence. Every repeat is a fresh process."""
    return [_row(case, [_fresh(case) for _ in range(repeats)]) for case in cases]


def _row(case: Case, results: list[dict[str, Any]]) -> dict[str, Any]:
    keys = results[0]["seconds"]
    return {
        "case": case.name, **asdict(case),
        "cpu_s": {k: Spread.of([r["seconds"][k] for r in results]) for k in keys if k != "plan, wall"},
        "plan_wall": Spread.of([r["seconds"]["plan, wall"] for r in results]),
        "peak_gib": {k: max(r["peak_bytes"][k] for r in results) / 2**30 for k in results[0]["peak_bytes"]},
        **{k: results[0][k] for k in ("solver", "gap", "predicted_step_s")},
    }


def _fresh(case: Case) -> dict[str, Any]:
    code = f"import json; from benchmarks.planning_time import Case, run_case; print(json.dumps(run_case({case!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900,
                          cwd=Path(__file__).parent.parent)
    if done.returncode:
        raise RuntimeError(f"{case.name} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def table(rows: list[dict[str, Any]]) -> Any:
    """The rows for a terminal: medians."""
    from rich.table import Table

    phases = ("capture", "strategies", "pricing", "search", "plan", "lowering")
    made = Table(title="planning, CPU seconds (medians)", title_justify="left")
    made.add_column("case")
    for column in (*phases, "peak GiB", "gap"):
        made.add_column(column, justify="right")
    for row in rows:
        seconds = (f"{row['cpu_s'][k].median_s:.2f}" for k in phases)
        made.add_row(row["case"], *seconds, f"{row['peak_gib']['plan']:.2f}", f"{row['gap']:.3%}")
    return made


def main(
    small: Annotated[bool, typer.Option(help="only the smallest case")] = False,
    repeats: Annotated[int, typer.Option(help="fresh processes per case")] = 3,
) -> None:
    """Print the results as JSON, by case and phase."""
    rows = run(CASES[:1] if small else CASES, repeats)
    typer.echo(json.dumps({"conditions": conditions(), "planning": as_json(rows)}, indent=1))


if __name__ == "__main__":
    typer.run(main)
