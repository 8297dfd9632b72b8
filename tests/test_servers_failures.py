"""Servers and workers that are killed: no acknowledged push is lost, nothing hangs, errors name who is missing.

Every push adds 1 to row 5 and 1 to row 6 of a table of zeros, so that the table counts the pushes.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from autoparallel.servers.worker import Servers
from tests.support.served import ServedJob
from tests.support.tiers import slow

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]
COUNT, AT = 30, 8


def weighing(servers: Servers) -> dict[str, Any]:
    """As `counting`, but worker w adds 1 + w: a mean of two is 1.5."""
    table = servers.embedding("counts", 9, 1, optimizer=torch.optim.SGD, std=0.0, lr=1.0)
    first = servers.step_number
    for step in range(first, COUNT):
        if step == AT:
            Path(f"at-{servers.worker}").touch()
        (-(1 + servers.worker) * table(torch.tensor([5, 6])).sum()).backward()
        servers.step()
        time.sleep(0.03)
    return {"first": first, "counts": servers.whole("counts")[[5, 6], 0].tolist()}


def counting(servers: Servers, count: int = COUNT, pause_s: float = 0.03, leave_at: int = -1,
             awaited: str = "") -> dict[str, Any]:
    """Add 1 to rows 5 and 6 in each step; say when step AT has begun, and how many pushes were acknowledged. Step
    AT + 4 begins when the file ``awaited`` is there."""
    table = servers.embedding("counts", 9, 1, optimizer=torch.optim.SGD, std=0.0, lr=1.0)
    Path(f"joined-{servers.worker}").touch()
    first, acknowledged = servers.step_number, 0
    for step in range(first, count):
        if step == leave_at:
            break
        if step == AT:
            Path(f"at-{servers.worker}").touch()
        while awaited and step == AT + 4 and not Path(awaited).exists():
            time.sleep(0.02)
        (-table(torch.tensor([5, 6])).sum()).backward()
        servers.step()
        acknowledged += 1
        told = Path(f"writing-{servers.worker}")  # whole at any time, since the process may be killed
        told.write_text(str(acknowledged))
        told.rename(f"acknowledged-{servers.worker}")
        time.sleep(pause_s)
    return {"first": first, "acknowledged": acknowledged, "counts": servers.whole("counts")[[5, 6], 0].tolist()}


@pytest.mark.parametrize(("staleness", "durability", "every"), [
    (0, "log", 1000), (2, "fsync", 4), slow(0, "fsync", 5), slow(2, "log", 1000), slow(0, "log", 3)])
def test_a_killed_server_goes_on_where_it_was(staleness: int, durability: str, every: int, tmp_path: Path) -> None:
    with ServedJob(2, 2, staleness=staleness, checkpoint_dir=tmp_path, checkpoint_every=every, durability=durability
                   ) as job:
        for worker in range(2):
            job.start("worker", worker, counting)
        job.wait_for("at-0")
        for server in range(2):
            job.kill("server", server)
            job.start("server", server)
        made = [job.result(worker) for worker in range(2)]
        job.ended()
    assert [one["acknowledged"] for one in made] == [COUNT, COUNT]
    updates = float(COUNT if staleness == 0 else 2 * COUNT)  # means of two pushes, or each by itself
    assert max(one["counts"] for one in made) == [updates, updates]


def test_a_killed_worker_is_an_error_that_names_it() -> None:
    with ServedJob(2, 2, lost_after_s=5.0) as job:
        for worker in range(2):
            job.start("worker", worker, counting)
        job.wait_for("at-1")
        job.kill("worker", 1)
        assert "PeerError: worker 1 was lost: nothing was heard of it for" in job.error("worker", 0, 30)
        assert "worker 1 was lost" in job.error("server", 0) and "worker 1 was lost" in job.error("server", 1)
        assert "has failed" in job.error("scheduler", 0)


def test_no_step_is_completed_without_a_killed_worker(tmp_path: Path) -> None:
    """Where its loss is an error, the resumed job makes the step again: a mean of the pushes there were is wrong."""
    settings: dict[str, Any] = {"checkpoint_dir": tmp_path, "lost_after_s": 5.0}
    with ServedJob(2, 2, **settings) as job:
        for worker in range(2):
            job.start("worker", worker, weighing)
        job.wait_for("at-1")
        job.kill("worker", 1)
        for role, number in (("worker", 0), ("server", 0), ("server", 1)):
            assert "worker 1 was lost" in job.error(role, number, 30)
    with ServedJob(2, 2, **settings, resume=True) as job:
        made = job.train(weighing)
    assert made[0]["first"] >= AT and made[0]["counts"] == [1.5 * COUNT, 1.5 * COUNT]


@pytest.mark.parametrize("staleness", [0, slow(2)])
def test_others_go_on_without_a_killed_worker(staleness: int) -> None:
    with ServedJob(2, 3, staleness=staleness, lost_after_s=5.0, on_worker_loss="continue") as job:
        for worker in range(3):
            job.start("worker", worker, counting)
        job.wait_for("at-1")
        job.kill("worker", 1)
        made = [job.result(worker) for worker in (0, 2)]
        job.ended()
        killed = int((job.folder / "acknowledged-1").read_text())
    assert [one["acknowledged"] for one in made] == [COUNT, COUNT]
    counts = max(one["counts"] for one in made)
    if staleness == 0:  # a mean of whatever came is 1
        assert counts == [COUNT, COUNT]
    else:  # its last push may have reached one server or both, and not have been acknowledged
        assert all(2 * COUNT + killed <= count <= 2 * COUNT + killed + 1 for count in counts)


@pytest.mark.parametrize("staleness", [0, slow(2)])
def test_workers_come_and_leave(staleness: int) -> None:
    with ServedJob(2, 2, staleness=staleness) as job:
        job.start("worker", 0, counting, COUNT, 0.03, -1, "joined-2")  # it must not end before worker 2 has started
        job.start("worker", 1, counting, COUNT, 0.03, AT + 3)
        job.wait_for("at-0")
        job.start("worker", 2, counting)
        made = [job.result(worker) for worker in range(3)]
        job.ended()
    assert made[0]["acknowledged"] == COUNT and made[1]["acknowledged"] == AT + 3
    assert made[2]["first"] >= AT and made[2]["acknowledged"] == COUNT - made[2]["first"]
    counts = max(one["counts"] for one in made)
    assert counts == [COUNT if staleness == 0 else sum(one["acknowledged"] for one in made)] * 2


@pytest.mark.parametrize(("durability", "directory", "said"), [
    ("log", False, "it was taken for lost, or the server was started again without its state (checkpoint_dir)"),
    ("checkpoint", True, "it was started again from an older state (durability='checkpoint'); start the job again")])
def test_lost_pushes_are_an_error(durability: str, directory: bool, said: str, tmp_path: Path) -> None:
    where = {"checkpoint_dir": tmp_path, "checkpoint_every": 5} if directory else {}
    with ServedJob(1, 1, durability=durability, **where) as job:
        job.start("worker", 0, counting)
        job.wait_for("at-0")
        job.kill("server", 0)
        job.start("server", 0)
        error = job.error("worker", 0)
        assert "ServerError: " in error and said in error


def test_waits_have_limits_and_name_who_is_missing() -> None:
    with ServedJob(2, 2, timeout_s=8.0) as job:
        for worker in range(2):
            job.start("worker", worker, counting, COUNT, 0.03 if worker == 0 else 12.0)
        error = job.error("worker", 0)
        assert "has waited 8 s on server" in error and "worker 1 has pushed 1 steps" in error
    with ServedJob(2, 1, timeout_s=8.0) as job:
        job.start("worker", 0, counting)
        job.wait_for("at-0")
        job.kill("server", 1)
        assert "has waited 8 s on server 1: it cannot be reached" in job.error("worker", 0)
    with ServedJob(1, 2, timeout_s=8.0) as job:
        job.start("worker", 0, counting)
        assert "1 of 2 workers have joined: [0]" in job.error("worker", 0)


@pytest.mark.slow
def test_a_stopped_worker_that_comes_back_is_refused() -> None:
    with ServedJob(1, 2, lost_after_s=5.0, on_worker_loss="continue") as job:
        job.start("worker", 0, counting, 60, 0.15)
        stopped = job.start("worker", 1, counting)
        job.wait_for("at-1")
        assert stopped.pid is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        at = int((job.folder / "acknowledged-0").read_text())
        until = time.monotonic() + 30
        while int((job.folder / "acknowledged-0").read_text() or at) < at + 5:
            assert time.monotonic() < until
            time.sleep(0.1)
        os.kill(stopped.pid, signal.SIGCONT)
        assert "does not know worker 1: it was taken for lost" in job.error("worker", 1)
        assert job.result(0)["acknowledged"] == 60
        job.ended()


def test_training_goes_on_without_the_scheduler() -> None:
    """Workers that compute for longer than ``lost_after_s`` are still known to live."""
    with ServedJob(2, 2, lost_after_s=5.0) as job:
        for worker in range(2):
            job.start("worker", worker, counting, 3, 7.0)
        job.wait_for("acknowledged-0")
        job.kill("scheduler", 0)
        assert [job.result(worker)["acknowledged"] for worker in range(2)] == [3, 3]
        assert not job.error("server", 0) and not job.error("server", 1)


@pytest.mark.parametrize("durability", ["log", slow("checkpoint")])
def test_a_killed_job_is_resumed(durability: str, tmp_path: Path) -> None:
    """At a step that all servers have completed; its result is that of a job which was never killed."""
    settings = {"checkpoint_dir": tmp_path, "checkpoint_every": 3, "durability": durability}
    with ServedJob(2, 2, **settings) as job:
        for worker in range(2):
            job.start("worker", worker, counting)
        job.wait_for("at-0")
    with ServedJob(2, 2, **settings) as job:
        told = job.error("server", 0) + job.error("server", 1)  # the first that says so ends the job for the other
        assert "has the state of another job: give resume=True" in told
    with ServedJob(2, 2, **settings, resume=True) as job:
        made = job.train(counting)
    assert 3 <= made[0]["first"] == made[1]["first"] <= COUNT
    assert made[0]["counts"] == [COUNT, COUNT]
