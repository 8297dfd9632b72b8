"""What training loops do beside steps, with state in each tier: groups added later, copied modules, `torch.save`."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autoparallel
from autoparallel.errors import InputError
from tests.support.offloaded import Net, in_file, local
from tests.support.ranks import mesh_of
from tests.support.reference import gathered
from tests.support.tiers import slow, with_slow

TIERS = ("host", "parameters", "disk", "device/host/disk", "host/disk/disk", "disk/disk/disk")
X = torch.linspace(-1, 1, 64).view(8, 8)


def compiled(tier: str, folder: Path, **more: Any) -> Any:
    where = {"disk_path": folder} if "disk" in tier else {}
    stage = 3 if tier in ("parameters", "host/disk/disk", "disk/disk/disk") else 1
    return autoparallel.compile(Net(), mesh_of(2), example_inputs=(X,), zero_stage=stage, offload=tier, **where, **more)


def grown(model: Any, make: Any, times: int = 2) -> Any:
    """The optimizer by ``make`` after steps of the first layer, then of both by an added group."""
    first, second = ([p for n, p in model.named_parameters() if n[0] == name] for name in "ab")
    optimizer = make(first)
    for number in range(2 * times):
        if number == times:
            optimizer.add_param_group({"params": second, "lr": 0.02, "weight_decay": 0.3})
        model(X + number).backward()
        optimizer.step()
        model.zero_grad()
    return optimizer


def added(tier: str, folder: Path, fraction: float | None) -> tuple[dict[str, Tensor], list[bool]]:
    """The parameters of a run whose optimizer gets a group; and whether a step more is the same by an optimizer of both
    groups that has loaded the state dict."""
    parallel = compiled(tier, folder, **({} if fraction is None else {"offload_fraction": fraction}))
    optimizer = grown(parallel, lambda some: parallel.optimizer(torch.optim.AdamW, some, lr=0.1, tile_bytes=4096))
    state, before = copy.deepcopy(optimizer.state_dict()), {n: local(p) for n, p in parallel.named_parameters()}
    whole = gathered(parallel.named_parameters())
    groups = [{**group, "params": [list(parallel.parameters())[number] for number in group["params"]]}
              for group in state["param_groups"]]
    other = parallel.optimizer(torch.optim.AdamW, groups, tile_bytes=4096)
    other.load_state_dict(state)
    found = []
    for each in (optimizer, other):
        with torch.no_grad():
            for name, p in parallel.named_parameters():
                (p.to_local() if hasattr(p, "to_local") else p).copy_(before[name])
        parallel(X).backward()
        each.step()
        parallel.zero_grad()
        found.append({n: local(p) for n, p in parallel.named_parameters()})
    return whole, [torch.equal(found[0][name], value) for name, value in found[1].items()]


@pytest.mark.ranks
@pytest.mark.parametrize(("tier", "fraction"), [
    *((tier, None) if tier in ("parameters", "disk/disk/disk") else slow(tier, None) for tier in TIERS), ("host", 0.4)])
def test_a_group_that_is_added(ranks: Any, tmp_path: Path, tier: str, fraction: float | None) -> None:
    """As of torch's optimizer in one process; its state dict goes on to the bit in an optimizer of both groups."""
    model = Net()
    grown(model, lambda some: torch.optim.AdamW(some, lr=0.1))
    for whole, same in ranks(2).run(added, tier, tmp_path, fraction):
        assert all(same) and len(same) == 4
        for name, value in model.named_parameters():
            torch.testing.assert_close(whole[name], value.detach(), rtol=1e-5, atol=1e-6)
    assert list(tmp_path.iterdir()) == []


def added_in_vain(folder: Path) -> tuple[str, int, bool]:
    """The error of a group without room, the groups left, and whether steps go on."""
    parallel = compiled("disk", folder, disk_limit_bytes=3 * 4096)
    optimizer = parallel.optimizer(torch.optim.AdamW, list(parallel.a.parameters()), lr=0.1, tile_bytes=4096)
    with pytest.raises(InputError) as error:
        optimizer.add_param_group({"params": list(parallel.b.parameters())})
    parallel(X).backward()
    before = local(parallel.a.weight)
    optimizer.step()
    return str(error.value), len(optimizer.param_groups), not torch.equal(before, local(parallel.a.weight))


