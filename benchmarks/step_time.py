"""Step time of the chosen plan against what people do by hand: ``python -m benchmarks.step_time``.

Four local gloo processes, one run: after a warm-up all variants take one training step in turn, again and again (A B C
D A B C D ...), so that drift of the machine hits all alike. Every variant's loss must equal the single process's, or
the benchmark fails. Ratios are of medians: the variant's over ours; below 1 we lose.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from torch import nn

from benchmarks.measure import Spread, as_json, conditions

RANKS = 4
Step = Callable[[], torch.Tensor]


class WideMLP(nn.Module):
    """Few rows, wide layers: gradients are larger than activations, so data parallelism is a poor plan."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(512, 4096)
        self.down = nn.Linear(4096, 512)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.down(torch.relu(self.up(x))), y)


@dataclass(frozen=True)
class Subject:
    """A model, its call, and where tensor parallelism cuts it by hand (module pattern -> style)."""

    name: str
    build: Callable[[], nn.Module]
    kwargs: Callable[[], dict[str, torch.Tensor]]
    by_hand: dict[str, str]


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False)).train()


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=4096, n_embd=256, n_layer=2, n_head=8, n_positions=128, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)).train()


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return WideMLP()


def _tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 4096, (8, 64), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def _rows() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(64, 512, generator=generator), "y": torch.randn(64, 512, generator=generator)}


SUBJECTS = {
    "llama": Subject("llama", _llama, _tokens, {
        r"q_proj|k_proj|v_proj|gate_proj|up_proj": "column", r"o_proj|down_proj": "row"}),
    "gpt2": Subject("gpt2", _gpt2, _tokens, {}),
    "wide_mlp": Subject("wide_mlp", _mlp, _rows, {r"^up$": "column", r"^down$": "row"}),
}


def _loss(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def _stepper(model: nn.Module, kwargs: dict[str, torch.Tensor], share: float = 1.0) -> Step:
    """One SGD step; ``share`` scales the loss of a rank that sees only its part of the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        loss = _loss(model(**kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() * share

    return step


def variants(subject: Subject, predicted: dict[str, float]) -> dict[str, Step]:
    """Every way to train the subject on this mesh, by name. Plans tried are put into ``predicted``."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import autoparallel

    kwargs = subject.kwargs()
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    mine = {k: v.chunk(size)[rank] for k, v in kwargs.items()}
    found: dict[str, Step] = {}
    best = None
    for shape in ((size,), (2, size // 2)):
        parallel = autoparallel.compile(subject.build(), init_device_mesh("cpu", shape), example_kwargs=kwargs)
        predicted["x".join(map(str, shape))] = parallel.plan.prediction.step_s
        if best is None or parallel.plan.prediction.step_s < best.plan.prediction.step_s:
            best = parallel
    assert best is not None
    found["autoparallel"] = _stepper(best, kwargs)
    found["DDP"] = _stepper(nn.parallel.DistributedDataParallel(subject.build()), mine, 1 / size)
    sharded = subject.build()
    for child in sharded.modules():
        if isinstance(child, nn.ModuleList):
            for block in child:
                fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    found["FSDP2"] = _stepper(sharded, mine, 1 / size)
    if subject.by_hand:
        found["tensor parallel by hand"] = _stepper(_tensor_parallel(subject, mesh), kwargs)
    return found


def _tensor_parallel(subject: Subject, mesh: Any) -> nn.Module:
    """torch's own parallelize_module with column- and row-wise linears."""
    import re

    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = subject.build()
    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    plan = {
        name: styles[style]()
        for name, module in model.named_modules() if isinstance(module, nn.Linear)
        for pattern, style in subject.by_hand.items() if re.search(pattern, name)
    }
    return parallelize_module(model, mesh, plan)


def measure(name: str, repeats: int) -> dict[str, Any]:
    """On each rank: seconds of every variant's steps, losses of the first step, predictions."""
    import torch.distributed as dist

    subject = SUBJECTS[name]
    predicted: dict[str, float] = {}
    steps = variants(subject, predicted)
    losses = {}
    for variant, step in steps.items():
        loss = step()
        if variant in ("DDP", "FSDP2"):
            dist.all_reduce(loss)
        losses[variant] = float(loss)
    seconds: dict[str, list[float]] = {variant: [] for variant in steps}
    for repeat in range(repeats + 2):
        for variant, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            dist.barrier()
            if repeat >= 2:
                seconds[variant].append(time.perf_counter() - started)
    return {"seconds": seconds, "losses": losses, "predicted": predicted}


def run(names: list[str], repeats: int) -> list[dict[str, Any]]:
    """Rows of the table: one per subject and variant. Raises RuntimeError when a loss differs."""
    from autoparallel.runtime.launch import launch

    rows = []
    for name in names:
        subject = SUBJECTS[name]
        single = _stepper(subject.build(), subject.kwargs())
        expected = float(single())
        alone = []
        for _ in range(repeats):
            started = time.perf_counter()
            single()
            alone.append(time.perf_counter() - started)
        result = launch(measure, RANKS, name, repeats)[0]
        ours = Spread.of(result["seconds"]["autoparallel"])
        for variant, seconds in {**result["seconds"], "one process": alone}.items():
            loss = result["losses"].get(variant, expected)
            if abs(loss - expected) > 1e-4 * abs(expected):
                raise RuntimeError(f"{name}: {variant} has loss {loss}, one process {expected}")
            spread = Spread.of(seconds)
            rows.append({"model": name, "variant": variant, "step": spread, "ratio": spread.median_s / ours.median_s,
                         "predicted": result["predicted"] if variant == "autoparallel" else None})
    return rows


def table(rows: list[dict[str, Any]]) -> Any:
    """The rows for a terminal."""
    from rich.table import Table

    made = Table(title=f"step time on {RANKS} gloo processes", title_justify="left")
    for column in ("model", "variant", "median", "min", "max", "ratio to ours", "predicted"):
        made.add_column(column, justify="left" if column in ("model", "variant") else "right")
    for row in rows:
        s = row["step"]
        predicted = ", ".join(f"{k}: {v * 1e3:.0f} ms" for k, v in (row["predicted"] or {}).items())
        times = (f"{x * 1e3:.0f} ms" for x in (s.median_s, s.minimum_s, s.maximum_s))
        made.add_row(row["model"], row["variant"], *times, f"{row['ratio']:.2f}", predicted)
    return made


def main(
    models: Annotated[str, typer.Option(help="which, with commas between")] = ",".join(SUBJECTS),
    repeats: Annotated[int, typer.Option(help="steps measured per variant")] = 15,
) -> None:
    """Measure and print the table and JSON."""
    from rich.console import Console

    rows = run(models.split(","), repeats)
    Console().print(table(rows))
    typer.echo(json.dumps({"conditions": conditions(), "step_time": as_json(rows)}))


if __name__ == "__main__":
    typer.run(main)
