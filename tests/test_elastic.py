"""Jobs that go on with fewer ranks after some were killed; the losses are those of one process."""

from __future__ import annotations

import doctest
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import autoparallel
from autoparallel.cli import app
from autoparallel.errors import AutoparallelError, MeshError
from autoparallel.launch.elastic import VISIBLE, Failed, keep_running
from autoparallel.launch.local import free_port
from autoparallel.runtime.checkpoint import job
from tests.support.launching import ROOT, clean_environment, guide
from tests.support.tiers import slow

CLI = [sys.executable, "-m", "autoparallel"]
KILLED, ENDED = -signal.SIGKILL, -signal.SIGTERM


# -------------------------------------------------------------------------------------------------- without processes

@pytest.mark.parametrize(("failures", "min_ranks", "restarts", "started", "done"), [
    ([[]], 2, 0, [4], True),
    ([[(1, KILLED), (0, ENDED), (2, 1)], []], 2, 0, [4, 3], True),         # others that the agent ended, or that told
    ([[(1, KILLED)], [(0, -signal.SIGSEGV)], []], 2, 0, [4, 3, 2], True),
    ([[(1, KILLED), (2, KILLED), (3, KILLED)]], 2, 0, [4], False),
    ([[(1, 1)], []], 2, 1, [4, 4], True),                                   # an error: as many again
    ([[(1, 1)], [(1, 1)]], 2, 1, [4, 4], False),
    ([[(1, ENDED)]], 2, 0, [4], False),
])
def test_lost_ranks_are_left_out(failures: list[list[tuple[int, int]]], min_ranks: int, restarts: int,
                                 started: list[int], done: bool, capfd: pytest.CaptureFixture[str]) -> None:
    seen, told = list[int](), list[tuple[int, list[int]]]()

    def start(ranks: int) -> list[Failed]:
        seen.append(ranks)
        return [Failed(*one) for one in failures[len(seen) - 1]]

    def left(ranks: int, lost: Sequence[int]) -> int:
        told.append((ranks, list(lost)))
        return ranks

    assert keep_running(start, 4, min_ranks, restarts, left) is done and seen == started
    assert [ranks for ranks, _ in told] == [ranks for ranks in started[1:] if ranks < 4]
    said = capfd.readouterr().err
    assert ("go on" in said) == bool(told) and (done or "min_ranks" in said or "max_restarts" in said)


def test_a_plan_for_fewer_ranks_starts_fewer() -> None:
    runs = {4: [Failed(0, KILLED)], 2: list[Failed]()}
    assert keep_running(runs.pop, 4, 1, 0, lambda ranks, lost: 2) and not runs


def test_gpus_of_lost_ranks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv(VISIBLE, raising=False)
    runs, seen = {4: [Failed(1, KILLED)], 3: [Failed(2, KILLED)], 2: list[Failed]()}, list[Any]()

    def start(ranks: int) -> list[Failed]:
        seen.append(os.environ.get(VISIBLE))
        return runs[ranks]

    assert keep_running(start, 4, 1, 0) and seen == [None, "0,2,3", "0,2"]
    monkeypatch.delenv(VISIBLE)


@pytest.mark.parametrize(("words", "said"), [
    (["--ranks", "2", "--min-ranks", "3"], "--min-ranks is 3: give a number from 1 to 2"),
    (["--nodes", "2", "--master", "h:1", "--min-ranks", "1"], "give --min-nodes"),
    (["--min-nodes", "1"], "give --min-ranks"),
    (["--nodes", "2", "--master", "h:1", "--min-nodes", "3"], "--min-nodes is 3: give a number from 1 to 2"),
    (["--min-ranks", "1", "--model", "train:job"], "give PLAN.json and --min-ranks (or --min-nodes) too")])
def test_what_cannot_be_is_refused(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["launch", *words, "--", "ls"])
    assert isinstance(result.exception, AutoparallelError) and said in str(result.exception)


