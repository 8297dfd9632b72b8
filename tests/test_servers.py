"""Parameter servers on real processes: equal to one process, bounded staleness, workers that come and go."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoparallel.servers.tables import initial_rows
from autoparallel.servers.worker import Servers
from tests.support.served import ServedJob
from tests.support.tiers import slow

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]
ROWS, WIDTH, BATCH, STEPS = 37, 6, 8, 5


class Net(nn.Module):
    """A wide and deep model in small: ids are looked up one by one and in bags."""

    def __init__(self, items: nn.Module, tags: nn.Module) -> None:
        super().__init__()
        self.items, self.tags = items, tags
        self.deep = nn.Sequential(nn.Linear(2 * WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, ids: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return self.deep(torch.cat([self.items(ids) + self.items((ids + 1) % ROWS), self.tags(tags)], -1)).squeeze(-1)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return (torch.randint(0, ROWS, (BATCH,), generator=draw), torch.randint(0, ROWS, (BATCH, 3), generator=draw),
            torch.randn(BATCH, generator=draw))


SPARSE = {"SGD": {"lr": 0.3}, "Adagrad": {"lr": 0.3, "lr_decay": 0.1}, "SparseAdam": {"lr": 0.05}}
DENSE = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adagrad": {"lr": 0.1}, "AdamW": {"lr": 0.05}}


def served_net(servers: Servers, sparse: str, dense: str) -> Net:
    torch.manual_seed(0)
    items = servers.embedding("items", ROWS, WIDTH, optimizer=getattr(torch.optim, sparse), padding_idx=3,
                              **SPARSE[sparse])
    tags = servers.embedding_bag("tags", ROWS, WIDTH, optimizer=getattr(torch.optim, sparse), std=0.5, mode="sum",
                                 **SPARSE[sparse])
    return servers.module(Net(items, tags), optimizer=getattr(torch.optim, dense), **DENSE[dense])


def train(servers: Servers, sparse: str, dense: str, pause_s: float = 0.0) -> dict[str, Any]:
    """An ordinary loop on this worker's rows of each batch. Says when it has pushed three steps."""
    net, losses = served_net(servers, sparse, dense), []
    for step in range(servers.step_number, STEPS):
        ids, tags, wanted = (part.chunk(servers.workers)[servers.worker] for part in batch_of(step))
        loss = (net(ids, tags) - wanted).square().mean()
        loss.backward()
        servers.step()
        losses.append(float(loss.detach()))
        if step == 2:
            Path(f"pushed-{servers.worker}").touch()
        time.sleep(pause_s)
    return {"losses": losses, "items": servers.whole("items"), "tags": servers.whole("tags"),
            "head": servers.whole("model.deep.2.weight"), "pushes": servers.pushes()}


def reference(sparse: str, dense: str) -> tuple[Net, list[float]]:
    """The same by torch alone in one process."""
    torch.manual_seed(0)
    items = nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=3)
    tags = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum")
    with torch.no_grad():
        items.weight.copy_(initial_rows("items", 0, ROWS, WIDTH))
        tags.weight.copy_(initial_rows("tags", 0, ROWS, WIDTH, std=0.5))
    torch.manual_seed(0)
    net = Net(items, tags)
    first = getattr(torch.optim, sparse)([items.weight, tags.weight], **SPARSE[sparse])
    second = getattr(torch.optim, dense)(net.deep.parameters(), **DENSE[dense])
    losses = []
    for step in range(STEPS):
        ids, more, wanted = batch_of(step)
        loss = (net(ids, more) - wanted).square().mean()
        loss.backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return net, losses


@pytest.mark.parametrize(("servers", "workers", "sparse", "dense"), [
    (2, 2, "Adagrad", "AdamW"), slow(1, 4, "SGD", "SGD"), slow(3, 2, "SparseAdam", "Adagrad"),
    slow(2, 1, "SparseAdam", "AdamW")])
