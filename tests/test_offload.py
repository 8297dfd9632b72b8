"""Optimizer states on the host and on disk: the same numbers as in device memory, counted bytes, refusals."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoparallel
from autoparallel.errors import InfeasibleError, InputError, PlanError
from autoparallel.runtime.offload import files
from autoparallel.runtime.offload.tiles import regions_of, tiles_of
from tests.support.models import CASES
from tests.support.ranks import mesh_of
from tests.support.reference import ADAMW_EPS, Trained, assert_same_parameters, gathered, scalar, train_reference
from tests.support.tiers import slow

STEPS, TILE = 3, 8192
ADAMW = {"lr": 1e-3, "eps": ADAMW_EPS, "fused": True}
Options = dict[str, Any]
#: Parameters of a rank's shard, states by parameter and name, and the whole parameters.
Left = tuple[list[Tensor], dict[str, Any], dict[str, Tensor]]


def local(value: Any) -> Tensor:
    """This rank's part of a tensor, or a number, as a plain tensor of its own."""
    return torch.as_tensor(value.to_local() if hasattr(value, "to_local") else value).detach().clone()


def trained(case_name: str, shape: tuple[int, ...], options: Options, away: Options, kind: str, hyper: Options
            ) -> tuple[list[float], Left, dict[str, int], float]:
    """Losses, parameters and states of some steps, bytes of states by tier, and those predicted of the fullest rank."""
    case = CASES[case_name]
    args, kwargs = case.inputs(8)
    parallel = autoparallel.compile(case.build(), mesh_of(*shape), example_inputs=args, example_kwargs=kwargs,
                                    **options, **away)
    make = getattr(torch.optim, kind)
    optimizer: Any = parallel.optimizer(make, tile_bytes=TILE, **hyper) if away else \
        make(parallel.parameters(), **hyper)
    losses = []
    for _ in range(STEPS):
        losses.append(scalar(parallel.step(*args, **kwargs)))
        optimizer.step()
        optimizer.zero_grad()
    states = {f"{number}.{name}": local(value) for number, entries in optimizer.state_dict()["state"].items()
              for name, value in entries.items()}
    left = [local(p) for p in parallel.parameters()], states, gathered(parallel.named_parameters())
    p = parallel.plan.prediction
    return losses, left, optimizer.memory() if away else {}, p.disk_bytes or p.host_bytes


