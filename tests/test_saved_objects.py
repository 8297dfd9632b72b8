"""What a checkpoint holds beside weights: several optimizers, objects that grow, states that are not there yet."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

import autoparallel
from autoparallel.errors import InputError
from autoparallel.runtime.checkpoint import job
from autoparallel.runtime.checkpoint.files import Entry
from autoparallel.runtime.checkpoint.job import Checkpoint, checkpoints
from autoparallel.runtime.checkpoint.offline import Contents, to_safetensors
from tests.support.ranks import mesh_of


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
        self.idle = nn.Linear(2, 2)     # has no gradient
        self.seen: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) - x).square().mean()

    def get_extra_state(self) -> dict[str, int]:
        return dict(self.seen)

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state


class Record:
    """Grows as a run goes on."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"losses": [], "best": {}, "history": torch.zeros(0), "last": {"one": 1}}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


X = torch.ones(8, 8)


def compiled(mesh: Any, layers: int = 2, **options: Any) -> Any:
    return autoparallel.compile(Net(layers), mesh, example_inputs=(X,), **options)


def halves(parallel: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """An optimizer of weights, and one of biases."""
    named = list(parallel.named_parameters())
    return (torch.optim.AdamW([p for name, p in named if name.endswith("weight")], lr=0.1),
            torch.optim.SGD([p for name, p in named if name.endswith("bias")], lr=0.1, momentum=0.9))


def train(parallel: Any, steps: int, *optimizers: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(float(parallel.step(X)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def two_optimizers(folder: Path, saved: dict[str, Any], loaded: dict[str, Any]) -> tuple[list[float], list[float]]:
    parallel = compiled(mesh_of(2), **saved)
    weights, biases = halves(parallel)
    train(parallel, 3, weights, biases)
    record = Record()
    record.state = {"losses": [1, 2], "best": {"a": [3]}, "history": torch.ones(3), "last": {}}
    parallel.save(folder, weights, biases=biases, record=record, step=3)
    expected = train(parallel, 3, weights, biases)
    again, fresh = compiled(mesh_of(2), **loaded), Record()
    weights, biases = halves(again)
    again.load(folder, weights, biases=biases, record=fresh)
    assert torch.equal(fresh.state.pop("history"), torch.ones(3))
    assert fresh.state == {"losses": [1, 2], "best": {"a": [3]}, "last": {}}
    return expected, train(again, 3, weights, biases)


@pytest.mark.ranks
def test_several_optimizers_and_growing_objects_go_on(ranks: Any, tmp_path: Path) -> None:
    plans: list[dict[str, Any]] = [{"baseline": "fsdp"}, {"pipeline_stages": 2, "micro_batches": 2}]
    for number, (saved, loaded) in enumerate((plans, plans[::-1])):
        for expected, found in ranks(2).run(two_optimizers, tmp_path / str(number), saved, loaded):
            assert found == pytest.approx(expected, rel=1e-5)


def different(folder: Path) -> None:
    rank = torch.distributed.get_rank()
    parallel, record = compiled(mesh_of(2), baseline="ddp"), Record()
    record.state = {"losses": [rank]}
    parallel.save(folder, record=record)
    parallel.load(folder, record=record)
    assert record.state == {"losses": [0]}


def numbered_in_a_pipeline(folder: Path) -> str:
    parallel, record = compiled(mesh_of(2), pipeline_stages=2, micro_batches=2), Record()
    record.state = {"shadow": list(parallel.parameters())}
    with pytest.raises(InputError) as caught:
        parallel.save(folder, record=record)
    return str(caught.value)


@pytest.mark.ranks
def test_tensors_by_number_of_several_stages_are_refused(ranks: Any, tmp_path: Path) -> None:
    for said in ranks(2).run(numbered_in_a_pipeline, tmp_path):
        assert "record has tensors by number, ['shadow'][0] on rank 0 and on rank 1" in said


@pytest.mark.ranks
def test_objects_that_differ_between_ranks_are_told(ranks: Any, tmp_path: Path, capfd: Any) -> None:
    ranks(2).run(different, tmp_path)
    said = "record differs between ranks in ['losses'][0]: the checkpoint has the first rank's"
    assert said in capfd.readouterr().out


def test_saving_takes_no_step(mesh_of_one: Any, tmp_path: Path) -> None:
    found = []
    for saves in (False, True):
        parallel = compiled(mesh_of_one)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
        if saves:
            parallel.save(tmp_path, optimizer, step=0)
            assert not optimizer.state
        found.append(train(parallel, 3, optimizer))
    assert found[0] == found[1]
    again = compiled(mesh_of_one)
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.1)
    again.load(tmp_path, optimizer)
    assert train(again, 3, optimizer) == found[0]


@pytest.mark.parametrize("accumulating", [False, True])
def test_parameters_without_a_state_have_none_afterwards(mesh_of_one: Any, tmp_path: Path, accumulating: bool) -> None:
    parallel = compiled(mesh_of_one)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
    if accumulating:
        parallel.step(X)        # gradients, and no step yet
    else:
        train(parallel, 2, optimizer)
    parallel.save(tmp_path, optimizer, step=2)
    again = compiled(mesh_of_one)
    fresh = torch.optim.AdamW(again.parameters(), lr=0.5)
    again.load(tmp_path, fresh)
    names = {p: name for name, p in again.named_parameters()}
    assert {names[p] for p in fresh.state} == (set() if accumulating else {
        "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"})
    assert fresh.param_groups[0]["lr"] == 0.1
    if not accumulating:
        assert train(again, 2, fresh) == train(parallel, 2, optimizer)


def test_a_schedule_may_be_left_out(mesh_of_one: Any, tmp_path: Path) -> None:
    parallel = compiled(mesh_of_one)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 5)       # adds an option, initial_lr, to the groups
    train(parallel, 1, optimizer)
    parallel.save(tmp_path, optimizer, step=1)
    again = compiled(mesh_of_one)
    fresh = torch.optim.AdamW(again.parameters(), lr=0.1)
    again.load(tmp_path, fresh)
    assert train(again, 2, fresh) == train(parallel, 2, optimizer)


def test_extra_state_that_grows_is_loaded(mesh_of_one: Any, tmp_path: Path) -> None:
    parallel = compiled(mesh_of_one)
    parallel.seen.update(a=1, b=2)
    parallel.save(tmp_path, step=0)
    again = compiled(mesh_of_one)
    again.load(tmp_path)
    assert again.state_dict()["_extra_state"] == {"a": 1, "b": 2}


def test_what_is_not_loaded_is_refused_or_told(mesh_of_one: Any, tmp_path: Path, caplog: Any) -> None:
    parallel = compiled(mesh_of_one, 2)
    optimizer = torch.optim.AdamW(parallel.parameters())
    train(parallel, 1, optimizer)
    parallel.save(tmp_path, optimizer, step=0)
    with pytest.raises(InputError, match=r"weights that this model does not have, layers.1.bias, layers.1"):
        compiled(mesh_of_one, 1).load(tmp_path)
    with pytest.raises(InputError, match=r"SGD has .'dampening', 'momentum', 'nesterov'.: load it into"):
        parallel.load(tmp_path, torch.optim.SGD(parallel.parameters(), lr=0.1))
    parallel.load(tmp_path, torch.optim.AdamW([parallel.layers[0].weight]))
    assert "has states of optimizer for layers.0.bias, layers.1.bias, layers.1.weight, which it does not" in caplog.text
    with pytest.raises(InputError, match=r"a parameter \[3\] that is not this module's"):
        parallel.save(tmp_path, torch.optim.AdamW([*parallel.parameters(), nn.Parameter(torch.ones(3))]))


def test_the_checkpoint_just_saved_stays(mesh_of_one: Any, tmp_path: Path, caplog: Any) -> None:
    parallel = compiled(mesh_of_one)
    for step in (5, 6, 7, 1):
        saved = parallel.save(tmp_path, step=step, keep=2).wait()
        assert saved.path.is_dir()
    assert [one.step for one in checkpoints(tmp_path)] == [1, 7]
    assert "has checkpoints of later steps, [6, 7], than the one just saved, 1" in caplog.text


def test_an_error_of_a_save_beside_training_is_told_once(mesh_of_one: Any, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Future[Any]:
        failed: Future[Any] = Future()
        failed.set_exception(CheckpointException("write", {0: (OSError("no space left"), None)}))  # type: ignore[dict-item]
        return failed

    parallel = compiled(mesh_of_one)
    with monkeypatch.context() as patch:
        patch.setattr(job.dcp, "async_save", fails)
        saving = parallel.save(tmp_path, step=0, wait=False)
        with pytest.raises(InputError, match="step-0 could not be written: rank 0: OSError: no space left"):
            saving.wait()
    parallel.save(tmp_path, step=1)
    assert [one.step for one in checkpoints(tmp_path)] == [1]


def test_a_script_may_change_its_directory_meanwhile(mesh_of_one: Any, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = compiled(mesh_of_one)
    monkeypatch.chdir(tmp_path)
    saving = parallel.save("runs", step=0, wait=False)
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    assert saving.wait().path == tmp_path / "runs" / "step-0"
    assert [one.step for one in checkpoints(tmp_path / "runs")] == [0] and not list(Path().iterdir())


def test_a_file_is_no_folder_of_checkpoints(mesh_of_one: Any, tmp_path: Path) -> None:
    parallel, file = compiled(mesh_of_one), tmp_path / "file"
    file.write_text("")
    for action in (parallel.save, parallel.load):
        with pytest.raises(InputError, match="file is a file: give"):
            action(file)




def test_a_checkpoint_that_cannot_be_read_becomes_no_file_of_zeros(tmp_path: Path) -> None:
    lost = Checkpoint(1, tmp_path / "step-1", 1, (1,), ("model",), "")
    broken = Contents(lost, (Entry("w", torch.float32, (4,)),), 0)
    (tmp_path / "empty").mkdir()
    for output in (tmp_path / "new", tmp_path / "empty"):
        with pytest.raises(InputError, match="w to w cannot be read"):
            to_safetensors(broken, output)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file cannot be written: File exists: give a folder in which you may write"):
        to_safetensors(broken, tmp_path / "file")
