"""Roles of mesh axes, recognised from a plan's strategies: what was written by hand is found again."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

import autoparallel
from autoparallel.errors import PlanError
from autoparallel.plans.reports.words import axis_words
from autoparallel.plans.roles import parameters_of, products_of, roles_of
from cost_models import Cluster
from tests.support.captured import plan_of
from tests.support.tiers import slow

IDS = torch.zeros(8, 16, dtype=torch.long)


@functools.cache
def by_hand(name: str, text: str) -> autoparallel.Plan:
    return plan_of(name, Cluster.load("h100-sxm", num_devices=4), by_hand=text)


@pytest.mark.parametrize(("name", "text", "found"), [
    ("llama", "dp=4", "data 4"),
    slow("llama", "dp=2,tp=2,zero=3", "data 2 (in shards) x tensor 2, ZeRO 3"),
    ("llama", "dp=2,tp=2,sequence_parallel", "data 2 x tensor 2 (norms along the sequence)"),
    ("llama", "dp=2,cp=2", "data 2 x context 2"),
    slow("llama", "dp=4,zero=3,shards=2", "data 2 x data 2 (in shards), ZeRO 3"),
    ("gpt2", "pp=2,dp=2,recompute=full", "data 2, pipeline 2 (1f1b), 4 micro-batches, recompute full"),
    slow("mixtral", "dp=2,tp=2", "data 2 x tensor 2 (experts)"),
    slow("mixtral", "dp=4,ep=2", "data 2 x expert 2"),
    slow("mixtral", "dp=4,ep=2,zero=1", "data 2 (in shards) x expert 2 (in shards), ZeRO 1"),
    slow("mixtral", "dp=4,ep=2,zero=3", "data 2 (in shards) x expert 2 (in shards), ZeRO 3"),
    slow("mixtral", "dp=4,ep=4,zero=1", "expert 4 (in shards), ZeRO 1"),
    slow("mixtral", "dp=2,ep=2,tp=2", "expert 2 x tensor 2"),
])
def test_roles_written_by_hand_are_found(name: str, text: str, found: str) -> None:
    roles = roles_of(by_hand(name, text))
    assert str(roles) == found and not roles.departures


def test_degrees() -> None:
    roles = roles_of(by_hand("llama", "dp=4,zero=3,shards=2"))
    assert (roles.data, roles.shards, roles.tensor, roles.expert, roles.zero_stage) == (4, 2, 1, 1, 3)
    roles = roles_of(by_hand("mixtral", "dp=4,ep=2"))
    assert (roles.data, roles.shards, roles.expert) == (4, 1, 2)


def test_departures_are_named() -> None:
    plan = by_hand("llama", "dp=2,tp=2")
    lines = tuple((name, "b0·b1" if name.startswith("mlp.up") else strategy, layout)
                  for name, strategy, layout in plan.blocks[1].lines)
    odd = replace(plan, blocks=(plan.blocks[0], replace(plan.blocks[1], lines=lines)))
    assert roles_of(odd).departures[0] == "axis tp: model.layers.0.mlp.up_proj linear: b1 (context)"
    first, rest = replace(odd.blocks[1], paths=plan.blocks[1].paths[:1]), replace(plan.blocks[1],
                                                                                 paths=plan.blocks[1].paths[1:])
    half = replace(plan, blocks=(plan.blocks[0], first, rest))
    said = next(axis.departures for axis in axis_words(half, None) if axis.name == "tp")
    assert said == ("up_proj (1 of 2 ops) is context parallel, around attention by heads (as DeepSpeed-Ulysses)",)
    lines = tuple((name, "b0·b0" if name.startswith("mlp.up") else strategy, layout)
                  for name, strategy, layout in plan.blocks[1].lines)
    stored = {name: (*layout[:1], "S(0)") if "up_proj" in name else layout for name, layout in plan.strategies.items()}
    data = replace(plan, blocks=(plan.blocks[0], replace(plan.blocks[1], lines=lines)), strategies=stored)
    said = next(axis.departures for axis in axis_words(data, None) if axis.name == "tp")
    assert said == ("up_proj (2 ops) are data parallel with ZeRO-1",)


def test_the_share_of_an_axis_is_of_flops() -> None:
    plan = by_hand("llama", "dp=2,tp=2")
    odd = ("up_proj", "k_proj", "v_proj")
    lines = [(name, "b0·b0" if any(one in name for one in odd) else strategy, layout)
             for name, strategy, layout in plan.blocks[1].lines]
    data = replace(plan, blocks=(plan.blocks[0], replace(plan.blocks[1], lines=tuple(lines))))
    products = list(products_of(data))
    (work,) = {p.flops for p in products if p.module == "model.layers.0.mlp.up_proj"}
    assert work == 2 * IDS.numel() * math.prod(plan.model.parameters["model.layers.0.mlp.up_proj.weight"])
    (axis,) = [axis for axis in roles_of(data).axes if axis.name == "tp"]
    moved = sum(p.flops for p in products if p.roles[1] == "data")
    assert axis.share == pytest.approx(1 - moved / sum(p.flops for p in products)) and axis.share > 0.7
    assert f"tensor parallel 2 for {axis.share:.0%} of the FLOPs".replace("%", " %") in data.summary()
    older = replace(data, blocks=tuple(replace(block, flops=()) for block in data.blocks))
    (axis,) = [axis for axis in roles_of(older).axes if axis.name == "tp"]
    assert axis.share == pytest.approx(1 - len(axis.departures) / len(products)) and axis.share < 0.7
    assert " of the products" in older.summary()
    short = replace(plan, blocks=(replace(plan.blocks[0], flops=(1.0,)), *plan.blocks[1:]))
    with pytest.raises(PlanError, match=r"blocks\[0\].flops must have an amount"):
        autoparallel.Plan.from_json(short.to_json())


def test_weights_that_a_sharded_axis_stores_whole_are_named() -> None:
    plan = by_hand("llama", "dp=4,zero=3")
    stored = {name: ("I",) if "up_proj" in name else layout for name, layout in plan.strategies.items()}
    (axis,) = axis_words(replace(plan, strategies=stored), None)
    assert axis.shards and axis.departures == ("weights of up_proj are stored whole",)
    assert not axis_words(plan, None)[0].departures


@pytest.mark.slow
def test_a_file_tells_the_same() -> None:
    plan = by_hand("mixtral", "dp=2,tp=2")
    assert roles_of(autoparallel.Plan.from_json(plan.to_json())) == roles_of(plan)
    assert "input_ids" not in parameters_of(plan) and "lm_head.weight" in parameters_of(plan)


def test_a_searched_plan_of_layers_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    plan = autoparallel.plan(model, Cluster.load("h100-sxm", num_devices=4), mesh_shape=(4,),
                             example_inputs=(torch.zeros(65536, 64),))
    assert str(roles_of(plan)) == "data 4"
