"""``autoparallel verify``: runs steps of a model on the machines at hand, and prints predicted beside measured."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree

from autoparallel.errors import InputError
from autoparallel.runtime.verify import Verification


@dataclass(frozen=True)
class Request:
    """What to run: a model as `autoparallel.models.load_model` takes it, a plan's file or None (one is searched), a
    cluster's name or file or None (the machine that the devices suggest), a backend, and the number of steps.

    What is None of batch, sequence length and dtype is as in the plan, or without one as in a small trial.
    """

    model: str
    global_batch: int | None
    sequence_length: int | None
    dtype: str | None
    plan: Path | None
    cluster: str | None
    backend: str
    steps: int


def main(request: Request, ranks: int | None, output: Path | None) -> None:
    """Verify on ``ranks`` local processes (None: the plan's devices, without a plan 4), or, under torchrun, srun or
    mpirun, on all that were started; rank 0 prints, and writes the corrected cluster to ``output``."""
    from autoparallel import backends
    from autoparallel.launch.local import launch
    from autoparallel.models import dtype_on, is_factory, read_config
    from autoparallel.plans import Plan

    dtype_on([], request.model, request.dtype)
    if not is_factory(request.model):    # before ranks are started
        read_config(request.model)
    backends.chosen(request.backend, "cuda" if torch.cuda.is_available() else "cpu")
    given = Plan.load(request.plan) if request.plan is not None else None
    needed = 4 if given is None else math.prod(given.axes[0])
    if "WORLD_SIZE" not in os.environ and given is not None and ranks not in (None, needed):
        raise InputError(f"the plan is for {needed} devices, and --ranks is {ranks}: give --ranks {needed}, or leave "
                         "it out")
    if "WORLD_SIZE" in os.environ:
        import autoparallel

        autoparallel.init()
        found = run(request)
    else:
        found = launch(run, ranks or needed, request)[0]
    if int(os.environ.get("RANK", 0)) == 0:
        print(found)
        if output is not None:
            found.save(output)
            print(f"corrected cluster written to {output}")


def run(request: Request) -> Verification:
    """One rank's part: compile, give the parameters values, measure."""
    import torch.distributed as dist

    import autoparallel
    from autoparallel.models import load_model, load_planned

    plan = autoparallel.Plan.load(request.plan) if request.plan is not None else None
    batch, length, dtype = request.global_batch, request.sequence_length, request.dtype
    model, args, kwargs = (load_planned(request.model, plan.model.inputs, dtype or plan.model.dtype, batch, length)
                           if plan is not None else
                           load_model(request.model, batch or 8, length, dtype or "float32", usual_length=128))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parallel = autoparallel.compile(model, dist.get_world_size(), example_inputs=args, example_kwargs=kwargs, plan=plan,
                                    cluster=request.cluster, backend=request.backend)
    parallel.init_weights(device)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: _values(t, device), (args, kwargs))
    return parallel.verify(*args, steps=request.steps, **kwargs)


def _values(like: torch.Tensor, device: str) -> Any:
    """A tensor of that shape and dtype with small numbers, equal on all ranks."""
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape, generator=generator).to(device=device, dtype=like.dtype)
