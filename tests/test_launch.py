"""One script under every launcher; what a launcher's environment says is read right, or refused by name."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import autoparallel
from autoparallel.errors import AutoparallelError, LaunchError
from autoparallel.kernels import groups
from autoparallel.launch.environment import Identity, identity_of, set_torch_variables
from autoparallel.launch.local import free_port
from autoparallel.launch.roll_call import RollCall
from autoparallel.launch.world import _size
from tests.support.launching import clean_environment, guide, guides_model, loss_of_one_process, mpirun_of, output_of
from tests.support.tiers import slow

ROOT = Path(__file__).parents[1]
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
            "MASTER_PORT": "7"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
           "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0",
         "SLURM_JOB_NODELIST": "gnode[10,20-21],x"}
SHELL = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "8", "MV2_COMM_WORLD_LOCAL_RANK": "1",
           "MV2_COMM_WORLD_LOCAL_SIZE": "2"}
MSRUN = {"RANK_ID": "3", "RANK_SIZE": "8", "MS_ROLE": "MS_WORKER", "MS_SCHED_HOST": "s", "MS_SCHED_PORT": "8118"}
BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train.sh",
         "SLURM_JOB_NUM_NODES": "1"}
HOST = {"MASTER_ADDR": "h"}


@pytest.mark.parametrize(("environment", "expected"), [
    ({}, None),
    (TORCHRUN, ("torchrun", 3, 8, 1, 2, "a", 7)),
    ({"RANK": "0", "WORLD_SIZE": "1"}, ("torchrun", 0, 1, None, None, "127.0.0.1", 29500)),
    ({**OPENMPI, **HOST, "MASTER_PORT": "9"}, ("openmpi", 3, 8, 1, 2, "h", 9)),
    ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, ("openmpi", 3, 8, 1, 8, "127.0.0.1", 29500)),
    ({**PMI, **HOST}, ("mpich", 3, 8, 1, 2, "h", 29500)),
    ({**MVAPICH, **HOST}, ("mvapich", 3, 8, 1, 2, "h", 29500)),
    ({**SLURM, "MASTER_PORT": "9"}, ("slurm", 3, 8, 1, None, "gnode10", 9)),
    ({**SLURM, "SLURM_STEP_NODELIST": "n7", "MASTER_PORT": "9"}, ("slurm", 3, 8, 1, None, "n7", 9)),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x4)", "MASTER_PORT": "9"}, ("slurm", 3, 8, 1, 2, "gnode10", 9)),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1(x2)", "SLURM_NODEID": "1", "MASTER_PORT": "9"},
     ("slurm", 3, 8, 1, 2, "gnode10", 9)),
    (MSRUN, ("msrun", 3, 8, None, None, "s", 8118)),
    ({**SLURM, **PMI, "MASTER_PORT": "9"}, ("mpich", 3, 8, 1, 2, "h", 9)),
    ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "x", **SLURM, "SLURM_PROCID": "0"}, ("torchrun", 3, 8, 1, 2, "a", 7)),
    ({**SHELL, **OPENMPI, **HOST}, ("openmpi", 3, 8, 1, 2, "h", 29500)),
    (SHELL, ("slurm", 0, 1, 0, None, "127.0.0.1", 29500)),
    (BATCH, None),
    ({**BATCH, "SLURM_NTASKS": "8", "SLURM_JOB_NAME": "interactive"}, None),
    ({**BATCH, "SLURM_NTASKS": "8", **OPENMPI, **HOST}, ("openmpi", 3, 8, 1, 2, "h", 29500)),
    ({**BATCH, "SLURM_NTASKS": "1", "MASTER_PORT": "9"}, ("slurm", 0, 1, 0, None, "127.0.0.1", 9)),
])
def test_each_launcher_is_read(environment: Mapping[str, str], expected: tuple[Any, ...] | None) -> None:
    if "PMI_RANK" in environment and "SLURM_PROCID" in environment:
        environment = {**environment, **HOST}
    assert identity_of(environment) == (None if expected is None else Identity(*expected))


def test_a_job_has_one_port_and_others_have_others() -> None:
    ports = []
    for job, step in (("77", "0"), ("77", "1"), ("78", "0")):
        mine = {identity_of({**SLURM, "SLURM_PROCID": str(rank), "SLURM_JOB_ID": job, "SLURM_STEP_ID": step})
                for rank in range(8)}
        (port,) = {identity.master_port for identity in mine if identity}
        ports.append(port)
    assert len(set(ports)) == 3 and all(10_000 <= port < 30_000 for port in ports)


@pytest.mark.parametrize(("environment", "launcher", "said"), [
    ({**OPENMPI, **SLURM, "SLURM_PROCID": "0"}, None,
     ["Open MPI says rank 3 of 8 (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)",
      "Slurm says rank 0 of 8 (SLURM_PROCID, SLURM_NTASKS)", "autoparallel.init(launcher='openmpi')",
      "AUTOPARALLEL_LAUNCHER=openmpi"]),
    ({**TORCHRUN, **OPENMPI, "WORLD_SIZE": "4"}, None, ["torchrun says rank 3 of 4", "Open MPI says rank 3 of 8"]),
    ({"RANK": "1"}, None, ["RANK is set and WORLD_SIZE is not"]),
    ({"RANK": "x", "WORLD_SIZE": "2"}, None, ["RANK is 'x': a whole number is required"]),
    ({"RANK": "2", "WORLD_SIZE": "2", **HOST}, None, ["rank 2 of 2"]),
    (OPENMPI, None, ["does not say where rank 0 is", "mpirun -x MASTER_ADDR=host"]),
    ({"RANK": "1", "WORLD_SIZE": "2"}, None, ["does not say where rank 0 is"]),
    ({**BATCH, "SLURM_NTASKS": "8"}, None, ["the Slurm job has 8 tasks, and srun has not started this process",
                                            "Write srun python train.py"]),
    (OPENMPI, "slurm", ["Slurm was to count, and SLURM_PROCID is not set"]),
    (OPENMPI, "srun", ["launcher is 'srun': one of ['mpich', 'msrun', 'mvapich', 'openmpi', 'slurm', 'torchrun']"]),
])
def test_environments_that_describe_no_rank_are_refused(environment: Mapping[str, str], launcher: str | None,
                                                        said: list[str]) -> None:
    with pytest.raises(LaunchError) as raised:
        identity_of(environment, launcher)
    assert all(text in str(raised.value) for text in said)


def test_a_number_of_ranks_without_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match=r"WORLD_SIZE is '2' and no rank \(RANK\) is set: each process would train"):
        autoparallel.init()


def test_a_lonely_process_of_a_slurm_job_of_several_tasks_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Each shell of salloc may run one process; a script that was to train on all tasks would train on one."""
    with patch.dict(os.environ, {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"}):
        assert _size(None) == 1
        assert "runs alone, and its Slurm job has 8 tasks: srun python ... starts" in caplog.text
        caplog.clear()
        with patch.dict(os.environ, {"SLURM_STEP_ID": "0"}):
            assert _size(None) == 1
    assert not caplog.text


def test_one_of_several_launchers_can_be_picked() -> None:
    both = {**OPENMPI, **SLURM, "SLURM_PROCID": "0", **HOST}
    by_argument, by_variable = identity_of(both, "slurm"), identity_of({**both, "AUTOPARALLEL_LAUNCHER": "openmpi"})
    assert by_argument and by_variable
    assert (by_argument.launcher, by_argument.rank, by_variable.launcher, by_variable.rank) == (
        "slurm", 0, "openmpi", 3)


@pytest.mark.parametrize(("environment", "expected"), [
    ({**OPENMPI, **HOST}, {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
                           "MASTER_ADDR": "h", "MASTER_PORT": "29500"}),
    ({**SLURM, "MASTER_PORT": "9"}, {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gnode10",
                                     "MASTER_PORT": "9"}),
    (TORCHRUN, TORCHRUN), (SHELL, {}), ({}, {}),
])
def test_other_libraries_read_torchruns_variables(environment: dict[str, str], expected: dict[str, str]) -> None:
    given = dict(environment)
    set_torch_variables(given)
    assert given == environment | expected
    again = identity_of(given)
    assert again is None or (again.rank, again.size) == ((3, 8) if expected else (0, 1))


# ------------------------------------------------------------------------------------------------- real processes


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(guide("launch.md"))
    return str(path)


@pytest.fixture
def expected() -> str:
    """The loss of one process without autoparallel."""
    return loss_of_one_process()


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "named"), [("Open MPI", "openmpi"), slow("MPICH", "mpich")])
def test_the_script_runs_under_mpirun(kind: str, named: str, script: str, expected: str) -> None:
    assert output_of([*mpirun_of(kind), "-n", "2", sys.executable, script]).splitlines()[-1] == f"{named} 2 {expected}"