def test_a_plan_of_another_number_of_ranks_is_none_where_it_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                       ) -> None:
    plan = autoparallel.plan(torch.nn.Linear(4, 4), autoparallel.Cluster.load("local-cpu", num_devices=2),
                             example_inputs=(torch.zeros(4, 4),), mesh_shape=(2,))
    plan.save(tmp_path / "plan.json")
    for name in clean_environment().keys() ^ os.environ.keys():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AUTOPARALLEL_PLAN", str(tmp_path / "plan.json"))
    with pytest.raises(MeshError, match="2 devices"):
        autoparallel.init(device="cpu")
    monkeypatch.setenv("AUTOPARALLEL_ELASTIC", "1")
    with pytest.raises(MeshError, match="2 devices"):  # one that the script gives counts
        autoparallel.init(device="cpu", plan=plan)
    world = autoparallel.init(device="cpu")
    dist.destroy_process_group()
    assert world.plan is None and world.mesh.mesh_dim_names == ("devices",)


def test_a_process_killed_while_it_removes_an_old_checkpoint_leaves_no_broken_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in clean_environment().keys() ^ os.environ.keys():
        monkeypatch.delenv(name, raising=False)
    world = autoparallel.init(device="cpu")
    try:
        parallel = autoparallel.compile(torch.nn.Linear(4, 4), world.mesh, example_inputs=(torch.zeros(4, 4),))
        parallel.save(tmp_path, step=1)

        def half(path: Path) -> None:
            (path / "about.json").unlink()
            raise OSError("killed here")

        with monkeypatch.context() as killed:
            killed.setattr(job.shutil, "rmtree", half)
            with pytest.raises(OSError, match="killed here"):
                parallel.save(tmp_path, step=2, keep=1)
        assert [one.step for one in job.checkpoints(tmp_path)] == [2]
        parallel.save(tmp_path, step=3, keep=1)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3"]
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_figures_of_the_guide() -> None:
    failed, tried = doctest.testfile(str(ROOT / "docs/guides/elastic.md"), module_relative=False)
    assert failed == 0 and tried


# ----------------------------------------------------------------------------------------------------- with processes

def losses_of_one_process(steps: int) -> list[float]:
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(guide("elastic.md"), "elastic.md", "exec"), names)
    torch.manual_seed(0)
    model = names["Net"]()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        loss = model(torch.randn(12, 32, generator=torch.Generator().manual_seed(step)))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def lines_of(output: str) -> list[tuple[int, float, int]]:
    """Step, loss and number of ranks of each line."""
    words = [line.split() for line in output.splitlines() if re.fullmatch(r"\d+ \S+ on \d+", line)]
    return [(int(step), float(loss), int(ranks)) for step, loss, _, ranks in words]


def check(lines: list[tuple[int, float, int]], steps: int) -> None:
    """Each step is there, and each time with the loss of one process."""
    expected = losses_of_one_process(steps)
    assert {step for step, _, _ in lines} == set(range(steps))
    for step, loss, _ in lines:
        assert loss == pytest.approx(expected[step], rel=1e-6), step


def script(folder: Path, steps: int, more: str = "") -> Path:
    path = folder / "train.py"
    text = guide("elastic.md").replace("else 0, 10)", f"else 0, {steps})")
    path.write_text(text.replace('\n\n\nif __name__ == "__main__"', f'\n{more}\n\nif __name__ == "__main__"'))
    return path


