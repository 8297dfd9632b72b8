"""Weights as from_pretrained reads them, and whole runs that go on elsewhere."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer.testing
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import autoparallel
from autoparallel.cli import app
from autoparallel.errors import AutoparallelError
from autoparallel.runtime.checkpoint.files import Entry, Reader, Writer
from autoparallel.runtime.checkpoint.job import checkpoints
from tests.support.language import VOCABULARY, adapted, llama, whole
from tests.support.launching import clean_environment, guide
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

transformers = pytest.importorskip("transformers")

PLANS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 2), {"baseline": "tensor_parallel"}), ((4,), {"baseline": "fsdp"}),
    ((2, 2), {"pipeline_stages": 2, "micro_batches": 2})]


def mixtral() -> Any:
    """Its experts are one tensor in the model, and a tensor each in files."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=32, use_cache=False)
    return transformers.MixtralForCausalLM(config)


def tied() -> Any:
    return llama(tie_word_embeddings=True)


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def on_mesh(build: Any, shape: tuple[int, ...], options: dict[str, Any], meta: bool = False) -> Any:
    with torch.device("meta" if meta else "cpu"):
        model = build()
    return autoparallel.compile(model, mesh_of(*shape), example_kwargs=batch(), **options)


def save_and_load(build: Any, shape: tuple[int, ...], options: dict[str, Any], folder: Path, size: str) -> None:
    parallel = on_mesh(build, shape, options)
    parallel.save_pretrained(folder, max_shard_size=size)
    parallel.step(**batch())
    assert parallel._state.forms.compiled == 1  # saving left all that the trace read as it was
    again = on_mesh(build, shape, options, meta=True)
    assert again.load_pretrained(folder) == ([], [])
    for (name, value), other in zip(whole(parallel).items(), whole(again).values(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize(("build", "size", "shape", "options"), [
    (llama, "5GB", *PLANS[1]), (tied, "20KB", *PLANS[2]), *(slow(llama, "5GB", *plan) for plan in PLANS[::2]),
    *(slow(tied, "20KB", *plan) for plan in PLANS[:2]), *(slow(mixtral, "30KB", *plan) for plan in PLANS)])
def test_weights_are_read_by_from_pretrained(ranks: Any, tmp_path: Path, build: Any, size: str,
                                             shape: tuple[int, ...], options: dict[str, Any]) -> None:
    folder = tmp_path / "saved"
    if build is mixtral and "pipeline_stages" in options:
        options = {**options, "time_limit_s": 5.0}
    ranks(4).run(save_and_load, build, shape, options, folder, size, timeout_s=150)
    model = build()
    ours, expected = type(model).from_pretrained(folder), model.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in ours.state_dict().items())
    model.save_pretrained(tmp_path / "own", max_shard_size=size)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text()) == json.loads((tmp_path / "own" / name).read_text())
    assert set(Reader(folder).names) == set(Reader(tmp_path / "own").names)
    assert (len(list(folder.glob("model-*.safetensors"))) > 1) == (size != "5GB")
    assert not list(tmp_path.glob(".*"))


def from_others(build: Any, folder: Path, smaller: Path) -> tuple[list[str], list[str]]:
    parallel = on_mesh(build, (4,), {"baseline": "fsdp"}, meta=True)
    told = []
    for path in (folder / "missing", smaller):
        try:
            parallel.load_pretrained(path)
        except AutoparallelError as error:
            told.append(str(error))
    assert all(parameter.is_meta for parameter in parallel.parameters())
    parallel.load_pretrained(folder)
    expected = type(build()).from_pretrained(folder).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in whole(parallel).items())
    missing, unexpected = on_mesh(build, (4,), {"baseline": "fsdp"}).load_pretrained(smaller, strict=False)
    return told, [*missing, *unexpected]