@pytest.mark.ranks
def test_the_script_runs_alone(script: str, expected: str) -> None:
    assert output_of([sys.executable, script]).splitlines()[-1] == f"alone 1 {expected}"


@pytest.mark.slow
def test_the_script_runs_under_torchrun(script: str, expected: str) -> None:
    """`autoparallel launch` and a job's container use torchrun too, in the tier `ranks`."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", script]
    assert output_of(torchrun).splitlines()[-1] == f"torchrun 4 {expected}"


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["slurm", slow("mvapich"), slow("msrun")])
def test_the_script_runs_under_launchers_that_are_emulated(kind: str, script: str, expected: str) -> None:
    """Processes with the variables that srun, MVAPICH's mpirun and msrun set."""
    port, processes = str(free_port()), []
    for rank in range(2):
        mine = {
            "slurm": {"SLURM_PROCID": f"{rank}", "SLURM_NTASKS": "2", "SLURM_LOCALID": f"{rank}", "SLURM_STEP_ID": "0",
                      "SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "localhost", "MASTER_PORT": port},
            "mvapich": {"MV2_COMM_WORLD_RANK": f"{rank}", "MV2_COMM_WORLD_SIZE": "2", "MASTER_PORT": port,
                        "MV2_COMM_WORLD_LOCAL_RANK": f"{rank}", "MV2_COMM_WORLD_LOCAL_SIZE": "2"},
            "msrun": {"RANK_ID": f"{rank}", "RANK_SIZE": "2", "MS_ROLE": "MS_WORKER", "MS_SCHED_HOST": "127.0.0.1",
                      "MS_SCHED_PORT": port}}[kind]
        processes.append(subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True,
                                          env={**clean_environment(), **mine}))
    outputs = [process.communicate(timeout=150)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0].splitlines()[-1] == f"{kind} 2 {expected}"
    if kind == "msrun":
        assert output_of([sys.executable, script], MS_ROLE="MS_SCHED", MS_WORKER_NUM="2") == ""


