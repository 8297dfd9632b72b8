"""Bad input gets an error of our own tree that says what was given, what is required and what to write instead."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import autoparallel
from autoparallel.errors import (
    AutoparallelError,
    CaptureError,
    ClusterError,
    InfeasibleError,
    InputError,
    MeshError,
    PinError,
    PlanError,
    SearchError,
)
from tests.models import CASES
from tests.ranks import mesh_of


class Branch(nn.Module):
    """Decides by the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + 1
        return x


def plan(case_name: str = "mlp", **options: Any) -> autoparallel.Plan:
    case = CASES[case_name]
    args, kwargs = case.inputs(8)
    shape = options.pop("mesh_shape", (2, 2))
    cluster = autoparallel.Cluster.load("local-cpu", num_devices=4)
    return autoparallel.plan(case.build(), cluster, example_inputs=args, example_kwargs=kwargs, mesh_shape=shape,
                             **options)


def test_the_tree_has_one_root() -> None:
    errors = [CaptureError, ClusterError, InfeasibleError, InputError, MeshError, PinError, PlanError, SearchError]
    assert all(issubclass(e, AutoparallelError) for e in errors)


def test_no_process_group() -> None:
    with pytest.raises(MeshError, match=r"no process group: start the program with torchrun"):
        autoparallel.compile(nn.Linear(2, 2), 4)


def test_a_data_dependent_branch_names_the_line() -> None:
    cluster = autoparallel.Cluster.load("local-cpu", num_devices=2)
    with pytest.raises(CaptureError, match=r"Branch decides by the values(.|\n)*test_bad_input.py:\d+ in forward: "
                                           r"if x.sum\(\) > 0:(.|\n)*torch.where"):
        autoparallel.plan(Branch(), cluster, example_inputs=(torch.ones(4),))


@pytest.mark.parametrize(("pins", "says"), [
    ({"model.layers.*.q_prj.weight": Replicate()}, r"names no parameter, input or module; did you mean"),
    ({"*.q_proj.weight": (Replicate(),)}, r"gives 1 placements; the mesh has 2 axes"),
    ({"*.q_proj.weight": {"tp": Replicate()}}, r"names mesh axes \['tp'\]; the mesh has \['axis0', 'axis1'\]"),
    ({"model.norm.weight": (Shard(1), Replicate())}, r"has no dim 1 to shard"),
    ({"*.q_proj.weight": ("rows", Replicate())}, r"unknown placement|has no attribute|not"),
    ({"input_ids": (Shard(0), Shard(0)), "labels": {"axis9": Shard(0)}}, r"axis9"),
])
def test_pins_that_cannot_be(pins: dict[str, Any], says: str) -> None:
    with pytest.raises(PinError, match=says):
        plan("llama", pins=pins)


def test_a_pin_that_leaves_a_rank_without_elements() -> None:
    with pytest.raises(PinError, match=r"cannot be S\(0\).*on a mesh of \(64,\).*at least one element"):
        case = CASES["llama"]
        cluster = autoparallel.Cluster.load("h100-sxm", num_devices=64)
        autoparallel.plan(case.build(), cluster, example_kwargs=case.inputs(8)[1], mesh_shape=(64,),
                          pins={"*.q_proj.weight": Shard(0)})


def test_memory_limit_too_small_says_what_would_do() -> None:
    with pytest.raises(InfeasibleError, match=r"more than the limit") as caught:
        plan("llama", memory_limit_bytes=1000)
    needed = caught.value.needed_bytes  # type: ignore[attr-defined]
    assert plan("llama", memory_limit_bytes=needed).prediction.peak_bytes <= needed


