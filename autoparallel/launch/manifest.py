"""Files with which a platform starts a plan's job: `autoparallel manifest plan.json --to slurm`.

Formats as of Kubeflow Trainer v2 (trainer.kubeflow.org/v1alpha1), JobSet v1alpha2, PyTorchJob v1, SkyPilot's task YAML,
Slurm's sbatch, Open MPI's host files, Ray Train and Ascend's rank tables (1.0).
"""

from __future__ import annotations

import base64
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoparallel.errors import LaunchError
from autoparallel.launch.world import PLAN_FILE
from autoparallel.plans import Plan
from autoparallel.plans.files import packed
from cost_models import LOCAL_CPU, Cluster, known_clusters
from cost_models.description import is_gpu

PORT = 29500
#: Formats whose hosts are named, with what they have.
_NAME_DEVICES = ("mpi", "ranktable")
_PLAN_FOLDER = "/etc/autoparallel"
_MOUNTED = f"{_PLAN_FOLDER}/plan.json.gz"  # as in a ConfigMap
#: Kubernetes' limits: of a ConfigMap, and of the annotations to which `kubectl apply` copies it.
_CONFIG_MAP_BYTES, _ANNOTATION_BYTES = 2**20, 2**18


@dataclass(frozen=True)
class Job:
    """A plan on hosts. ``command``: what a rank runs (rank tables have none); ``gpus``: whether each process takes a
    GPU; ``plan_file``: where the platform's processes find the plan; ``hosts``: their addresses, for MPI and rank
    tables."""

    name: str
    plan: Plan
    plan_file: str
    nodes: int
    command: tuple[str, ...]
    image: str | None = None
    gpus: bool = True
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.nodes < 1 or self.ranks % self.nodes:
            raise LaunchError(f"the plan is for {self.ranks} devices, which {self.nodes} hosts cannot share evenly: "
                              f"give --nodes, a number that divides {self.ranks}")

    @property
    def ranks(self) -> int:
        return math.prod(self.plan.axes[0])

    @property
    def per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def line(self) -> str:
        return shlex.join(self.command)


def slurm(job: Job) -> str:
    """A batch script: one task a rank, no agent."""
    options = [f"--job-name={job.name}", f"--nodes={job.nodes}", f"--ntasks-per-node={job.per_node}",
               *([f"--gpus-per-node={job.per_node}"] if job.gpus else []), "--distribution=block"]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "set -euo pipefail",
                      f"export {PLAN_FILE}={shlex.quote(job.plan_file)}", f"srun {job.line}", ""])


def mpi(job: Job) -> str:
    """A script for Open MPI's mpirun, with its host file. Raises LaunchError unless there is a host for each node."""
    hosts = _hosts(job)
    lines = "\n".join(f"{host} slots={job.per_node}" for host in hosts)
    return "\n".join([
        "#!/bin/bash", "set -euo pipefail", "hostfile=$(mktemp)", 'trap \'rm -f "$hostfile"\' EXIT',
        f"cat > \"$hostfile\" <<'HOSTS'\n{lines}\nHOSTS", f"export {PLAN_FILE}={shlex.quote(job.plan_file)}",
        f"export MASTER_ADDR={shlex.quote(hosts[0])} MASTER_PORT=${{MASTER_PORT:-{PORT}}}",
        f'mpirun -n {job.ranks} --hostfile "$hostfile" --map-by slot --bind-to none -x {PLAN_FILE} -x MASTER_ADDR '
        f"-x MASTER_PORT {job.line}", ""])


def ranktable(job: Job) -> str:
    """An Ascend rank table: hosts in the order of their addresses, a device a rank."""
    hosts = sorted(_hosts(job))
    servers = [{"server_id": host, "host_nic_ip": "reserve", "device": [
        {"device_id": str(local), "device_ip": host, "rank_id": str(number * job.per_node + local)}
        for local in range(job.per_node)]} for number, host in enumerate(hosts)]
    table = {"version": "1.0", "server_count": str(job.nodes), "status": "completed", "server_list": servers}
    return json.dumps(table, indent=2) + "\n"


