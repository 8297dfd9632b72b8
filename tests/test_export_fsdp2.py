"""Files for torch alone that plans are exported to: run on four ranks, they give one process's gradients."""

from __future__ import annotations

import functools
import re
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import autoparallel
from autoparallel.errors import PlanError
from autoparallel.export import export_plan
from benchmarks.zoo import build
from cost_models import Cluster

IDS = torch.randint(128, (8, 16), generator=torch.Generator().manual_seed(17))
Gradients = dict[str, Tensor]


def model_of(name: str) -> Any:
    model: Any = build(name)
    if name == "mixtral":  # its auxiliary loss is of the whole batch: the mean over ranks of theirs is another
        model.config.output_router_logits = False
    return model


@functools.cache
def exported(name: str, by_hand: str) -> Any:
    plan = autoparallel.plan(model_of(name), Cluster.load("h100-sxm", num_devices=4), by_hand=by_hand,
                             example_kwargs={"input_ids": IDS, "labels": IDS})
    return export_plan(plan, "fsdp2")


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def gradients_of(module: torch.nn.Module) -> Gradients:
    """By the original's names."""
    found = {}
    for name, parameter in module.named_parameters():
        name = re.sub(r"^module\.|_checkpoint_wrapped_module\.", "", name)
        assert parameter.grad is not None, name
        found[name] = whole(parameter.grad)
    return found


def run(text: str, name: str) -> tuple[float, Gradients]:
    """Loss (mean over ranks that know it) and gradients of one step by an exported file."""
    module = types.ModuleType("parallel_fsdp2")
    exec(compile(text, "parallel_fsdp2.py", "exec"), vars(module))
    mesh, model = module.make_mesh("cpu"), model_of(name)
    data = [axis for axis in mesh.mesh_dim_names if axis not in ("tp", "pipeline", "unsharded")]
    parts, number = 1, 0
    for axis in data:
        parts, number = parts * mesh[axis].size(), number * mesh[axis].size() + mesh.get_local_rank(axis)
    rows = IDS.chunk(parts)[number]
    if "Schedule" in text:
        schedule = module.parallelize(model, mesh)
        loss = module.step(schedule, mesh, rows, rows)
        found = {}
        for stage in schedule.stages:
            found |= {key.removeprefix("model."): value for key, value in gradients_of(stage.submod).items()}
    else:
        parallel = module.parallelize(model, mesh)
        loss = module.step(parallel, {"input_ids": rows, "labels": rows})
        found = gradients_of(parallel)
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, (None if loss is None else float(loss), found))
    known = [one for one, _ in every if one is not None]
    together = {key: value for _, some in every for key, value in some.items()}
    return sum(known) / len(known), together


def check(ranks: Any, name: str, by_hand: str) -> None:
    model = model_of(name)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    found, gradients = ranks(4).run(run, exported(name, by_hand).files["parallel_fsdp2.py"], name, timeout_s=120)[0]
    assert found == pytest.approx(float(loss.detach()), rel=1e-5)
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert set(gradients) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(gradients[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


#: A plan of each kind.
FEW = [("llama", "dp=2,tp=2,sequence_parallel"), ("llama", "dp=2,pp=2,zero=2,micro_batch=2,recompute=full"),
       ("mixtral", "dp=2,tp=2,zero=3")]
MORE = [("gpt2", "dp=4,zero=3,shards=2,recompute=selective"),
        ("llama", "dp=4"), ("llama", "dp=2,tp=2,zero=3"), ("llama", "tp=2,pp=2,micro_batch=2"),
        ("llama", "dp=4,micro_batch=1"), ("llama", "dp=4,zero=1,micro_batch=1"), ("llama", "tp=4"),
        ("gpt2", "dp=4"), ("gpt2", "dp=4,zero=3"), ("gpt2", "dp=4,zero=2,micro_batch=1"),
        ("gpt2", "dp=4,zero=3,recompute=full"),
        ("mixtral", "dp=4"), ("mixtral", "dp=4,zero=3,recompute=full"), ("mixtral", "dp=4,zero=3,shards=2"),
        ("mixtral", "dp=2,tp=2,sequence_parallel"), ("mixtral", "dp=2,pp=2,micro_batch=2,schedule=gpipe")]


@pytest.mark.parametrize(("name", "by_hand"), FEW)
def test_an_exported_file_equals_one_process(ranks: Any, name: str, by_hand: str) -> None:
    check(ranks, name, by_hand)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "by_hand"), MORE)
def test_all_exported_files_equal_one_process(ranks: Any, name: str, by_hand: str) -> None:
    check(ranks, name, by_hand)


def test_layers_without_a_style_are_listed_and_replicated() -> None:
    lost = exported("mixtral", "dp=2,tp=2,zero=3").lost
    assert len(lost) == 1 and "mlp.experts" in lost[0].what and "mlp.gate" in lost[0].what


@pytest.mark.parametrize(("name", "by_hand", "said"), [
    ("gpt2", "dp=2,tp=2", "take nn.Linear and nn.Embedding, and none of the products"),
    ("gpt2", "dp=2,pp=2", "pipelines need a decoder"),  # its head is the embedding
    ("llama", "dp=2,cp=2", "context_parallel is experimental"),
    ("mixtral", "dp=4,ep=2", "torch has no expert-parallel style"),
])
def test_plans_beyond_torch_are_refused(name: str, by_hand: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        exported(name, by_hand)
