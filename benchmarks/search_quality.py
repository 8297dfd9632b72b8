"""How good the plans are that the search finds, and how fast: ``python -m benchmarks.search_quality [NAMES]``.

Each model is captured once (nothing is computed) and planned for H100s on each mesh: without a memory limit, and with
one half way between the least memory of any plan and what the best plan takes without a limit, so that it binds. What
each search finds is held to the best plan found and to the proven lower bound. Prints a JSON object per model and mesh,
then one that sums them up.

NAMES: architectures of the model zoo (512 x 64 tokens), or files of `configs/`, as ``llama3-8b.json`` (256 x 4096).
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from autoparallel import clock
from autoparallel.capture import OpGraph
from autoparallel.errors import SearchError
from autoparallel.search import Pricer, Problem, Solution, evaluate, solve
from autoparallel.search.solver import lowest_memory, table_cells
from benchmarks.measure import conditions, cpu_s, peak_memory_bytes
from cost_models import Cluster

CONFIGS = Path(__file__).parent / "configs"
MESHES = "8,8x8,32x8,2x8x8"
SOLVERS = "auto,recursive"
SIZES = 512, 64
CONFIG_SIZES = 256, 4096
LEAST_S = 30.0
GAP = 1e-3
RATIO = 1.05


@dataclass(frozen=True)
class Answer:
    """What one search said of one problem, or why it has no plan; CPU seconds with those of its processes.

    ``cost`` and ``lower_bound`` in seconds of a training step; ``peak_bytes`` per device.
    """

    stop: str
    cpu_s: float
    wall_s: float
    cost: float | None = None
    lower_bound: float | None = None
    gap: float | None = None
    peak_bytes: float | None = None


@dataclass(frozen=True)
class Row:
    """One model on one mesh. ``least_bytes`` (proven), ``least_plan_bytes`` (of a plan) and ``free_bytes`` (of the best
    plan without a limit) are per device; ``limit`` is half way between the last two, None where they are equal.

    ``free`` and ``limited``: search -> its answer, without a limit and with it.
    """

    model: str
    mesh: str
    nodes: int
    choices: int
    cells: int
    least_bytes: float
    least_plan_bytes: float
    free_bytes: float
    limit: float | None
    free: dict[str, Answer]
    limited: dict[str, Answer]

    def ratios(self, search: str) -> dict[str, float]:
        """Cost of this search's plan over the cheapest plan that any found, by kind of limit; inf without a plan."""
        found = {}
        for kind, answers in (("free", self.free), ("limited", self.limited)):
            costs = {name: math.inf if a.cost is None else a.cost for name, a in answers.items()}
            if search in costs and (least := min(costs.values())) < math.inf:
                found[kind] = costs[search] / least if least else 1.0
        return found


# --------------------------------------------------------------------------------------------------------- one problem


def ask(problem: Problem, search: str, time_limit_s: float, pricer: Pricer) -> Answer:
    from autoparallel.errors import AutoparallelError

    wall, cpu = time.monotonic(), cpu_s()
    try:
        found = (program_alone(problem, time_limit_s) if search == "program" else
                 solve(problem, search, time_limit_s, pricer))
    except AutoparallelError as error:
        return Answer(str(error), cpu_s() - cpu, time.monotonic() - wall)
    spent = cpu_s() - cpu, time.monotonic() - wall
    return Answer(found.stop_reason, *spent, found.objective, found.lower_bound, found.gap, found.peak_bytes)


def program_alone(problem: Problem, time_limit_s: float) -> Solution:
    """HiGHS on the presolved and merged problem, however large, without the help of the other searches.

    Raises SearchError where it has no plan in time.
    """
    from autoparallel.search.high_width.aggregation import shrink
    from autoparallel.search.high_width.event_form import compact_of
    from autoparallel.search.ilp.formulation import Program
    from autoparallel.search.model.dominance import drop_dominated

    deadline = clock.now() + time_limit_s
    reduced = drop_dominated(problem)
    merged = shrink(compact_of(reduced.problem))
    picks, answer = Program(merged.compact).solve(deadline)
    if picks is None:
        raise SearchError(f"the program alone has no plan: {answer.reason}, lower bound {answer.bound:.6g}")
    choice = reduced.restore(merged.restore(picks))
    judged = evaluate(problem, choice)
    return Solution(choice, judged.objective, min(answer.bound, judged.objective), judged.peak_bytes, answer.reason,
                    "program")