@pytest.mark.ranks
def test_the_mesh_is_laid_out_host_after_host(tmp_path: Path) -> None:
    """Two hosts to which a launcher has dealt ranks in turn."""
    script = tmp_path / "train.py"
    script.write_text("import os, socket, autoparallel\n"
                      "socket.gethostname = lambda: 'host' + str(int(os.environ['RANK']) % 2)\n"
                      "world = autoparallel.init((2, 2), ('host', 'device'))\n"
                      "if world.rank == 0:\n    print(world.mesh.mesh.tolist())\n")
    command = [sys.executable, "-m", "autoparallel", "launch", "--ranks", "4", "--", sys.executable, str(script)]
    assert output_of(command).splitlines()[-1] == "[[0, 2], [1, 3]]"


@pytest.mark.ranks
def test_a_script_may_end_with_a_collective(tmp_path: Path) -> None:
    """gloo's threads release a collective's tensors after its end, which must not meet the end of the interpreter."""
    script = tmp_path / "train.py"
    script.write_text("import sys, torch, torch.distributed as dist, autoparallel\nautoparallel.init()\n"
                      "sys.setswitchinterval(100)\n"
                      "for _ in range(20):\n    dist.all_reduce(torch.ones(64), async_op=True).wait()\n")
    assert output_of([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4",
                      str(script)]) == ""


