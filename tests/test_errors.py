"""Bad options, pins, plan files, clusters and command lines: an error of our own tree that says what was given, what is
required and what to write instead. `says` checks all three parts, in one place for one kind of mistake.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from typer.testing import CliRunner

import autoparallel
from autoparallel import Cluster, Plan
from autoparallel.api import plan
from autoparallel.cli import app
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
from autoparallel.models import load_model
from tests.support.messages import message_of, planned, says
from tests.support.models import CASES
from tests.support.ranks import mesh_of


class MeanOfSquares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


@pytest.mark.parametrize(("pins", "parts"), [
    ({"up.weigth": Shard(0)}, ("'up.weigth' names no parameter, input or module", "did you mean", "'up.weight'")),
    ({"up.weight": Shard(0)}, ("gives 1 placements", "2 axes ['axis0', 'axis1']", "one per axis, or a dict")),
    ({"up.weight": [Shard(0)] * 3}, ("gives 3 placements", "2 axes")),
    ({"up.weight": {"tp": Shard(0)}}, ("names mesh axes ['tp']", "the mesh has 2 axes ['axis0', 'axis1']")),
    ({"up.bias": (Shard(1), Replicate())}, ("up.bias is float32[64]", "no dim 1")),
    ({"up.weight": (Partial(), Replicate())}, ("up.weight (float32[64, 32]) cannot be (Partial(), Replicate())",
                                                   "on one axis it can be Replicate(), Shard(0), Shard(1) (a dim")),
    ({"up.weight": {"axis0": Shard(-2)}}, ("float32[64, 32]", "count from the front", "write Shard(0)")),
    ({"up.weight": (Partial("avg"), Replicate())}, ("'up.weight'", "only Partial('sum')")),
    ({"up.weight": {"axis0": "columns"}}, ("'up.weight'", "columns")),
])
def test_pins_that_cannot_hold(pins: dict[str, Any], parts: tuple[str, ...]) -> None:
    says(PinError, *parts, of=lambda: planned(pins=pins))


@pytest.mark.parametrize(("mesh_shape", "part"), [
    ((2, 4), "beside the first, which is the pipeline's, the mesh has 1 axes ['axis0']: write one per axis"),
    ((2,), "the pipeline has all ranks of the mesh, so that no stage is cut: leave the pin out"),
])
def test_a_pin_of_the_pipelines_axis(mesh_shape: tuple[int, ...], part: str) -> None:
    for pin in ((Shard(0), Replicate()), {"stages": Shard(0)}):
        says(PinError, "up.weight", part, of=lambda pin=pin: planned(
            mesh_shape=mesh_shape, pins={"up.weight": pin}, pipeline_stages=2, micro_batches=4))


def test_pins_that_contradict_each_other() -> None:
    says(PinError, "up.weight", of=lambda: planned(pins={"up.*": {"axis0": Shard(0)}, "up.weight": {
        "axis0": Replicate()}}))


def test_a_shard_that_leaves_ranks_without_elements() -> None:
    """Ten classes on a mesh of (2, 8)."""
    says(PinError, "head.bias", "float32[10]", "a dim must leave every rank at least one element",
         of=lambda: planned("transformer_encoder", (2, 8), pins={"head.bias": {"axis1": Shard(0)}}))


def test_plan_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    says(PlanError, "cannot read the plan file", str(file), "No such file", of=lambda: Plan.load(file))
    data = json.loads(planned().to_json())
    without = {k: v for k, v in data.items() if k != "strategies"}
    for text, parts in (
        ("not { json", (str(file), "is not JSON")),
        ("[]", (str(file), "is no plan of autoparallel")),
        ('{"model_type": "llama"}', (str(file), "is no plan of autoparallel", "--output")),
        (json.dumps({**data, "version": 1}), ("plan format version 1", "reads 2", "plan again")),
        (json.dumps(without), ("is not a plan of format 2", "strategies")),
        (json.dumps({**data, "evidence": {"solver": "x"}}), ("is not a plan of format 2",)),
        (json.dumps({**data, "mesh_shape": 4}), ("is not a plan of format 2",)),
        (json.dumps({**data, "strategies": []}), ("is not a plan of format 2",)),
        (json.dumps({**data, "mesh_shape": [4]}), ("mesh_shape (4,) and axis_names", "no mesh")),
        (json.dumps({**data, "mesh_shape": ["2", 2]}), ("mesh_shape[0] is '2', not int",)),
        (json.dumps({**data, "strategies": {"x": [1]}}), ("strategies['x'][0] is 1, not str",)),
        (json.dumps({**data, "hybrid": {**data["hybrid"], "micro_batches": "2"}}), ("micro_batches is '2', not int",)),
        (json.dumps({**data, "hybrid": {**data["hybrid"], "cut": []}}), ("hybrid has a key 'cut' (is it 'cuts'?)",)),
        (json.dumps({**data, "prediction": {**data["prediction"], "forward_s": None}}), ("forward_s is None",)),
        ("[" * 5000, (str(file), "is not JSON")),
    ):
        file.write_text(text)
        says(PlanError, *parts, of=lambda: Plan.load(file))
    for path in (None, 3, b"plan.json", "a\0b"):
        says(PlanError, "cannot read the plan file", of=lambda p=path: Plan.load(p))  # type: ignore[misc]
        says(PlanError, "cannot write the file", of=lambda p=path: planned().save(p))  # type: ignore[misc]
    says(PlanError, "plan is None", "Plan.load(path)", of=lambda: Plan.from_json(None))  # type: ignore[arg-type]


def wrong_plans(wrong: list[Plan]) -> list[str]:
    case = CASES["mlp"]
    args, _ = case.inputs(8)
    mesh = mesh_of(2, 2, axes=("axis0", "axis1"))
    return [message_of(lambda p=p: autoparallel.compile(case.build(), mesh, example_inputs=args, plan=p))  # type: ignore[misc]
            for p in wrong]


def test_plans_of_others(ranks: Any) -> None:
    """Of another mesh, model, batch; edited to what is not there or does not fit."""
    right = planned()

    def edited(**strategies: tuple[str, ...]) -> Plan:
        return dataclasses.replace(right, strategies={**right.strategies, **strategies})

    case = CASES["mlp"]
    machine = Cluster.load("local-cpu", num_devices=4)
    batch = plan(case.build(), machine, example_inputs=case.inputs(16)[0], mesh_shape=(2, 2))
    wrong = [planned(mesh_shape=(4,)), planned("llama"), batch, edited(linear=("b0", "wat")), edited(linear=("b0",))]
    for mesh, model, other_batch, name, count in ranks(4).run(wrong_plans, wrong):
        assert "PlanError: the plan is for a mesh of shape (4,), this mesh has (2, 2)" in mesh
        for said in (model, other_batch):
            assert "PlanError: the plan belongs to another program" in said
            assert "the same model, mode, shapes and dtypes are required" in said
            assert "give compile the example inputs that it was planned for" in said
        assert "PlanError: 'linear' has no strategy 'wat'; it has ['repeat'" in name
        assert "PlanError" in count and "linear" in count


@pytest.mark.slow
def test_item_19_a_memory_limit_too_small_for_the_options_says_what_fits_without_them() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x).square().mean()

    x, options = torch.randn(4096, 1024), {"mesh_shape": (8,), "memory_limit_bytes": 28e6, "time_limit_s": 2.0}
    message = says(InfeasibleError, "GiB), use more devices", "This is with baseline='ddp'. By joint=True, without, ",
                   of=lambda: autoparallel.plan(Loss(), "h100-sxm", example_inputs=(x,), baseline="ddp", **options))
    found = re.search(r"without, ([\d.]+) MiB a device are enough: pipeline_stages=(\d+), micro_batches=(\d+), "
                      r"zero_stage=(\d), recompute='(\w+)'", message)
    assert found is not None and float(found[1]) * 2**20 <= 28e6
    stages, micro_batches, zero_stage = map(int, found.groups()[1:4])
    plan = autoparallel.plan(Loss(), "h100-sxm", example_inputs=(x,), joint=True, pipeline_stages=stages,
                             micro_batches=micro_batches, zero_stage=zero_stage, recompute=found[5], **options)
    assert plan.prediction.peak_bytes <= 28e6


def test_a_memory_limit_too_small_says_which_would_do() -> None:
    """And the one that it names does."""
    message = says(InfeasibleError, "no plan fits in 1,000 bytes", "more than the limit", "use more devices",
                   of=lambda: planned(memory_limit_bytes=1000))
    with pytest.raises(InfeasibleError) as caught:
        planned(memory_limit_bytes=1000)
    needed = caught.value.needed_bytes  # type: ignore[attr-defined]
    assert f"needs {needed:,.0f} bytes, {needed - 1000:,.0f} more" in message
    assert f"Raise the limit to {needed:,.0f} bytes" in message
    assert planned(memory_limit_bytes=needed).prediction.peak_bytes <= needed
    with pytest.raises(InfeasibleError):
        planned(memory_limit_bytes=needed * 0.5)


@pytest.mark.slow
def test_a_memory_limit_that_pins_exceed_names_them() -> None:
    """Only the pin that keeps a parameter whole, and what would do without it."""
    with pytest.raises(InfeasibleError) as caught:
        planned(memory_limit_bytes=1000, micro_batches=1)
    least = caught.value.needed_bytes  # type: ignore[attr-defined]
    pins = {"x": (Shard(0), Shard(0)), "up.weight": (Replicate(), Replicate())}
    message = says(InfeasibleError, "With the pins 'up.weight' every plan needs at least", "GiB more than the limit",
                   "GiB without 'up.weight'", of=lambda: planned(memory_limit_bytes=least, pins=pins, micro_batches=1))
    assert "'x'" not in message


@pytest.mark.parametrize(("call", "error", "parts"), [
    (lambda: Cluster.load("h200-pcie"), ClusterError, ("h200-pcie", "h100-sxm", "local-cpu")),
    (lambda: planned(search="annealing"), SearchError, ("annealing", "ilp", "recursive", "exact")),
    (lambda: planned(baseline="megatron"), PlanError, ("'megatron'", "tensor_parallel", "sequence_parallel")),
    (lambda: planned(optimizer="shampoo"), ClusterError, ("shampoo", "adamw", "sgd")),
    (lambda: planned(recompute="some"), PlanError, ("unknown recompute 'some'", "'full'", "'auto'")),
    (lambda: planned(joint=True, schedule="zb"), PlanError, ("unknown schedule 'zb'", "zero_bubble")),
    (lambda: planned(schedule="gpipe"), PlanError, ("schedule='gpipe'", "there is one stage", "pipeline_stages")),
    (lambda: planned(zero_stage=True), PlanError, ("unknown zero_stage True", "[0, 1, 2, 3]")),
    (lambda: planned(micro_batch=2), PlanError, ("unknown option 'micro_batch'", "['micro_batches']")),
    (lambda: planned(loss_fn=nn.MSELoss()), PlanError, ("unknown option 'loss_fn'", "'pins'", "'reduce_dtype'")),
])
def test_unknown_names_list_the_known(call: Callable[[], Any], error: type[AutoparallelError], parts: Any) -> None:
    says(error, *parts, of=call)


@pytest.mark.parametrize(("options", "error", "parts"), [
    ({"memory_limit_bytes": -5}, PlanError, ("memory_limit_bytes is -5", "bytes per device as a number, 0 or more")),
    ({"memory_limit_bytes": float("nan")}, PlanError, ("memory_limit_bytes is nan", "0 or more")),
    ({"memory_limit_bytes": "70GiB"}, PlanError, ("memory_limit_bytes is '70GiB'", "70e9; inf: no limit")),
    ({"time_limit_s": -1}, PlanError, ("time_limit_s is -1", "seconds as a number, 0 or more")),
    ({"micro_batches": 0}, PlanError, ("micro_batches is 0", "a whole number, 1 or more")),
    ({"micro_batches": 2.0}, PlanError, ("micro_batches is 2.0", "a whole number")),
    ({"joint": True, "micro_batches": 0}, PlanError, ("micro_batches is 0", "1 or more")),
    ({"pipeline_stages": -2}, PlanError, ("pipeline_stages is -2", "a whole number, 1 or more")),
    ({"stage_replicas": 2}, PlanError, ("stage_replicas is 2", "for example (1, 3)")),
    ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)}, PlanError, ("type SGD", "'adamw'")),
    ({"pins": ["up.weight"]}, PinError, ("pins is ['up.weight']", "by name pattern", "Replicate()")),
    ({"pins": {0: Shard(0)}}, PinError, ("by name pattern",)),
    ({"mesh_shape": (0,)}, MeshError, ("mesh_shape is (0,)", "each 1 or more, for example (2, 4)")),
    ({"mesh_shape": 4}, MeshError, ("mesh_shape is 4", "sizes of the axes")),
    ({"mesh_shape": b"4"}, MeshError, ("mesh_shape is b'4'", "sizes of the axes")),
    ({"mesh_shape": ()}, MeshError, ("mesh_shape is ()", "sizes of the axes")),
    ({"mesh_shape": (4, 2)}, ClusterError, ("a mesh of (4, 2) needs 8 devices, the cluster has 4", "num_devices=8")),
    ({"axis_names": "ab"}, MeshError, ("axis_names is 'ab'", "('data', 'model')")),
    ({"axis_names": ("a", "a")}, MeshError, ("axis_names ('a', 'a')", "twice")),
    ({"axis_names": ("a",), "pipeline_stages": 2, "micro_batches": 2}, MeshError, ("1 axis names", "(2, 2)")),
    ({"axis_names": ("a", "b", "c"), "mesh_shape": None}, MeshError, ("4 devices are not cut into 3 axes",)),
    ({"cluster": DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"), _init_backend=False, _rank=0)},
     ClusterError, ("a DeviceMesh", "num_devices=4), mesh_shape=(2, 2), axis_names=('a', 'b')")),
    ({"cluster": 4}, ClusterError, ("type int", "h100-sxm", "TOML file")),
    ({"example_inputs": torch.ones(8, 32)}, InputError, ("type Tensor", "(x,) for one argument x")),
    ({"example_inputs": {"x": torch.ones(8, 32)}}, InputError, ("a mapping", "as example_kwargs")),
    ({"example_kwargs": [torch.ones(8, 32)]}, InputError, ("type list", "a dict of the call's keyword arguments")),
    ({"example_inputs": None}, CaptureError, ("missing a required argument: 'x'", "takes (x")),
    ({"example_inputs": (torch.ones(8, 32).to_sparse(),)}, InputError, ("a sparse_coo tensor", "x.to_dense()")),
    ({"example_inputs": (torch.nested.nested_tensor([torch.ones(8, 32)]),)}, InputError, ("a nested tensor", "a mask")),
    ({"axis_names": 3}, MeshError, ("axis_names is 3", "('data', 'model')")),
    ({"joint": "no"}, PlanError, ("joint is 'no'", "True or False")),
    ({"memory_limit_bytes": 10**400}, PlanError, ("memory_limit_bytes is of type int", "bytes per device")),
    ({"model": torch.jit.script(nn.Linear(32, 32))}, CaptureError, ("torch.jit", "the original module")),
    ({"model": nn.Sequential(torch.jit.script(nn.Linear(32, 32)))}, CaptureError, ("torch.jit (0)",)),
    ({"model": torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(32, 32)))}, CaptureError,
     ("a quantized Linear (0), of torch.ao.nn.quantized.dynamic", "before it was quantized")),
    ({"model": torch.relu}, CaptureError, ("relu", "an instance of torch.nn.Module", "whose forward calls it")),
])
def test_options_and_arguments_of_other_kinds(options: dict[str, Any], error: type[AutoparallelError], parts: Any
                                             ) -> None:
    """Each named, with what it is and what to write; before anything is traced."""
    case = CASES["mlp"]
    given = {"model": case.build(), "cluster": Cluster.load("local-cpu", num_devices=4),
             "example_inputs": case.inputs(8)[0], "mesh_shape": (2, 2), **options}
    says(error, *parts, of=lambda: plan(given.pop("model"), given.pop("cluster"), **given))


def test_keywords_of_compile_given_to_plan_say_where_they_belong() -> None:
    says(PlanError, "plan belongs to autoparallel.compile", "compile(model, mesh, plan=plan)",
         of=lambda: planned(plan=planned()))
    says(PlanError, "mesh belongs to autoparallel.compile", "mesh_shape=(2, 4)", of=lambda: planned(mesh=(2, 2)))


@pytest.mark.parametrize("count", [2.5, "4", True])
def test_counts_of_devices_that_are_none(count: Any) -> None:
    says(ClusterError, f"num_devices is {count!r}", "a whole number", of=lambda: Cluster.load("local-cpu", count))


def test_a_cluster_of_more_devices_than_plans_have_is_refused() -> None:
    """(The process was killed for its memory.)"""
    says(ClusterError, "1000000000 devices", "at most 1048576", of=lambda: Cluster.load("h100-sxm", 10**9))


def test_a_cluster_may_be_a_path(tmp_path: Path) -> None:
    """As for `Cluster.load`."""
    file = tmp_path / "ours.toml"
    file.write_text('based_on = "local-cpu"\nname = "ours"\nnum_devices = 2\n')
    case = CASES["mlp"]
    assert plan(case.build(), file, example_inputs=case.inputs(8)[0], mesh_shape=(2,)).cluster == "ours"


def test_axis_names_without_a_mesh_choose_how_many_axes() -> None:
    """Four devices are one axis or two; with names, pins by name hold in whatever is tried."""
    found = planned(mesh_shape=None, axis_names=("data", "model"), pins={"up.weight": {"model": Shard(0)}})
    assert found.mesh_shape == (2, 2) and found.axis_names == ("data", "model")
    assert planned(mesh_shape=None, axis_names=("data",)).mesh_shape == (4,)


def test_a_joint_search_that_finds_nothing_says_why() -> None:
    """No combination, no memory (what it names as too little is), no time."""
    says(InfeasibleError, "on 4 devices allows pipeline_stages=3: ", "fix fewer options",
         of=lambda: planned(joint=True, mesh_shape=None, pipeline_stages=3))
    says(InfeasibleError, "allows micro_batches=4, copies=3 (4 micro-batches do not run 3 at a time", "fix fewer",
         of=lambda: planned(joint=True, mesh_shape=None, micro_batches=4, copies=3))
    with pytest.raises(InfeasibleError) as caught:
        planned(joint=True, mesh_shape=None, memory_limit_bytes=10)
    assert "fits in 10 bytes" in str(caught.value) and "Raise memory_limit_bytes" in str(caught.value)
    needed = caught.value.needed_bytes  # type: ignore[attr-defined]
    assert f"more than {needed:,.0f} bytes" in str(caught.value)
    assert 10 < needed < planned(joint=True, mesh_shape=None, memory_limit_bytes=1e9).prediction.peak_bytes
    says(InfeasibleError, "time_limit_s=0", "give more",
         of=lambda: planned(joint=True, mesh_shape=None, time_limit_s=0))


def test_questions_to_a_plan_that_have_no_answer(tmp_path: Path) -> None:
    found = planned()
    for k in (0, -1, "3"):
        says(PlanError, f"alternatives({k!r})", "1 or more", of=lambda k=k: found.alternatives(k))  # type: ignore[misc]
    for factors in ((0.0,), (-1,), (float("inf"),), 2.0):
        says(PlanError, f"sensitivity({factors!r})", "above 0, for example (0.5, 2.0)",
             of=lambda f=factors: found.sensitivity(f))  # type: ignore[misc]
    says(PlanError, "'linea'", "is it one of ['linear'", "plan.strategies", of=lambda: found.explain("linea"))
    says(PlanError, "['linear']", "is it one of", of=lambda: found.explain(["linear"]))  # type: ignore[arg-type]
    says(PlanError, "'wat'", "is it one of", "plan.strategies", of=lambda: found.explain("wat"))
    says(PlanError, "'plan.json'", "Plan.load(path)", of=lambda: found.diff("plan.json"))  # type: ignore[arg-type]
    says(PlanError, "cannot write the file", "No such file", of=lambda: found.save(tmp_path / "no" / "plan.json"))
    file = tmp_path / "plan.json"
    file.write_bytes(b"\xd0\xff")
    (tmp_path / "empty").mkdir()
    says(PlanError, str(file), "is not JSON", of=lambda: Plan.load(file))


@pytest.mark.parametrize("batch", ["plain", "mean", "loss"])
def test_a_batch_of_no_samples_has_a_plan(batch: str) -> None:
    """As torch runs it (a mean of nothing is nan); ops on nothing were priced as nan."""
    machine, x = Cluster.load("local-cpu", num_devices=2), torch.ones(0, 32)
    model, args = {"plain": (nn.Sequential(nn.Linear(32, 64), nn.ReLU()), (x,)),
                   "mean": (MeanOfSquares(), (x,)), "loss": (nn.MSELoss(), (x, x))}[batch]
    found = plan(model, machine, example_inputs=args, mesh_shape=(2,))
    assert 0 < found.prediction.step_s < 1


@pytest.mark.parametrize(("config", "parts"), [
    ([], ("no model_type",)),
    (3, ("no model_type",)),
    ({"model_type": ["llama"]}, ("no model_type",)),
    ({"model_type": "llama", "architectures": "LlamaForCausalLM"}, ("architectures is 'LlamaForCausalLM'", "a list")),
    ({"model_type": "resnet", "architectures": ["ResNetModel"], "embedding_size": 8, "hidden_sizes": [8],
      "depths": [1]}, ("image_size is None", "write module:function")),
    ({"model_type": "lama"}, ("no model_type 'lama'", "'llama'")),
    ({"model_type": "llama", "num_hidden_layers": 0}, ("num_hidden_layers is 0, and a model has 1 layer or more",)),
    ({"model_type": "llama", "architectures": ["Nope"]}, ("cannot make Nope", "no attribute Nope")),
    ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 3}, ("cannot make a causal", "multiple of")),
    ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 8, "num_layers": 1,
      "num_heads": 2, "d_kv": 4, "d_ff": 8}, ("no decoder_start_token_id", '"decoder_start_token_id": 0')),
    ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], "num_hidden_layers": 1},
     ("main input is input_values", "write module:function")),
])
def test_configs_that_make_no_model(tmp_path: Path, config: Any, parts: Any) -> None:
    """The file is named, and what transformers says of it."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    says(InputError, str(file), *parts, of=lambda: load_model(str(file), 2, dtype="float32"))


