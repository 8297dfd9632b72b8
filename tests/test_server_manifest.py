"""The manifest of a job with parameter servers is what Kubeflow's client library takes, and its three roles train."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from autoparallel.cli import app
from autoparallel.errors import LaunchError
from autoparallel.launch.local import free_port
from autoparallel.launch.role_manifest import RoleJob, role_manifest
from tests.support.launching import guide

JOB = RoleJob("train", 1, 2, ("python", "train.py"), "me/train:1", gpus=False)


def test_kubeflows_client_takes_it() -> None:
    """What the library does not know of is dropped by it: all that we wrote must come back."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for job in (JOB, RoleJob("train", 2, 8, ("python", "train.py"), "me/train:1", claim="states")):
        runtime, train = yaml.safe_load_all(role_manifest("kubeflow", job))
        assert models.TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() == runtime
        assert models.TrainerV1alpha1TrainJob.from_dict(train).to_dict() == train


def test_the_command_writes_the_roles() -> None:
    done = CliRunner().invoke(app, ["manifest", "--to", "kubeflow", "--servers", "2", "--workers", "8", "--image",
                                    "me:1", "--claim", "states", "--", "python", "train.py"])
    runtime, train = yaml.safe_load_all(done.stdout)
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    jobs = {job["name"]: job["template"] for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    assert [jobs[role]["spec"]["completions"] for role in ("scheduler", "server", "worker")] == [1, 2, 8]
    pod = jobs["server"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "states"}
    assert train["spec"]["trainer"]["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert "volumes" not in jobs["worker"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(("to", "options", "said"), [
    ("slurm", {}, "--to slurm has no roles of parameter servers: --to kubeflow"),
    ("kubeflow", {"image": None}, "containers need an image"),
    ("kubeflow", {"command": ()}, "write the command of a process after --"),
    ("kubeflow", {"workers": 0}, "1 servers and 0 workers"),
    ("kubeflow", {"name": "A"}, "the job's name 'A' cannot be")])
def test_impossible_options_are_refused(to: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(LaunchError) as error:
        role_manifest(to, RoleJob(**{**JOB.__dict__, **options}))
    assert said in str(error.value)


def _run(script: str, environment: dict[str, str], output: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment)
    with (Path(output).open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file),
          contextlib.suppress(SystemExit)):
        runpy.run_path(script, run_name="__main__")


@pytest.mark.ranks
@pytest.mark.timeout(200)
def test_the_roles_of_the_manifest_train(tmp_path: Path) -> None:
    """The guide's script in every pod, in the environment that Kubernetes makes of the manifest."""
    script, port = tmp_path / "train.py", str(free_port())
    script.write_text(guide("parameter-servers.md").replace("servers=2", ""))
    runtime, _ = yaml.safe_load_all(role_manifest("kubeflow", JOB))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    processes = {}
    for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        for index in range(spec["completions"]):
            variables = {one["name"]: one.get("value", str(index))
                         for one in spec["template"]["spec"]["containers"][0]["env"]}
            assert variables["MASTER_ADDR"] == "train-scheduler-0-0.train"
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            name = f"{job['name']}-{index}"
            processes[name] = context.Process(target=_run, args=(str(script), variables, str(tmp_path / name)),
                                              daemon=True)
            processes[name].start()
    try:
        for name, process in processes.items():
            process.join(90)
            assert process.exitcode == 0, (name, (tmp_path / name).read_text())
    finally:
        for process in processes.values():
            process.kill()
    assert "\nfinal " in "\n" + (tmp_path / "worker-0").read_text()