@pytest.mark.ranks
def test_a_plan_is_launched(script: str, expected: str, tmp_path: Path) -> None:
    model, batch = guides_model()
    plan = autoparallel.plan(model, "local-cpu", example_inputs=batch, mesh_shape=(1, 2),
                             axis_names=("rows", "columns"), baseline="tensor_parallel")
    plan.save(tmp_path / "plan.json")
    shown = Path(script)
    shown.write_text(shown.read_text() + "    print(world.mesh.mesh_dim_names, parallel.plan.mesh_shape)\n")
    cli = [sys.executable, "-m", "autoparallel", "launch", str(tmp_path / "plan.json"), "--"]
    lines = output_of([*cli, sys.executable, script]).splitlines()
    assert lines[-2:] == [f"torchrun 2 {expected}", "('rows', 'columns') (1, 2)"]


@pytest.mark.ranks
def test_launch_reports_failures_and_restarts(tmp_path: Path) -> None:
    script, cli = tmp_path / "train.py", [sys.executable, "-m", "autoparallel", "launch", "--ranks", "2"]
    script.write_text("import os, sys, autoparallel\nworld = autoparallel.init()\n"
                      "os.write(1, f\"started {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n\".encode())\n"
                      "sys.exit(int(world.rank == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))\n")
    once = subprocess.run([*cli, "--", sys.executable, str(script)], capture_output=True, text=True, timeout=150,
                          env=clean_environment())
    assert once.returncode == 1 and "local_rank: 1" in once.stdout
    assert output_of([*cli, "--max-restarts", "1", "--", sys.executable, str(script)]).count("started 1") == 2


@pytest.mark.ranks
def test_a_signal_to_the_launch_ends_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, time\nos.write(1, f\"{os.getpid()}\\n\".encode())\ntime.sleep(100)\n")
    command = [sys.executable, "-m", "autoparallel", "launch", "--ranks", "2", "--", sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
                          ) as launch:
        assert launch.stdout is not None
        ranks = [int(launch.stdout.readline()) for _ in range(2)]
        launch.terminate()
        _, said = launch.communicate(timeout=100)
    assert launch.returncode == 128 + signal.SIGTERM and "SIGTERM has ended the job" in said and "Traceback" not in said
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.ranks
def test_arguments_of_the_command_that_look_like_torchrun_s_are_the_command_s() -> None:
    command = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "--log", "a", "--rdzv", "b", "--", "-m", "c"]
    told = output_of([sys.executable, "-m", "autoparallel", "launch", "--ranks", "1", "--", *command])
    assert "['--log', 'a', '--rdzv', 'b', '--', '-m', 'c']" in told


@pytest.mark.parametrize(("words", "said"), [
    (["--", "no-such-command"], "cannot start no-such-command"),
    (["--nodes", "2", "--", "ls"], "2 hosts need --master host:port"),
    (["--master", "h:1", "--", "ls"], "--master h:1 is where several hosts meet, and there is one: give --nodes"),
    (["--node-rank", "1", "--", "ls"], "--node-rank is 1 and --nodes 1"),
    (["--nodes", "2", "--master", "host0:port", "--", "ls"], "--master is host0:port: write host:port"),
    (["--nodes", "2", "--master", ":29500", "--", "ls"], "--master is :29500: write host:port"),
    (["missing.json", "--", "ls"], "cannot read the plan file missing.json"),
])
def test_launches_that_cannot_be_are_refused(words: list[str], said: str) -> None:
    from typer.testing import CliRunner

    from autoparallel.cli import app

    result = CliRunner().invoke(app, ["launch", *words])
    assert isinstance(result.exception, AutoparallelError) and said in str(result.exception)


