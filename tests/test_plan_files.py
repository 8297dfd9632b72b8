"""Plan files are checked as a whole when they are read: whatever is no plan is a PlanError that says what and where."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import autoparallel
from autoparallel import Plan
from autoparallel.capture import capture
from autoparallel.errors import PlanError
from autoparallel.plans import files
from autoparallel.strategies.space import StrategySpace
from tests.support.mutations import mutate, spoil


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


@cache
def planned(pipeline: bool = False) -> Plan:
    """Of a mesh of two axes, or of two pipeline stages."""
    x = torch.ones(16, 32)
    options: dict[str, Any] = {"mesh_shape": (2, 2)}
    if pipeline:
        class Loss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(model() for _ in range(2))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in self.layers:
                    x = layer(x)
                return x.square().mean()

        options = {"mesh_shape": (2, 2), "pipeline_stages": 2, "micro_batches": 2, "recompute": "full"}
        return autoparallel.plan(Loss(), autoparallel.Cluster.load("h100-sxm", 4), example_inputs=(x,), **options)
    return autoparallel.plan(model(), autoparallel.Cluster.load("h100-sxm", 4), example_inputs=(x,), **options)


def data(pipeline: bool = False) -> Any:
    return json.loads(planned(pipeline).to_json())


def edited(path: str, value: Any, pipeline: bool = False) -> str:
    """The JSON of a plan with another value at a path of keys and indices."""
    made = place = data(pipeline)
    *above, last = (int(key) if key.isdigit() else key for key in path.split("/"))
    for key in above:
        place = place[key]
    place[last] = value
    return json.dumps(made)


@pytest.mark.parametrize("pipeline", [False, True])
def test_saved_plans_are_read(tmp_path: Path, pipeline: bool) -> None:
    planned(pipeline).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == planned(pipeline)


@pytest.mark.parametrize(("path", "value", "parts"), [
    ("hybrid/stages", -2, ("stages is -2", "from 1 to")),
    ("hybrid/stages", 0, ("stages is 0", "from 1 to")),
    ("hybrid/pipeline_ranks", 0, ("pipeline_ranks is 0",)),
    ("hybrid/pipeline_ranks", 10**30, ("pipeline_ranks is", "from 1 to 1,048,576")),
    ("hybrid/micro_batches", 10**9, ("micro_batches is 1000000000",)),
    ("hybrid/zero_stage", 7, ("unknown zero_stage 7",)),
    ("hybrid/cuts", ["0", "1"], ("hybrid.cuts are 2 ops for 1 stages",)),
    ("hybrid/stage", 1, ("hybrid has a key 'stage' (is it 'stages'?) that is not known", "micro_batches")),
    ("prediction/forwrd_s", 1.0, ("prediction has a key 'forwrd_s' (is it 'forward_s'?)",)),
    ("stratgies", {}, ("the plan has a key 'stratgies' (is it 'strategies'?)",)),
    ("mesh_shape", [10**30, 1], ("1e+30 devices", "at most 16,777,216")),
    ("mesh_shape", [2, 0], ("mesh_shape (2, 0)", "no mesh")),
    ("mesh_shape", [], ("no mesh",)),
    ("axis_names", ["a", "a"], ("has a name twice",)),
    ("strategies/0.weight", ["I"], ("strategies['0.weight'] is ('I',)", "each of 2 mesh axes")),
    ("blocks", [{"paths": [], "lines": []}], ("blocks[0].paths is empty",)),
    ("prediction/forward_s", math.nan, ("prediction.forward_s is nan", "0 or more")),
    ("prediction/peak_bytes", -1.0, ("prediction.peak_bytes is -1.0",)),
    ("prediction/state_bytes", 10**400, ("prediction.state_bytes is",)),
    ("prediction/optimizer_s", math.inf, ("prediction.optimizer_s is",)),
    ("prediction/hidden_s", 1e9, ("prediction.step_s is",)),
    ("prediction/collectives", [{"kind": "all_reduce", "axis": "axis0", "direction": "forward", "count": -1,
                                 "num_bytes": 1.0, "seconds": 1.0}], ("collectives[0].count is",)),
    ("evidence/objective_s", math.nan, ("evidence.objective_s is nan",)),
    ("evidence/gap", -0.5, ("evidence.gap is -0.5",)),
    ("evidence/seconds", {"capture": math.nan}, ("evidence.seconds['capture'] is nan",)),
    ("version", 3, ("plan format version 3",)),
])
def test_values_that_no_plan_has(path: str, value: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as error:
        Plan.from_json(edited(path, value))
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize(("path", "value", "parts"), [
    ("hybrid/cuts", [], ()),  # where stages begin may be open
    ("hybrid/cuts", ["0", "0"], ("hybrid.cuts are 2 ops for 2 stages: name 1",)),
    ("hybrid/cuts/0", "layers.1.0.weigt", ("hybrid.cuts has 'layers.1.0.weigt' (is it 'layers.1.0.weight'?)",)),
    ("hybrid/stages", 3, ("3 pipeline stages on 2 ranks",)),
])
def test_values_that_no_pipeline_has(path: str, value: Any, parts: tuple[str, ...]) -> None:
    if not parts:
        assert Plan.from_json(edited(path, value, pipeline=True)).hybrid.stages == 2
        return
    with pytest.raises(PlanError) as error:
        Plan.from_json(edited(path, value, pipeline=True))
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_bounds_that_were_not_proven_may_be_infinite() -> None:
    for path, value in (("evidence/gap", math.inf), ("evidence/lower_bound_s", -math.inf),
                        ("evidence/step_bound_s", math.inf)):
        found = Plan.from_json(edited(path, value))
        assert "lower bound" in found.report()


def test_strategies_of_unknown_ops_are_refused() -> None:
    """Told with the nearest name, when the plan is to be run."""
    right = planned()
    names = {("relu_" if name == "relu" else name): strategy for name, strategy in right.strategies.items()}
    wrong = Plan.from_json(json.dumps({**data(), "strategies": names}))
    space = StrategySpace(capture(model(), (torch.ones(16, 32),)), (2, 2), right.axis_names)
    assert right.strategies_on(space)
    with pytest.raises(PlanError, match=r"'relu_' \(is it 'relu'\?\), which the program has not"):
        wrong.strategies_on(space)


@pytest.mark.parametrize(("change", "said"), [
    (lambda m: nn.Sequential(*m, nn.Linear(32, 32)), r"model has the parameter \d+.weight \(and 1 more\), which"),
    (lambda m: m.double(), "parameters are float64, the plan's float32"),
    (lambda m: nn.Sequential(*m[:-1], nn.Linear(64, 8)), r"weight is \[8, 64\], the plan's \[32, 64\] \(and 1 more\)"),
    (lambda m: m.requires_grad_(False), "or frozen parameters differ"),
])
def test_what_another_model_has_otherwise_is_told(change: Any, said: str) -> None:
    other = change(model())
    x = torch.ones(16, 32, dtype=next(other.parameters()).dtype)
    with pytest.raises(PlanError, match=said):
        planned().strategies_on(StrategySpace(capture(other, (x,)), (2, 2), planned().axis_names))
    wrong = StrategySpace(capture(model(), (torch.ones(24, 32),)), (2, 2), planned().axis_names)
    with pytest.raises(PlanError, match=r"is \[24, 32\], the plan's \[16, 32\]"):
        planned().strategies_on(wrong)


# ------------------------------------------------------------------------------------------------------ texts and files


@pytest.mark.parametrize(("text", "part"), [
    ('{"version": 2, "version": 2}', "has the key 'version' twice"),
    ('{"version": 2, "hybrid": {"stages": 1, "stages": -2}}', "has the key 'stages' twice"),
    ("[" * 100_000, "is not JSON"),
    ("[" * 50 + "]" * 50, "more than 16 deep"),
    ('{"version": 2, "x": ' + "[" * 500 + "]" * 500 + "}", "more than 16 deep"),
    ("1" * 10_000, "is not JSON"),
    ("", "is not JSON"),
    ("null", "is no plan of autoparallel"),
    (b"\xff\xfe", "is not JSON"),
])
def test_texts_that_are_no_plans(text: str | bytes, part: str) -> None:
    with pytest.raises(PlanError, match=part):
        Plan.from_json(text)  # type: ignore[arg-type]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """Nobody writes to this pipe: reading it would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for name, part in (("pipe", "no regular file"), ("folder", "Is a directory"), ("loop", "cannot read"),
                       ("nothing", "No such file")):
        with pytest.raises(PlanError, match=part):
            Plan.load(tmp_path / name)
    for device in ("/dev/zero", "/dev/null"):
        with pytest.raises(PlanError, match="no regular file"):
            Plan.load(device)


