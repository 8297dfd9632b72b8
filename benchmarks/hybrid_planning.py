"""The joint search beside published hand-made plans: ``python -m benchmarks.hybrid_planning [NAMES]``.

No devices needed. Each case plans a published run's model, machines and batch jointly, and prices the published plan
(its pipeline, mesh and micro-batches; sharding within them is searched, ZeRO stage 1, recompute as stated) by the same
functions. A ratio above 1: ours is predicted faster. Where the published plan does not fit by our prices, it is priced
without a limit, and the report says what it needs. "why" tells the seconds by which the two differ, part by part.
"""

from __future__ import annotations

import functools
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from autoparallel import clock
from autoparallel.schedule.schedules import usual
from benchmarks.measure import conditions, cpu_s, peak_memory_bytes

CONFIGS = Path(__file__).parent / "configs"
PARTS = ("forward", "backward", "optimizer", "forward_communication", "backward_communication", "waiting",
         "hidden")


@dataclass(frozen=True)
class Published:
    """A run: what was trained on what, and the plan by hand: (pipeline, data, tensor) and sequences per micro-batch and
    data-parallel rank."""

    config: str
    cluster: str
    batch: int
    sequence: int
    pipeline: int
    data: int
    tensor: int
    micro_batch: int
    recompute: str
    source: str
    virtual: int = 1  # stages per pipeline rank; several run interleaved

    @property
    def devices(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def micro_batches(self) -> int:
        return self.batch // (self.data * self.micro_batch)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        stage = (self.data, self.tensor)
        return (self.pipeline, *stage) if self.pipeline > 1 else stage


CASES = {
    "llama3-8b": Published("llama3-8b", "h100-sxm", 128, 8192, 1, 8, 8, 1, "none", "ours: tensor 8 within the host"),
    "llama3-70b": Published("llama3-70b", "h100-sxm", 512, 8192, 8, 8, 8, 1, "none", "ours: tensor 8, pipeline 8"),
    "llama3-405b": Published("llama3-405b", "h100-sxm", 2048, 8192, 16, 128, 8, 1, "none",
                             "Llama 3 (2024), table 4: TP 8, CP 1, PP 16, DP 128 on 16,384 H100"),
    "gpt3-175b": Published("gpt3-175b", "a100-sxm", 64, 2048, 8, 1, 8, 1, "selective",
                           "Korthikanti et al. (2022), tables 3 and 5: 64 A100, 13.75 s", virtual=3),
    "gpt3-530b": Published("gpt3-530b", "a100-sxm", 280, 2048, 35, 1, 8, 1, "selective",
                           "Korthikanti et al. (2022), tables 3 and 5: 280 A100, 37.83 s", virtual=3),
    "mixtral-8x7b": Published("mixtral-8x7b", "h100-sxm", 512, 4096, 4, 8, 8, 8, "none",
                              "ours: pipeline 4, experts within the host, 256 H100"),
    "deepseek-v3": Published("deepseek-v3", "h100-sxm", 8192, 4096, 16, 2, 64, 64, "none",
                             "DeepSeek-V3 (2024), section 3.2: pipeline 16, experts over 64, no tensor parallelism; "
                             "2,048 H800 there, H100 here"),
    # The same models on other numbers of devices, beside plans of the usual kind.
    "llama3-8b-1024": Published("llama3-8b", "h100-sxm", 1024, 8192, 1, 1024, 1, 1, "none", "ours: data parallel"),
    "llama3-8b-16384": Published("llama3-8b", "h100-sxm", 2048, 8192, 1, 2048, 8, 1, "none",
                                 "ours: tensor 8 within the host"),
    "llama3-70b-64": Published("llama3-70b", "h100-sxm", 128, 8192, 4, 2, 8, 1, "full", "ours: tensor 8, pipeline 4"),
    "llama3-70b-2048": Published("llama3-70b", "h100-sxm", 2048, 8192, 8, 32, 8, 1, "none",
                                 "ours: tensor 8, pipeline 8"),
    "llama3-70b-16384": Published("llama3-70b", "h100-sxm", 2048, 8192, 4, 512, 8, 1, "none",
                                  "ours: tensor 8, pipeline 4"),
    "llama3-405b-1024": Published("llama3-405b", "h100-sxm", 512, 8192, 16, 8, 8, 1, "full",
                                  "ours: tensor 8, pipeline 16"),
    "llama3-405b-8192": Published("llama3-405b", "h100-sxm", 2048, 8192, 16, 64, 8, 1, "none",
                                  "Llama 3 (2024), table 4: TP 8, CP 1, PP 16, DP 64 on 8,192 H100"),
    "mixtral-8x7b-2048": Published("mixtral-8x7b", "h100-sxm", 2048, 4096, 4, 64, 8, 8, "none",
                                   "ours: pipeline 4, experts within the host"),
    "deepseek-v3-256": Published("deepseek-v3", "h100-sxm", 2048, 4096, 8, 1, 32, 32, "full",
                                 "ours: pipeline 8, experts over 32"),
    "deepseek-v3-1024": Published("deepseek-v3", "h100-sxm", 4096, 4096, 16, 1, 64, 64, "full",
                                  "ours: pipeline 16, experts over 64"),
}


def run_case(case: Published, time_limit_s: float) -> dict[str, Any]:
    """Our plan and the published one, priced the same way; CPU and wall seconds of ours."""
    import autoparallel
    from autoparallel.errors import InfeasibleError, SearchError
    from autoparallel.models import load_model

    data = json.loads((CONFIGS / f"{case.config}.json").read_text())
    model, args, kwargs = load_model(data, case.batch, case.sequence, "bfloat16")
    cluster = autoparallel.Cluster.load(case.cluster, num_devices=case.devices)
    wall, cpu = time.perf_counter(), cpu_s()
    ours = autoparallel.plan(model, cluster, example_inputs=args, example_kwargs=kwargs, joint=True,
                             time_limit_s=time_limit_s)
    seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": cpu_s() - cpu}
    by_hand = functools.partial(
        autoparallel.plan, model, cluster, example_inputs=args, example_kwargs=kwargs, mesh_shape=case.mesh_shape,
        micro_batches=case.micro_batches, pipeline_stages=case.pipeline * case.virtual, zero_stage=1,
        schedule=usual(case.virtual) if case.pipeline > 1 else None, recompute=case.recompute,
        time_limit_s=time_limit_s,
    )
    fault = ""
    try:
        theirs = by_hand()
    except (InfeasibleError, SearchError) as error:
        fault, theirs = str(error), by_hand(memory_limit_bytes=math.inf)
    return {"ours": _told(ours), "published": {**_told(theirs), "fault": fault}, "why": _why(ours, theirs),
            "ratio": theirs.prediction.step_s / ours.prediction.step_s, "source": case.source, **seconds,
            "peak_memory_bytes": peak_memory_bytes(), "search": ours.evidence.stop_reason,
            "step_bound_s": ours.evidence.step_bound_s}


def _why(ours: Any, theirs: Any) -> str:
    """By how much the published plan's parts take longer than ours, the largest difference first."""
    more = {part: getattr(theirs.prediction, f"{part}_s") - getattr(ours.prediction, f"{part}_s") for part in PARTS}
    more["hidden"] *= -1
    order = sorted(PARTS, key=lambda part: -abs(more[part]))
    return "published - ours: " + ", ".join(f"{part.replace('_', ' ')} {more[part]:+.2f} s" for part in order)


def _told(plan: Any) -> dict[str, Any]:
    h = plan.hybrid
    return {"mesh": [h.pipeline_ranks, *plan.mesh_shape], "stages": h.stages, "schedule": h.schedule,
            "micro_batches": h.micro_batches, "zero_stage": h.zero_stage, "recompute": h.recompute,
            "step_s": plan.prediction.step_s, "peak_bytes": plan.prediction.peak_bytes}


def main(
    names: Annotated[list[str] | None, typer.Argument(help="which cases; all if none is given")] = None,
    time_limit: Annotated[float, typer.Option(help="seconds for each joint search")] = clock.JOINT_LIMIT_S,
) -> None:
    """Plan the cases and print JSON, one object per line."""
    for name in names or list(CASES):
        typer.echo(json.dumps({"case": name, **run_case(CASES[name], time_limit), "conditions": conditions()}))


if __name__ == "__main__":
    typer.run(main)
