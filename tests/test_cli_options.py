"""Options of the commands: each has its effect, or is refused by name; one meaning of each exit code."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

import autoparallel
from autoparallel.cli import EXIT_CODES, app
from autoparallel.errors import AutoparallelError, InputError, PlanError
from autoparallel.models import dtype_on, load_model, load_planned
from cost_models import Cluster
from cost_models.memory import RECIPES
from cost_models.profile import SOFTWARE
from tests.support.tiers import slow

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
         "vocab_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 16, "patch_size": 8,
       "num_channels": 3, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}


def small(batch: int, tokens: int) -> Any:
    return nn.Sequential(nn.Linear(32, 32)), (torch.zeros(batch, 32),), {}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, config in (("llama", LLAMA), ("vit", VIT)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    known = Path(autoparallel.__file__).parents[1] / "cost_models/clusters/local-cpu.toml"
    ours = re.sub(r"^(float64|bfloat16) = .*\n", "", known.read_text(), flags=re.M)
    (tmp_path / "ours.toml").write_text(ours.replace('"local-cpu"', '"ours"'))
    (tmp_path / "plain.toml").write_text(re.sub(r"^float16 = .*\n", "", ours, flags=re.M))
    return tmp_path


@pytest.mark.parametrize(("words", "said"), [
    (["plan", "llama.json", "--dtype", "float64", "--cluster", "ours.toml"],
     "have no rate for it: one of float16, float32 is required"),
    (["advise", "llama.json", "--dtype", "bfloat16", "--cluster", "ours.toml"], "have no rate for it"),
    (["size", "llama.json", "--cluster", "a100-sxm", "--cluster", "ours.toml", "--step-time", "1", "--dtype",
      "bfloat16"], "have no rate for it"),
    (["fit", "llama.json", "--cluster", "b200", "--dtype", "float8_e4m3fn"], "unknown dtype 'float8_e4m3fn'"),
    (["study", "llama.json", "--cluster", "a100-sxm", "--dtype", "int8"], "unknown dtype 'int8'"),
    (["plan", f"{__name__}:small", "--dtype", "float32"], "small makes its model in a dtype of its own"),
    (["verify", f"{__name__}:small", "--dtype", "float32"], "small makes its model in a dtype of its own"),
    (["study", "llama.json", "--cluster", "a100-sxm", "--time-limit", "5"], "--time-limit 5 is of the joint search"),
    (["export", "llama.json", "--to", "fsdp2", "--cluster", "h200"], "--cluster h200 prices what was exported"),
    (["export", "llama.json", "--to", "fsdp2", "--output", "vit.json"], "vit.json is a file: give a folder"),
    (["show", "none.json"], "No such file or directory; give a file that plan.save or autoparallel plan --output has"),
    (["compare-trace", "none.json"], "cannot read the trace none.json: No such file or directory; give a file that"),
    (["import", "none.sh"], "cannot read the settings none.sh: No such file or directory; give DeepSpeed's .json"),
    (["import", "vit.json"], "or train_micro_batch_size_per_gpu; give DeepSpeed's .json, accelerate's .yaml"),
    (["clusters", "--devices", "4"], "--devices 4 is of one cluster: name it"),
    (["demo", "--mesh", "2x1"], "--mesh 2x1 has 2 devices, and --ranks is 4: give --ranks 2"),
    (["fit", "llama.json", "--cluster", "a100-sxm", "--devices", "8", "--most", "4"],
     "most=4 (--most) is below the smallest batch, 8, one sample for each of 8 devices: give most=8 or more"),
    (["plan", "llama.json", "--output", "x.json", "--trace", "./x.json"], "--output and --trace are one file, x.json"),
    (["show", "llama.json", "--html", "llama.json"], "PLAN.json and --html are one file, llama.json"),
    (["plan", "llama.json", "--quiet", "--details"], "--details has no use with --quiet, which prints the summary"),
    (["show", "llama.json", "--json", "--details"], "--details has no use with --json, which has all of the report"),
    (["advise", "llama.json", "--output", "vit.json/advice"], "vit.json is a file: give a folder"),
    (["plan", "model.py"], "it is Python; give model.py:function"),
    (["plan", "meta-llama/Llama-3-8B"], "names on the Hub are not looked up: save the config.json of meta-llama/"),
    (["plan", "llama.json", "--bucket-bytes", "25XB"], "write bytes, as 100MiB or 1e8, or each axis once"),
    (["plan", "llama.json", "--by-hand", "dp=8", "--search", "exact"], "by_hand decides search"),
    (["plan", "vit.json", "--sequence-length", "64"], "vit.json is of a model of images, whose size the config says"),
    (["plan", "llama.json", "--sequence-length", "8", "--disk-limit", "1GB"],
     "disk_limit_bytes=1e+09 (--disk-limit), and nothing goes there: leave it out, or give offload='disk'"),
    (["plan", "llama.json", "--sequence-length", "8", "--host-memory-limit", "1GB"],
     "host_memory_limit_bytes=1e+09 (--host-memory-limit), and nothing goes there"),
    (["plan", "llama.json", "--sequence-length", "8", "--by-hand", "dp=8,offload=host", "--disk-limit", "1GB"],
     "disk_limit_bytes=1e+09"),
    (["fit", "llama.json", "--cluster", "a100-sxm", "--offload", "none", "--host-memory-limit", "1GB"],
     "host_memory_limit_bytes=1e+09, and nothing goes there with offload none"),
])
def test_options_without_use_are_refused(words: Sequence[str], said: str, folder: Path) -> None:
    found = CliRunner().invoke(app, words)
    assert isinstance(found.exception, AutoparallelError), (found.output, found.exception)
    assert said in str(found.exception)


def test_the_default_dtype_is_one_that_the_devices_have(folder: Path) -> None:
    """A machine that was calibrated on CPUs has a rate of float32 only, by which bfloat16 was priced."""
    of = [Cluster.load(name) for name in ("h100-sxm", "ours.toml", "plain.toml")]
    assert [dtype_on([cluster], "x.json", None) for cluster in of] == ["bfloat16", "float16", "float32"]
    assert dtype_on(of[:2], "x.json", None) == "float16" and dtype_on(of[:1], "x.json", "float64") == "float64"


def test_limits_hold_where_something_goes() -> None:
    model, args, _ = small(8, 1)
    for more in ({"offload": "host"}, {"offload": "disk"}, {"offload": "auto"}):
        assert autoparallel.plan(model, "a100-sxm", example_inputs=args, mesh_shape=(8,), host_memory_limit_bytes=1e9,
                                 **more).hybrid
    with pytest.raises(PlanError, match="disk_limit_bytes=1 "):
        autoparallel.plan(model, "a100-sxm", example_inputs=args, mesh_shape=(8,), disk_limit_bytes=1, offload="host")


def test_a_saved_plan_says_its_model_s_batch(folder: Path) -> None:
    """Of images the number of channels was taken for a sequence length, which nothing read."""
    for name, length in (("llama", 24), ("vit", None)):
        model, _, batch = load_model(f"{name}.json", 8, length, "float32")
        plan = autoparallel.plan(model, Cluster.load("local-cpu", num_devices=2), example_kwargs=batch, mesh_shape=(2,),
                                 baseline="ddp")
        again, _, same = load_planned(f"{name}.json", plan.model.inputs, plan.model.dtype)
        assert next(again.parameters()).dtype == torch.float32
        assert {key: value.shape for key, value in same.items()} == {key: value.shape for key, value in batch.items()}
    with pytest.raises(InputError, match="leave it out"):
        load_planned("vit.json", plan.model.inputs, "float32", sequence_length=8)


def test_lengths_end_where_a_table_of_positions_does(folder: Path) -> None:
    """GPT-2 was planned for 2048 tokens by default, with which it ends in an index out of range."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
             "vocab_size": 64, "max_position_embeddings": 24}
    for model_type, most in (("gpt2", 24), ("roberta", 22), ("llama", None)):
        config = {"model_type": model_type, **sizes}
        ids = load_model(config, 2, dtype="float32")[2]["input_ids"]
        assert ids.shape == (2, most or 2048)
        if most is None:
            continue
        with pytest.raises(InputError, match=rf"is {most + 1}, and the model of .* has embeddings of {most} positions"):
            load_model(config, 2, most + 1, "float32")
        network = transformers.AutoModelForCausalLM.from_config(load_model(config, 2, most, "float32")[0].config)
        assert network(input_ids=torch.full((2, most), 5)).logits.shape[1] == most
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            network(input_ids=torch.full((2, most + 1), 5))


