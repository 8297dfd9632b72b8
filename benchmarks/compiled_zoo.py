"""Every architecture compiled: ``python -m benchmarks.compiled_zoo [NAMES...]``.

Each model of `benchmarks.architectures` is compiled by `autoparallel.compile(..., backend=...)` on local gloo ranks,
with the plan chosen for the toy cluster of `benchmarks.model_zoo` (which cuts small models as large ones are cut). It
takes a step, and is held to the model's own loss, gradients and buffers. A model that is refused shows the refusal.
Other plans and steps: ``--given '{"zero_stage": 3, "recompute": "full"}'``, keywords of `autoparallel.compile`, or
``--given '{"by_hand": "dp=2,tp=2"}'``, of `autoparallel.plan`. Micro-batches and stages run by `ParallelModule.step`.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from torch.distributed.tensor import DTensor

from autoparallel.runtime.module import ParallelModule
from benchmarks.architectures import ARCHITECTURES
from benchmarks.measure import conditions
from benchmarks.model_zoo import TOLERANCE, toy_cluster, truth
from benchmarks.rounding import largest_entry
from benchmarks.zoo import build, inputs_of

NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Row:
    """What became of one architecture: ``error``, the largest of any tensor relative to its largest entry, of
    ``tensor``; or why it was ``refused``. ``seconds``: CPU seconds of rank 0 from `compile` to the end of the step."""

    name: str
    error: float = math.inf
    tensor: str = ""
    refused: str = ""
    plan: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        return "refused" if self.refused else "equal" if self.error <= TOLERANCE else "FAILED"

    def line(self) -> str:
        told = self.refused or f"{self.error:.1e} ({self.tensor}); {self.plan}"
        return f"{self.name:16} {self.verdict:7} {self.seconds:5.0f} s  {told}"


def compare(name: str, mesh_shape: tuple[int, ...], backend: str, given: Mapping[str, Any]) -> Row:
    """One architecture, on a rank; ``given``: keywords of `compile`, or, with ``by_hand``, of `plan`."""
    import autoparallel
    from autoparallel.errors import AutoparallelError

    torch.manual_seed(0)
    model, inputs = build(name), inputs_of(name)
    expected, start = truth(copy.deepcopy(model), inputs), time.process_time()
    cluster, how = toy_cluster(math.prod(mesh_shape)), dict(given)
    try:
        if "by_hand" in given:
            how = {"plan": autoparallel.plan(model, cluster, example_kwargs=inputs, **given)}
            mesh_shape = how["plan"].axes[0]
        parallel = autoparallel.compile(model, dist.init_device_mesh("cpu", mesh_shape), example_kwargs=inputs,
                                        backend=backend, outputs="whole", cluster=cluster, **how)
        if parallel.plan.hybrid.is_plain:
            loss = parallel(**inputs).loss
            loss.backward()
        else:
            loss = _whole(parallel.step(**inputs))
    except AutoparallelError as error:
        return Row(name, refused=" ".join(str(error).split())[:300], seconds=time.process_time() - start)
    seconds = time.process_time() - start
    errors = {"loss": _error(loss.detach(), expected.outputs["output 0"])}
    whole = _gradients(parallel)
    for kind, made, wanted in (("gradient of ", whole, expected.gradients),
                               ("buffer ", dict(parallel.named_buffers()), expected.buffers)):
        scale = largest_entry({tensor: value.double() for tensor, value in wanted.items()})
        for tensor, value in wanted.items():
            small = scale if tensor in expected.zero else None
            errors[kind + tensor] = _error(_whole(made.get(tensor)), value, small)
        for tensor in made.keys() - wanted.keys() if kind == "gradient of " else ():    # the step does not use it
            errors[kind + tensor] = largest_entry({tensor: made[tensor].double()})
    worst = max(errors, key=errors.__getitem__)
    return Row(name, errors[worst], worst, plan=parallel.plan.summary().split("\n")[0].strip(), seconds=seconds)


def _gradients(parallel: ParallelModule) -> dict[str, torch.Tensor]:
    """Those of all parameters, whole, from all ranks of a pipeline; nan where ranks disagree."""
    own = {name: _whole(p.grad) for name, p in parallel.named_parameters() if p.grad is not None}
    if parallel.plan.hybrid.stages == 1:
        return own
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    made = dict[str, torch.Tensor]()
    for name, gradient in itertools.chain.from_iterable(found.items() for found in of_ranks):
        made[name] = gradient if torch.equal(made.get(name, gradient), gradient) else gradient * math.nan
    return made


def _whole(value: torch.Tensor | None) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _error(found: torch.Tensor | None, wanted: torch.Tensor, scale: float | None = None) -> float:
    """The largest distance over the largest entry wanted, or over ``scale``; infinite for another shape, or a nan."""
    if found is None or found.shape != wanted.shape:
        return math.inf
    distance = largest_entry({"": found.double() - wanted.double()})
    scale = largest_entry({"": wanted.double()}) if scale is None else scale
    error = distance / scale if scale and distance else distance
    return error if error == error else math.inf


def run_rank(rank: int, name: str, mesh_shape: tuple[int, ...], backend: str, given: Mapping[str, Any], port: int,
             rows: Any) -> None:
    """One rank of a job that compares an architecture."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                      WORLD_SIZE=str(math.prod(mesh_shape)))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    row = compare(name, mesh_shape, backend, given)
    if rank == 0:
        rows.put(row)
    dist.destroy_process_group()


def examine(name: str, mesh_shape: tuple[int, ...], backend: str, given: Mapping[str, Any] = NOTHING) -> Row:
    """One architecture on ranks of its own, so that one that breaks leaves the others alone; ``given``: as `compare`
    takes it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, context = store.port, mp.get_context("spawn")
    del store
    rows = context.SimpleQueue()
    try:
        mp.spawn(run_rank, (name, mesh_shape, backend, dict(given), port, rows), math.prod(mesh_shape))
    except Exception as error:
        return Row(name, tensor=" ".join(str(error).split())[-300:])
    return rows.get()


def main(
    names: Annotated[list[str] | None, typer.Argument(help="architectures; all 46 if none is given")] = None,
    backend: Annotated[str, typer.Option(help="inductor, aot_eager or eager")] = "inductor",
    mesh: Annotated[str, typer.Option(help="as 2 or 2,2")] = "2",
    given: Annotated[str, typer.Option(help="keywords of compile, or by_hand, as JSON")] = "{}",
) -> None:
    """Compile the architectures and compare a step; a line each, and JSON last."""
    shape, keywords, rows = tuple(map(int, mesh.split(","))), json.loads(given), list[Row]()
    for name in names or list(ARCHITECTURES):
        rows.append(examine(name, shape, backend, keywords))
        typer.echo(rows[-1].line())
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in ("equal", "refused", "FAILED")}
    typer.echo(json.dumps({"backend": backend, "mesh": shape, "given": keywords, **counts,
                           "rows": [asdict(row) for row in rows], "conditions": conditions()}))
    raise typer.Exit(counts["FAILED"] > 0)


if __name__ == "__main__":
    typer.run(main)
