"""Manifests are what their platforms' own client libraries take, and start the script as the platform would."""

from __future__ import annotations

import base64
import functools
import gzip
import json
import os
import random
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import autoparallel
from autoparallel.cli import app
from autoparallel.errors import LaunchError, PlanError
from autoparallel.launch.environment import identity_of
from autoparallel.launch.local import free_port
from autoparallel.launch.manifest import FORMATS, Job, manifest
from autoparallel.launch.rank_table import table_hosts
from cost_models.description import CPU_PROCESS
from tests.support.launching import clean_environment, guide, guides_model, loss_of_one_process, mpirun_of
from tests.support.tiers import slow

FAKE_SRUN = """#!/bin/bash
# srun on one host: a process for each task of the batch script, with the variables that Slurm sets
tasks=$(sed -n 's/^#SBATCH --ntasks-per-node=//p' "$BATCH_SCRIPT")
for task in $(seq 0 $((tasks - 1))); do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=$tasks SLURM_JOB_ID=$$ SLURM_STEP_ID=0 \\
        SLURM_JOB_NODELIST=localhost "$@" &
done
wait
"""
FAKE_RAY = """
# Ray Train on one host: the function in a process for each worker, with the variables and the group that Ray makes
import os, torch.distributed as dist, torch.multiprocessing as mp
def worker(rank, size, train, config):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    dist.init_process_group("gloo")
    train(config)
class TorchTrainer:
    def __init__(self, train, *, train_loop_config, scaling_config):
        self.job = scaling_config["num_workers"], train, train_loop_config
        assert scaling_config["resources_per_worker"] == {"CPU": 1} and not scaling_config["use_gpu"]
    def fit(self):
        mp.spawn(worker, self.job, self.job[0])
"""


@pytest.fixture
def expected() -> str:
    """The loss of one process without autoparallel."""
    return loss_of_one_process()


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    return saved_plan(tmp_path / "plan.json", (2, 2))


@functools.cache
def guides_plan(mesh_shape: tuple[int, ...]) -> autoparallel.Plan:
    model, batch = guides_model()
    return autoparallel.plan(model, "local-cpu", example_inputs=batch, mesh_shape=mesh_shape,
                             baseline="tensor_parallel")


def saved_plan(path: Path, mesh_shape: tuple[int, ...]) -> Path:
    guides_plan(mesh_shape).save(path)
    return path


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """The script of the guide to launchers on two ranks."""
    script = tmp_path / "train.py"
    script.write_text(guide("launch.md"))
    return job_of(saved_plan(tmp_path / "two.json", (2,)), (sys.executable, str(script)))


def job_of(plan_file: Path, command: tuple[str, ...] = ("python", "train.py"), **more: Any) -> Job:
    options = {"nodes": 1, "image": "me/train:1", "gpus": False, "hosts": ("localhost",), **more}
    return Job("train", autoparallel.Plan.load(plan_file), str(plan_file), command=command, **options)


