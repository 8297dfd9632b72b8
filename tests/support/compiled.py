"""Steps of compiled programs on ranks, and how far their results are from those of one process, or node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import autoparallel
from autoparallel.runtime import stage_module
from autoparallel.runtime.module import ParallelModule
from cost_models import Cluster
from tests.support.models import CASES, ModelCase
from tests.support.plans import random_plan
from tests.support.ranks import mesh_of, restores
from tests.support.reference import gathered, gradients_of, scalar

#: Shape of a mesh, and options of `autoparallel.compile`; or ``random``, the seed of a drawn plan; ``by_hand``, a plan
#: by hand; ``by_block``: compiled block by block.
Way = tuple[tuple[int, ...], Mapping[str, Any]]
STEPS, LEARNING_RATE, TOLERANCE = 2, 0.1, 1e-5

DDP: Way = ((4,), {"baseline": "ddp"})
FSDP: Way = ((4,), {"baseline": "fsdp"})


@restores(stage_module, "WHOLE_UP_TO")
def run(case_name: str, way: Way, backend: str) -> dict[str, torch.Tensor]:
    """Run on each rank: the results of `trained`."""
    case, (shape, options) = CASES[case_name], way
    mesh, (args, kwargs) = mesh_of(*shape), case.inputs(8)
    given: dict[str, Any] = {k: v for k, v in options.items() if k not in ("random", "by_block", "by_hand")}
    if "by_block" in options:
        stage_module.WHOLE_UP_TO = 0
    if "random" in options:
        given["plan"] = random_plan(case, shape, mesh.mesh_dim_names or (), options["random"])
    if "by_hand" in options:
        given["plan"] = autoparallel.plan(case.build(), Cluster.load("local-cpu", num_devices=mesh.size()),
                                          example_inputs=args, example_kwargs=kwargs, by_hand=options["by_hand"])
    parallel = autoparallel.compile(case.build(), mesh.size() if "by_hand" in options else mesh, example_inputs=args,
                                    example_kwargs=kwargs, backend=backend, **given)
    parallel.manual_seed(3)
    return trained(case, parallel)


def trained(case: ModelCase, model: nn.Module) -> dict[str, torch.Tensor]:
    """Losses of two steps, gradients of the second, then parameters, buffers; and a loss without gradients."""
    args, kwargs = case.inputs(8)
    step = model.step if isinstance(model, ParallelModule) and not model.plan.hybrid.is_plain else None
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        if step is not None:
            loss = step(*args, **kwargs)
        else:
            loss = case.loss(model(*args, **kwargs))
            loss.backward()
        losses.append(scalar(loss))
        optimizer.step()
    gradients = gradients_of(model)
    with torch.no_grad():
        again = step(*args, **kwargs) if step is not None else case.loss(model(*args, **kwargs))
    losses.append(scalar(again))
    found = {f"gradient of {name}": value for name, value in gradients.items()}
    found |= gathered(model.named_parameters()) | gathered(model.named_buffers())
    return {"losses": torch.tensor(losses, dtype=torch.float64), **found}


def differences(case_name: str, ways: Sequence[Way], backend: str, alone: bool) -> list[str]:
    """Run on each rank: tensors that differ from the same way node by node; with ``alone``, from one process (of
    pipelines, those that the rank has)."""
    found, case = list[str](), CASES[case_name]
    for way in ways:
        expected = trained(case, case.build()) if alone else run(case_name, way, "eager")
        actual = run(case_name, way, backend)
        largest = max(float(v.abs().max()) for k, v in expected.items() if k.startswith("gradient") and v.numel())
        if not alone:
            assert expected.keys() == actual.keys()
        elif "pipeline_stages" not in way[1]:
            found += [f"{case_name} by {way}: {name} is in one of the two only" for name in expected.keys() ^ actual]
        for name in actual.keys() & expected:
            value, scale = expected[name], 1.0
            if value.numel():
                scale = largest if name.startswith("gradient") else float(value.abs().max())
            if alone and not name.startswith(("gradient", "losses")):
                scale = max(scale, LEARNING_RATE * largest)    # what began at zero has the error of its gradients
            error = float((value.double() - actual[name].double()).abs().max()) if value.numel() else 0.0
            if not error <= TOLERANCE * max(scale, 1e-6):
                found.append(f"{case_name} by {way}: {name} differs by {error:.2e}, its scale is {scale:.2e}")
    return found


def check(ranks: Any, case_name: str, *ways: Way, backend: str = "aot_eager", timeout_s: float = 280,
          alone: bool = False) -> None:
    """Raises AssertionError if four ranks differ in any way from those node by node; with ``alone``, from one
    process."""
    for found in ranks(4).run(differences, case_name, ways, backend, alone, timeout_s=timeout_s):
        assert not found, "\n".join(found)