@pytest.mark.slow
def test_whisper_gets_sound_and_labels() -> None:
    config = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "d_model": 16,
              "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
              "num_mel_bins": 8, "max_source_positions": 30, "decoder_start_token_id": 1}
    model, args, batch = load_model(config, 4, 12, "float32")
    assert not args and {name: tuple(x.shape) for name, x in batch.items()} == {
        "input_features": (4, 8, 60), "labels": (4, 12)}
    found = plan(model, Cluster.load("local-cpu", num_devices=2), example_kwargs=batch, mesh_shape=(2,), time_limit_s=5)
    assert 0 < found.prediction.step_s < 1


def test_files_and_modules_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("broken", "def f(:"), ("raises", "1 / 0")):
        (tmp_path / f"{name}.py").write_text(text)
    file = tmp_path / "config.json"
    file.write_bytes(b"\xd0\xff")
    (tmp_path / "empty").mkdir()
    for source, part in ((str(file), "cannot read the config file"),
                         (str(tmp_path / "empty"), "Is a directory; give a Hugging Face config.json, or"),
                         ("broken:f", "broken:f: SyntaxError"),
                         ("raises:f", "raises:f: ZeroDivisionError"), (":f", ":f: ValueError: Empty module name")):
        says(InputError, part, of=lambda s=source: load_model(s, 2, 8, "float32"))  # type: ignore[misc]