def skypilot(job: Job) -> str:
    """A task for ``sky launch``. The plan's file is mounted."""
    target = f"{_PLAN_FOLDER}/plan.json"
    run = ("torchrun --nnodes=$SKYPILOT_NUM_NODES --node-rank=$SKYPILOT_NODE_RANK "
           f"--nproc-per-node={job.per_node} --master-addr=$(echo \"$SKYPILOT_NODE_IPS\" | head -n1) "
           f"--master-port={PORT} --no-python -- {job.line}")
    resources = {**({"image_id": f"docker:{job.image}"} if job.image else {}),
                 **({"accelerators": f"{_device(job.plan)}:{job.per_node}"} if job.gpus else {})}
    return yaml_of({"name": job.name, "num_nodes": job.nodes, **({"resources": resources} if resources else {}),
                    "file_mounts": {target: job.plan_file}, "envs": {PLAN_FILE: target}, "run": run})


_RAY = '''{title!r}

import os
import runpy
import sys
import tempfile
from pathlib import Path

from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train(config):
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.json")
        plan.write_bytes(config["plan"])
        os.environ[{variable!r}] = str(plan)
        sys.argv = config["arguments"]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    resources = {resources!r}
    config = {{"plan": Path({plan_file!r}).read_bytes(), "arguments": {arguments!r}}}
    TorchTrainer(train, train_loop_config=config, scaling_config=ScalingConfig(
        num_workers={ranks}, use_gpu={gpus!r}, resources_per_worker=resources, placement_strategy="PACK")).fit()
'''


def ray(job: Job) -> str:
    """A program for Ray Train, which runs the script in its workers and sends them the plan. Raises LaunchError for a
    command that is not ``python script.py ...``."""
    program, *arguments = job.command
    if not Path(program).name.startswith("python") or not arguments or not arguments[0].endswith(".py"):
        raise LaunchError(f"the command is {job.line}: Ray's workers run a script of Python: write -- python train.py")
    return _RAY.format(title=f"Runs {job.line} on {job.ranks} Ray workers.", ranks=job.ranks, variable=PLAN_FILE,
                       plan_file=job.plan_file, gpus=job.gpus, arguments=arguments,
                       resources={"GPU" if job.gpus else "CPU": 1})


def kubeflow(job: Job) -> str:
    """A TrainJob for Kubeflow Trainer's runtime ``torch-distributed``, and a ConfigMap with the plan."""
    trainer = {"image": image_of(job.image), "command": ["torchrun", "--no-python", "--", *literal(job.command)],
               "numNodes": job.nodes, "numProcPerNode": job.per_node, "env": [_plan_variable()],
               **_resources(job, "resourcesPerNode")}
    volume = {"name": "plan", "configMap": {"name": f"{job.name}-plan"}}
    container = {"name": "node", "volumeMounts": [{"name": "plan", "mountPath": _PLAN_FOLDER}]}
    pod = {"volumes": [volume], "containers": [container]}
    patch = {"manager": "autoparallel/manifest", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [
        {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}}}}
    return _with_plan(job, {
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": job.name},
        "spec": {"runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime",
                                "name": "torch-distributed"}, "trainer": trainer, "runtimePatches": [patch]}})


def pytorchjob(job: Job) -> str:
    """A PyTorchJob: torchrun in each pod, which reads the operator's PET_* variables; and a ConfigMap."""
    replica = {"restartPolicy": "OnFailure", "template": {"spec": _pod(
        job, "pytorch", ["torchrun", "--no-python", "--", *literal(job.command)], [])}}
    replicas = {"Master": {"replicas": 1, **replica},
                **({"Worker": {"replicas": job.nodes - 1, **replica}} if job.nodes > 1 else {})}
    return _with_plan(job, {
        "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": job.name},
        "spec": {"nprocPerNode": str(job.per_node), "pytorchReplicaSpecs": replicas}})


