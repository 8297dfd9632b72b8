"""The scripts of `examples/`: few changed lines, the numbers of the originals, and killed runs that go on elsewhere.

A line that ends in ``# was: ...`` takes the place of the line named there, which may be none: so the original is made.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from autoparallel.launch.local import free_port
from tests.support.launching import ROOT, clean_environment, mpirun_of
from tests.support.tiers import slow

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
_TRAINER = ("--max_steps 8 --logging_steps 1 --save_steps 2 --learning_rate 1e-2 --report_to none --disable_tqdm true "
            "--use_cpu true --per_device_train_batch_size {batch} --per_device_eval_batch_size {batch}")
#: Runs a script, and kills this process when it has printed ``number`` lines with ``word``.
_KILLING = """
import builtins, os, runpy, signal, sys
word, number, *sys.argv = sys.argv[1:]
lines, told = [], builtins.print
def print(*words, **options):
    told(*words, **options)
    lines.extend(w for w in words if word in str(w))
    if len(lines) >= int(number):
        os.kill(os.getpid(), signal.SIGKILL)
builtins.print = print
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Example:
    """``arguments``: with the batch of a rank, of ``batch`` on all. ``killed_at``: a word, and the number of the line
    with it at which the run is killed; ``needs``: packages."""

    name: str
    batch: int
    arguments: str
    killed_at: tuple[str, int]
    needs: tuple[str, ...] = ("transformers",)

    @property
    def path(self) -> Path:
        return ROOT / "examples" / self.name


EXAMPLES = [
    Example("titan_loop.py", 8, "", ("step", 5)),
    Example("run_clm.py", 8, _TRAINER, ("'loss'", 5), ("transformers", "accelerate")),
    Example("sft_lora.py", 8, f"{_TRAINER} --bf16 false --max_length 8", ("'loss'", 5), ("trl", "peft")),
    Example("nlp_example.py", 16, "--cpu --batch_size {batch}", ("epoch", 2), ("transformers", "accelerate")),
    Example("lightning_lm.py", 16, "--batch_size {batch} --devices {ranks}", ("step", 6), ("lightning",)),
    Example("lightning_gan.py", 16, "--batch_size {batch} --devices {ranks}", ("step", 6), ("lightning",)),
]


def original(text: str) -> tuple[str, int]:
    """The script without autoparallel, and the number of lines that were changed."""
    lines, changed = [], 0
    for line in text.splitlines():
        code, marked, was = line.partition("# was:")
        changed += bool(marked)
        if not marked or was.strip():
            lines.append(re.match(r"\s*", code).group() + was.strip() if marked else line)  # type: ignore[union-attr]
    return "\n".join(lines) + "\n", changed


