"""Step time of the chosen plan against what people do by hand: ``python -m benchmarks.step_time``.

Four local gloo processes, one run: after a warm-up all variants take one training step each, again and again, in every
round in another order, so that drift of the machine, and the step before, hit all equally. Same model, global batch and
optimizer: AdamW as torch makes it, which on CPUs steps our programs by its fused kernel; with ``--fused`` all variants.
Every loss, and the norm of the first gradients, must equal the single process's, or the benchmark fails. A ratio is the
median, with quartiles, of the ratios of all rounds: in the table the variant's over the chosen plan's (below 1, we
lose); below it ours over the other of the same kind (`PAIRS`). CPU seconds count all threads of a rank; they vary less
than the step's on a busy machine.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
import typer
from torch import nn

from benchmarks.measure import Spread, as_json, conditions, quartiles
from benchmarks.subjects import SUBJECTS, Subject, tensor_parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from autoparallel.runtime.module import ParallelModule

RANKS = 4
WARM_UP = 2
TOLERANCE = 1e-4
OURS, ALONE = "autoparallel", "one process"
OUR_BASELINES: dict[str, dict[str, Any]] = {
    "baseline ddp": {"baseline": "ddp"}, "baseline fsdp": {"baseline": "fsdp"},
    "baseline fsdp with ZeRO-3": {"baseline": "fsdp", "zero_stage": 3},
}
#: Ours, and the other that it competes with.
PAIRS = {
    f"{OURS}, baseline ddp": "DDP", f"{OURS}, baseline fsdp": "FSDP2", OURS: "tensor parallel by hand",
    f"{OURS}, inductor, baseline ddp": "DDP, torch.compile", f"{OURS}, inductor, baseline fsdp": "FSDP2, torch.compile",
    f"{OURS}, inductor": "tensor parallel by hand, torch.compile",
}
SHARED = (f"{RANKS} processes with one thread each share {os.cpu_count()} cores; the single process is measured with "
          "one thread and with a thread per core, while the others wait.")

@dataclass
class Prepared:
    """Every way to train one subject on these ranks, by name, and what the search predicted for each mesh."""

    steps: dict[str, Stepper | Alone] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    chosen: str = ""


class Stepper:
    """One AdamW step of a model; returns the global loss. The norm of the first step's gradients is kept.

    ``mean``: each rank has the loss of its part of the batch. ``called``: what is called in place of the model. The
    norm is checked because AdamW hides gradients that are wrong by a factor. ``kernel``: options of all steps' AdamW.
    """

    kernel: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: nn.Module, kwargs: dict[str, Any], mean: bool = False, called: Any = None) -> None:
        self.model, self.kwargs, self.mean = model, kwargs, mean
        self.called = model if called is None else called
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4, **self.kernel)
        self.gradient_norm: float | None = None

    def __call__(self) -> float:
        import torch.distributed as dist

        output = self.called(**self.kwargs)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        if self.gradient_norm is None:
            gradients = (_whole(p.grad) for p in self.model.parameters() if p.grad is not None)
            self.gradient_norm = float(sum(float(g.double().square().sum()) for g in gradients)) ** 0.5
        self.optimizer.step()
        self.optimizer.zero_grad()
        value = _whole(loss.detach())
        if self.mean:
            dist.all_reduce(value)
            value = value / dist.get_world_size()
        return float(value)


class Alone:
    """The whole step on rank 0, with so many threads, while the others wait and return nan."""

    def __init__(self, subject: Subject, threads: int) -> None:
        import torch.distributed as dist

        self.threads = threads
        self.step = None if dist.get_rank() else Stepper(subject.build(), subject.kwargs())

    @property
    def gradient_norm(self) -> float | None:
        return self.step.gradient_norm if self.step else None

    def __call__(self) -> float:
        if self.step is None:
            return float("nan")
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            return self.step()
        finally:
            torch.set_num_threads(before)


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def prepare(subject: Subject, more_plans: bool, compiled: bool) -> Prepared:
    """All variants on this rank. ``more_plans`` adds our program of the mesh not chosen and of the DDP baseline;
    ``compiled`` adds Inductor's of our plans, DDP, FSDP2 and tensor parallelism by hand."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import autoparallel

    found, kwargs = Prepared(), subject.kwargs()
    rank, size = dist.get_rank(), dist.get_world_size()
    line = init_device_mesh("cpu", (size,))
    mine = {k: v.chunk(size)[rank] for k, v in kwargs.items()}

    def ours(shape: tuple[int, ...], **options: Any) -> ParallelModule:
        mesh = init_device_mesh("cpu", shape)
        return autoparallel.compile(subject.build(), mesh, example_kwargs=kwargs, **options)

    made = {"x".join(map(str, shape)): ours(shape) for shape in ((size,), (2, size // 2))}
    found.predicted = {mesh: parallel.plan.prediction.step_s for mesh, parallel in made.items()}
    found.chosen = min(made, key=lambda mesh: found.predicted[mesh])
    found.steps[OURS] = Stepper(made[found.chosen], made[found.chosen].shard_batch(kwargs))
    if more_plans:
        for mesh, parallel in made.items():
            if mesh != found.chosen:
                found.steps[f"{OURS}, mesh {mesh}"] = Stepper(parallel, parallel.shard_batch(kwargs))
        for label, options in OUR_BASELINES.items():
            parallel = ours((size,), **options)
            found.predicted[label.split()[-1]] = parallel.plan.prediction.step_s
            found.steps[f"{OURS}, {label}"] = Stepper(parallel, parallel.shard_batch(kwargs))
    if compiled:
        for baseline in (None, "ddp", "fsdp"):
            shape = tuple(made[found.chosen].mesh.shape) if baseline is None else (size,)
            parallel = ours(shape, baseline=baseline, backend="inductor")
            name = f"{OURS}, inductor{f', baseline {baseline}' if baseline else ''}"
            found.steps[name] = Stepper(parallel, parallel.shard_batch(kwargs))
        parallel = ours((size,), baseline="fsdp")
        found.steps[f"{OURS}, baseline fsdp"] = Stepper(parallel, parallel.shard_batch(kwargs))
        with_ddp = nn.parallel.DistributedDataParallel(subject.build())
        found.steps["DDP, torch.compile"] = Stepper(with_ddp, mine, mean=True, called=torch.compile(with_ddp))
        with_fsdp = fully_sharded(subject, line)
        found.steps["FSDP2, torch.compile"] = Stepper(with_fsdp, mine, mean=True, called=torch.compile(with_fsdp))
        if subject.by_hand:
            by_hand, name = tensor_parallel(subject, line), "tensor parallel by hand, torch.compile"
            found.steps[name] = Stepper(by_hand, kwargs, called=torch.compile(by_hand))
    found.steps["DDP"] = Stepper(nn.parallel.DistributedDataParallel(subject.build()), mine, mean=True)
    found.steps["FSDP2"] = Stepper(fully_sharded(subject, line), mine, mean=True)
    if subject.by_hand:
        found.steps["tensor parallel by hand"] = Stepper(tensor_parallel(subject, line), kwargs)
    found.steps[f"{ALONE}, 1 thread"] = Alone(subject, 1)
    found.steps[ALONE] = Alone(subject, os.cpu_count() or 1)
    return found


def fully_sharded(subject: Subject, mesh: DeviceMesh) -> nn.Module:
    """FSDP2, one group per block and one for the rest."""
    from torch.distributed.fsdp import fully_shard

    model = subject.build()
    for child in model.modules():
        if isinstance(child, nn.ModuleList):
            for block in child:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def measure(name: str, repeats: int, more_plans: bool = False, compiled: bool = False, fused: bool = False
            ) -> dict[str, Any]:
    """On each rank: seconds and losses of every variant's steps, and what was predicted. The slowest rank counts."""
    import torch.distributed as dist

    Stepper.kernel = {"fused": True} if fused else {}
    prepared = prepare(SUBJECTS[name], more_plans, compiled)
    seconds: dict[str, list[float]] = {variant: [] for variant in prepared.steps}
    processor: dict[str, list[float]] = {variant: [] for variant in prepared.steps}
    losses: dict[str, list[float]] = {variant: [] for variant in prepared.steps}
    for repeat in range(WARM_UP + repeats):
        order = list(prepared.steps.items())
        random.Random(repeat).shuffle(order)    # equal on all ranks
        for variant, step in order:
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            loss = step()
            used = time.process_time() - used
            dist.barrier()
            losses[variant].append(loss)
            if repeat >= WARM_UP:
                seconds[variant].append(time.perf_counter() - started)
                mean = torch.tensor(used)
                dist.all_reduce(mean)
                processor[variant].append(float(mean) / dist.get_world_size())
    norms = {variant: step.gradient_norm for variant, step in prepared.steps.items()}
    return {"seconds": seconds, "processor": processor, "losses": losses, "norms": norms,
            "predicted": prepared.predicted, "chosen": prepared.chosen}


def run(names: list[str], repeats: int, more_plans: bool = False, compiled: bool = False, fused: bool = False
        ) -> list[dict[str, Any]]:
    """A row per subject and variant. Raises RuntimeError when a loss differs from the single process's."""
    from autoparallel.launch.local import launch

    return [row for name in names for row in _rows(name, launch(measure, RANKS, name, repeats, more_plans,
                                                                   compiled, fused)[0])]


def _rows(name: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for variant, seconds in result["seconds"].items():
        agreement = {
            "loss_difference": _difference(result["losses"][variant], result["losses"][ALONE]),
            "gradient_norm_difference": _difference([result["norms"][variant]], [result["norms"][ALONE]]),
        }
        for what, difference in agreement.items():
            if not difference <= TOLERANCE:
                raise RuntimeError(f"{name}: {variant} has a {what} from one process of {difference:.1e}, and at most "
                                   f"{TOLERANCE:.0e} is rounding")
        spread = Spread.of(seconds)
        rows.append({"model": name, "variant": variant, "step": spread,
                     "ratio": _ratio(seconds, result["seconds"][OURS]),
                     "processor": Spread.of(result["processor"][variant]), "rounds_s": seconds,
                     "rounds_cpu_s": result["processor"][variant],
                     **agreement, **_prediction(variant, spread, result)})
    return rows


def _ratio(some: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Quartiles of the ratios of equal rounds."""
    return quartiles([one / other for one, other in zip(some, others, strict=True)])


def comparisons(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each pair of `PAIRS` that was measured, quartiles of ours over the other's, of wall clock and of CPU time."""
    of = {(row["model"], row["variant"]): row for row in rows}
    return [{"model": model, "ours": ours, "other": other,
             "ratio": _ratio(of[model, ours]["rounds_s"], of[model, other]["rounds_s"]),
             "cpu_ratio": _ratio(of[model, ours]["rounds_cpu_s"], of[model, other]["rounds_cpu_s"])}
            for model in dict.fromkeys(model for model, _ in of) for ours, other in PAIRS.items()
            if (model, ours) in of and (model, other) in of]


def _told(ratio: tuple[float, float, float]) -> str:
    return "{1:.2f} ({0:.2f} to {2:.2f})".format(*ratio)


def _difference(values: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


def _prediction(variant: str, spread: Spread, result: dict[str, Any]) -> dict[str, Any]:
    """For our own variants: the mesh, the predicted seconds, and measured over predicted."""
    if not variant.startswith(OURS):
        return {}
    key = result["chosen"] if variant in (OURS, f"{OURS}, inductor") else variant.split()[-1]
    if key not in result["predicted"]:
        return {}
    predicted = result["predicted"][key]
    return {"mesh": key, "predicted_s": predicted, "measured_over_predicted": spread.median_s / predicted,
            "predicted_by_mesh_s": result["predicted"]}


def table(rows: list[dict[str, Any]]) -> Any:
    """The rows for a terminal."""
    from rich.table import Table

    made = Table(title=f"step time on {RANKS} gloo processes", title_justify="left")
    for column in ("model", "variant", "median", "quartiles", "ratio to ours", "CPU", "loss differs", "mesh",
                   "predicted"):
        made.add_column(column, justify="left" if column in ("model", "variant") else "right")
    for row in rows:
        s = row["step"]
        times = f"{s.median_s * 1e3:.0f} ms", f"{s.lower_s * 1e3:.0f} to {s.upper_s * 1e3:.0f}"
        predicted = f"{row['predicted_s'] * 1e3:.0f} ms" if "predicted_s" in row else ""
        made.add_row(row["model"], row["variant"], *times, _told(row["ratio"]),
                     f"{row['processor'].median_s * 1e3:.0f} ms", f"{row['loss_difference']:.0e}",
                     row.get("mesh", ""), predicted)
    return made


def regrets(rows: list[dict[str, Any]]) -> dict[str, tuple[str, float]]:
    """By model: our fastest eager variant, and the seconds of the chosen plan over its (1: the choice was right)."""
    found = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        ours = {row["variant"]: row["step"].median_s for row in rows
                if row["model"] == model and row["variant"].startswith(OURS) and "inductor" not in row["variant"]}
        best = min(ours, key=lambda variant: ours[variant])
        found[model] = best, ours[OURS] / ours[best]
    return found


def main(
    models: Annotated[str, typer.Option(help="which, with commas between")] = ",".join(SUBJECTS),
    repeats: Annotated[int, typer.Option(help="steps measured per variant")] = 15,
    more_plans: Annotated[bool, typer.Option(help="also our other mesh and our own baselines")] = False,
    compiled: Annotated[bool, typer.Option(help="also Inductor's programs: ours and the others' (minutes)")] = False,
    fused: Annotated[bool, typer.Option(help="torch's fused AdamW in all variants")] = False,
) -> None:
    """Measure and print the table and JSON."""
    from rich.console import Console

    rows, console = list[dict[str, Any]](), Console(width=140, soft_wrap=True)
    for name in models.split(","):
        rows += (made := run([name], repeats, more_plans, compiled, fused))
        console.print(table(made))
        for one in comparisons(made):
            console.print(f"{name}: {one['ours']} over {one['other']}: {_told(one['ratio'])}; CPU "
                          f"{_told(one['cpu_ratio'])}")
    for model, (best, regret) in regrets(rows).items() if more_plans else ():
        console.print(f"{model}: the chosen plan takes {regret:.2f} times as long as our fastest, {best}")
    console.print(SHARED)
    typer.echo(json.dumps({"conditions": conditions(), "sharing": SHARED, "step_time": as_json(rows),
                           "comparisons": comparisons(rows), "regret": regrets(rows)}))


if __name__ == "__main__":
    typer.run(main)