def plan_of_guide(ranks: int) -> autoparallel.Plan:
    """For the guide's model."""
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(guide("elastic.md"), "elastic.md", "exec"), names)
    model, example, _ = names["job"](12, 1)
    return autoparallel.plan(model, autoparallel.Cluster.load("local-cpu", num_devices=ranks), example_inputs=example,
                             by_hand=f"dp={ranks},zero=1")


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [3, slow(4)])
def test_a_killed_rank_leaves_and_the_others_go_on_by_a_new_plan(ranks: int, tmp_path: Path) -> None:
    """Rank 2 is killed in the sixth step: the others go on."""
    script(tmp_path, 10, f"        if step == 5 and world.rank == 2 and world.size == {ranks}:\n"
                         "            import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
    plan_of_guide(ranks).save(tmp_path / "plan.json")
    done = subprocess.run([*CLI, "launch", "plan.json", "--min-ranks", "2", "--model", "train:job", "--",
                           sys.executable, "train.py"], capture_output=True, text=True, timeout=240, cwd=tmp_path,
                          env=clean_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"rank 2 was lost (SIGKILL): {ranks - 1} of {ranks} ranks go on" in done.stderr
    assert f"{ranks} devices before, {ranks - 1} of local-cpu now" in done.stderr
    lines = lines_of(done.stdout)
    assert [on for _, _, on in lines] == [ranks] * 6 + [lines[-1][2]] * 4 and lines[-1][2] in {2, ranks - 1}
    check(lines, 10)


@pytest.mark.ranks    # of a process that plans
@pytest.mark.parametrize(("model", "told"), [("train:job", "2 devices before, 1 of local-cpu now"),
                                             ("train:none", "no new plan in place of")])
def test_rank_0_plans_for_the_ranks_that_there_are(model: str, told: str, tmp_path: Path, caplog: Any,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    for name in clean_environment().keys() ^ os.environ.keys():
        monkeypatch.delenv(name, raising=False)
    script(tmp_path, 1)
    plan_of_guide(2).save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    for name, value in (("PLAN", "plan.json"), ("ELASTIC", "1"), ("MODEL", model)):
        monkeypatch.setenv(f"AUTOPARALLEL_{name}", value)
    world = autoparallel.init(device="cpu")
    dist.destroy_process_group()
    assert told in caplog.text and world.mesh.shape == (1,)
    assert (None if world.plan is None else world.plan.axes[0]) == ((1,) if model == "train:job" else None)


@pytest.mark.slow
@pytest.mark.parametrize("planned", [False, True])
def test_a_lost_host_leaves_and_comes_back(tmp_path: Path, planned: bool) -> None:
    """Two agents of two ranks: one is killed with its ranks, the other goes on, and then a new one joins."""
    script(tmp_path, 100, "        import time; time.sleep(0.3)\n")
    plan_of_guide(4).save(tmp_path / "plan.json")
    plan = ["plan.json", "--model", "train:job"] if planned else []
    master, agents = f"127.0.0.1:{free_port()}", list[subprocess.Popen[str]]()

    def start(number: int) -> None:
        command = [*CLI, "launch", *plan, "--ranks", "2", "--nodes", "2", "--min-nodes", "1", "--node-rank",
                   str(number), "--master", master, "--max-restarts", "3", "--", sys.executable, "train.py"]
        with (tmp_path / f"out{len(agents)}").open("w") as out:
            agents.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
                                           env=clean_environment()))

    def lines() -> list[tuple[int, float, int]]:
        return [line for n in range(len(agents)) for line in lines_of((tmp_path / f"out{n}").read_text())]

    try:
        start(0)
        start(1)
        waiting(lambda: any(step == 4 for step, _, _ in lines()), 100)
        kill(agents[1].pid)
        waiting(lambda: any(ranks == 2 for _, _, ranks in lines()), 100)
        start(1)
        assert agents[0].wait(200) == 0, (tmp_path / "out0").read_text()
    finally:
        for agent in agents:
            kill(agent.pid)
    found = sorted(lines())
    assert found[0][2] == found[-1][2] == 4 and any(ranks == 2 for _, _, ranks in found)
    assert ("4 devices before, 2 of local-cpu now" in (tmp_path / "out0").read_text()) == planned
    check(found, 100)


@pytest.mark.slow
def test_a_job_outlives_its_first_host(tmp_path: Path) -> None:
    """Two agents of a rank each, whose list another process keeps: the first is killed with its rank, and the other
    goes on alone. The list is of one job, and of elastic ones."""
    script(tmp_path, 40, "        import time; time.sleep(0.3)\n")
    port, started = free_port(), list[subprocess.Popen[str]]()

    def start(name: str, *command: str) -> None:
        with (tmp_path / name).open("w") as out:
            started.append(subprocess.Popen([*CLI, *command], stdout=out, stderr=subprocess.STDOUT, text=True,
                                            cwd=tmp_path, env=clean_environment()))

    def command(number: int, *options: str) -> list[str]:
        return ["launch", "--ranks", "1", "--nodes", "2", *options, "--node-rank", str(number), "--master",
                f"127.0.0.1:{port}", "--max-restarts", "3", "--", sys.executable, "train.py"]

    def lines(number: int) -> list[tuple[int, float, int]]:
        return lines_of((tmp_path / f"out{number}").read_text())

    def refused(said: str, *options: str) -> None:
        run = subprocess.run([*CLI, *command(0, *options)], capture_output=True, text=True, cwd=tmp_path,
                             env=clean_environment(), timeout=100)
        assert run.returncode == 2 and said in " ".join(run.stderr.split())

    try:
        start("list", "host-list", "--port", str(port))
        waiting(lambda: "--min-nodes; Ctrl-C ends the list" in (tmp_path / "list").read_text(), 60)
        for number in range(2):
            start(f"out{number}", *command(number, "--min-nodes", "1"))
        waiting(lambda: any(step == 4 for n in range(2) for step, _, _ in lines(n)), 100)
        kill(started[1].pid)
        assert started[2].wait(150) == 0, (tmp_path / "out1").read_text()
        refused("is of a job that has ended: start autoparallel host-list anew", "--min-nodes", "1")
    finally:
        for one in started:
            kill(one.pid)
    found = sorted([*lines(0), *lines(1)])
    assert found[0][2] == 2 and found[-1][2] == 1
    check(found, 40)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("job_number", range(7))
def test_twenty_kills_at_random_points(tmp_path: Path, job_number: int) -> None:
    """Seven jobs of 200 steps on 4 ranks lose one after the other, until one is left: each at a random step, and at a
    random moment of it or of the checkpoint that is written beside it. Those left go on by a new plan."""
    draw, steps = random.Random(job_number), 200
    path = script(tmp_path, steps, "        import time; time.sleep(0.02)\n")
    path.write_text(path.read_text().replace("keep=2)", "keep=2, wait=False)"))
    plan_of_guide(4).save(tmp_path / "plan.json")
    with (tmp_path / "out").open("w") as out:
        run = subprocess.Popen([*CLI, "launch", "plan.json", "--min-ranks", "1", "--model", "train:job", "--",
                                sys.executable, "train.py"], stdout=out, stderr=subprocess.STDOUT, cwd=tmp_path,
                               text=True, env=clean_environment())
    told, lost = (tmp_path / "out").read_text, "was lost (SIGKILL)"

    def now() -> tuple[int, float, int]:
        """The last line since the last loss."""
        return next(iter(lines_of(told().rpartition(lost)[2])[-1:]), (-1, 0.0, 0))

    try:
        for number, step in enumerate(sorted(draw.sample(range(10, steps - 10), 3)), start=1):
            waiting(lambda step=step: now()[0] >= step, 300)
            if now()[2] == 1:                                    # a plan for two ranks takes one of them
                break
            time.sleep(draw.uniform(0, 0.05))
            os.kill(draw.choice(children(run.pid)), signal.SIGKILL)
            waiting(lambda number=number: told().count(lost) == number, 120)
        assert run.wait(300) == 0, told()
    finally:
        kill(run.pid)
    assert " devices before, " in told()                         # a new plan was made
    check(lines_of(told()), steps)
    assert lines_of(told())[-1][:2] == (steps - 1, pytest.approx(losses_of_one_process(steps)[-1], rel=1e-6))


def waiting(until: Any, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < ends
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    commands = {one: Path(f"/proc/{one}/cmdline") for one in map(int, found)}
    return [one for one, path in commands.items() if path.exists() and b"train.py" in path.read_bytes()]


def kill(pid: int) -> None:
    """A process and its children, if they are there."""
    for one in (*children(pid), pid):
        try:
            os.kill(one, signal.SIGKILL)
        except ProcessLookupError:
            continue