@pytest.mark.parametrize("command", [["plan", "x.json"], ["calibrate"]])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, command: list[str]) -> None:
    """It failed after minutes of measuring or planning."""
    for output in (tmp_path / "no" / "file", tmp_path):
        found = CliRunner().invoke(app, [*command, "--output", str(output)])
        assert isinstance(found.exception, InputError)
        assert f"--output {output} cannot be written, " in str(found.exception)
        assert ("it is a folder" if output.is_dir() else "there is no folder") in str(found.exception)


def makes_two(batch: int, length: int) -> Any:
    return nn.Linear(2, 2), (torch.ones(batch, 2),)


def makes_trouble(batch: int, length: int) -> Any:
    raise KeyError("boom")


def test_factories_that_make_no_call() -> None:
    says(InputError, "makes_two returned a tuple of 2: return (model, args, kwargs)",
         of=lambda: load_model(f"{__name__}:makes_two", 2, 8, "float32"))
    says(InputError, "makes_trouble(2, 8) raised KeyError: 'boom'", "the batch and the sequence length",
         of=lambda: load_model(f"{__name__}:makes_trouble", 2, 8, "float32"))
    says(InputError, "unknown dtype 'int8'", "bfloat16", of=lambda: load_model(f"{__name__}:makes_two", 2, 8, "int8"))


