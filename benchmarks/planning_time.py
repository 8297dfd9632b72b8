"""Planning time by phase: ``python -m benchmarks.planning_time``.

Each case runs in a process of its own, so that CPU seconds and peak memory are honest. CPU seconds from the built (meta
device) model to the plan, then from the plan to one rank's checked module.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.measure import conditions

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Case:
    """A config, how many layers of it, the mesh and the global batch (sequences of ``sequence`` tokens)."""

    config: str
    layers: int
    mesh: tuple[int, ...]
    batch: int
    sequence: int
    memory_limit_bytes: float | None = None

    @property
    def name(self) -> str:
        limit = f", {self.memory_limit_bytes / 2**30:.0f} GiB" if self.memory_limit_bytes else ""
        return f"{self.config}, {self.layers} layers, {'x'.join(map(str, self.mesh))}{limit}"


CASES = [
    Case("gpt2", 12, (4,), 16, 1024),
    Case("llama3-8b", 8, (8, 8), 16, 8192),
    Case("llama3-8b", 16, (8, 8), 16, 8192),
    Case("llama3-8b", 32, (8, 8), 16, 8192),
    Case("llama3-8b", 32, (8, 8), 16, 8192, 24 * 2**30),
    Case("llama3-8b", 32, (32, 8), 256, 8192),
    Case("llama3-8b", 32, (2, 8, 8), 16, 8192),
]


def run_case(case: Case) -> dict[str, Any]:
    """CPU seconds by phase and peak memory of one case, in this process."""
    import autoparallel
    from autoparallel.capture import capture
    from autoparallel.cli import load_model
    from autoparallel.lower import check, emit
    from autoparallel.pricing import Prices
    from autoparallel.rules.space import StrategySpace

    path = CONFIGS / f"{case.config}.json"
    data = json.loads(path.read_text())
    data["n_layer" if case.config == "gpt2" else "num_hidden_layers"] = case.layers
    model, args, kwargs = load_model(data, case.batch, case.sequence, "bfloat16")
    num_devices = 1
    for n in case.mesh:
        num_devices *= n
    cluster = autoparallel.Cluster.load("h100-sxm", num_devices=num_devices)
    started = time.process_time()
    plan = autoparallel.plan(model, cluster, example_inputs=args, example_kwargs=kwargs, mesh_shape=case.mesh,
                             memory_limit_bytes=case.memory_limit_bytes)
    planned = time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    space = StrategySpace(capture(model, args, kwargs), case.mesh)
    prices = Prices(space, cluster)
    labels = plan.labels(space)
    started = time.process_time()
    program = emit(space, labels, prices.path, (0,) * len(case.mesh))
    check(program, space, (0,) * len(case.mesh))
    phases = {k: round(v, 3) for k, v in plan.evidence.seconds.items() if not k.startswith("search:")}
    return {
        "case": case.name, "phases_cpu_s": phases, "plan_cpu_s": round(planned, 3),
        "lower_cpu_s": round(time.process_time() - started, 3), "peak_gib": round(peak, 3),
        "solver": plan.evidence.solver, "gap": plan.evidence.gap, "step_s": plan.prediction.step_s,
    }


def run(cases: list[Case]) -> list[dict[str, Any]]:
    """All cases, each in a fresh process."""
    results = []
    for case in cases:
        code = f"import json; from benchmarks.planning_time import *; print(json.dumps(run_case({case!r})))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise RuntimeError(f"{case.name} failed:\n{done.stderr[-2000:]}")
        results.append(json.loads(done.stdout.strip().splitlines()[-1]))
    return results


def main(small: Annotated[bool, typer.Option(help="only the smallest case")] = False) -> None:
    """Print the results as JSON, by case and phase."""
    typer.echo(json.dumps({"conditions": conditions(), "planning": run(CASES[:1] if small else CASES)}, indent=1))


if __name__ == "__main__":
    typer.run(main)