def test_ranks_that_are_not_the_plans_are_told_with_those_that_are(tmp_path: Path) -> None:
    from autoparallel.launch.agent import run_command

    with torch.device("meta"):
        model, x = torch.nn.Linear(4, 4), torch.zeros(8, 4)
    made = autoparallel.plan(model, "local-cpu", example_inputs=(x,), mesh_shape=(4,), baseline="ddp")
    made.save(tmp_path / "plan.json")
    for given, said in (({"ranks": 2}, "1 host with 2 processes each were asked for: give --ranks 4, or leave it out"
                        "; for 2 on each of 2 hosts, --nodes 2 on each of them"),
                        ({"ranks": 1, "nodes": 3, "master": "a:1"}, "1 process each were asked for: give --nodes, a")):
        with pytest.raises(LaunchError, match=re.escape(said)):
            run_command(["ls"], plan=tmp_path / "plan.json", **given)  # type: ignore[arg-type]


def host(number: int, port: int, *, of: int = 2, at: str = "127.0.0.1", timeout_s: float = 0.5) -> RollCall:
    return RollCall(at, port, of, number, of, timeout_s)


@pytest.mark.parametrize(("number", "at", "said"), [
    (0, "127.0.0.1", r"1 of 3 hosts have reported to host 0 at 127.0.0.1:\d+; absent: host 1, 2. Start the same"),
    (1, "127.0.0.1", r"host 0 does not answer at 127.0.0.1:\d+: start the same command with --node-rank 0 there"),
    (0, "nowhere.invalid", r"nowhere.invalid:\d+ does not lead to this host, which is --node-rank 0"),
])
def test_a_host_says_for_whom_it_waits_and_then_ends(
    number: int, at: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun's agent waits up to 15 minutes without a word."""
    monkeypatch.setattr("autoparallel.launch.roll_call.SAID_AFTER_S", 0.1)
    with pytest.raises(LaunchError, match=rf"host {number} has waited 0.5 s \(--join-timeout\) in vain: {said}"):
        host(number, free_port(), of=3, at=at).hold()
    assert re.search(f"host {number} waits, [01] s more at most: {said}", capsys.readouterr().err)


def test_hosts_that_all_report_start_and_two_with_one_number_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first, second = (pool.submit(host(number, port, timeout_s=30.0).hold) for number in (1, 0))
        stores = first.result(60), second.result(60)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    with pytest.raises(LaunchError, match="and another both have --node-rank 1: give each host another number"):
        host(1, port).hold()
    del stores


def test_another_host_may_come_in_the_place_of_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with ThreadPoolExecutor() as pool:
        stores = list(pool.map(lambda number: RollCall("127.0.0.1", port, 2, number, 1, 30.0).hold(), (0, 1)))
        monkeypatch.setattr("socket.gethostname", lambda: "another")
        stores.append(RollCall("127.0.0.1", port, 2, 1, 1, 30.0).hold())
    assert all(stores)


def test_a_port_of_host_0_that_is_taken_is_told() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        with pytest.raises(LaunchError, match=r"host 0 cannot listen on port \d+ of --master 127.0.0.1"):
            host(0, other.getsockname()[1]).hold()


LEAVES = """
import sys
import torch
import autoparallel
world = autoparallel.init()
if world.rank == 1:
    sys.exit(0)
autoparallel.compile(torch.nn.Linear(8, 8), world.mesh, example_inputs=(torch.zeros(8, 8),))
"""


@pytest.mark.ranks
def test_a_rank_that_ends_before_it_compiles_is_told(tmp_path: Path) -> None:
    """The others waited for the whole time limit of the process group to make a group with it."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    done = subprocess.run([sys.executable, "-m", "autoparallel", "launch", "--ranks", "2", "--", sys.executable,
                           "leaves.py"], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True,
                          timeout=100)
    assert done.returncode == 1
    assert "PeerError: rank 1 failed: its script has ended, and others wait" in done.stdout + done.stderr


def test_a_process_of_this_host_that_has_ended_is_found() -> None:
    """By its number: os._exit says nothing, and others would wait for it until the time limit of the group."""
    store = torch.distributed.HashStore()
    assert groups.rank_that_ended(store) is None
    groups.say_here(store, 0)
    assert groups.rank_that_ended(store) is None
    with patch("os.getpid", lambda: 2**30):
        groups.say_here(store, 1)
    assert groups.rank_that_ended(store) == 1