def losses(example: Example, script: Path, folder: Path, ranks: int, killed: bool = False,
           start: Sequence[str] = ()) -> dict[str, list[float]]:
    """The numbers that a run printed, by step. ``ranks`` 0: of the original, without a launcher; ``start``: another
    launcher than ours."""
    arguments = ["--output_dir", str(folder), *example.arguments.format(
        batch=example.batch // max(ranks, 1), ranks=max(ranks, 1)).split()]
    if killed:
        killing = folder.with_name("killing.py")
        killing.write_text(_KILLING)
        command = [str(killing), example.killed_at[0], str(example.killed_at[1]), str(script), *arguments]
    else:
        command = [str(script), *arguments]
    start = start or [sys.executable] if ranks == 0 or start else [
        sys.executable, "-m", "autoparallel", "launch", "--ranks", str(ranks), "--", sys.executable]
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = clean_environment() | (
        group if ranks == 0 and "torch.distributed" in script.read_text() else {})
    done = subprocess.run([*start, *command], capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode != 0) == killed, done.stdout + done.stderr
    found = re.findall(r"^((?:step|epoch) \d+|final) (.+)$", done.stdout, re.M)
    return {name: [float(word) for word in words.split()] for name, words in found}


@pytest.mark.parametrize(("example", "several", "goes_on"), [
    (EXAMPLES[0], 2, ()), *(slow(example, 4, (2, 8)) for example in EXAMPLES)],
    ids=lambda value: value.name if isinstance(value, Example) else str(value))
def test_an_example_is_its_original(example: Example, several: int, goes_on: tuple[int, ...], tmp_path: Path) -> None:
    """On so many ranks; also killed there and gone on with on 2 and on 8."""
    for package in example.needs:
        pytest.importorskip(package)
    text, changed = original(example.path.read_text())
    assert 1 <= changed <= 3 and "autoparallel" not in text.partition('"""\n')[2]
    script = tmp_path / example.name
    script.write_text(text)
    expected = losses(example, script, tmp_path / "original", 0)
    assert len(expected) >= 3
    whole = losses(example, example.path, tmp_path / "whole", several)
    assert whole.keys() == expected.keys()
    assert_close(whole, expected)
    if goes_on:
        begun = losses(example, example.path, tmp_path / "killed", several, killed=True)
        assert len(begun) < len(expected)
    if "peft" in example.needs:
        assert_merged(tmp_path / "original", tmp_path / "whole")
    for ranks in goes_on:
        shutil.copytree(tmp_path / "killed", tmp_path / str(ranks))
        rest = losses(example, example.path, tmp_path / str(ranks), ranks)
        assert rest and list(rest)[-1] == list(expected)[-1]
        assert_close(rest, expected)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 3, 4])
def test_an_example_is_started_by_mpirun(number: int, tmp_path: Path) -> None:
    example = EXAMPLES[number]
    for package in example.needs:
        pytest.importorskip(package)
    mpirun = [*mpirun_of("Open MPI"), "-n", "4", sys.executable]
    found = losses(example, example.path, tmp_path / "mpirun", 4, start=mpirun)
    expected = losses(example, example.path, tmp_path / "torchrun", 4)
    assert found.keys() == expected.keys()
    assert_close(found, expected)


def test_a_pipeline_of_hosts_by_rpc() -> None:
    """Two jobs of two ranks each, as on two hosts."""
    path, hosts = ROOT / "examples" / "rpc_hosts.py", f"127.0.0.1:{free_port()}"
    processes = [subprocess.Popen(
        [sys.executable, "-m", "autoparallel", "launch", "--ranks", "2", "--", sys.executable, str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**clean_environment(), "HOSTS": hosts, "HOST": str(host)}) for host in range(2)]
    outputs = [process.communicate(timeout=150) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    found = [float(line.split()[2]) for line in outputs[0][0].splitlines() if line.startswith("step")]
    assert found == pytest.approx(losses_in_one_process(path), rel=1e-6) and len(found) == 4


def losses_in_one_process(path: Path) -> list[float]:
    """The same two stages one after the other, by torch alone."""
    names = runpy.run_path(str(path))
    torch.manual_seed(0)
    first, last = names["First"](), names["Last"]()
    shape = names["STEPS"], names["ROWS"], names["WIDTH"]
    batches, found = zip(torch.randn(shape), torch.randn(shape), strict=True), []
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)
    for x, y in batches:
        loss = last(first(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def assert_merged(original: Path, found: Path) -> None:
    """The merged weights that from_pretrained reads are those of the original's run, and other than before it."""
    from transformers import AutoModelForCausalLM

    expected, ours = (AutoModelForCausalLM.from_pretrained(folder / "merged").state_dict()
                      for folder in (original, found))
    before = runpy.run_path(str(original.parent / "sft_lora.py"))["pretrained"]().state_dict()
    assert ours.keys() == expected.keys() == before.keys()
    assert any((ours[name] - before[name]).abs().max() > 1e-3 for name in ours)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-5)


def assert_close(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    off = {name: abs(value / expected[name][0] - 1) for name, (value, *_) in found.items()}
    print(f"{len(found)} losses, largest relative difference {max(off.values()):.1e}")
    assert max(off.values()) < 1e-6
    assert all(values[1:] == expected[name][1:] for name, values in found.items()), "metrics"
