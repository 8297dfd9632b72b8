"""A run that is saved and resumed goes on as if it had not stopped: dropout, order, the place in the epoch."""

from __future__ import annotations

import os
import socket
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

import autoparallel
from autoparallel.errors import AutoparallelError
from autoparallel.runtime.checkpoint.job import Checkpoint, _cleared, _warn_of_others
from tests.support.ranks import mesh_of
from tests.support.tiers import slow

BATCH, SAMPLES, SAVED_AFTER, STEPS = 8, 40, 7, 12  # 5 batches an epoch
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Noisy(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"number": torch.tensor([float(index)]), "x": torch.full((16,), index / SAMPLES) + torch.rand(16) / 10}


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, number: Tensor, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = y + nn.functional.dropout(layer(y).relu(), 0.3, self.training)
        return (y - x).square().mean()


def job_state(parallel: Any, optimizer: Any, loader: Any) -> dict[str, Any]:
    """As the README has it."""
    weights, moments = get_state_dict(parallel, optimizer, options=FLAT)
    return {"model": weights, "optimizer": moments, "run": parallel.run_state(), "loader": loader.state_dict()}


def run(folder: Path, shape: tuple[int, ...], options: dict[str, Any], by_step: bool, resumed: bool, steps: int = STEPS
        ) -> tuple[list[float], list[list[int]], dict[str, Tensor], dict[str, Any]]:
    """Losses, samples of each step, parameters and the state of the run at the end."""
    torch.manual_seed(dist.get_rank() + 10 * resumed)
    parallel = autoparallel.compile(Dropped(), mesh_of(*shape), **options, example_kwargs={
        "x": torch.ones(BATCH, 16), "number": torch.ones(BATCH, 1)})
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    loader = parallel.dataloader(Noisy(), BATCH, shuffle=True, seed=4)
    if resumed:
        dcp.load(state := job_state(parallel, optimizer, loader), checkpoint_id=folder)
        set_state_dict(parallel, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
                       options=FLAT)
        parallel.load_run_state(state["run"])
        loader.load_state_dict(state["loader"])
    else:
        parallel.manual_seed(3)
    losses, samples = [], []
    for epoch in range(loader.epoch, 3):
        loader.set_epoch(epoch)
        for batch in loader:
            if by_step:
                loss = parallel.step(**batch)
            else:
                loss = parallel(**batch)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            samples.append([int(n) for n in whole(batch["number"])])
            if len(losses) == SAVED_AFTER and not resumed:
                dcp.save(job_state(parallel, optimizer, loader), checkpoint_id=folder)
            if len(losses) == steps:
                return losses, samples, {n: whole(p) for n, p in parallel.state_dict().items()}, parallel.run_state()
    raise AssertionError("more steps than the epochs have")


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(("shape", "options", "by_step"), [
    ((2, 2), {"baseline": "fsdp"}, False),
    slow((2,), {"micro_batches": 2}, True),
    ((2, 2), {"micro_batches": 2, "pipeline_stages": 2}, True),
])
def test_a_resumed_run_is_equal_to_the_bit(ranks: Any, tmp_path: Path, shape: tuple[int, ...], options: dict[str, Any],
                                           by_step: bool) -> None:
    """In the middle of an epoch, in new processes."""
    pool = ranks(2 ** len(shape))
    uninterrupted = pool.run(run, tmp_path, shape, options, by_step, False, timeout_s=100)
    pool.stop()
    resumed = pool.run(run, tmp_path, shape, options, by_step, True, STEPS - SAVED_AFTER, timeout_s=100)
    for (losses, samples, parameters, state), (again, samples_again, parameters_again, state_again) in zip(
            uninterrupted, resumed, strict=True):
        assert len(set(losses)) == STEPS and again == losses[SAVED_AFTER:]
        assert samples_again == samples[SAVED_AFTER:]
        assert all(sorted(chain(*samples[first : first + 5])) == list(range(SAMPLES)) for first in (0, 5))
        assert parameters.keys() == parameters_again.keys()
        assert all(torch.equal(parameters[name], parameters_again[name]) for name in parameters)
        assert state == state_again == {"version": 1, "seed": 3, "calls": STEPS}


def test_another_mesh_goes_on_with_the_same_samples(ranks: Any, tmp_path: Path) -> None:
    _, samples, _, state = ranks(4).run(run, tmp_path, (2, 2), {"baseline": "fsdp"}, False, False, timeout_s=100)[0]
    for losses, resumed, _, its_state in ranks(2).run(run, tmp_path, (2,), {"baseline": "tensor_parallel"}, True, True,
                                                      STEPS - SAVED_AFTER, timeout_s=100):
        assert resumed == samples[SAVED_AFTER:] and its_state == state and all(0 < loss < 9 for loss in losses)