@pytest.mark.parametrize(("call", "error", "says"), [
    (lambda: autoparallel.Cluster.load("h1000"), ClusterError, "known are a100-sxm, h100-sxm"),
    (lambda: plan(search="greedy"), SearchError, "greedy.*exact"),
    (lambda: plan(baseline="zero"), PlanError, "unknown baseline 'zero'; there are"),
    (lambda: plan(optimizer="nonesuch"), ClusterError, "nonesuch.*adamw"),
])
def test_unknown_names_list_the_known(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def test_plan_files(tmp_path: Path) -> None:
    made = plan()
    path = tmp_path / "plan.json"
    made.save(path)
    assert autoparallel.Plan.load(path) == made
    data = json.loads(path.read_text())
    for text, says in (
        (json.dumps({**data, "version": 99}), "plan format version 99, this autoparallel reads 1"),
        ("{", "is not JSON"),
        (json.dumps({"version": 1}), "is not a plan of format 1"),
    ):
        path.write_text(text)
        with pytest.raises(PlanError, match=says):
            autoparallel.Plan.load(path)
    with pytest.raises(PlanError, match="cannot read the plan file"):
        autoparallel.Plan.load(tmp_path / "none.json")


def run_wrong_plans() -> list[str]:
    """Messages when a plan of another model, mesh, or with a bad strategy is compiled; and other misuse on a mesh."""
    case = CASES["mlp"]
    args, kwargs = case.inputs(8)
    mesh = mesh_of(2, 2)
    right = plan()
    wrong = [
        plan("llama"), plan(mesh_shape=(4,)),
        dataclasses.replace(right, strategies={**right.strategies, "linear": ("b0", "wat")}),
        dataclasses.replace(right, strategies={k: v for k, v in right.strategies.items() if k != "linear"}),
    ]
    said = []
    for bad in wrong:
        try:
            autoparallel.compile(case.build(), mesh, example_inputs=args, example_kwargs=kwargs, plan=bad)
        except PlanError as error:
            said.append(str(error))
    for misuse in (
        lambda: autoparallel.compile(case.build(), mesh).state_dict(),
        lambda: autoparallel.compile(case.build(), 2),
        lambda: autoparallel.compile(case.build(), mesh, cluster=autoparallel.Cluster.load("h100-sxm", 8)),
    ):
        try:
            misuse()
        except AutoparallelError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_plans_of_another_model_or_mesh_and_misuse_on_a_mesh(ranks: Any) -> None:
    for said in ranks(4).run(run_wrong_plans):
        model, mesh, strategy, missing, untraced, world, cluster = said
        assert "belongs to another program" in model
        assert "the plan is for a mesh of shape (4,), this mesh has (2, 2)" in mesh
        assert "has no strategy 'wat'; it has" in strategy
        assert "says nothing about 'linear'" in missing
        assert "InputError: the model has not been traced yet" in untraced and "example_inputs" in untraced
        assert "MeshError: 2 devices were asked for and the world has 4 ranks" in world
        assert "MeshError: the cluster has 8 devices and the mesh 4" in cluster


def mesh_of_half_the_world() -> str:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    half = DeviceMesh("cpu", [0, 1]) if dist.get_rank() < 4 else None
    try:
        autoparallel.compile(nn.Linear(2, 2), half)  # type: ignore[arg-type]
    except MeshError as error:
        return str(error)
    return ""


def test_a_mesh_smaller_than_the_world(ranks: Any) -> None:
    for said in ranks(4).run(mesh_of_half_the_world):
        assert "the mesh has 2 devices (2,) and the world 4 ranks" in said


def too_little_memory() -> str:
    """Rank 0 finds that nothing fits; every rank is told."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    try:
        autoparallel.compile(model, mesh_of(2), example_inputs=(torch.ones(4, 8),), memory_limit_bytes=10)
    except InfeasibleError as error:
        return str(error)
    return ""


def test_an_infeasible_plan_is_an_error_on_every_rank(ranks: Any) -> None:
    assert all("more than the limit" in said for said in ranks(2).run(too_little_memory, timeout_s=60))


def different_models() -> str:
    """Rank 0 compiles another model than the others."""
    import torch.distributed as dist

    width = 16 if dist.get_rank() == 0 else 32
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))
    try:
        autoparallel.compile(model, mesh_of(2), example_inputs=(torch.ones(4, 8),), baseline="ddp")
    except AutoparallelError as error:
        return str(error)
    return ""


def test_ranks_with_different_programs_are_told_not_hung(ranks: Any) -> None:
    for said in ranks(2).run(different_models, timeout_s=60):
        assert said.startswith("ranks [1] have a program other than rank 0's")