@pytest.mark.parametrize("to", ["kubeflow", "jobset", "pytorchjob"])
def test_clients_of_the_platforms_take_them(to: str, plan_file: Path) -> None:
    """What a client library does not know of is dropped by it: all that we wrote must come back."""
    plan, document = yaml.safe_load_all(manifest(to, job_of(plan_file, nodes=2, gpus=True)))
    assert gzip.decompress(mounted_plan(plan)) == plan_file.read_bytes()
    if to == "pytorchjob":
        models = pytest.importorskip("kubeflow.training.models")
        client = pytest.importorskip("kubernetes.client")
        spec = client.ApiClient()._ApiClient__deserialize(document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"],
                                                          client.V1PodTemplateSpec)
        assert client.ApiClient().sanitize_for_serialization(spec) == (
            document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"])
        known = set(models.KubeflowOrgV1PyTorchJobSpec.attribute_map.values())
        assert set(document["spec"]) <= known
        assert document["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 1
        return
    models = pytest.importorskip("kubeflow_trainer_api.models")
    kind = models.TrainerV1alpha1TrainJob if to == "kubeflow" else models.JobsetV1alpha2JobSet
    assert kind.from_dict(document).to_dict() == document
    broken = {**document, "spec": {**document["spec"], "noSuchField": 1}}
    assert kind.from_dict(broken).to_dict() != broken  # the comparison does tell


def mounted_plan(config_map: dict[str, Any]) -> bytes:
    """As Kubernetes mounts it."""
    return base64.b64decode(config_map["binaryData"]["plan.json.gz"])


def test_compressed_plans_are_plans(plan_file: Path, tmp_path: Path) -> None:
    plan = autoparallel.Plan.load(plan_file)
    plan.save(tmp_path / "plan.json.gz")
    assert (tmp_path / "plan.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert autoparallel.Plan.load(tmp_path / "plan.json.gz") == plan
    ready, _ = yaml.safe_load_all(manifest("jobset", job_of(tmp_path / "plan.json.gz")))
    assert mounted_plan(ready) == (tmp_path / "plan.json.gz").read_bytes()  # not compressed again
    (tmp_path / "plan.json.gz").write_bytes((tmp_path / "plan.json.gz").read_bytes()[:-20])
    with pytest.raises(PlanError, match="cannot read the plan file"):
        autoparallel.Plan.load(tmp_path / "plan.json.gz")


@pytest.mark.parametrize(("size", "said"), [
    (90_000, None), (200_000, "# kubectl apply --server-side -f FILE, or kubectl create -f FILE.\n"), (800_000, "")])
def test_plans_within_the_limits_of_kubernetes(size: int, said: str | None, plan_file: Path) -> None:
    job, noise = job_of(plan_file), random.Random(7).randbytes(size)
    plan_file.write_bytes(noise)  # which cannot be compressed
    if said == "":
        with pytest.raises(LaunchError, match=r"compressed plan takes 106\d{4} bytes, and a ConfigMap holds 1048576"):
            manifest("jobset", job)
        return
    text = manifest("jobset", job)
    assert text.startswith("#") == (said is not None) and (said or "") in text
    assert gzip.decompress(mounted_plan(next(yaml.safe_load_all(text)))) == noise


def run(command: list[str], environment: dict[str, str], cwd: Path) -> str:
    """The last line that the command printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=cwd,
                          env={**clean_environment(), **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return next(line for line in reversed(done.stdout.splitlines()) if re.match(r"\w+ 2 ", line))


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.slow
def test_slurm_starts_it(job: Job, tmp_path: Path, expected: str) -> None:
    script = written(tmp_path, "job.sh", manifest("slurm", job))
    written(tmp_path, "srun", FAKE_SRUN)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BATCH_SCRIPT": script}
    assert run(["bash", script], path, tmp_path) == f"slurm 2 {expected}"


@pytest.mark.ranks
def test_mpirun_starts_it(job: Job, tmp_path: Path, expected: str) -> None:
    command = mpirun_of("Open MPI")
    written(tmp_path, "mpirun", f'#!/bin/bash\nexec {" ".join(command)} "$@"\n')
    script = written(tmp_path, "job.sh", manifest("mpi", job))
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_PORT": str(free_port())}
    assert run(["bash", script], path, tmp_path) == f"openmpi 2 {expected}"


@pytest.mark.ranks
@pytest.mark.parametrize("to", [slow("kubeflow"), slow("pytorchjob"), "jobset", slow("skypilot")])
def test_the_command_of_a_container_runs(to: str, job: Job, tmp_path: Path, expected: str) -> None:
    """In the environment that the platform makes, with the plan where it mounts it."""
    documents = list(yaml.safe_load_all(manifest(to, job)))
    spec, port = documents[-1].get("spec", documents[-1]), str(free_port())
    environment = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1",
                   "PET_MASTER_PORT": port}
    if to == "kubeflow":
        command, mounted = spec["trainer"]["command"], spec["trainer"]["env"][0]["value"]
    elif to == "pytorchjob":
        container = spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
        command, mounted = container["command"], container["env"][0]["value"]
    elif to == "jobset":
        container = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
        assert container["env"][1]["name"] == "NODE_RANK"  # Kubernetes puts $(NODE_RANK) into the command
        command = [word.replace("$(NODE_RANK)", "0").replace("train-workers-0-0.train", "127.0.0.1").replace(
            "=29500", f"={port}") for word in container["command"]]
        mounted, environment = container["env"][0]["value"], {}
    else:
        (mounted, source), = spec["file_mounts"].items()
        assert source == job.plan_file and spec["envs"] == {"AUTOPARALLEL_PLAN": mounted}
        command = ["bash", "-c", spec["run"].replace("=29500", f"={port}")]
        environment = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "127.0.0.1"}
    plan = Path(job.plan_file)
    if to != "skypilot":
        assert mounted == "/etc/autoparallel/plan.json.gz"
        plan = tmp_path / "mounted"
        plan.write_bytes(mounted_plan(documents[0]))
    written(tmp_path, "torchrun", f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "AUTOPARALLEL_PLAN": str(plan)}
    assert run(command, environment, tmp_path) == f"torchrun 2 {expected}"


@pytest.mark.slow
def test_ray_train_starts_it(job: Job, tmp_path: Path, expected: str) -> None:
    train = tmp_path / "ray" / "train"
    train.mkdir(parents=True)
    (train / "torch.py").write_text(FAKE_RAY)
    (train / "__init__.py").write_text("def ScalingConfig(**options):\n    return options\n")
    script = written(tmp_path, "job.py", manifest("ray", job))
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert run([sys.executable, script], environment, tmp_path) == f"torchrun 2 {expected}"


def test_the_hosts_of_a_rank_table_are_read(plan_file: Path, tmp_path: Path) -> None:
    table = json.loads(manifest("ranktable", job_of(plan_file, nodes=2, hosts=("10.0.0.2", "10.0.0.1"))))
    table["server_list"].reverse()
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    assert table_hosts(path) == ("10.0.0.1", "10.0.0.2")
    command = ["manifest", str(plan_file), "--to", "mpi", "--nodes", "2", "--hosts", f"@{path}", "--", "python", "a.py"]
    made = CliRunner().invoke(app, command)
    assert "10.0.0.1 slots=2\n10.0.0.2 slots=2\n" in made.stdout and "MASTER_ADDR=10.0.0.1" in made.stdout
    found = identity_of({"RANK_ID": "3", "RANK_SIZE": "4", "RANK_TABLE_FILE": str(path)})
    assert found and (found.rank, found.size, found.master_addr) == (3, 4, "10.0.0.1")


@pytest.mark.parametrize(("text", "said"), [
    (None, "is no rank table: FileNotFoundError"), ("[]", "is no rank table: TypeError"),
    ('{"server_list": [{"server_id": "a", "device": [{"rank_id": "1"}]}]}', "has the ranks [1]"),
])
def test_files_that_are_no_rank_tables_are_refused(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "table.json").write_text(text)
    with pytest.raises(LaunchError, match=re.escape(said)):
        table_hosts(tmp_path / "table.json")


def test_rank_tables_number_devices_host_by_host(plan_file: Path) -> None:
    made = CliRunner().invoke(app, ["manifest", str(plan_file), "--to", "ranktable", "--hosts", "10.0.0.2,10.0.0.1"])
    table = json.loads(made.stdout)  # as many hosts as named, and no command: a rank table has none
    assert (table["version"], table["server_count"], table["status"]) == ("1.0", "2", "completed")
    assert [server["server_id"] for server in table["server_list"]] == ["10.0.0.1", "10.0.0.2"]
    devices = [device for server in table["server_list"] for device in server["device"]]
    assert [device["rank_id"] for device in devices] == list("0123")
    assert [device["device_id"] for device in devices] == list("0101")


def test_gpus_are_asked_for_where_the_plan_has_them(plan_file: Path) -> None:
    """A plan for CPUs asked each host for GPUs."""
    def told(*options: str) -> str:
        return CliRunner().invoke(app, ["manifest", str(plan_file), "--to", "slurm", *options, "--", "ls"]).stdout

    assert "--gpus" not in told() and "--gpus-per-node=4" in told("--gpus")
    plan = json.loads(plan_file.read_text())
    plan_file.write_text(json.dumps(plan | {"cluster": "h100-sxm"}))
    assert "--gpus-per-node=4" in told() and "--gpus" not in told("--no-gpus")


def test_whether_devices_of_a_users_description_are_gpus_is_asked(plan_file: Path) -> None:
    """A plan for calibrated CPUs asked each host for GPUs. Devices that calibration or a known cluster names are known.
    Hosts that are named have what they have."""
    plan, words = json.loads(plan_file.read_text()) | {"cluster": "ours"}, [
        "manifest", str(plan_file), "--to", "slurm", "--", "ls"]

    def of(device: str) -> None:
        plan["record"]["workload"]["device"] = device
        plan_file.write_text(json.dumps(plan))

    for device, asks in ((CPU_PROCESS, False), ("half an x86 core", False), ("NVIDIA H100 80GB HBM3", True),
                         ("H100 SXM5 80GB and A100 SXM4 80GB", True)):
        of(device)
        assert ("--gpus-per-node=4" in CliRunner().invoke(app, words).stdout) == asks
    of("our device")
    made = CliRunner().invoke(app, words)
    assert "cluster 'ours' is of a description of your own" in str(made.exception)
    assert "write --gpus or --no-gpus" in str(made.exception)
    assert "--gpus" not in CliRunner().invoke(app, [*words[:4], "--no-gpus", *words[4:]]).stdout
    assert "slots=4" in CliRunner().invoke(app, [*words[:3], "mpi", "--hosts", "a", *words[4:]]).stdout


@pytest.mark.parametrize(("to", "options", "said"), [
    ("nomad", {}, f"one of {', '.join(sorted(FORMATS))} is required"),
    ("slurm", {"nodes": 3}, "4 devices, which 3 hosts cannot share evenly: give --nodes, a number that"),
    ("slurm", {"command": ()}, "write the command of a rank after --"),
    ("kubeflow", {"image": None}, "containers need an image"),
    ("ray", {"command": ("train.sh",)}, "Ray's workers run a script of Python"),
    ("mpi", {"nodes": 2}, "--nodes is 2 and --hosts names 1 (localhost)"),
    ("skypilot", {"gpus": True}, "has devices that SkyPilot has no name for"),
])
def test_impossible_options_are_refused(to: str, options: dict[str, Any], said: str, plan_file: Path) -> None:
    with pytest.raises(LaunchError, match=re.escape(said)):
        manifest(to, job_of(plan_file, **options))


@pytest.mark.parametrize(("words", "said"), [
    ("PLAN --to slurm --hosts a,b -- python a.py", "--to slurm does not use --hosts"),
    ("PLAN --to mpi --hosts a --image i -- python a.py", "--to mpi does not use --image"),
    ("PLAN --to mpi --hosts a --no-gpus -- python a.py", "--to mpi does not use --gpus or --no-gpus: leave it out"),
    ("PLAN --to slurm --workers 3 -- python a.py", "does not use --workers: leave it out (it is for --servers)"),
    ("PLAN --to mpi --hosts a,,b -- python a.py", "names a host without an address"),
    ("PLAN --to ranktable --hosts a,b -- python a.py", "a rank table has no command: leave -- python a.py out"),
    ("--to slurm -- python a.py", "python is no plan's file: write it before the --"),
    ("PLAN --to kubeflow --servers 2 --image i -- python a.py", "a job with --servers has no plan"),
    ("--to kubeflow --servers 2 --image i --nodes 2 -- python a.py", "a job with --servers does not use --nodes"),
])
def test_no_option_is_left_out_in_silence(words: str, said: str, plan_file: Path) -> None:
    made = CliRunner().invoke(app, ["manifest", *words.replace("PLAN", str(plan_file)).split()])
    assert said in str(made.exception), made.output


def test_hosts_are_those_of_the_plans_cluster(tmp_path: Path) -> None:
    """A plan for 16 devices was to run on one host, with 16 GPUs."""
    for cluster, nodes, each in (("h100-sxm", 2, 8), ("v100-dgx-2", 1, 16), ("local-cpu", 1, 16)):
        model, batch = guides_model()
        machine = autoparallel.Cluster.load(cluster, num_devices=16)
        made = autoparallel.plan(model, machine, example_inputs=batch, mesh_shape=(16,), baseline="ddp")
        made.save(tmp_path / "plan.json")
        words = ["manifest", str(tmp_path / "plan.json"), "--to", "slurm", "--", "python", "a.py"]
        said = CliRunner().invoke(app, words).stdout
        assert f"--nodes={nodes}\n#SBATCH --ntasks-per-node={each}\n" in said


def test_spaces_between_hosts_are_no_part_of_their_names(plan_file: Path) -> None:
    words = ["manifest", str(plan_file), "--to", "mpi", "--hosts", "a, b", "--", "python", "a.py"]
    made = CliRunner().invoke(app, words)
    assert "\na slots=2\nb slots=2\n" in made.stdout


@pytest.mark.parametrize("to", ["kubeflow", "pytorchjob", "jobset"])
def test_kubernetes_expands_nothing_in_the_command(to: str, plan_file: Path) -> None:
    """It takes $(NAME) for a variable and $$ for a dollar; other platforms give the script what was written."""
    text = manifest(to, job_of(plan_file, command=("python", "a.py", "--name=$(HOSTNAME) $$")))
    assert "--name=$$(HOSTNAME) $$$$" in text