def message_of(action: Any) -> str:
    try:
        action()
    except AutoparallelError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def states() -> tuple[list[str], dict[str, Any], list[int]]:
    rank = dist.get_rank()
    parallel = autoparallel.compile(Dropped(), mesh_of(2), inputs="local", baseline="ddp")
    parallel.load_run_state({"version": 1, "seed": -5, "calls": 3})  # before the first call, too
    loader = parallel.dataloader(Noisy(), BATCH, shuffle=True)
    good = {"version": 1, "epoch": 1, "samples": 16, "seed": 4, "shuffle": True, "num_samples": SAMPLES}
    told = [message_of(lambda: parallel.manual_seed(rank)), message_of(lambda: parallel.manual_seed(0.5)),
            message_of(lambda: parallel.load_run_state({"seed": 1, "calls": 2})),
            message_of(lambda: parallel.load_run_state(None)),
            message_of(lambda: parallel.load_run_state({"version": 1, "seed": 1, "calls": -2})),
            message_of(lambda: parallel.load_run_state({"version": 1, "seed": 1, "calls": 2 + rank})),
            message_of(lambda: loader.load_state_dict({**good, "shuffle": False})),
            message_of(lambda: loader.load_state_dict({**good, "num_samples": 41})),
            message_of(lambda: loader.load_state_dict({**good, "samples": 41})),
            message_of(lambda: loader.load_state_dict({**good, "samples": "8"})),
            message_of(lambda: loader.load_state_dict([])), message_of(lambda: loader.set_epoch(-1)),
            message_of(lambda: parallel.load_run_state(parallel.run_state()))]
    counts = []
    loader.load_state_dict(good)
    assert loader.state_dict() == good
    loader.set_epoch(1)  # the same: it goes on
    counts.append(len(list(loader)))
    assert loader.state_dict() == {**good, "samples": SAMPLES}
    counts.append(len(list(loader)))
    loader.load_state_dict(loader.state_dict())
    counts.append(len(list(loader)))
    loader.load_state_dict(good)
    loader.set_epoch(2)
    counts.append(len(list(loader)))
    loader.load_state_dict({**good, "samples": 12})
    counts.append(len(list(loader)))
    next(iter(loader))
    assert loader.state_dict()["samples"] == BATCH
    return told, parallel.run_state(), counts


def test_states_that_cannot_be_are_refused(ranks: Any) -> None:
    for told, state, counts in ranks(2).run(states):
        seeds, kind, version, none, negative, different, order, length, many, text, empty, epoch, fine = told
        assert "InputError: random ops need one seed on all ranks: seed 0 after 0 calls (on ranks [0]); seed 1" in seeds
        assert "seed is 0.5" in kind and "the run's state has version None" in version and "is None" in none
        assert "calls -2" in negative and "seed 1 after 3 calls (on ranks [1])" in different
        assert "shuffle False, this loader True" in order and "num_samples 41, this loader 40" in length
        assert "41 samples of 40" in many and "samples '8'" in text and "state is []" in empty
        assert "epoch is -1" in epoch
        assert fine == "no error" and state == {"version": 1, "seed": -5, "calls": 3}
        assert counts == [3, 5, 0, 5, 4], "the last of 28 samples in batches of 8 too"


def test_an_optimizer_with_an_empty_group_goes_on(mesh_of_one: Any, tmp_path: Path) -> None:
    """transformers makes a group of biases, of which a model with adapters may train none."""
    def made() -> tuple[Any, torch.optim.Optimizer]:
        parallel = autoparallel.compile(nn.Linear(4, 4, bias=False), mesh_of_one, example_inputs=(torch.ones(2, 4),))
        return parallel, torch.optim.AdamW([{"params": [], "lr": 0.5}, {"params": list(parallel.parameters())}], lr=0.1)

    parallel, optimizer = made()
    parallel(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.2
    parallel.save(tmp_path, optimizer)
    again, loaded = made()
    again.load(tmp_path, loaded)
    assert [(group["lr"], len(group["params"])) for group in loaded.param_groups] == [(0.5, 0), (0.2, 1)]
    (before,), (after,) = optimizer.state.values(), loaded.state.values()
    assert torch.equal(before["exp_avg"].full_tensor(), after["exp_avg"].full_tensor())


def test_jobs_that_save_to_one_folder_do_not_mix_their_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each writes to a folder of its own, and leaves that of a process that runs; and is told of the other."""
    host = socket.gethostname()
    names = f"{host}-{os.getppid()}.", f"{host}-{2**30}.", ""
    alive, dead, old = (tmp_path / f".step-3.{name}partial" for name in names)
    dead_too = tmp_path / f".step-5.{host}-{2**30}.partial"
    for folder in (alive, dead, dead_too, old, tmp_path / ".step-4.partial"):
        folder.mkdir()
    made = _cleared(tmp_path, 3)
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, made.name, ".step-4.partial"}
    assert made.name == f".step-3.{host}-{os.getpid()}.partial" and _cleared(tmp_path, 3) == made
    theirs = Checkpoint(9, tmp_path / "step-9", 1, (1,), ("model",), "")
    theirs.path.mkdir()
    (theirs.path / "about.json").write_text(theirs.text())
    for _ in range(2):
        _warn_of_others(tmp_path, [theirs])
    assert [record.message.count("another job saves to") for record in caplog.records] == [1]
    assert "it has written step-9 while this one ran" in caplog.text