def jobset(job: Job) -> str:
    """A JobSet: an indexed Job with a pod a host, torchrun in each; and a ConfigMap."""
    index = {"name": "NODE_RANK", "valueFrom": {"fieldRef": {
        "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}}
    command = ["torchrun", f"--nnodes={job.nodes}", f"--nproc-per-node={job.per_node}", "--node-rank=$(NODE_RANK)",
               f"--master-addr={job.name}-workers-0-0.{job.name}", f"--master-port={PORT}", "--no-python", "--",
               *literal(job.command)]
    pod = {**_pod(job, "node", command, [index]), "restartPolicy": "Never"}
    spec = {"parallelism": job.nodes, "completions": job.nodes, "completionMode": "Indexed", "backoffLimit": 0,
            "template": {"spec": pod}}
    return _with_plan(job, {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": job.name},
        "spec": {"network": {"enableDNSHostnames": True, "subdomain": job.name},
                 "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": spec}}]}})


FORMATS: Mapping[str, Callable[[Job], str]] = {
    "jobset": jobset, "kubeflow": kubeflow, "mpi": mpi, "pytorchjob": pytorchjob, "ranktable": ranktable, "ray": ray,
    "skypilot": skypilot, "slurm": slurm,
}


def manifest(to: str, job: Job) -> str:
    """The text of the file (or files, for a YAML with several documents). Raises LaunchError for an unknown format, and
    where a command is missing."""
    if to not in FORMATS:
        raise LaunchError(f"--to {to}: one of {', '.join(sorted(FORMATS))} is required")
    if not job.command and to != "ranktable":
        raise LaunchError("write the command of a rank after --, as in autoparallel manifest plan.json --to slurm "
                          "-- python train.py")
    return FORMATS[to](job)


def check_options(to: str, words: Sequence[str], servers: bool, given: Mapping[str, object]) -> None:
    """Raises LaunchError for what the file would leave out of the words and of the options ``given`` (None: not
    given)."""
    if servers and words and words[0].endswith((".json", ".json.gz")):
        raise LaunchError(f"a job with --servers has no plan: leave {words[0]} out, and write the command after --")
    if not servers and words and not words[0].endswith((".json", ".json.gz")) and not Path(words[0]).exists():
        raise LaunchError(f"{words[0]} is no plan's file: write it before the --, as in autoparallel manifest "
                          f"plan.json --to {to} -- python train.py")
    if to == "ranktable" and len(words) > 1:
        raise LaunchError(f"a rank table has no command: leave -- {shlex.join(words[1:])} out")
    images = ("kubeflow", "pytorchjob", "jobset", "skypilot")
    reads = {"--image": servers or to in images, "--hosts": not servers and to in ("mpi", "ranktable"),
             "--nodes": not servers, "--claim": servers, "--workers": servers,
             "--gpus or --no-gpus": servers or to not in _NAME_DEVICES}
    instead = {"--image": f"it is for {', '.join(images)}", "--nodes": "--servers and --workers say how many",
               "--hosts": "it is for mpi and ranktable" + ("" if servers else "; --nodes says how many there are"),
               "--claim": "it is for --servers", "--workers": "it is for --servers",
               "--gpus or --no-gpus": "the hosts are named, with what they have"}
    for name, value in given.items():
        if value is not None and to in FORMATS and not reads[name]:
            what = "a job with --servers" if servers else f"--to {to}"
            raise LaunchError(f"{what} does not use {name}: leave it out ({instead[name]})")