def test_synchronous_servers_equal_one_process(servers: int, workers: int, sparse: str, dense: str) -> None:
    net, losses = reference(sparse, dense)
    with ServedJob(servers, workers) as job:
        made = job.train(train, sparse, dense)
    for one in made:
        close(one["items"], net.items.weight)
        close(one["tags"], net.tags.weight)
        close(one["head"], net.deep[2].weight)
    mean = [sum(at) / workers for at in zip(*(one["losses"] for one in made), strict=True)]
    assert mean == pytest.approx(losses, rel=1e-5)
    pushes = made[0]["pushes"]
    assert {(push.server, push.worker, push.step) for push in pushes} == {
        (s, w, step) for s in range(servers) for w in range(workers) for step in range(STEPS)}
    assert all(push.staleness == 0 and push.read == push.applied == push.step for push in pushes)


@pytest.mark.parametrize(("sparse", "dense", "every"), [("SparseAdam", "AdamW", 1000), slow("Adagrad", "SGD", 2)])
def test_a_killed_server_has_its_optimizers_state_again(sparse: str, dense: str, every: int, tmp_path: Path) -> None:
    """To the bit of a job in which nobody was killed: as the log is replayed, and from a whole state."""
    found = []
    for kill in (False, True):
        with ServedJob(1, 2, checkpoint_dir=tmp_path / str(kill), checkpoint_every=every) as job:
            for worker in range(2):
                job.start("worker", worker, train, sparse, dense, 0.2)
            if kill:
                job.wait_for("pushed-0")
                job.kill("server", 0)
                job.start("server", 0)
            found.append(job.result(0))
            job.ended()
    for name in ("items", "tags", "head"):
        assert torch.equal(found[0][name], found[1][name]), name
    assert found[0]["losses"] == found[1]["losses"]


def close(made: torch.Tensor, wanted: torch.Tensor) -> None:
    assert float((made - wanted.detach()).abs().max()) <= 1e-5 * float(wanted.abs().max())


def other_rates(servers: Servers) -> None:
    table = servers.embedding("items", ROWS, WIDTH, optimizer=torch.optim.SGD, lr=0.1)
    servers.set_lr(0.1 * (1 + servers.worker))
    table(torch.tensor([1])).sum().backward()
    servers.step()


def test_workers_must_have_one_learning_rate() -> None:
    with ServedJob(1, 2) as job:
        for worker in range(2):
            job.start("worker", worker, other_rates)
        errors = [job.error("worker", worker) for worker in range(2)]
        assert any("has another learning rate for table 'items' at step 0" in error for error in errors)
        assert "was lost: InputError" in job.error("server", 0)


def uneven(servers: Servers, count: int, slow_worker: int, pause_s: float) -> list[Any]:
    table = servers.embedding("items", ROWS, WIDTH, optimizer=torch.optim.SGD, lr=0.1)
    for step in range(count):
        table(torch.tensor([step % ROWS, (step + 1) % ROWS])).sum().backward()
        if servers.worker == slow_worker:
            time.sleep(pause_s)
        servers.step()
    return servers.pushes()


@pytest.mark.parametrize("staleness", [2, slow(0), slow(5)])
def test_no_worker_is_further_ahead_than_the_staleness(staleness: int) -> None:
    """The fast worker comes as far ahead as it may, and no further: by the log, at every push."""
    with ServedJob(2, 2, staleness=staleness) as job:
        _, last = job.train(uneven, 10, 1, 0.15)
    assert max(push.staleness for push in last) == staleness
    for server in range(2):
        clocks = {0: 0, 1: 0}
        for push in (push for push in last if push.server == server):
            assert push.step == clocks[push.worker]
            clocks[push.worker] += 1
            assert max(clocks.values()) - min(clocks.values()) <= staleness + 1  # the push itself is one
            assert push.applied - push.read <= 2 * staleness + 1
        assert clocks == {0: 10, 1: 10}