def assert_equal(found: Left, expected: Left) -> None:
    assert len(found[0]) == len(expected[0]) > 0 and found[1].keys() == expected[1].keys()
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    assert [name for name, value in expected[1].items() if not torch.equal(found[1][name], value)] == []


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "shape", "options", "away"), [
    ("llama", (2, 2), {"zero_stage": 1}, {"offload": "host"}),
    slow("llama", (4,), {"zero_stage": 3, "recompute": "full", "micro_batches": 2}, {"offload": "disk"}),
    ("gpt2", (2, 2), {"pipeline_stages": 2, "micro_batches": 4, "zero_stage": 1}, {"offload": "disk"}),
    slow("gpt2", (4,), {"zero_stage": 0}, {"offload": "host"}),
    slow("bert", (4,), {"zero_stage": 2, "micro_batches": 4}, {"offload": "disk"}),
    slow("bert", (2, 2), {"recompute": "offload"}, {"offload": "host", "offload_fraction": 0.5}),
    slow("mixtral", (4,), {"zero_stage": 1}, {"offload": "disk", "offload_fraction": 0.7}),
    slow("mixtral", (2, 2), {"recompute": "selective", "zero_stage": 1}, {"offload": "host"}),
    slow("gpt2", (4,), {"recompute": "selective", "saved_on": "disk", "zero_stage": 1, "micro_batches": 2,
                        "disk_path": tempfile.gettempdir()}, {"offload": "host"}),
    slow("llama", (2, 2), {"pipeline_stages": 2, "micro_batches": 8, "schedule": "zero_bubble"}, {"offload": "disk"}),
])
def test_states_elsewhere_are_those_in_device_memory(ranks: Any, tmp_path: Path, case: str, shape: tuple[int, ...],
                                                     options: Options, away: Options) -> None:
    """To the bit; losses and parameters are those of one process."""
    where = {**away, "disk_path": tmp_path} if away["offload"] == "disk" else away
    pool = ranks(int(torch.Size(shape).numel()))
    kept = pool.run(trained, case, shape, options, {}, "AdamW", ADAMW, timeout_s=200)
    moved = pool.run(trained, case, shape, options, where, "AdamW", ADAMW, timeout_s=200)
    expected = train_reference(CASES[case], "adamw", num_steps=STEPS, batch_size=8)
    fullest = max(num_bytes[away["offload"]] for _, _, num_bytes, _ in moved)
    if options.get("recompute") != "offload" and "saved_on" not in options:    # which have activations there too
        assert fullest == pytest.approx(moved[0][3], rel=0.05, abs=2 * 4096)
    for (losses, before, *_), (there, after, num_bytes, _) in zip(kept, moved, strict=True):
        assert there == losses == pytest.approx(expected.losses, rel=1e-5)
        assert_equal(after, before)
        everything = Trained(0, [], {}, expected.parameters | after[2], {})
        assert_same_parameters(everything.parameters, expected, 1e-4)
        states = sum(4 * value.numel() for name, value in before[1].items() if "exp_avg" in name)
        states *= 1.5 if away == {"offload": "host"} else 1    # gradients are there too
        told = num_bytes[away["offload"]] / away.get("offload_fraction", 1.0)
        assert told == pytest.approx(states, rel=0.05, abs=2 * 4096)
        assert (num_bytes["device"] > 0) == ("offload_fraction" in away)
        assert num_bytes["disk"] == 0 or num_bytes["host"] <= 3 * 2 * TILE
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "hyper"), [
    ("Adam", {"amsgrad": True, "fused": True}), ("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adagrad", {"fused": False}),
    ("NAdam", {}), slow("SGD", {"lr": 0.1, "fused": True}), slow("Adamax", {}), slow("RAdam", {}), slow("ASGD", {}),
    slow("Adadelta", {"foreach": True}), slow("RMSprop", {"momentum": 0.5, "centered": True}), slow("Rprop", {})])
def test_every_element_wise_optimizer(ranks: Any, tmp_path: Path, kind: str, hyper: Options) -> None:
    """With the kernel that the options name; tiles cut parameters anywhere."""
    hyper = {"fused": False, **hyper} if kind == "SGD" and "fused" not in hyper else hyper
    away = {"offload": "disk", "offload_fraction": 0.6, "disk_path": tmp_path}
    kept = ranks(2).run(trained, "gpt2", (2,), {}, {}, kind, hyper)
    moved = ranks(2).run(trained, "gpt2", (2,), {}, away, kind, hyper)
    for (_, before, *_), (_, after, *_) in zip(kept, moved, strict=True):
        assert_equal(after, before)


class Net(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()).square().mean()


def compiled(away: Options, shape: tuple[int, ...] = (2,)) -> Any:
    return autoparallel.compile(Net(), mesh_of(*shape), example_inputs=(torch.ones(8, 8),), **away)


def stepped(parallel: Any, optimizer: torch.optim.Optimizer, times: int) -> list[Tensor]:
    for number in range(times):
        parallel.step(torch.full((8, 8), 1.0 + number))
        optimizer.step()
        optimizer.zero_grad()
    return [local(p) for p in parallel.parameters()]


def resumed(folder: Path, away: Options, away_then: Options, shape_then: tuple[int, ...]) -> list[Any]:
    """A run of four steps; and one saved after two, whose checkpoint another tier and mesh goes on from."""
    parallel = compiled(away)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    stepped(parallel, optimizer, 2)
    schedule.step()
    parallel.save(folder, optimizer, step=2)
    stepped(parallel, optimizer, 2)
    whole = gathered(parallel.named_parameters())
    other = compiled(away_then, shape_then)
    again = other.optimizer(torch.optim.AdamW, lr=0.7)
    other.load(folder, again)
    assert again.param_groups[0]["lr"] == 0.05
    stepped(other, again, 2)
    return [whole, gathered(other.named_parameters())]


