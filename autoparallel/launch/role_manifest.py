"""Kubernetes' files of a job with parameter servers: a scheduler, servers and workers.

Kubeflow Trainer v2 (trainer.kubeflow.org/v1alpha1): a TrainingRuntime with a replicated job a role, and a TrainJob of
it. Each pod runs the same command; its role, number and the scheduler's address are in its environment. Pods are
started again where they fail, with the number that they had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoparallel.errors import LaunchError
from autoparallel.launch.manifest import PORT, check_name, image_of, literal, yaml_of
from autoparallel.launch.roles import INDEX, ROLE, ROLES, SERVERS, WORKERS

STATE_FOLDER = "/var/lib/autoparallel"
_API = "trainer.kubeflow.org/v1alpha1"
_TRAINER = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}  # the job that a TrainJob's trainer describes


@dataclass(frozen=True)
class RoleJob:
    """``command``: what every process runs. ``gpus``: whether each worker takes a GPU. ``claim``: a
    PersistentVolumeClaim that servers mount at `STATE_FOLDER`; None: a folder that lives as long as the pod.

    Raises LaunchError for a name that cannot be, no command, or no servers or workers.
    """

    name: str
    servers: int
    workers: int
    command: tuple[str, ...]
    image: str | None = None
    gpus: bool = True
    claim: str | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        if not self.command:
            raise LaunchError("write the command of a process after --, as in autoparallel manifest --to kubeflow "
                              "--servers 2 --workers 8 --image registry/name:tag -- python train.py")
        if self.servers < 1 or self.workers < 1:
            raise LaunchError(f"{self.servers} servers and {self.workers} workers: at least one of each is required")

    def count(self, role: str) -> int:
        return {"scheduler": 1, "server": self.servers, "worker": self.workers}[role]


def role_manifest(to: str, job: RoleJob) -> str:
    """The text of the file, a YAML with two documents. Raises LaunchError for a platform other than kubeflow."""
    if to != "kubeflow":
        raise LaunchError(f"--to {to} has no roles of parameter servers: --to kubeflow, or start each process with "
                          f"{ROLE}, {INDEX}, {SERVERS}, {WORKERS}, MASTER_ADDR and MASTER_PORT")
    runtime = f"{job.name}-roles"
    jobs = [_replicated(job, role) for role in ROLES]
    spec = {"mlPolicy": {"numNodes": job.workers}, "template": {"spec": {
        "network": {"enableDNSHostnames": True, "subdomain": job.name}, "replicatedJobs": jobs}}}
    trainer = {"image": image_of(job.image), "command": literal(job.command), "numNodes": job.workers,
               **({"resourcesPerNode": {"limits": {"nvidia.com/gpu": "1"}}} if job.gpus else {})}
    return yaml_of(
        {"apiVersion": _API, "kind": "TrainingRuntime", "metadata": {"name": runtime}, "spec": spec},
        {"apiVersion": _API, "kind": "TrainJob", "metadata": {"name": job.name},
         "spec": {"runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime},
                  "trainer": trainer}})


def _replicated(job: RoleJob, role: str) -> Mapping[str, Any]:
    container: dict[str, Any] = {"name": "node", "image": image_of(job.image), "command": literal(job.command),
                                 "env": _variables(job, role)}
    pod: dict[str, Any] = {"restartPolicy": "OnFailure", "containers": [container]}
    if role == "server":
        container["volumeMounts"] = [{"name": "state", "mountPath": STATE_FOLDER}]
        pod["volumes"] = [{"name": "state", **({"persistentVolumeClaim": {"claimName": job.claim}} if job.claim
                                               else {"emptyDir": {}})}]
    indexed = {"parallelism": job.count(role), "completions": job.count(role), "completionMode": "Indexed",
               "template": {"spec": pod}}
    labels = {"metadata": {"labels": _TRAINER}} if role == "worker" else {}
    return {"name": role, "replicas": 1, "template": {**labels, "spec": indexed}}


def _variables(job: RoleJob, role: str) -> list[dict[str, Any]]:
    plain = {ROLE: role, SERVERS: str(job.servers), WORKERS: str(job.workers),
             "MASTER_ADDR": f"{job.name}-scheduler-0-0.{job.name}", "MASTER_PORT": str(PORT)}
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    return [*({"name": name, "value": value} for name, value in plain.items()), {"name": INDEX, "valueFrom": index}]


__all__ = ["STATE_FOLDER", "RoleJob", "role_manifest"]