def test_calibrate_takes_no_cards_below_one() -> None:
    found = CliRunner().invoke(app, ["calibrate", "--output", "x.toml", "--nics-per-host", "0"])
    assert found.exit_code == 2 and "--nics-per-host" in found.output and "Invalid value" in found.output


@pytest.mark.parametrize("option", ["--devices", "--global-batch", "--sequence-length"])
def test_the_command_line_takes_no_counts_below_one(option: str) -> None:
    found = CliRunner().invoke(app, ["plan", "x.json", option, "0"])
    assert found.exit_code == 2 and option in found.output and "Invalid value" in found.output


def test_input_errors_are_in_the_tree() -> None:
    """One except clause catches them all; each is also the built-in that a caller would expect."""
    for error, also in ((InputError, ValueError), (PinError, ValueError), (PlanError, ValueError),
                        (InfeasibleError, ValueError), (MeshError, RuntimeError), (CaptureError, RuntimeError)):
        assert issubclass(error, AutoparallelError) and issubclass(error, also)


def test_an_axis_without_a_name() -> None:
    says(MeshError, "1 axis names ('dp',)", "(2, 2)", "one for each axis", of=lambda: planned(axis_names=("dp",)))


def test_stages_that_no_part_of_the_devices_can_take() -> None:
    says(PlanError, "3 pipeline stages", "4 devices", of=lambda: planned(pipeline_stages=3, mesh_shape=None))


def test_a_joint_search_picks_the_axes_itself() -> None:
    says(PlanError, "leave out axis_names and baseline", of=lambda: planned(joint=True, baseline="ddp"))
    says(PlanError, "leave out axis_names and baseline", of=lambda: planned(joint=True, axis_names=("a", "b")))