@pytest.mark.ranks
@pytest.mark.parametrize(("first", "then", "shape"), [
    slow("disk", "disk", (2,)), ("none", "disk", (2,)), slow("disk", "none", (2,)), ("host", "disk", (1, 2)),
    slow("disk", "host", (2,))])
def test_checkpoints_are_for_any_tier(ranks: Any, tmp_path: Path, first: str, then: str, shape: tuple[int, ...]
                                      ) -> None:
    def options(tier: str) -> Options:
        return {"offload": tier, **({"disk_path": tmp_path} if tier == "disk" else {})}

    for whole, found in ranks(2).run(resumed, tmp_path / "runs", options(first), options(then), shape):
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


def states_kept(folder: Path) -> list[Any]:
    """What a state dict of states on disk is worth; and one by torch's own load_state_dict."""
    parallel = compiled({"offload": "disk", "disk_path": folder})
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.1, tile_bytes=4096)
    assert dict(optimizer.state) == {}
    stepped(parallel, optimizer, 1)
    parameter = next(iter(parallel.parameters()))
    assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
    taken = {number: {name: local(value) for name, value in entries.items()}
             for number, entries in optimizer.state_dict()["state"].items()}
    assert float(taken[0]["exp_avg"].abs().sum()) > 0
    state = optimizer.state_dict()
    other = parallel.optimizer(torch.optim.AdamW, lr=0.1, tile_bytes=4096)
    other.load_state_dict(state)
    found = other.state_dict()["state"]
    same = [torch.equal(local(found[number][name]), value) for number, entries in taken.items()
            for name, value in entries.items()]
    wrong = {**state, "state": {0: {**state["state"][0], "exp_avg": state["state"][1]["exp_avg"]}}}
    with pytest.raises(InputError, match="exp_avg of parameter 0 is of shape"):
        other.load_state_dict(wrong)
    state["state"][0]["exp_avg"].add_(1.0)  # past the optimizer: told, not lost
    with pytest.raises(InputError, match="read from disk otherwise than it was written"):
        stepped(parallel, optimizer, 1)
    with pytest.raises(InputError, match="states are not whole"):
        optimizer.state_dict()
    other.close()
    with pytest.raises(InputError, match="was closed"):
        other.step()
    return same


@pytest.mark.ranks
def test_state_dicts_of_states_on_disk(ranks: Any, tmp_path: Path) -> None:
    for same in ranks(2).run(states_kept, tmp_path):
        assert len(same) == 12 and all(same)


def refusals(folder: Path) -> dict[str, str]:
    """By what was wrong, the error's text."""
    found = {}

    def told(name: str, make: Any) -> None:
        with pytest.raises((InputError, PlanError, InfeasibleError)) as error:
            make()
        found[name] = str(error.value)

    file = folder / "file"
    file.write_text("")
    told("file", lambda: compiled({"offload": "disk", "disk_path": file}))
    told("absent", lambda: compiled({"offload": "disk", "disk_path": folder / "absent"}))
    told("no path", lambda: compiled({"offload": "disk"}))
    told("in vain", lambda: compiled({"offload": "host", "disk_path": folder}))
    told("fraction", lambda: compiled({"offload": "host", "offload_fraction": 0.0}))
    told("alone", lambda: compiled({"offload_fraction": 0.5}))
    told("negative", lambda: compiled({"offload": "host", "host_memory_limit_bytes": -1}))
    told("tier", lambda: compiled({"offload": "tape"}))
    told("no plan", lambda: compiled({"offload": "disk", "disk_path": folder, "disk_limit_bytes": 100}))
    parallel = compiled({"offload": "disk", "disk_path": folder, "disk_limit_bytes": 4000})
    told("disk limit", lambda: parallel.optimizer(torch.optim.AdamW))
    told("kind", lambda: parallel.optimizer(torch.optim.Muon))
    told("tile", lambda: parallel.optimizer(torch.optim.AdamW, tile_bytes=1000))
    told("plain", lambda: stepped(parallel, torch.optim.AdamW(parallel.parameters()), 1))
    limited = compiled({"offload": "host", "host_memory_limit_bytes": 4000})
    told("host limit", lambda: limited.optimizer(torch.optim.AdamW))
    return found