def test_models_are_found_by_path(folder: Path) -> None:
    """A file in a subfolder, which imports from its own; also one named as a module that is imported already."""
    inner = folder / "models"
    inner.mkdir()
    (inner / "parts_of_net.py").write_text("from torch import nn\n\ndef layer():\n    return nn.Linear(4, 4)\n")
    text = ("import torch\nfrom parts_of_net import layer\n\ndef make(batch, length):\n"
            "    return layer(), (torch.zeros(batch, 4),), {}\n")
    for name in ("net_of_a_user.py", "json.py"):
        (inner / name).write_text(text)
        model, (x,), _ = load_model(f"models/{name}:make", 6)
        assert isinstance(model, nn.Linear) and x.shape == (6, 4)
    (inner / "config.json").write_text(json.dumps(LLAMA))
    assert load_model("models", 2, 8)[2]["input_ids"].shape == (2, 8)
    with pytest.raises(InputError, match=r"models/none.py:make: FileNotFoundError"):
        load_model("models/none.py:make", 6)


def test_plans_for_other_clusters_and_programs_differ(folder: Path) -> None:
    """With equal strategies they were told as equal, with unequal seconds."""
    model, args, _ = small(8, 1)
    plan = autoparallel.plan(model, "a100-sxm", example_inputs=args, mesh_shape=(8,), baseline="ddp")
    plan.save("plan.json")
    for change, said in (({"cluster": "h200"}, "cluster: a100-sxm -> h200"), ({"fingerprint": "0"}, "program: ")):
        dataclasses.replace(plan, **change).save("other.json")    # type: ignore[arg-type]
        found = CliRunner().invoke(app, ["diff", "plan.json", "other.json", "--details"])
        assert found.exit_code == 1 and "1 entry of the plan differs\n" in found.stdout and said in found.stdout
        assert not CliRunner().invoke(app, ["diff", "plan.json", "plan.json"]).exit_code