def test_a_file_may_not_be_endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned().save(tmp_path / "plan.json")
    size = (tmp_path / "plan.json").stat().st_size
    monkeypatch.setattr(files, "MOST_BYTES", size)
    assert Plan.load(tmp_path / "plan.json") == planned()
    monkeypatch.setattr(files, "MOST_BYTES", size - 1)
    with pytest.raises(PlanError, match="has more than"):
        Plan.load(tmp_path / "plan.json")


# ------------------------------------------------------------------------------------------------------------ mutations

@st.composite
def mutated(draw: Callable[..., Any]) -> str:
    """The JSON of a plan with one to three values replaced, dropped, moved or doubled, or its text cut or spoiled."""
    return spoil(draw, json.dumps(mutate(draw, data(draw(st.booleans())))))


def is_a_plan_or_a_plan_error(text: str) -> None:
    """One that is read can be written and read again, reported and compared."""
    try:
        found = Plan.from_json(text)
    except PlanError as error:
        assert str(error)
        return
    assert Plan.from_json(found.to_json()) == found
    assert isinstance(found.diff(planned()), str)
    assert found.prediction.step_s >= 0 and math.prod(found.mesh_shape) <= files.MOST_DEVICES


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=mutated())
def test_a_mutated_plan_is_a_plan_or_a_plan_error(text: str) -> None:
    is_a_plan_or_a_plan_error(text)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=mutated())
def test_5000_mutated_plans(text: str) -> None:
    is_a_plan_or_a_plan_error(text)