def test_files_of_others_are_read(ranks: Any, tmp_path: Path) -> None:
    """In half precision, of the model without its head, and without some."""
    torch.manual_seed(1)
    model = llama()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "all", max_shard_size="20KB")
    model.model.save_pretrained(tmp_path / "headless")
    for told, names in ranks(4).run(from_others, llama, tmp_path / "all", tmp_path / "headless", timeout_s=100):
        absent, headless = told
        assert "is not there" in absent and "missing ['lm_head.weight'], unexpected []" in headless
        assert names == ["lm_head.weight"]


def adapters(folder: Path, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    parallel = on_mesh(adapted, shape, options)
    with torch.no_grad():
        for name, parameter in parallel.named_parameters():
            if parameter.requires_grad:
                parameter.mul_(2.0)
                assert "lora" in name
    parallel.save_pretrained(folder)
    again = on_mesh(adapted, shape, options)
    again.load_pretrained(folder)
    for (name, value), other in zip(whole(parallel).items(), whole(again).values(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize(("shape", "options"), [slow(*PLANS[0]), slow(*PLANS[1]), PLANS[2]])
def test_adapters_are_read_by_peft(ranks: Any, tmp_path: Path, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    ranks(4).run(adapters, tmp_path / "saved", options, shape, timeout_s=100)
    ours = peft.PeftModel.from_pretrained(llama(), tmp_path / "saved")
    expected = dict(adapted().named_parameters())
    compared = [name for name, value in ours.named_parameters() if "lora" in name
                and torch.equal(value, 2 * expected[name])]
    assert len(compared) == 8
    assert all("lora" in name for name in load_file(tmp_path / "saved/adapter_model.safetensors"))


class Plain(nn.Module):
    """No model of transformers: tied weights, a buffer, several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.small = nn.Parameter(torch.randn(16).bfloat16())
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x)) + self.small.float() * self.count).square().mean()


def save_plain(folder: Path) -> str:
    parallel = autoparallel.compile(Plain(), mesh_of(2), example_inputs=(torch.ones(4, 16),), baseline="fsdp")
    parallel.save_pretrained(folder)
    try:
        parallel.save_pretrained(folder / "model.safetensors")
    except AutoparallelError as error:
        return str(error)
    return "no error"


def test_any_model_is_saved(ranks: Any, tmp_path: Path) -> None:
    assert all("is a file" in told for told in ranks(2).run(save_plain, tmp_path / "saved"))
    saved = load_file(tmp_path / "saved/model.safetensors")
    expected = Plain().state_dict()
    del expected["second.weight"]
    assert saved.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) and value.dtype == expected[name].dtype
               for name, value in saved.items())


def fail_on_first(folder: Path) -> str:
    parallel = autoparallel.compile(Plain(), mesh_of(2), example_inputs=(torch.ones(4, 16),), baseline="fsdp")
    parallel.save_pretrained(folder)

    def full(self: Any, name: str, tensor: Tensor) -> None:
        raise OSError("no space left")

    kept, Writer.write = Writer.write, full  # type: ignore[method-assign]
    try:
        parallel.save_pretrained(folder)
    except Exception as error:
        return str(error)
    finally:
        Writer.write = kept  # type: ignore[method-assign]
    return "no error"


def test_a_broken_save_leaves_the_older_one(ranks: Any, tmp_path: Path) -> None:
    """All ranks are told, none hangs."""
    assert all("no space left" in told for told in ranks(2).run(fail_on_first, tmp_path / "saved"))
    assert len(load_file(tmp_path / "saved/model.safetensors")) == 5 and not list(tmp_path.glob(".*"))


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {"scalar": torch.tensor(2.5, dtype=torch.float64), "empty": torch.zeros(0, 3),
               "flags": torch.tensor([True, False, True]), "half": torch.randn(3, 5).bfloat16(),
               "cut": torch.randn(4, 6)[:, ::2], "eight": torch.randn(7).to(torch.float8_e4m3fn)}
    writer = Writer(tmp_path, [Entry(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()], 1 << 20)
    for name, tensor in reversed(tensors.items()):
        writer.write(name, tensor)
    writer.close(finished=True)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name].float(), tensor.float()), name
    reader = Reader(tmp_path)
    assert torch.equal(reader.read("cut", ((1, 2), (2, 1))), tensors["cut"][1:3, 2:3])


# -------------------------------------------------------------------------------------------------------- runs

class Dropped(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = y + nn.functional.dropout(layer(y).relu(), self.dropout, self.training)
        return (y - x).square().mean()


def run(folder: Path, shape: tuple[int, ...], options: dict[str, Any], resumed: bool, dropout: float, meta: bool = False
        ) -> tuple[list[float], int | None, list[int]]:
    """Six steps, saved after the third without waiting; or resumed from there, the last three."""
    with torch.device("meta" if meta else "cpu"):
        model = Dropped(dropout)
    parallel = autoparallel.compile(model, mesh_of(*shape), example_inputs=(torch.ones(8, 16),), **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    found = parallel.load(folder, optimizer, scheduler=scheduler)
    losses = []
    for number in range(3 if resumed else 0, 6):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
        losses.append(float(parallel.step(x)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if not resumed and number <= 2:
            saving = parallel.save(folder, optimizer, scheduler=scheduler, keep=2, wait=number != 2)
    steps = []
    if not resumed:
        assert saving.wait().step == 3
        steps = [checkpoint.step for checkpoint in checkpoints(folder)]
    return losses, found and found.step, steps


@pytest.mark.parametrize(("shape", "options"), [
    slow((4,), {"baseline": "fsdp"}), ((2, 2), {"micro_batches": 2, "pipeline_stages": 2}),
    slow((4,), {"micro_batches": 2, "zero_stage": 2})])
def test_a_run_goes_on_anywhere(ranks: Any, tmp_path: Path, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """Where it was, to the bit, with dropout; on other ranks and plans with equal losses but for rounding."""
    pool = ranks(4)
    for dropout in (0.3, 0.0):
        folder = tmp_path / f"run{dropout}"
        (losses, before, steps), *_ = pool.run(run, folder, shape, options, False, dropout, timeout_s=100)
        assert before is None and steps == [2, 3] and not list(folder.glob(".*"))
        (again, found, _), *_ = pool.run(run, folder, shape, options, True, dropout, timeout_s=100)
        assert found == 3 and again == losses[3:]
    for number, other, how in ((2, (2,), {"baseline": "tensor_parallel"}), (4, (2, 2), {"baseline": "fsdp"}),
                               (2, (2,), {"pipeline_stages": 2, "micro_batches": 4}), (1, (1,), {})):
        for meta in (False, True):
            (again, found, _), *_ = ranks(number).run(run, folder, other, how, True, 0.0, meta, timeout_s=100)
            assert found == 3 and again == pytest.approx(losses[3:], rel=1e-6)


def misuse(folder: Path) -> list[str]:
    parallel = autoparallel.compile(Dropped(0.0), mesh_of(2), example_inputs=(torch.ones(8, 16),), baseline="ddp")
    optimizer = torch.optim.SGD(parallel.parameters())
    parallel.save(folder, step=7)
    told = []
    for action in (lambda: parallel.save(folder, keep=0), lambda: parallel.save(folder, step=-1),
                   lambda: parallel.save(folder, model=optimizer), lambda: parallel.save(folder, loss=3.0),
                   lambda: parallel.save(folder, step=dist.get_rank()),
                   lambda: parallel.load(folder, optimizer), lambda: parallel.load(folder, step=8),
                   lambda: parallel.load(folder, scheduler=optimizer)):
        try:
            action()
            told.append("no error")
        except AutoparallelError as error:
            told.append(str(error))
    other = autoparallel.compile(Plain(), mesh_of(2), example_inputs=(torch.ones(4, 16),), baseline="ddp")
    try:
        other.load(folder)
    except AutoparallelError as error:
        told.append(str(error))
    dist.barrier()
    (folder / "step-9").mkdir(exist_ok=True)
    try:
        parallel.load(folder)
    except AutoparallelError as error:
        told.append(str(error))
    return told


def test_checkpoints_that_cannot_be_are_refused(ranks: Any, tmp_path: Path) -> None:
    for told in ranks(2).run(misuse, tmp_path):
        keep, step, name, thing, ranks_differ, optimizer, absent, scheduler, other, broken = told
        assert "step-7 has weights that this model does not have, layers.0.bias" in other
        assert "keep is 0" in keep and "step is -1" in step and "model=" in name and "loss=3.0" in thing
        assert "ranks [1] have a checkpoint other than" in ranks_differ
        assert "has no optimizer; it has model, run" in optimizer and "no checkpoint of step 8; it has [7]" in absent
        assert "has no scheduler" in scheduler and "step-9 is no checkpoint" in broken


def saved_in_a_pipeline(folder: Path) -> dict[str, Tensor]:
    parallel = on_mesh(llama, (2, 2), {"pipeline_stages": 2, "micro_batches": 2})
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel.step(**batch())
    optimizer.step()
    parallel.save(folder, optimizer, step=3)
    return whole(parallel)


def test_checkpoints_are_read_without_ranks(ranks: Any, tmp_path: Path) -> None:
    expected: dict[str, Tensor] = {}
    for held in ranks(4).run(saved_in_a_pipeline, tmp_path / "runs", timeout_s=100):
        expected.update(held)
    call = typer.testing.CliRunner().invoke
    said = call(app, ["checkpoint", "inspect", str(tmp_path / "runs")]).stdout
    assert "step 3, saved on 4 ranks (mesh (2, 2))" in said
    assert "  model.layers.1.mlp.up_proj.weight float32[48, 32]\n" in said
    assert f"{len(expected)} weights of {sum(v.nbytes for v in expected.values())} bytes, optimizer " in said
    assert "weights read" in call(app, ["checkpoint", "verify", str(tmp_path / "runs")]).stdout
    assert call(app, ["checkpoint", "convert", str(tmp_path / "runs"), str(tmp_path / "out")]).exit_code == 0
    read = load_file(tmp_path / "out/model.safetensors")
    assert read.keys() == expected.keys() and all(torch.equal(read[name], value) for name, value in expected.items())
    again = call(app, ["checkpoint", "convert", str(tmp_path / "runs"), str(tmp_path / "out")])
    assert "has files" in str(again.exception)
    said = str(call(app, ["checkpoint", "inspect", str(tmp_path / "out")]).exception)
    assert "has no checkpoint" in said and "files of weights, which from_pretrained reads" in said
    for inside in ("checkpoint-3/autoparallel", "epoch_0/autoparallel/model-0"):  # as Trainer and accelerate have it
        shutil.copytree(tmp_path / "runs", tmp_path / "theirs" / inside)
        folder = tmp_path / "theirs" / inside.split("/")[0]
        assert "weights read" in call(app, ["checkpoint", "verify", str(folder)]).stdout
    said = str(call(app, ["checkpoint", "inspect", str(tmp_path / "theirs")]).exception)
    assert "give one of the checkpoints in it, such as" in said
    (tmp_path / "last.ckpt").write_bytes(b"")
    assert "torch.load reads" in str(call(app, ["checkpoint", "inspect", str(tmp_path / "last.ckpt")]).exception)
    next((tmp_path / "runs/step-3").glob("*.distcp")).write_bytes(b"")
    assert "cannot be read" in str(call(app, ["checkpoint", "verify", str(tmp_path / "runs")]).exception)


# -------------------------------------------------------------------------------------------------------- memory

class Wide(nn.Module):
    """32 matrices of 4 MiB, as a large model's, in small."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(32))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) / 32
        return x.square().mean()


class Peak:
    """Largest growth of this process's own (anonymous) memory within, in bytes, sampled every half millisecond."""

    def __enter__(self) -> Peak:
        gc.collect()
        self._before, self.bytes, self._stop = self._now(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.0005):
            self.bytes = max(self.bytes, self._now() - self._before)

    @staticmethod
    def _now() -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split("RssAnon:")[1].split()[0]) * 1024


def memory(folder: Path) -> tuple[int, int]:
    """Peaks of loading and saving."""
    with torch.device("meta"):
        model = Wide()
    parallel = autoparallel.compile(model, mesh_of(8), example_inputs=(torch.ones(8, 1024),), baseline="fsdp")
    with Peak() as loading:
        parallel.load_pretrained(folder / "whole")
    parallel.save_pretrained(folder / "warm")
    with Peak() as saving:
        parallel.save_pretrained(folder / "again", max_shard_size="20MB")
    return loading.bytes, saving.bytes


@pytest.mark.slow
def test_no_rank_needs_more_than_its_shards_and_a_tensor(ranks: Any, tmp_path: Path) -> None:
    """Loading: shards of 16 MiB and a tensor of 4 MiB, and a tenth more. Saving, beside the shards: some tensors that
    the all-gather and the allocator keep, and not the model's 128 MiB."""
    torch.manual_seed(0)
    model = Wide()
    (tmp_path / "whole").mkdir()
    save_file(model.state_dict(), tmp_path / "whole/model.safetensors")
    tensor, shards = 4 << 20, 16 << 20
    for loading, saving in ranks(8).run(memory, tmp_path, timeout_s=200):
        print(f"loading {loading / 2**20:.1f} MiB, saving {saving / 2**20:.1f} MiB")
        assert loading < 1.1 * (shards + tensor) and saving < 12 * tensor
    again: dict[str, Tensor] = {}
    for file in (tmp_path / "again").glob("*.safetensors"):
        again.update(load_file(file))
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_the_guide_runs_is_killed_and_goes_on(tmp_path: Path) -> None:
    """On 4 ranks; killed after its fourth step, it goes on from the checkpoint, on 2 ranks."""
    script = tmp_path / "train.py"
    script.write_text(guide("checkpoints.md", 1))
    whole_run = tmp_path / "a"
    whole_run.mkdir()
    lines = launched(4, script, whole_run).splitlines()
    assert [line.split()[0] for line in lines] == list("012345")
    assert sorted(path.name for path in (whole_run / "runs").iterdir()) == ["step-4", "step-6"]
    model = transformers.AutoModelForCausalLM.from_pretrained(whole_run / "out")
    assert model.config.hidden_size == 32
    broken = tmp_path / "b"
    broken.mkdir()
    failing = tmp_path / "failing.py"
    failing.write_text(script.read_text().replace("    loss = parallel", "    if step == 5:\n        "
                                                  "raise SystemExit(9)\n    loss = parallel"))
    assert launched(4, failing, broken, fails=True).splitlines()[:5] == lines[:5]
    assert [line.split()[0] for line in launched(2, script, broken).splitlines()] == ["4", "5"]
    for line, expected in zip(launched(2, script, broken, again=True).splitlines(), lines[4:], strict=False):
        assert float(line.split()[1]) == pytest.approx(float(expected.split()[1]), rel=1e-5)


def launched(number: int, script: Path, folder: Path, fails: bool = False, again: bool = False) -> str:
    """What rank 0 of ``autoparallel launch`` printed. ``again``: without the last checkpoint."""
    if again:
        shutil.rmtree(folder / "runs/step-6")
    done = subprocess.run([sys.executable, "-m", "autoparallel", "launch", "--ranks", str(number), "--",
                           sys.executable, str(script)], capture_output=True, text=True, timeout=200, cwd=folder,
                          env=clean_environment())
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return "\n".join(line for line in done.stdout.splitlines() if line[:1].isdigit())