@pytest.mark.ranks
def test_what_cannot_be_is_refused_before_training(ranks: Any, tmp_path: Path) -> None:
    expected = {
        "file": "is a file: give an existing folder", "absent": "is not there: give an existing folder",
        "no path": "disk_path is not given", "in vain": "optimizer states stay on the host",
        "fraction": "above 0, at most 1",
        "alone": "is of offload='host' or 'disk'", "negative": "host_memory_limit_bytes is -1",
        "tier": "unknown offload 'tape'", "disk limit": "and disk_limit_bytes is 4,000", "kind": "not element-wise",
        "no plan": "and disk_limit_bytes is 100: take more devices",
        "tile": "a multiple of 4096", "plain": "Write parallel.optimizer(AdamW", "host limit":
        "and host_memory_limit_bytes is 4,000"}
    for number, found in enumerate(ranks(2).run(refusals, tmp_path)):
        assert found.keys() == expected.keys(), number
        assert [name for name, text in found.items() if expected[name] not in text] == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def full_disk(folder: Path) -> str:
    parallel = compiled({"offload": "disk", "disk_path": folder})
    before, room = [local(p) for p in parallel.parameters()], os.posix_fallocate
    os.posix_fallocate = _no_room
    try:
        parallel.optimizer(torch.optim.AdamW)
    except InputError as error:
        assert all(torch.equal(a, local(b)) for a, b in zip(before, parallel.parameters(), strict=True))
        return str(error)
    finally:
        os.posix_fallocate = room
    return ""


def _no_room(*_: Any) -> None:
    if torch.distributed.get_rank() == 1:
        raise OSError(28, "No space left on device")


@pytest.mark.ranks
def test_a_full_disk_is_told_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    """Rank 1's is full."""
    for text in ranks(2).run(full_disk, tmp_path):
        assert "has no room for optimizer states" in text and "No space left" in text


def test_a_folder_of_another_machine_is_told_with_its_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                            caplog: pytest.LogCaptureFixture) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nserver:/data {tmp_path} nfs4 rw 0 0\n")
    files.check_folder(tmp_path)
    assert caplog.text == ""
    monkeypatch.setattr(files, "MOUNTS", mounts)
    files.check_folder(tmp_path)
    assert "network file system (nfs4)" in caplog.text and "MB/s written" in caplog.text
    assert files.file_system(Path("/")) == "ext4" and min(files.speed(tmp_path)) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["mounts"]


def test_tiles_cover_each_element_once() -> None:
    """Of parameters of all sizes; ends of files are whole blocks, of regions whole units."""
    sizes, widths = [0, 1, 4096, 5000, 3, 0, 100_000, 17], [4, 2, 8, 4, 1, 4, 2, 8]
    regions = regions_of([(0, size) for size in sizes], widths, range(len(sizes)))
    for tile_bytes in (4096, 12288, 2**26):
        tiles = tiles_of(regions, tile_bytes)
        seen = [0] * len(sizes)
        for tile in tiles:
            assert tile.begin % 4096 == tile.end % 4096 == 0 and tile.end - tile.begin <= tile_bytes
            for region in tile.regions:
                assert region.start == seen[region.parameter] or region.size == 0
                assert tile.begin <= region.offset <= region.end <= tile.end and region.offset % 64 == 0
                seen[region.parameter] += region.size
        assert seen == sizes and {r.parameter for tile in tiles for r in tile.regions} == set(range(len(sizes)))


KILLED = """
import sys, torch, torch.distributed as dist, autoparallel
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64))
parallel = autoparallel.compile(model, init_device_mesh("cpu", (1,)), example_inputs=(torch.ones(2, 64),),
                                offload="disk", disk_path=sys.argv[1])
optimizer = parallel.optimizer(torch.optim.AdamW)
parallel(torch.ones(2, 64)).sum().backward()
optimizer.step()
print(optimizer.memory()["disk"], flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_on_disk(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and int(process.stdout.readline()) >= 2 * 4 * (64 * 64 + 64)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    assert list(tmp_path.iterdir()) == [] and math.isclose(process.returncode, -signal.SIGKILL)