def test_one_device_is_told_as_one() -> None:
    assert CliRunner().invoke(app, ["clusters", "h100-sxm", "--devices", "1"]).stdout.startswith(
        "h100-sxm: 1 device, 8 a host\n  device 0: H100")


def test_the_names_in_help_texts_are_those_that_there_are() -> None:
    page = " ".join(re.sub("[^ -~]", " ", CliRunner().invoke(app, ["plan", "--help"]).stdout).split())
    assert f"in memory: {', '.join(sorted(RECIPES))}".replace(", sgd-momentum", " or sgd-momentum") in page
    assert f"speed counts: {', '.join(SOFTWARE[:3])}, {SOFTWARE[4]}, ..." in page


def test_the_documentation_has_the_exit_codes() -> None:
    """In one place: another page said 1 of sizes that are not found, for which the commands end with 3."""
    docs = Path(__file__).parents[1] / "docs"
    page = (docs / "concepts/cli.md").read_text()
    assert [file.name for file in docs.rglob("*.md") if "130 interrupted" in file.read_text()] == []
    assert {int(code): means for code, means in re.findall(r"^\| (\d+) \| (.*) \|$", page, re.M)} == EXIT_CODES


@pytest.mark.parametrize("words", [
    ["plan", "--mesh", "1", "--memory-limit", "1kB"],
    slow(["advise", "--devices", "1", "--memory-limit", "1kB", "--time-limit", "0"]),
    slow(["fit", "--devices", "1", "--cluster", "a100-sxm", "--memory-limit", "1kB", "--most", "1", "--offload",
          "none"]),
    slow(["size", "--cluster", "a100-sxm", "--step-time", "1e-9", "--most", "1", "--time-limit", "0.1"]),
])
def test_nothing_that_fits_ends_with_3(words: Sequence[str], folder: Path) -> None:
    command, *options = words
    found = CliRunner().invoke(app, [command, "llama.json", *options, "--sequence-length", "8"])
    code = 3 if isinstance(found.exception, autoparallel.errors.InfeasibleError) else found.exit_code
    assert code == 3, (found.output, found.exception)