def usual_hosts(plan: Plan) -> int:
    """How many hosts of its cluster a plan's devices are; 1, where a description of the user's own has the cluster."""
    if plan.cluster not in known_clusters():
        return 1
    return -(-math.prod(plan.axes[0]) // Cluster.load(plan.cluster).devices_per_host)


def takes_gpus(to: str, plan: Plan) -> bool:
    """Whether the processes of a plan take GPUs, by its devices. Raises LaunchError where these are of the user's own
    description and name, and may be CPUs."""
    if plan.cluster in known_clusters():
        return plan.cluster != LOCAL_CPU
    names = plan.known.workload.device.split(" and ") if plan.known is not None else [""]
    known = [is_gpu(name) for name in names]
    if None in known and to in FORMATS and to not in _NAME_DEVICES:
        raise LaunchError(f"the plan's cluster {plan.cluster!r} is of a description of your own, which does not say "
                          "whether its devices are GPUs: write --gpus or --no-gpus")
    return any(known)


def literal(words: Sequence[str]) -> list[str]:
    """Words for a container's command, where Kubernetes takes $(NAME) for a variable, and $$ for one dollar."""
    return [word.replace("$", "$$") for word in words]


def _hosts(job: Job) -> Sequence[str]:
    if len(set(job.hosts)) != job.nodes:
        named = ", ".join(job.hosts) or "none"
        raise LaunchError(f"--nodes is {job.nodes} and --hosts names {len(set(job.hosts))} ({named}): write "
                          "--hosts a,b with the address of each, once")
    return job.hosts


def image_of(image: str | None) -> str:
    """Raises LaunchError where there is none."""
    if image is None:
        raise LaunchError("containers need an image, with autoparallel and the script in it: --image registry/name:tag")
    return image


def _pod(job: Job, container: str, command: Sequence[str], variables: Sequence[Any]) -> dict[str, Any]:
    return {"containers": [{"name": container, "image": image_of(job.image), "command": list(command),
                            "env": [_plan_variable(), *variables], **_resources(job, "resources"),
                            "volumeMounts": [{"name": "plan", "mountPath": _PLAN_FOLDER}]}],
            "volumes": [{"name": "plan", "configMap": {"name": f"{job.name}-plan"}}]}


def _resources(job: Job, key: str) -> dict[str, Any]:
    return {key: {"limits": {"nvidia.com/gpu": str(job.per_node)}}} if job.gpus else {}


def _plan_variable() -> dict[str, str]:
    return {"name": PLAN_FILE, "value": _MOUNTED}


def _with_plan(job: Job, document: Mapping[str, Any]) -> str:
    """A ConfigMap with the plan, compressed, and the document. Raises LaunchError for plans that none holds."""
    text = base64.b64encode(packed(Path(job.plan_file).read_bytes())).decode()
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{job.name}-plan"},
                  "binaryData": {Path(_MOUNTED).name: text}}
    size = len(json.dumps(config_map))
    if size > _CONFIG_MAP_BYTES * 0.95:
        raise LaunchError(f"the compressed plan takes {size} bytes, and a ConfigMap holds {_CONFIG_MAP_BYTES}: put it "
                          f"into the image and set {PLAN_FILE} there")
    large = "" if size < _ANNOTATION_BYTES * 0.95 else (
        f"# The plan takes {size} bytes, and kubectl apply copies it to annotations, which hold {_ANNOTATION_BYTES}: "
        "write\n# kubectl apply --server-side -f FILE, or kubectl create -f FILE.\n")
    return large + yaml_of(config_map, document)


def _device(plan: Plan) -> str:
    """SkyPilot's name of the cluster's device."""
    for known, name in (("h200", "H200"), ("h100", "H100"), ("a100", "A100-80GB")):
        if known in plan.cluster.lower():
            return name
    raise LaunchError(f"the plan's cluster {plan.cluster!r} has devices that SkyPilot has no name for here: give "
                      "--no-gpus, and accelerators in the file")


def check_name(name: str) -> None:
    """Raises LaunchError for a name that Kubernetes would not take."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name):
        raise LaunchError(f"the job's name {name!r} cannot be: lower-case letters, digits and dashes are required, a "
                          "letter first, at most 63 of them")


def yaml_of(*documents: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump_all(documents, sort_keys=False, width=120))


__all__ = ["FORMATS", "PORT", "Job", "check_name", "check_options", "image_of", "literal", "manifest", "yaml_of"]