@pytest.mark.ranks
def test_a_group_without_room_changes_nothing(ranks: Any, tmp_path: Path) -> None:
    for text, groups, steps in ranks(2).run(added_in_vain, tmp_path):
        assert "and disk_limit_bytes is 12,288" in text and groups == 1 and steps


def two_optimizers(folder: Path) -> tuple[str, bool]:
    """The error of a second optimizer, beside whose states there is no room; whether there is once the first is
    replaced by one of all parameters."""
    parallel = compiled("disk", folder, disk_limit_bytes=3 * 4096)
    first = parallel.optimizer(torch.optim.AdamW, list(parallel.a.parameters()), tile_bytes=4096)
    with pytest.raises(InputError) as error:
        parallel.optimizer(torch.optim.AdamW, list(parallel.b.parameters()), tile_bytes=4096)
    again = parallel.optimizer(torch.optim.AdamW, list(parallel.a.parameters()), tile_bytes=4096)
    return str(error.value), first is not again


@pytest.mark.ranks
def test_optimizers_of_one_module_share_the_limits(ranks: Any, tmp_path: Path) -> None:
    for text, replaced in ranks(2).run(two_optimizers, tmp_path):
        assert "and disk_limit_bytes is 12,288" in text and replaced


def copies(tier: str, folder: Path) -> tuple[list[float], bool, dict[str, int], dict[str, int]]:
    """The loss of a copy after its original was trained, of both after the copy was trained as the original, whether
    its parameters are where the original's are, and the bytes of both."""
    parallel = compiled(tier, folder)
    other = copy.deepcopy(parallel)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.1)
    parallel(X).backward()
    optimizer.step()
    losses = [float(other(X)), float(parallel(X))]
    again = other.optimizer(torch.optim.AdamW, lr=0.1)
    other(X).backward()
    with pytest.raises(InputError, match="the plan keeps optimizer states on the"):
        torch.optim.AdamW(other.parameters(), lr=0.1).step()
    again.step()
    there = [(in_file(a), in_file(a.grad)) == (in_file(b), in_file(b.grad))
             for a, b in zip(parallel.parameters(), other.parameters(), strict=True)]
    return [*losses, float(other(X))], all(there), optimizer.memory(), again.memory()


@pytest.mark.ranks
@pytest.mark.parametrize("tier", with_slow(TIERS, "disk", "device/host/disk", "host/disk/disk"))
def test_a_copied_module_lives_where_the_original_does(ranks: Any, tmp_path: Path, tier: str) -> None:
    """With values of its own; copies of modules on disk were refused."""
    first = float(Net()(X).detach())
    for (before, trained, after), there, mine, theirs in ranks(2).run(copies, tier, tmp_path):
        assert before == pytest.approx(first, rel=1e-5) and trained == after != before
        assert there and mine == theirs
    assert list(tmp_path.iterdir()) == []


def saved(tier: str, folder: Path) -> tuple[list[bool], int, int]:
    """Whether states that `torch.save` wrote are those of the optimizer; bytes of the file of one, and of the state."""
    parallel = compiled(tier, folder)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.1)
    parallel(X).backward()
    optimizer.step()
    state, file, small = optimizer.state_dict(), io.BytesIO(), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)["state"]
    least = min((entries["exp_avg"] for entries in state["state"].values()), key=lambda value: local(value).numel())
    torch.save(least.to_local(), small)
    return ([torch.equal(local(read[number][name]), local(value)) for number, entries in state["state"].items()
             for name, value in entries.items()], len(small.getvalue()), local(least).nbytes)


@pytest.mark.ranks
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_states_are_saved_by_torch(ranks: Any, tmp_path: Path, tier: str) -> None:
    """On the host only the first one could be, with the memory of all others."""
    for same, written, needed in ranks(2).run(saved, tier, tmp_path):
        assert len(same) == 12 and all(same)
        assert written < needed + 1600    # what torch writes around it