def examine(model: str, mesh: str, pricer: Pricer, problem: Problem, searches: Sequence[str], time_limit_s: float
            ) -> Row:
    """Without a limit, then with the one that binds, where there is one."""
    others = [name for name in searches if name != "auto"]
    free = {"auto": ask(problem, "auto", time_limit_s, pricer)}
    least = lowest_memory(problem, clock.now() + LEAST_S)
    used = free["auto"].peak_bytes or math.inf
    free |= {name: ask(problem, name, time_limit_s, pricer) for name in others}
    limit, limited = None, {}
    if least.peak < used < math.inf:
        limit = (least.peak + used) / 2
        binding = replace(problem, limit=limit)
        limited = {name: ask(binding, name, time_limit_s, pricer) for name in ("auto", *others)}
    return Row(model, mesh, len(problem.nodes), max(len(node.costs) for node in problem.nodes), table_cells(problem),
               least.bound, least.peak, used, limit, free, limited)


# ---------------------------------------------------------------------------------------------------------- all models


def captured(model: str) -> OpGraph:
    """An architecture of the model zoo on the CPU, or a config on the meta device."""
    from autoparallel.capture import capture
    from autoparallel.models import load_model
    from benchmarks.zoo import build, inputs_of

    if not model.endswith(".json"):
        return capture(build(model), (), inputs_of(model, *SIZES))
    network, args, kwargs = load_model(json.loads((CONFIGS / model).read_text()), *CONFIG_SIZES, "bfloat16")
    return capture(network, args, kwargs)


def rows_of(model: str, meshes: Sequence[str], searches: Sequence[str], time_limit_s: float) -> Iterator[Row]:
    from autoparallel.pricing import Prices, SpacePricer
    from autoparallel.strategies.space import StrategySpace

    graph = captured(model)
    for mesh in meshes:
        shape = tuple(map(int, mesh.split("x")))
        cluster = Cluster.load("h100-sxm", num_devices=math.prod(shape), software="none")
        pricer = SpacePricer(Prices(StrategySpace(graph, shape), cluster))
        yield examine(model, mesh, pricer, pricer.full(), searches, time_limit_s)


def summary(rows: Sequence[Row], searches: Sequence[str]) -> dict[str, Any]:
    """Over all rows: gaps without proof, worst and mean ratio of each search, seconds on the largest problem."""
    answers = {f"{row.model} {row.mesh} {kind}": of_kind for row in rows
               for kind, of_kind in (("free", row.free), ("limited", row.limited)) if of_kind}
    gaps = {where: of_kind["auto"].gap for where, of_kind in answers.items()}
    largest = max(rows, key=lambda row: row.cells)
    made: dict[str, Any] = {
        "rows": len(rows),
        "limits": sum(row.limit is not None for row in rows),
        "gap above 0.1 %, or no plan": {where: gap for where, gap in gaps.items() if gap is None or gap > GAP},
        "largest": {"model": largest.model, "mesh": largest.mesh, "cells": largest.cells, "cpu_s": {
            name: [of_kind[name].cpu_s for of_kind in (largest.free, largest.limited) if name in of_kind]
            for name in searches}},
    }
    for name in searches:
        ratios = {f"{row.model} {row.mesh} {kind}": ratio for row in rows for kind, ratio in row.ratios(name).items()}
        spent = [of_kind[name].cpu_s for of_kind in answers.values() if name in of_kind]
        made[name] = {"ratio, mean": statistics.mean(ratios.values()), "ratio, worst": max(ratios.values()),
                      f"above {RATIO}": {k: v for k, v in ratios.items() if v > RATIO},
                      "cpu_s, sum": sum(spent), "cpu_s, worst": max(spent)}
    return made


def main(
    names: Annotated[list[str] | None, typer.Argument(help="models; all 46 of the zoo when none is given")] = None,
    meshes: Annotated[str, typer.Option(help="with commas between them")] = MESHES,
    solvers: Annotated[str, typer.Option(help="auto, exact, ilp, recursive, or program: HiGHS alone")] = SOLVERS,
    time_limit: Annotated[float, typer.Option(help="seconds for each search")] = 60.0,
) -> None:
    """A JSON line per model and mesh, then one for all."""
    import torch

    from benchmarks.architectures import ARCHITECTURES

    torch.set_num_threads(1)
    searches = list(dict.fromkeys(["auto", *solvers.split(",")]))
    rows: list[Row] = []
    for model in names or ARCHITECTURES:
        for row in rows_of(model, meshes.split(","), searches, time_limit):
            print(json.dumps(asdict(row)), flush=True)
            rows.append(row)
    typer.echo(json.dumps({**summary(rows, searches), "conditions": conditions(),
                           "peak_memory_bytes": peak_memory_bytes()}))


if __name__ == "__main__":
    typer.run(main)
